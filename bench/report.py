"""How long `featcal report` takes, and how large its page is, by the number of classes; many rows.

Usage: python bench/report.py [--output results/bench-report.json]
       python bench/report.py --rows 50000 100000 [--output results/bench-rows.json]

The packs are made: ReLU features that lean towards their class, a tenth of the rows far too loud,
and the same features centred, as after a normalisation. What is timed is the whole command in a
process of its own, from the shell's point of view. With --rows: compare, report and a fit of vector
scaling on packs with so many rows in each of two splits, 512 features and 100 classes.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from featcal import Batch, write_pack

DOCS = Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md"
START, END = "<!-- report table: made by bench/report.py -->", "<!-- end of report table -->"
MANY_START, MANY_END = "<!-- rows table: made by bench/report.py -->", "<!-- end of rows table -->"
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
    from clip import made_problem  # beside this file, where a script looks and a test does not

    features, labels, head = made_problem(sum(rows.values()), width, classes)
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
        made_pack(pack, 100, rows={"val": rows, "test": rows}, width=512, scale=2.5)
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
            print(rows, name, found[name], flush=True)
    return found


def many_table(found):
    """The second table of docs/benchmarks.md, from the numbers alone."""
    lines = [
        "| rows in each split | command | seconds | of all cores | memory |",
        "|---:|---|---:|---:|---:|",
    ]
    for one in found:
        for name in MANY:
            cost = one[name]
            lines.append(
                f"| {one['rows']:,} | `{name}` | {cost['seconds']:.0f} | "
                f"{cost['cpu_seconds']:.0f} | {cost['gigabytes']:.1f} GB |"
            )
    return "\n".join(lines)


def table(rows):
    """The table of docs/benchmarks.md, from the numbers alone."""
    lines = ["| classes | features | seconds | page |", "|---:|---|---:|---:|"]
    for row in rows:
        kind = "signed" if row["signed"] else "ReLU"
        lines.append(
            f"| {row['classes']} | {kind} | {row['seconds']:.0f} | {row['bytes'] / 1e6:.1f} MB |"
        )
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--output", help="also write the numbers as JSON, and the table of the docs"
    )
    parser.add_argument("--rows", type=int, nargs="+", help="many rows instead of many classes")
    asked = parser.parse_args()
    about = {"cores": os.cpu_count(), "torch": torch.__version__, "machine": platform.machine()}
    start, end = (START, END) if asked.rows is None else (MANY_START, MANY_END)
    rows = []
    if asked.rows is not None:
        rows = [measure_many(number) for number in asked.rows]
        found, text = {**about, "features": 512, "classes": 100, "rows": rows}, many_table(rows)
    else:
        for problem in PROBLEMS:
            rows.append(measure(*problem))
            print(rows[-1], flush=True)
        found, text = (
            {**about, "rows_scored": ROWS, "features": FEATURES, "rows": rows},
            table(rows),
        )
    if asked.output:
        Path(asked.output).write_text(json.dumps(found, indent=2) + "\n")
        before, rest = DOCS.read_text().split(start)
        DOCS.write_text(f"{before}{start}\n{text}\n{end}{rest.split(end)[1]}")


if __name__ == "__main__":
    main()
