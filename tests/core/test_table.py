"""One table for terminals, Markdown and pages."""

import pytest

from featcal.core.table import Table, html_table, spelled


def test_columns_of_numbers_stand_at_the_right_and_an_empty_table_has_its_headings():
    rows = (("a", "**1.2**", "-3", "n/a", "c = 2"), ("b", "0.5", "4", "inf", "no-op"))
    lines = Table("", ("", "x", "y", "z", "fit"), rows).markdown().splitlines()
    assert lines[1] == "|---|---:|---:|---:|---|"
    assert lines[2] == "| a | **1.2** | -3 | n/a | c = 2 |"
    assert Table("", ("one", "two"), ()).markdown() == "| one | two |\n|---|---:|"
    assert Table("", ("a|b", "c\nd"), ()).markdown(numeric=(True, False)) == (
        "| a\\|b | c d |\n|---:|---|"
    )


WIDE = Table(
    "title",
    ("", "accuracy", "ECE\nor less", "NLL", "fit"),
    (("none", "**71.0**", "12.34", "1.0", "-"), ("clip", "71.0", "3.21", "0.9", "c = 2")),
    (("a", "a note"),),
    together=2,
)
# Of each column: a line, a space on either side, and its longest text, without the marks of bold.
WIDTHS = {"": 3 + 4, "accuracy": 3 + 8, "ECE\nor less": 3 + 7, "NLL": 3 + 3, "fit": 3 + 5}
LABELS, *MEASURED = WIDTHS


def headings(width, table=WIDE):
    return [block.headings for block in table.blocks(width)]


def test_a_table_is_parted_where_it_gets_too_wide_and_every_part_has_its_labels():
    pairs = [tuple(MEASURED[:2]), tuple(MEASURED[2:])]
    last = 1  # the line at its right end
    whole = sum(WIDTHS.values()) + last
    assert headings(whole) == [tuple(WIDTHS)]
    assert headings(whole - 1) == [(LABELS, *pair) for pair in pairs]
    pair = WIDTHS[LABELS] + sum(WIDTHS[one] for one in pairs[0]) + last
    assert headings(pair) == [(LABELS, *pair) for pair in pairs]
    # Columns that belong together do not fit: each goes where there is room.
    alone = [(LABELS, MEASURED[0]), (LABELS, MEASURED[1]), (LABELS, *pairs[1])]
    assert headings(pair - 1) == alone
    assert headings(1) == [(LABELS, one) for one in MEASURED]
    last_pair = WIDTHS[LABELS] + sum(WIDTHS[one] for one in pairs[1]) + last
    assert headings(last_pair)[-1] == (LABELS, *pairs[1])
    assert headings(last_pair - 1)[-2:] == [(LABELS, one) for one in pairs[1]]


def test_parts_of_a_table_hold_its_cells_and_what_is_said_of_it():
    first, second = WIDE.blocks(30)
    assert first.rows == (("none", "**71.0**", "12.34"), ("clip", "71.0", "3.21"))
    assert second.rows == (("none", "1.0", "-"), ("clip", "0.9", "c = 2"))
    assert (second.title, second.notes) == (WIDE.title, WIDE.notes)
    assert WIDE.document().startswith("title\n\n|  | accuracy |")
    assert WIDE.document().endswith("\n\n- [a] a note")


def test_a_notebook_shows_a_table_between_its_lines():
    rows = [("`a`", "<b>"), ("**c**", "d")]
    body = (
        "<tbody><tr><td><code>a</code></td><td>&lt;b&gt;</td></tr>"
        "<tr><td><b>c</b></td><td>d</td></tr></tbody></table>"
    )
    head = "<table><thead><tr><th>x</th><th>y</th></tr></thead>"
    assert html_table(("x", "y"), rows) == head + body
    assert html_table(("", ""), rows, above="one", below="`two`") == (
        f"<p>one</p><table>{body}<p><code>two</code></p>"
    )


@pytest.mark.parametrize("code", [0, 8, 11, 27, 31, 127, 128, 155, 159])
def test_what_would_act_on_a_terminal_is_spelled_out(code):
    assert spelled(f"cat{chr(code)}s") == f"cat\\x{code:02x}s"


@pytest.mark.parametrize("text", ["cat\tand\ndog", "Käse ~ " + chr(160)])
def test_other_text_stays(text):
    assert spelled(text) == text
