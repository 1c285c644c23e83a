"""How well confidence tells right from wrong: what a model that may abstain would gain."""

from __future__ import annotations

import math

import torch

from featcal.metrics.inputs import Values, checked_rows
from featcal.metrics.ordered import Ordered


def auroc_of(ordered: Ordered) -> float:
    """The chance that a right row is more confident than a wrong one; ties count one half.

    NaN when all rows are right or all are wrong: there is nothing to separate.
    """
    checked_rows(len(ordered))
    values, run = torch.unique(ordered.confidence, return_inverse=True)
    right = torch.bincount(run[ordered.correct], minlength=len(values)).double()
    wrong = torch.bincount(run[~ordered.correct], minlength=len(values)).double()
    pairs = float(right.sum() * wrong.sum())
    below = wrong.cumsum(0) - wrong
    return float((right * (below + wrong / 2)).sum()) / pairs if pairs else math.nan


def aurc_of(ordered: Ordered) -> float:
    """Area under the risk-coverage curve: the mean over k of the error of the k most confident.

    Within a tied run the expected number of errors grows linearly, which `Ordered.ranked` gives.
    """
    n = checked_rows(len(ordered))
    _, correct = ordered.ranked()
    errors = (1 - correct).flip(0).cumsum(0)
    return float((errors / torch.arange(1, n + 1)).mean())


def e_aurc_of(ordered: Ordered) -> float:
    """AURC above that of a perfect order at the same error e (Geifman et al., 2019).

    The perfect order's area is taken in the limit of many rows, e + (1 - e) ln(1 - e); with few
    rows a perfect order therefore ends near 0, not at it.
    """
    aurc = aurc_of(ordered)
    accuracy = ordered.correct.double().mean()
    return aurc - float(1 - accuracy + torch.xlogy(accuracy, accuracy))


def auroc(
    probs: Values | None = None, labels: Values | None = None, *, logits: Values | None = None
) -> float:
    """Area under the ROC curve of confidence for right against wrong, see `auroc_of`.

    >>> auroc(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))
    1.0
    """
    return auroc_of(Ordered.of(probs, labels, logits=logits))


def aurc(
    probs: Values | None = None, labels: Values | None = None, *, logits: Values | None = None
) -> float:
    """Area under the risk-coverage curve, see `aurc_of`."""
    return aurc_of(Ordered.of(probs, labels, logits=logits))


def e_aurc(
    probs: Values | None = None, labels: Values | None = None, *, logits: Values | None = None
) -> float:
    """Excess area under the risk-coverage curve, see `e_aurc_of`."""
    return e_aurc_of(Ordered.of(probs, labels, logits=logits))
