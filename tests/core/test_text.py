"""Text that names things: read, never evaluated, and refused with an InputError otherwise."""

import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from featcal import METHODS, FeatureClip, InputError, Pipeline, Temperature, parse
from featcal.core.text import Reader


def test_names_calls_and_bars_are_read():
    found = parse(" clip( min_accuracy = 0.99 ,criterion='ece') |\ttemperature() ")
    assert isinstance(found, Pipeline)
    clip, temperature = found.steps_in_order()
    assert isinstance(clip, FeatureClip)
    assert isinstance(temperature, Temperature)
    assert (clip.min_accuracy, clip.criterion, clip.reference) == (0.99, "ece", False)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nope", "no method is called 'nope'; there are .*clip.*temperature"),
        ("clip(0.99)", r"clip takes arguments by name only, as in clip\(threshold=None"),
        ("clip(c=2)", r"clip has no argument 'c': did you mean threshold\?"),
        ("temperature(T=2)", r"no argument 'T': did you mean temperature\?"),
        ("clip(**{'a': 1})", r"clip has no argument '\*\*'"),
        ("clip(min_accuracy=x)", "min_accuracy=.?x.? is not a literal"),
        ("clip(min_accuracy=__import__('os').system('true'))", "is not a literal"),
        ("clip + temperature", r"cannot read 'clip \+ temperature'"),
        ("clip | 3", "cannot read '3'"),
        ("clip.__class__()", "cannot read"),
        ("__import__('os')", "no method is called '__import__'"),
        ("clip |", "does not parse"),
        ("clip\0", "does not parse"),
        (b"clip", "recipe is a bytes: pass text"),
        ("clip(criterion='nil')", "criterion is 'nil': choose nll, brier or ece"),
        ("clip(criterion=[])", "criterion is"),
        ("clip(min_accuracy='0.9')", "min_accuracy is '0.9'"),
        ("clip(min_accuracy=1e999)", "min_accuracy is inf"),
        ("clip(reference=1)", "reference is 1: give True or False"),
        ("temperature | clip", "temperature | clip"),
    ],
)
def test_everything_else_is_refused_by_name(text, says):
    with pytest.raises(InputError, match=says):
        parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "(" * 900 + "clip" + ")" * 900,
        "(" * 1999,
        "-" * 1900 + "1",
        "~" * 900 + "clip",
        "|".join(["a"] * 1000),
        "a" + ".b" * 900,
        "clip(min_accuracy=" + "-" * 900 + "1)",
        "clip(min_accuracy=" + "[" * 900 + "]" * 900 + ")",
    ],
    ids=lambda text: text[:12] + "...",
)
def test_deep_nesting_is_refused_and_nothing_worse(text):
    limit = sys.getrecursionlimit()
    with pytest.raises(InputError):
        parse(text)
    assert sys.getrecursionlimit() == limit


PIECES = [*METHODS, "|", "(", ")", "=", "min_accuracy", "criterion", "reference", ",", "'nll'"]
SYNTAX = ["0.99", "True", "None", "*", "**", "lambda", ":", ".", "[", "]", "{", "}", "-", "~", " "]
ODDITIES = ["f'{x}'", "1e400", "0x1", "...", "\\", "\n", "#", "await", "(x for x in y)", "'\\d'"]
WORDS = st.sampled_from([*PIECES, *SYNTAX, *ODDITIES])


@settings(max_examples=80, deadline=None)
@given(st.one_of(st.text(max_size=60), st.lists(WORDS, max_size=14).map("".join)))
@example("clip(criterion=[])")
@example("clip(criterion={})")
@example("clip(min_accuracy=" + "9" * 400 + ")")
@example("clip(min_accuracy=1j)")
def test_parse_gives_a_calibrator_or_an_input_error(text):
    try:
        found = parse(text)
    except InputError:
        return
    assert repr(parse(repr(found))) == repr(found)


SHAPES = Reader(
    text="shape",
    item="shape",
    known={"dot": lambda: "dot", "box": lambda width=1, height=2: (width, height)},
    example="box(width=2)",
    grammar="a shape",
    pieces="a name",
)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("bax", "no shape is called 'bax'; did you mean box[?] There are box, dot"),
        ("BOX", "no shape is called 'BOX'; did you mean box[?]"),
        ("box(Width=3)", r"no argument 'Width': did you mean width\?"),
        ("box(3)", r"box takes arguments by name only, as in box\(width=1, height=2\)"),
        ("dot(3)", "dot takes arguments by name only, and dot has none"),
        ("box(widht=3)", r"box has no argument 'widht': did you mean width\? It takes width=1, h"),
        ("box(size=3)", "box has no argument 'size': it takes width=1, height=2$"),
        ("dot(x=3)", "dot has no argument 'x': it takes none$"),
        ("dot, box", "cannot read '.dot, box.'; use a name"),
        ("dot(", r"shape 'dot\(' does not parse: write a shape"),
        ("", "shape is empty: write for example 'box.width=2.'"),
    ],
)
def test_the_words_of_a_refusal_are_the_readers(text, says):
    with pytest.raises(InputError, match=says):
        SHAPES.read(text)
