"""What a fit is given (a Problem) and what it says afterwards (a FitReport)."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial, reduce
from operator import or_
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from featcal.core import dist
from featcal.core.batch import Batch, Data, Head, Through, stored_logits
from featcal.core.checks import InputError
from featcal.core.loss import Loss, measure

if TYPE_CHECKING:
    from featcal.core.calibrator import Calibrator

# --- A look at all data before a fit: refuse what cannot be used, by name, row and value.


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
    refused: InputError | None = None
    local = Facts(0, 0, 0, torch.device("cpu"))
    try:
        local = _local_facts(data, head)
    except InputError as error:
        refused = error
    # All processes leave together: one that raises alone would leave the others waiting for it.
    anywhere = bool(dist.largest(torch.tensor(int(refused is not None))))
    if refused is not None:
        raise refused
    if anywhere:
        raise InputError("another process found data it cannot use: see what it says")
    rows = int(dist.total(torch.tensor(local.rows)))
    if rows == 0:
        raise InputError("data is empty: a fit needs at least one labelled row")
    classes, width = dist.largest(torch.tensor([local.classes, local.width])).tolist()
    return Facts(rows, classes, width, local.device)


def _local_facts(data: Data, head: Head | None) -> Facts:
    """What this process's own rows tell."""
    rows, classes, device = 0, 0, torch.device("cpu")
    widths: dict[str, int | None] = {}
    for batch in data:
        if rows == 0 and len(batch):
            classes, device, widths = _classes(batch, head), batch.labels.device, _widths(batch)
        check_batch(batch, classes=classes, first_row=rows)
        if len(batch):
            _check_alike(_widths(batch), widths, rows)
        rows += len(batch)
    return Facts(rows, classes, widths.get("features") or 0, device)


def _widths(batch: Batch) -> dict[str, int | None]:
    """Features and logits a row; None where there are none."""
    parts = {"features": batch.features, "logits": batch.logits}
    return {name: None if part is None else _columns(part) for name, part in parts.items()}


def _columns(values: Tensor) -> int:
    """Values a row; 0 for a single number, which `check_batch` is to refuse."""
    return values.shape[-1] if values.ndim else 0


def _check_alike(found: dict[str, int | None], first: dict[str, int | None], row: int) -> None:
    """Every batch must hold what the first one holds, in the same width."""
    for name, width in first.items():
        if found[name] != width:
            here, there = ("no" if w is None else w for w in (found[name], width))
            raise InputError(
                f"the batch from row {row} on has {here} {name} a row and the first batch has "
                f"{there}: give every batch the same"
            )


def _classes(batch: Batch, head: Head | None) -> int:
    """The number of classes, from the stored logits or from one row through the head."""
    if batch.features is None and batch.logits is None:
        raise InputError("the batch has neither logits nor features: give one of them")
    if head is not None and batch.features is not None:
        return _checked_head(batch.rows(slice(0, 64)), head)
    if batch.logits is None:
        raise InputError("the batch has features but no logits: pass the classifier head")
    return _columns(batch.logits)


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
    logits, stored = logits.double(), stored.double()
    gaps = (logits - stored).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    gaps = gaps.where(stored.isfinite(), 0)  # check_batch names the rows of those that are not
    far = gaps > (0.05 if narrow else 1e-3) * _sizes(stored)
    if bool(far.any()):
        gap = float(gaps[far].max())
        raise InputError(
            f"head(features) differs from the stored logits by {gap:.3g}: this is not the head "
            "that made them, or something stands between features and head (a missing ReLU, "
            "active dropout)"
        )


def _sizes(logits: Tensor) -> Tensor:
    """What a difference (n, k) is to be compared with: the logit itself, and the row's largest.

    Not the largest size of all: a class masked by -1e9 would excuse the others. A row whose
    largest logit is near 0 by chance has the rounding of rows like the others.
    """
    tops = logits.amax(1, keepdim=True).abs()
    usual = tops.median() if len(tops) else tops.sum()
    sizes = torch.maximum(torch.maximum(logits.abs(), tops), usual)
    return torch.where(sizes.isfinite(), sizes, 1).clamp(min=1)


