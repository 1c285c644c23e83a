"""Threads that help: one for small work, all of them for large."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

FEW_LARGE = 2**18  # numbers a pass below which one thread serves a few products of the head
MANY_SMALL = 2**22  # and below which it serves many rounds over the logits


@contextmanager
def calm(numbers: float, small: int = MANY_SMALL) -> Iterator[None]:
    """Runs the block on one intra-op thread when its passes handle fewer than `small` numbers.

    Many short parallel regions on a busy machine wait for each other at every barrier, and a fit of
    a tenth of a second becomes one of several seconds.
    """
    threads = torch.get_num_threads()
    try:
        if numbers < small and threads > 1:
            torch.set_num_threads(1)
        yield
    finally:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
