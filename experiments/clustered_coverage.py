"""How often intervals hold the truth where the rows of a sample are alike, as pixels of an image.

Usage: python experiments/clustered_coverage.py [--sets 400] [--workers 1] [--write]

A world has samples of 64 rows. A row's logits are N(0, 2^2) in each of three classes, half of the
variance shared by its sample; labels are drawn from the softmax of these logits plus a shift of the
sample's own, N(0, 1) in each class, which no model sees. The model multiplies the logits it sees by
its sharpness. The truth of a metric is its value on 20,000 other samples. --write keeps the numbers
in `results/clustered-coverage.json` and writes the table of docs/trust.md from them.
"""

import argparse
import json
import math
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import torch

from featcal import Batch, evaluate

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results" / "clustered-coverage.json"
DOCS = ROOT / "docs" / "trust.md"
START = "<!-- clustered coverage: made by experiments/clustered_coverage.py -->"
END = "<!-- end of clustered coverage -->"
METRICS = ("nll", "accuracy", "ece")
SAMPLES, ROWS, CLASSES, MANY = (50, 200), 64, 3, 20_000
SHARPNESS = (0.75, 1.5)  # about honest, since the shift blurs the labels, and far too sure
RESAMPLES = 400


def world(samples, sharpness, seed):
    """Rows of samples, with the sample of each."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, CLASSES, generator=draw)

    logits = math.sqrt(2) * (normal(samples, 1) + normal(samples, ROWS))
    probs = (logits + normal(samples, 1)).softmax(2).flatten(0, 1)
    labels = torch.multinomial(probs, 1, generator=draw)[:, 0]
    groups = torch.arange(samples).repeat_interleave(ROWS)
    return Batch(sharpness * logits.flatten(0, 1), labels, groups=groups)


def held(samples, sharpness, truth, seed):
    """Whether the interval of each metric holds the truth: by samples, and by rows."""
    data = world(samples, sharpness, seed)
    found = []
    for batch in (data, Batch(data.logits, data.labels)):
        scores = evaluate(batch, resamples=RESAMPLES, seed=seed)
        ends = [scores.interval(name) for name in METRICS]
        found.append(
            [one.low <= truth[name] <= one.high for name, one in zip(METRICS, ends, strict=True)]
        )
    return found


def table(found):
    """The table of docs/trust.md, from the numbers alone."""
    lines = [
        f"`python experiments/clustered_coverage.py --sets {found['sets']} --write`",
        "",
        f"Samples of {ROWS} rows, {CLASSES} classes; how often 95 % intervals of {RESAMPLES} "
        f"resamples hold the truth in {found['sets']} worlds, drawn by samples, and by rows as if "
        "these were independent:",
        "",
        "| samples | sharpness | metric | by samples | by rows |",
        "|---:|---:|---|---:|---:|",
    ]
    for row in found["rows"]:
        for name in METRICS:
            by_samples, by_rows = (100 * row[how][name] for how in ("by_samples", "by_rows"))
            lines.append(
                f"| {row['samples']} | {row['sharpness']} | {name} | {by_samples:.1f} % | "
                f"{by_rows:.1f} % |"
            )
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sets", type=int, default=400, help="worlds of each kind")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="keep the numbers and the table")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    with ProcessPoolExecutor(asked.workers, initializer=torch.set_num_threads, initargs=[1]) as do:
        for sharpness in SHARPNESS:
            truth = evaluate(world(MANY, sharpness, 10**6)).metrics
            for samples in SAMPLES:
                one = partial(held, samples, sharpness, truth)
                kept = torch.tensor(list(do.map(one, range(asked.sets), chunksize=4))).double()
                by_samples, by_rows = (
                    dict(zip(METRICS, part.tolist(), strict=True)) for part in kept.mean(0)
                )
                about = {"samples": samples, "sharpness": sharpness}
                about["truth"] = {name: truth[name] for name in METRICS}
                rows.append({**about, "by_samples": by_samples, "by_rows": by_rows})
                print(rows[-1], flush=True)
    found = {"sets": asked.sets, "rows_per_sample": ROWS, "classes": CLASSES}
    found |= {"resamples": RESAMPLES, "rows": rows}
    if asked.write:
        RESULTS.write_text(json.dumps(found, indent=2) + "\n")
        before, rest = DOCS.read_text().split(START)
        DOCS.write_text(f"{before}{START}\n{table(found)}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
