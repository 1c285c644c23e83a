"""Calibrator: turns a head into a better calibrated head. Pipeline, and the head that ships."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import groupby, pairwise
from time import perf_counter
from typing import Any, ClassVar, Self, final

import numpy as np
import torch
from torch import Tensor, nn

from featcal.core.batch import (
    Batch,
    Data,
    Head,
    Through,
    as_data,
    head_of,
    paired,
    raw_logits,
    trainable,
)
from featcal.core.checks import CalibrationWarning, InputError, check_finite, check_positive
from featcal.core.fit import (
    MODES,
    Counted,
    FitReport,
    Loss,
    Mode,
    Problem,
    Stepped,
    StepReport,
    accuracy,
    cautious,
    evaluating,
    exact,
    measure,
    nll,
    published,
    run_steps,
    survey,
    together,
    warned,
)
from featcal.core.memory import Size, under_cap
from featcal.core.progress import FEW_LARGE, calm
from featcal.core.table import html_table
from featcal.heads.head import CalibratedHead, as_head, head_logits

METHODS: dict[str, type[Calibrator]] = {}
MOST_STEPS = 16  # of a recipe: what can be saved can be read again (see `featcal.core.text`)
VIEWS = ("unclipped", "clipped")  # of features, see `seen_features`
SEARCHED = ("criterion", "grid", "min_accuracy", "reference")  # arguments of searches
NUDGE = 2.0**-20  # the relative distance by which a prediction is kept ahead of the next class


class Calibrator(nn.Module, ABC):
    """Turns a head (features -> logits) into a better calibrated head.

    A fresh calibrator is the identity, bit for bit, unless its recipe fixes the value: there is no
    unfitted state. Constructor arguments are hyperparameters, fitted values are buffers, and
    `report` tells how they came. A subclass that sets `name` is registered under it for recipes,
    files and the command line.
    """

    name: ClassVar[str]
    title: ClassVar[str] = ""  # what the literature calls it; its name where a class does not say
    symbols: ClassVar[Mapping[str, str]] = {}  # fitted values as tables call them: threshold, c
    needs_features: bool = True
    takes_features: bool = False  # reads features where there are some, and does without
    most_classes: float = math.inf  # that its defaults can be fitted to in reasonable time
    needs_train: bool = False  # rows the classifier was trained on
    keeps_accuracy: bool = False
    keeps_rows: bool = False  # whether rows of the fit split are among the fitted values
    many: bool = False  # whether its numbers may be too many for the rows of a fit split
    jumps: bool = False  # whether a row at an edge of the map may change by a whole step
    alone: bool = False  # whether it is a whole recipe, and no step of one
    quick: str | None = None  # a cheaper method that joint fitting tries in this one's place
    any_head: bool = False  # whether the logits of several labels, (n, k), may be its rows as well
    several: bool = False  # whether it is fitted to several labels a sample: see `core/labels.py`

    def __init__(self) -> None:
        super().__init__()
        self.report: FitReport | None = None
        self.fixed: dict[str, float] = {}  # values that the recipe gives, which no fit changes

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" not in cls.__dict__:
            return
        if METHODS.setdefault(cls.name, cls) is not cls:
            taken = METHODS[cls.name].__qualname__
            raise TypeError(f"calibrator name {cls.name!r} is taken by {taken}")
        if "title" not in cls.__dict__:
            cls.title = cls.name

    @abstractmethod
    def forward(self, features: Tensor, head: Head) -> Tensor:
        """Calibrated logits (n, k), float32 or wider, of features (n, d)."""

    @abstractmethod
    def learn(self, problem: Problem) -> list[StepReport]:
        """Chooses the fitted values and assigns them; `fit` has checked the data already."""

    @final
    @under_cap
    @torch.inference_mode(mode=False)  # what is made there can never take part in training
    @torch.no_grad()
    def fit(
        self,
        data: Batch | Data,
        head: Head | None = None,
        *,
        loss: Loss = nll,
        mode: Mode = "joint",
        train: Batch | Data | None = None,
        memory: Size = None,
    ) -> Self:
        """Learns from labelled data the classifier was not trained on; returns the calibrator.

        Args:
            data: a Batch or any re-iterable of batches, such as a split of a feature pack.
            head: the classifier's last layer; None for the one that the data brings along, as what
                `collect` gives and a split of a pack do, or where it holds logits alone.
            loss: what to minimise.
            mode: "joint" chooses a feature step knowing that the later steps are refitted;
                "sequential" fits each step for itself, in order, as the paper does.
            train: rows the classifier was trained on, for methods that need them (density).
            memory: the most this process may hold, such as "2GB", mapped files aside.
        """
        started = perf_counter()
        if mode not in MODES:
            raise InputError(f"mode is {mode!r}: choose one of {', '.join(MODES)}")
        head = head_of(data) if head is None else head
        if head is None and self.needs_features:
            raise InputError(f"{self!r} works on features: pass head=, the classifier's last layer")
        if train is None and self.needs_train:
            raise InputError(f"{self!r} measures distance to training rows: pass train=, such rows")
        head = as_head(head)
        data = as_data(paired(data, 6), head)  # past the decorators
        with evaluating(head), exact(), ExitStack() as stack:
            facts = survey(data, head)
            if facts.several != self.several:
                raise InputError(self._wrong_labels())
            if train is None:
                data = stack.enter_context(together(data, facts))
            if self.needs_features and not facts.width:
                raise InputError(f"{self!r} works on features, and the data holds logits alone")
            self._apply(partial(trainable, device=facts.device))
            counted = None if head is None else Counted(head)
            reads = self.needs_features or self.takes_features
            raw = Through(data, partial(raw_logits, head=counted), features=reads)
            seen = None if train is None else as_data(train, head)
            with calm(facts.work, FEW_LARGE):
                before, right = measure(raw, loss, accuracy)
                if not math.isfinite(before):  # a broken head, or finite features of a huge size
                    raise InputError(
                        f"the network's own {loss.name} is {before}: the head's logits are NaN or "
                        "infinite; check the head, and remove or rescale the rows that cause it"
                    )
                problem = Problem(data, raw, counted, loss, facts, train=seen, before=before)
                parts = self.steps_in_order()
                if not any(map(published, parts)):
                    problem = cautious(problem, right)
                told = zip(parts, run_steps(parts, problem, mode), strict=True)
                steps = tuple(warned(*each, facts.judged, right) for each in told)
        self.report = FitReport(
            recipe=repr(self),
            mode=mode,
            loss=loss.name,
            rows=facts.rows,
            steps=steps,
            loss_before=before,
            loss_after=steps[-1].loss_after,
            seconds=perf_counter() - started,
            classes=facts.classes,
            features=facts.width,
            samples=facts.groups,
        )
        for part in parts:
            if part is not self:  # what it was fitted to before, alone, no longer holds
                part.report = None
        for text in filter(None, [*self.report.warnings, self.report.few_rows]):
            warnings.warn(text, CalibrationWarning, stacklevel=5)
        return self

    def _wrong_labels(self) -> str:
        if self.several:
            return f"{self!r} is for labels (n, k), several a sample: give the recipe inside alone"
        return (
            f"labels are (n, k), several a sample, and {self!r} is for one: fit "
            f'featcal.parse("all_labels({self!r})"), or per_label(...) for own values of each'
        )

    def hyperparameters(self) -> dict[str, Any]:
        """The constructor's arguments, as given."""
        keys = inspect.signature(type(self)).parameters
        return {
            key: self.fixed.get(key) if key in self._buffers else getattr(self, key) for key in keys
        }

    def register_number(self, key: str, born: float, given: float | None) -> None:
        """The one fitted number of a method, born as the identity's unless a recipe fixes it.

        The last thing a constructor does: what steers a search is refused beside a fixed value.
        """
        self.register_buffer(key, torch.tensor(born))
        if given is None:
            return
        self.fixed[key] = check_positive(self.name, key, given)
        self.assign(**self.fixed)
        known = inspect.signature(type(self)).parameters
        for other, value in self.hyperparameters().items():
            if other in SEARCHED and value != known[other].default:
                raise InputError(
                    f"{self.name}: {key}={given} leaves nothing to search: leave out {other}"
                )

    def reset(self) -> Self:
        """Forgets what was fitted: the identity again."""
        for key, value in type(self)(**self.hyperparameters())._buffers.items():
            old = self._buffers[key]
            assert value is not None
            self._buffers[key] = value if old is None else value.to(old.device)
        self.report = None
        return self

    @property
    def fresh(self) -> bool:
        """Whether nothing was fitted, assigned, loaded or fixed: the identity it was born as."""
        steps = self.steps_in_order()
        born = [type(step)(**step.hyperparameters()) for step in steps]
        both = (
            [[v.cpu() for v in s.buffers()] for s in two] for two in zip(steps, born, strict=True)
        )
        same = (len(now) == len(old) and all(map(torch.equal, now, old)) for now, old in both)
        return self.report is None and not any(s.fixed for s in steps) and all(same)

    def stand_in(self) -> Calibrator:
        """What joint fitting refits per value of an earlier step: this, or a cheaper method."""
        own = self.quick is None or self.fixed
        return copy.deepcopy(self) if own else METHODS[self.quick]()  # type: ignore[index]

    def steps_in_order(self) -> list[Calibrator]:
        """The steps this calibrator consists of: itself, unless it is a pipeline."""
        return [self]

    def outcome(self) -> Calibrator:
        """What was fitted in the end: itself, unless it chose among others."""
        return self

    def assign(self, **values: Tensor | float) -> Self:
        """Stores fitted values in the buffers of these names."""
        for key, value in values.items():
            old = self._buffers[key]
            assert old is not None
            self._buffers[key] = torch.as_tensor(value, dtype=torch.float32).to(old.device).clone()
        return self

    def wrap(self, head: nn.Module | None = None) -> CalibratedHead:
        """The deployable module: features in, calibrated logits out (logits in, without a head)."""
        return CalibratedHead(head, self.outcome())

    def __call__(self, rows: Any, head: Head | None = None) -> Any:  # noqa: ANN401
        """What a network runs, features through the head; without a head as `transform`."""
        return self.transform(rows) if head is None else super().__call__(rows, head)

    @torch.no_grad()
    def transform(self, rows: Any, head: Head | None = None) -> Any:  # noqa: ANN401 - as it came
        """Calibrated logits of logits (n, k), or of features (n, d) and the head they enter.

        Tensors give tensors and numpy arrays give arrays; a softmax makes probabilities of them.
        One logit per row, as a sigmoid model gives it, comes back as one.

        >>> calibrator = METHODS["temperature"]().assign(temperature=2.0)
        >>> calibrator.transform(torch.tensor([[4.0, 0.0]]))
        tensor([[2., 0.]])
        """
        if head is None and self.needs_features:
            raise InputError(
                f"{self!r} works on features: pass them with head=, the classifier's last layer"
            )
        if head is not None and not callable(head):
            raise InputError(f"head is a {type(head).__name__}: pass the last layer, a module")
        layer = head if isinstance(head, nn.Module) else as_head(head)
        try:
            given = rows if isinstance(rows, Tensor) else torch.tensor(np.asarray(rows))
        except (TypeError, ValueError) as error:
            kind = type(rows).__name__
            raise InputError(f"rows are a {kind}: give numbers, (n, k) or (n, d)") from error
        if given.ndim == 0:
            raise InputError("rows are one number: give one row per sample, rows[None]")
        check_finite("rows", given)
        weights = layer.parameters() if isinstance(layer, nn.Module) else iter(())
        known = next((one for one in weights if one.is_floating_point()), None)
        if known is not None:
            given = given.to(known)
        elif not given.is_floating_point():
            given = given.double()
        if given.ndim == 2 and given.shape[1] > 1:
            width, alone = given.shape[1], layer is None
            self.check_rows(classes=width if alone else 0, features=0 if alone else width)
        with evaluating(layer):
            found = self.wrap(layer)(given)  # type: ignore[arg-type]  # as_head gives modules
        if found.ndim == 2 and found.shape[1] > 1:
            self.check_rows(classes=found.shape[1])
        return found if isinstance(rows, Tensor) else found.cpu().numpy()

    def check_rows(
        self, *, classes: int = 0, features: int = 0, class_names: Sequence[str] | None = None
    ) -> None:
        """Refuses rows of other sizes or classes than the fit's; 0 and None for not known."""
        report = self.report
        if report is None:
            return
        sizes = [("classes", report.classes, classes)]
        if self.needs_features:
            sizes.append(("features", report.features, features))
        for name, fitted, here in sizes:
            if fitted and here and fitted != here:
                raise InputError(
                    f"{self!r} was fitted to {fitted} {name}, and these rows have {here}: give "
                    "the calibrator of this network"
                )
        named = zip(report.class_names or (), class_names or (), strict=False)
        for number, (known, name) in enumerate(named):
            if known != name:
                raise InputError(
                    f"{self!r} was fitted with {known!r} as class {number}, and here that is "
                    f"{name!r}: give the classes in the order of the fit"
                )

    def __or__(self, other: Calibrator) -> Pipeline:
        if not isinstance(other, Calibrator):
            return NotImplemented
        return Pipeline(self, other)

    def __repr__(self) -> str:
        """The recipe: hyperparameters that differ from their defaults, never fitted values."""
        known, given = inspect.signature(type(self)).parameters, self.hyperparameters()
        changed = [key for key, value in given.items() if value != known[key].default]
        arguments = ", ".join(f"{key}={given[key]!r}" for key in changed)
        return f"{self.name}({arguments})" if arguments else self.name

    def __str__(self) -> str:
        """The recipe and what was learned."""
        values = []
        for key, value in self.named_buffers():
            if not value.numel():
                continue
            few = f"{float(value):.4g}" if value.numel() == 1 else f"tensor{tuple(value.shape)}"
            values.append(f"{key.rpartition('.')[2]}={few}")
        return "   ".join([repr(self), " ".join(values)])

    def _repr_html_(self) -> str:
        """What a notebook shows: how it was fitted, or the values that it holds."""
        if self.report is not None:
            return self.report._repr_html_()
        recipe, _, values = str(self).partition("   ")
        return html_table(("recipe", "values"), [(f"`{recipe}`", values)])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Half of a model's precision is for its weights: the few fitted values stay in full."""
        full = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for key, value in self._buffers.items():
            if value is not None and value.dtype.itemsize < 4:
                old = full[key]
                assert old is not None
                self._buffers[key] = old.to(value.device)
        return self

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        *args: Any,  # noqa: ANN401
    ) -> None:
        for key, buffer in self._buffers.items():  # shapes that were learned come from the file
            stored = state_dict.get(prefix + key)
            if stored is not None and buffer is not None:
                self._buffers[key] = buffer.new_empty(stored.shape)
        super()._load_from_state_dict(state_dict, prefix, *args)


