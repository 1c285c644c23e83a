"""The study: resplits, parts that merge, ranks, intervals, and the page that is made of them."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
from scipy import stats

from featcal import METHODS


@pytest.fixture(scope="module")
def runs(imported):
    return imported("study")


@pytest.fixture(scope="module")
def docs(imported):
    return imported("study_docs")


@pytest.fixture(scope="module")
def page(docs):
    return docs.Study(json.loads(docs.RESULTS.read_text()))


def record(recipe, rep, nll, size=250, **more):
    values = {"nll": nll, "ece": nll / 10, "adaptive_ece": 0.0, "brier": 0.0, "accuracy": 0.9}
    job = {"pack": "a", "recipe": recipe, "size": size, "rep": rep}
    return {**job, **values, "seconds": 1.0, "spent": 2.0, **more}


def made(values, rows=9000, group="shared"):
    """Results of one size: pack -> recipe -> NLL of its resplits."""
    cells = {
        pack: {"250": {recipe: {"nll": list(v), "ece": list(v)} for recipe, v in found.items()}}
        for pack, found in values.items()
    }
    return {
        "setting": {"resplits": 3, "test_rows_at_most": 5000},
        "speed": {},
        "packs": {pack: {"group": group, "rows": rows, "features": 0} for pack in values},
        "results": cells,
    }


def test_a_resplit_is_always_the_same_and_parts_the_rows(runs):
    fit, test = runs.resplit("a", 3, 9000, 500)
    again = runs.resplit("a", 3, 9000, 500)
    assert torch.equal(fit, again[0])
    assert torch.equal(test, again[1])
    assert (len(fit), len(test)) == (500, runs.TEST)
    assert not set(fit.tolist()) & set(test.tolist())
    more, same = runs.resplit("a", 3, 9000, 2500)
    assert torch.equal(more[:500], fit)
    assert torch.equal(same, test)
    assert not torch.equal(runs.resplit("a", 4, 9000, 500)[0], fit)
    assert not torch.equal(runs.resplit("b", 3, 9000, 500)[0], fit)
    assert len(runs.resplit("a", 0, 5000, 2500)[1]) == 2500


def test_every_method_is_among_the_recipes_and_all_can_be_read(runs):
    assert set(METHODS) < set(runs.recipes())
    assert runs.readable([*runs.recipes(), "unheard_of"]) == runs.recipes()
    assert runs.parsed("clip | temperature, step by step")[1] == "sequential"
    assert runs.parsed("clip | temperature")[1] == "joint"


def drawn(folder, rows, classes, width):
    """A pack with features and one of its logits alone, both in the files' types."""
    draw = np.random.default_rng(0)
    features = {s: draw.normal(size=(rows, width)).astype(np.float16) for s in ("val", "test")}
    weight = draw.normal(size=(classes, width)).astype(np.float32)
    arrays = {f"{s}_features": x for s, x in features.items()}
    labels = {f"{s}_labels": draw.integers(classes, size=rows).astype(np.int16) for s in features}
    np.savez(folder / "whole.npz", **arrays, **labels, weight=weight, bias=np.zeros(classes))
    logits = {f"{s}_logits": x.astype(np.float32) @ weight.T for s, x in features.items()}
    np.savez(folder / "outputs.npz", **logits, **labels)


def test_a_fit_is_scored_on_the_other_rows(runs, tmp_path):
    drawn(tmp_path, 600, 4, 8)
    whole = runs.done(runs.Job("a", "temperature", 250, 0), tmp_path / "whole.npz")
    outputs = runs.done(runs.Job("a", "temperature", 250, 0), tmp_path / "outputs.npz")
    for metric in runs.METRICS:
        assert whole[metric] == pytest.approx(outputs[metric], abs=1e-5)
    own = runs.done(runs.Job("a", "none", 250, 0), tmp_path / "outputs.npz")
    batch, _ = runs.opened(tmp_path / "outputs.npz")
    test = batch.rows(runs.resplit("a", 0, 1200, 250)[1])
    assert len(test) == 950
    assert own["nll"] == pytest.approx(
        float(torch.nn.functional.cross_entropy(test.logits, test.labels)), rel=1e-5
    )
    assert whole["nll"] < own["nll"]
    refused = runs.done(runs.Job("a", "clip", 250, 0), tmp_path / "outputs.npz")
    assert "works on features" in refused["refused"]


def test_a_journal_forgets_a_line_that_was_cut(runs, tmp_path):
    journal = runs.Journal(tmp_path / "folder" / "journal.jsonl")
    journal.add(record("none", 0, 1.0))
    with journal.path.open("a") as file:
        file.write('{"pack": "a", "rec')
    again = runs.Journal(journal.path)
    assert list(again.records) == [runs.Job("a", "none", 250, 0)]
    again.add(record("none", 1, 2.0))
    assert len(runs.Journal(journal.path).records) == 2


def test_parts_merge_and_a_new_cell_takes_the_place_of_the_old(runs, tmp_path):
    facts = {"a": {"group": "shared", "rows": 9000, "classes": 10, "features": 0}}
    old = [record("none", rep, 1.0) for rep in (1, 0)]
    old += [record("temperature", rep, 0.1 * rep) for rep in (1, 0)]
    refused = {"pack": "a", "recipe": "clip", "size": 250, "rep": 0, "refused": "no features"}
    first = runs.merged({}, facts, runs.cells([*old, refused]))
    runs.write(first, tmp_path / "study.json")
    kept = json.loads((tmp_path / "study.json").read_text())
    assert kept == json.loads(json.dumps(first))
    new = [record("temperature", 0, 0.5), record("temperature", 0, 0.7, size=500)]
    both = runs.merged(kept, {}, runs.cells(new))["results"]["a"]
    assert list(both) == ["250", "500"]
    assert both["250"]["none"]["nll"] == [1.0, 1.0]
    assert both["250"]["temperature"]["nll"] == [0.5]
    assert both["250"]["clip"] == {"refused": "no features"}
    assert both["500"]["temperature"]["ece"] == [0.07]
    assert kept["results"]["a"]["250"]["temperature"]["nll"] == [0.5]


