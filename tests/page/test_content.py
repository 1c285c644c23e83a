"""What the page shows is what compare and the analyses give, from rows that are read once."""

import json
import math
from dataclasses import replace
from unittest import mock

import pytest

import featcal
from featcal import InputError, parse, write_pack
from featcal.analysis import BeforeAfter, ChangedPredictions, ConfidentCounts, EntropyGrowth, base
from featcal.core import fit, memory
from featcal.data import PackSplit
from featcal.page import Content, render
from featcal.page import content as contents
from featcal.page.content import SURE, clipped
from featcal.page.html import comparison_table, page_words

FEW = {"resamples": 100}
SHOWN = ["none", "temperature", "clip", "clip | temperature"]


@pytest.fixture(scope="module")
def compared(pack):
    return featcal.compare(
        pack.split("val"), pack.split("test"), SHOWN, head=pack.head, resamples=200
    )


@pytest.fixture(scope="module")
def files(bare):
    """Pages with a calibrator fitted on each split, and one that does not say on what."""
    pack = bare.scene.pack
    fits = {name: parse("temperature").fit(pack.split(name), pack.head) for name in ("val", "test")}
    fits["bare"] = parse("temperature").assign(temperature=float(fits["val"].temperature))
    named = {name: {f"{name}.safetensors": one} for name, one in fits.items()}
    found = {name: Content.of(pack, ["none"], file, **FEW) for name, file in named.items()}
    return {**found, "both": Content.of(pack, ["temperature"], named["test"], **FEW)}


def test_the_rows_are_those_of_compare_and_json_is_strict_and_complete(content, compared):
    body = content.as_json()
    assert [row["recipe"] for row in body["recipes"]] == SHOWN
    for mine, theirs in zip(body["recipes"], compared.as_json()["rows"], strict=True):
        for key in ("n", "metrics", "intervals", "differences"):
            assert mine[key] == theirs[key]
    assert json.loads(json.dumps(body, allow_nan=False)) == body
    assert body["format"] == "featcal.report"
    assert body["about"]["fitted_on"] == {"split": "val", "rows": 600}
    assert body["about"]["scored_on"] == {"split": "test", "rows": 900}
    assert len(body["about"]["pack"]["sha256"]) == 64
    assert [sweep["recipe"] for sweep in body["sweeps"]] == ["clip", "clip | temperature"]
    assert set(body["classes"]) == {"before", "after"}


def test_the_analyses_are_those_of_the_fitted_recipe(content, pack, compared):
    entry, of = content.entries[2], (pack.split("test"), compared[2].calibrator, pack.head)
    assert entry.entropy.as_json() == EntropyGrowth.of(*of, confidence=SURE).as_json()
    assert entry.changed.as_json() == ChangedPredictions.of(*of).as_json()
    assert entry.counts.as_json() == ConfidentCounts.of(*of).as_json()
    diagram = BeforeAfter.of(*of, resamples=contents.BANDS).after
    assert {**diagram.as_json(), "title": "clip"} == entry.diagram.as_json()
    chosen = {row.recipe: row.calibrator for row in compared if row.calibrator is not None}
    for sweep in content.sweeps:
        fitted = chosen[sweep.recipe].steps_in_order()[0].threshold
        assert float(sweep.thresholds[sweep.fitted]) == float(fitted)
    at_fit = content.sweeps[0].test.ece[content.sweeps[0].fitted]
    assert float(at_fit) == pytest.approx(compared[2].scores.metrics["ece"], abs=1e-6)


def test_each_split_is_read_once_from_disk_and_the_scored_one_checked_once(pack):
    read, checked, looks = [], mock.Mock(wraps=base.survey), mock.Mock(wraps=fit._local_facts)
    plain = PackSplit.__iter__

    def counted(split):
        read.append(split.name)
        yield from plain(split)

    with (
        mock.patch.object(PackSplit, "__iter__", counted),
        mock.patch.object(base, "survey", checked),
        mock.patch.object(fit, "_local_facts", looks),
    ):
        Content.of(pack, **FEW)
    assert sorted(read) == ["test", "test", "val"]  # checked before it is kept
    assert checked.call_count == 2  # the scored rows, and the fitted ones for the sweep
    assert looks.call_count == 4  # with those of the fits; none for a threshold of the sweep


def test_rows_that_do_not_fit_into_memory_give_the_same_page(pack, content):
    with mock.patch.object(memory, "KEEP_BYTES", 0):
        found = Content.of(pack, ["temperature", "clip"], resamples=200)
    assert not isinstance(found.scene.seen.data, list)
    for mine, theirs in zip(found.entries, content.entries[:3], strict=True):
        assert mine.row.scores.metrics == theirs.row.scores.metrics
        assert mine.entropy.as_json() == theirs.entropy.as_json()


def test_without_features_the_clip_parts_are_left_out(bare):
    numbered = Content.of(bare.scene.pack, ["none"], [parse("temperature")], **FEW)
    assert numbered.entries[1].recipe == "temperature from calibrator 1"
    assert [entry.recipe for entry in bare.entries] == ["none", "auto", "temperature"]
    assert (bare.units, bare.values, bare.sweeps) == (None, None, ())
    assert "logits alone" in bare.notes[0]
    with pytest.raises(InputError, match="works on features"):
        Content.of(bare.scene.pack, ["clip"], **FEW)


