"""The paper's recipes on other networks, and its cells again from its own logits.

    python experiments/reproduction.py [--packs NAME ... --output FILE]

Reads ../shared/packs/*.npz (features of networks that are not the paper's) and
../shared/anchors/*.npz (the paper's own ResNet-50 / CIFAR-10 logits); writes
results/reproduction.json. experiments/paper_tables.py and experiments/paper_docs.py show it.
"""

import argparse
import inspect
import json
import platform
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch

import featcal
from featcal import METHODS, Batch, metrics
from featcal.analysis import ConfidentCounts, EntropyGrowth
from featcal.core.fit import plain
from featcal.data.pack import sha256
from featcal.report import Comparison
from featcal.report.compare import versions
from featcal.report.scores import calibrated_logits
from featcal.report.tables import PAPER_METHODS, after_clip

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results" / "reproduction.json"
SHARED = ROOT.parent / "shared"
BINS, SEED, RESAMPLES = 15, 0, 1000
WITH_INTERVALS = ("accuracy", "ece", "adaptive_ece", "nll", "brier")
CONFIDENT = (0.80, 0.90, 0.95, 0.99)
LEAKED = ("cifar10-resnet50", "cifar100-wrn16x4")  # packs for the fit on test

PAPER_NETWORK = "CIFAR-10 ResNet-50"


# --- the paper's own ResNet-50 / CIFAR-10 logits ------------------------------------------------


def source(path):
    return {"name": path.stem, "file": path.name, "sha256": sha256(path)}


def tidy(value):
    """Drops wall times, and of long lists all but their extent: a file for people to compare."""
    if isinstance(value, dict):
        return {key: tidy(item) for key, item in value.items() if key != "seconds"}
    if isinstance(value, list):
        flat = np.array(value, dtype=object).ravel()
        if len(flat) > 20 and all(isinstance(item, (int, float)) for item in flat):
            return {"count": len(flat), "least": min(flat), "most": max(flat)}
        return [tidy(item) for item in value]
    return value


def forms():
    """Every method that needs logits alone, as it is and as the published code had it."""
    for name, method in sorted(METHODS.items()):
        if method.needs_features or getattr(method, "needs_train", False):
            continue
        yield name, "default", name
        if "reference" in inspect.signature(method).parameters:
            yield name, "reference", f"{name}(reference=True)"


def read_anchor(path):
    with np.load(path, allow_pickle=False) as file:
        return {
            split: Batch(
                torch.from_numpy(file[f"{split}_logits"]), torch.from_numpy(file[f"{split}_labels"])
            )
            for split in ("val", "test")
        }


def anchor_results(path):
    splits = read_anchor(path)
    rows = [{"method": "none", "form": "default", "recipe": "none", **scored(splits["test"], None)}]
    for name, form, recipe in forms():
        row = {"method": name, "form": form, "recipe": recipe}
        try:
            found = fitted(recipe, splits["val"])
            row |= {**scored(splits["test"], found), "fit": tidy(found.report.as_json())}
        except featcal.InputError as error:
            row["error"] = str(error)
        rows.append(row)
    return {**source(path), "rows": {s: len(b) for s, b in splits.items()}, "results": rows}


def fitted(recipe, data, head=None, mode="sequential"):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", featcal.CalibrationWarning)
        return featcal.parse(recipe).fit(data, head, mode=mode)


def scored(batch, calibrator):
    scores = featcal.evaluate(batch, calibrator, bins=BINS).as_json()["metrics"]
    logits = calibrated_logits(batch, calibrator, None)
    published = metrics.adaptive_ece(logits=logits, labels=batch.labels, bins=BINS, reference=True)
    return {"metrics": {**scores, "adaptive_ece_reference": published}}


# --- cells of the paper, again -------------------------------------------------------------------


