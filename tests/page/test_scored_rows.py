"""What the page says of the scored rows: what is known of them, and no more."""

import pytest

from featcal import parse
from featcal.page import Content, render
from featcal.page.html import comparison_table, page_tables
from featcal.page.serve import Live

FEW = {"resamples": 100}


@pytest.fixture(scope="module")
def files(pack):
    """A calibrator fitted on each split, and one that does not say on what."""
    fits = {name: parse("temperature").fit(pack.split(name), pack.head) for name in ("val", "test")}
    bare = parse("temperature").assign(temperature=float(fits["val"].temperature))
    return {**fits, "bare": bare}


def of_file(pack, files, name, recipes=("none",)):
    return Content.of(pack, recipes, {f"{name}.safetensors": files[name]}, **FEW)


def answers(content):
    return {point.question: point.answer for point in content.summary.points}


def test_nothing_is_claimed_of_files(pack, page, files):
    assert "No recipe was fitted on them for this page. They decide what is recommended" in page
    assert "calibrator from a file" not in page
    other = render(of_file(pack, files, "val"))
    assert (
        "; a calibrator from a file may have been, which is noticed only where it was fitted on "
        "exactly these rows. They decide"
    ) in other


def test_a_file_that_was_fitted_on_the_scored_rows_is_found_out(pack, files):
    found = of_file(pack, files, "test")
    assert (found.summary.pick, found.summary.seen, found.pick) == (None, (1,), 0)
    assert found.summary.cautions[0] == (
        "Temperature scaling from test.safetensors was fitted on the very rows that are scored "
        "here: as many rows, with the same loss before the fit. What it seems to gain says nothing "
        "about other rows, so it is not recommended."
    )
    told = answers(found)
    assert told["What helped most?"].startswith("Nobody can tell: nothing was tried that was")
    assert told["Is the gain real?"].startswith("Nobody can tell: temperature scaling from test")
    assert "Use" not in told["What should I do?"]
    assert found.summary.command.startswith("featcal compare ")


def test_a_fair_recipe_beside_it_is_recommended(pack, files):
    found = of_file(pack, files, "test", ["temperature"])
    assert (found.summary.pick, found.summary.seen) == (1, (2,))
    assert "test.safetensors" not in answers(found)["What helped most?"]
    assert found.as_json()["summary"]["seen"] == [2]


def test_it_is_not_judged_in_the_comparison(pack, files):
    """A fit on the scored rows has the lowest loss of its kind, which is no merit."""
    found = of_file(pack, files, "test", ["temperature"])
    unjudged, judged = (
        comparison_table(found.comparison, seen).rows for seen in ((), found.summary.seen)
    )
    assert any(cell.mark == "best" for cell in unjudged[2])
    assert not any(cell.mark for cell in judged[2])
    assert any(cell.mark == "best" for cell in judged[1])
    assert judged[2][0].small.endswith("test.safetensors, fitted on these very rows")
    assert "fitted on these very rows" in page_tables(found)["comparison"].rows[2][0].small


def test_a_typed_recipe_does_not_bring_its_stars_back(pack, files):
    found = of_file(pack, files, "test")
    judged = Live(found).answer("temperature")["judged"]
    assert "fitted on these very rows" in judged["temperature from test.safetensors"]
    assert "★" not in judged["temperature from test.safetensors"]


def test_a_file_that_was_fitted_on_the_fit_split_needs_no_caution(pack, files):
    found = of_file(pack, files, "val")
    assert (found.summary.pick, found.summary.cautions) == (1, ())


def test_it_is_said_where_nobody_knows_what_rows_a_file_was_fitted_on(pack, files):
    found = of_file(pack, files, "bare")
    assert found.summary.pick == 1
    assert found.summary.cautions == (
        "It is not known what rows temperature scaling from bare.safetensors was fitted on: if "
        "rows that are scored here were among them, it looks better than it is.",
    )


def test_whiskers_are_intervals_of_the_share(page):
    assert "Whiskers: the 95\xa0% interval of that share." in page.replace("95 %", "95\xa0%")
