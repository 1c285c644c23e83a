"""What a calibrator sees: batches of (features, logits, labels), streamed as often as it asks.

Data is any re-iterable of `Batch`: a list, a split of a feature pack, a rank's shard. There is no
data set class. A row passes through two views at most: `Chunked` cuts and joins batches and puts
them on the head's device, `Through` says what the logits are.

A sigmoid model is met as two classes: its one logit z is the pair (0, z) of a softmax, and
softmax(0, z) = (1 - sigmoid(z), sigmoid(z)). Every method, metric and picture for k classes so
serves a model with a single output, whose class 1 is the positive one. The shape alone tells such a
model: one value per row, (n,) or (n, 1).

So is a model with a sigmoid for each of k labels, told by labels of the shape (n, k): a sample then
stands for k rows of two classes, no and yes, which `answers` gives (see `core/labels.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from featcal.core import memory
from featcal.core.checks import (
    CalibrationWarning,
    InputError,
    check_probs,
    checked_groups,
    doubt_logits,
)
from featcal.core.progress import spread

if TYPE_CHECKING:
    from featcal.core.fit import Facts

Head = Callable[[Tensor], Tensor]  # features (n, d) -> logits (n, k)
Result = TypeVar("Result")

CHUNK_ROWS, CHUNK_NUMBERS = 8192, 2**23  # on a CPU: large enough for products, and no larger
BLOCK = 2**19  # numbers that go through all the steps of a sum while a CPU has them at hand
SMALL_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32)  # labels torch cannot index by
ON = 4  # units of rounding by which a confidence may lie above the edge it is on
KEEP_SHARE = 8  # of a GPU's free memory a view may keep one part in so many
PROBS_SLACK = 1e-2  # how far from 1 the probabilities of a row may sum where only logs are taken


@dataclass(frozen=True, slots=True, repr=False)
class Batch:
    """Outputs of a trained classifier on n labelled samples.

    Attributes:
        logits: (n, k), or None when the head is to compute them from the features. One logit per
            row, (n,) or (n, 1), is that of a sigmoid and is kept as the two logits (0, z).
        labels: (n,) integers, 0 to k - 1; beside single logits also (n, 1), bool or float 0 and 1.
            Where a sample has any number of the k labels, (n, k) of 0 and 1.
        features: (n, d), the input of the head, or None when only logits are known.
        groups: (n,) integers, the number of the sample a row belongs to, counted over the whole
            data, where a sample has several rows, as an image has pixels; None where each row is a
            sample. Rows of one sample lie side by side.
    """

    logits: Tensor | None
    labels: Tensor
    features: Tensor | None = None
    groups: Tensor | None = None

    def __post_init__(self) -> None:
        try:
            labels = torch.as_tensor(self.labels)
        except (TypeError, ValueError, RuntimeError) as error:
            kind = type(self.labels).__name__
            raise InputError(f"labels are a {kind} that is no tensor of class numbers") from error
        given = {"logits": self.logits, "labels": labels, "features": self.features}
        given["groups"] = self.groups
        parts: dict[str, object] = {name: part for name, part in given.items() if part is not None}
        for name, part in parts.items():
            if not isinstance(part, Tensor):
                kind = type(part).__name__
                raise InputError(f"{name} are a {kind}: pass a tensor, torch.as_tensor({name})")
            if part.ndim == 0:
                raise InputError(f"{name} are one number: give one row per sample, {name}[None]")
        if self.logits is not None and is_single(self.logits):
            object.__setattr__(self, "logits", two_classes(self.logits))
            labels = zero_or_one(labels)
        elif labels.ndim == 2 and labels.shape[1] > 1:
            labels = zero_or_one(labels)
        object.__setattr__(self, "labels", labels)
        if self.groups is not None:
            object.__setattr__(self, "groups", checked_groups(self.groups, len(labels)))

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        parts = {"logits": self.logits, "features": self.features}
        shapes = (f", {name} {tuple(v.shape)}" for name, v in parts.items() if v is not None)
        of = "" if self.groups is None else f" of {len(set(self.groups.tolist())):,} samples"
        return f"Batch({len(self):,} rows{of}{''.join(shapes)})"

    @classmethod
    def from_probs(cls, probs: Tensor, labels: Tensor) -> Batch:
        """A batch of a model that gives probabilities (n, k): their logarithms are its logits.

        Of a binary model the probability of class 1 alone will do, (n,) or (n, 1); beside labels
        (n, k) probabilities (n, k) are those of a yes to each, and their log-odds the logits.

        >>> Batch.from_probs(torch.tensor([[0.25, 0.75]]), torch.tensor([1])).logits.exp()
        tensor([[0.2500, 0.7500]])
        """
        if not isinstance(probs, Tensor) or probs.ndim not in (1, 2):
            found = tuple(probs.shape) if isinstance(probs, Tensor) else type(probs).__name__
            raise InputError(f"probs are {found}: pass a tensor of shape (n, k), or (n,)")
        several = not is_single(probs) and torch.as_tensor(labels).ndim == 2
        flat = probs.reshape(-1) if several else probs
        check_probs(flat, slack=PROBS_SLACK, remedy="logits go into Batch(logits, labels)")
        if several:
            least = torch.finfo(probs.dtype).tiny
            no, yes = two_probs(flat).clamp_min(least).log().unbind(1)
            return cls((yes - no).reshape(probs.shape), labels)
        if is_single(probs):
            labels = zero_or_one(cls(None, labels).labels)
        probs = two_probs(probs)
        # The smallest normal number stands for 0, so that a certain model stays finite.
        return cls(probs.clamp_min(torch.finfo(probs.dtype).tiny).log(), labels)

    def to(self, device: torch.device | None) -> Batch:
        """The same batch on another device; None for the one it is on."""
        logits = None if self.logits is None else trainable(self.logits, device)
        features = None if self.features is None else trainable(self.features, device)
        groups = None if self.groups is None else trainable(self.groups, device)
        return unchecked(logits, trainable(self.labels, device), features, groups)

    def rows(self, index: slice | Tensor) -> Batch:
        """The chosen rows."""
        logits = None if self.logits is None else self.logits[index]
        features = None if self.features is None else self.features[index]
        groups = None if self.groups is None else self.groups[index]
        return unchecked(logits, self.labels[index], features, groups)


Data = Iterable[Batch]


def unchecked(
    logits: Tensor | None,
    labels: Tensor,
    features: Tensor | None = None,
    groups: Tensor | None = None,
) -> Batch:
    """A batch of tensors that come from checked ones, and are not looked at again."""
    batch = object.__new__(Batch)
    object.__setattr__(batch, "logits", logits)
    object.__setattr__(batch, "labels", labels)
    object.__setattr__(batch, "features", features)
    object.__setattr__(batch, "groups", groups)
    return batch


def joined(batches: list[Batch]) -> Batch:
    """The rows of batches that have the same parts, in order."""
    if len(batches) == 1:
        return batches[0]
    logits = [batch.logits for batch in batches if batch.logits is not None]
    features = [batch.features for batch in batches if batch.features is not None]
    groups = [batch.groups for batch in batches if batch.groups is not None]
    return unchecked(
        torch.cat(logits) if logits else None,
        torch.cat([batch.labels for batch in batches]),
        torch.cat(features) if features else None,
        torch.cat(groups) if groups else None,
    )


def head_of(data: object) -> Head | None:
    """The head that data brings along, as what was collected and a split of a pack do; or None."""
    found = getattr(data, "head", None)
    return found if isinstance(found, nn.Module) else None


def paired(data: Any, depth: int = 3) -> Any:  # noqa: ANN401 - any data; no pair: as it is
    """The batch of a pair of arrays, (logits, labels); any other data as it is.

    Probabilities in place of logits are doubted `depth` calls above.
    """
    if not isinstance(data, tuple) or len(data) != 2 or isinstance(data[0], Batch):
        return data
    batch = Batch(*(torch.as_tensor(part) for part in data))
    if batch.logits is not None and batch.labels.ndim == 1:
        remedy = "pass featcal.Batch.from_probs(probs, labels)"
        if text := doubt_logits(batch.logits, "the rows of the pair (logits, labels)", remedy):
            warnings.warn(text, CalibrationWarning, stacklevel=depth)
    return batch


def as_data(data: Batch | Data | tuple[Any, Any], head: Head | None = None) -> Data:
    """Data as a re-iterable of chunks on the head's device; one Batch stands for a list of one.

    So does a pair of arrays, (logits, labels).

    Raises:
        InputError: for a generator, which can be read only once, and for anything but batches.
    """
    device = device_of(head)
    if isinstance(data, Chunked) and data.device == device:
        return data
    data, classes = paired(data), widest(head)
    if isinstance(data, Batch):
        return Chunked([data], device, classes)
    if not isinstance(data, Iterable):
        raise InputError(f"data is {type(data).__name__}: pass a Batch or a list of Batches")
    if iter(data) is data:
        raise InputError(
            f"data is a {type(data).__name__}, which can be read only once, and a fit reads it "
            "several times: pass list(data)"
        )
    return Chunked(data, device, classes)


@dataclass(eq=False)
class Chunked:
    """A view of data in chunks: long batches cut, short ones put together.

    A loader's batches of 128 rows would cost more in calls than in arithmetic. Each chunk comes on
    the device of the head, when that is known, its features in float32 or wider. What a survey of
    the data found is kept with the head it was made for, so that a second fit needs none. So are
    chunks that had to be moved to a GPU, while they fit: the way there is slower than a head.

    Attributes:
        data: the batches.
        device: of the chunks; None for that of the batches.
        classes: logits that the head makes of a row, 0 where nobody knows.
        rows: of a chunk at most; None for what suits the device.
    """

    data: Data
    device: torch.device | None = None
    classes: int = 0
    rows: int | None = None
    surveyed: tuple[Head | None, Facts] | None = field(default=None, init=False)
    _moved: list[Batch] | None = field(default=None, init=False)

    def __iter__(self) -> Iterator[Batch]:
        if self._moved is not None:
            return self._as_wanted(self._moved)
        on_gpu = self.device is not None and self.device.type == "cuda"
        return self._as_wanted(self._moving() if on_gpu else self._cut())

    def _cut(self) -> Iterator[Batch]:
        """The chunks, on the device, as they are."""
        for batch in self._whole():
            size = self._size(batch)
            for start in range(0, max(len(batch), 1), size):
                part = batch if len(batch) <= size else batch.rows(slice(start, start + size))
                yield part.to(self.device)

    def _moving(self) -> Iterator[Batch]:
        """The same, kept for the next time where they came from elsewhere and fit."""
        keep, spent, moved = 2 * keep_bytes(self.device), 0, []
        for part in self._cut():
            parts = (part.logits, part.features, part.labels)
            spent += sum(values.nbytes for values in parts if values is not None)
            if spent <= keep:
                moved.append(part)
            else:
                moved.clear()
            yield part
        if spent <= keep:
            self._moved = moved

    def _as_wanted(self, parts: Iterable[Batch]) -> Iterator[Batch]:
        """Chunks with the types a fit computes in."""
        for part in parts:
            narrow = part.labels.dtype in SMALL_INTEGERS
            labels = part.labels.long() if narrow else part.labels
            features = None if part.features is None else wide(part.features)
            yield unchecked(part.logits, labels, features, part.groups)

    def _whole(self) -> Iterator[Batch]:
        """The batches as given, neighbours of one kind joined while they fit a chunk."""
        waiting: list[Batch] = []
        held, before = 0, None
        for batch in self.data:
            if not isinstance(batch, Batch):
                raise InputError(
                    f"data holds a {type(batch).__name__}: every item must be a Batch; of arrays "
                    "pass the pair (logits, labels), of a pack featcal.Pack.open(folder)"
                )
            parts = (batch.features, batch.logits, batch.labels, batch.groups)
            kind = [None if p is None else (p.dtype, p.device, p.shape[1:]) for p in parts]
            if waiting and (held + len(batch) > self._size(batch) or kind != before):
                yield joined(waiting)
                waiting, held = [], 0
            waiting.append(batch)
            held, before = held + len(batch), kind
        if waiting:
            yield joined(waiting)

    def _size(self, batch: Batch) -> int:
        """Rows per chunk: fewer where a row is wide, such as the output of an inner layer."""
        widths = (
            0 if part is None else part[:1].numel() for part in (batch.features, batch.logits)
        )
        device = batch.labels.device if self.device is None else self.device
        on_gpu, numbers = device.type == "cuda", memory.chunk_values()
        numbers = numbers if on_gpu else min(CHUNK_NUMBERS, numbers)
        size = max(1, numbers // max(*widths, self.classes, 1))
        if self.rows is not None:
            return min(self.rows, size)
        return size if on_gpu else min(CHUNK_ROWS, size)


@dataclass(eq=False)
class Through:
    """A re-iterable view of data in which `logits_of` says what the logits are.

    The logits are kept in memory while they fit a byte budget and are recomputed on each pass
    otherwise, so that logit methods never pay for the head twice on data of ordinary size.
    """

    data: Data
    logits_of: Callable[[Batch], Tensor]
    features: bool = field(default=True, kw_only=True)
    keep: int | None = field(default=None, kw_only=True)
    _kept: list[Batch] | None = field(default=None, init=False)

    @property
    def kept(self) -> bool:
        """Whether the logits lie in memory, so that another pass is free of head products."""
        return self._kept is not None

    def __iter__(self) -> Iterator[Batch]:
        if self._kept is None:
            yield from self._compute()
        elif self.features:
            for kept, batch in zip(self._kept, self.data, strict=True):
                yield unchecked(kept.logits, kept.labels, batch.features, kept.groups)
        else:
            yield from self._kept

    @torch.no_grad()
    def _compute(self) -> Iterator[Batch]:
        kept: list[Batch] = []
        least = memory.keep_bytes()
        spent, keep = 0, least if self.keep is None else self.keep
        for batch in self.data:
            logits = wide(self.logits_of(batch))
            if self.keep is None and spent <= least < spent + logits.nbytes:
                keep = keep_bytes(logits.device)  # asked for only where it matters: it is slow
            spent += logits.nbytes
            if spent <= keep:
                kept.append(unchecked(logits, batch.labels, None, batch.groups))
            else:
                kept.clear()
            features = batch.features if self.features else None
            yield unchecked(logits, batch.labels, features, batch.groups)
        if spent <= keep:
            self._kept = kept


def thinned(data: Data, every: int) -> Through:
    """Every so many rows; a head that makes their logits is asked for these rows only."""
    if not isinstance(data, Through) or data.kept:
        return Through(Thinned(data, every), stored_logits, features=False)
    of = data.logits_of  # a view of stored logits would hold on to all of them
    return Through(Thinned(data.data, every), lambda rows: of(rows).contiguous(), features=False)


@dataclass(frozen=True, eq=False)
class Thinned:
    """A view of every so many rows of each batch."""

    data: Data
    every: int

    def __iter__(self) -> Iterator[Batch]:
        return (batch.rows(slice(None, None, self.every)) for batch in self.data)


def keep_bytes(device: torch.device | None) -> int:
    """Bytes of logits that a view may keep on a device."""
    if device is None or device.type != "cuda":
        return memory.keep_bytes()
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return (torch.cuda.mem_get_info(device)[0] + unused) // KEEP_SHARE


def blocks(batch: Batch, numbers: int = BLOCK, *, classes: int = 1) -> list[Batch]:
    """The rows of a batch in blocks of so many logits or features; on a GPU, all at once.

    Rows that have no logits yet may be said to get them, for so many classes.

    >>> [len(block) for block in blocks(Batch(torch.zeros(5, 4), torch.zeros(5).long()), 8)]
    [2, 2, 1]
    """
    widths = (0 if part is None else part[:1].numel() for part in (batch.features, batch.logits))
    step = max(numbers // max(*widths, classes), 1)
    if len(batch) <= step or batch.labels.is_cuda:
        return [batch]
    return [batch.rows(slice(start, start + step)) for start in range(0, len(batch), step)]


def by_blocks(work: Callable[[Tensor], Result], values: Tensor) -> list[Result]:
    """The work on the rows of values (n, ...) in blocks, by all threads; on a GPU, all at once."""
    step = len(values) if values.is_cuda else BLOCK // max(values[:1].numel(), 1)
    return spread(work, torch.split(values, max(step, 1)))


def stored_logits(batch: Batch) -> Tensor:
    """The logits of a batch that is known to have them, such as one from a `Through`."""
    assert batch.logits is not None
    return batch.logits


def features_of(batch: Batch) -> Tensor:
    """The features of a batch that is known to have them."""
    assert batch.features is not None
    return batch.features


def raw_logits(batch: Batch, head: Head | None) -> Tensor:
    """The classifier's own logits: the stored ones, or the head's where none are stored in full."""
    stored = batch.logits
    exact = stored is not None and stored.dtype.itemsize >= 4
    if batch.features is not None and head is not None and not exact:
        return head(batch.features)
    return stored_logits(batch)  # survey() has refused data with neither


def trainable(values: Tensor, device: torch.device | None = None) -> Tensor:
    """The same values on a device, and of use in training where inference mode made them."""
    moved = values if device is None else values.to(device)
    return moved.clone() if moved.is_inference() else moved


def wide(values: Tensor) -> Tensor:
    """The same values in float32 or wider: sums over classes need the digits."""
    return values.float() if values.dtype.itemsize < 4 else values


def device_of(head: Head | None) -> torch.device | None:
    """The device of a head's weights; None when it has none to go by."""
    weights = head.parameters() if isinstance(head, nn.Module) else iter(())
    return next((weight.device for weight in weights), None)


