"""Fits over several processes of one machine, and what they say of more rows: docs/scale.md.

Usage: python bench/scale.py [--rows 50000 100000 200000] [--processes 1 2 4]
                             [--output results/bench-scale.json]

Packs are made, 256 float32 features and 100 classes. What is timed is the whole command, `torchrun
--nproc-per-node N -m featcal fit`, and the fit alone, as it reports; each process has one thread.
Commands take turns, and the best of `--rounds` counts.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from made import RESULTS, keep, problem

from featcal import Batch, write_pack

WIDTH, CLASSES = 256, 100
RECIPES = ("temperature", "clip")
FAR = 10**9


def fitted(pack, recipe, processes):
    """Seconds of the command and of the fit in it, and the loss it ends with."""
    fit = [*("-m", "featcal", "fit", pack, recipe, "-o", f"{pack}.cal", "--force", "--json")]
    runner = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    words = [*runner, *fit] if processes > 1 else fit
    started = time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words], check=True, env=environment, stdout=subprocess.PIPE, text=True
    )
    whole = time.perf_counter() - started
    report = json.loads(done.stdout)
    return whole, report["seconds"], report["loss_after"]


def measured(rows, processes, rounds):
    """Every recipe on a pack of so many rows, by every number of processes."""
    with tempfile.TemporaryDirectory() as folder:
        pack = str(Path(folder, "pack"))
        features, labels, head = problem(rows, WIDTH, CLASSES)
        head.weight.data *= 3.5  # fewer features tell less
        splits = {"val": Batch(None, labels, features)}
        write_pack(pack, splits, head=head, dataset="made", model="none")
        del features
        keys = [(recipe, number) for recipe in RECIPES for number in processes]
        found = {key: [] for key in keys}
        for _ in range(rounds):
            for key in keys:
                found[key].append(fitted(pack, *key))
    cases = []
    for (recipe, number), runs in found.items():
        case = {"rows": rows, "recipe": recipe, "processes": number, "loss_after": runs[0][2]}
        case |= {"seconds": min(run[0] for run in runs), "fit_seconds": min(r[1] for r in runs)}
        cases.append(case)
        print(case, flush=True)
    return cases


def expected(cases):
    """The fit at a billion rows, from what one process took; in proportion where it grew less."""
    found = {}
    for recipe in RECIPES:
        ones = [one for one in cases if one["recipe"] == recipe and one["processes"] == 1]
        rows, seconds = ([one[key] for one in ones] for key in ("rows", "fit_seconds"))
        slope = float(np.polyfit(np.log(rows), np.log(seconds), 1)[0]) if len(rows) > 1 else None
        # A slope below 1 is that of costs that do not grow: far out, those of each row are left.
        hours = slope and seconds[-1] * (FAR / rows[-1]) ** max(slope, 1) / 3600
        found[recipe] = {"slope": slope, "hours": hours}
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[50_000, 100_000, 200_000])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output", type=Path, default=RESULTS / "bench-scale.json")
    asked = parser.parse_args()
    about = {"features": WIDTH, "classes": CLASSES, "rounds": asked.rounds, "far": FAR}
    cases = []
    for rows in asked.rows:  # a run that is stopped leaves what is done
        cases += measured(rows, asked.processes, asked.rounds)
        keep(asked.output, {**about, "cases": cases, "expected": expected(cases)})


if __name__ == "__main__":
    main()
