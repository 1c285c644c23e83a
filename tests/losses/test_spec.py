"""Losses as text: read, never evaluated, and the repr of every loss parses back."""

import json
from importlib.resources import files

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from featcal import InputError
from featcal.losses import CE, LOSSES, FLSc, Focal, parse_loss

PLUS = st.floats(0, 1e6)
ARGUMENTS = {
    "ce": {},
    "brier": {},
    "max_entropy": {"beta": PLUS},
    "label_smoothing": {
        "alpha": st.floats(0, 1, exclude_max=True),
        "spread": st.sampled_from(["others", "all"]),
    },
    "focal": {"gamma": PLUS},
    "flsd": {
        "low": PLUS,
        "high": PLUS,
        "threshold": st.floats(0, 0.5),
        "closed_form": st.booleans(),
    },
    "flsc": {"gammas": st.tuples(PLUS, PLUS, PLUS)},
    "dual_focal": {"gamma": PLUS},
    "adafocal": {
        "bins": st.integers(1, 40),
        "rate": st.floats(1e-6, 10),
        "start": st.floats(0.2, 20),
        "switch": st.floats(1e-3, 0.2),
        "smallest": st.floats(-9, -0.2),
        "largest": st.floats(20, 99),
    },
    "mmce": {
        "weight": PLUS,
        "variant": st.sampled_from(["weighted", "plain"]),
        "form": st.sampled_from(["intended", "published"]),
    },
    "soft_ece": {
        "weight": PLUS,
        "bins": st.integers(1, 40),
        "temperature": st.floats(1e-9, 10),
        "norm": st.sampled_from([1, 2]),
    },
}


def test_the_strategies_cover_every_argument():
    for name, loss in LOSSES.items():
        assert set(ARGUMENTS[name]) | {"reduction"} == set(loss.arguments())


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_repr_parses_back(data):
    name = data.draw(st.sampled_from(sorted(ARGUMENTS)))
    known = {**ARGUMENTS[name], "reduction": st.sampled_from(["mean", "sum"])}
    given_ = data.draw(st.fixed_dictionaries({}, optional=known))
    loss = LOSSES[name](**given_)
    again = parse_loss(repr(loss))
    assert again == loss
    assert repr(again) == repr(loss)
    assert hash(again) == hash(loss)


@pytest.mark.parametrize(
    ("text", "loss"),
    [
        ("ce", CE()),
        (" ce( ) ", CE()),
        ("focal(gamma=3)", Focal()),
        ("focal(gamma=2)", Focal(gamma=2.0)),
        ("focal(reduction='sum', gamma=2)", Focal(gamma=2.0, reduction="sum")),
        ("flsc(gammas=(4, 2, 1))", FLSc(gammas=(4.0, 2.0, 1.0))),
        ("flsc(gammas=[4, 2, 1])", FLSc(gammas=(4.0, 2.0, 1.0))),
    ],
)
def test_texts_are_read(text, loss):
    assert parse_loss(text) == loss


def test_defaults_are_not_repeated():
    assert repr(parse_loss("focal(gamma=3.0, reduction='mean')")) == "focal"
    assert repr(parse_loss("adafocal(bins=15)")) == "adafocal"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("focl", "no loss is called 'focl'; did you mean focal[?] There are adafocal, brier, ce"),
        ("cross_entropy", "no loss is called 'cross_entropy'; did you mean ce[?]"),
        ("xyz", "no loss is called 'xyz'; there are adafocal"),
        ("focal(3)", r"focal takes arguments by name only, as in focal\(gamma=3.0, reduction"),
        ("focal(g=3)", r"focal has no argument 'g': it takes gamma=3.0, reduction='mean'$"),
        ("focal(gama=3)", r"no argument 'gama': did you mean gamma\? It takes gamma=3.0"),
        ("adafocal(edges=[1])", "adafocal has no argument 'edges': it takes bins=15"),
        ("focal(**{})", "focal has no argument"),
        ("focal(gamma=x)", "gamma=x is not a literal"),
        ("focal(gamma=__import__('os'))", "is not a literal"),
        ("focal(gamma=2, gamma=3)", "does not parse|is given gamma twice"),
        ("ce | brier", "cannot read 'ce . brier'; use the name of one loss and literal"),
        ("ce + brier", "cannot read"),
        ("[ce]", "cannot read"),
        ("ce(", "does not parse: write one loss, for example 'focal.gamma=3.'"),
        ("", "loss is empty: write for example 'focal.gamma=3.'"),
        ("c" * 3000, "loss is 3000 characters long: the limit is 2000"),
        ("focal(gamma='3')", "focal: gamma is '3'"),
        ("focal(gamma=1e999)", "focal: gamma is inf"),
    ],
)
def test_everything_else_is_refused_by_name(text, says):
    with pytest.raises(InputError, match=says):
        parse_loss(text)


@pytest.mark.parametrize("text", [None, 3, CE()])
def test_what_is_no_text_is_refused(text):
    with pytest.raises(InputError, match=f"loss is a {type(text).__name__}: pass text, as in"):
        parse_loss(text)


WORDS = [*LOSSES, "(", ")", "=", "gamma", "reduction", "'sum'", "3", ",", "*", "[", "-", " ", "|"]


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.text(max_size=40), st.lists(st.sampled_from(WORDS), max_size=9).map("".join)))
@example("focal(gamma=" + "9" * 400 + ")")
@example("focal(gamma=1j)")
@example("(" * 900)
def test_any_text_gives_a_loss_or_an_input_error(text):
    try:
        loss = parse_loss(text)
    except InputError:
        return
    assert parse_loss(repr(loss)) == loss


def test_titles_are_the_columns_of_the_papers_table():
    text = files("featcal").joinpath("assets/paper/tables.json").read_text()
    (table,) = [t for t in json.loads(text)["tables"] if t["name"] == "train-time"]
    columns = {column[0] for column in table["columns"]}
    titles = {loss.title for loss in LOSSES.values()}
    assert columns <= titles
    assert len(titles) == len(LOSSES)


def test_a_text_is_enough_to_train_with(batch):
    logits, labels = batch()
    assert parse_loss("flsd").at(0.5).to("cpu")(logits, labels).dtype == torch.float64