def widest(head: Head | None) -> int:
    """The most values that a head makes of a row at once; 0 when it has no weights to go by."""
    weights = head.parameters() if isinstance(head, nn.Module) else iter(())
    return max((len(weight) for weight in weights if weight.ndim), default=0)


def is_single(values: Tensor) -> bool:
    """Whether there is one value per row, as (n,) or (n, 1)."""
    return values.ndim == 1 or (values.ndim == 2 and values.shape[1] == 1)


def two_classes(logits: Tensor) -> Tensor:
    """(n,) or (n, 1) logits of class 1 -> (n, 2); logits of more classes stay as they are.

    >>> two_classes(torch.tensor([3.0])).tolist()
    [[0.0, 3.0]]
    """
    if not is_single(logits):
        return logits
    column = logits.reshape(-1, 1)
    return torch.cat([torch.zeros_like(column), column], 1)


def one_logit(logits: Tensor) -> Tensor:
    """(n, 2) -> (n, 1): the logit whose sigmoid is the probability of class 1."""
    return logits[:, 1:] - logits[:, :1]


def two_probs(probs: Tensor) -> Tensor:
    """(n,) or (n, 1) probabilities of class 1 -> (n, 2); those of more classes stay as they are.

    16-bit values come out in float32: 1 - p in 16 bits would lose the digits of a small p.
    """
    if not is_single(probs):
        return probs
    column = wide(probs.reshape(-1, 1))
    return torch.cat([1 - column, column], 1)


