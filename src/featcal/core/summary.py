"""A metric is a monoid: batches, shards and ranks merge the same way."""

from __future__ import annotations

from typing import Protocol, Self

from torch import Tensor


class Summary(Protocol):
    """What is left of labelled predictions when only one kind of question is asked of them.

    `of(a followed by b) == of(a) + of(b)`, addition is associative, and the summary of no rows is
    neutral. A rank's part becomes the whole by `reduced()`.
    """

    @classmethod
    def of(
        cls,
        probs: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        logits: Tensor | None = None,
    ) -> Self:
        """The summary of n predictions, given as probabilities or as logits."""
        ...

    def __add__(self, other: Self) -> Self: ...

    def reduced(self) -> Self:
        """The sum over all processes."""
        ...
