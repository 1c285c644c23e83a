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
from featcal.train.checkpoint import FILE as CHECKPOINT
from featcal.train.epoch import Epoch
from featcal.train.folder import PACK, RECORD, WEIGHTS, check_unfinished
from featcal.train.watch import Batches, Watched, outputs

Pixels = tuple[Normalisation, Normalisation]  # of train and val, and of test


def write_pack_of(
    model: nn.Module,
    splits: Splits,
    folder: Path,
    *,
    normalise: Pixels,
    network: str,
    facts: dict[str, Any],
    head: str | None = None,
) -> Pack:
    """The features of val and test in full float32, whatever the network was trained in.

    A pack that is there already is of this very run, which was killed between this and its record.
    """
    if (folder / PACK).exists():
        return Pack.open(folder / PACK)
    with full_precision():
        return collect_pack(
            model,
            _loaders(model, splits, normalise),
            folder / PACK,
            head=head,
            dataset=splits.name,
            name=network,
            class_names=splits.class_names,
            meta=facts,
        )


def scores_of(model: nn.Module, splits: Splits, normalise: Pixels) -> dict[str, dict[str, float]]:
    """How the finished network does on val and on test, in full float32."""
    with full_precision():
        return {
            split: Watched.of(*outputs(model, loader, torch.float32)).as_json()
            for split, loader in _loaders(model, splits, normalise).items()
        }


def _loaders(model: nn.Module, splits: Splits, normalise: Pixels) -> dict[str, Batches]:
    device = next(model.parameters()).device
    parts = {"val": (splits.val, normalise[0]), "test": (splits.test, normalise[1])}
    return {split: Batches(*part, device) for split, part in parts.items()}


def write_run(
    folder: Path | str, model: nn.Module, history: Sequence[Epoch], facts: dict[str, Any]
) -> dict[str, Any]:
    """Writes the weights and then the record, and removes the checkpoint.

    Raises:
        InputError: where the folder holds a finished run; nothing is written then, for weights
            and record must be of one run.
    """
    folder = Path(folder)
    check_unfinished(folder)
    weights = {key: value.detach().cpu().clone() for key, value in model.state_dict().items()}
    with new_file(folder / WEIGHTS, overwrite=True) as temporary:
        save_file({key: value.contiguous() for key, value in weights.items()}, temporary)
    record = {**facts, "versions": versions(), "epochs": [epoch.as_json() for epoch in history]}
    with new_file(folder / RECORD) as temporary:
        temporary.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
    (folder / CHECKPOINT).unlink(missing_ok=True)
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
