"""How often 95 % intervals hold the truth, and how often a comparison marks a difference that is none.

Usage: python experiments/interval_coverage.py [--sets 200] [--rows 300 1000] [--workers 2] [--write]

Test sets are drawn from worlds of known truth: logits N(0, s^2) in each class, s such that the best
guess is right as often as asked; labels drawn from their softmax; a model that knows these logits,
or multiplies them by 1.5 and so is far too sure. The truth of a metric is its value on 200,000 rows
with the probabilities of the labels in place of the labels. Marks are counted where none is due: a
comparison of five models that see the same logits, each with noise of its own. --write keeps the
numbers in `results/interval-coverage.json` and writes the table of docs/trust.md from them.
"""

import argparse
import json
import math
import os
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results" / "interval-coverage.json"
DOCS = ROOT / "docs" / "trust.md"
START = "<!-- coverage: made by experiments/interval_coverage.py -->"
END = "<!-- end of coverage -->"
METRICS = ("nll", "accuracy", "brier", "ece", "adaptive_ece", "classwise_ece")
ROWS, CLASSES, ACCURACIES = (300, 1000, 10_000), (2, 10, 100), (0.5, 0.9, 0.98, 0.995)
SHARPNESS = (1.0, 1.5)  # the model multiplies the true logits by this
MANY, BINS = 200_000, 15
TWINS, NOISE = 5, 0.3  # models of a comparison, and their noise in units of the logits' spread


def spread(classes, accuracy):
    """The s at which the best guess is right with this chance."""
    import torch

    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(MANY // 4, classes, generator=draw)
    low, high = 0.0, 2000.0
    for _ in range(40):
        middle = (low + high) / 2
        right = float((middle * logits).softmax(1).amax(1).mean())
        low, high = (middle, high) if right < accuracy else (low, middle)
    return low


def world(rows, classes, scale, seed):
    """True logits, and labels drawn from them."""
    import torch

    draw = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(rows, classes, generator=draw)
    noise = -torch.rand(rows, classes, generator=draw).log()
    return logits, (logits - noise.log()).argmax(1)


def truth(classes, scale, sharpness):
    """Metric -> its value on the whole world, with the chances of the labels for the labels."""
    import torch

    from featcal.core.batch import bin_index

    def binned(said, so):
        sums = torch.zeros(BINS, dtype=torch.float64)
        return float(sums.index_add_(0, bin_index(said, BINS), (said - so).double()).abs().sum())

    sums = dict.fromkeys(METRICS, 0.0)
    gaps, sure, right = torch.zeros(classes, BINS, dtype=torch.float64), [], []
    for part in range(20):
        logits, _ = world(MANY // 20, classes, scale, 10**6 + part)
        logits = logits.double()
        chance, claim = logits.softmax(1), (sharpness * logits).softmax(1)
        sums["nll"] += float(-(chance * (sharpness * logits).log_softmax(1)).sum()) / MANY
        top = claim.argmax(1)
        hit = chance.gather(1, top[:, None])[:, 0]
        sums["accuracy"] += float(hit.sum()) / MANY
        square = claim.square().sum(1) + 1 - 2 * (chance * claim).sum(1)
        sums["brier"] += float(square.sum()) / MANY
        sure.append(claim.amax(1))
        right.append(hit)
        for one in range(classes):
            gaps[one].index_add_(
                0, bin_index(claim[:, one].contiguous(), BINS), claim[:, one] - chance[:, one]
            )
    sure, right = torch.cat(sure), torch.cat(right)
    if sharpness == 1:  # exactly calibrated
        return sums
    sums["ece"] = binned(sure, right) / MANY
    order = sure.argsort()
    groups = zip(sure[order].chunk(BINS), right[order].chunk(BINS), strict=True)
    sums["adaptive_ece"] = sum(abs(float((s - r).sum())) for s, r in groups) / MANY
    sums["classwise_ece"] = float(gaps.abs().sum()) / MANY / classes
    return sums


def ready():
    """One thread, and no time for the smooth error, which is not looked at here."""
    import torch

    from featcal.report import bootstrap

    torch.set_num_threads(1)
    bootstrap.smooth_replicates = lambda _, drawn, *__: torch.full(
        (drawn.counts.shape[1],), math.nan
    )


def coverage(job):
    """Metric -> the share of sets whose interval lies above, holds, or lies below the truth."""
    from featcal import Batch, evaluate

    ready()
    rows, classes, accuracy, sharpness, sets, resamples = job
    accuracy = max(accuracy, 0.6) if classes == 2 else accuracy
    scale = spread(classes, accuracy)
    known, found = truth(classes, scale, sharpness), {name: [0, 0, 0] for name in METRICS}
    doubtful = {name: [0, 0] for name in METRICS}
    for seed in range(1, sets + 1):
        logits, labels = world(rows, classes, scale, seed)
        scores = evaluate(Batch(sharpness * logits, labels), resamples=resamples, seed=seed)
        few = scores.n * (1 - scores.metrics["accuracy"]) < 10
        for name in METRICS:
            around = scores.interval(name)
            side = (
                0
                if around.low > known[name] + 1e-12
                else 2
                if around.high < known[name] - 1e-12
                else 1
            )
            found[name][side] += 1 / sets
            if few:
                doubtful[name][0] += 1
                doubtful[name][1] += side == 1
    return {
        **{"rows": rows, "classes": classes, "accuracy": accuracy, "sharpness": sharpness},
        "metrics": found,
        "few": doubtful,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sets", type=int, default=200)
    parser.add_argument("--resamples", type=int, default=400)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS[:1])
    parser.add_argument("--classes", type=int, nargs="+", default=CLASSES)
    parser.add_argument("--sharpness", type=float, nargs="+", default=SHARPNESS)
    parser.add_argument("--workers", type=int, default=1)
    asked = parser.parse_args()
    jobs = [
        (*cell, asked.sets, asked.resamples)
        for cell in product(asked.rows, asked.classes, ACCURACIES, asked.sharpness)
    ]
    with ProcessPoolExecutor(asked.workers) as pool:
        for one in pool.map(coverage, jobs):
            print(
                one["rows"],
                one["classes"],
                one["accuracy"],
                one["sharpness"],
                *(
                    "%s %.0f(%.0f/%.0f)" % (n[:4], 100 * m[1], 100 * m[0], 100 * m[2])
                    for n, m in one["metrics"].items()
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()
