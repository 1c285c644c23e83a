"""How long `featcal report` takes, and how large its page is, by the number of classes; many rows.

Usage: python bench/report.py [--output results/bench-report.json]
       python bench/report.py --rows 50000 100000 [--output results/bench-rows.json]

The packs are made: ReLU features that lean towards their class, a tenth of the rows far too loud,
and the same features centred, as after a normalisation. What is timed is the whole command in a
process of its own, from the shell's point of view. With --rows: compare, report and a fit of vector
scaling on packs with so many rows in each of two splits, 512 features and 100 classes.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from made import RESULTS, keep, problem

from featcal import Batch, write_pack

ROWS = {"val": 5_000, "test": 10_000}
FEATURES = 2048
PROBLEMS = ((10, False), (100, False), (1000, False), (1000, True))


FOUR = ("none", "temperature", "clip", "clip | temperature")
MANY = {
    "compare": ("compare", "PACK", *FOUR),
    "report": ("report", "PACK", *(f"--recipe={one}" for one in FOUR), "-o", "PACK/page.html"),
    "fit vector": ("fit", "PACK", "vector", "-o", "PACK/vector.safetensors"),
}


def made_pack(folder, classes, signed=False, rows=ROWS, width=FEATURES, scale=1.0):
    features, labels, head = problem(sum(rows.values()), width, classes)
    head.weight.data *= scale
    if signed:
        features -= features.mean(1, keepdim=True)
    parts = {"val": slice(rows["val"]), "test": slice(rows["val"], None)}
    splits = {name: Batch(None, labels[at], features[at]) for name, at in parts.items()}
    return write_pack(folder, splits, head=head, dataset="made", model="none")


def measure(classes, signed):
    with tempfile.TemporaryDirectory() as folder:
        pack, page = Path(folder, "pack"), Path(folder, "report.html")
        made_pack(pack, classes, signed)
        command = [sys.executable, "-m", "featcal", "report", str(pack), "-o", str(page)]
        started = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds, size = time.perf_counter() - started, page.stat().st_size
    return {"classes": classes, "signed": signed, "seconds": seconds, "bytes": size}


def measure_many(rows):
    """Seconds by the clock, of all cores together, and the most memory, of each command."""
    found = {"rows": rows}
    with tempfile.TemporaryDirectory() as folder:
        pack = str(Path(folder, "pack"))
        # Narrower features tell less: larger weights make about as many rows right.
        # In a process of its own: a child is said to have held at least what its parent did.
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            pool.submit(
                made_pack, pack, 100, rows={"val": rows, "test": rows}, width=512, scale=2.5
            ).result()
        for name, words in MANY.items():
            typed = [word.replace("PACK", pack) for word in words]
            started = time.perf_counter()
            child = subprocess.Popen(
                [sys.executable, "-m", "featcal", *typed], stdout=subprocess.DEVNULL
            )
            _, status, used = os.wait4(child.pid, 0)
            if status:
                raise SystemExit(f"featcal {' '.join(typed)} failed")
            found[name] = {
                "seconds": time.perf_counter() - started,
                "cpu_seconds": used.ru_utime + used.ru_stime,
                "gigabytes": used.ru_maxrss * 1024 / 1e9,
            }
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, help="results/bench-report.json, or bench-rows.json")
    parser.add_argument("--rows", type=int, nargs="+", help="many rows instead of many classes")
    asked = parser.parse_args()
    name, about = "report", {"rows_scored": ROWS, "features": FEATURES}
    if asked.rows:
        name, about = "rows", {"features": 512, "classes": 100}
    rows = []
    for one in asked.rows or PROBLEMS:
        rows.append(measure_many(one) if asked.rows else measure(*one))
        print(rows[-1], flush=True)
    keep(asked.output or RESULTS / f"bench-{name}.json", {**about, "rows": rows})


if __name__ == "__main__":
    main()