def zero_or_one(labels: Tensor) -> Tensor:
    """Labels as a binary loss takes them, bool or float 0 and 1, as integers; (n, 1) as (n,).

    Labels that are neither 0 nor 1 stay as they are, for the checks to refuse them.
    """
    flat = labels.reshape(-1) if is_single(labels) else labels
    binary = flat.is_floating_point() and bool(((flat == 0) | (flat == 1)).all())
    return flat.long() if binary or flat.dtype == torch.bool else flat


def answers(batch: Batch, logits: Tensor, first: int = 0) -> Batch:
    """The rows that are judged: of a batch with several labels a sample, one for each of them.

    They are rows of two classes, no and yes, the k rows of a sample side by side and of one group.

    Args:
        batch: any; one with a label per row has its own rows already.
        logits: (n, k), what to judge.
        first: the number of the first sample, where samples are counted.

    >>> batch = Batch(torch.tensor([[3.0, -1.0]]), torch.tensor([[1, 0]]))
    >>> rows = answers(batch, batch.logits)
    >>> rows.logits.tolist(), rows.labels.tolist(), rows.groups.tolist()
    ([[0.0, 3.0], [0.0, -1.0]], [1, 0], [0, 0])
    """
    if batch.labels.ndim == 1:
        return unchecked(logits, batch.labels, None, batch.groups)
    groups = batch.groups
    if groups is None:
        groups = torch.arange(first, first + len(batch), device=logits.device)
    labels = batch.labels.reshape(-1)
    groups = groups.repeat_interleave(batch.labels.shape[1])
    return unchecked(two_classes(logits.reshape(-1)), labels, None, groups)


