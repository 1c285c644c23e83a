"""Several labels per sample: a sigmoid for each, any number of which a sample may have.

A network of k sigmoids answers k questions of yes or no about every sample. Each answer is a row of
two classes, with the logits (0, z), so that every method for two classes serves, and metrics are
those of the rows. `all_labels(recipe)` has one set of values for all labels, `per_label(recipe)`
own values for each; what is calibrated are k logits, whose sigmoids are the probabilities.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import or_
from typing import Any, final

import torch
from torch import Tensor, nn

from featcal.core.batch import (
    Batch,
    Data,
    Head,
    Through,
    answers,
    one_logit,
    raw_logits,
    stored_logits,
    two_classes,
    unchecked,
    wide,
)
from featcal.core.calibrator import METHODS, Calibrator
from featcal.core.checks import InputError
from featcal.core.fit import (
    Counted,
    Facts,
    Problem,
    StepReport,
    accuracy,
    cautious,
    measure,
    published,
    run_steps,
    warned,
)
from featcal.core.sample import first_row
from featcal.heads.head import head_logits, linear_of, linear_view


def all_labels(recipe: Calibrator) -> Calibrator:
    """The recipe for several labels a sample, with the same values for all of them."""
    return _each(recipe, own=False)


def per_label(recipe: Calibrator) -> Calibrator:
    """The recipe for several labels a sample, each with values of its own, fitted step by step."""
    return _each(recipe, own=True)


LABELS: dict[str, Callable[[Calibrator], Calibrator]] = {
    "all_labels": all_labels,
    "per_label": per_label,
}


def suited(calibrator: Calibrator, facts: Facts) -> Calibrator:
    """The calibrator as it is, or for all labels where rows have several and it is for one."""
    return all_labels(calibrator) if facts.several and not calibrator.several else calibrator


def followed(first: Calibrator, then: Calibrator) -> Calibrator:
    """`first | then`; where one of them is for several labels, the other is made so."""
    several = first.several or then.several
    steps = (all_labels(one) if several and not one.several else one for one in (first, then))
    return reduce(or_, steps)


def _each(recipe: Calibrator, *, own: bool) -> Calibrator:
    return reduce(or_, (Labels(step, own=own) for step in recipe.steps_in_order()))


@final
class Labels(Calibrator):
    """One step of a recipe, for each of several labels.

    Args:
        step: what is fitted to the answers, a fresh method.
        own: whether each label has values of its own.

    Attributes:
        parts: what is fitted: one step, or one for each label, of which a fit tells the number.
    """

    several = True

    def __init__(self, step: Calibrator, *, own: bool = False) -> None:
        super().__init__()
        self.name = "per_label" if own else "all_labels"  # type: ignore[misc]  # no method's own
        kind = type(step)
        if isinstance(step, Labels) or not _suits(kind) or (own and step.alone):
            known = (
                name for name, one in METHODS.items() if _suits(one) and not (own and one.alone)
            )
            raise InputError(f"{self.name} has no use for {step!r}: give {', '.join(known)}")
        if own and step.fixed:
            raise InputError(f"per_label: {step!r} is one value for all: give all_labels({step!r})")
        self._step, self.own = (step,), own  # a plain tuple: what is inside is no child
        self.fixed = dict(step.fixed)
        self.reset()
        self.needs_features = step.any_head and step.needs_features
        self.keeps_accuracy, self.alone, self.many = step.keeps_accuracy, step.alone, step.many

    @property
    def step(self) -> Calibrator:
        """What is fitted, as it was given."""
        return self._step[0]

    def __repr__(self) -> str:
        return f"{self.name}({self.step!r})"

    def reset(self, labels: int = 0) -> Labels:
        """Forgets what was fitted; `labels` is their number, where it is known."""
        device = next((value.device for value in self.buffers()), None)
        count = labels if self.own else 1
        self.parts = nn.ModuleList(copy.deepcopy(self.step).to(device) for _ in range(count))
        self.report = None
        return self

    def stand_in(self) -> Calibrator:
        """One set of values for all labels, which is quicker."""
        return Labels(self.step.stand_in())

    def outcome(self) -> Calibrator:
        """What was chosen, where the step chose among recipes."""
        if not self.alone:
            return self
        made = []
        for step in self.parts[0].outcome().steps_in_order():  # type: ignore[operator]
            made.append(Labels(step))
            made[-1].parts[0] = step
        chosen = reduce(or_, made) if len(made) > 1 else made[0]
        chosen.report = self.report
        return chosen

    def forward(self, features: Tensor, head: Head) -> Tensor:
        """The calibrated logits (n, k) of a head that gives (n, k)."""
        if not self.parts:  # own values of no label yet
            return head_logits(features, head)
        if self.step.any_head and not self.own:
            return self.parts[0](features, head)  # type: ignore[no-any-return]
        if self.step.any_head:
            columns = [part(features, _Column(head, j)) for j, part in enumerate(self.parts)]
            return torch.cat([one_logit(column) for column in columns], 1)
        logits = wide(head(features))
        if self.own:
            pairs = zip(self.parts, logits.T, strict=True)
            return torch.cat([_mapped(part, z) for part, z in pairs], 1)
        return _mapped(self.parts[0], logits.reshape(-1)).reshape(logits.shape)

    def learn(self, problem: Problem) -> list[StepReport]:
        """Fits the step to the answers of all labels, or to those of each."""
        if not (problem.warm and self.parts):
            self.reset(problem.facts.classes).to(problem.facts.device)
        if self.own:
            return [_merged([self._one(problem, label) for label in range(len(self.parts))])]
        (part,) = self.parts
        if not self.step.any_head:
            rows = Answers(problem.data, first=first_row(problem.data))
            rows_of, samples = problem.facts.judged, problem.facts.samples
            facts = replace(
                problem.facts, rows=rows_of, groups=samples, classes=2, width=0, several=False
            )
            view = Through(rows, stored_logits, features=False)
            problem = replace(problem, source=rows, data=view, head=None, facts=facts, then=None)
        reports: list[StepReport] = part.learn(problem)  # type: ignore[operator]
        if published(part):
            (right,) = measure(problem.data, accuracy)
            reports = [warned(part, one, problem.facts.judged, right) for one in reports]
        return reports

    def _one(self, problem: Problem, label: int) -> StepReport:
        """Fits the step to one label, as that of a model with one logit."""
        part, head = self.parts[label], None
        if self.step.any_head and problem.head is not None:
            whole = problem.head.head if isinstance(problem.head, Counted) else None
            layer, row = linear_view(whole), slice(label, label + 1)
            column: Head = _Column(problem.head, label)
            if layer is not None:
                bias = None if layer.bias is None else layer.bias[row]
                column = linear_of(layer.weight[row], bias)
            head = Counted(column)
        reads = self.step.any_head
        data = Through(_Label(problem.data, label), stored_logits, features=reads)
        width = problem.facts.width if reads else 0
        alone = replace(
            problem,
            source=_Label(problem.source, label) if reads else data,
            data=data,
            head=head,
            loss=problem.loss.base,
            facts=replace(problem.facts, classes=2, width=width, several=False),
            then=None,
            before=None,
        )
        (right,) = measure(data, accuracy)
        alone = cautious(alone, right)
        (report,) = run_steps([part], alone, "joint")  # type: ignore[list-item]
        report = warned(part, report, alone.facts.judged, right)
        if isinstance(problem.head, Counted) and isinstance(head, Counted):
            problem.head.rows += head.rows // len(self.parts)
        return report

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        *args: Any,  # noqa: ANN401
    ) -> None:
        self.reset(
            len({key[len(prefix) :].split(".")[1] for key in state_dict if key.startswith(prefix)})
        )
        super()._load_from_state_dict(state_dict, prefix, *args)


def _suits(method: type[Calibrator]) -> bool:
    """Whether a method can be fitted to answers: their features are those of the whole sample."""
    return method.any_head or method.needs_features is not True


def _mapped(step: nn.Module, logits: Tensor) -> Tensor:
    """The calibrated logits (n, 1) of answers, (n,)."""
    return one_logit(step(None, lambda _: two_classes(logits)))


@dataclass(frozen=True, eq=False)
class Answers:
    """The answers about every sample, as rows of two classes: see `core.batch.answers`."""

    data: Data
    head: Head | None = None
    first: int = 0  # the number of the first sample

    def __iter__(self) -> Iterator[Batch]:
        first = self.first
        for batch in self.data:
            yield answers(batch, raw_logits(batch, self.head), first)
            first += len(batch)


@dataclass(frozen=True, eq=False)
class _Label:
    """The samples with one of their labels, as those of a model with one logit."""

    data: Data
    label: int

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.data:
            logits = None if batch.logits is None else two_classes(batch.logits[:, self.label])
            labels = batch.labels[:, self.label]
            yield unchecked(logits, labels, batch.features, batch.groups)


@dataclass(frozen=True, eq=False)
class _Column:
    """The head of one label."""

    head: Head
    label: int

    def __call__(self, features: Tensor) -> Tensor:
        """The two logits of one label, (n, 2)."""
        return two_classes(wide(self.head(features))[:, self.label])


def _merged(reports: list[StepReport]) -> StepReport:
    """One report of the same step on every label."""
    acting = [report for report in reports if not report.noop]
    keys = dict.fromkeys(key for report in acting for key in report.values)
    idle = len(reports) - len(acting)
    said = [f"label {j}: {report.warning}" for j, report in enumerate(reports) if report.warning]
    message = f"own values for {len(acting)} of {len(reports)} labels"
    message += f"; {idle} stay as they are" if idle else ""
    mean = partial(sum, start=0.0)
    return StepReport(
        reports[0].name,
        {key: [report.values.get(key) for report in reports] for key in keys},
        not acting,
        mean(report.loss_before for report in reports) / len(reports),
        mean(report.loss_after for report in reports) / len(reports),
        all(report.converged for report in reports),
        message,
        "; ".join(said),
        {"labels": [report.as_json() for report in reports]},
    )
