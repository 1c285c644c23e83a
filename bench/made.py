"""What the benchmarks share: made data, runs in turns, the file a run leaves."""

import json
import os
import platform
import time
from pathlib import Path

import torch
from torch import nn

import featcal

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"


@torch.no_grad()
def problem(rows, width, classes, device="cpu", seed=0):
    """Sparse features that lean towards their class, one row in ten far too large, and a head."""
    draw = torch.Generator(device).manual_seed(seed)
    # Of one size of logits for every width, so that a search has as far to go.
    weight = torch.randn(classes, width, generator=draw, device=device) * (32**0.5 / 3) / width**0.5
    labels = torch.randint(classes, (rows,), generator=draw, device=device)
    features = torch.empty(rows, width, device=device)
    for start in range(0, rows, 2**15):
        some = slice(start, start + 2**15)
        x = torch.randn(features[some].shape, generator=draw, device=device) - 0.6
        loud = torch.rand(len(x), 1, generator=draw, device=device) < 0.1
        wrong = torch.randint(classes, (len(x),), generator=draw, device=device)
        towards = torch.where(loud, 9 * weight[wrong], 2.2 * weight[labels[some]])
        features[some] = torch.where(loud, 3 * x, x).add_(towards).relu_()
    head = nn.Linear(width, classes, device=device)
    head.weight.data, head.bias.data = weight * 1.5, torch.zeros(classes, device=device)
    return features, labels, head


@torch.no_grad()
def posterior(rows, classes, heat=1.3, seed=0, width=128):
    """Exact posterior logits of class prototypes in noise, too sharp by `heat`, and labels."""
    draw = torch.Generator().manual_seed(seed)
    prototypes = torch.randn(classes, width, generator=draw) * 0.33
    labels = torch.randint(classes, (rows,), generator=draw)
    x = prototypes[labels] + torch.randn(rows, width, generator=draw)
    return (x @ prototypes.T - prototypes.square().sum(1) / 2) * heat, labels


def in_turns(runs, rounds):
    """All runs once per round, one after another.

    Returns the answer of each, its best seconds by the clock and its best seconds of all cores:
    others who use the machine make a run slower, never faster.
    """
    found = {}
    for _ in range(rounds):
        for name, run in runs.items():
            started, cores = time.perf_counter(), time.process_time()
            value = run()
            spent = time.perf_counter() - started, time.process_time() - cores
            found.setdefault(name, []).append((value, *spent))
    return {
        name: (runs[-1][0], min(r[1] for r in runs), min(r[2] for r in runs))
        for name, runs in found.items()
    }


def keep(path, body):
    """Writes the numbers of a run, with the machine they come from."""
    machine = {
        "torch": torch.__version__.split("+")[0],
        "featcal": featcal.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
    }
    path.write_text(json.dumps({"machine": machine, **body}, indent=1) + "\n")
