"""What a run leaves: the weights, a record of how they came about, and a pack to calibrate on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from featcal.core.disk import new_file
from featcal.data import Pack
from featcal.data.collect_pack import collect_pack
from featcal.datasets import Normalisation, Splits
from featcal.report.rows import versions
from featcal.train.run import Epoch
from featcal.train.watch import Batches

WEIGHTS, RECORD, PACK = "model.safetensors", "run.json", "pack"


def write_pack_of(
    model: nn.Module,
    splits: Splits,
    folder: Path,
    *,
    normalise: tuple[Normalisation, Normalisation],
    network: str,
    facts: dict[str, Any],
) -> Pack:
    """The features of val and test in full float32, whatever the network was trained in."""
    device = next(model.parameters()).device
    parts = {"val": (splits.val, normalise[0]), "test": (splits.test, normalise[1])}
    loaders = {split: Batches(*part, device) for split, part in parts.items()}
    with full_precision():
        return collect_pack(
            model,
            loaders,
            folder / PACK,
            dataset=splits.name,
            name=network,
            class_names=splits.class_names,
            meta=facts,
        )


def write_run(
    folder: Path, model: nn.Module, history: Sequence[Epoch], facts: dict[str, Any]
) -> dict[str, Any]:
    """Writes the weights and the record, which is the last file to appear."""
    weights = {key: value.detach().cpu().clone() for key, value in model.state_dict().items()}
    with new_file(folder / WEIGHTS, overwrite=True) as temporary:
        save_file({key: value.contiguous() for key, value in weights.items()}, temporary)
    record = {**facts, "versions": versions(), "epochs": [epoch.as_json() for epoch in history]}
    with new_file(folder / RECORD) as temporary:
        temporary.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
    return record


@contextmanager
def full_precision() -> Iterator[None]:
    """No TF32 in the block: ten bits of a product are too few to fit thresholds on."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = False
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before
