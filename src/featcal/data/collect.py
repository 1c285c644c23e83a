"""Features and logits of a model over a loader: the very tensors its head saw and made."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, NoReturn, final

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from featcal.core.batch import Batch, Head, two_classes, wide
from featcal.core.checks import InputError, check_same
from featcal.core.fit import exact, undisturbed
from featcal.core.progress import ROWS, shown, tell
from featcal.heads import find
from featcal.heads.attach import Rest, first_tensor
from featcal.heads.head import as_head, rows_of, sample_shape

LABELS = ("labels", "label", "targets", "target", "y")
Unpack = Callable[[Any], tuple[Any, Any]]  # a batch of the loader -> (inputs, labels)


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

    def __repr__(self) -> str:
        what = "" if not self else f" like {self[0]!r}"
        return f"Collected({self.rows:,} rows in {len(self)} batches{what}; head {self.path!r})"


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
    collector = Collector(model, head, layer, unpack)
    with shown():
        batches = list(collector.batches(loader))
    return Collected(batches, collector.head, collector.path, layer)


class Seen(NamedTuple):
    """What one forward pass showed: features (n, d), logits (n, k), and a sample's own shape."""

    features: Tensor
    logits: Tensor
    sample: torch.Size | None


@final
@dataclass(eq=False)
class Collector:
    """One model and what to keep of it; the last layer is proved on the first batch.

    Attributes:
        model: the trained classifier.
        told: the path of the last layer, where the caller gave one.
        layer: the path of an inner layer to keep the output of, or None.
        unpack: what makes (inputs, labels) of a batch, or None.
        path: the path of the last layer, set by the first batch.
        head: the head of the rows that are kept, likewise.
        example: the model's inputs of the first batch.
    """

    model: nn.Module
    told: str | None
    layer: str | None
    unpack: Unpack | None
    path: str = field(init=False)
    head: Head = field(init=False)
    example: Any = field(init=False)

    def __post_init__(self) -> None:
        # Before the loader runs, which may take long to begin.
        find.check_bare(self.model)
        for argument, path in (("head", self.told), ("layer", self.layer)):
            if path is not None:
                find.submodule(self.model, path, argument)

    @torch.no_grad()
    def batches(self, loader: Iterable[Any], label: str = f"collecting{ROWS}") -> Iterator[Batch]:
        """The batches of one loader, in main memory."""
        done, expected = 0, rows_expected(loader)
        with undisturbed(self.model):
            for inputs, labels in unpacked(self.model, loader, self.unpack):
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
        if not hasattr(self, "path"):
            self.example = inputs
            several = labels.ndim == 2 and labels.shape[1] > 1
            self.path = find.find_head(self.model, self.told, inputs=inputs, several=several)
        seen = self._seen(inputs, len(labels))
        if not hasattr(self, "head"):
            self.head = self._proved_head(inputs, seen)
        elif self.layer is not None and not _makes(self.head, seen):
            self._refuse_layer()  # what stood in for the inputs of the first batch will not do here
        # Copies: a view would keep alive all it is a part of, such as every token of a sample.
        logits, features = (part.to("cpu", copy=True) for part in (seen.logits, seen.features))
        return Batch(logits, labels.to("cpu", copy=True), features)  # one logit becomes two here

    def _seen(self, inputs: Any, rows: int) -> Seen:  # noqa: ANN401
        """What the layers took and gave in one forward pass, one row per sample."""
        paths = [self.path] if self.layer is None else [self.path, self.layer]
        with find.watched(self.model, paths) as calls:
            output = find.run(self.model, inputs)
        found = {path: (entered, given) for path, entered, given in calls}
        if sorted(path for path, *_ in calls) != sorted(paths):
            raise InputError(
                f"{' and '.join(map(repr, paths))} must run once in a forward pass, not "
                f"{len(calls)} times: name the layer that makes the logits alone with head="
            )
        entered, given = found[self.path]
        if not isinstance(entered, Tensor):
            raise InputError("the last layer takes more than one tensor: name another with head=")
        kept = (find.positions(given, part) for part in find.outputs_in(output))
        place = next((token for token in kept if token is not None), None)
        if place is not None:  # a language model scores every token and keeps one per sample
            sample = torch.arange(len(place), device=place.device)
            entered, given = entered[sample, place], given[sample, place]
        last = self.model.get_submodule(self.path)
        seen = Seen(rows_of(last, entered), rows_of(last, given), sample_shape(last, entered))
        if self.layer is not None:
            inside = first_tensor(found[self.layer][1])
            seen = Seen(inside.reshape(len(inside), -1), seen.logits, inside.shape[1:])
        for path, values in zip((paths[0], paths[-1]), (seen.logits, seen.features), strict=True):
            if len(values) != rows:
                raise InputError(
                    f"{path!r} has {len(values)} rows for {rows} labels: name one with a row each"
                )
        return seen

    def _proved_head(self, inputs: Any, seen: Seen) -> Head:  # noqa: ANN401
        """The head of the features, proved to make the logits of the first batch of them."""
        if self.layer is None:
            head = as_head(self.model.get_submodule(self.path), seen.sample)
            assert head is not None
            with exact():
                check_same(head(wide(seen.features)), two_classes(seen.logits))
            return head
        assert seen.sample is not None
        for repeat in (False, True):  # one stand-in input for all rows, or one for each
            rest = Rest(self.model, inputs, self.layer, self.path, seen.sample, repeat=repeat)
            if _makes(rest, seen):
                return rest
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


