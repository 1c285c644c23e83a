"""Which bootstrap interval to print: how often each kind covers what it should.

Usage: python experiments/interval_coverage.py

Draws test sets from worlds whose truth is known and counts how often each kind of 95 % interval
covers it: the truth is the metric on two million rows. Beside that, how often each kind calls a
difference between two predictors that are equally good, by resamples paired as in `compare`. Writes
`results/interval-coverage.json` and the table between the markers in docs/numerics.md.
"""

import json
from pathlib import Path

import torch

from featcal import Batch, evaluate
from featcal.metrics.columns import COLUMNS
from featcal.report.bootstrap import interval

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results" / "interval-coverage.json"
DOCS = ROOT / "docs" / "numerics.md"
START, END = "<!-- made by experiments/interval_coverage.py -->", "<!-- end of that table -->"
CLASSES, SPREAD, MANY = 10, 2.0, 2_000_000  # the true logits are N(0, 2^2) in each class
SHARPNESS = (1.0, 1.05, 1.15, 1.6)  # the model multiplies the true logits by this
SIZES = (1000, 5000)
SETS, RESAMPLES = 200, 400
KINDS = ("percentile", "reflected", "centred", "ours")
# Exactly 0 where the model is the truth, however many rows it would take to see it.
ERRORS = (
    *("ece", "adaptive_ece", "classwise_ece", "mce", "rms_ce", "debiased_ce"),
    *("smooth_ece", "overconfidence"),
)
SHOWN = ("nll", "ece", "adaptive_ece", "classwise_ece", "rms_ce", "debiased_ce", "smooth_ece")


def world(rows, sharpness, seed):
    """Logits of a model, and labels drawn from the truth behind it."""
    draw = torch.Generator().manual_seed(seed)
    logits = SPREAD * torch.randn(rows, CLASSES, generator=draw)
    noise = -torch.rand(rows, CLASSES, generator=draw).log()
    return sharpness * logits, (logits - noise.log()).argmax(1)


def twins(rows, sharpness, seed):
    """Two models of one world, each with noise of its own: neither is better."""
    logits, labels = world(rows, 1.0, seed)
    draw = torch.Generator().manual_seed(seed + 10**6)
    noisy = (logits + 0.5 * torch.randn(logits.shape, generator=draw) for _ in range(2))
    return [(sharpness * each, labels) for each in noisy]


def scored(model, seed):
    return evaluate(Batch(*model), resamples=RESAMPLES, seed=seed)


def intervals(name, estimate, replicates):
    """Every kind of interval of a metric, (low, high) each."""
    low, high = replicates.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    bias = float(replicates.mean()) - estimate
    ours = interval(estimate, replicates, COLUMNS[name].power)
    return {
        "percentile": (low, high),
        "reflected": (2 * estimate - high, 2 * estimate - low),
        "centred": (low - bias, high - bias),
        "ours": (ours.low, ours.high),
    }


def truths(sharpness):
    """Metric -> its value on the whole world."""
    found = evaluate(Batch(*world(MANY, sharpness, 0))).metrics
    return {**found, **(dict.fromkeys(ERRORS, 0.0) if sharpness == 1 else {})}


def coverage(rows, sharpness):
    """Metric -> the truth, the mean estimate and, for each kind, the share of sets it covers."""
    truth = truths(sharpness)
    found = [scored(world(rows, sharpness, 1 + seed), seed) for seed in range(SETS)]
    return {
        name: {
            "truth": truth[name],
            "mean_estimate": sum(scores.metrics[name] for scores in found) / SETS,
            **shares(
                [intervals(name, s.metrics[name], s.replicates[name]) for s in found],
                lambda low, high, name=name: low <= truth[name] <= high,
            ),
        }
        for name in truth
    }


def false_findings(rows, sharpness):
    """Metric -> for each kind, the share of sets on which one of two twins is called better."""
    pairs = []
    for seed in range(SETS):
        pairs.append([scored(model, seed) for model in twins(rows, sharpness, 1 + seed)])
    return {
        name: shares(
            [
                intervals(
                    name,
                    one.metrics[name] - other.metrics[name],
                    one.replicates[name] - other.replicates[name],
                )
                for one, other in pairs
            ],
            lambda low, high: low > 0 or high < 0,
        )
        for name in pairs[0][0].metrics
    }


def shares(found, holds):
    return {kind: sum(holds(*each[kind]) for each in found) / SETS for kind in KINDS}


def run():
    return {
        "setting": {
            **{"classes": CLASSES, "spread": SPREAD, "rows_of_the_truth": MANY},
            **{"sets": SETS, "resamples": RESAMPLES, "level": 0.95},
        },
        "coverage": [
            {"rows": rows, "sharpness": sharpness, "metrics": coverage(rows, sharpness)}
            for rows in SIZES
            for sharpness in SHARPNESS
        ],
        "false_findings": [
            {
                "rows": SIZES[0],
                "sharpness": sharpness,
                "metrics": false_findings(SIZES[0], sharpness),
            }
            for sharpness in (0.9, 1.3)
        ],
    }


def table(results):
    """The table of docs/numerics.md, from the result file alone."""
    lines = ["| | " + " | ".join(f"`{name}`" for name in SHOWN) + " |"]
    lines.append("|---|" + "---:|" * len(SHOWN))
    for kind in KINDS:
        worst = (span([r["metrics"][n][kind] for r in results["coverage"]]) for n in SHOWN)
        lines.append(f"| covers the truth, {kind} | {' | '.join(worst)} |")
    for kind in KINDS:
        false = (span([r["metrics"][n][kind] for r in results["false_findings"]]) for n in SHOWN)
        lines.append(f"| false findings, {kind} | {' | '.join(false)} |")
    return "\n".join(lines)


def span(values):
    low, high = (f"{100 * value:.0f}" for value in (min(values), max(values)))
    return f"{low} %" if low == high else f"{low} to {high} %"


def main():
    results = run()
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    head, rest = DOCS.read_text().split(START)
    _, tail = rest.split(END)
    DOCS.write_text(f"{head}{START}\n{table(results)}\n{END}{tail}")
    print(f"Wrote {RESULTS.relative_to(ROOT)} and the table in {DOCS.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
