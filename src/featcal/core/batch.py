"""What a calibrator sees: batches of (features, logits, labels), streamed as often as it asks.

Data is any re-iterable of `Batch`: a list, a split of a feature pack, a rank's shard. There is no
data set class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from featcal.core import dist
from featcal.core.errors import InputError

Head = Callable[[Tensor], Tensor]  # features (n, d) -> logits (n, k)

CHUNK_ROWS = 8192  # large enough that threads pay, small enough that one chunk fits a cache budget
SMALL_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32)  # labels torch cannot index by
KEEP_BYTES = 2**30  # logits of a view that stay in memory instead of being recomputed


@dataclass(frozen=True, slots=True)
class Batch:
    """Outputs of a trained classifier on n labelled samples.

    Attributes:
        logits: (n, k), or None when the head is to compute them from the features.
        labels: (n,) integers, 0 to k - 1.
        features: (n, d), the input of the head, or None when only logits are known.
    """

    logits: Tensor | None
    labels: Tensor
    features: Tensor | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @classmethod
    def from_probs(cls, probs: Tensor, labels: Tensor) -> Batch:
        """A batch of a model that gives probabilities (n, k): their logarithms are its logits.

        >>> Batch.from_probs(torch.tensor([[0.25, 0.75]]), torch.tensor([1])).logits.exp()
        tensor([[0.2500, 0.7500]])
        """
        # The smallest normal number stands for 0, so that a certain model stays finite.
        return cls(probs.clamp_min(torch.finfo(probs.dtype).tiny).log(), labels)

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device."""
        logits = None if self.logits is None else self.logits.to(device)
        features = None if self.features is None else self.features.to(device)
        return Batch(logits, self.labels.to(device), features)

    def rows(self, index: slice | Tensor) -> Batch:
        """The chosen rows."""
        logits = None if self.logits is None else self.logits[index]
        features = None if self.features is None else self.features[index]
        return Batch(logits, self.labels[index], features)


Data = Iterable[Batch]


@dataclass(frozen=True)
class Chunked:
    """A view of data in chunks of at most `rows`, each on the device of the head when it comes."""

    data: Data
    device: torch.device | None = None
    rows: int = CHUNK_ROWS

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.data:
            if not isinstance(batch, Batch):
                raise InputError(f"data holds a {type(batch).__name__}: every item must be a Batch")
            for chunk in self._parts(batch):
                yield chunk if self.device is None else chunk.to(self.device)

    def _parts(self, batch: Batch) -> Iterator[Batch]:
        if batch.labels.dtype in SMALL_INTEGERS:
            batch = replace(batch, labels=batch.labels.long())
        if len(batch) <= self.rows:
            yield batch
            return
        for start in range(0, len(batch), self.rows):
            yield batch.rows(slice(start, start + self.rows))


class Through:
    """A re-iterable view of data in which `logits_of` says what the logits are.

    The logits are kept in memory while they fit a byte budget and are recomputed on each pass
    otherwise, so that logit methods never pay for the head twice on data of ordinary size.
    """

    def __init__(
        self,
        data: Data,
        logits_of: Callable[[Batch], Tensor],
        *,
        features: bool = True,
        keep: int = KEEP_BYTES,
    ) -> None:
        self.data = data
        self.logits_of = logits_of
        self.features = features
        self._budget = keep
        self._kept: list[Batch] | None = None

    @property
    def kept(self) -> bool:
        """Whether the logits lie in memory, so that another pass is free of head products."""
        return self._kept is not None

    def __iter__(self) -> Iterator[Batch]:
        if self._kept is None:
            yield from self._compute()
        elif self.features:
            for kept, batch in zip(self._kept, self.data, strict=True):
                yield replace(kept, features=batch.features)
        else:
            yield from self._kept

    @torch.no_grad()
    def _compute(self) -> Iterator[Batch]:
        kept: list[Batch] = []
        spent = 0
        for batch in self.data:
            logits = wide(self.logits_of(batch))
            spent += logits.nbytes
            if spent <= self._budget:
                kept.append(Batch(logits, batch.labels))
            yield Batch(logits, batch.labels, batch.features if self.features else None)
        if spent <= self._budget:
            self._kept = kept


