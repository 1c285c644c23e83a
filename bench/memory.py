"""Packs larger than memory: commands under --memory, and what they really held.

Usage: python bench/memory.py [--gigabytes 4] [--memory 1GB] [--output results/bench-memory.json]

A made pack of 2,048 features and 100 classes is written shard by shard to a temporary folder; every
command then runs in a process of its own, whose own memory (RssAnon: without pages of mapped
files) is read every 20 ms.
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


def measured(words):
    """Seconds and the most memory of one command."""
    started, most = time.perf_counter(), 0
    child = subprocess.Popen([sys.executable, "-m", "featcal", *words], stdout=subprocess.DEVNULL)
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
    parser.add_argument("--folder", help="where the pack is made; a temporary one unless given")
    parser.add_argument("--output", help="also write the numbers as JSON")
    asked = parser.parse_args()
    found = {"memory": asked.memory, "cores": os.cpu_count(), "torch": torch.__version__}
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        pack = str(Path(folder, "pack"))
        found["pack_bytes"] = made_pack(pack, asked.gigabytes)
        for name, words in COMMANDS.items():
            typed = [word.replace("PACK", pack) for word in words]
            found[name] = measured([*typed, "--memory", asked.memory])
            print(name, found[name], flush=True)
    if asked.output:
        Path(asked.output).write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
