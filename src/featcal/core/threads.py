"""Threads that help: one for small work, all of them for large."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

SMALL = 2**22  # numbers in play below which waking a second thread costs more than it brings


@contextmanager
def calm(numbers: int) -> Iterator[None]:
    """Runs the block on one intra-op thread when it handles fewer than SMALL numbers.

    Many short parallel regions on a busy machine wait for each other at every barrier, and a fit of
    a tenth of a second becomes one of several seconds.
    """
    threads = torch.get_num_threads()
    try:
        if numbers < SMALL and threads > 1:
            torch.set_num_threads(1)
        yield
    finally:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
