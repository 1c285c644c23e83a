"""Features and logits of a model over a loader: the very tensors its head saw and made.

Where labels have a place in their sample, (n, h, w) of pixels or (n, t) of tokens, every position
is a row, and its group is the number of the sample. Of each sample some positions are drawn: those
of one image are much alike, and all of them would fill any memory. Of a model whose output no
linear layer makes there are the logits, and no features.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, NoReturn, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from featcal.core import dist
from featcal.core.batch import Batch, Head, two_classes, wide
from featcal.core.checks import InputError, check_same, check_whole, check_whole_labels
from featcal.core.fit import exact, undisturbed
from featcal.core.progress import ROWS, shown, tell
from featcal.heads import find
from featcal.heads.attach import Rest, first_tensor
from featcal.heads.head import as_head, channels, rows_of, sample_shape

LABELS = ("labels", "label", "targets", "target", "y")
IGNORED = -100  # as in torch's losses
POSITIONS, LOGITS = 256, 2**18  # of a sample, at most, where no number is given
Unpack = Callable[[Any], tuple[Any, Any]]  # a batch of the loader -> (inputs, labels)


@final
class Collected(list[Batch]):
    """What `collect` found: batches to fit on, and the head that goes with them.

    Attributes:
        head: the last layer as a head of rows, for `calibrator.fit(data, data.head)`; for an inner
            layer it is the rest of the network; None where there are logits alone.
        path: the path of the last layer, for `attach(..., head=path)`; "" for the model's output.
        layer: the path of the inner layer whose output the features are, or None.
        drawn: how many positions of a sample were drawn, and how; empty where a row is a sample.
    """

    def __init__(
        self,
        batches: Iterable[Batch],
        head: Head | None,
        path: str,
        layer: str | None = None,
        drawn: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(batches)
        self.head, self.path, self.layer, self.drawn = head, path, layer, dict(drawn or {})

    @property
    def rows(self) -> int:
        """Labelled rows in all."""
        return sum(len(batch) for batch in self)

    def __repr__(self) -> str:
        what = "" if not self else f" like {self[0]!r}"
        head = f"head {self.path!r}" if self.path else "logits alone"
        drawn = "".join(f"; {name} {value}" for name, value in self.drawn.items())
        return f"Collected({self.rows:,} rows in {len(self)} batches{what}; {head}{drawn})"


def collect(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    head: str | None = None,
    layer: str | None = None,
    unpack: Unpack | None = None,
    ignore_index: int = IGNORED,
    positions: int | None = None,
    seed: int = 0,
) -> Collected:
    """Runs the model over labelled batches and keeps what enters and leaves its last layer.

    The model is in eval mode meanwhile; its flags, its gradients and the random states of torch,
    numpy and Python are as before afterwards. Inputs go to its device; autocast is respected where
    the caller turned it on; the results are kept in main memory.

    Args:
        model: the trained classifier.
        loader: any iterable of (inputs, labels) or of mappings with labels, such as a DataLoader
            over held-out data. Several inputs: a tuple or a mapping of them.
        head: dotted path of the last layer, when it is not found by itself; "" to take the model's
            output for logits, as is done where no linear layer makes it.
        layer: dotted path of another layer, whose output to keep as the features.
        unpack: makes (inputs, labels) of a batch in any other form.
        ignore_index: the label of pixels and tokens that do not count.
        positions: how many pixels or tokens of a sample to keep at most, where labels are
            (n, h, w) or (n, t); None for 256, or 2^18 logits if that is fewer.
        seed: of the draw; a sample's positions depend on it and on the sample's number alone.
    """
    collector = Collector(model, head, layer, unpack, ignore_index, positions, seed)
    with shown():
        batches = list(collector.batches(loader))
    return Collected(batches, collector.head, collector.path, layer, collector.drawn)


class Seen(NamedTuple):
    """What one forward pass showed: features (n, d), logits (n, k), and a sample's own shape.

    With the labels of these rows, and their groups where a sample has several.
    """

    features: Tensor | None
    logits: Tensor
    sample: torch.Size | None
    labels: Tensor
    groups: Tensor | None = None


@final
@dataclass(eq=False)
class Collector:
    """One model and what to keep of it; the last layer is proved on the first batch.

    Attributes:
        model: the trained classifier.
        told: the path of the last layer, where the caller gave one.
        layer: the path of an inner layer to keep the output of, or None.
        unpack: what makes (inputs, labels) of a batch, or None.
        ignore_index, positions, seed: see `collect`.
        strict: whether features are asked for, so that a model without a last layer is refused.
        path: the path of the last layer, set by the first batch; OUTPUT where there is none.
        head: the head of the rows that are kept, likewise; None where there is none.
        example: the model's inputs of the first batch.
        drawn: how positions were drawn, once there are some.
    """

    model: nn.Module
    told: str | None
    layer: str | None
    unpack: Unpack | None
    ignore_index: int = IGNORED
    positions: int | None = None
    seed: int = 0
    strict: bool = False
    path: str = field(init=False)
    head: Head | None = field(init=False)
    example: Any = field(init=False)
    drawn: dict[str, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        check_whole("collect", 0, seed=self.seed)
        check_whole("collect", 1, positions=POSITIONS if self.positions is None else self.positions)
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
                # Each process has its own samples; where they were dealt out, by turns.
                first, end = (at * dist.world() + dist.rank() for at in (done, done + len(labels)))
                yield self.one(inputs, labels, range(first, end, dist.world()))
                done += len(labels)
                tell(label, done, max(expected, done))
        if not done:
            raise InputError("loader is empty: pass held-out data as (inputs, labels)")

    def one(self, inputs: Any, labels: Tensor, numbers: range) -> Batch:  # noqa: ANN401
        """What one batch gives, of samples of these numbers; in eval mode already."""
        inputs = placed(inputs, self.model)
        if not hasattr(self, "path"):
            self.example = inputs
            strict = self.strict or self.layer is not None
            find_path = find.find_head if strict else find.head_or_output
            several = labels.ndim == 2 and labels.shape[1] > 1
            self.path = find_path(self.model, self.told, inputs=inputs, several=several)
        if isinstance(inputs, Mapping):
            labels = next_tokens(inputs.get("input_ids"), labels, self.ignore_index)
        seen = self._seen(inputs, labels, numbers)
        if not hasattr(self, "head"):
            self.head = self._proved_head(inputs, seen)
        elif self.layer is not None and not _makes(self.head, seen):
            self._refuse_layer()  # what stood in for the inputs of the first batch will not do here
        # Copies: a view would keep alive all it is a part of, such as every token of a sample.
        features = None if seen.features is None else seen.features.to("cpu", copy=True)
        logits, kept = (part.to("cpu", copy=True) for part in (seen.logits, seen.labels))
        return Batch(logits, kept, features, seen.groups)  # one logit becomes two here

    def _seen(self, inputs: Any, labels: Tensor, numbers: range) -> Seen:  # noqa: ANN401
        """What the layers took and gave in one forward pass, at the positions that are kept."""
        if self.path == find.OUTPUT:
            given = find.logits_in(find.run(self.model, inputs))
            axis = find.class_axis(given)
            if labels.ndim > 1 and given.ndim > 2:
                return self._drawn(None, given, axis, labels, numbers)
            logits = given.reshape(len(given), -1)
            self._check_count(self.path, len(logits), labels)
            return Seen(None, logits, None, labels)
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
        last = self.model.get_submodule(self.path)
        along = channels(last, given)
        if labels.ndim > 1 and given.ndim > 2 and along is not None:
            if self.layer is not None:
                raise InputError(
                    "layer= keeps whole samples, and these labels have a place in theirs: leave "
                    "it out"
                )
            return self._drawn(entered, given, along, labels, numbers)
        kept = (find.positions(given, part) for part in find.outputs_in(output))
        place = next((token for token in kept if token is not None), None)
        if place is not None:  # a language model scores every token and keeps one per sample
            sample = torch.arange(len(place), device=place.device)
            entered, given = entered[sample, place], given[sample, place]
        features, logits = rows_of(last, entered), rows_of(last, given)
        seen = Seen(features, logits, sample_shape(last, entered), labels)
        if self.layer is not None:
            inside = first_tensor(found[self.layer][1])
            features = inside.reshape(len(inside), -1)
            seen = Seen(features, logits, inside.shape[1:], labels)
        for path, values in zip((paths[0], paths[-1]), (logits, features), strict=True):
            self._check_count(path, len(values), labels)
        return seen

    def _check_count(self, path: str, rows: int, labels: Tensor) -> None:
        if rows != len(labels):
            raise InputError(
                f"{path!r} has {rows} rows for {len(labels)} labels: name one with a row each"
            )

    def _drawn(
        self, entered: Tensor | None, given: Tensor, axis: int, labels: Tensor, numbers: range
    ) -> Seen:
        """The rows at the positions that are drawn of each sample."""
        spread = given.movedim(axis, -1)
        if labels.shape == given.shape and spread.shape[-1] == 1:  # as a binary loss takes them
            labels = labels.movedim(axis, -1)[..., 0]
        if labels.shape != spread.shape[:-1]:
            raise InputError(
                f"labels have shape {tuple(labels.shape)}, and the model gives logits at "
                f"{tuple(spread.shape[:-1])}, {spread.shape[-1]} each: give one label for each "
                "position; resize the labels (mode nearest), or the logits inside the model"
            )
        most = self.positions or max(1, min(POSITIONS, LOGITS // spread.shape[-1]))
        self.drawn = {"positions": most, "seed": self.seed, "ignore_index": self.ignore_index}
        labels = labels.cpu()
        flat = labels.reshape(len(labels), -1)
        places, groups = [], []
        for place, (number, row) in enumerate(zip(numbers, flat, strict=True)):
            counted = (row != self.ignore_index).nonzero()[:, 0]
            if len(counted) > most:
                draw = np.random.default_rng((self.seed, number))
                some = draw.choice(len(counted), most, replace=False, shuffle=False)
                counted = counted[np.sort(some)]
            places.append(place * flat.shape[1] + counted)
            groups.append(torch.full_like(counted, number))
        classes = max(spread.shape[-1], 2)  # one logit is that of the second of two
        counted = flat.flatten()[torch.cat(places)]
        strange = counted[counted >= classes]
        if len(strange) and bool((strange == strange[0]).all()):
            raise InputError(
                f"labels hold {strange[0]:g}, and there are {classes} classes: pass "
                f"ignore_index={strange[0]:g} if such positions do not count"
            )
        chosen = torch.cat(places).numpy()  # torch.unravel_index would import a compiler
        where = tuple(map(torch.from_numpy, np.unravel_index(chosen, labels.shape)))

        def kept(values: Tensor) -> Tensor:  # without a copy of all positions
            return values.movedim(axis, -1)[tuple(one.to(values.device) for one in where)]

        rows = kept(given), None, labels[where], torch.cat(groups)
        if entered is None:
            return Seen(None, *rows)
        sample = sample_shape(self.model.get_submodule(self.path), entered)
        return Seen(kept(entered), *rows)._replace(sample=sample)

    def _proved_head(self, inputs: Any, seen: Seen) -> Head | None:  # noqa: ANN401
        """The head of the features, proved to make the logits of the first batch of them."""
        if seen.features is None:
            check_logits(seen.logits)
            return None
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


def check_logits(values: Tensor) -> None:
    """Refuses the output of a model that looks like probabilities: their logits are not known."""
    rows = wide(values).reshape(len(values), -1)
    inside = len(rows) > 0 and bool(((rows >= 0) & (rows <= 1)).all())
    if inside and (rows.shape[1] == 1 or bool(((rows.sum(1) - 1).abs() < 1e-2).all())):
        raise InputError(
            "the model gives probabilities, and no layer was seen to make their logits: let it "
            "give logits, or fit a calibrator to Batch.from_probs(probs, labels)"
        )


def next_tokens(tokens: object, labels: Tensor, ignored: int) -> Tensor:
    """The label of each position, of labels that are the tokens themselves: the token after it.

    So libraries give the labels of a language model, which moves them by one in its own loss.
    """
    same = isinstance(tokens, Tensor) and tokens.shape == labels.shape and labels.ndim == 2
    if not same or not bool(((labels == tokens.to(labels)) | (labels == ignored)).all()):  # type: ignore[attr-defined]
        return labels
    return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], ignored)], 1)


def _makes(head: Head | None, seen: Seen) -> bool:
    """Whether the rest of a network gives the logits of the whole."""
    assert head is not None
    assert seen.features is not None
    try:
        check_same(head(seen.features), two_classes(seen.logits))
    except torch.OutOfMemoryError:
        raise
    except (InputError, RuntimeError, TypeError, ValueError, IndexError):
        return False  # a network may refuse a stand-in input in many ways
    return True


def check_loader(loader: object) -> None:
    """Refuses what gives no batches."""
    if not isinstance(loader, Iterable):
        raise InputError(
            f"loader is a {type(loader).__name__}: pass batches of (inputs, labels), such as a "
            "DataLoader gives"
        )


def unpacked(
    model: nn.Module, loader: Iterable[Any], unpack: Unpack | None = None
) -> Iterator[tuple[Any, Tensor]]:
    """The batches of a loader as (inputs, labels).

    Each is a pair, or a mapping with the labels under a usual name, or what `unpack` makes one of.
    """
    check_loader(loader)
    for batch in loader:
        pair = batch if unpack is None else unpack(batch)
        if unpack is None and isinstance(batch, Mapping):
            pair = _of_mapping(model, batch)
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise InputError(
                f"a batch comes as {type(pair).__name__}, and (inputs, labels) or a mapping with "
                "labels is expected: pass unpack=, such as lambda batch: (batch[:2], batch[2]); of "
                "two arrays pass [(inputs, labels)]"
            )
        inputs, labels = pair
        parts = labels if isinstance(labels, (tuple, list)) else [labels]
        if any(isinstance(part, Mapping) for part in parts):
            raise InputError(
                "the labels of a batch are mappings, as those of detection boxes or masks are, and "
                "only class numbers are supported: pass unpack=, or give the class logits of "
                "matched boxes as Batch(logits, labels)"
            )
        try:
            found = torch.as_tensor(labels).detach()
            len(found)  # of a single number a TypeError
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(
                f"the labels of a batch are {labels!r:.40}: give one class number per row"
            ) from error
        check_whole_labels(found)
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