def replays(anchors):
    """The cells that these logits can give, each with what every form of our method gives."""
    by_network = {anchor["name"].rpartition("-")[2]: anchor["results"] for anchor in anchors}

    def replay(table, row, column, network, method, metric):
        rows = [r for r in by_network.get(network, ()) if r["method"] == method and "metrics" in r]
        forms = {r["form"]: 100 * r["metrics"][metric] for r in rows}
        return [{"table": table, "row": row, "column": column, "forms": forms}] if forms else []

    entries = []
    for table, metric in (("ece-posthoc", "ece"), ("adaece-posthoc", "adaptive_ece_reference")):
        for printed, method in PAPER_METHODS.items():
            entries += replay(table, PAPER_NETWORK, f"{printed} base", "ce", method, metric)
    for column, network in (("Cross Entropy", "ce"), ("FLSD-53", "flsd53")):
        entries += replay("train-time", PAPER_NETWORK, f"{column} base", network, "none", "ece")
    for column, network in (("Baseline", "ce"), ("Focal Loss", "flsd53")):
        entries += replay("accuracy", PAPER_NETWORK, column, network, "none", "accuracy")
    layers = {"No Clipping (baseline)": "none", "Last Layer (logits)": "logit_clip"}
    for row, method in layers.items():
        entries += replay("layers", row, "ECE (c)", "ce", method, "ece")
        entries += replay("layers", row, "Accuracy", "ce", method, "accuracy")
    return entries


def entropy_replays(val):
    """Entropy of confident rows before clipping, at the threshold used and the one stated."""
    entries = []
    for index, row in enumerate(("HCE", "LCE")):
        found = ((t, EntropyGrowth.of(val, None, confidence=t).before) for t in (0.80, 0.95))
        forms = {f"above {t:.2f}": float(before[index]) for t, before in found}
        entries.append({"table": "entropy", "row": row, "column": "H_sm(X)", "forms": forms})
    return entries


def as_temperature(batch, calibrator):
    """The temperature a calibrator amounts to, row by row, and what it does besides."""
    logits = batch.logits.double()
    mapped = calibrated_logits(batch, calibrator, None).double()
    centred, moved = (z - z.mean(1, keepdim=True) for z in (logits, mapped))
    heat = (centred.square().sum(1) / (centred * moved).sum(1))[:, None]
    rest = ((logits / heat).softmax(1) - mapped.softmax(1)).abs().max()
    return {"least": float(heat.min()), "most": float(heat.max()), "rest": float(rest)}


def temperatures(path):
    """The temperatures behind the paper's TS, ETS and PTS columns."""
    splits = read_anchor(path)
    names = ("temperature", "ensemble", "parameterised")
    wanted = [recipe for name, _, recipe in forms() if name in names]
    return [
        {"recipe": recipe, **as_temperature(splits["test"], fitted(recipe, splits["val"]))}
        for recipe in wanted
    ]


# --- packs: other networks, the paper's recipes --------------------------------------------------


def methods():
    """The six of the paper, as far as they exist."""
    return [m for m in PAPER_METHODS.values() if m == "none" or m in METHODS]


def compared(pack):
    """Every method alone, after a clip and jointly with a clip; the last two against the first."""
    alone, after = methods(), [after_clip(method) for method in methods()]
    plan = {"bins": BINS, "resamples": RESAMPLES, "seed": SEED}
    data = pack.split("val"), pack.split("test")
    steps = featcal.compare(*data, alone + after, pack.head, mode="sequential", **plan)
    joint = featcal.compare(*data, after[1:], pack.head, mode="joint", **plan)
    own = range(len(alone))
    rows = (*steps, *joint)  # of the same resamples, so their differences are paired
    both = Comparison(rows, (*(None for _ in own), *own, *own[1:]))
    modes = ["sequential"] * len(steps) + ["joint"] * len(joint)
    found = zip(modes, both.as_json()["rows"], strict=True)
    return [{"mode": mode, **told(row)} for mode, row in found]


def told(row):
    """A row with the intervals people ask for."""
    for key in ("intervals", "differences"):
        row[key] = {name: row[key][name] for name in WITH_INTERVALS} if row[key] else {}
    return tidy(row)


def pack_results(path, pack):
    summary = pack.summary()
    return {
        **source(path),
        **{key: summary[key] for key in ("dataset", "model", "features", "classes")},
        "rows": {split: pack.split(split).rows for split in ("val", "test")},
        "results": compared(pack),
    }


# --- small tables of our packs beside one of the paper's -----------------------------------------


def whole(data, head):
    parts = list(data)
    features = torch.cat([part.features for part in parts])
    return Batch(head(features), torch.cat([part.labels for part in parts]), features)


def beside_entropy(name, pack):
    """The paper's table of entropies on a pack: groups by the unclipped logits of val."""
    clip, rows = fitted("clip", pack.split("val"), pack.head), []
    for threshold in (0.80, 0.95):
        found = EntropyGrowth.of(pack.split("val"), clip, pack.head, confidence=threshold)
        for group, values in zip(
            ("HCE", "LCE"), zip(found.before, found.after, found.growth, strict=True), strict=True
        ):
            rows.append(
                {
                    "label": f"{group} above {threshold:.2f}",
                    "values": plain([float(value) for value in values]),
                }
            )
    title = f"{name}, another network: softmax entropy on val, nats"
    columns = ["before", "after clip", "difference"]
    return {"table": "entropy", "title": title, "columns": columns, "digits": 4, "rows": rows}


