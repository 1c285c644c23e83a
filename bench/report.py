"""How long `featcal report` takes, and how large its page is, by the number of classes.

Usage: python bench/report.py [--output results/bench-report.json]

The packs are made: ReLU features that lean towards their class, a tenth of the rows far too loud,
and the same features centred, as after a normalisation. What is timed is the whole command in a
process of its own, from the shell's point of view.
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
ROWS = {"val": 5_000, "test": 10_000}
FEATURES = 2048
PROBLEMS = ((10, False), (100, False), (1000, False), (1000, True))


def made_pack(folder, classes, signed):
    from clip import made_problem  # beside this file, where a script looks and a test does not

    features, labels, head = made_problem(sum(ROWS.values()), FEATURES, classes)
    if signed:
        features -= features.mean(1, keepdim=True)
    parts = {"val": slice(ROWS["val"]), "test": slice(ROWS["val"], None)}
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
    output = parser.parse_args().output
    rows = []
    for problem in PROBLEMS:
        rows.append(measure(*problem))
        print(rows[-1], flush=True)
    if output:
        about = {"cores": os.cpu_count(), "torch": torch.__version__, "machine": platform.machine()}
        found = {**about, "rows_scored": ROWS, "features": FEATURES, "rows": rows}
        Path(output).write_text(json.dumps(found, indent=2) + "\n")
        before, rest = DOCS.read_text().split(START)
        DOCS.write_text(f"{before}{START}\n{table(rows)}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