def test_none_comes_first_and_recipes_keep_their_names_and_thresholds(pack, compared):
    """Another search ends elsewhere: its threshold is not that of the plain clip."""
    recipes = ["clip(criterion='ece')", "none", "clip(criterion='ece') | temperature"]
    clip = parse("clip").assign(threshold=0.5)
    found = Content.of(pack, [*recipes, recipes[0]], {"a.safetensors": clip}, **FEW)
    own = [recipes[0], recipes[2], "clip from a.safetensors"]
    assert [entry.recipe for entry in found.entries] == ["none", *own]
    assert found.entries[3].file == "a.safetensors"
    assert [sweep.recipe for sweep in found.sweeps] == ["clip", "clip | temperature", *own]
    plain = float(compared[2].calibrator.threshold)
    warm = float(parse("clip | temperature").fit(pack.split("val")).steps[0].threshold)
    other = float(found.comparison[1].calibrator.threshold)
    jointly = float(found.comparison[2].calibrator.steps[0].threshold)
    fitted = [float(sweep.thresholds[sweep.fitted]) for sweep in found.sweeps]
    assert fitted == [plain, warm, other, jointly, 0.5]
    assert plain != other
    assert found.sweeps[1].test is found.sweeps[3].test  # one tail is swept once
    assert len(page_words(found)["sweeps"]) == 2


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"fit": "val", "test": "val"}, "both 'val'"),
        ({"resamples": 0}, "resamples is 0"),
        ({"test": "dev"}, "no split 'dev'"),
        ({"recipes": ["density"]}, "trained on"),
    ],
)
def test_what_cannot_be_is_refused(pack, options, text):
    with pytest.raises(InputError, match=text):
        Content.of(pack, **options)


def test_a_pack_without_a_split_to_score_is_told_of_cross_fitting(pack, tmp_path):
    only = write_pack(tmp_path / "only", {"val": pack.split("val")}, head=pack.head)
    with pytest.raises(InputError, match=r"no split 'test'.*featcal compare \S*only --folds 5"):
        Content.of(only)


def test_many_classes_get_fewer_thresholds(content, monkeypatch):
    monkeypatch.setattr(contents, "POINTS", 60)
    for classes, points in ((10, 60), (400, 44), (1000, contents.FEWEST)):
        splits = mock.Mock(manifest=replace(content.scene.pack.manifest, classes=classes))
        splits.split = {"val": mock.Mock(rows=5000), "test": mock.Mock(rows=10_000)}.get
        assert replace(content.scene, pack=splits).points == points


def test_a_sweep_of_many_rows_looks_at_some_of_them(content, monkeypatch):
    monkeypatch.setattr(contents, "SWEPT", 100)
    scene = replace(content.scene)  # nothing remembered
    (found,) = contents.sweep(scene, {"clip": (None, 1.0)})
    assert 50 < found.val.rows < 200
    assert 50 < found.test.rows < 200 < scene.test_rows
    said = f"{found.test.rows} rows, chosen by their content"
    assert said in render(replace(content, sweeps=(found,)))
    assert "chosen by their content" not in render(content)


def test_why_a_recipe_is_not_in_the_explorer():
    steps = {"clip | vector": "vector", "clip | temperature | isotonic": "isotonic"}
    for recipe, why in {**steps, "clip | group": "group"}.items():
        known, found = clipped(parse(recipe))
        assert (known, found.name) == (None, why)
    assert clipped(parse("clip | temperature")) == (("temperature", math.inf), None)
    assert clipped(parse("temperature")) == clipped(None) == (None, None)


def test_a_file_that_was_fitted_on_the_scored_rows_is_found_out(files):
    """Not recommended, and not judged: its loss is the lowest of its kind, which is no merit."""
    found = files["test"]
    assert (found.summary.pick, found.summary.seen, found.pick) == (None, (1,), 0)
    assert "test.safetensors was fitted on the very rows" in found.summary.cautions[0]
    both = files["both"]
    assert (both.summary.pick, both.summary.seen) == (1, (2,))
    unjudged, judged = (
        comparison_table(both.comparison, seen).rows for seen in ((), both.summary.seen)
    )
    assert any(cell.mark == "best" for cell in unjudged[2])
    assert not any(cell.mark for cell in judged[2])
    assert any(cell.mark == "best" for cell in judged[1])
    assert judged[2][0].small.endswith("test.safetensors, fitted on these very rows")


def test_what_is_known_of_other_files_is_said(files, page):
    own, unknown = files["val"], files["bare"]
    assert (own.summary.pick, own.summary.cautions) == (1, ())
    assert own.entries[1].row.scores.metrics["nll"] < own.entries[0].row.scores.metrics["nll"]
    assert unknown.summary.pick == 1
    assert unknown.summary.cautions[0].startswith("It is not known what rows temperature scaling")
    assert "calibrator from a file" not in page
    assert "a calibrator from a file may have been, which is noticed only" in render(own)