def check_batch(batch: Batch, *, classes: int, first_row: int = 0) -> None:
    """Refuses shapes, labels and values no fit can use; rows are counted from `first_row`."""
    if batch.features is None and batch.logits is None:
        raise InputError("the batch has neither logits nor features: give one of them")
    labels = batch.labels
    if labels.ndim != 1 or labels.is_floating_point() or labels.dtype == torch.bool:
        raise InputError(
            f"labels have shape {tuple(labels.shape)} and type {labels.dtype}"
            f"{_odd_label(labels, first_row)}: they must be one integer a row"
            f"{_label_remedy(labels)}"
        )
    for name, values in (("features", batch.features), ("logits", batch.logits)):
        if values is None:
            continue
        if values.ndim != 2 or len(values) != len(labels) or not values.is_floating_point():
            raise InputError(
                f"{name} have shape {tuple(values.shape)} and type {values.dtype}: "
                f"they must be floating point, ({len(labels)}, ...), one row a label"
            )
        # A finite sum proves finite terms, and costs one read instead of three. One that is not
        # may be an overflow of the sum itself: _refuse looks at the terms.
        if not bool(torch.isfinite(values.sum())):
            _refuse(name, ~torch.isfinite(values).all(1), first_row, "NaN or infinite", "remove")
    _refuse("labels", (labels < 0) | (labels >= classes), first_row, f"outside 0..{classes - 1}")


def _odd_label(labels: Tensor, first_row: int) -> str:
    """The first label that no class can have, such as a smoothed 0.9; empty where there is none."""
    odd = (labels.frac() != 0).nonzero() if labels.is_floating_point() else labels[:0]
    if labels.ndim != 1 or not len(odd):
        return ""
    row = int(odd[0, 0])
    return f", {float(labels[row]):.6g} in row {first_row + row}"


def _label_remedy(labels: Tensor) -> str:
    """How labels in a form that is known are made to be one integer a row."""
    if labels.ndim == 2 and labels.shape[1] == 1:
        return "; take labels[:, 0]" + (".long()" if labels.is_floating_point() else "")
    if labels.ndim == 2 and bool(((labels != 0).sum(1) == 1).all()):
        return "; take labels.argmax(1)"
    whole = labels.dtype == torch.bool or not bool((labels.frac() != 0).any())
    return "; take labels.long()" if labels.ndim == 1 and whole else ""


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


class Counted:
    """A head that counts the rows it is asked for, so that a report can say what a fit cost."""

    def __init__(self, head: Head) -> None:
        self.head = head
        self.rows = 0

    def __call__(self, features: Tensor) -> Tensor:
        """The head's own logits."""
        self.rows += len(features)
        return self.head(features)


class Stepped:
    """A head with one more step on it; counts through to the head it stands on."""

    def __init__(self, step: Calibrator, head: Head) -> None:
        self.step, self.head = step, head

    @property
    def rows(self) -> int:
        """Rows the innermost head was asked for."""
        return self.head.rows if isinstance(self.head, (Counted, Stepped)) else 0

    def __call__(self, features: Tensor) -> Tensor:
        """The logits with the step applied."""
        return self.step(features, self.head)  # type: ignore[no-any-return]

    def of_batch(self, batch: Batch) -> Tensor:
        """The logits of a batch's features."""
        assert batch.features is not None
        return self(batch.features)


def rows_asked(head: Head | None) -> int:
    """Rows a head was asked for so far, on all ranks."""
    rows = head.rows if isinstance(head, (Counted, Stepped)) else 0
    return int(dist.total(torch.tensor(rows)))


@dataclass(frozen=True)
class Problem:
    """One step's share of a fit.

    Attributes:
        source: the batches as they were given.
        data: the same batches with the logits the earlier steps left.
        head: the head as the earlier steps left it; None when only logits are known.
        loss: what to minimise.
        facts: rows, classes and device of the data.
        then: the later steps of the pipeline, to be refitted for every value this step tries
            (joint fitting), or None when this step is fitted for itself.
        train: rows the classifier was trained on, for methods that measure density; else None.
        before: the loss without this step where it is known already, else None.
    """

    source: Data
    data: Through
    head: Head | None
    loss: Loss
    facts: Facts
    then: Calibrator | None = None
    train: Data | None = None
    before: float | None = None

    def loss_before(self) -> float:
        """The loss without this step."""
        return measure(self.data, self.loss)[0] if self.before is None else self.before

    def smooth_loss(self, method: str) -> Loss:
        """The loss, refused where a method fitted by gradients cannot follow it."""
        if not self.loss.smooth:
            raise InputError(
                f"{method} is fitted by gradients, and {self.loss.name} has none: "
                "fit it by nll or brier"
            )
        return self.loss


