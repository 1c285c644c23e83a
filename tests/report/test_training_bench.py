"""What bench/train.py keeps of its curves when a lease ends, and how it joins several files.

The loops themselves need a GPU; here each curve is a number that says of whom it is.
"""

import importlib.util
import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMES = "featcal, compiler as it comes"
LOOPS = ("featcal", "plain bfloat16", "plain float32", COMES, f"{COMES}, again")


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench_train", ROOT / "bench" / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def made(bench, monkeypatch):
    """The curves that were made, in their order; the sixth is interrupted, once."""
    names, ends = [], [5]

    def curve_of(loop, network, splits, seed):
        if ends and len(names) == ends[0]:
            ends.clear()
            raise KeyboardInterrupt
        names.append((loop, seed))
        return [float(seed), LOOPS.index(loop)], seed / 10

    monkeypatch.setattr(bench, "curve_of", curve_of)
    monkeypatch.setattr(bench, "first_steps", lambda network, splits: {"plain": [network]})
    monkeypatch.setattr(bench, "CURVES", {"wrn16x4": (2, (1, 2))})
    return names


def file_of(bench, path, **row):
    rows = [{"network": "vit"}, {"network": "wrn16x4", **row}]
    bench.written(path, {**bench.about(), "rows": rows})
    return path


def curves_in(path):
    return json.loads(path.read_text())["rows"][1].get("curves")


def columns(*seeds, loop="featcal"):
    losses = [[float(seed), LOOPS.index(loop)] for seed in seeds]
    found = {
        "seeds": list(seeds),
        "losses": losses,
        "accuracies": [seed / 10 for seed in seeds],
    }
    return {**found, "compiler": {}} if loop.startswith(COMES) else found


def run(bench, monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["train.py", *map(str, words)])
    bench.main()


def test_a_run_that_was_stopped_goes_on_where_it_was(bench, made, tmp_path):
    options = Namespace(
        output=file_of(bench, tmp_path / "bench.json"), networks=["vit", "wrn16x4"], seeds=None
    )
    with pytest.raises(KeyboardInterrupt):
        bench.curves(options, None)
    assert [len(curves_in(options.output)[loop]["seeds"]) for loop in LOOPS] == [1, 1, 1, 1, 1]
    bench.curves(options, None)
    assert len(made) == len(set(made)) == 10
    assert curves_in(options.output) == {loop: columns(1, 2, loop=loop) for loop in LOOPS}
    assert json.loads(options.output.read_text())["rows"][1]["first_steps"] == {
        "plain": ["wrn16x4"]
    }


def test_a_compiler_as_it_comes_has_none_of_our_options(bench, monkeypatch):
    monkeypatch.setattr(bench, "our_curve", lambda *_: dict(bench.COMPILER))
    options = dict(bench.COMPILER)
    assert options
    for loop in (COMES, f"{COMES}, again"):
        assert bench.curve_of(loop, "wrn16x4", None, 1) == {}
    assert bench.curve_of("featcal", "wrn16x4", None, 1) == options


def test_seeds_that_were_asked_for_are_added_to_those_on_file(bench, made, tmp_path):
    known = {"curves": {"featcal": columns(2)}, "made": {"curves": bench.about()}}
    output = file_of(bench, tmp_path / "bench.json", **known)
    options = Namespace(output=output, networks=["wrn16x4"], seeds=[1])
    bench.curves(options, None)
    assert curves_in(output)["featcal"] == columns(1, 2)
    assert curves_in(output)["plain float32"] == columns(1, loop="plain float32")


def test_curves_made_by_other_means_are_not_mixed_with_new_ones(bench, made, tmp_path):
    other = {**bench.about(), "compiler": {"of": "another day"}}
    known = {"curves": {"featcal": columns(7)}, "made": {"curves": other}}
    output = file_of(bench, tmp_path / "bench.json", **known)
    bench.curves(Namespace(output=output, networks=["wrn16x4"], seeds=[1]), None)
    assert curves_in(output)["featcal"] == columns(1)
    assert json.loads(output.read_text())["rows"][1]["made"]["curves"] == bench.about()


def test_curves_without_seconds_are_refused(bench, made, tmp_path):
    output = tmp_path / "bench.json"
    bench.written(output, {**bench.about(), "rows": []})
    with pytest.raises(SystemExit, match=r"no seconds of wrn16x4 .* begin with --part seconds"):
        bench.curves(Namespace(output=output, networks=["wrn16x4"], seeds=None), None)
    output.unlink()
    with pytest.raises(SystemExit, match=r"no .*bench\.json to add curves to"):
        bench.curves(Namespace(output=output, networks=["wrn16x4"], seeds=None), None)


def test_files_of_several_processes_become_one(bench, tmp_path, monkeypatch):
    by = {"curves": bench.about()}
    output = file_of(bench, tmp_path / "a.json", curves={"featcal": columns(3)}, made=by)
    more = {"featcal": columns(4, 1), "plain float32": columns(2, loop="plain float32")}
    steps = {"first_steps": {"plain": [2.3]}, "made": {**by, "first_steps": bench.about()}}
    second = file_of(bench, tmp_path / "b.json", **{"curves": more, **steps})
    run(bench, monkeypatch, "--merge", second, "--output", output)
    assert curves_in(output)["featcal"] == columns(1, 3, 4)
    assert curves_in(output)["plain float32"] == more["plain float32"]
    assert json.loads(output.read_text())["rows"][1]["first_steps"] == {"plain": [2.3]}


def test_a_file_made_by_other_means_is_refused(bench, tmp_path, monkeypatch):
    output = file_of(bench, tmp_path / "a.json")
    other = {"curves": {**bench.about(), "hardware": {"device": "another"}}}
    second = file_of(bench, tmp_path / "b.json", curves={"featcal": columns(1)}, made=other)
    before = output.read_bytes()
    with pytest.raises(SystemExit, match=r"b\.json has no curves made as the seconds of .*a\.json"):
        run(bench, monkeypatch, "--merge", second, "--output", output)
    assert output.read_bytes() == before


def test_the_file_in_the_repository_has_the_seeds_that_the_bench_makes(bench):
    rows = json.loads(bench.RESULTS.read_text())["rows"]
    found = {row["network"]: row["curves"] for row in rows if "curves" in row}
    assert found.keys() == bench.CURVES.keys()
    for network, (epochs, seeds) in bench.CURVES.items():
        assert tuple(found[network]) == bench.loops_of(network)
        for loop, curves in found[network].items():
            assert curves["seeds"] == list(seeds)
            assert ("compiler" in curves) == loop.startswith(COMES)
            assert not curves.get("compiler")
            assert {len(losses) for losses in curves["losses"]} == {epochs}