def predicted(values: Tensor) -> Tensor:
    """The class of the largest value of each row (n, k), the first of equal ones: (n,) int64.

    For measuring, not for a forward pass: on a CPU numpy finds it several times faster than torch.
    """
    if values.device.type != "cpu" or values.dtype.itemsize < 4 or values.requires_grad:
        return values.argmax(1)
    return torch.from_numpy(values.numpy().argmax(1))


def bin_edges(bins: int, dtype: torch.dtype) -> Tensor:
    """The m + 1 edges of m equal-width bins on [0, 1], in the precision they are compared in.

    A float32 confidence is compared with float32 edges: read as float64, float32(0.2) lies above
    0.2 and would change bins. Each is the number nearest to k / m: 8 of 15 votes are 8/15.
    """
    return (torch.arange(bins + 1, dtype=torch.float64) / bins).to(dtype)


def bin_index(confidence: Tensor, bins: int) -> Tensor:
    """The bin of each confidence, 0 to m - 1: right-closed, 0 in the first bin, 1 in the last.

    One binning for every number and every diagram. On an edge is what differs from it by rounding
    alone, as shares of votes do that were logarithms in between.

    >>> bin_index(torch.tensor([0.0, 0.2, 0.20001, 1.0]), 5).tolist()
    [0, 0, 1, 4]
    """
    inner = bin_edges(bins, confidence.dtype)[1:-1] * (1 + ON * torch.finfo(confidence.dtype).eps)
    return torch.bucketize(confidence, inner.to(confidence.device))


def bin_sums(confidence: Tensor, correct: Tensor, bins: int) -> Tensor:
    """Per bin the count, the summed confidence and the summed correctness: (3, m) float64."""
    index = bin_index(confidence, bins)
    weights = torch.stack([torch.ones_like(confidence), confidence, correct.to(confidence.dtype)])
    if confidence.is_cuda:  # adding to a few numbers at once, threads would wait for each other
        return weights.double() @ F.one_hot(index, bins).double()
    sums = torch.zeros(3, bins, dtype=torch.float64, device=confidence.device)
    return sums.index_add_(1, index, weights.double())
