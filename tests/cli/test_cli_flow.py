"""Good input: the commands agree with each other, with numpy, and with what they print."""

import json
import re
import stat
from pathlib import Path

import numpy as np
import pytest
from cli_cases import arrays, done, featcal, logits_alone, packed, save, tree
from safetensors.torch import load_file

import featcal as library
from featcal.cli import app
from featcal.cli.train import train
from featcal.core import listed
from featcal.losses import LOSSES
from featcal.metrics.columns import COLUMNS
from featcal.train.engine import PRECISIONS
from featcal.train.history import MAX_RUNS

ROOT = Path(__file__).parents[2]


def test_help():
    commands = [(), *((name,) for name in app.KNOWN), ("pack", "import"), ("pack", "info")]
    for command in commands:
        said = done(*command, "--help").out
        assert said.startswith(f"Usage: {' '.join(['featcal', *command])}")
        assert said == done(*command, "-h").out
        assert max(map(len, said.splitlines())) <= 100


def test_help_lists_every_command_and_every_method():
    said = done("--help").out
    for name, (_, line) in app.KNOWN.items():
        assert re.search(rf"^  {name} +{re.escape(line)}$", said, re.MULTILINE)
        assert app.group.get_command(None, name).name == name
    assert app.group.get_command(None, "nothing") is None
    named = re.findall(r"\w+", said.partition("Methods, for recipes:")[2])
    assert named == list(listed.METHODS) == list(library.METHODS)
    table = (ROOT / "docs" / "methods.md").read_text().partition("## Which one?")[0]
    names = re.findall(r"^\| `(\w+)`(?:, `(\w+)`)? ", table, re.MULTILINE)
    assert [name for pair in names for name in pair if name] == named


def test_what_help_says_without_the_library_is_what_it_has():
    assert tuple(COLUMNS) == listed.METRICS
    own = (name for name, loss in LOSSES.items() if loss.__module__ == "featcal.losses")
    assert tuple(own) == listed.LOSSES
    (precision,) = (one for one in train.params if one.name == "precision")
    assert list(precision.type.choices) == list(PRECISIONS)
    assert f"of up to {MAX_RUNS} runs" in done("history", "--help").out


def test_version_and_no_command():
    assert library.__version__ in done("--version").out
    ran = featcal()
    assert ran.code == 2
    assert "Usage: featcal" in ran.out + ran.err


def test_import_and_info(tmp_path):
    file = save(tmp_path / "my net.npz", {**arrays(), "meta": json.dumps({"dataset": "toy"})})
    said = done("pack", "import", file, "-o", tmp_path / "my pack").out
    assert "my pack" in said
    assert "240" in said
    info = done("pack", "info", tmp_path / "my pack", "--json").json
    assert info["dataset"] == "toy"
    assert (info["features"], info["classes"], info["head"]) == (6, 4, True)
    assert {name: split["rows"] for name, split in info["splits"].items()} == {
        "val": 240,
        "test": 300,
    }
    assert not info["verified"]
    assert done("pack", "info", tmp_path / "my pack", "--json", "--verify").json["verified"]
    assert "sha256" in done("pack", "info", tmp_path / "my pack", "--verify").out


@pytest.mark.parametrize("joint", [True, False], ids=["joint", "sequential"])
def test_fit_then_eval_is_the_row_of_compare(pack, tmp_path, joint):
    recipe = "clip | temperature"
    flags = ("--resamples", "0", *["--sequential"][joint:])
    row = done("compare", pack, recipe, *flags, "--json").json["rows"][0]
    fit = done(
        "fit", pack, recipe, *["--sequential"][joint:], "-o", tmp_path / "cal", "--json"
    ).json
    assert done("eval", pack, tmp_path / "cal", "--json").json["metrics"] == row["metrics"]
    assert fit["mode"] == row["fit"]["mode"] == ("joint" if joint else "sequential")

    def timeless(report):
        steps = [{**step, "seconds": 0} for step in report["steps"]]
        return {**report, "steps": steps, "seconds": 0, "output": "", "warnings": []}

    assert timeless(fit) == timeless(row["fit"])


def by_hand(probs, labels, bins=15):
    """Accuracy, NLL, Brier and ECE over (a, b] from first principles."""
    probs = probs.astype(np.float64)
    rows = np.arange(len(labels))
    sure, right = probs.max(1), probs.argmax(1) == labels
    which = np.clip(np.ceil(sure * bins), 1, bins)
    gaps = [abs((sure - right)[which == b].sum()) for b in range(1, bins + 1)]
    return {
        "accuracy": right.mean(),
        "nll": -np.log(probs[rows, labels]).mean(),
        "brier": ((probs - np.eye(probs.shape[1])[labels]) ** 2).sum(1).mean(),
        "ece": sum(gaps) / len(labels),
    }


