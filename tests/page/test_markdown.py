"""The report for a pull request."""

import re
from dataclasses import replace

from featcal.page import html as markdown
from featcal.page.html import comparison_table


def test_numbers_are_explained_and_the_clip_has_its_control(content):
    text = markdown(content)
    assert text.startswith(f"## {content.summary.headline}")
    assert "ECE, expected calibration error: how far" in text
    assert "NLL, negative log-likelihood: how unlikely" in text
    (clip,) = (line for line in text.splitlines() if line.startswith("**Feature clipping takes"))
    growth = {entry.recipe: entry.entropy for entry in content.entries}
    assert f"{growth['clip'].gap:+.4f}" in clip
    assert f"{growth['temperature'].gap:+.4f}" in clip


def test_bold_is_what_the_page_gives_a_star(content):
    """Not the best number: no other may be as good."""
    text = markdown(content)
    table = text.split("| recipe | accuracy % | gap % |")[1].split("\n\n")[0]
    stars = [cell for row in comparison_table(content.comparison).rows for cell in row]
    best = [cell.text for cell in stars if cell.mark == "best"]
    assert re.findall(r"\*\*(.*?)\*\*", table) == best
    assert table.count(" better |") == sum(cell.mark == "better" for cell in stars)
    assert "- In bold: the best of its column, where no other may be as good" in text
    assert "- What was learned: `temperature` T = " in text


def test_rows_that_tie_are_not_bold(content):
    """The same row twice beside the raw one: no best that all others are known to miss."""
    twin = replace(content.comparison, rows=(content.comparison[0],) * len(content.comparison))
    table = markdown(replace(content, comparison=twin)).split("| gap % |")[1].split("\n\n")[0]
    assert "**" not in table