@dataclass(frozen=True)
class StepReport:
    """What one step learned and what it cost.

    Attributes:
        name: the method's id.
        values: the fitted values, ready for JSON.
        noop: whether the step changes nothing.
        loss_before: the loss without this step, later steps refitted where fitting is joint.
        loss_after: the loss with it.
        converged: whether the search ended by its own rule rather than at a cap.
        message: one sentence for a person.
        warning: what a person should look at before using the result; empty when all is well.
        details: further figures, ready for JSON.
        head_passes: products of the head over all rows, or their equivalent in part passes.
        seconds: wall time.
    """

    name: str
    values: dict[str, Any]
    noop: bool
    loss_before: float
    loss_after: float
    converged: bool
    message: str
    warning: str = ""
    details: dict[str, Any] = field(default_factory=dict)
    head_passes: int = 0
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """One flat object: fitted values and figures side by side."""
        flat = asdict(self)
        name, values, details = (flat.pop(key) for key in ("name", "values", "details"))
        return plain({"name": name, **values, **flat, **details})  # type: ignore[no-any-return]


@dataclass(frozen=True)
class FitReport:
    """What a whole fit did: the recipe, its steps in order, the loss before and after.

    `classes` and `features` a row are those of the data; 0 where a file does not know them, and 0
    features where there were logits alone.
    """

    recipe: str
    mode: str
    loss: str
    rows: int
    steps: tuple[StepReport, ...]
    loss_before: float
    loss_after: float
    seconds: float
    classes: int = 0
    features: int = 0

    @property
    def warnings(self) -> list[str]:
        """What a person should look at before using the result."""
        return [step.warning for step in self.steps if step.warning]

    @property
    def noop(self) -> bool:
        """Whether nothing at all was changed."""
        return all(step.noop for step in self.steps)

    def as_json(self) -> dict[str, Any]:
        """The public form, as `featcal fit --json` prints it."""
        named = ("recipe", "mode", "loss", "rows", "classes", "features")
        flat = {key: getattr(self, key) for key in named}
        steps = [step.as_json() for step in self.steps]
        tail = {key: getattr(self, key) for key in ("noop", "loss_before", "loss_after", "seconds")}
        tail["warnings"] = self.warnings
        return plain({**flat, "steps": steps, **tail})  # type: ignore[no-any-return]

    def as_record(self) -> dict[str, Any]:
        """The form kept in a calibrator's file; `of_record` reads it back."""
        return plain(asdict(self))  # type: ignore[no-any-return]

    @classmethod
    def of_record(cls, record: dict[str, Any]) -> FitReport:
        """The report a record describes."""
        steps = tuple(StepReport(**step) for step in record["steps"])
        # JSON has no infinity: a threshold of null is the identity's.
        steps = tuple(replace(step, values=_with_infinity(step.values)) for step in steps)
        return cls(**{**record, "steps": steps})


def _with_infinity(values: dict[str, Any]) -> dict[str, Any]:
    return {key: math.inf if value is None else value for key, value in values.items()}


