"""featcal on a CPU, beside its peers and the published search: docs/benchmarks.md.

Usage: python bench/cpu.py [--rounds 3] [--scale 1.0] [--output results/bench-cpu.json]

Every job has one set of arrays, which all who can do it get in the form they take; what is timed is
the library call alone, as its documentation shows it. All run in turns, and the unit, one plain
pass over the arrays (`head(features)` or `logits.sum()`), takes its turn too: what counts are
ratios. Then memory: the most that was resident beyond the arrays, each in a process of its own,
after a small run that loads what is loaded once; so for ours with very many classes. Then growth:
ours on 1, 2 and 4 times as many rows, features or classes, by the clock and in seconds of all
cores, the geometric mean over as many made sets as there are rounds, and the slope of their
logarithms.

The published search tries c = 0.01, 0.02, ..., 20.00 on all rows, with accuracy, NLL and ECE at
each; `published` is our own writing of that loop, plain and without waste. Four of its steps are
timed and scaled to 2,000. `make bench` installs the peers into an environment of their own; one
that is missing is said to be missing. `--scale 0.1` takes a tenth of the rows, to try it out.
"""

import argparse
import contextlib
import ctypes
import json
import logging
import math
import os
import re
import subprocess
import sys
import warnings
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from made import RESULTS, in_turns, keep, posterior, problem
from scipy.optimize import minimize_scalar
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from featcal import Batch, parse
from featcal.metrics import ece

STEPS, TIMED_STEPS = 2000, (1, 600, 1300, 2000)
RIGHT = 1e-7  # NLL above the optimum below which a search has found T
CLASSES = 1000
FACTORS = (1, 2, 4)  # of the growth
START = {  # rows, features, classes: where a sample of fixed size and the caches no longer count
    "rows": (262_144, 256, 256),
    "features": (131_072, 512, 256),
    "classes": (65_536, 256, 1024),
}

# --- the clipping threshold: each returns c -------------------------------------------------------


def featcal_clip(features, labels, head):
    batch = Batch(None, labels, features)
    return lambda: float(parse("clip").fit(batch, head).threshold)


def clip_passes(features, labels, head):
    """Passes of the head, not c."""
    batch = Batch(None, labels, features)
    return lambda: parse("clip").fit(batch, head).report.steps[0].head_passes


def published(features, labels, head):
    """Some steps of the published loop."""
    right = (head(features).argmax(1) == labels).float().mean()

    def run():
        best, lowest = math.inf, math.inf
        for step in TIMED_STEPS:
            logits = head(features.clamp(-step / 100, step / 100))
            accuracy = (logits.argmax(1) == labels).float().mean()
            nll = F.cross_entropy(logits, labels).item()
            published_ece(logits, labels)
            if nll < lowest and accuracy > 0.99 * right:
                best, lowest = step / 100, nll
        return best

    return run


def published_ece(logits, labels):
    confidence, prediction = logits.softmax(1).max(1)
    correct = prediction.eq(labels)
    total = 0.0
    for low, high in torch.linspace(0, 1, 16).unfold(0, 2, 1).tolist():
        inside = (confidence > low) & (confidence <= high)
        if inside.any():
            gap = confidence[inside].mean() - correct[inside].float().mean()
            total += gap.abs().item() * inside.float().mean().item()
    return total


# --- temperature: each returns T ------------------------------------------------------------------


def featcal_temperature(logits, labels):
    batch = Batch(logits, labels)
    return lambda: float(parse("temperature").fit(batch).temperature)


def one_loss(logits, labels):
    """No fit: what a single look at the loss costs in PyTorch."""

    def run():
        F.cross_entropy(logits, labels)
        return math.nan

    return run


def sklearn_temperature(logits, labels):
    from sklearn.calibration import _TemperatureScaling

    z, y = logits.numpy(), labels.numpy()
    return lambda: 1 / float(_TemperatureScaling().fit(z, y).beta_)


def probmetrics_temperature(logits, labels):
    from probmetrics.calibrators import TemperatureScalingCalibrator
    from probmetrics.distributions import CategoricalLogits

    def run():
        found = TemperatureScalingCalibrator()
        found.fit_torch(CategoricalLogits(logits), labels)
        return 1 / float(found.invtemp_)

    return run


