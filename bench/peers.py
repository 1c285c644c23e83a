"""featcal beside its peers, in one run on one machine: temperature, ECE, group calibration.

Usage: python bench/peers.py [--output results/bench-peers.json] [--threads 1]

Each library is called as its own documentation shows; what is timed is the library call alone, on
arrays that are ready in the form it takes. Every call runs once to warm up where it is short, then
`REPEATS` times, and the median counts. `make bench` installs the peers into an environment of their
own. A peer that is missing is said to be missing.
"""

import argparse
import contextlib
import json
import logging
import os
import platform
import statistics
import time
import warnings
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from featcal import Batch, Temperature, parse
from featcal.metrics import ece

DOCS = Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md"
REPEATS = 5
SHORT = 1.0  # seconds: a longer call is timed once
CONVERGED = 1e-7  # NLL above the optimum below which a search has found T
CLASSES, WIDTH = 1000, 128
CALL_ERRORS = (Exception,)


def made_logits(rows, heat=1.3, seed=0):
    """Exact posterior logits of class prototypes in noise, too sharp by `heat`: T is known."""
    g = torch.Generator().manual_seed(seed)
    prototypes = torch.randn(CLASSES, WIDTH, generator=g) * 0.33
    labels = torch.randint(CLASSES, (rows,), generator=g)
    x = prototypes[labels] + torch.randn(rows, WIDTH, generator=g)
    logits = x @ prototypes.T - prototypes.square().sum(1) / 2
    return logits * heat, labels


# --- temperature: each returns T ---------------------------------------------------------------


def featcal_temperature(logits, labels):
    batch = Batch(logits, labels)
    return lambda: float(Temperature().fit(batch).temperature)


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


def netcal_temperature_float32(logits, labels):
    return netcal_temperature(logits, labels, np.float32)


def uncertainty_temperature(logits, labels):
    torchvision_schemas()
    from torch_uncertainty.post_processing import TemperatureScaler

    loader = DataLoader(TensorDataset(logits, labels), batch_size=len(labels))

    def run():
        found = TemperatureScaler(model=nn.Identity(), device="cpu")
        found.fit(loader, progress=False)
        return float(found.temperature[0])

    return run


TEMPERATURE = {
    "featcal": (featcal_temperature, "featcal", "logits"),
    "scikit-learn _TemperatureScaling": (sklearn_temperature, "scikit-learn", "logits"),
    "probmetrics bisection": (probmetrics_temperature, "probmetrics", "logits"),
    "netcal, float64": (netcal_temperature, "netcal", "probs"),
    "netcal, float32": (netcal_temperature_float32, "netcal", "probs"),
    "torch-uncertainty LBFGS": (uncertainty_temperature, "torch-uncertainty", "logits"),
}


def exact_temperature(logits, labels):
    """T and the mean NLL as a function of T, in float64, by scipy."""
    z = logits.double()

    def nll(t):
        return float(torch.nn.functional.cross_entropy(z / t, labels))

    found = minimize_scalar(
        lambda u: nll(np.exp(u)), bounds=(-1, 1.5), method="bounded", options={"xatol": 1e-9}
    )
    return float(np.exp(found.x)), nll


# --- ECE: each returns the value ---------------------------------------------------------------


def featcal_ece_logits(logits, labels):
    return lambda: ece(logits=logits, labels=labels)


def featcal_ece_probs(logits, labels):
    probs = logits.softmax(1)
    return lambda: ece(probs, labels)


def torchmetrics_ece_probs(logits, labels):
    return _torchmetrics(logits.softmax(1), labels)


def _torchmetrics(values, labels):
    from torchmetrics.functional.classification import multiclass_calibration_error

    return lambda: float(
        multiclass_calibration_error(values, labels, num_classes=CLASSES, n_bins=15)
    )


def uncertainty_ece_probs(logits, labels):
    torchvision_schemas()
    from torch_uncertainty.metrics import CalibrationError

    probs = logits.softmax(1)

    def run():
        metric = CalibrationError(task="multiclass", num_classes=CLASSES, num_bins=15)
        metric.update(probs, labels)
        return float(metric.compute())

    return run


