"""docs/theory.md shows what the code gives and the result file holds."""

import doctest
import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

from featcal import theory

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "theory.md"


@pytest.fixture(scope="module")
def experiment():
    """The script, with the one beside it that it imports."""
    folder = ROOT / "experiments"
    sys.path.insert(0, str(folder))
    try:
        spec = importlib.util.spec_from_file_location("theory_figure", folder / "theory_figure.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
    return module


@pytest.fixture(scope="module")
def results():
    return json.loads((ROOT / "results" / "theory.json").read_text())


def test_every_example_of_the_page_gives_what_it_says():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    example = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, "theory.md", None, 0)
    outcome = doctest.DocTestRunner().run(example)
    assert outcome.failed == 0
    assert outcome.attempted > 20


def test_the_tables_are_those_of_the_code_and_of_the_result_file(experiment, results):
    text = PAGE.read_text()
    assert experiment.fill(text, experiment.sections(results), experiment.START) == text


def test_the_words_around_the_tables_fit_the_measurements(results):
    """The page says in plain words what these numbers say: they may not turn unnoticed."""
    for pack in results["packs"]:
        wrong, right = pack["hce"], pack["lce"]
        gap = right["sigma"] - wrong["sigma"]
        assert gap > 3 * (wrong["sigma_error"] + right["sigma_error"])
        assert wrong["energy_removed"] < right["energy_removed"]
        assert wrong["clipped"] < right["clipped"]
        growth = [each["entropy_after"] - each["entropy_before"] for each in (wrong, right)]
        assert growth[0] > growth[1]
        assert max(wrong["zeros"], right["zeros"]) < 0.1
        assert pack["turning_point"] == pytest.approx(theory.turning_point(pack["c"]), rel=1e-9)


@pytest.mark.shared
def test_the_measurements_can_be_repeated(experiment, results, shared_file):
    name = "cifar10-resnet50"
    shared_file("packs", f"{name}.npz")
    (kept,) = [pack for pack in results["packs"] if pack["pack"] == name]
    found = experiment.measured(name)
    assert found["c"] == pytest.approx(kept["c"], rel=1e-3)
    for group in ("hce", "lce"):
        assert found[group] == pytest.approx(kept[group], rel=1e-2)


def test_the_picture_is_that_of_today(experiment, tmp_path, monkeypatch):
    monkeypatch.setattr(experiment, "PICTURE", tmp_path / "theory.svg")
    experiment.draw()
    kept = (ROOT / "docs" / "images" / "theory.svg").read_text()
    assert_same_shapes(kept, (tmp_path / "theory.svg").read_text())


def assert_same_shapes(one, other):
    """The points of all curves, in points of the page; fonts may move the axes a little."""
    found = []
    for svg in (one, other):
        paths = re.findall(r'<g id="line2d_\d+">\s*<path d="([^"]*)"', svg)
        curves = [path for path in paths if path.count("L") > 20]
        found.append([float(x) for path in curves for x in re.findall(r"-?[\d.]+", path)])
    assert len(found[0]) > 300
    assert found[0] == pytest.approx(found[1], abs=2)