class FeatureMap(Calibrator):
    """Acts on features, before the head."""

    any_head = True

    @abstractmethod
    def map_features(self, features: Tensor) -> Tensor:
        """(n, d) -> (n, d)."""

    def forward(self, features: Tensor, head: Head) -> Tensor:
        """The head's logits of the mapped features."""
        return head_logits(self.map_features(features), head)


class LogitMap(Calibrator):
    """Acts on logits, after the head."""

    needs_features = False

    @abstractmethod
    def map_logits(self, logits: Tensor) -> Tensor:
        """(n, k) -> (n, k); the logits come in float32 or wider."""

    def forward(self, features: Tensor, head: Head) -> Tensor:
        """The mapped logits of the head."""
        return self.map_logits(head_logits(features, head))


def with_confidence(logits: Tensor, confidence: Tensor) -> Tensor:
    """Log-probabilities (n, k) whose predicted class has the given probability (n,).

    The other classes share what is left as they did before. The prediction stays: a confidence that
    would fall below the runner-up's new share ends just above it, at s / (1 + s) with s the
    runner-up's share among the others. Confidences of 0 and 1 end just inside.
    """
    if logits.shape[1] == 1:
        return logits
    top = logits.argmax(1, keepdim=True)
    others = logits.scatter(1, top, -torch.inf)
    share = others - others.logsumexp(1, keepdim=True)  # log, (n, k); exact where p_top rounds to 1
    lowest = share.amax(1).sigmoid() * (1 + NUDGE)
    highest = 1 - torch.finfo(logits.dtype).eps
    sure = torch.maximum(confidence.to(logits.dtype), lowest).clamp(max=highest)
    mapped = (share + torch.log1p(-sure)[:, None]).scatter(1, top, sure.log()[:, None])
    return keep_prediction(mapped, logits)


