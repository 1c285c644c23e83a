"""The only module that knows about processes: every other one reduces through these functions."""

import torch
import torch.distributed as torch_dist
from torch import Tensor


def active() -> bool:
    """Whether a process group is running."""
    return torch_dist.is_available() and torch_dist.is_initialized()


def world() -> int:
    """The number of processes that share the work."""
    return torch_dist.get_world_size() if active() else 1


def total(values: Tensor) -> Tensor:
    """The sum over all processes; the argument itself when there is one."""
    if active():
        values = values.clone()
        torch_dist.all_reduce(values)
    return values


def largest(values: Tensor) -> Tensor:
    """The elementwise maximum over all processes."""
    if active():
        values = values.clone()
        torch_dist.all_reduce(values, op=torch_dist.ReduceOp.MAX)
    return values


def gather(values: Tensor) -> Tensor:
    """The rows of all processes, in rank order; ranks may hold different numbers of rows."""
    if not active():
        return values
    sizes = [torch.zeros((), dtype=torch.int64, device=values.device) for _ in range(world())]
    torch_dist.all_gather(sizes, torch.tensor(len(values), device=values.device))
    longest = int(max(sizes))
    padded = values.new_zeros((longest, *values.shape[1:]))
    padded[: len(values)] = values
    parts = [torch.empty_like(padded) for _ in sizes]
    torch_dist.all_gather(parts, padded)
    return torch.cat([part[: int(size)] for part, size in zip(parts, sizes, strict=True)])
