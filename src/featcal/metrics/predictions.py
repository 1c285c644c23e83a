"""What metrics ask of predictions: the confidence, whether it was right, the true class's share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from featcal.core.toplabel import predicted
from featcal.metrics.inputs import Given, Values, read

SMALLEST_PROBABILITY = 1e-12  # stands for 0 where a logarithm of a given probability is taken


@final
@dataclass(frozen=True, slots=True, eq=False)
class TopLabel:
    """The predicted class alone: its probability (n,) and whether it was the label (n,) bool."""

    confidence: Tensor
    correct: Tensor


@final
@dataclass(frozen=True, slots=True, eq=False)
class Predictions:
    """Checked predictions for n labelled rows, read once and fed to every summary.

    The prediction is the largest value of a row, the first of equal ones.

    Attributes:
        confidence: (n,) the probability of the predicted class.
        correct: (n,) bool, whether the predicted class is the label.
        probs: (n, k) float32 or float64.
        labels: (n,) int64.
        log_true: (n,) log probability of the label: by log_softmax from logits; from
            probabilities the logarithm of max(p, 1e-12), so that a certain mistake stays finite.
    """

    confidence: Tensor
    correct: Tensor
    probs: Tensor
    labels: Tensor
    log_true: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    @classmethod
    def of(
        cls,
        probs: Values | None = None,
        labels: Values | None = None,
        *,
        logits: Values | None = None,
    ) -> Predictions:
        """Reads torch or numpy probabilities or logits (n, k); 16-bit values become float32.

        Raises:
            InputError: for anything but finite logits, or probabilities in [0, 1] whose rows sum
                to 1 within 1e-3 (1e-2 for 16-bit values), with one label in range a row.

        >>> p = Predictions.of(torch.tensor([[0.1, 0.9], [0.5, 0.5]]), torch.tensor([1, 1]))
        >>> p.correct.tolist()
        [True, False]
        """
        given = read(probs, labels, logits)
        return _predictions(given, given.whole(), given.labels)

    @classmethod
    def stream(
        cls,
        probs: Values | None = None,
        labels: Values | None = None,
        *,
        logits: Values | None = None,
    ) -> Iterator[Predictions]:
        """The same in parts of a few rows, for sums that need every class but keep none."""
        given = read(probs, labels, logits)
        return (_predictions(given, values, chosen) for values, chosen in given.chunks())


def top_label(
    probs: Values | None = None, labels: Values | None = None, *, logits: Values | None = None
) -> TopLabel:
    """Confidence and correctness alone, without keeping n x k probabilities.

    Equal, to the bit, to the same fields of `Predictions.of`.
    """
    given = read(probs, labels, logits)
    quick = _quick_top(given)
    if quick is not None:
        return quick
    parts = [_top(given, values, chosen) for values, chosen in given.chunks()]
    return TopLabel(
        torch.cat([part.confidence for part in parts]), torch.cat([part.correct for part in parts])
    )


def _quick_top(given: Given) -> TopLabel | None:
    """The same for probabilities on a CPU, checked once at the end; None where that fails.

    With a thousand classes the time goes into reading memory and into calls: three reductions a
    chunk are the fewest that find the class and prove the values to be probabilities.
    """
    values = given.values
    if given.name == "logits" or values.dtype.itemsize < 4 or not values.is_cpu or not len(values):
        return None
    parts = [(predicted(part), part.sum(1), part.amin()) for part in given.raw_chunks()]
    classes, sums = (torch.cat(column) for column in list(zip(*parts, strict=True))[:2])
    confidence = values.gather(1, classes[:, None])[:, 0]
    lowest = min(float(low) for _, _, low in parts)
    if not given.passes(sums, lowest, float(confidence.max())):
        return None  # the slow way says what is wrong, and where
    return TopLabel(confidence.clamp(max=1), classes == given.labels)


def _top(given: Given, values: Tensor, labels: Tensor) -> TopLabel:
    prediction = predicted(values)
    # The logits decide the class: softmax can round two different logits to one probability.
    if given.name == "logits":
        confidence = values.softmax(1).amax(1)
    else:
        confidence = values.gather(1, prediction[:, None])[:, 0].clamp(max=1)
    return TopLabel(confidence, prediction == labels)


def _predictions(given: Given, values: Tensor, labels: Tensor) -> Predictions:
    top = _top(given, values, labels)
    if given.name == "logits":
        log_true = -F.cross_entropy(values, labels, reduction="none")
        return Predictions(top.confidence, top.correct, values.softmax(1), labels, log_true)
    true = values.gather(1, labels[:, None])[:, 0]
    log_true = true.clamp(SMALLEST_PROBABILITY, 1).log()
    return Predictions(top.confidence, top.correct, values, labels, log_true)
