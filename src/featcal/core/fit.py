"""A fit, in the order in which it runs: its loss, data surveyed once, a step's problem, its report.

`Calibrator.fit` surveys the data and hands a `Problem` to `run_steps`; every step learns by its own
search and answers with a `StepReport`, most of them by way of `settle`; the steps' reports make the
`FitReport`. At the end of the file: the state of torch and of the model in which all this runs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial, reduce
from itertools import pairwise
from operator import or_
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from featcal.core import dist
from featcal.core.batch import (
    Batch,
    Chunked,
    Data,
    Head,
    Through,
    answers,
    bin_sums,
    blocks,
    device_of,
    predicted,
    stored_logits,
    unchecked,
)
from featcal.core.checks import Elsewhere, InputError, check_batch, check_same
from featcal.core.progress import spread
from featcal.core.sample import Folds
from featcal.core.stored import made
from featcal.core.table import html_table

if TYPE_CHECKING:
    from featcal.core.calibrator import Calibrator

Mode = Literal["joint", "sequential"]
MODES: tuple[Mode, ...] = ("joint", "sequential")

ECE_BINS = 15
FEW = 10  # wrong rows from which on the data alone decide
FEW_ROWS = 100  # below, chance moves an accuracy by 5 points, as much as a fit hopes to mend
PER_NUMBER = 10  # samples; a step that has fewer for each of its numbers is judged on others
FOLDS = 3  # of that judgement
FEW_NUMBERS = 2**24  # features and logits of all rows, of which every process may hold a copy
KINDS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64)  # of tensors
HEAD_ROWS = 64  # of the first batch, on which a head is tried


def mean(sums: Tensor, rows: float) -> float:
    """The plain average over the rows."""
    return float(sums[0]) / rows


@dataclass(frozen=True)
class Loss:
    """A quantity that batches, shards and ranks add up.

    Attributes:
        name: what a report calls it.
        sums: (logits, batch) -> (s,) float64, summed over the batch and never averaged.
        value: (sums over all rows, number of rows) -> the loss. An average by default; a binned
            error such as ECE is a function of its bins' sums.
        size: s, known beforehand so that a rank without rows can still take part.
        smooth: whether the sums have a gradient in the logits that a descent can follow.
        any_label: logits -> the sums if every class were the label of every row equally often; None
            where a loss does not say.
        smoothing: the share of every row's label that is such.
        plain: the loss without it, where there is some.
    """

    name: str
    sums: Callable[[Tensor, Batch], Tensor]
    value: Callable[[Tensor, float], float] = mean
    size: int = 1
    smooth: bool = True
    any_label: Callable[[Tensor], Tensor] | None = None
    smoothing: float = 0.0
    plain: Loss | None = None

    @property
    def base(self) -> Loss:
        """The loss of the labels as they are."""
        return self if self.plain is None else self.plain

    def smoothed(self, share: float) -> Loss:
        """The loss with a share of every label spread over all classes; itself for none."""
        any_label = self.any_label
        if not share or any_label is None:
            return self

        def sums(logits: Tensor, batch: Batch) -> Tensor:
            return (1 - share) * self.sums(logits, batch) + share * any_label(logits)

        return replace(self, sums=sums, smoothing=share, plain=self)

    def after(self, change: Callable[[Tensor], Tensor]) -> Loss:
        """This loss of changed logits, as a search over a method's values needs it."""
        return replace(self, sums=lambda logits, batch: self.sums(change(logits), batch))

    def __call__(self, logits: Tensor, batch: Batch) -> Tensor:
        """The sums over one batch; over all labels of its samples where they have several."""
        if batch.labels.ndim == 1:
            return self.sums(logits, batch)
        rows = answers(batch, logits)
        return self.sums(stored_logits(rows), rows)


def _nll_sums(logits: Tensor, batch: Batch) -> Tensor:
    rows = F.cross_entropy(logits, batch.labels, reduction="none")
    return rows.sum(dtype=torch.float64).view(1)


def _nll_of_any(logits: Tensor) -> Tensor:
    rows = logits.logsumexp(1) - logits.mean(1)
    return rows.sum(dtype=torch.float64).view(1)


def _brier_sums(logits: Tensor, batch: Batch) -> Tensor:
    probs = logits.softmax(1)
    true = probs.gather(1, batch.labels[:, None])[:, 0]
    # sum_k (p_k - y_k)^2 = sum_k p_k^2 - 2 p_y + 1, without a one-hot matrix.
    return (probs.square().sum(1) - 2 * true + 1).sum(dtype=torch.float64).view(1)