def plain(value: Any) -> Any:  # noqa: ANN401 - JSON is any
    """The same value with infinities and NaN as null, which JSON has no word for.

    >>> plain({"threshold": float("inf"), "n": [1, 2.5]})
    {'threshold': None, 'n': [1, 2.5]}
    """
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Eval mode for the block; flags and the state of every random generator restored after it.

    A loader draws a seed for its workers, and a data set may draw more.
    """
    cuda = {weight.device for weight in model.parameters() if weight.device.type == "cuda"}
    states = {device: torch.cuda.get_rng_state(device) for device in cuda}
    own, python, array = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        with evaluating(model):
            yield
    finally:
        torch.set_rng_state(own)
        random.setstate(python)
        np.random.set_state(array)
        for device, state in states.items():
            torch.cuda.set_rng_state(state, device)


@contextmanager
def recording() -> Iterator[None]:
    """No inference mode in the block: a tensor made there could never take part in training."""
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(mode=False))
            stack.enter_context(torch.no_grad())
        yield


@contextmanager
def exact() -> Iterator[None]:
    """No autocast in the block: a fit in half precision would follow its own rounding."""
    with ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextmanager
def evaluating(head: Head | None) -> Iterator[None]:
    """Puts a head into eval mode for the block (dropout off) and restores every flag after it.

    By `train()`, from the outside in: some modules act on it, as LoRA layers do, which add their
    part to the weights in eval mode.
    """
    modules = list(head.modules()) if isinstance(head, nn.Module) else []
    flags = [module.training for module in modules]
    try:
        if isinstance(head, nn.Module) and any(flags):
            head.eval()
        yield
    finally:
        for module, flag in zip(modules, flags, strict=True):
            if module.training != flag:
                module.train(flag)
        for module, flag in zip(modules, flags, strict=True):
            module.training = flag  # whatever `train()` made of it


# --- Fitting steps in reading order: what each one is given, and what it leaves to the next.

Mode = Literal["joint", "sequential"]
MODES: tuple[Mode, ...] = ("joint", "sequential")


def run_steps(steps: list[Calibrator], problem: Problem, mode: Mode) -> list[StepReport]:
    """Fits steps in reading order, each on the head the steps before it left.

    Joint fitting hands a step the later ones, to be refitted for every value it tries: the search
    over its own values then sees the loss of the whole pipeline, and no alternation is needed.
    """
    reports: list[StepReport] = []
    counted = 0  # the pass for the network's own logits counts with the first step
    for done, step in enumerate(steps):
        rest = steps[done + 1 :]
        later = reduce(or_, rest) if rest else None
        then = reduce(or_, (part.stand_in() for part in rest)) if rest and mode == "joint" else None
        started = perf_counter()
        learned = step.learn(replace(problem, then=then))
        passes = math.ceil((rows_asked(problem.head) - counted) / problem.facts.rows)
        counted, spent = rows_asked(problem.head), perf_counter() - started
        reports += [replace(part, head_passes=passes, seconds=spent) for part in learned]
        problem = after(problem, step, later)
    return reports


def after(problem: Problem, step: Calibrator, later: Calibrator | None = None) -> Problem:
    """The problem the later steps see: the head with this step on it."""
    head = None if problem.head is None else Stepped(step, problem.head)
    keep_features = later is not None and later.needs_features
    if head is not None and step.needs_features:
        data = Through(problem.source, head.of_batch, features=keep_features)
    else:
        data = Through(problem.data, partial(_on_logits, step), features=keep_features)
    return replace(problem, data=data, head=head, before=None)


def _on_logits(step: Calibrator, batch: Batch) -> Tensor:
    """What a step that needs no features makes of the logits at hand."""
    return step(batch.features, lambda _: stored_logits(batch))  # type: ignore[no-any-return]


def settle(
    step: Calibrator,
    problem: Problem,
    values: dict[str, Any],
    message: str,
    *,
    converged: bool = True,
    warning: str = "",
    details: dict[str, Any] | None = None,
    always: bool = False,
) -> StepReport:
    """Measures a step as it was just fitted; one that does not lower the loss goes back to birth.

    Args:
        step: the step, with its fitted values assigned.
        problem: what it was fitted to.
        values: the fitted values a reader wants to see, ready for JSON.
        message: one sentence for a person.
        converged: whether the search ended by its own rule.
        warning: what a person should look at before using the result.
        details: further figures, ready for JSON.
        always: keep the values whatever they do, as published forms and other criteria demand.
    """
    before = problem.loss_before()
    now = measure(after(problem, step).data, problem.loss)[0]
    details = {} if details is None else details
    if always or now < before:
        return StepReport(
            step.name, values, False, before, now, converged, message, warning, details
        )
    step.reset()
    why = f"no-op: {step.name} does not lower {problem.loss.name} on the fit split"
    return StepReport(step.name, {}, True, before, before, converged, why, details=details)