def unpacked(
    model: nn.Module, loader: Iterable[Any], unpack: Unpack | None = None
) -> Iterator[tuple[Any, Tensor]]:
    """The batches of a loader as (inputs, labels).

    Each is a pair, or a mapping with the labels under a usual name, or what `unpack` makes one of.
    """
    if not isinstance(loader, Iterable):
        raise InputError(f"loader is a {type(loader).__name__}: pass batches of (inputs, labels)")
    for batch in loader:
        pair = batch if unpack is None else unpack(batch)
        if unpack is None and isinstance(batch, Mapping):
            pair = _of_mapping(model, batch)
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise InputError(
                f"a batch comes as {type(pair).__name__}, and (inputs, labels) or a mapping with "
                "labels is expected: pass unpack=, such as lambda batch: (batch[:2], batch[2])"
            )
        inputs, labels = pair
        try:
            found = torch.as_tensor(labels).detach()
            len(found)  # of a single number a TypeError
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(
                f"the labels of a batch are {labels!r:.40}: give one class number per row"
            ) from error
        yield inputs, found


def _of_mapping(model: nn.Module, batch: Mapping[str, Any]) -> tuple[Any, Any]:
    """Hugging Face's form: the labels by name, the rest by the names the model knows."""
    name = next((name for name in LABELS if name in batch), None)
    rest = {key: value for key, value in batch.items() if key != name}
    known = inspect.signature(model.forward).parameters.values()
    named = {p.name: rest[p.name] for p in known if p.name in rest}
    if name is not None and not named and len(rest) == 1:
        return next(iter(rest.values())), batch[name]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in known):
        named |= {key: value for key, value in rest.items() if isinstance(value, Tensor)}
    if name is None or not named:
        raise InputError(
            f"the loader gives a mapping of {', '.join(map(str, batch))}: the labels must be "
            f"called {' or '.join(LABELS)}, and the inputs as the model takes them, "
            f"{', '.join(p.name for p in known)}; pass unpack= otherwise"
        )
    return named, batch[name]


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

    def other(value: Any) -> Any:  # noqa: ANN401 - such as a packed sequence or a batch of graphs
        return value.to(device) if hasattr(value, "to") else value

    return find.mapped(inputs, moved, other)


def rows_expected(loader: Iterable[Any]) -> int:
    """The rows a loader will give, 0 when it does not say."""
    if isinstance(loader, DataLoader) and loader.batch_sampler is None:
        return 0  # its data set gives whole batches
    rows = 0
    for source in (getattr(loader, "sampler", None), getattr(loader, "dataset", None)):
        try:
            rows = len(source)  # type: ignore[arg-type]
            break
        except (TypeError, NotImplementedError):  # none, or one that it has in name only
            continue
    size = getattr(loader, "batch_size", None)
    return rows - rows % size if size and getattr(loader, "drop_last", False) else rows
