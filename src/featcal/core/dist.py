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


def rank() -> int:
    """The place of this process among them."""
    return torch_dist.get_rank() if active() else 0


def total(values: Tensor) -> Tensor:
    """The sum over all processes; the argument itself when there is one."""
    return _reduced(values, "SUM")


def largest(values: Tensor) -> Tensor:
    """The elementwise maximum over all processes."""
    return _reduced(values, "MAX")


def ends(values: Tensor) -> tuple[float, float]:
    """The smallest and the largest of the values (n,) of all processes."""
    own = (
        torch.stack([-values.min(), values.max()]) if len(values) else torch.full((2,), -torch.inf)
    )
    lowest, highest = largest(own.double()).tolist()
    return -lowest, highest


def gather(values: Tensor) -> Tensor:
    """The rows of all processes, in rank order; ranks may hold different numbers of rows."""
    if not active():
        return values
    size = _shared(torch.tensor(len(values)))
    sizes = [torch.zeros_like(size) for _ in range(world())]
    torch_dist.all_gather(sizes, size)
    longest = int(max(sizes))
    padded = _shared(values.new_zeros((longest, *values.shape[1:])))
    padded[: len(values)] = values
    parts = [torch.empty_like(padded) for _ in sizes]
    torch_dist.all_gather(parts, padded)
    rows = [part[: int(size)] for part, size in zip(parts, sizes, strict=True)]
    return torch.cat(rows).to(values.device)


def _reduced(values: Tensor, operation: str) -> Tensor:
    if not active():
        return values
    shared = _shared(values)
    torch_dist.all_reduce(shared, op=getattr(torch_dist.ReduceOp, operation))
    return shared.to(values.device)


def _shared(values: Tensor) -> Tensor:
    """A copy where the processes can reach it: NCCL knows no main memory."""
    if torch_dist.get_backend() == "nccl":
        return values.cuda().clone()
    return values.cpu().clone()
