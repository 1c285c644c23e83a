"""The paper's own ResNet-50 / CIFAR-10 logits: every method on them, and its cells again."""

import inspect
import warnings

import numpy as np
import torch

import featcal
from featcal import METHODS, Batch, metrics
from featcal.analysis import EntropyGrowth
from featcal.data.pack import sha256
from featcal.report.scores import calibrated_logits
from featcal.report.tables import PAPER_METHODS

BINS = 15
PAPER_NETWORK = "CIFAR-10 ResNet-50"


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
