"""Good input: the commands agree with each other, with numpy, and with what they print."""

import json
import re
import stat

import numpy as np
import pytest
from cli_cases import arrays, done, featcal, logits_alone, packed, refused, save, tree

import featcal as library

COMMANDS = [(), ("demo",), ("fit",), ("eval",), ("compare",), ("paper",), ("predict",)]
COMMANDS += [("history",), ("pack",), ("pack", "import"), ("pack", "info")]
METRICS = {"accuracy", "ece", "adaptive_ece", "classwise_ece", "mce", "nll", "brier"}


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help(command):
    said = done(*command, "--help").out
    assert said.startswith(f"Usage: {' '.join(['featcal', *command])}")
    assert said == done(*command, "-h").out
    assert max(map(len, said.splitlines())) <= 100


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


def test_the_keys_of_fit(pack, tmp_path):
    found = done("fit", pack, "clip | temperature", "-o", tmp_path / "cal", "--json").json
    assert {"recipe", "steps", "loss_before", "loss_after", "seconds"} <= set(found)
    assert found["recipe"] == "clip | temperature"
    assert found["mode"] == "joint"
    clip, temperature = found["steps"]
    for step in (clip, temperature):
        assert {"name", "noop", "head_passes", "converged", "message"} <= set(step)
        assert not step["noop"]
        assert step["head_passes"] <= 10
    assert (clip["name"], temperature["name"]) == ("clip", "temperature")
    assert clip["threshold"] > 0
    assert temperature["temperature"] > 0
    assert 0 < clip["clipped_share"] < 1
    assert found["loss_after"] < found["loss_before"]
    assert found["warnings"] == []
    assert (tmp_path / "cal").is_file()


def test_the_keys_of_eval_and_compare(pack):
    scores = done("eval", pack, "--json").json
    assert scores["n"] == 300
    assert set(scores["metrics"]) >= METRICS
    rows = done("compare", pack, "--json").json["rows"]
    assert [row["recipe"] for row in rows] == ["none", "temperature", "clip", "clip | temperature"]
    for row in rows:
        assert {"recipe", "metrics", "fit", "seconds"} <= set(row)
        assert set(row["metrics"]) == set(scores["metrics"])
    assert rows[0]["fit"] is None
    assert rows[0]["metrics"] == scores["metrics"]
    assert set(rows[1]["fit"]) >= {"recipe", "steps", "loss_before", "loss_after", "seconds"}


@pytest.mark.no_cover
@pytest.mark.parametrize("recipe", ["temperature", "clip", "clip | temperature"])
@pytest.mark.parametrize("joint", [True, False], ids=["joint", "sequential"])
def test_fit_then_eval_is_the_row_of_compare(pack, tmp_path, recipe, joint):
    flags = ("--resamples", "0", *["--joint"][:joint])
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


@pytest.mark.parametrize("split", ["val", "test"])
def test_probabilities_reproduce_the_scores(pack, cal, tmp_path, split):
    said = done("predict", pack, cal, "-o", tmp_path / "p.npy", "--split", split).out
    probs = np.load(tmp_path / "p.npy", allow_pickle=False)
    labels = arrays()[f"{split}_labels"]
    assert probs.dtype == np.float32
    assert probs.shape == (len(labels), 4)
    assert f"{len(labels)} rows" in said
    np.testing.assert_allclose(probs.sum(1), 1, atol=1e-6)
    found = done("eval", pack, cal, "--split", split, "--json").json["metrics"]
    for key, value in by_hand(probs, labels).items():
        assert found[key] == pytest.approx(value, abs=1e-6), key


def test_probabilities_of_logits_alone(logits_pack, tmp_path):
    done("fit", logits_pack, "temperature", "-o", tmp_path / "cal")
    done("predict", logits_pack, tmp_path / "cal", "-o", tmp_path / "p.npy")
    found = done("eval", logits_pack, tmp_path / "cal", "--json").json["metrics"]
    for key, value in by_hand(np.load(tmp_path / "p.npy"), arrays()["test_labels"]).items():
        assert found[key] == pytest.approx(value, abs=1e-6), key
    rows = done("compare", logits_pack, "--json").json["rows"]
    assert [row["recipe"] for row in rows] == ["none", "temperature"]


def test_a_calibrator_of_logits_works_on_features(pack, logits_pack, tmp_path):
    done("fit", logits_pack, "temperature", "-o", tmp_path / "cal")
    here = done("eval", pack, tmp_path / "cal", "--json").json["metrics"]
    there = done("eval", logits_pack, tmp_path / "cal", "--json").json["metrics"]
    assert here == pytest.approx(there, abs=1e-5)


