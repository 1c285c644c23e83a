"""Features and logits of a model over a loader: the very tensors its head saw and made."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, NoReturn, final

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from featcal.core.batch import Batch, Head, two_classes, wide
from featcal.core.checks import InputError
from featcal.core.fit import check_same, exact, undisturbed
from featcal.core.progress import ROWS, shown, tell
from featcal.heads.attach import Rest, first_tensor
from featcal.heads.find import (
    Call,
    check_named,
    find_head,
    inner_layer,
    mapped,
    outputs_in,
    positions,
    run,
    watched,
)
from featcal.heads.head import as_head, rows_of, sample_shape

# --- The forms in which a loader hands over a batch, read as (inputs, labels).

# Of a DataLoader, for one that gives some of its batches.
SAME_OPTIONS = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn")
LABELS = ("labels", "label", "targets", "target", "y")
Unpack = Callable[[Any], tuple[Any, Any]]  # a batch of the loader -> (inputs, labels)


def unpacked(model: nn.Module, batch: Any, unpack: Unpack | None = None) -> tuple[Any, Tensor]:  # noqa: ANN401
    """A batch as (inputs, labels): a pair, or a mapping with the labels under a usual name."""
    pair = batch if unpack is None else unpack(batch)
    if unpack is None and isinstance(batch, Mapping):
        pair = _of_mapping(model, batch)
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        what = f"{len(pair)} values" if isinstance(pair, (tuple, list)) else type(pair).__name__
        raise InputError(
            f"the loader gives {what}, and (inputs, labels) or a mapping with labels is expected: "
            "pass unpack=, such as lambda batch: ((batch[0], batch[1]), batch[2])"
            if unpack is None
            else f"unpack gives {what}: it must give (inputs, labels)"
        )
    return pair[0], _as_labels(pair[1])


def _as_labels(labels: Any) -> Tensor:  # noqa: ANN401
    try:
        found = torch.as_tensor(labels).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"the labels of a batch are a {type(labels).__name__} that is no array of numbers: "
            "give one class number a row"
        ) from error
    if found.ndim == 0:
        raise InputError(
            "the loader gives single samples, with one label each: put them into batches with "
            "torch.utils.data.DataLoader(dataset, batch_size=...)"
        )
    return found


def _of_mapping(model: nn.Module, batch: Mapping[str, Any]) -> tuple[Any, Any]:
    """Hugging Face's form: the labels by name, the rest by the names the model knows."""
    name = _label_name(batch)
    if name is None:
        raise InputError(
            f"the loader gives a mapping of {', '.join(map(str, batch))}, and none of them is "
            f"called {' or '.join(LABELS)}: pass unpack="
        )
    rest = {key: value for key, value in batch.items() if key != name}
    known = inspect.signature(model.forward).parameters.values()
    named = {p.name: rest[p.name] for p in known if p.name in rest}
    if not named and len(rest) == 1:
        return next(iter(rest.values())), batch[name]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in known):
        named |= {key: value for key, value in rest.items() if isinstance(value, Tensor)}
    if not named:
        raise InputError(
            f"the loader gives {', '.join(map(str, rest)) or 'labels alone'}, and the model takes "
            f"{', '.join(p.name for p in known)}: pass unpack="
        )
    return named, batch[name]


def _label_name(batch: Mapping[str, Any]) -> str | None:
    return next((name for name in LABELS if name in batch), None)


def placed(inputs: Any, model: nn.Module) -> Any:  # noqa: ANN401
    """The inputs on the model's device; floats in its type where all of it is in half precision."""
    device = next((tensor.device for tensor in chain(model.parameters(), model.buffers())), None)
    if device is None:
        return inputs
    types = {weight.dtype for weight in model.parameters() if weight.is_floating_point()}
    only = types.pop() if len(types) == 1 else torch.float32

    def moved(tensor: Tensor) -> Tensor:
        narrow = only.itemsize < 4 and tensor.is_floating_point()
        return tensor.to(device, only if narrow else tensor.dtype, non_blocking=True)

    # What else can be moved is moved as one, such as a packed sequence or a batch of graphs.
    return mapped(inputs, moved, lambda value: value.to(device) if hasattr(value, "to") else value)


def rows_expected(loader: Iterable[Any]) -> int:
    """The rows a loader will give, 0 when it does not say."""
    if isinstance(loader, (list, tuple)):
        counts = [_rows_in(batch) for batch in loader]
        return sum(counts) if all(counts) else 0
    if isinstance(loader, DataLoader) and loader.batch_sampler is None:
        return 0  # its data set gives whole batches
    sources = (getattr(loader, name, None) for name in ("sampler", "dataset"))
    rows = next((_length(source) for source in sources if isinstance(source, Sized)), 0)
    size = getattr(loader, "batch_size", None)
    return rows - rows % size if size and getattr(loader, "drop_last", False) else rows


def _length(source: Sized) -> int:
    try:
        return len(source)
    except (TypeError, NotImplementedError):  # a length it has in name only
        return 0