def netcal_ece_probs(logits, labels):
    from netcal.metrics import ECE

    probs, y = logits.softmax(1).numpy(), labels.numpy()
    return lambda: float(ECE(15).measure(probs, y))


def sklearn_ece_probs(logits, labels):
    from sklearn.calibration import calibration_curve

    probs, y = logits.softmax(1).numpy(), labels.numpy()

    def run():  # scikit-learn has no ECE: its curve of the top confidence, and the sum by hand
        confidence = probs.max(1)
        right = probs.argmax(1) == y
        true, mean = calibration_curve(right, confidence, n_bins=15)
        rows = np.bincount(np.searchsorted(np.linspace(0, 1, 16)[1:-1], confidence), minlength=15)
        return float((rows[rows > 0] / len(y) * np.abs(true - mean)).sum())

    return run


def probmetrics_ece_logits(logits, labels):
    from probmetrics.metrics import Metrics

    metric = Metrics.from_names(["ece-15"])
    return lambda: float(metric.compute_all_from_labels_logits(labels, logits)["ece-15"])


ECE = {
    "featcal": (featcal_ece_logits, "featcal", "logits"),
    "torchmetrics": (_torchmetrics, "torchmetrics", "logits"),
    "probmetrics": (probmetrics_ece_logits, "probmetrics", "logits"),
    "featcal ": (featcal_ece_probs, "featcal", "probs"),
    "torchmetrics ": (torchmetrics_ece_probs, "torchmetrics", "probs"),
    "torch-uncertainty": (uncertainty_ece_probs, "torch-uncertainty", "probs"),
    "netcal": (netcal_ece_probs, "netcal", "probs"),
    "scikit-learn curve, sum by hand": (sklearn_ece_probs, "scikit-learn", "probs"),
}


# --- measuring ---------------------------------------------------------------------------------


def torchvision_schemas():
    """Torchvision has no CPU build here: its two operators are declared so that it imports."""
    if hasattr(torchvision_schemas, "kept"):
        return
    kept = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        kept.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    torchvision_schemas.kept = kept


def timed(run):
    """The result and the median seconds."""
    seconds = []
    for _ in range(REPEATS + 1):
        started = time.perf_counter()
        result = run()
        seconds.append(time.perf_counter() - started)
        if seconds[0] > SHORT:
            return result, seconds[0]
    return result, statistics.median(seconds[1:])


def measure_all(cases, logits, labels):
    rows = []
    for name, (make, package, form) in cases.items():
        row = {"name": name.strip(), "package": package, "input": form}
        try:
            with quiet():
                row["value"], row["seconds"] = timed(make(logits, labels))
            row["version"] = version(package)
        except CALL_ERRORS as error:  # a peer that cannot run here is part of the answer
            row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
        rows.append(row)
        print(f"  {row['name']:34s} {form:7s} {shown(row)}", flush=True)
    return rows


@contextlib.contextmanager
def quiet():
    """Peers print, warn and draw bars; the table is ours."""
    with warnings.catch_warnings(), open(os.devnull, "w") as sink:
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        with contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
            yield


def shown(row):
    if "error" in row:
        return row["error"]
    extra = "" if "excess" not in row else f"  NLL above the optimum {row['excess']:.1e}"
    return f"{row['seconds']:8.3f} s  {row['value']:.7f}{extra}"


def temperature_bench(rows=25_000):
    logits, labels = made_logits(rows)
    best, nll = exact_temperature(logits, labels)
    print(f"temperature, {rows:,} x {CLASSES}, T = {best:.6f}")
    found = measure_all(TEMPERATURE, logits, labels)
    for row in found:
        if "error" not in row:
            row["excess"] = nll(row["value"]) - nll(best)
            row["converged"] = row["excess"] < CONVERGED
            print(f"  {row['name']:34s} NLL above the optimum {row['excess']:.1e}")
    peers = [row for row in found[1:] if row.get("converged")]
    fastest = min(peers, key=lambda row: row["seconds"])
    ratio = fastest["seconds"] / found[0]["seconds"]
    print(f"  {ratio:.1f} times faster than {fastest['name']}, the fastest that converges")
    return {"rows": rows, "temperature": best, "cases": found, "times_faster": ratio}