def _brier_of_any(logits: Tensor) -> Tensor:
    rows = logits.softmax(1).square().sum(1) - 2 / logits.shape[1] + 1
    return rows.sum(dtype=torch.float64).view(1)


def _correct_sums(logits: Tensor, batch: Batch) -> Tensor:
    return (predicted(logits) == batch.labels).sum(dtype=torch.float64).view(1)


def _confidence_sums(logits: Tensor, batch: Batch) -> Tensor:
    return logits.softmax(1).amax(1).sum(dtype=torch.float64).view(1)


def _ece_sums(logits: Tensor, batch: Batch) -> Tensor:
    confidence = logits.softmax(1).amax(1)
    return bin_sums(confidence, predicted(logits) == batch.labels, ECE_BINS).flatten()


def _ece_of_any(logits: Tensor) -> Tensor:
    confidence = logits.softmax(1).amax(1)
    return bin_sums(
        confidence, torch.full_like(confidence, 1 / logits.shape[1]), ECE_BINS
    ).flatten()


def _ece_value(sums: Tensor, rows: float) -> float:
    _, confidence, correct = sums.view(3, -1)
    return float((confidence - correct).abs().sum()) / rows


nll = Loss("nll", _nll_sums, any_label=_nll_of_any)
brier = Loss("brier", _brier_sums, any_label=_brier_of_any)
ece = Loss("ece", _ece_sums, _ece_value, size=3 * ECE_BINS, smooth=False, any_label=_ece_of_any)
accuracy = Loss("accuracy", _correct_sums, smooth=False)
confidence = Loss("confidence", _confidence_sums)

CRITERIA = {loss.name: loss for loss in (nll, brier, ece)}


def measure(
    data: Data, *losses: Loss, logits_of: Callable[[Batch], Tensor] = stored_logits
) -> list[float]:
    """The value of each loss over all data: one pass, one reduction."""
    return measuring(data, *losses, logits_of=logits_of)()


@torch.no_grad()
def measuring(
    data: Data, *losses: Loss, logits_of: Callable[[Batch], Tensor] = stored_logits
) -> Callable[[], list[float]]:
    """Begins that pass, and returns what waits for its values: more may be begun meanwhile."""
    sizes = [*(loss.size for loss in losses), 1]

    def sums_of(rows: Batch) -> Tensor:
        logits = logits_of(rows)
        count = logits.new_full((1,), rows.labels.numel(), dtype=torch.float64)
        return torch.cat([*(loss(logits, rows) for loss in losses), count])

    found = (torch.stack(spread(sums_of, blocks(batch))).sum(0) for batch in data)
    sums = dist.summing(found, sum(sizes))

    def values() -> list[float]:
        *totals, rows = torch.split(sums(), sizes)
        return [loss.value(part, float(rows)) for loss, part in zip(losses, totals, strict=True)]

    return values


