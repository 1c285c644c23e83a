"""One way to read data for every analysis: checked, in chunks, the head in eval mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias, final

import torch
from torch import Tensor

from featcal.core.batch import Batch, Data, Head, as_data, raw_logits, wide
from featcal.core.calibrator import Calibrator
from featcal.core.errors import InputError
from featcal.core.fitting import evaluating
from featcal.core.head import as_head
from featcal.core.survey import Facts, survey
from featcal.core.threads import calm
from featcal.data import Pack, PackSplit
from featcal.report.scores import calibrated_logits, check_usable

# What every analysis takes: rows, or a pack, whose split and head are then its own.
Source: TypeAlias = Batch | Data | Pack
VAL, TEST = "val", "test"  # the splits of a pack that are meant where none is named


@final
@dataclass(frozen=True, eq=False)
class Rows:
    """Checked rows; iterating gives each batch with the network's own logits.

    Attributes:
        data: chunks, read anew on each pass.
        head: the classifier's last layer, or None where logits are stored.
        facts: what one look at all rows told.
    """

    data: Data
    head: Head | None
    facts: Facts

    def __iter__(self) -> Iterator[tuple[Batch, Tensor]]:
        for batch in self.data:
            yield batch, wide(raw_logits(batch, self.head))

    def features(self) -> Iterator[tuple[Tensor]]:
        """The features of each batch, where there are features."""
        for batch in self.data:
            assert batch.features is not None
            yield (batch.features,)

    def signed(self) -> bool:
        """Whether a feature of any row is negative, as after a LayerNorm; one pass."""
        return any(bool((features < 0).any()) for (features,) in self.features())

    def both(self, calibrator: Calibrator | None) -> Iterator[tuple[Batch, Tensor, Tensor]]:
        """Each batch with its logits before and after a calibrator."""
        for batch, logits in self:
            known = Batch(logits, batch.labels, batch.features)
            yield batch, logits, calibrated_logits(known, calibrator, self.head)


def opened(data: Source, head: Head | None, split: str = TEST) -> tuple[Batch | Data, Head | None]:
    """The rows of a pack with its own head, unless another is given; any other data as it is."""
    rows = data.split(split) if isinstance(data, Pack) else data
    if head is None and isinstance(rows, PackSplit):
        head = Pack(rows.path, rows.manifest).head
    return rows, head


@contextmanager
def reading(
    data: Source,
    head: Head | None,
    calibrator: object = None,
    *,
    split: str = TEST,
    features_for: str = "",
) -> Iterator[Rows]:
    """Rows to read inside the block, without gradients.

    Args:
        data: a Batch, any re-iterable of batches, a split of a pack, or a pack.
        head: the classifier's last layer, when the data holds features; that of the pack by
            default.
        calibrator: what will be applied, checked here.
        split: of a pack.
        features_for: what needs features, for the message where there are none.
    """
    if calibrator is not None and not isinstance(calibrator, Calibrator):
        kind = type(calibrator).__name__
        raise InputError(
            f"calibrator is a {kind}: pass a fitted one, such as "
            "featcal.parse('clip').fit(val, head)"
        )
    rows, head = opened(data, head, split)
    head = as_head(head)
    data = as_data(rows, head)
    with torch.no_grad(), evaluating(head):
        facts = survey(data, head)
        check_usable(calibrator, facts, head)
        if features_for and not facts.width:
            raise InputError(
                f"{features_for} needs features, and the data holds logits alone: pass what "
                "featcal.collect(model, loader) gives, or a pack with features"
            )
        with calm(facts.work):
            yield Rows(data, head, facts)


def entropies(logits: Tensor) -> Tensor:
    """The entropy of each row's probabilities, in nats: (n,) float64.

    >>> entropies(torch.zeros(1, 4)).exp()
    tensor([4.], dtype=torch.float64)
    """
    logp = logits.double().log_softmax(1)
    return -(logp.exp() * logp).sum(1)