def netcal_temperature(logits, labels, dtype=np.float64):
    from netcal.scaling import TemperatureScaling

    probs, y = logits.double().softmax(1).numpy().astype(dtype), labels.numpy()

    def run():
        found = TemperatureScaling()
        found.fit(probs, y)
        return 1 / float(np.ravel(found.temperature)[0])

    return run


def uncertainty_temperature(logits, labels):
    from torch_uncertainty.post_processing import TemperatureScaler

    loader = DataLoader(TensorDataset(logits, labels), batch_size=len(labels))

    def run():
        found = TemperatureScaler(model=nn.Identity(), device="cpu")
        with torch.enable_grad():
            found.fit(loader, progress=False)
        return float(found.temperature[0])

    return run


def exact_temperature(logits, labels):
    """T and the mean NLL as a function of T, in float64, by scipy."""
    z = logits.double()

    def nll(t):
        return float(F.cross_entropy(z / t, labels))

    found = minimize_scalar(
        lambda u: nll(np.exp(u)), bounds=(-1, 1.5), method="bounded", options={"xatol": 1e-9}
    )
    return float(np.exp(found.x)), nll


# --- ECE of 15 bins: each returns the value -------------------------------------------------------


def featcal_ece(logits, labels):
    return lambda: ece(logits=logits, labels=labels)


def featcal_ece_probs(logits, labels):
    probs = logits.softmax(1)
    return lambda: ece(probs, labels)


def torchmetrics_ece(logits, labels):
    from torchmetrics.functional.classification import multiclass_calibration_error as error

    return lambda: float(error(logits, labels, num_classes=logits.shape[1], n_bins=15))


def torchmetrics_ece_probs(logits, labels):
    return torchmetrics_ece(logits.softmax(1), labels)


def uncertainty_ece(logits, labels):
    from torch_uncertainty.metrics import CalibrationError

    probs = logits.softmax(1)

    def run():
        metric = CalibrationError(task="multiclass", num_classes=probs.shape[1], num_bins=15)
        metric.update(probs, labels)
        return float(metric.compute())

    return run


def netcal_ece(logits, labels):
    from netcal.metrics import ECE

    probs, y = logits.softmax(1).numpy(), labels.numpy()
    return lambda: float(ECE(15).measure(probs, y))


def sklearn_ece(logits, labels):
    from sklearn.calibration import calibration_curve

    probs, y = logits.softmax(1).numpy(), labels.numpy()

    def run():  # scikit-learn has no ECE: its curve of the top confidence, and the sum by hand
        confidence = probs.max(1)
        right = probs.argmax(1) == y
        true, mean = calibration_curve(right, confidence, n_bins=15)
        rows = np.bincount(np.searchsorted(np.linspace(0, 1, 16)[1:-1], confidence), minlength=15)
        return float((rows[rows > 0] / len(y) * np.abs(true - mean)).sum())

    return run


def probmetrics_ece(logits, labels):
    from probmetrics.metrics import Metrics

    metric = Metrics.from_names(["ece-15"])
    return lambda: float(metric.compute_all_from_labels_logits(labels, logits)["ece-15"])


# --- group calibration, which no peer has ---------------------------------------------------------


def featcal_group(features, labels, head):
    batch = Batch(None, labels, features)
    return lambda: parse("group(partitions=20)").fit(batch, head).report.loss_after


# --- the jobs: data for so many rows, the unit, and who does it: (package, input, how) ------------

