"""Pool adjacent violators: the ascending values nearest to given ones, as blocks (Ayer, 1955)."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Places = NDArray[np.intp]

SHRINKING = 0.8  # a round that leaves more than this share of blocks is left to the stack


def pool(sums: Array, weights: Array) -> Places:
    """The first place of each block of the isotonic fit, whose values are the blocks' means.

    Every descent, however long, ends up in one block, so whole descents are pooled at once while
    that makes the sequence much shorter; a stack finishes what is left.

    Args:
        sums: (l,) summed targets of each place.
        weights: (l,) their weights, above 0.

    >>> pool(np.array([1.0, 3.0, 2.0, 4.0]), np.ones(4)).tolist()
    [0, 1, 3]
    """
    starts: Places = np.arange(len(sums))
    while True:
        means = sums / weights
        first: Places = np.flatnonzero(np.concatenate([[True], means[1:] > means[:-1]]))
        if len(first) == len(starts):
            return starts
        slow = len(first) > SHRINKING * len(starts)
        starts = starts[first]
        sums, weights = np.add.reduceat(sums, first), np.add.reduceat(weights, first)
        if slow:
            return starts[_pool_by_stack(sums, weights)]


def _pool_by_stack(sums: Array, weights: Array) -> list[int]:
    """The same by the classic way: each place joins the blocks before it while they are higher."""
    starts: list[int] = []
    blocks: list[tuple[float, float]] = []
    for place, (total, weight) in enumerate(zip(sums.tolist(), weights.tolist(), strict=True)):
        start = place
        while blocks and blocks[-1][0] / blocks[-1][1] >= total / weight:
            before = blocks.pop()
            start, total, weight = starts.pop(), total + before[0], weight + before[1]
        starts.append(start)
        blocks.append((total, weight))
    return starts
