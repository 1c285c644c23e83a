"""Names and calls as text, whatever they stand for; recipes and losses test the rest."""

import pytest

from featcal.core.checks import InputError
from featcal.core.text import Reader, shown

SHAPES = Reader(
    text="shape",
    item="shape",
    known={"dot": lambda: "dot", "box": lambda width=1, height=2: (width, height)},
    example="box(width=2)",
    grammar="a shape",
    pieces="a name",
)


def test_a_name_or_a_call_is_made():
    assert SHAPES.read("dot") == "dot"
    assert SHAPES.read(" box( height=-3 ) ") == (1, -3)


def test_a_builder_may_put_several_together():
    both = SHAPES.read("dot, box", lambda node, text: [SHAPES.one(e, text) for e in node.elts])
    assert both == ["dot", (1, 2)]


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


def test_long_texts_are_shown_by_their_ends():
    assert shown("a" * 90) == repr("a" * 50 + " ... " + "a" * 20)
