"""Whether an exported file computes what the model computes, row by row.

Some calibrators are maps with steps (`jumps`): a row at an edge of one changes by a whole step with
the last digit of its features, and two runtimes never agree on last digits. Such a row is forgiven
where the model itself gives the file's answer once its head's input is moved by as much as
rounding moves it; it is counted apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from featcal.core.checks import InputError
from featcal.core.fit import plain
from featcal.export.inputs import LOGITS, Inputs, Output
from featcal.heads.head import CalibratedHead

TOLERANCE = 1e-4
ROUNDINGS = 8 * (3e-8, 1e-7, 3e-7, 3e-6)  # moves of the features, in parts of a row's largest

Runner = Callable[[Inputs], Tensor]  # the exported file's first output


@dataclass(frozen=True)
class Parity:
    """How far the logits of an exported file are from the model's.

    Attributes:
        rows: how many were compared.
        max_difference: of two logits, or of two probabilities where the model gives no logits; rows
            at an edge are left out.
        max_probability_difference: of the probabilities they stand for; likewise.
        predictions_changed: rows with another prediction, those at an edge included.
        tolerance: the largest difference allowed; of logits beyond 1, and beside a top logit beyond
            1, in parts of them, as float32 rounds them.
        rows_beyond: rows that differ by more.
        rows_at_edges: rows at an edge of the calibrator, where rounding decides on the side.
        output: what was compared: "logits" or "probabilities".
    """

    rows: int
    max_difference: float
    max_probability_difference: float
    predictions_changed: int
    tolerance: float
    rows_beyond: int = 0
    rows_at_edges: int = 0
    output: str = LOGITS

    @property
    def holds(self) -> bool:
        """Whether the file may stand for the model."""
        return self.rows_beyond == 0

    def as_json(self) -> dict[str, Any]:
        """The figures; `holds` among them."""
        return plain({**asdict(self), "holds": self.holds})  # type: ignore[no-any-return]

    def __str__(self) -> str:
        """The figures in words.

        >>> print(Parity(512, 3.1e-7, 1e-8, 0, 1e-4))
        512 rows in ONNX Runtime: logits differ by at most 3.1e-07, no prediction changed
        """
        changed = _counted(self.predictions_changed, "prediction")
        edges = f"; {_counted(self.rows_at_edges, 'row')} at an edge left out"
        return (
            f"{_counted(self.rows, 'row')} in ONNX Runtime: {self.output} differ by at most "
            f"{self.max_difference:.2g}, {changed} changed{edges if self.rows_at_edges else ''}"
        )


def _counted(number: int, thing: str) -> str:
    return f"{number or 'no'} {thing}{'' if number < 2 else 's'}"


def compare(
    model: nn.Module,
    runner: Runner,
    batches: Iterable[Inputs],
    *,
    tolerance: float,
    output: Output,
) -> Parity:
    """Runs both on every batch; the model is in eval mode already."""
    parts: list[tuple[Tensor, Tensor, Tensor]] = []  # (n, k) of each, and rows at an edge (n,)
    for batch in batches:
        ours, theirs = output.rows(output.of(batch.call(model))), output.rows(runner(batch))
        if ours.shape != theirs.shape:
            raise InputError(
                f"the exported file gives {output.name} of shape {tuple(theirs.shape)} where the "
                f"model gives {tuple(ours.shape)}"
            )
        if bool(ours.isnan().any()):
            raise InputError("the model gives NaN for these rows: there is nothing to compare")
        edge = _far(ours, theirs, tolerance)
        if bool(edge.any()):
            edge = _on_edges(model, batch, theirs, edge, tolerance, output)
        parts.append((ours, theirs, edge))
    ours, theirs, edge = (torch.cat(part) for part in zip(*parts, strict=True))
    changed = int((output.predicted(ours) != output.predicted(theirs)).sum())
    kept, other = ours[~edge], theirs[~edge]
    apart = _apart(kept, other), _apart(output.chances(kept), output.chances(other))
    largest = [float(part.max()) if part.numel() else 0.0 for part in apart]
    return Parity(
        rows=len(ours),
        max_difference=largest[0],
        max_probability_difference=largest[1],
        predictions_changed=changed,
        tolerance=tolerance,
        rows_beyond=int(_far(kept, other, tolerance).sum()),
        rows_at_edges=int(edge.sum()),
        output=output.name,
    )


def _apart(ours: Tensor, theirs: Tensor) -> Tensor:
    """Distances (n, k): 0 where both are the same infinity, infinite where either alone is NaN."""
    distance = torch.where(ours == theirs, 0, (ours - theirs).abs())
    return distance.nan_to_num(nan=torch.inf, posinf=torch.inf)


def _far(ours: Tensor, theirs: Tensor, tolerance: float) -> Tensor:
    """Rows (n,) that differ by more than the tolerance."""
    # Not of the largest size in the row: a class masked by -1e9 would excuse all the others.
    sizes = torch.maximum(ours.abs(), ours.amax(1, keepdim=True).abs())
    sizes = torch.where(sizes.isfinite(), sizes, 1).clamp(min=1)
    return (_apart(ours, theirs) > tolerance * sizes).any(1)


def _on_edges(
    model: nn.Module, batch: Inputs, other: Tensor, far: Tensor, tolerance: float, output: Output
) -> Tensor:
    """The far rows whose other answer the model gives too, its features moved by rounding: (n,)."""
    heads = [part for part in model.modules() if isinstance(part, CalibratedHead)]
    if not any(step.jumps for head in heads for step in head.calibrator.steps_in_order()):
        return torch.zeros_like(far)
    asked = far if batch.rows else torch.ones_like(far)  # a network may be expensive
    batch, other, near = batch.at(asked), other[asked], torch.zeros_like(far[asked])
    for seed, size in enumerate(ROUNDINGS):

        def move(
            _: nn.Module, args: tuple[Tensor, ...], seed: int = seed, size: float = size
        ) -> tuple[Tensor, ...]:
            """Moves the input of a head by a part of each row's largest value."""
            features, *rest = args
            generator = torch.Generator().manual_seed(seed)
            signs = torch.randint(2, features.shape, generator=generator) * 2 - 1
            largest = features.abs().reshape(len(features), -1).amax(1)
            steps = size * largest.view(-1, *[1] * (features.ndim - 1))
            return (features + steps * signs.to(features), *rest)

        with ExitStack() as hooks:
            for head in heads:
                hooks.enter_context(head.register_forward_pre_hook(move))
            near |= ~_far(output.rows(output.of(batch.call(model))), other, tolerance)
    found = far.clone()
    found[asked] &= near
    return found
