"""How closely a page looks: as closely as the size of the rows allows."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from featcal import parse
from featcal.page import Content
from featcal.page import content as entries
from featcal.page.serve import Live


def sized(scene, fit, test, classes):
    """The same scene, as if it had so many rows and classes."""
    pack = replace(scene.pack, manifest=replace(scene.pack.manifest, classes=classes))
    splits = (SimpleNamespace(rows=rows) for rows in (fit, test))
    return replace(scene, pack=pack, fit=next(splits), test=next(splits))


@pytest.mark.parametrize(
    ("classes", "points"),
    [(10, entries.POINTS), (100, entries.POINTS), (400, 44), (1000, entries.FEWEST)],
)
def test_many_classes_get_fewer_thresholds(classes, points, content):
    assert sized(content.scene, 5000, 10_000, classes).points == points


def test_few_thresholds_hold_what_was_fitted_and_what_is_best(pack, content, monkeypatch):
    monkeypatch.setattr(entries, "AFFORDED", 0)
    few = Content.of(pack, resamples=100).sweeps
    assert [len(sweep.thresholds) for sweep in few] == [entries.FEWEST] * len(few)
    for coarse, fine in zip(few, content.sweeps, strict=True):
        chosen = float(fine.thresholds[fine.fitted])
        assert float(coarse.thresholds[coarse.fitted]) == chosen
        assert coarse.best == int(coarse.val.nll.argmin())
        same = float(fine.test.nll[fine.fitted])
        assert float(coarse.test.nll[coarse.fitted]) == pytest.approx(same, rel=1e-6)


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("clip | vector", "vector takes too long"),
        ("clip | temperature | isotonic", "and isotonic takes too long"),
        ("clip | group", "and group needs features"),
        ("clip | temperature", ""),
        ("clip", ""),
        ("temperature", ""),
    ],
)
def test_why_a_recipe_is_not_in_the_explorer(recipe, words):
    told = entries.why_no_sweep(parse(recipe))
    assert words in told
    assert bool(told) == bool(words)


def test_the_answer_says_why_a_clip_is_not_in_the_explorer(content):
    found = Live(content).answer("clip | vector")
    assert found["sweep"] is None
    assert any("threshold explorer has no place" in sentence for sentence in found["words"])


def test_the_head_is_asked_once_for_all_the_rows_a_page_looks_at(content):
    seen = content.scene.seen
    assert seen.kept
    assert sum(len(batch) for batch in seen) == content.scene.test.rows