def test_tables_say_what_json_says(pack, cal, tmp_path):
    said = done("eval", pack, cal).out
    for key, value in done("eval", pack, cal, "--json").json["metrics"].items():
        shown = f"{value:.4f}" if key in {"nll", "brier", "auroc", "aurc"} else f"{value:.2%}"
        assert shown.replace("%", " %") in said, key
    lines = [
        [cell.strip() for cell in line.strip("│").split("│")]
        for line in done("compare", pack, "--resamples", "0").out.splitlines()
    ]
    for row in done("compare", pack, "--json").json["rows"]:
        (cells,) = (line for line in lines if line[0] == row["recipe"])
        metrics = row["metrics"]
        assert cells[1:6] == [
            f"{100 * metrics['accuracy']:.2f} %",
            f"{100 * metrics['ece']:.2f} %",
            f"{100 * metrics['adaptive_ece']:.2f} %",
            f"{metrics['nll']:.4f}",
            f"{metrics['brier']:.4f}",
        ]
    fit = done("fit", pack, "temperature", "-o", tmp_path / "one", "--json").json
    said = done("fit", pack, "temperature", "-o", tmp_path / "two").out
    assert f"NLL {fit['loss_before']:.4f} -> {fit['loss_after']:.4f}" in said
    assert f"T = {fit['steps'][0]['temperature']:.4g}" in said


def test_bins_and_splits(pack):
    one = done("eval", pack, "--bins", "1", "--json").json["metrics"]
    assert one["ece"] == pytest.approx(abs(one["overconfidence"]), abs=1e-9)
    assert done("eval", pack, "--split", "val", "--json").json["n"] == 240
    turned = done("compare", pack, "clip", "--fit-split", "test", "--test-split", "val", "--json")
    assert turned.json["rows"][0]["n"] == 240
    assert turned.json["rows"][0]["fit"]["rows"] == 300


def test_force_replaces_a_file(pack, cal, tmp_path):
    out = tmp_path / "out"
    out.write_text("old")
    done("fit", pack, "temperature", "-o", out, "--force")
    done("eval", pack, out)
    done("predict", pack, cal, "-o", out, "--force")
    assert np.load(out).shape == (300, 4)
    assert list(tree(tmp_path)) == ["out"]


def test_reading_changes_no_pack(pack, cal):
    before = tree(pack)
    done("compare", pack)
    done("eval", pack, cal)
    done("pack", "info", pack, "--verify")
    assert tree(pack) == before


def test_what_is_written_can_be_read_by_others(pack, tmp_path):
    """The usual 0644: a calibrator is fitted by one user and served by another."""
    done("fit", pack, "temperature", "-o", tmp_path / "cal")
    done("predict", pack, tmp_path / "cal", "-o", tmp_path / "p.npy")
    assert (tmp_path / "p.npy").stat().st_mode & stat.S_IRGRP
    assert (tmp_path / "cal").stat().st_mode & stat.S_IRGRP


def test_float64_features_are_features(tmp_path, pack):
    """The default type of numpy: what can be imported can be used."""
    made = {key: v.astype("f8") if v.dtype.kind == "f" else v for key, v in arrays().items()}
    wide, cal = packed(tmp_path, made), tmp_path / "cal"
    done("fit", wide, "clip | temperature", "-o", cal)
    done("predict", wide, cal, "-o", tmp_path / "p.npy")
    here, there = (done("eval", p, cal, "--json").json["metrics"] for p in (wide, pack))
    assert here == pytest.approx(there, abs=1e-5)


@pytest.mark.parametrize("name", ["with space", "ünïcødé 漢字", "[bold]", "pack[v2]", "a[b"])
def test_names_are_printed_as_they_are(tmp_path, name):
    pack, cal = packed(tmp_path, arrays(val=40, test=50), name), tmp_path / f"{name}.safetensors"
    assert name in done("pack", "info", pack).out
    assert name in done("compare", pack, "none").out
    assert f"{name}.safetensors" in done("fit", pack, "temperature", "-o", cal).out
    assert f"{name}.npy" in done("predict", pack, cal, "-o", tmp_path / f"{name}.npy").out


def test_texts_of_a_file_are_no_markup(tmp_path):
    meta = json.dumps({"dataset": "[/red]toy", "model": "[link]net"})
    file = save(tmp_path / "toy.npz", {**arrays(val=40, test=50), "meta": meta})
    said = done("pack", "import", file, "-o", tmp_path / "pack").out
    assert "[/red]toy" in said
    assert "[link]net" in said