def stored_logits(batch: Batch) -> Tensor:
    """The logits of a batch that is known to have them, such as one from a `Through`."""
    assert batch.logits is not None
    return batch.logits


def raw_logits(batch: Batch, head: Head | None) -> Tensor:
    """The classifier's own logits: the stored ones, or the head's where none are stored in full."""
    stored = batch.logits
    exact = stored is not None and stored.dtype.itemsize >= 4
    if batch.features is not None and head is not None and not exact:
        return head(batch.features)
    assert stored is not None  # survey() has refused data with neither
    return stored


def wide(values: Tensor) -> Tensor:
    """The same values in float32 or wider: sums over classes need the digits."""
    return values.float() if values.dtype.itemsize < 4 else values


def as_data(data: Batch | Data, head: Head | None = None) -> Data:
    """Data as a re-iterable of chunks on the head's device; one Batch stands for a list of one.

    Raises:
        InputError: for a generator, which can be read only once, and for anything but batches.
    """
    if isinstance(data, Batch):
        return Chunked([data], device_of(head))
    if not isinstance(data, Iterable):
        raise InputError(f"data is {type(data).__name__}: pass a Batch or a list of Batches")
    if iter(data) is data:
        raise InputError(
            f"data is a {type(data).__name__}, which can be read only once, and a fit reads it "
            "several times: pass list(data)"
        )
    return Chunked(data, device_of(head))


def device_of(head: Head | None) -> torch.device | None:
    """The device of a head's weights; None when it has none to go by."""
    weights = head.parameters() if isinstance(head, nn.Module) else iter(())
    return next((weight.device for weight in weights), None)