def test_probabilities_reproduce_the_scores(pack, cal, tmp_path):
    split = "val"
    said = done("predict", pack, cal, "-o", tmp_path / "p.npy", "--test-split", split).out
    probs = np.load(tmp_path / "p.npy", allow_pickle=False)
    labels = arrays()[f"{split}_labels"]
    assert probs.dtype == np.float32
    assert probs.shape == (len(labels), 4)
    assert f"{len(labels)} rows" in said
    np.testing.assert_allclose(probs.sum(1), 1, atol=1e-6)
    found = done("eval", pack, cal, "--test-split", split, "--json").json["metrics"]
    for key, value in by_hand(probs, labels).items():
        assert found[key] == pytest.approx(value, abs=1e-6), key


def test_bins_and_splits(pack):
    one = done("eval", pack, "--bins", "1", "--json").json["metrics"]
    assert one["ece"] == pytest.approx(abs(one["overconfidence"]), abs=1e-9)
    assert done("eval", pack, "--test-split", "val", "--json").json["n"] == 240
    turned = done("compare", pack, "clip", "--fit-split", "test", "--test-split", "val", "--json")
    assert turned.json["rows"][0]["n"] == 240
    assert turned.json["rows"][0]["fit"]["rows"] == 300


def test_force_replaces_a_file(pack, cal, tmp_path):
    out = tmp_path / "out.safetensors"
    out.write_text("old")
    done("fit", pack, "temperature", "-o", out, "--force")
    done("eval", pack, out)
    done("predict", pack, cal, "-o", out, "--force")
    assert load_file(out)["probs"].shape == (300, 4)
    assert list(tree(tmp_path)) == ["out.safetensors"]
    assert out.stat().st_mode & stat.S_IRGRP  # what one user fits another may serve


@pytest.mark.parametrize("name", ["with space, ünïcødé 漢字", "[bold]"])
def test_names_are_printed_as_they_are(tmp_path, name):
    pack, cal = packed(tmp_path, arrays(val=40, test=50), name), tmp_path / f"{name}.safetensors"
    assert name in done("pack", "info", pack).out
    assert name in done("compare", pack, "none").out
    assert f"{name}.safetensors" in done("fit", pack, "temperature", "-o", cal).out
    assert f"{name}.npy" in done("predict", pack, cal, "-o", tmp_path / f"{name}.npy").out


def odd_packs():
    """Small or lopsided data that is legal."""
    small, right = arrays(val=30, test=40), logits_alone(val=30, test=40)
    flat = {k: v * 0 if v.dtype.kind == "f" else v for k, v in right.items()}
    right |= {f"{split}_labels": right[f"{split}_logits"].argmax(1) for split in ("val", "test")}
    return {
        "one row": arrays(val=1, test=1),
        "1000 classes": arrays(val=20, test=30, k=1000),
        "all right": right,
        "constant logits": flat,
        "float16": {k: v.astype("f2") if v.dtype.kind == "f" else v for k, v in small.items()},
        "no bias": {k: v for k, v in small.items() if k != "bias"},
    }


@pytest.mark.no_cover
@pytest.mark.parametrize("name", odd_packs())
def test_odd_data_goes_all_the_way(tmp_path, name):
    made = odd_packs()[name]
    pack, cal = packed(tmp_path, made), tmp_path / "cal"
    body = done("compare", pack, "--resamples", "100", "-o", tmp_path / "found.json").out
    assert "nan" not in body
    assert "-0.0000" not in body
    found = json.loads((tmp_path / "found.json").read_text(), parse_constant=int)  # no NaN
    for row in found["rows"]:
        assert row["metrics"]["nll"] >= 0
        for step in row["fit"]["steps"] if row["fit"] else ():
            assert step["loss_after"] <= step["loss_before"] + 1e-6
    done("fit", pack, "clip | temperature" if "weight" in made else "temperature", "-o", cal)
    done("eval", pack, cal)
    done("predict", pack, cal, "-o", tmp_path / "p.npy")
    np.testing.assert_allclose(np.load(tmp_path / "p.npy").sum(1), 1, atol=1e-5)


def test_eval_tells_the_recipe_and_single_numbers_alone(pack, cal, tmp_path):
    first = done("eval", pack, cal).out.splitlines()[0]
    assert re.fullmatch(
        r"clip \| temperature   threshold=[\d.]+ temperature=[\d.]+, 300 rows of test", first
    )
    done("fit", pack, "proximity", "-o", tmp_path / "cal")
    first = done("eval", pack, tmp_path / "cal").out.splitlines()[0]
    assert first.startswith("proximity")
    assert "tensor" not in first