def test_slow_fits_get_fewer_resplits(runs):
    assert runs.reps_of({"recipe": "matrix", "seconds": 0.1}, 20) == 20
    assert runs.reps_of({"recipe": "matrix", "seconds": 10.0}, 20) == runs.FEW
    assert runs.reps_of({"recipe": "auto", "seconds": 10.0}, 20) == 20
    assert runs.reps_of({"refused": "why"}, 20) == 1


def test_ranks_by_hand(docs):
    study = docs.Study(
        made(
            {
                "x": {"a": [1, 1, 1], "b": [2, 2, 1], "c": [3, 3, 3], "part": [0, 0]},
                "y": {"a": [5, 5], "b": [4, 6], "c": [3, 7]},
            }
        )
    )
    ranks = docs.mean_ranks(study, "shared", 250, "nll")
    # x: a 1, 1, 1.5; b 2, 2, 1.5; c 3. y: a 3, 1; b 2, 2; c 1, 3.
    a, b = ((3.5 / 3) + 2) / 2, ((5.5 / 3) + 2) / 2
    want = {"part": (1.0, 1), "a": (a, 2), "b": (b, 2), "c": (2.5, 2)}
    assert list(ranks) == list(want)
    for recipe, (rank, packs) in want.items():
        assert ranks[recipe] == (pytest.approx(rank), packs)


def test_ranks_are_scipys_where_all_have_the_same_resplits(docs):
    values = np.random.default_rng(0).integers(5, size=(6, 20)) / 10
    study = docs.Study(made({"x": {str(recipe): row for recipe, row in enumerate(values)}}))
    found = docs.pack_ranks(study, "x", 250, study.recipes, "nll")
    assert found == pytest.approx(stats.rankdata(values, axis=0).mean(1))


def test_the_critical_difference_is_that_of_the_published_table(docs):
    """Demšar (2006), table 5: q at 5 % for 2, 5 and 10 classifiers."""
    for recipes, q in ((2, 1.960), (5, 2.728), (10, 3.164)):
        want = q * math.sqrt(recipes * (recipes + 1) / (6 * 14))
        assert docs.critical_difference(recipes, 14) == pytest.approx(want, rel=1e-3)


def test_cliques_are_the_longest_runs_within_the_difference(docs):
    ranks = [1.0, 2.0, 2.5, 4.0, 9.0]
    found = docs.cliques(ranks, 2.0)
    assert found == [(0, 2), (1, 3)]
    alike = {p for first, last in found for p in itertools.combinations(range(first, last + 1), 2)}
    pairs = itertools.combinations(range(5), 2)
    assert alike == {(i, j) for i, j in pairs if ranks[j] - ranks[i] <= 2.0}


def test_holm_by_hand(docs):
    assert docs.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert docs.holm([0.6, 0.9]) == [1.0, 1.0]


def test_an_interval_is_the_corrected_resampled_t_test(docs):
    a, b = [0.5, 0.6, 0.7, 0.4], [0.4, 0.4, 0.5, 0.5]
    study = docs.Study(made({"x": {"a": a, "b": b}}, rows=5250))
    mean, half = docs.paired(study, "x", 250, "a", "b", "nll")
    apart = np.subtract(a, b)
    assert mean == pytest.approx(0.1)
    # All rows that are not scored are fitted on, so the factor is the published one.
    spread = math.sqrt((1 / 4 + 5000 / 250) * apart.var(ddof=1))
    assert half == pytest.approx(stats.t.ppf(0.975, 3) * spread)
    assert docs.relative(study, "x", 250, "a", "b")[0] == pytest.approx(0.1 / 0.45)


def test_bars_are_met_by_figures_alone(docs):
    good = {"temperature": [1.0, 1.0, 1.0], "none": [1.2, 1.3, 1.2], "sample": [0.98, 0.97, 0.98]}
    good["auto"] = [0.96, 0.97, 0.96]
    study = docs.Study(made({"x": good, "y": good}))
    assert docs.best_ranks(study, "shared", 250)[1]
    assert docs.gain(study, "shared", 250)[1]
    assert docs.none_beaten(study, "shared")[1]
    assert docs.ece_kept(study, "shared")[1]
    part = {**good, "matrix": [0.9, 0.9, 0.9]}
    study = docs.Study(made({"x": part, "y": good}))
    assert docs.best_ranks(study, "shared", 250)[1] is False
    assert "`matrix` on 1 of 2 packs" in docs.best_ranks(study, "shared", 250)[2]
    worse = {**good, "sample": [1.002, 1.002, 1.002], "auto": [2.0, 2.0, 2.0]}
    study = docs.Study(made({"x": good, "y": worse}))
    for bar in (docs.best_ranks, docs.gain):
        assert bar(study, "shared", 250)[1] is False
    assert docs.none_beaten(study, "shared")[1] is False
    assert docs.ece_kept(study, "shared")[1] is False
    assert docs.best_ranks(study, "held out", 250)[1] is None


def test_the_page_shows_what_the_result_file_holds(docs, page):
    text = docs.PAGE.read_text()
    parts = docs.sections(page)
    assert docs.fill(text, parts, docs.START) == text, "python experiments/study_docs.py"
    assert text.count("made by experiments/study_docs.py") == len(parts)
    assert docs.RESULTS.stat().st_size < 2**20
