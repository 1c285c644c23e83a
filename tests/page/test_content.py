"""What the page shows is what compare and the analyses give."""

import json

import pytest
import torch

import featcal
from featcal import Batch, InputError, write_pack
from featcal.analysis import ChangedPredictions, ClipSweep, EntropyGrowth
from featcal.page import Content
from featcal.page.content import SURE
from featcal.page.html import comparison_table, page_words
from featcal.page.serve import Live
from featcal.page.verdict import idle
from featcal.report.compare import DEFAULT_RECIPES

FEW = {"resamples": 100}


@pytest.fixture(scope="module")
def compared(pack):
    return featcal.compare(pack.split("val"), pack.split("test"), head=pack.head, resamples=200)


def test_the_rows_are_those_of_compare(content, compared):
    body = content.as_json()["recipes"]
    assert [row["recipe"] for row in body] == list(DEFAULT_RECIPES)
    for mine, theirs in zip(body, compared.as_json()["rows"], strict=True):
        for key in ("n", "metrics", "intervals", "differences"):
            assert mine[key] == theirs[key]


def test_json_is_strict_and_complete(content):
    body = content.as_json()
    text = json.dumps(body, allow_nan=False)
    assert json.loads(text) == body
    assert body["format"] == "featcal.report"
    assert body["about"]["fitted_on"] == {"split": "val", "rows": 600}
    assert body["about"]["scored_on"] == {"split": "test", "rows": 900}
    assert len(body["about"]["pack"]["sha256"]) == 64
    assert body["about"]["settings"]["seed"] == 0
    assert [sweep["recipe"] for sweep in body["sweeps"]] == ["clip", "clip | temperature"]
    assert set(body["classes"]) == {"before", "after"}


def test_the_analyses_are_those_of_the_fitted_recipe(content, pack, compared):
    clip, place = compared[2].calibrator, 2
    entry = content.entries[place]
    of = pack.split("test"), clip, pack.head
    growth = EntropyGrowth.of(*of, confidence=SURE)
    assert entry.entropy.as_json() == growth.as_json()
    assert entry.changed.as_json() == ChangedPredictions.of(*of).as_json()
    diagram = entry.diagram.diagram
    assert diagram.ece == pytest.approx(compared[place].scores.metrics["ece"], abs=1e-12)
    assert torch.equal(diagram.bins.count, compared[place].scores.bins.count)


def test_a_sweep_marks_the_threshold_of_the_fit(content, compared):
    clip, both = content.sweeps
    fitted = float(compared[2].calibrator.threshold)
    assert float(clip.thresholds[clip.fitted]) == fitted
    assert float(both.thresholds[both.fitted]) == fitted
    assert isinstance(clip, ClipSweep)
    at_fit = clip.test.ece[clip.fitted]
    assert float(at_fit) == pytest.approx(compared[2].scores.metrics["ece"], abs=1e-6)


def test_without_features_the_clip_parts_are_left_out(logits_pack):
    found = Content.of(logits_pack, **FEW)
    assert [entry.recipe for entry in found.entries] == ["none", "temperature"]
    assert (found.units, found.values, found.sweeps) == (None, None, ())
    assert "logits alone" in found.notes[0]


def test_without_features_a_recipe_that_needs_them_is_refused(logits_pack):
    with pytest.raises(InputError, match="works on features"):
        Content.of(logits_pack, ["clip"], **FEW)


def test_none_comes_first_and_once(pack):
    found = Content.of(pack, ["temperature", "none", "temperature"], **FEW)
    assert [entry.recipe for entry in found.entries] == ["none", "temperature"]
    assert [sweep.recipe for sweep in found.sweeps] == ["clip", "clip | temperature"]


def test_a_tail_that_was_asked_for_can_be_explored(pack):
    found = Content.of(pack, ["clip | temperature | temperature"], **FEW)
    assert found.sweeps[-1].recipe == "clip | temperature | temperature"


def test_a_fitted_calibrator_is_scored_as_it_is(pack):
    fitted = featcal.parse("temperature").fit(pack.split("val"), pack.head)
    found = Content.of(pack, ["temperature"], {"a.safetensors": fitted}, **FEW)
    own, given = found.entries[1:]
    assert given.recipe == "temperature from a.safetensors"
    assert given.file == "a.safetensors"
    assert given.row.scores.metrics == own.row.scores.metrics
    numbered = Content.of(pack, ["none"], [fitted], **FEW)
    assert numbered.entries[1].recipe == "temperature from calibrator 1"


def test_what_cannot_be_is_refused(pack):
    with pytest.raises(InputError, match="both 'val'"):
        Content.of(pack, fit="val", test="val")
    with pytest.raises(InputError, match="resamples is 0"):
        Content.of(pack, resamples=0)
    with pytest.raises(InputError, match="no split 'dev'"):
        Content.of(pack, test="dev")


