"""Our search for the clipping threshold beside the published one, in one run on one machine.

Usage: python bench/clip.py [--output results/bench-clip.json]

The published search tries c = 0.01, 0.02, ..., 20.00 on the whole validation split and computes
accuracy, NLL and ECE at each step; `published` below is our own writing of that loop, plain and
without waste. It runs in full on the demo pack. On the large made problem a sample of its steps is
timed and scaled to 2,000. Ratios are what counts: both sides share the machine and its load.
"""

import argparse
import json
import math
import platform
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from featcal import Batch, FeatureClip, demo_pack

DOCS = Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md"
START, END = "<!-- bench table: made by bench/clip.py -->", "<!-- end of bench table -->"
STEPS = 2000
SAMPLED_STEPS = 12
REPEATS = 5


def published(features, labels, head, steps):
    """The published loop over the given step numbers; returns (c, NLL)."""
    before = (head(features).argmax(1) == labels).float().mean()
    best_c, best_nll = math.inf, math.inf
    for step in steps:
        c = step / 100
        logits = head(features.clamp(-c, c))
        accuracy = (logits.argmax(1) == labels).float().mean()
        nll = F.cross_entropy(logits, labels).item()
        published_ece(logits, labels)
        if nll < best_nll and accuracy > 0.99 * before:
            best_c, best_nll = c, nll
    return best_c, best_nll


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


def made_problem(rows=25_000, features=2048, classes=1000, seed=0):
    """Sparse ReLU features that lean towards their class, some rows with far too large units."""
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(classes, features, generator=g) / 24
    labels = torch.randint(classes, (rows,), generator=g)
    x = torch.randn(rows, features, generator=g) - 0.6 + 2.2 * weight[labels]
    # A tenth of the rows shout: their features are large and point to a class at random.
    loud = torch.rand(rows, generator=g) < 0.1
    wrong = torch.randint(classes, (int(loud.sum()),), generator=g)
    x[loud] = 3 * (torch.randn(len(wrong), features, generator=g) - 0.6) + 9 * weight[wrong]
    head = nn.Linear(features, classes)
    head.weight.data, head.bias.data = weight * 1.5, torch.zeros(classes)
    return x.relu_(), labels, head


def pack_problem():
    pack = demo_pack()
    batches = list(pack.split("val"))
    features, labels = (
        torch.cat([getattr(b, key) for b in batches]) for key in ("features", "labels")
    )
    return features, labels, pack.head


def timed(work):
    started = time.perf_counter()
    result = work()
    return result, time.perf_counter() - started


@torch.no_grad()
def measure(name, features, labels, head, *, sampled):
    batch = Batch(None, labels, features)
    fits = [timed(lambda: FeatureClip().fit(batch, head)) for _ in range(1 if sampled else REPEATS)]
    clip, ours = fits[-1][0], statistics.median(seconds for _, seconds in fits)
    step = clip.report.steps[0]
    steps = range(1, STEPS + 1)
    if sampled:
        steps = [round(1 + (STEPS - 1) * i / (SAMPLED_STEPS - 1)) for i in range(SAMPLED_STEPS)]
    (c, nll), seconds = timed(lambda: published(features, labels, head, steps))
    theirs = seconds * STEPS / len(steps)
    return {
        "problem": name,
        "rows": len(labels),
        "features": features.shape[1],
        "classes": head.out_features,
        "ours": {
            "seconds": ours,
            "head_passes": step.head_passes,
            "c": step.values["threshold"],
            "nll": step.loss_after,
        },
        "published": {
            "seconds": theirs,
            "steps_timed": len(steps),
            "c": None if sampled else c,
            "nll": None if sampled else nll,
        },
        "times_faster": theirs / ours,
    }


def show(row):
    ours, theirs = row["ours"], row["published"]
    size = f"{row['rows']:,} x {row['features']} -> {row['classes']}"
    print(f"{row['problem']}: {size}")
    print(
        f"  ours       {ours['seconds']:9.3f} s  {ours['head_passes']:5d} passes  "
        f"c = {ours['c']:.4f}  NLL {ours['nll']:.6f}"
    )
    found = "" if theirs["c"] is None else f"c = {theirs['c']:.4f}  NLL {theirs['nll']:.6f}"
    note = "" if theirs["c"] else f"(scaled from {theirs['steps_timed']} steps)"
    print(f"  published  {theirs['seconds']:9.3f} s  {STEPS:5d} passes  {found}{note}")
    print(f"  {row['times_faster']:.0f} times faster")


def table(rows):
    """The table of docs/benchmarks.md, from the numbers alone."""
    lines = ["| problem | rows x features -> classes | ours | passes | published | times faster |"]
    lines.append("|---|---|---:|---:|---:|---:|")
    for row in rows:
        size = f"{row['rows']:,} x {row['features']} -> {row['classes']}"
        ours, theirs = row["ours"], row["published"]["seconds"]
        cells = f"{ours['seconds']:.2f} s | {ours['head_passes']} | {theirs:,.0f} s"
        lines.append(f"| {row['problem']} | {size} | {cells} | {row['times_faster']:.0f} |")
    return "\n".join(lines)


def update_docs(rows):
    head, rest = DOCS.read_text().split(START)
    _, tail = rest.split(END)
    DOCS.write_text(f"{head}{START}\n{table(rows)}\n{END}{tail}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output",
        type=Path,
        help="also write the numbers as JSON, and the table of docs/benchmarks.md",
    )
    output = parser.parse_args().output
    problems = [("demo pack", pack_problem, False), ("made", made_problem, True)]
    rows = []
    for name, make, sampled in problems:
        rows.append(measure(name, *make(), sampled=sampled))
        show(rows[-1])
    if output:
        update_docs(rows)
        machine = {
            "threads": torch.get_num_threads(),
            "cpu": platform.processor() or platform.machine(),
        }
        body = {"torch": torch.__version__.split("+")[0], **machine, "rows": rows}
        output.write_text(json.dumps(body, indent=2) + "\n")


if __name__ == "__main__":
    main()
