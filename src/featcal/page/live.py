"""One more recipe for a page that is open: what `featcal explore` answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from featcal.core.errors import InputError
from featcal.core.spec import parse
from featcal.page import sentences, tables
from featcal.page.content import Content
from featcal.page.entries import Entry, check_train, clip_and_tail, sweep
from featcal.page.html import rows_html
from featcal.report.comparison import NONE, compare


def answer(content: Content, recipe: str) -> dict[str, Any]:
    """Fits a recipe as the page's own were fitted, and gives all that the page shows of it.

    Returns:
        `entry`, as in the page's JSON; `rows`, an HTML row for each table by its name; `sweep`, or
        None; `words`, sentences for the reader.

    Raises:
        InputError: for text that is no recipe, or one that this pack cannot serve.
    """
    scene, settings = content.scene, content.comparison.settings
    if recipe.strip() == NONE:
        raise InputError("none is the model as it is, which the page shows already: give a recipe")
    calibrator = parse(recipe)
    check_train(calibrator)
    if calibrator.needs_features and not scene.has_features:
        raise InputError(f"{calibrator!r} works on features, and this pack holds logits alone")
    asked = {key: settings[key] for key in ("bins", "resamples", "seed")}
    with scene.calmly():
        found = compare(scene.fit, scene.test, [NONE, recipe], scene.head, **asked)
        entry = Entry.of(scene, found[1])
        clip = clip_and_tail(found[1].calibrator)
        swept = () if clip is None else sweep(scene, dict([clip]))
    rows = {
        "comparison": tuple(map(_beside_others, tables.comparison_table(found).rows[1])),
        "counts": tables.counts_row(entry),
        "entropy": tables.entropy_row(entry),
        "changed": tables.changed_row(entry),
    }
    differences = found.as_json()["rows"][1]["differences"]
    return {
        "entry": {**entry.as_json(), "differences": differences},
        "rows": rows_html(rows),
        "sweep": swept[0].as_json() if swept else None,
        "words": [sentences.entropy_words(entry.entropy), sentences.changed_words(entry.changed)],
    }


def _beside_others(cell: tables.Cell) -> tables.Cell:
    """The best of two is not the best of the page: it was held against the model as it is alone."""
    return replace(cell, mark="better") if cell.mark == "best" else cell