def _rows_in(batch: Any) -> int:  # noqa: ANN401
    """The rows of a batch in a usual form, 0 for any other."""
    name = _label_name(batch) if isinstance(batch, Mapping) else None
    pair = isinstance(batch, (tuple, list)) and len(batch) == 2
    labels = batch[name] if name is not None else batch[1] if pair else ()
    single = not isinstance(labels, Sized) or getattr(labels, "ndim", None) == 0
    return 0 if single else len(labels)


def checked_iter(loader: Iterable[Any]) -> Iterator[Any]:
    """An iterator over a loader, or an error that says what a loader is."""
    if not isinstance(loader, Iterable):
        raise InputError(
            f"loader is a {type(loader).__name__}: pass an iterable of (inputs, labels), such as a "
            "DataLoader over held-out data"
        )
    return iter(loader)


Pair = tuple[Any, Tensor]  # inputs and labels of one batch


def left(
    model: nn.Module, loader: Iterable[Any], done: int, unpack: Unpack | None
) -> Iterator[tuple[int, Pair]]:
    """The batches with rows beyond `done` and two before them, each with its first row's number.

    The two are the first batch and the one that ends what is done, for a look at whether they are
    what they were. The samples of the others are not even loaded where a DataLoader says which
    they are.
    """
    if done and isinstance(loader, DataLoader) and _indexable(loader):
        for start, batch in _indexed(loader, done):
            yield start, unpacked(model, batch, unpack)
        return
    end = 0
    for batch in checked_iter(loader):
        pair = unpacked(model, batch, unpack)
        start, end = end, end + len(pair[1])
        if end > start and (start == 0 or end >= done):
            yield start, pair


def _indexable(loader: DataLoader[Any]) -> bool:
    """Whether a loader does what a plain one does with the indices of its batches."""
    plain = type(loader).__iter__ is DataLoader.__iter__
    map_style = not isinstance(loader.dataset, IterableDataset)
    return plain and map_style and loader.batch_sampler is not None


def _indexed(loader: DataLoader[Any], done: int) -> Iterator[tuple[int, Any]]:
    indices = [list(batch) for batch in loader.batch_sampler or ()]
    starts = [0, *accumulate(map(len, indices))]
    kept = [i for i in range(len(indices)) if i == 0 or starts[i + 1] >= done]
    options = {name: getattr(loader, name) for name in SAME_OPTIONS}
    rest = DataLoader(loader.dataset, batch_sampler=[indices[i] for i in kept], **options)
    yield from zip((starts[i] for i in kept), rest, strict=True)


@final
class Collected(list[Batch]):
    """What `collect` found: batches to fit on, and the head that goes with them.

    Attributes:
        head: the last layer as a head of rows, for `calibrator.fit(data, data.head)`; for an inner
            layer it is the rest of the network.
        path: the path of the last layer, for `attach(..., head=path)`.
        layer: the path of the inner layer whose output the features are, or None.
    """

    def __init__(
        self, batches: Iterable[Batch], head: Head, path: str, layer: str | None = None
    ) -> None:
        super().__init__(batches)
        self.head, self.path, self.layer = head, path, layer

    @property
    def rows(self) -> int:
        """Labelled rows in all."""
        return sum(len(batch) for batch in self)


def collect(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    head: str | None = None,
    layer: str | None = None,
    unpack: Unpack | None = None,
) -> Collected:
    """Runs the model over labelled batches and keeps what enters and leaves its last layer.

    The model is in eval mode meanwhile; its flags, its gradients and the random states of torch,
    numpy and Python are as before afterwards. Inputs go to its device; autocast is respected where
    the caller turned it on; the results are kept in main memory.

    Args:
        model: the trained classifier.
        loader: any iterable of (inputs, labels) or of mappings with labels, such as a DataLoader
            over held-out data. Several inputs: a tuple or a mapping of them.
        head: dotted path of the last layer, when it is not found by itself.
        layer: dotted path of another layer, whose output to keep as the features.
        unpack: makes (inputs, labels) of a batch in any other form.
    """
    collector = Collector(model, head=head, layer=layer, unpack=unpack)
    with shown():
        batches = list(collector.batches(loader))
    return Collected(batches, collector.head, collector.path, layer)


@dataclass(frozen=True)
class Seen:
    """What one forward pass showed: features (n, d), logits (n, k), and a sample's own shape."""

    features: Tensor
    logits: Tensor
    sample: torch.Size | None


