"""Long work: how far it is, told to whoever listens, and the threads that help it.

Progress needs no dependency. The command line listens and draws a bar; so can a notebook. Where
nobody does, work that may take minutes shows a line of its own on a terminal, and nothing anywhere
else:

>>> seen = []
>>> with listen(lambda label, done, all_: seen.append((label, done, all_))):
...     for item in track("fit", [1, 2]):
...         pass
>>> seen
[('fit', 0, 2), ('fit', 1, 2), ('fit', 2, 2)]
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from time import monotonic
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

Listener = Callable[[str, int, int], None]  # label, steps done, steps in all
Item = TypeVar("Item")
Result = TypeVar("Result")

EVERY = 0.5  # seconds between two drawings of a line, and before the first
ROWS = " rows"  # the end of a label whose steps are rows: their speed is worth showing
FEW_LARGE = 2**18  # numbers per pass below which one thread serves a few products of the head
MANY_SMALL = 2**22  # and below which it serves many rounds over the logits

_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


def tell(label: str, done: int, of: int) -> None:
    """Reports that `done` of `of` steps of the work called `label` are behind us."""
    listener = _listener.get()
    if listener is not None:
        listener(label, done, of)


def track(label: str, items: Sequence[Item]) -> Iterator[Item]:
    """Iterates over `items` and tells how far it is."""
    tell(label, 0, len(items))
    for done, item in enumerate(items, start=1):
        yield item
        tell(label, done, len(items))


@contextmanager
def listen(listener: Listener) -> Iterator[None]:
    """Sends the progress of everything inside the block to `listener`."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


@contextmanager
def shown() -> Iterator[None]:
    """Shows the progress of the block on a terminal, unless somebody listens already."""
    if _listener.get() is not None or not sys.stderr.isatty():
        yield
        return
    line = _Line()
    try:
        with listen(line):
            yield
    finally:
        if line.width:
            line.write("")
            sys.stderr.write("\r")  # the terminal is as it was


class _Line:
    """One line of text that is written over: how far, how fast, how long still."""

    def __init__(self) -> None:
        self.started = self.drawn = monotonic()
        self.label, self.width = "", 0

    def __call__(self, label: str, done: int, of: int) -> None:
        now = monotonic()
        if label != self.label:
            self.label, self.started = label, now
        if now - self.drawn < EVERY:
            return
        self.drawn = now
        speed = done / max(now - self.started, 1e-9)
        left = int((of - done) / max(speed, 1e-9))
        rate = f"  {speed:,.0f}{ROWS}/s" if label.endswith(ROWS) else ""
        self.write(f"{label}  {done:,}/{of:,}{rate}  {left // 60}:{left % 60:02d} left")

    def write(self, text: str) -> None:
        sys.stderr.write("\r" + text.ljust(self.width))
        sys.stderr.flush()
        self.width = len(text)


@contextmanager
def calm(numbers: float, small: int = MANY_SMALL) -> Iterator[None]:
    """Runs the block on one intra-op thread when its passes handle fewer than `small` numbers.

    Many short parallel regions on a busy machine wait for each other at every barrier, and a fit of
    a tenth of a second becomes one of several seconds.
    """
    import torch  # here alone: whoever shows progress need not wait for it

    threads = torch.get_num_threads()
    try:
        if numbers < small and threads > 1:
            torch.set_num_threads(1)
        yield
    finally:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


def spread(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """The work of each item, by as many threads as torch has, each of which computes alone.

    An operation that torch shares out among threads waits for the last of them, every time, which
    takes milliseconds on a busy machine. Threads with items of their own wait once, at the end.
    """
    import torch

    threads, grad = torch.get_num_threads(), torch.is_grad_enabled()
    if min(threads, len(items)) < 2:  # as in a thread that does such work
        return [work(item) for item in items]

    def run(item: Item) -> Result:
        with torch.set_grad_enabled(grad):  # which every thread has for itself
            return work(item)

    try:
        torch.set_num_threads(1)  # new threads take it over, and keep it
        return list(_pool(threads).map(run, items))
    finally:
        torch.set_num_threads(threads)


@cache
def _pool(threads: int) -> "ThreadPoolExecutor":
    """Threads that stay: each new one would have a heap of its own, which grows and is kept."""
    from concurrent.futures import ThreadPoolExecutor

    return ThreadPoolExecutor(threads, "featcal")


os.register_at_fork(after_in_child=_pool.cache_clear)  # a fork has none of the threads
