"""The forms in which a loader hands over a batch, read as (inputs, labels)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from featcal.core.call import mapped
from featcal.core.errors import InputError

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