@final
class Collector:
    """One model and what to keep of it; the last layer is proved on the first batch."""

    def __init__(
        self,
        model: nn.Module,
        *,
        head: str | None = None,
        layer: str | None = None,
        unpack: Unpack | None = None,
    ) -> None:
        self.model, self.layer, self.unpack = model, layer, unpack
        check_named(model, head)  # before the loader runs, which may take long to begin
        if layer is not None:
            inner_layer(model, layer)
        self._told = head
        self.example: Any = None  # the model's inputs of the first batch
        self._path: str | None = None
        self._head: Head | None = None

    @property
    def path(self) -> str:
        """The path of the last layer, once a batch has proved it."""
        assert self._path is not None
        return self._path

    @property
    def head(self) -> Head:
        """The head of the rows that were kept."""
        assert self._head is not None
        return self._head

    @torch.no_grad()
    def batches(self, loader: Iterable[Any], label: str = f"collecting{ROWS}") -> Iterator[Batch]:
        """The batches of one loader, in main memory."""
        done, expected = 0, rows_expected(loader)
        with undisturbed(self.model):
            for batch in checked_iter(loader):
                inputs, labels = unpacked(self.model, batch, self.unpack)
                if len(labels) == 0:
                    continue
                found = self.one(inputs, labels)
                done += len(found)
                yield found
                tell(label, done, max(expected, done))
        if not done:
            raise InputError("loader is empty: pass held-out data as (inputs, labels)")

    def one(self, inputs: Any, labels: Tensor) -> Batch:  # noqa: ANN401
        """What one batch gives; the model is in eval mode already."""
        inputs = placed(inputs, self.model)
        if self._path is None:
            self.example = inputs
            self._path = find_head(self.model, self._told, inputs=inputs)
        seen = self._seen(inputs, len(labels))
        if self._head is None:
            self._head = self._checked_head(inputs, seen)
        elif self.layer is not None and not _makes(self._head, seen):
            self._refuse_layer()  # what stood in for the inputs of the first batch will not do here
        # Copies: a view would keep alive all it is a part of, such as every token of a sample.
        logits, features = (part.to("cpu", copy=True) for part in (seen.logits, seen.features))
        return Batch(logits, labels.to("cpu", copy=True), features)  # one logit becomes two here

    def _seen(self, inputs: Any, rows: int) -> Seen:  # noqa: ANN401
        """What the layers took and gave in one forward pass."""
        inner = [] if self.layer is None else [self.layer]
        with watched(self.model, [self.path, *inner]) as calls:
            output = run(self.model, inputs)
        last = self.model.get_submodule(self.path)
        seen = _last_seen(last, *_one_call(calls, self.path), outputs_in(output))
        if self.layer is not None:
            inside = first_tensor(_one_call(calls, self.layer)[1])
            seen = Seen(inside.reshape(len(inside), -1), seen.logits, inside.shape[1:])
        _check_rows(seen.logits, rows, self.path)
        _check_rows(seen.features, rows, self.path if self.layer is None else self.layer)
        return seen

    def _checked_head(self, inputs: Any, seen: Seen) -> Head:  # noqa: ANN401
        """The head of the features, proved to make the logits of the first batch of them."""
        if self.layer is not None:
            return self._rest(self.layer, inputs, seen)
        head = as_head(self.model.get_submodule(self.path), seen.sample)
        assert head is not None
        with exact():
            check_same(head(wide(seen.features)), two_classes(seen.logits))
        return head

    def _rest(self, layer: str, inputs: Any, seen: Seen) -> Head:  # noqa: ANN401
        """The rest of the network, on one input for all rows, or on one for each if it must be."""
        assert seen.sample is not None
        for repeat in (False, True):
            head = Rest(
                self.model, inputs, layer=layer, head=self.path, sample=seen.sample, repeat=repeat
            )
            if _makes(head, seen):
                return head
        self._refuse_layer()

    def _refuse_layer(self) -> NoReturn:
        raise InputError(
            f"the logits cannot be computed from what layer {self.layer!r} gives alone: the "
            "network also leads around it, or depends on its inputs elsewhere; name a later layer"
        )


def _makes(head: Head, seen: Seen) -> bool:
    """Whether the rest of a network gives the logits of the whole."""
    try:
        check_same(head(seen.features), two_classes(seen.logits))
    except torch.OutOfMemoryError:
        raise
    except (InputError, RuntimeError, TypeError, ValueError, IndexError):
        return False  # a network may refuse a stand-in input in many ways
    return True


def _one_call(calls: list[Call], path: str) -> tuple[Any, Any]:
    """What entered and left a layer in the one call of it."""
    found = [(entered, given) for name, entered, given in calls if name == path]
    if len(found) != 1:
        raise InputError(
            f"{path!r} ran {len(found)} times in one forward pass, not once: name the layer that "
            "makes the logits, and only them, with head="
        )
    return found[0]


def _check_rows(values: Tensor, rows: int, path: str) -> None:
    if len(values) != rows:
        raise InputError(
            f"{path!r} works on {len(values)} rows for {rows} labels: name a layer that has one "
            "row a sample, with the samples along its first axis"
        )


def _last_seen(last: nn.Module, entered: Any, given: Tensor, output: list[Tensor]) -> Seen:  # noqa: ANN401
    """What the last layer took and gave, one row a sample."""
    if not isinstance(entered, Tensor):
        raise InputError(
            "the last layer takes something else than one tensor by position: name a layer that "
            "takes its features alone with head="
        )
    kept = (positions(given, part) for part in output)
    place = next((found for found in kept if found is not None), None)
    if place is not None:  # a language model scores every token and keeps one a sample
        sample = torch.arange(len(place), device=place.device)
        entered, given = entered[sample, place], given[sample, place]
    return Seen(rows_of(last, entered), rows_of(last, given), sample_shape(last, entered))