def beside_counts(name, pack):
    """How many rows of test are confident, and right or wrong."""
    test = pack.split("test")
    found = ConfidentCounts.of(test, None, pack.head, levels=CONFIDENT).before
    pairs = zip(CONFIDENT, found.T.tolist(), strict=True)
    rows = [{"label": f">{t:.2f}", "values": counts} for t, counts in pairs]
    title = f"{name}, another network: confident rows among {test.rows:,} of test"
    columns = ["Correct", "Wrong"]
    return {"table": "counts", "title": title, "columns": columns, "digits": 0, "rows": rows}


# --- what no user should do ----------------------------------------------------------------------


@torch.no_grad()
def leaked(name, pack, recipe):
    """A method after a clip: fitted on val, and fitted on test as the published code did for group.

    The clip is fitted on val in both cases, and the method gets the clipped features. A
    demonstration and nothing else: the second number says nothing about unseen data.
    """
    head = pack.head
    clip = fitted("clip", pack.split("val"), head)
    rows = {split: whole(pack.split(split), head) for split in ("val", "test")}
    rows = {s: Batch(None, b.labels, clip.map_features(b.features)) for s, b in rows.items()}
    found = {s: featcal.evaluate(rows["test"], fitted(recipe, rows[s], head), head) for s in rows}
    return {
        "pack": name,
        "recipe": recipe,
        "fitted_on_test": True,
        "on_val": found["val"].as_json()["metrics"],
        "on_test": found["test"].as_json()["metrics"],
    }


# --- all of it -----------------------------------------------------------------------------------


def run(packs, anchors):
    """The result file, from the .npz files of other networks and of the paper's logits."""
    results = {**made(), "packs": [], "anchors": [], "replays": [], "beside": [], "leaked": []}
    for path in anchors:
        results["anchors"].append(anchor_results(path))
        if path.stem.endswith("-ce"):
            results["temperatures"] = temperatures(path)
            results["replays"] += entropy_replays(read_anchor(path)["val"])
    results["replays"] += replays(results["anchors"])
    for path in packs:
        with tempfile.TemporaryDirectory() as folder:
            add_pack(results, path, featcal.import_files([path], Path(folder) / path.stem))
    return results


def add_pack(results, path, pack):
    print(f"{path.stem} ...", flush=True)
    results["packs"].append(pack_results(path, pack))
    results["beside"].append(beside_counts(path.stem, pack))
    if "cifar10-" in path.stem:
        results["beside"].append(beside_entropy(path.stem, pack))
    for recipe in ("group", "group(reference=True)") if path.stem in LEAKED else ():
        if "group" in METHODS:
            results["leaked"].append(leaked(path.stem, pack, recipe))


def made():
    model = [line for line in cpu_lines() if line.startswith("model name")]
    return {
        "made_by": "experiments/reproduction.py",
        "protocol": {
            "fit": "val",
            "test": "test",
            "bins": BINS,
            "resamples": RESAMPLES,
            "seed": SEED,
        },
        "versions": versions(),
        "hardware": {
            "cpu": model[0].partition(":")[2].strip() if model else platform.machine(),
            "threads": torch.get_num_threads(),
        },
        "methods": sorted(METHODS),
        "methods_missing": [m for m in PAPER_METHODS.values() if m not in ("none", *METHODS)],
    }


def cpu_lines():
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.is_file() else []


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--packs", nargs="+", metavar="NAME", help="only these packs")
    parser.add_argument("--output", type=Path, default=RESULTS, help="the result file")
    options = parser.parse_args()
    results = run(*sources(options.packs))
    options.output.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n")
    print(f"Wrote {options.output}")


def sources(names):
    """The .npz files of packs and anchors; nothing is written where they are not there."""
    packs, anchors = (sorted((SHARED / kind).glob("*.npz")) for kind in ("packs", "anchors"))
    packs = [path for path in packs if names is None or path.stem in names]
    if not packs or not anchors:
        raise SystemExit(f"{SHARED} holds no packs/*.npz of these names, or no anchors/*.npz")
    return packs, anchors


if __name__ == "__main__":
    main()
