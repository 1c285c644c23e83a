"""What a fit is given (a Problem) and what it says afterwards (a FitReport)."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from featcal.core import dist
from featcal.core.batch import Batch, Data, Head, Through
from featcal.core.errors import InputError
from featcal.core.loss import Loss, measure
from featcal.core.survey import Facts

if TYPE_CHECKING:
    from featcal.core.calibrator import Calibrator


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