@dataclass(frozen=True)
class Facts:
    """What one look at the data tells."""

    rows: int
    classes: int
    width: int  # features per row, 0 when there are only logits
    device: torch.device
    groups: int = 0  # samples the rows belong to; 0 where each row is one
    several: bool = False  # whether a row has any number of labels: (n, k) of 0 and 1

    @property
    def samples(self) -> int:
        """Those that are independent of each other."""
        return self.groups or self.rows

    @property
    def judged(self) -> int:
        """Rows of two classes or more: of several labels a row, one for each."""
        return self.rows * (self.classes if self.several else 1)

    @property
    def work(self) -> int:
        """Numbers one pass handles, with 256 multiplications of the head counted as one."""
        return self.rows * self.classes * max(self.width // 256, 1)


def survey(data: Data, head: Head | None) -> Facts:
    """Reads all data once and refuses what cannot be fitted, by name, row and value."""
    if isinstance(data, Chunked) and data.surveyed is not None and data.surveyed[0] is head:
        return data.surveyed[1]
    refused: InputError | None = None
    local, one_hot = Facts(0, 0, 0, torch.device("cpu")), True
    samples = torch.zeros(0, dtype=torch.int64)
    try:
        local, one_hot, samples = _local_facts(data, head)
    except InputError as error:
        refused = error
    # All processes leave together: one that raises alone would leave the others waiting for it.
    anywhere = bool(dist.largest(torch.tensor(int(refused is not None))))
    if refused is not None:
        raise refused
    if anywhere:
        raise Elsewhere("another process found data it cannot use: see what it says")
    rows, groups = dist.total(torch.tensor([local.rows, len(samples)])).tolist()
    if groups:  # two processes may share a sample
        groups = len(torch.unique(dist.gather(samples)))
    if rows == 0:
        raise InputError("data is empty: a fit needs at least one labelled row")
    known = [local.classes, local.width, int(local.several), int(not one_hot)]
    classes, width, several, any_number = dist.largest(torch.tensor(known)).tolist()
    if several and not any_number:
        raise InputError(
            f"labels are ({rows}, {classes}) with a single 1 in every row, so that each sample has "
            "one class: pass labels.argmax(1)"
        )
    device = device_of(head) or local.device  # a process without rows goes the way of the others
    facts = Facts(rows, classes, width, device, groups, bool(several))
    if isinstance(data, Chunked):
        data.surveyed = head, facts
    return facts


@contextmanager
def together(data: Data, facts: Facts) -> Iterator[Data]:
    """All rows of all processes for the block, in which each fits alone, where they are few.

    A search over few rows asks for a thousand sums, and waiting for the others would take longer
    than computing. In rank order the rows are those of one process, and so is the fit, to the bit.
    """
    if dist.world() == 1 or facts.rows * (facts.width + facts.classes) > FEW_NUMBERS:
        yield data
        return
    parts: dict[str, list[Tensor]] = {one.name: [] for one in fields(Batch)}
    for batch in data:
        for name, found in parts.items():
            values = getattr(batch, name)
            found += [] if values is None or not len(batch) else [values]
    # A process without rows knows no types: those of the others.
    known = [1 + KINDS.index(found[0].dtype) if found else 0 for found in parts.values()]
    widths = {"features": (0, facts.width), "logits": (0, facts.classes)}
    widths |= {"labels": (0, facts.classes)} if facts.several else {}
    every: dict[str, Tensor | None] = dict.fromkeys(parts)
    for name, kind in zip(parts, dist.largest(torch.tensor(known)).tolist(), strict=True):
        if kind:
            size = widths.get(name, (0,))
            none = torch.zeros(size, dtype=KINDS[kind - 1], device=facts.device)
            every[name] = dist.gather(torch.cat([none, *parts[name]]))
    with dist.alone():
        yield Chunked([unchecked(**every)])  # type: ignore[arg-type]


def _local_facts(data: Data, head: Head | None) -> tuple[Facts, bool, Tensor]:
    """What this process's own rows tell, whether labels (n, k) have one 1 in each, the samples."""
    rows, classes, width, device = 0, 0, 0, torch.device("cpu")
    first: list[int | None] = []
    samples = [torch.zeros(0, dtype=torch.int64)]  # the distinct, in parts that shrink
    one_hot = True
    for batch in data:
        parts = (batch.features, batch.logits)
        sizes = [None if part is None else part.shape[-1] for part in parts]
        sizes += [None if batch.groups is None else 1, batch.labels[:1].numel()]
        if rows == 0 and len(batch):
            first, classes, device = sizes, _classes(batch, head), batch.labels.device
            width = sizes[0] or 0
        check_batch(batch, classes=classes, first_row=rows)
        one_hot = one_hot and batch.labels.ndim == 2 and bool((batch.labels.sum(1) == 1).all())
        if len(batch) and sizes != first:
            words = "{} features, {} logits, {} groups and {} labels"
            here, there = (words.format(*one) for one in (sizes, first))
            raise InputError(
                f"the batch from row {rows} on has {here} per row and the first batch has {there}: "
                "give every batch the same"
            )
        rows += len(batch)
        samples += [] if batch.groups is None else [torch.unique(batch.groups.cpu())]
        while len(samples) > 1 and len(samples[-2]) <= len(samples[-1]):
            samples[-2:] = [torch.unique(torch.cat(samples[-2:]))]
    several = rows > 0 and first[-1] != 1
    groups = torch.unique(torch.cat(samples))
    return Facts(rows, classes, width, device, len(groups), several), one_hot, groups


@torch.no_grad()
def _classes(batch: Batch, head: Head | None) -> int:
    """The number of classes; a head must take the features and give the stored logits."""
    if head is None or batch.features is None:
        if batch.logits is None and batch.features is not None:
            raise InputError("the batch has features but no logits: pass the classifier head")
        return 0 if batch.logits is None else batch.logits.shape[-1]  # with neither, checked later
    features = batch.features[:HEAD_ROWS]
    try:
        logits = head(features)
    except RuntimeError as error:
        raise InputError(
            f"head does not accept features of shape {tuple(features.shape)} and type "
            f"{features.dtype}: {str(error).splitlines()[0]}"
        ) from error
    if logits.ndim != 2 or len(logits) != len(features):
        raise InputError(
            f"head returned shape {tuple(logits.shape)} for {len(features)} rows: it must return "
            "(rows, classes)"
        )
    if batch.logits is not None:
        check_same(logits, batch.logits[:HEAD_ROWS])
    return logits.shape[1]


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
        judged: whether whoever asks for the fit judges it on other rows.
        warm: whether the step holds what it learned from nearly the same rows, to start from.
    """

    source: Data
    data: Through
    head: Head | None
    loss: Loss
    facts: Facts
    then: Calibrator | None = None
    train: Data | None = None
    before: float | None = None
    judged: bool = False
    warm: bool = False

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

    def criterion(self, name: str) -> Loss:
        """A loss by its name, as cautious as that of the fit."""
        found = CRITERIA[name]
        return self.loss if found is self.loss.base else found.smoothed(self.loss.smoothing)


def _sharpness_sums(logits: Tensor, batch: Batch) -> Tensor:
    """The slope of the NLL in 1/T at T = 1: below 0 where rows ask for more confidence."""
    true = logits.gather(1, batch.labels[:, None])[:, 0]
    rows = (logits.softmax(1) * logits).sum(1) - true
    return rows.sum(dtype=torch.float64).view(1)


def cautious(problem: Problem, right: float) -> Problem:
    """The problem with its labels smoothed where too few rows are wrong to tell of errors.

    Where every row is right, the likelihood grows with confidence for ever. So one more row counts
    whose label may be any class: a share w / (n + w) of every row's. w falls from 1 where no row is
    wrong to 0 at FEW, beyond which the fit is the data's alone, as it is where the rows ask for
    less confidence: then those that are wrong have spoken.

    Args:
        problem: with the plain loss.
        right: the share of rows that the network gets right.
    """
    rows = problem.facts.judged
    weight = 1 - wrong_of(rows, right) / FEW
    if weight <= 0 or measure(problem.data, Loss("", _sharpness_sums))[0] >= 0:
        return problem
    loss = problem.loss.smoothed(weight / (rows + weight))
    return replace(problem, loss=loss, before=measure(problem.data, loss)[0])


def wrong_of(rows: int, right: float) -> int:
    """How many rows are wrong where this share is right."""
    return round((1 - right) * rows)


def published(step: nn.Module) -> bool:
    """Whether a step is fitted as its authors do, which knows no caution."""
    return bool(getattr(step, "reference", False))


def warned(step: nn.Module, report: StepReport, rows: int, right: float) -> StepReport:
    """The report of a step that was fitted without caution, which says so where some was due."""
    wrong = wrong_of(rows, right)
    if wrong >= FEW or report.noop or not published(step):
        return report
    why = (
        f"{wrong} of {rows:,} predictions are wrong, too few for {report.name}(reference=True), "
        "which is fitted as published, without caution, and may make other rows far worse: leave "
        "reference=True out"
    )
    warning = "; ".join(filter(None, [report.warning, why]))
    return replace(report, message=f"{report.message}; {why}", warning=warning)


def run_steps(steps: list[Calibrator], problem: Problem, mode: Mode) -> list[StepReport]:
    """Fits steps in reading order, each on the head the steps before it left.

    Joint fitting hands a step the later ones, to be refitted for every value it tries: the search
    over its own values then sees the loss of the whole pipeline, and no alternation is needed.
    """
    reports: list[StepReport] = []
    first = problem
    counted = 0  # the pass for the network's own logits counts with the first step
    for done, step in enumerate(steps):
        rest = steps[done + 1 :]
        later = reduce(or_, rest) if rest else None
        then = reduce(or_, (part.stand_in() for part in rest)) if rest and mode == "joint" else None
        started = perf_counter()
        try:
            learned = step.learn(replace(problem, then=then))
        except (np.linalg.LinAlgError, LinAlgError) as error:
            raise InputError(
                f"{step!r} has no solution on these rows: rescale features or logits that are far "
                "larger or smaller than others are, or remove such rows"
            ) from error
        asked, spent = rows_asked(problem.head), perf_counter() - started
        passes = math.ceil((asked - counted) / problem.facts.rows)
        counted = asked
        reports += [replace(part, head_passes=passes, seconds=spent) for part in learned]
        problem = after(problem, step, later)
    whole = problem.loss.smoothing and not problem.warm  # and no refit inside another fit
    return unsmoothed(steps, first, reports) if whole else reports


def unsmoothed(
    steps: list[Calibrator], problem: Problem, reports: list[StepReport]
) -> list[StepReport]:
    """The reports of steps fitted with caution, in the plain loss; reset where that does not fall.

    Caution must hold a fit back and never push it further from what the network says itself.
    """

    def plain_losses() -> list[float]:
        view, found = problem, measure(problem.data, problem.loss.base)
        for step in steps:
            view = after(view, step)
            found += measure(view.data, problem.loss.base)
        return found

    losses = plain_losses()
    if not losses[-1] < losses[0]:
        why = f"no-op: {problem.loss.name} does not fall, and too few rows are wrong to tell more"
        for place, step in enumerate(steps):
            step.reset()
            if not reports[place].noop and not step.fixed:
                reports[place] = StepReport(step.name, {}, True, 0, 0, True, why)
        losses = plain_losses()
    share = {"smoothing": problem.loss.smoothing}
    return [
        replace(one, loss_before=old, loss_after=new, details=one.details | share)
        for one, (old, new) in zip(reports, pairwise(losses), strict=True)
    ]


def after(problem: Problem, step: Calibrator, later: Calibrator | None = None) -> Problem:
    """The problem the later steps see: the head with this step on it."""
    head = None if problem.head is None else Stepped(step, problem.head)

    def logits_of(batch: Batch) -> Tensor:
        if head is not None and step.needs_features:
            assert batch.features is not None
            return head(batch.features)

        return torch.cat([calibrated(step, rows) for rows in blocks(batch)])

    source = problem.source if head is not None and step.needs_features else problem.data
    reads = later is not None and (later.needs_features or later.takes_features)
    data = Through(source, logits_of, features=reads)
    return replace(problem, data=data, head=head, before=None)


def calibrated(step: Calibrator, rows: Batch) -> Tensor:
    """Stored logits with a step applied that asks no head."""
    return step(rows.features, lambda _: stored_logits(rows))  # type: ignore[no-any-return]


def part_of(problem: Problem, data: Data, rows: int) -> Problem:
    """The problem with some of its rows alone, for a fit to be judged on others."""
    facts, view = replace(problem.facts, rows=rows), Through(data, stored_logits)
    return replace(
        problem, source=data, data=view, facts=facts, then=None, before=None, judged=True
    )


def kept_everywhere(problem: Problem) -> bool:
    """Whether every process has the network's own logits in memory."""
    return not float(dist.largest(torch.tensor(float(not problem.data.kept))))


def refitting(problem: Problem) -> Problem:
    """The problem with its later steps where refitting them for every value is cheap.

    It must cost no product of the head: they act on logits, and the logits fit into memory. Any
    others are fitted after the step has been chosen for itself.
    """
    then = problem.then
    if then is not None and (then.needs_features or not kept_everywhere(problem)):
        return replace(problem, then=None)
    return problem


def refitted(problem: Problem, view: Data) -> tuple[Data, float | None]:
    """Rows with the logits of a value that a step tries, after its later steps are refitted.

    With the loss of the fit where the refit has told it.
    """
    then = problem.then
    if then is None:
        return view, None
    kept = Through(view, stored_logits, features=False)
    again = replace(problem, data=kept, then=None, before=None, judged=True, warm=True)
    *_, last = then.learn(again)
    data = Through(kept, lambda batch: then(None, lambda _: stored_logits(batch)), keep=0)
    return data, last.loss_after


@dataclass(eq=False)
class Counted:
    """A head that counts the rows it is asked for, so that a report can say what a fit cost."""

    head: Head
    rows: int = 0

    def __call__(self, features: Tensor) -> Tensor:
        """The head's own logits."""
        self.rows += len(features)
        return self.head(features)


@dataclass(frozen=True, eq=False)
class Stepped:
    """A head with one more step on it."""

    step: Calibrator
    head: Head

    def __call__(self, features: Tensor) -> Tensor:
        """The logits with the step applied."""
        return self.step(features, self.head)  # type: ignore[no-any-return]


def rows_asked(head: Head | None) -> int:
    """Rows the innermost head was asked for so far, on all ranks."""
    while isinstance(head, Stepped):
        head = head.head
    return int(dist.total(torch.tensor(head.rows if isinstance(head, Counted) else 0)))


def settle(
    step: Calibrator,
    problem: Problem,
    values: dict[str, Any],
    message: str,
    converged: bool = True,
    warning: str = "",
    details: dict[str, Any] | None = None,
    *,
    always: bool = False,
    criterion: Loss | None = None,
    left_out: float | None = None,
    loss_after: float | None = None,
) -> StepReport:
    """Measures a step as it was just fitted; one that does not lower the loss is reset.

    So is one with a number for fewer than PER_NUMBER samples, or one that knows itself how it does
    on rows left out of its fit, where it does not lower the loss on such rows.

    Args:
        step: the step, with its fitted values assigned.
        problem: what it was fitted to.
        values: the fitted values a reader wants to see, ready for JSON.
        message: one sentence for a person.
        converged: whether the search ended by its own rule.
        warning: what a person should look at before using the result.
        details: further figures, ready for JSON.
        always: keep the values whatever they do, as published forms demand.
        criterion: what has to fall instead of the loss.
        left_out: the loss on rows left out of the fit, where the method knows it.
        loss_after: the loss with the step, where the method knows it.
    """
    before, data = problem.loss_before(), problem.data
    logits_of: Callable[[Batch], Tensor] = partial(calibrated, step)
    if step.needs_features:
        data, logits_of = after(problem, step).data, stored_logits
    now = measure(data, problem.loss, logits_of=logits_of)[0] if loss_after is None else loss_after
    details = {} if details is None else details
    falls, by, old = now < before, problem.loss, before
    if criterion is not None and criterion is not problem.loss:
        by, old = criterion, measure(problem.data, criterion)[0]
        falls = measure(data, by, logits_of=logits_of)[0] < old
    where = "on the fit split"
    if falls and not always and not problem.judged:
        numbers = sum(values.numel() for values in step.buffers()) if step.many else 0
        if left_out is None and numbers * PER_NUMBER > problem.facts.samples:
            left_out = loss_left_out(step, problem, by)
        if left_out is not None:
            details, falls = details | {"left_out": left_out}, left_out < old
            where = f"on rows left out of its fit: {left_out:.4f}, and {old:.4f} without it"
    if always or falls:
        return StepReport(
            step.name, values, False, before, now, converged, message, warning, details
        )
    step.reset()
    why = f"no-op: {step.name} does not lower {by.name} {where}"
    return StepReport(step.name, {}, True, before, before, converged, why, details=details)


def applied(step: Calibrator, problem: Problem) -> list[StepReport]:
    """The report of a step whose value the recipe fixes: measured as it is, and never fitted."""
    problem, losses = refitting(problem), []
    for rows in (problem.data, after(problem, step).data):
        view, known = refitted(problem, rows)
        losses.append(measure(view, problem.loss)[0] if known is None else known)
    names = (f"{step.symbols.get(key, key)} = {value:.4g}" for key, value in step.fixed.items())
    told, (before, now) = f"{', '.join(names)} as given, not fitted", losses
    rise = f"{problem.loss.name} rises from {before:.4f} to {now:.4f} on the fit split"
    warning = f"{told}: {rise}" if now > before + 1e-6 else ""
    values, ended = dict(step.fixed), (True, warning or told, warning, {"fixed": True})
    return [StepReport(step.name, values, False, before, now, *ended)]


def loss_left_out(step: Calibrator, problem: Problem, loss: Loss) -> float | None:
    """The loss on every row of a step like this one fitted without it; None for too few rows."""
    folds, seen = Folds(problem.data, FOLDS), []
    sizes, rows = folds.sizes(), problem.facts.rows
    if min(sizes) == 0:
        return None
    for fold, size in enumerate(sizes):
        twin = type(step)(**step.hyperparameters()).to(problem.facts.device)
        twin.learn(part_of(problem, folds.without(fold), rows - size))
        unseen = part_of(problem, folds.only(fold), size)
        seen += [unchecked(one.logits, one.labels) for one in after(unseen, twin).data]
    # Of all rows at once: the ECE of a fold is larger than that of all by chance alone.
    return measure(seen, loss)[0]


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

    @property
    def capped(self) -> bool:
        """Whether the search found no end, and warns of it: nothing to recommend to anybody."""
        return bool(self.warning) and not self.converged

    def as_json(self) -> dict[str, Any]:
        """One flat object: fitted values and figures side by side."""
        flat = asdict(self)
        name, values, details = (flat.pop(key) for key in ("name", "values", "details"))
        return plain({"name": name, **values, **flat, **details})  # type: ignore[no-any-return]


class Tried(TypedDict):
    """A recipe that a choice was made among, as the details of its step tell of it."""

    recipe: str
    value: float | None
    difference: float | None
    error: float | None
    accuracy: float | None


@dataclass(frozen=True)
class FitReport:
    """What a whole fit did: the recipe, its steps in order, the loss before and after.

    `classes` and `features` per row are those of the data; 0 where a file does not know them, and 0
    features where there were logits alone. `samples` are those that rows belong to; 0 where each
    row is one. `class_names` are those of the pack, where it has some.
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
    samples: int = 0
    class_names: tuple[str, ...] | None = None

    @property
    def warnings(self) -> list[str]:
        """What a person should look at before using the result."""
        return [step.warning for step in self.steps if step.warning]

    @property
    def few_rows(self) -> str:
        """Says where rows are so few that what was learned from them may be chance; else empty."""
        learned = any(not step.noop and not step.details.get("fixed") for step in self.steps)
        count, what = self.samples or self.rows, "samples" if self.samples else "rows"
        if count >= FEW_ROWS or not learned:
            return ""
        return (
            f"{count} {what} are few: what is learned from fewer than {FEW_ROWS} may be chance "
            "and make others worse; fit on more"
        )

    @property
    def choice(self) -> StepReport | None:
        """The step that chose among recipes, where one did."""
        return next((step for step in self.steps if step.details.get("choice")), None)

    @property
    def noop(self) -> bool:
        """Whether nothing at all was changed."""
        return all(step.noop for step in self.steps)

    def as_json(self) -> dict[str, Any]:
        """The public form, as `featcal fit --json` prints it."""
        head = ("recipe", "mode", "loss", "rows", "classes", "features")
        tail = ("noop", "loss_before", "loss_after", "seconds", "warnings")
        found = {key: getattr(self, key) for key in head}
        found["steps"] = [step.as_json() for step in self.steps]
        found |= {key: getattr(self, key) for key in tail}
        found["warnings"] += [self.few_rows] if self.few_rows else []
        return plain(found)  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        """What was fitted, what each step says of it, and what a person should look at."""
        told = [f"{step.name}: {step.message}" for step in self.steps]
        loss = f"{self.loss.upper()} {self.loss_before:.4f} -> {self.loss_after:.4f}"
        warned = [f"Warning: {text}" for text in (*self.warnings, self.few_rows) if text]
        return "\n".join([f"{self._above}: {loss}", *told, *warned])

    @property
    def _above(self) -> str:
        return f"{self.recipe}, fitted on {self.rows:,} rows, {self.mode}"

    def _repr_html_(self) -> str:
        """What a notebook shows: the steps, and what a person should look at."""
        name = self.loss.upper()
        rows = [
            (f"`{one.name}`", one.message, f"{one.loss_before:.4f}", f"{one.loss_after:.4f}")
            for one in self.steps
        ]
        above = f"`{self.recipe}`, fitted on {self.rows:,} rows, {self.mode}"
        headings = ("step", "fitted", f"{name} before", f"{name} after")
        return html_table(headings, rows, above=above, below=self.few_rows)

    def as_record(self) -> dict[str, Any]:
        """The form kept in a calibrator's file; `of_record` reads it back."""
        return plain(asdict(self))  # type: ignore[no-any-return]

    @classmethod
    def of_record(cls, record: dict[str, Any]) -> FitReport:
        """The report a record describes."""
        report: FitReport = made(cls, record, "report")
        for step in report.steps:
            made(str, step.values.get("recipe", ""), "recipe")
            if step.details.get("choice"):
                made(list[Tried], step.details["choice"], "choice")
                made(str, step.details.get("metric"), "metric")
            # JSON has no infinity: a threshold of null is the identity's.
            step.values.update({k: math.inf for k, v in step.values.items() if v is None})
        return report


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
def exact() -> Iterator[None]:
    """No autocast in the block: a fit in half precision would follow its own rounding."""
    with ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
