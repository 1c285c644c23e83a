"""Fits and metrics on a GPU, in units of one plain product of the head: docs/benchmarks.md.

Usage: python bench/gpu.py [--problems 25000x2048x1000 ...] [--output results/bench-gpu.json]

Features and head lie on the device, in float32; the best of three after one that warms up.
"product" is `head(features)`, "read" is `logits.sum()`. Peak memory is what was allocated
beyond the features, the labels and the head. `python bench/tables.py` fills the page.
"""

import argparse
import time
from pathlib import Path

import torch
from made import RESULTS, keep, problem

from featcal import Batch, metrics, parse

PROBLEMS = ("25000x2048x1000", "250000x2048x1000", "1000000x2048x1000", "50000x4096x32000")
FITS = {
    "clip": ("clip", "joint"),
    "temperature": ("temperature", "joint"),
    "clip, then temperature": ("clip | temperature", "sequential"),
    "clip and temperature jointly": ("clip | temperature", "joint"),
    "sample": ("sample", "joint"),
}


def timed(work, repeats=3):
    """Seconds of the best run, bytes allocated beyond what was there, and what came out."""
    result = work()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held, best = torch.cuda.memory_allocated(), float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return best, torch.cuda.max_memory_allocated() - held, result


@torch.no_grad()
def measured(text):
    rows, width, classes = map(int, text.split("x"))
    features, labels, head = problem(rows, width, classes, "cuda")
    batch = Batch(None, labels, features)
    product, *_ = timed(lambda: head(features))
    found = {"rows": rows, "features": width, "classes": classes, "product": product}
    for name, (recipe, mode) in FITS.items():
        seconds, peak, fitted = timed(lambda r=recipe, m=mode: parse(r).fit(batch, head, mode=m))
        report = fitted.report
        values = {key: value for step in report.steps for key, value in step.values.items()}
        found[name] = {
            "seconds": seconds,
            "products": seconds / product,
            "peak": peak,
            "nll": report.loss_after,
            "values": {key: value for key, value in values.items() if isinstance(value, float)},
            "head_passes": sum(step.head_passes for step in report.steps),
        }
        print(
            f"{text} {name}: {seconds * 1e3:.1f} ms, {seconds / product:.1f} products", flush=True
        )
    if rows * classes <= 2**29:
        logits = head(features)
        read, *_ = timed(logits.sum)
        seconds, peak, _ = timed(lambda: metrics.ece(logits=logits, labels=labels))
        found["read"] = read
        found["ece"] = {"seconds": seconds, "reads": seconds / read, "peak": peak}
        print(f"{text} ece: {seconds * 1e3:.2f} ms, {seconds / read:.1f} reads", flush=True)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", nargs="+", default=PROBLEMS, metavar="ROWSxWIDTHxCLASSES")
    parser.add_argument("--output", type=Path, default=RESULTS / "bench-gpu.json")
    asked = parser.parse_args()
    problems = [measured(text) for text in asked.problems]
    keep(asked.output, {"device": torch.cuda.get_device_name(), "problems": problems})


if __name__ == "__main__":
    main()