def keep_prediction(mapped: Tensor, logits: Tensor, top: Tensor | None = None) -> Tensor:
    """The mapped logits with the prediction of the given ones, `top` (n, 1) where it is known.

    For maps that keep the order of a row in exact arithmetic: rounding may tie or swap neighbours.
    Where no lead is left, the class predicted by the given logits is put just ahead of all.
    """
    if logits.shape[1] == 1:
        return mapped
    top = logits.argmax(1, keepdim=True) if top is None else top
    own, best = mapped.gather(1, top), mapped.scatter(1, top, -torch.inf).amax(1, keepdim=True)
    ahead = best + NUDGE * best.abs().clamp(min=NUDGE)
    return mapped.scatter(1, top, torch.where(own > best, own, ahead))


def seen_features(view: str, features: Tensor, head: Head | None) -> Tensor:
    """The features as they are, or "clipped": as the network's own layer gets them after a clip."""
    while view == "clipped" and isinstance(head, Stepped):
        if isinstance(head.step, FeatureMap):
            features = head.step.map_features(features)
        head = head.head
    return features


@final
class Pipeline(Calibrator):
    """`clip | temperature`: each step calibrates the head left by the steps before it."""

    def __init__(self, *steps: Calibrator) -> None:
        super().__init__()
        flat = [part for step in steps for part in step.steps_in_order()]
        if not 0 < len(flat) <= MOST_STEPS:
            raise InputError(f"a pipeline of {len(flat)} steps: give 1 to {MOST_STEPS}")
        whole = next((step for step in flat if step.alone), None)
        if whole is not None and len(flat) > 1:
            raise InputError(f"{whole.name} chooses a whole recipe: give it alone")
        for left, right in pairwise(flat):
            if isinstance(left, FeatureMap) and left.name == right.name:
                raise InputError(f"{left.name} | {right.name}: one {left.name} does all two can do")
            if isinstance(right, FeatureMap) and not isinstance(left, FeatureMap):
                raise InputError(
                    f"{left.name} | {right.name} is in the wrong order: {right.name} works on "
                    f"features, before the head, and {left.name} on what leaves it; "
                    f"write {right.name} | {left.name}"
                )
        if len({step.several for step in flat}) > 1:
            raise InputError(f"{' | '.join(map(repr, flat))}: give all steps to all_labels(...)")
        self.steps = nn.ModuleList(flat)
        self.several = flat[0].several
        self.takes_features = any(step.takes_features for step in flat)
        self.needs_train = any(step.needs_train for step in flat)
        self.keeps_accuracy = all(step.keeps_accuracy for step in flat)

    @property
    def needs_features(self) -> bool:  # type: ignore[override]
        """Whether a step does."""
        return any(step.needs_features for step in self.steps_in_order())

    def reset(self) -> Self:
        """Forgets what the steps were fitted to."""
        for step in self.steps_in_order():
            step.reset()
        self.report = None
        return self

    def steps_in_order(self) -> list[Calibrator]:
        """The steps, in reading order."""
        return [step for step in self.steps if isinstance(step, Calibrator)]

    def forward(self, features: Tensor, head: Head) -> Tensor:
        """The logits of the head with every step on it."""
        for step in self.steps_in_order():
            head = Stepped(step, head)
        return head(features)

    def learn(self, problem: Problem) -> list[StepReport]:
        """Fits the steps jointly; this is how a pipeline is refitted inside another fit."""
        return run_steps(self.steps_in_order(), problem, "joint")

    def __repr__(self) -> str:
        steps = self.steps_in_order()
        if not self.several:
            return " | ".join(map(repr, steps))
        runs = groupby(steps, lambda step: step.name)  # all_labels(clip | temperature)
        texts = ((name, " | ".join(repr(one.step) for one in run)) for name, run in runs)
        return " | ".join(f"{name}({text})" for name, text in texts)
