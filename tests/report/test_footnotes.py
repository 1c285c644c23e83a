"""Letters of marks and the cut of wide tables: nothing is lost, nothing is cut."""

import re

import pytest

from featcal.report.paper import Grid, note, paper_grid, paper_table, paper_tables

NAMES = [table.name for table in paper_tables()]


@pytest.mark.parametrize("name", NAMES)
def test_every_mark_of_a_cell_has_its_letter_somewhere(name):
    table, grid = paper_table(name), paper_grid(paper_table(name))
    letters = {mark: letter for mark, (letter, _) in zip(table.marks, grid.notes, strict=True)}
    for i, row in enumerate(table.cells):
        for j, cell in enumerate(row):
            around = (grid.title, grid.headings[j + 1], grid.rows[i][0], grid.rows[i][j + 1])
            found = "".join("".join(re.findall(r"\[([a-z]+)\]", text)) for text in around)
            assert sorted(found) == sorted(letters[mark] for mark in cell.marks)
    assert [text for _, text in grid.notes] == [note(mark) for mark in table.marks]


@pytest.mark.parametrize("width", [60, 80, 100, 120])
@pytest.mark.parametrize("name", NAMES)
def test_no_block_is_wider_than_the_terminal(name, width):
    grid = paper_grid(paper_table(name))
    blocks = list(grid.blocks(width))
    assert [h for b in blocks for h in b.headings[1:]] == list(grid.headings[1:])
    for block in blocks:
        columns = zip(block.headings, *block.rows, strict=True)
        widest = [
            max(len(x.replace("**", "")) for c in col for x in c.split("\n")) for col in columns
        ]
        assert sum(w + 3 for w in widest) + 1 <= width
        assert [row[0] for row in block.rows] == [row[0] for row in grid.rows]


def test_a_group_too_wide_is_parted_and_a_column_too_wide_is_shown_whole():
    grid = Grid("t", ("", "a", "b"), (("label", "0.123456789", "9.876543210"),), together=2)
    for width in (24, 5):
        first, second = grid.blocks(width)
        assert first.rows + second.rows == (("label", "0.123456789"), ("label", "9.876543210"))


def test_groups_stay_together():
    grid = Grid("t", ("", "a", "b", "c", "d"), (("x", "1", "2", "3", "4"),), together=2)
    assert [block.headings for block in grid.blocks(14)] == [("", "a", "b"), ("", "c", "d")]


def test_bold_does_not_count_as_width():
    grid = Grid("t", ("", "a", "b"), (("x", "**1**", "**2**"),))
    assert len(list(grid.blocks(4 + 4 + 4 + 1))) == 1


def test_markdown_is_one_line_a_row():
    grid = paper_grid(paper_table("vit"))
    lines = grid.markdown().splitlines()
    assert len(lines) == 2 + len(grid.rows)
    assert {line.count("|") for line in lines} == {len(grid.headings) + 1}
    assert "**5.04▼**" in lines[-1]


def test_numbers_stand_at_the_right_and_words_at_the_left():
    rows = (("a", "**1.2**", "why"), ("b", "-", "1 of them"), ("c", "", "no"))
    assert Grid("t", ("", "value", "words"), rows).markdown().splitlines()[1] == "|---|---:|---|"
    assert Grid("t", ("", "value"), ()).markdown().splitlines()[1] == "|---|---:|"
