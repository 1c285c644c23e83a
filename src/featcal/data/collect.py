"""Features and logits of a model over a loader: the very tensors its head saw and made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, final

import torch
from torch import Tensor, nn

from featcal.core.batch import Batch, Head, wide
from featcal.core.binary import two_classes
from featcal.core.call import Call, outputs_in, run, watched
from featcal.core.errors import InputError
from featcal.core.find import check_named, find_head, inner_layer
from featcal.core.fitting import exact, undisturbed
from featcal.core.head import as_head, rows_of, sample_shape
from featcal.core.layer import Rest, first_tensor
from featcal.core.progress import ROWS, shown, tell
from featcal.core.proof import positions
from featcal.core.survey import check_same
from featcal.data.loading import Unpack, checked_iter, placed, rows_expected, unpacked


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