def test_another_recipe_is_answered_as_the_page_has_its_own(content):
    answer = Live(content).answer
    found = answer("temperature | temperature")
    assert found["entry"]["recipe"] == "temperature | temperature"
    assert found["sweep"] is None
    assert set(found["rows"]) == {"comparison", "counts", "entropy", "changed"}
    assert '<th scope="row"><code>temperature | temperature</code>' in found["rows"]["comparison"]
    same = answer("clip")
    own = content.as_json()["recipes"][2]
    assert same["entry"]["metrics"] == own["metrics"]
    assert same["entry"]["differences"] == own["differences"]
    assert same["sweep"]["recipe"] == "clip"
    json.dumps(same, allow_nan=False)


def test_a_clip_keeps_its_arguments_and_its_own_threshold(pack, compared):
    """Another search ends elsewhere: its threshold is not that of the plain clip."""
    recipes = ["clip(criterion='ece')", "clip(criterion='ece') | temperature"]
    found = Content.of(pack, recipes, **FEW)
    names = ["clip", "clip | temperature", *recipes]
    assert [sweep.recipe for sweep in found.sweeps] == names
    fitted = [float(sweep.thresholds[sweep.fitted]) for sweep in found.sweeps]
    plain, other = (
        float(one.threshold) for one in (compared[2].calibrator, found.comparison[1].calibrator)
    )
    assert plain != other
    assert fitted == [plain, plain, other, other]
    assert found.sweeps[1].test is found.sweeps[3].test  # one tail is swept once
    assert len(page_words(found)["sweeps"]) == 2
    answered = Live(found).answer("clip(min_accuracy=0.99) | temperature")["sweep"]
    assert answered["recipe"] == "clip(min_accuracy=0.99) | temperature"


def test_a_file_is_explored_under_its_own_name(pack):
    clip = featcal.parse("clip").assign(threshold=0.5)
    found = Content.of(pack, ["clip"], {"a.safetensors": clip}, **FEW)
    assert [sweep.recipe for sweep in found.sweeps][2:] == ["clip from a.safetensors"]
    assert float(found.sweeps[2].thresholds[found.sweeps[2].fitted]) == 0.5
    assert float(found.sweeps[0].thresholds[found.sweeps[0].fitted]) != 0.5


def _stars(answered):
    rows = {answered["entry"]["recipe"]: answered["rows"]["comparison"], **answered["judged"]}
    return {name: html.count("★ best") for name, html in rows.items()}


def _marked(comparison):
    rows = comparison_table(comparison).rows
    return {row[0].text: sum(cell.mark == "best" for cell in row) for row in rows}


def test_stars_are_judged_among_all_that_is_shown(pack):
    """As a comparison of the same recipes would have them, whichever were typed in."""
    found = Content.of(pack, ["vector"], **FEW)
    live = Live(found)
    live.answer("temperature")
    stars = _stars(live.answer("clip | temperature", ["none", "temperature", "never seen"]))
    recipes = ["none", "vector", "temperature", "clip | temperature"]
    wanted = _marked(
        featcal.compare(pack.split("val"), pack.split("test"), recipes, pack.head, **FEW)
    )
    assert stars == wanted
    assert {name: wanted[name] for name in ("none", "vector")} != _marked(found.comparison)


def test_what_was_tried_is_not_fitted_again(content, monkeypatch):
    live = Live(content)
    first = live.answer("vector")
    monkeypatch.setattr("featcal.page.serve.compare", None)
    assert live.answer(" vector ")["rows"] == first["rows"]
    assert live.answer("clip")["entry"]["metrics"] == content.as_json()["recipes"][2]["metrics"]


def test_a_step_that_does_nothing_is_said_in_the_answer(content):
    live = Live(content)
    found = live.answer("temperature | temperature")
    told = idle([live.known["temperature | temperature"]])
    assert found["words"][: len(told)] == told
    assert "changes nothing" in " ".join(told)


def test_one_decision_about_signed_features(tmp_path, made):
    """The only negative feature is in a row nobody is sure of: both figures know of it."""
    known = made(900)
    features = known.features.clone()
    sure = known.head(features).softmax(1).amax(1)
    features[600 + int(sure[600:].argmin())] -= features.abs().max()
    parts = {"val": slice(600), "test": slice(600, None)}
    splits = {name: Batch(None, known.labels[p], features[p]) for name, p in parts.items()}
    pack = write_pack(tmp_path / "pack", splits, head=known.head)
    found = Content.of(pack, ["none"], **FEW)
    assert found.units.absolute
    assert found.values.signed


def test_what_cannot_be_answered_is_said(content, logits_pack):
    for recipe, words in (
        ("nonsense", "nonsense"),
        ("", "recipe"),
        ("none", "as it is"),
        ("density", "trained on"),
    ):
        with pytest.raises(InputError, match=words):
            Live(content).answer(recipe)
    bare = Content.of(logits_pack, ["none"], **FEW)
    with pytest.raises(InputError, match="logits alone"):
        Live(bare).answer("clip")


@pytest.mark.shared
def test_the_claim_of_the_paper_on_its_own_network(shared_file, tmp_path):
    """Clipping takes more certainty from confident wrong answers than from right ones."""
    file = shared_file("packs", "cifar10-resnet50.npz")
    pack = featcal.import_files([file], tmp_path / "pack")
    found = Content.of(pack, ["clip"], **FEW)
    entropy = found.entries[1].entropy
    assert entropy.interval.low > 0
    assert found.summary.kind == "over"