PRODUCT, READ = "product", "read"
JOBS = {
    "clip": {
        "rows": 25_000,
        "data": lambda rows: problem(rows, 2048, CLASSES),
        "size": "2048 -> 1000",
        "who": {
            "featcal": ("featcal", "features", featcal_clip),
            "published search": (None, "features", published),
        },
    },
    "temperature": {
        "rows": 25_000,
        "data": lambda rows: posterior(rows, CLASSES),
        "size": "1000",
        "who": {
            "featcal": ("featcal", "logits", featcal_temperature),
            "F.cross_entropy, once": ("torch", "logits", one_loss),
            "scikit-learn": ("scikit-learn", "logits", sklearn_temperature),
            "probmetrics": ("probmetrics", "logits", probmetrics_temperature),
            "netcal": ("netcal", "probs, float64", netcal_temperature),
            "netcal, float32": (
                *("netcal", "probs, float32"),
                partial(netcal_temperature, dtype=np.float32),
            ),
            "torch-uncertainty": ("torch-uncertainty", "logits", uncertainty_temperature),
        },
    },
    "ECE": {
        "rows": 50_000,
        "data": lambda rows: posterior(rows, CLASSES, seed=1),
        "size": "1000",
        "who": {
            "featcal": ("featcal", "logits", featcal_ece),
            "torchmetrics": ("torchmetrics", "logits", torchmetrics_ece),
            "probmetrics": ("probmetrics", "logits", probmetrics_ece),
            "featcal, probs": ("featcal", "probs", featcal_ece_probs),
            "torchmetrics, probs": ("torchmetrics", "probs", torchmetrics_ece_probs),
            "torch-uncertainty": ("torch-uncertainty", "probs", uncertainty_ece),
            "netcal": ("netcal", "probs", netcal_ece),
            "scikit-learn curve, sum by hand": ("scikit-learn", "probs", sklearn_ece),
        },
    },
    "group": {
        "rows": 5_000,
        "data": lambda rows: problem(rows, 2048, 100),
        "size": "2048 -> 100",
        "who": {"featcal": ("featcal", "features", featcal_group)},
    },
}


def featcal_fit(recipe, features, labels, head):
    batch = Batch(None, labels, features)
    return lambda: parse(recipe).fit(batch, head).report.loss_after


VOCABULARY = {  # as many classes as a language model has: its memory alone is measured
    "rows": 1_300,
    "data": lambda rows: problem(rows, 4096, 128_000),
    "few": lambda rows: problem(rows, 64, 50),
    "size": "4096 -> 128,000",
    "who": {
        recipe: ("featcal", "features", partial(featcal_fit, recipe))
        for recipe in ("temperature", "clip", "clip | temperature", "sample")
    },
}


def plain(data):
    """The unit of a job: one pass over its arrays."""
    if len(data) == 2:
        return READ, lambda: float(data[0].sum())
    return PRODUCT, lambda: len(data[2](data[0]))


def beside(job, rounds, scale):
    """All who can do a job, in turns; memory; for a temperature, how far from the best."""
    rows = round(JOBS[job]["rows"] * scale)
    data = JOBS[job]["data"](rows)
    unit, plain_pass = plain(data)
    runs, failed = {unit: plain_pass}, {}
    for name, (_, _, how) in JOBS[job]["who"].items():
        try:
            with quiet():
                runs[name] = how(*data)
                runs[name]()  # warms up
        except Exception as error:  # a peer that cannot run here is part of the answer
            runs.pop(name, None)
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
    with quiet():
        found = in_turns(runs, rounds)
    best, nll = exact_temperature(*data) if job == "temperature" else (None, None)
    _, seconds, cores = found.pop(unit)
    cases = []
    for name, (package, form, _) in JOBS[job]["who"].items():
        case = {"name": name.split(", probs")[0], "input": form}
        case["version"] = version(package) if package and name not in failed else ""
        if name in failed:
            cases.append({**case, "error": failed[name]})
            continue
        value, took, used = found[name]
        times = STEPS / len(TIMED_STEPS) if name == "published search" else 1
        case |= {"value": value, "seconds": took * times, "cpu_seconds": used * times}
        case |= {"units": case["seconds"] / seconds, "cpu_units": case["cpu_seconds"] / cores}
        if math.isnan(value):
            del case["value"]
        elif nll is not None:
            case["excess"] = nll(value) - nll(best)
        case["peak"] = peak_of(job, name, scale)
        cases.append(case)
        print(f"{job}: {name}, {case['input']}: {case}", flush=True)
    about = {"job": job, "rows": rows, "size": JOBS[job]["size"], "unit": unit}
    return {**about, "unit_seconds": seconds, "unit_cpu_seconds": cores, "cases": cases}


@contextlib.contextmanager
def quiet():
    """Peers print, warn and draw bars; the table is ours."""
    with warnings.catch_warnings(), open(os.devnull, "w") as sink:
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        with contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
            yield


# --- memory ---------------------------------------------------------------------------------------


def peak_of(job, name, scale):
    """Bytes that were resident beyond the arrays, at most."""
    command = [sys.executable, __file__, "--scale", str(scale), "--peak", job, name]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return int(done.stdout)


