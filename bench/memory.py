"""Packs larger than memory: commands under --memory, and what they really held.

Usage: python bench/memory.py [--gigabytes 4] [--memory 1GB] [--group] [--output FILE]

A made pack of 2,048 features and 100 classes is written shard by shard to a temporary folder; every
command then runs in a process of its own, whose own memory (RssAnon: without pages of mapped
files) is read every 20 ms. With --group it runs in a control group of the system, which holds it to
the cap with all its pages, those of mapped files included, and kills what takes more: needs root.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from featcal import Batch, Pack, write_pack
from featcal.core.memory import parsed

FEATURES, CLASSES, PART = 2048, 100, 8192
COMMANDS = {
    "fit": ("fit", "PACK", "clip | temperature", "-o", "PACK/cal.safetensors"),
    "eval": ("eval", "PACK", "PACK/cal.safetensors"),
    "compare": ("compare", "PACK", "none", "temperature", "clip"),
}


class Made:
    """Rows of a split, made as they are read: ReLU features that lean towards their class."""

    def __init__(self, rows, head, seed):
        self.rows, self.head, self.seed = rows, head, seed

    def __iter__(self):
        draw = torch.Generator().manual_seed(self.seed)
        for start in range(0, self.rows, PART):
            size = min(PART, self.rows - start)
            labels = torch.randint(CLASSES, (size,), generator=draw)
            features = torch.randn(size, FEATURES, generator=draw)
            features = features.add_(0.1 * self.head.weight[labels].sign()).relu_()
            yield Batch(None, labels, features)


def made_pack(folder, gigabytes):
    torch.manual_seed(0)
    head = nn.Linear(FEATURES, CLASSES).requires_grad_(False)
    head.weight *= 8
    rows = int(gigabytes * 1e9 / (4 * FEATURES) / 2)
    splits = {name: Made(rows, head, seed) for seed, name in enumerate(("val", "test"))}
    write_pack(folder, splits, head=head, dataset="made", model="none")
    return sum(part.bytes for part in Pack.open(folder).manifest.parts())


def held(pid):
    """Bytes that a process holds of its own; 0 when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
    except (OSError, StopIteration):
        return 0


def control_group(cap):
    """The file that takes the processes of a group which the system holds to so many bytes."""
    root = Path("/sys/fs/cgroup")
    old = (root / "memory").is_dir()
    group = (root / "memory" if old else root) / "featcal-bench"
    group.mkdir(exist_ok=True)
    (group / ("memory.limit_in_bytes" if old else "memory.max")).write_text(str(cap))
    return group / "cgroup.procs"


def forget(folder):
    """Has the system drop its pages of a folder's files: the first reader is charged for a page."""
    os.sync()
    for path in Path(folder).iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measured(words, joins):
    """Seconds and the most memory of one command, in a group of the system where there is one."""
    started, most = time.perf_counter(), 0
    child = subprocess.Popen(
        [sys.executable, "-m", "featcal", *words],
        stdout=subprocess.DEVNULL,
        preexec_fn=joins and (lambda: joins.write_text(str(os.getpid()))),
    )
    while child.poll() is None:
        most = max(most, held(child.pid))
        time.sleep(0.02)
    if child.returncode:
        raise SystemExit(f"featcal {' '.join(words)} failed")
    return {"seconds": time.perf_counter() - started, "own_bytes": most}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=4.0, help="of the pack")
    parser.add_argument("--memory", default="1GB", help="the cap of every command")
    parser.add_argument("--group", action="store_true", help="have the system hold it to the cap")
    parser.add_argument("--folder", help="where the pack is made; a temporary one unless given")
    parser.add_argument("--output", help="also write the numbers as JSON, beside those in the file")
    asked = parser.parse_args()
    joins = control_group(parsed(asked.memory)) if asked.group else None
    found = {"memory": asked.memory, "group": asked.group, "cores": os.cpu_count()}
    found["torch"] = torch.__version__.split("+")[0]
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        pack = str(Path(folder, "pack"))
        found["pack_bytes"] = made_pack(pack, asked.gigabytes)
        for name, words in COMMANDS.items():
            typed = [word.replace("PACK", pack) for word in words]
            forget(pack)
            found[name] = measured([*typed, "--memory", asked.memory], joins)
            print(name, found[name], flush=True)
    if asked.output:
        path = Path(asked.output)
        runs = json.loads(path.read_text())["runs"] if path.is_file() else []
        runs = [run for run in runs if run["group"] != asked.group]
        path.write_text(json.dumps({"runs": [*runs, found]}, indent=2) + "\n")


if __name__ == "__main__":
    main()
