"""A function of one score kept as a table: steps between edges, or lines between nodes.

Tables are small buffers in log-odds. The look-up is in float32 whatever the buffers and scores come
in, so that a row falls into the same bin in every precision, and uses what torch.export and ONNX
know. A table is (m,), one for all, or (k, m), one for each column of the scores (n, k).
"""

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import logsigmoid


def steps(at: Tensor, edges: Tensor, values: Tensor) -> Tensor:
    """values[j] where edge j - 1 < score <= edge j: one value more than edges.

    >>> steps(torch.tensor([0.0, 1.0, 1.5]), torch.tensor([1.0]), torch.tensor([5.0, 7.0]))
    tensor([5., 5., 7.])
    """
    return _pick(values.float(), locate(at, edges))


def lines(at: Tensor, nodes: Tensor, values: Tensor) -> Tensor:
    """Linear between two or more nodes, constant beyond them; equal nodes make a step.

    >>> lines(torch.tensor([0.5, 9.0]), torch.tensor([0.0, 1.0]), torch.tensor([5.0, 7.0]))
    tensor([6., 7.])
    """
    at, nodes = at.float(), nodes.float()
    left, start, length = _segment(at, nodes)
    return _part_way(values.float(), left, ((at - start) / length).clamp(0, 1))


def probable_lines(at: Tensor, nodes: Tensor, values: Tensor) -> Tensor:
    """As `lines`, with scores and nodes in log-odds but lines in the probability.

    The part of the way is (p - p0) / (p1 - p0), without differences of probabilities, which would
    cancel near 0 and 1.
    """
    at, nodes = at.float(), nodes.float()
    left, start, length = _segment(at, nodes)
    gone = torch.minimum((at - start).clamp(min=0), length)
    scale = logsigmoid(start + gone) - logsigmoid(start + length)
    way = torch.expm1(-gone) / torch.expm1(-length) * scale.exp()
    return _part_way(values.float(), left, way.clamp(0, 1))


def _segment(at: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The place of the node to the left of each score, the node, and how far the next one is."""
    left = locate(at, nodes).clamp(1, nodes.shape[-1] - 1) - 1
    start = _pick(nodes, left)
    length = _pick(nodes, left + 1) - start
    return left, start, length.clamp(min=torch.finfo(torch.float32).tiny)


def _part_way(values: Tensor, left: Tensor, way: Tensor) -> Tensor:
    start = _pick(values, left)
    return start + way * (_pick(values, left + 1) - start)


def locate(at: Tensor, edges: Tensor) -> Tensor:
    """How many edges lie below each score."""
    at, edges = at.float(), edges.float()
    return torch.bucketize(at, edges) if edges.ndim == 1 else _locate_in_columns(at, edges)


def _locate_in_columns(at: Tensor, edges: Tensor) -> Tensor:
    """Bisection, all scores at once: ONNX has no searchsorted."""
    most = edges.shape[1]
    place = torch.zeros_like(at, dtype=torch.int64)
    for step in (2**power for power in reversed(range(most.bit_length()))):
        reach = place + step
        edge = _pick(edges, reach.clamp(max=most) - 1)
        place = torch.where((reach <= most) & (edge < at), reach, place)
    return place


def _pick(table: Tensor, place: Tensor) -> Tensor:
    """The entries at these places, of each column's own row where there is one."""
    if table.ndim == 1:
        return table[place]
    rows = torch.arange(len(table), device=table.device) * table.shape[1]
    return table.flatten()[place + rows]


def stacked(tables: Iterable[NDArray[np.float64]]) -> Tensor:
    """Tables of different lengths as one (g, m): the last entry is repeated, which adds nothing.

    >>> stacked([np.array([1.0, 2.0]), np.array([3.0]), np.array([])]).tolist()
    [[1.0, 2.0], [3.0, 3.0], [0.0, 0.0]]
    """
    rows = list(tables)
    most = max(len(row) for row in rows)
    filled = [row if len(row) else np.zeros(1) for row in rows] if most else rows
    return torch.tensor(np.stack([np.pad(row, (0, most - len(row)), "edge") for row in filled]))


def sound(at: Tensor, values: Tensor, *, dims: int = 1, more: int) -> bool:
    """Whether this is no table at all, or one a fit can give.

    Args:
        at: its edges or nodes, which must ascend.
        values: its values, which must be finite.
        dims: 1 for one table, 2 for one a column.
        more: values beyond the number of nodes: 1 for steps, 0 for lines, which need two.
    """
    if at.numel() == 0 and values.numel() == 0:
        return True
    if not at.ndim == values.ndim == dims or values.shape[:-1] != at.shape[:-1]:
        return False
    if values.shape[-1] != at.shape[-1] + more:
        return False
    ascending = bool((at.diff() >= 0).all()) and not bool(at.isnan().any())
    return ascending and values.shape[-1] > 1 - more and bool(values.isfinite().all())