def print_peak(job, name, scale):
    """What the process of `peak_of` does."""
    about = {**JOBS, "vocabulary": VOCABULARY}[job]
    how = about["who"][name][2]
    with quiet():
        how(*about.get("few", about["data"])(2000))()
        run = how(*about["data"](round(about["rows"] * scale)))
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from what is resident
        before = resident("VmRSS")
        run()
    print(resident("VmHWM") - before)


def vocabulary(scale):
    """The peaks of ours with very many classes."""
    peaks = {name: peak_of("vocabulary", name, scale) for name in VOCABULARY["who"]}
    print(f"vocabulary: {peaks}", flush=True)
    return {"rows": round(VOCABULARY["rows"] * scale), "size": VOCABULARY["size"], "peaks": peaks}


def resident(field):
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024


# --- growth ---------------------------------------------------------------------------------------

GROWN = {  # and along which of rows, features, classes
    "clip": ("rows", "features", "classes"),
    "temperature": ("rows", "classes"),
    "ECE": ("rows", "classes"),
}


def growth(rounds, scale):
    """Seconds of ours by size, and the slope of their logarithms."""
    ours = {"clip": clip_passes, "temperature": featcal_temperature, "ECE": featcal_ece}
    kinds, curves = ("passes", "seconds", "cpu_seconds"), []
    for job, axes in GROWN.items():
        for axis in axes:
            curve = {"job": job, "axis": axis, "sizes": [], **{kind: [] for kind in kinds}}
            for factor in FACTORS:
                size = dict(zip(START, START[axis], strict=True))
                size[axis] *= factor
                size["rows"] = round(size["rows"] * scale)
                found = []
                for seed in range(rounds):  # how far a search walks depends on the data
                    if job == "clip":
                        data = problem(*size.values(), seed=seed)
                    else:
                        data = posterior(size["rows"], size["classes"], seed=seed)
                    run = ours[job](*data)
                    if factor == FACTORS[0]:
                        run()  # warms up
                    passes, *times = in_turns({job: run}, 1)[job]
                    found.append((passes if job == "clip" else 1, *times))
                curve["sizes"].append(size)
                for kind, mean in zip(kinds, np.exp(np.log(found).mean(0)), strict=True):
                    curve[kind].append(float(mean))
            by_pass = np.divide(curve["seconds"], curve["passes"])
            slopes = {kind: curve[kind] for kind in kinds[1:]} | {"seconds_per_pass": by_pass}
            for kind, values in slopes.items():
                curve[f"slope_{kind}"] = float(np.polyfit(np.log(FACTORS), np.log(values), 1)[0])
            curves.append(curve)
            print(f"growth of {job} in {axis}: {curve}", flush=True)
    return {"factors": FACTORS, "curves": curves}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=RESULTS / "bench-cpu.json")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2, help="of torch, for every library")
    parser.add_argument("--scale", type=float, default=1.0, help="of the rows")
    parser.add_argument(
        "--only", nargs="+", choices=[*JOBS, "vocabulary", "growth"], help="the rest is kept"
    )
    parser.add_argument("--peak", nargs=2, metavar=("JOB", "NAME"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    # Torchvision has no CPU build here: its two operators are declared so that peers import it.
    torchvision = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        torchvision.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    torch.set_num_threads(asked.threads)
    torch.set_grad_enabled(False)
    if asked.peak:
        return print_peak(*asked.peak, asked.scale)
    kept = json.loads(asked.output.read_text()) if asked.only and asked.output.is_file() else {}
    jobs = {one["job"]: one for one in kept.get("jobs", [])}
    for job in JOBS:
        if asked.only is None or job in asked.only:
            jobs[job] = beside(job, asked.rounds, asked.scale)
    body = {"rounds": asked.rounds, "jobs": [jobs[job] for job in JOBS if job in jobs]}
    body |= {part: kept.get(part) for part in ("vocabulary", "growth")}
    if asked.only is None or "vocabulary" in asked.only:
        body["vocabulary"] = vocabulary(asked.scale)
    if asked.only is None or "growth" in asked.only:
        body["growth"] = growth(asked.rounds, asked.scale)
    keep(asked.output, body)


if __name__ == "__main__":
    main()
