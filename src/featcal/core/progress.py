"""Progress without a dependency: long work tells it, whoever shows it listens.

The library stays silent by itself. The command line listens and draws a bar; so can a notebook:

>>> seen = []
>>> with listen(lambda label, done, all_: seen.append((label, done, all_))):
...     for item in track("fit", [1, 2]):
...         pass
>>> seen
[('fit', 0, 2), ('fit', 1, 2), ('fit', 2, 2)]
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

Listener = Callable[[str, int, int], None]  # label, steps done, steps in all
Item = TypeVar("Item")

_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def listen(listener: Listener) -> Iterator[None]:
    """Sends the progress of everything inside the block to `listener`."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


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