@dataclass(frozen=True)
class Facts:
    """What one look at the data tells."""

    rows: int
    classes: int
    width: int  # features a row, 0 when there are only logits
    device: torch.device

    @property
    def work(self) -> int:
        """Numbers one pass handles, with 256 multiplications of the head counted as one."""
        return self.rows * self.classes * max(self.width // 256, 1)


def survey(data: Data, head: Head | None) -> Facts:
    """Reads all data once and refuses what cannot be fitted, by name, row and value."""
    rows, classes, width, device = 0, 0, 0, torch.device("cpu")
    first: Batch | None = None
    for batch in data:
        if rows == 0 and len(batch):
            classes, device = _classes(batch, head), batch.labels.device
            width = 0 if batch.features is None else batch.features.shape[-1]
            first = batch
        check_batch(batch, classes=classes, first_row=rows)
        if first is not None and len(batch):
            _check_alike(batch, first, rows)
        rows += len(batch)
    rows = int(dist.total(torch.tensor(rows)))
    if rows == 0:
        raise InputError("data is empty: a fit needs at least one labelled row")
    classes, width = dist.largest(torch.tensor([classes, width])).tolist()
    return Facts(rows, classes, width, device)


def _check_alike(batch: Batch, first: Batch, row: int) -> None:
    """Every batch must hold what the first one holds, in the same width."""
    for name in ("features", "logits"):
        one, other = getattr(first, name), getattr(batch, name)
        widths = ["no" if values is None else str(values.shape[1]) for values in (one, other)]
        if widths[0] != widths[1]:
            raise InputError(
                f"the batch from row {row} on has {widths[1]} {name} a row and the first batch has "
                f"{widths[0]}: give every batch the same"
            )


def _classes(batch: Batch, head: Head | None) -> int:
    """The number of classes, from the stored logits or from one row through the head."""
    if batch.features is None and batch.logits is None:
        raise InputError("the batch has neither logits nor features: give one of them")
    if head is not None and batch.features is not None:
        return _checked_head(batch.rows(slice(0, 64)), head)
    if batch.logits is None:
        raise InputError("the batch has features but no logits: pass the classifier head")
    return batch.logits.shape[-1]


@torch.no_grad()
def _checked_head(batch: Batch, head: Head) -> int:
    """Runs a few rows through the head: does it fit, and are its logits the stored ones?"""
    assert batch.features is not None
    try:
        logits = head(batch.features)
    except RuntimeError as error:
        raise InputError(
            f"head does not accept features of shape {tuple(batch.features.shape)} and type "
            f"{batch.features.dtype}: {str(error).splitlines()[0]}"
        ) from error
    if logits.ndim != 2 or len(logits) != len(batch):
        raise InputError(
            f"head returned shape {tuple(logits.shape)} for {len(batch)} rows: it must return "
            "(rows, classes)"
        )
    if batch.logits is not None:
        check_same(logits, batch.logits)
    return logits.shape[1]


def check_same(logits: Tensor, stored: Tensor) -> None:
    """Refuses stored logits that are not those the head gives."""
    if logits.shape != stored.shape:
        raise InputError(
            f"head gives {logits.shape[1]} classes and the stored logits have {stored.shape[-1]}: "
            "this is not the head that made them"
        )
    narrow = min(logits.dtype.itemsize, stored.dtype.itemsize) < 4
    allowed = (0.05 if narrow else 1e-3) * (1 + float(stored.abs().max()))
    gap = float((logits.double() - stored.double()).abs().max())
    if gap > allowed:
        raise InputError(
            f"head(features) differs from the stored logits by {gap:.3g}: this is not the head "
            "that made them, or something stands between features and head (a missing ReLU, "
            "active dropout)"
        )


def check_batch(batch: Batch, *, classes: int, first_row: int = 0) -> None:
    """Refuses shapes, labels and values no fit can use; rows are counted from `first_row`."""
    if batch.features is None and batch.logits is None:
        raise InputError("the batch has neither logits nor features: give one of them")
    labels = batch.labels
    if labels.ndim != 1 or labels.is_floating_point() or labels.dtype == torch.bool:
        raise InputError(
            f"labels have shape {tuple(labels.shape)} and type {labels.dtype}: "
            "they must be one integer a row"
        )
    for name, values in (("features", batch.features), ("logits", batch.logits)):
        if values is None:
            continue
        if values.ndim != 2 or len(values) != len(labels) or not values.is_floating_point():
            raise InputError(
                f"{name} have shape {tuple(values.shape)} and type {values.dtype}: "
                f"they must be floating point, ({len(labels)}, ...), one row a label"
            )
        # A finite sum proves finite terms, and costs one read instead of three.
        if not bool(torch.isfinite(values.sum(dtype=torch.float64))):
            _refuse(name, ~torch.isfinite(values).all(1), first_row, "NaN or infinite", "remove")
    _refuse("labels", (labels < 0) | (labels >= classes), first_row, f"outside 0..{classes - 1}")


def check_finite(data: Data, name: str = "the head's logits", *, first_row: int = 0) -> None:
    """Refuses logits that are not finite, as a head makes them of finite but huge features."""
    row = first_row
    for batch in data:
        bad = ~torch.isfinite(stored_logits(batch)).all(1)
        _refuse(name, bad, row, "NaN or infinite", "remove or rescale")
        row += len(batch)


def _refuse(name: str, bad: Tensor, first_row: int, what: str, remedy: str = "correct") -> None:
    rows = (bad.nonzero().flatten() + first_row).tolist()
    if rows:
        shown = ", ".join(map(str, rows[:5])) + (", ..." if len(rows) > 5 else "")
        which = f"row {shown}" if len(rows) == 1 else f"{len(rows)} rows ({shown})"
        raise InputError(f"{name} are {what} in {which}: {remedy} them first")
