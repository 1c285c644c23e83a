"""The only module that knows about processes: every other one reduces through these functions.

torchrun starts the processes and `processes` joins them; each holds some of the rows, and sums,
maxima and rows of all of them come from here. A process that ends takes the others with it:
whatever waits for it raises `Elsewhere`.
"""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor

from featcal.core.checks import ENDED, Elsewhere, InputError

# One process may be late by hours, as at the end of a collection; one that dies is noticed at once.
LONGEST = timedelta(days=2)
SAID = "featcal/said"

_alone: ContextVar[bool] = ContextVar("alone", default=False)
_store: Any = None  # where processes leave word for each other, once they have joined


def launched() -> tuple[int, int]:
    """Which of how many processes this is, as torchrun says before they have joined; 0 of 1."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    return (int(os.environ.get("RANK", 0)), world) if world > 1 else (0, 1)


@contextmanager
def processes(*, gpu: bool) -> Iterator[None]:
    """Joins the other processes that torchrun started, if it did: by NCCL on GPUs, else by gloo."""
    global _store
    if launched()[1] < 2 or active():
        yield
        return
    if gpu:
        _take_gpu()
    # In a thread: those who never come are waited for below Python, where no signal is heard.
    joined: Future[Any] = Future()
    Thread(target=_join, args=(joined, gpu), daemon=True).start()
    _store = joined.result()
    try:
        yield
    finally:
        torch_dist.destroy_process_group()
        _store = None


def _join(joined: Future[Any], gpu: bool) -> None:
    """Joins the others, and hands over the store, or what went wrong."""
    from torch.distributed.rendezvous import rendezvous

    try:
        if gpu:
            _take_gpu()
        try:
            store, rank, world = next(rendezvous("env://"))
        except ValueError as error:  # such as no MASTER_ADDR
            raise InputError(
                f"WORLD_SIZE is {launched()[1]}, and {error}: start the processes with torchrun"
            ) from error
        torch_dist.init_process_group(
            "nccl" if gpu else "gloo", store=store, rank=rank, world_size=world, timeout=LONGEST
        )
        joined.set_result(store)
    except BaseException as error:
        joined.set_exception(error)


def _take_gpu() -> None:
    """Makes the GPU of this process the current one, which each thread has of its own."""
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))


def speaks(error: BaseException, patience: float) -> bool:
    """Whether this process is the one to say what ended the job; the first that knows better.

    One that only knows of another's end gives that one so many seconds to say more.
    """
    if _store is None:
        return True
    with _silent(), suppress(RuntimeError):  # torch's own words of a store that went with a process
        end = time.monotonic() + patience
        while isinstance(error, Elsewhere) and time.monotonic() < end:
            if _store.check([SAID]):
                return False
            time.sleep(0.1)
        return bool(_store.add(SAID, 1) == 1)
    return True


@contextmanager
def _silent() -> Iterator[None]:
    """A block in which nothing comes to stderr, from below Python either."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


@contextmanager
def alone() -> Iterator[None]:
    """A block in which this process is the only one: what it computes, all compute alike."""
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


def active() -> bool:
    """Whether a process group is running."""
    return torch_dist.is_available() and torch_dist.is_initialized() and not _alone.get()


def world() -> int:
    """The number of processes that share the work."""
    return torch_dist.get_world_size() if active() else 1


def rank() -> int:
    """The place of this process among them."""
    return torch_dist.get_rank() if active() else 0


def total(values: Tensor) -> Tensor:
    """The sum over all processes; the argument itself when there is one."""
    return _reduced(values, "SUM")


def summed(parts: Iterable[Tensor], *shape: int) -> Tensor:
    """The sum of all parts of all processes, (shape) float64 on the CPU: one pass, one reduction.

    Parts are added up where they were made: a GPU is waited for once, when all of them are there.
    """
    return summing(parts, *shape)()


def summing(parts: Iterable[Tensor], *shape: int) -> Callable[[], Tensor]:
    """Begins that sum, and returns what waits for it: a GPU may have more to do meanwhile."""
    here: Tensor | None = None
    for part in parts:
        part = part.reshape(shape)
        here = part.double() if here is None else here + part
    everything = torch.zeros(shape, dtype=torch.float64) if here is None else here
    return lambda: total(everything.cpu())


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
    with _waiting():
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


def in_turn(blocks: Iterable[Tensor], columns: int) -> Iterator[Tensor]:
    """The blocks (n, columns) of all processes for the first one, by turns; none for the others.

    Only the block under way is held. The first block of each process comes first, in rank order,
    then the second of each; a process may have fewer than another.
    """
    if not active():
        yield from blocks
        return
    own, others = iter(blocks), list(range(1, world()))
    if rank():
        for block in own:
            with _waiting():
                torch_dist.send(_shared(torch.tensor(len(block))), 0)
                torch_dist.send(_shared(block.float()), 0)
        with _waiting():
            torch_dist.send(_shared(torch.tensor(-1)), 0)
        return
    while True:
        mine = next(own, None)
        if mine is not None:
            yield mine
        elif not others:
            return
        for other in list(others):
            with _waiting():
                rows = _shared(torch.tensor(0))
                torch_dist.recv(rows, other)
                if rows < 0:
                    others.remove(other)
                    continue
                received = _shared(torch.zeros(int(rows), columns))
                torch_dist.recv(received, other)
            yield received


def _reduced(values: Tensor, operation: str) -> Tensor:
    if not active():
        return values
    shared = _shared(values)
    with _waiting():
        torch_dist.all_reduce(shared, op=getattr(torch_dist.ReduceOp, operation))
    return shared.to(values.device)


@contextmanager
def _waiting() -> Iterator[None]:
    """Waits for the others; where one is gone for good, says so."""
    try:
        yield
    except RuntimeError as error:
        raise Elsewhere(ENDED) from error


def _shared(values: Tensor) -> Tensor:
    """A copy where the processes can reach it: NCCL knows no main memory."""
    if torch_dist.get_backend() == "nccl":
        return values.cuda().clone()
    return values.cpu().clone()
