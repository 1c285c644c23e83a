"""A function of one score kept as a table: steps between edges, or lines between nodes.

Tables are small buffers in log-odds. The look-up is in float32 whatever the buffers and scores come
in, so that a row falls into the same bin in every precision, and uses what torch.export and ONNX
know. A table is (m,), one for all, or (k, m), one for each column of the scores (n, k).
"""

import torch
from torch import Tensor


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
    left, weight = segment(at, nodes)
    values = values.float()
    start = _pick(values, left)
    return start + weight * (_pick(values, left + 1) - start)


def segment(at: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
    """The node to the left of each score, and how far the score is on its way to the next."""
    at, nodes = at.float(), nodes.float()
    left = locate(at, nodes).clamp(1, nodes.shape[-1] - 1) - 1
    start = _pick(nodes, left)
    length = (_pick(nodes, left + 1) - start).clamp(min=torch.finfo(torch.float32).tiny)
    return left, ((at - start) / length).clamp(0, 1)


def probable_segment(at: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
    """As `segment`, with distances between probabilities instead of log-odds.

    (p - p0) / (p1 - p0) without a difference of probabilities, which would cancel near 0 and 1.
    """
    at, nodes = at.float(), nodes.float()
    left, plain = segment(at, nodes)
    start, end = _pick(nodes, left), _pick(nodes, left + 1)
    length = (end - start).clamp(min=torch.finfo(torch.float32).tiny)
    ratio = torch.expm1(-plain * length) / torch.expm1(-length)
    scale = torch.nn.functional.logsigmoid(start + plain * length)
    return left, (ratio * (scale - torch.nn.functional.logsigmoid(end)).exp()).clamp(0, 1)


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
