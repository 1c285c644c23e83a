"""How often intervals hold the truth where the rows of a sample are alike, as pixels of an image.

Usage: python experiments/clustered_coverage.py [--sets 2000] [--workers 1] [--write]

A world has samples of 64 rows. A row's logits are N(0, 2^2) in each of three classes, half of the
variance shared by its sample; labels are drawn from the softmax of these logits plus a shift of the
sample's own, N(0, 1) in each class, which no model sees. The model multiplies the logits it sees by
its sharpness. The truth of a metric is an integral over logits and shifts, on a grid: only their
differences count, which have two dimensions. --write keeps the numbers in
`results/clustered-coverage.json` and writes the table of docs/trust.md from them.
"""

import argparse
import json
import math
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch
from interval_coverage import alone

from featcal import Batch, evaluate
from featcal.core.batch import bin_index

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results" / "clustered-coverage.json"
DOCS = ROOT / "docs" / "trust.md"
START = "<!-- clustered coverage: made by experiments/clustered_coverage.py -->"
END = "<!-- end of clustered coverage -->"
METRICS = ("nll", "accuracy", "brier", "ece", "adaptive_ece")
SAMPLES, ROWS, CLASSES, BINS = (50, 200), 64, 3, 15
# The shift blurs the labels: 0.775 is about calibrated, 1.5 far too sure.
SHARPNESS = (0.775, 1.5)
RESAMPLES = 400


def world(samples, sharpness, seed):
    """Rows of samples, with the sample of each."""
    draw = np.random.default_rng([samples, seed])
    shared, shift = draw.standard_normal((2, samples, 1, CLASSES))
    logits = math.sqrt(2) * (shared + draw.standard_normal((samples, ROWS, CLASSES)))
    labels = (logits + shift + draw.gumbel(size=logits.shape)).argmax(2)
    groups = torch.arange(samples).repeat_interleave(ROWS)
    rows = torch.from_numpy(sharpness * logits).float().flatten(0, 1)
    return Batch(rows, torch.from_numpy(labels).flatten(), groups=groups)


def truth(sharpness, points=600, shifts=16):
    """Metric -> its value on the whole world."""
    plane = torch.tensor([[1, -1, 0], [1, 1, -2]]) / torch.tensor([[2.0], [6.0]]).sqrt()
    plane = plane.double()
    at = torch.linspace(-6, 6, points, dtype=torch.float64)
    mass = (-at.square() / 2).exp()
    mass = torch.cartesian_prod(mass, mass).prod(1)
    mass /= mass.sum()
    logits = 2 * torch.cartesian_prod(at, at) @ plane
    where, weight = np.polynomial.hermite_e.hermegauss(shifts)
    chance = torch.zeros_like(logits)
    for x, wx in zip(where, weight, strict=True):
        for y, wy in zip(where, weight, strict=True):
            chance += wx * wy * (logits + x * plane[0] + y * plane[1]).softmax(1)
    chance /= weight.sum() ** 2
    said = (sharpness * logits).log_softmax(1)
    claim = said.exp()
    sure, top = claim.max(1)
    hit = chance.gather(1, top[:, None])[:, 0]
    order = sure.argsort()
    place = torch.empty_like(order)
    place[order] = (mass[order].cumsum(0) * BINS).long().clamp(max=BINS - 1)

    def binned(index):
        sums = torch.zeros(BINS, dtype=torch.float64)
        return float(sums.index_add_(0, index, mass * (sure - hit)).abs().sum())

    return {
        "nll": float(-(mass[:, None] * chance * said).sum()),
        "accuracy": float((mass * hit).sum()),
        "brier": float((mass * (claim.square() - 2 * chance * claim).sum(1)).sum()) + 1,
        "ece": binned(bin_index(sure, BINS)),
        "adaptive_ece": binned(place),
    }


def held(samples, sharpness, known, seed):
    """Whether the interval of each metric holds the truth: by samples, and by rows."""
    data = world(samples, sharpness, seed)
    found = []
    for batch in (data, Batch(data.logits, data.labels)):
        scores = evaluate(batch, resamples=RESAMPLES, seed=seed)
        ends = [scores.interval(name) for name in METRICS]
        found.append(
            [one.low <= known[name] <= one.high for name, one in zip(METRICS, ends, strict=True)]
        )
    return found


def outside(found):
    """Which shares by samples are not between 93 and 97 percent, in words."""
    shares = [
        f"`{name}` of {row['samples']} samples ({100 * row['by_samples'][name]:.1f})"
        for row in found["rows"]
        for name in METRICS
        if not 0.93 <= row["by_samples"][name] <= 0.97
    ]
    return f"outside by samples: {', '.join(shares)}" if shares else "all are, by samples"


def table(found):
    """The table of docs/trust.md, from the numbers alone."""
    points = 200 * math.sqrt(0.0475 / found["sets"])
    lines = [
        f"`python experiments/clustered_coverage.py --sets {found['sets']} --write`",
        "",
        f"Samples of {found['rows_per_sample']} rows, {found['classes']} classes: how often 95 % "
        f"intervals of {found['resamples']} resamples hold the truth in {found['sets']:,} worlds, "
        f"in percent (known to {points:.0f} point), drawn by samples / by rows as if these were "
        f"independent. Between 93 and 97 is as it should be; {outside(found)}. For the errors of "
        "the model that is all but calibrated 97.5 would be right, since no interval ends below 0.",
        "",
        f"| samples | model | {' | '.join(f'`{name}`' for name in METRICS)} |",
        "|---:|---|" + "---:|" * len(METRICS),
    ]
    for row in found["rows"]:
        shares = (
            " / ".join(f"{100 * row[how][name]:.1f}" for how in ("by_samples", "by_rows"))
            for name in METRICS
        )
        model = f"ECE of {100 * row['truth']['ece']:.1f} %"
        lines.append(f"| {row['samples']} | {model} | {' | '.join(shares)} |")
    return "\n".join(lines)


def write_docs():
    before, rest = DOCS.read_text().split(START)
    text = table(json.loads(RESULTS.read_text()))
    DOCS.write_text(f"{before}{START}\n{text}\n{END}{rest.split(END)[1]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sets", type=int, default=2000, help="worlds of each kind")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="keep the numbers and the table")
    asked = parser.parse_args()
    rows = []
    with ProcessPoolExecutor(asked.workers, initializer=alone) as do:
        for sharpness in SHARPNESS:
            known = truth(sharpness)
            for samples in SAMPLES:
                one = partial(held, samples, sharpness, known)
                kept = torch.tensor(list(do.map(one, range(asked.sets), chunksize=4))).double()
                by_samples, by_rows = (
                    dict(zip(METRICS, part.tolist(), strict=True)) for part in kept.mean(0)
                )
                about = {"samples": samples, "sharpness": sharpness, "truth": known}
                rows.append({**about, "by_samples": by_samples, "by_rows": by_rows})
                print(rows[-1], flush=True)
    found = {"sets": asked.sets, "rows_per_sample": ROWS, "classes": CLASSES}
    found |= {"resamples": RESAMPLES, "rows": rows}
    if asked.write:
        RESULTS.write_text(json.dumps(found, indent=2) + "\n")
        write_docs()


if __name__ == "__main__":
    main()