def test_warnings_of_a_fit_reach_people_and_programs(tmp_path):
    made = logits_alone(val=30, test=40)
    made["val_labels"] = made["val_logits"].argmax(1)  # every prediction is right
    pack = packed(tmp_path, made)
    fit = done("fit", pack, "temperature", "-o", tmp_path / "cal", "--json").json
    assert not fit["steps"][0]["converged"]
    assert "cap" in fit["warnings"][0]
    assert "Warning:" in done("fit", pack, "temperature", "-o", tmp_path / "other").out
    assert "Warning:" in done("compare", pack).out
    row = done("compare", pack, "--json").json["rows"][1]
    assert "cap" in row["fit"]["warnings"][0]  # "fit": as fit


def odd_packs():
    """Small or lopsided data that is legal."""
    small, right = arrays(val=30, test=40), logits_alone(val=30, test=40)
    for split in ("val", "test"):
        right[f"{split}_labels"] = right[f"{split}_logits"].argmax(1)
    flat = logits_alone(val=30, test=40)
    for split in ("val", "test"):
        flat[f"{split}_logits"][:] = 0
    still = {**small, "val_features": np.zeros_like(small["val_features"])}
    return {
        "one row": arrays(val=1, test=1),
        "two rows": arrays(val=2, test=2),
        "1000 classes": arrays(val=20, test=30, k=1000),
        "all right": right,
        "constant logits": flat,
        "constant features": still,
        "float16": {k: v.astype("f2") if v.dtype.kind == "f" else v for k, v in small.items()},
        "big-endian": {k: v.astype(">f4") if v.dtype.kind == "f" else v for k, v in small.items()},
        "no bias": {k: v for k, v in small.items() if k != "bias"},
    }


@pytest.mark.no_cover
@pytest.mark.parametrize("name", odd_packs())
def test_odd_data_goes_all_the_way(tmp_path, name):
    made = odd_packs()[name]
    pack, cal = packed(tmp_path, made), tmp_path / "cal"
    few = ("--resamples", "100")
    for row in done("compare", pack, *few, "--json").json["rows"]:  # strict: no NaN, no Infinity
        assert row["metrics"]["nll"] >= 0
        for step in row["fit"]["steps"] if row["fit"] else ():
            assert step["loss_after"] <= step["loss_before"] + 1e-6
    said = done("compare", pack, *few).out
    assert "nan" not in said
    assert "-0.0000" not in said
    done("fit", pack, "clip | temperature" if "weight" in made else "temperature", "-o", cal)
    done("eval", pack, cal)
    done("predict", pack, cal, "-o", tmp_path / "p.npy")
    np.testing.assert_allclose(np.load(tmp_path / "p.npy").sum(1), 1, atol=1e-5)


def test_demo(tmp_path):
    said = done("demo", "--out", tmp_path / "new" / "out").out
    for word in ("none", "temperature", "clip | temperature", "before", "after"):
        assert word in said
    *pictures, page = sorted((tmp_path / "new" / "out").iterdir())
    assert [path.suffix for path in pictures] == [".png", ".svg"]
    assert all(str(path) in said for path in pictures)
    assert pictures[0].read_bytes().startswith(b"\x89PNG")
    assert said.splitlines()[-1] == f"Report, for a browser: {page}"
    assert page.read_text().startswith("<!doctype html>")
    again = done("demo", "--out", tmp_path / "new" / "out", "--json").json
    assert len(again["rows"]) == 4
    assert sorted(again["pictures"]) == [str(path) for path in pictures]
    assert again["report"] == str(page)
    raw, best = (again["rows"][at]["metrics"] for at in (0, 3))
    assert best["ece"] < raw["ece"] / 4


def test_a_calibrator_of_another_network_is_refused(pack, cal, tmp_path):
    other = packed(tmp_path, arrays(k=5), "classes")
    wider = packed(tmp_path, arrays(d=7), "features")
    done("fit", pack, "vector", "-o", tmp_path / "v.safetensors")
    for command in ("eval", "predict"):
        extra = () if command == "eval" else ("-o", tmp_path / "probs.npy")
        said = refused(command, other, tmp_path / "v.safetensors", *extra)
        assert "was fitted to 4 classes" in said
        assert "has 5" in said
        assert "6 features" in refused(command, wider, cal, *extra)
    assert not (tmp_path / "probs.npy").exists()


def test_eval_tells_the_recipe_and_single_numbers_alone(pack, cal, tmp_path):
    first = done("eval", pack, cal).out.splitlines()[0]
    assert re.fullmatch(
        r"clip \| temperature   threshold=[\d.]+ temperature=[\d.]+, 300 rows of test", first
    )
    done("fit", pack, "proximity", "-o", tmp_path / "cal")
    first = done("eval", pack, tmp_path / "cal").out.splitlines()[0]
    assert first.startswith("proximity")
    assert "tensor" not in first