def ece_bench(rows=50_000):
    logits, labels = made_logits(rows, seed=1)
    print(f"ECE, {rows:,} x {CLASSES}, 15 bins")
    return {"rows": rows, "cases": measure_all(ECE, logits, labels)}


def group_bench(rows=5_000, features=2048, partitions=20):
    """No peer package has group calibration; the bar is a time."""
    done = []
    for classes in (10, 100):
        g = torch.Generator().manual_seed(0)
        head = nn.Linear(features, classes)
        head.weight.data = torch.randn(classes, features, generator=g) / 16
        head.bias.data.zero_()
        x = torch.randn(rows, features, generator=g).relu_()
        with torch.no_grad():
            z = head(x)
        heat = 1 + 2 * (x[:, :1] > 0)  # half of the rows are too sharp by 3
        gumbel = -torch.rand(z.shape, generator=g).log_().neg_().log_()
        batch = Batch(z, (z / heat + gumbel).argmax(1), x)
        recipe = parse(f"group(partitions={partitions})")
        started = time.perf_counter()
        recipe.fit(batch, head)
        seconds = time.perf_counter() - started
        report = recipe.report
        done.append(
            {
                **{"rows": rows, "features": features, "classes": classes, "seconds": seconds},
                **{"nll_before": report.loss_before, "nll_after": report.loss_after},
            }
        )
        print(f"group({partitions=}), {rows:,} x {features} -> {classes}: {seconds:.1f} s")
    return {"partitions": partitions, "cases": done}


# --- keeping -----------------------------------------------------------------------------------


def markers(name):
    return f"<!-- {name} table: made by bench/peers.py -->", f"<!-- end of {name} table -->"


def cases_table(cases, value, form):
    lines = [f"| library | input | {value} | seconds |", "|---|---|---:|---:|"]
    for row in cases:
        name = f"{row['name']} {row.get('version', '')}".strip()
        if "error" in row:
            lines.append(f"| {name} | {row['input']} | {row['error'].split(':')[0]} | |")
        else:
            lines.append(f"| {name} | {row['input']} | {form(row)} | {row['seconds']:.3f} |")
    return "\n".join(lines)


def tables(result):
    """The tables of docs/benchmarks.md, from the numbers alone."""
    group = ["| problem | seconds |", "|---|---:|"]
    for row in result["group"]["cases"]:
        size = f"{row['rows']:,} x {row['features']} -> {row['classes']}"
        group.append(
            f"| {size}, {result['group']['partitions']} partitions | {row['seconds']:.1f} |"
        )
    excess = cases_table(
        result["temperature"]["cases"],
        "T (NLL above the optimum)",
        lambda row: f"{row['value']:.5f} ({row['excess']:.0e})",
    )
    value = cases_table(result["ece"]["cases"], "ECE", lambda row: f"{row['value']:.7f}")
    return {"temperature": excess, "ece": value, "group": "\n".join(group)}


def update_docs(result):
    text = DOCS.read_text()
    for name, table in tables(result).items():
        start, end = markers(name)
        head, rest = text.split(start)
        text = f"{head}{start}\n{table}\n{end}{rest.split(end)[1]}"
    DOCS.write_text(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="also write JSON and docs/benchmarks.md")
    parser.add_argument("--threads", type=int, default=2, help="of torch, for every library")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    result = {"temperature": temperature_bench(), "ece": ece_bench(), "group": group_bench()}
    if options.output:
        update_docs(result)
        machine = {
            "torch": torch.__version__.split("+")[0],
            "threads": options.threads,
            "cpu": platform.processor() or platform.machine(),
        }
        options.output.write_text(json.dumps({**machine, **result}, indent=2) + "\n")


if __name__ == "__main__":
    main()
