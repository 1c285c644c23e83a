"""featcal's own answer: `sample`, unless rows left out of the fit say otherwise.

A short list of recipes is fitted without one fold of the rows at a time and judged on that fold, so
that every row is judged by fits that have not seen it. `sample` is what does best on nearly every
network and falls back to one temperature by itself, so the burden of proof is on the others:
another recipe takes its place where it is better beyond chance, and nothing is done where the
network as it is does as well. What is used is then fitted to all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import reduce
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from featcal.core import dist
from featcal.core.batch import Batch, Head, joined, stored_logits, unchecked
from featcal.core.calibrator import Calibrator
from featcal.core.checks import InputError, check_choice, check_flags
from featcal.core.fit import (
    CRITERIA,
    Facts,
    Loss,
    Problem,
    StepReport,
    accuracy,
    after,
    cautious,
    measure,
    nll,
    part_of,
    run_steps,
)
from featcal.core.progress import calm, track
from featcal.core.sample import fold_of
from featcal.core.text import NONE, parse
from featcal.methods.temperature import Temperature

FIRST = "sample"
OTHERS = ("temperature", "ensemble", "clip | sample", "spline", "isotonic", "svs", "sample | svs")
BEYOND = 2.0  # standard errors by which another recipe must be better
FOLDS = 5
GROUPS = 50  # of rows, each left out once to see by how much a difference might be another
SAMPLE = 2**13  # rows, about, that recipes are judged on
LOGITS = 2**21  # of them, at most, so that many classes take no longer
PER_CLASS = 5  # rows; with fewer a method that keeps numbers for each class is not tried


@final
class Auto(Calibrator):
    """`sample`, or what is better beyond chance on rows left out of its fit; or nothing.

    Args:
        keep_predictions: try only what changes no prediction.
        metric: what recipes are judged by on the rows left out: "nll", "brier" or "ece".
    """

    name = "auto"
    title = "automatic choice"
    symbols: ClassVar[dict[str, str]] = {"temperature": "T", "threshold": "c"}
    takes_features = True
    alone = True

    def __init__(self, *, keep_predictions: bool = False, metric: str = "nll") -> None:
        super().__init__()
        check_flags(self.name, keep_predictions=keep_predictions)
        check_choice(self.name, "metric", metric, list(CRITERIA))
        self.keep_predictions, self.metric = keep_predictions, metric
        self.choice: Calibrator = Temperature()  # fresh, so that it changes nothing

    @property
    def needs_features(self) -> bool:  # type: ignore[override]
        """Whether what was chosen does."""
        return self.choice.needs_features

    @property
    def keeps_accuracy(self) -> bool:  # type: ignore[override]
        """Whether what was chosen does."""
        return self.choice.keeps_accuracy

    def outcome(self) -> Calibrator:
        """What was chosen, with the report of the choice: a recipe like any other, to be kept."""
        self.choice.report = self.report
        return self.choice

    def forward(self, features: Tensor, head: Head) -> Tensor:
        """The logits of what was chosen."""
        return self.choice(features, head)  # type: ignore[no-any-return]

    def reset(self) -> Auto:
        """Forgets what was chosen."""
        self.choice = Temperature().to(next(self.choice.buffers()).device)
        self.report = None
        return self

    def learn(self, problem: Problem) -> list[StepReport]:
        """Judges the recipes fold by fold and fits the one to use to all rows."""
        self.reset()
        facts, before = problem.facts, problem.loss_before()
        first = FIRST if problem.loss.base is nll else "temperature"  # which takes any loss
        others = [name for name in OTHERS if name != first and self.suits(name, problem)]
        with calm(0):  # thousands of small sums
            table = judged([NONE, first, *others], problem, problem.criterion(self.metric))
        details: dict[str, Any] = {"metric": self.metric, "choice": [asdict(row) for row in table]}
        metric = self.metric.upper()
        if table:
            use, raw = to_use(table), table[0]
            message = (
                f"{use.recipe}: on rows left out of its fit {metric} is {use.value:.4f}, and "
                f"{raw.value:.4f} as it is"
            )
            if use is raw:
                message = (
                    f"nothing: {first} does not lower {metric} on rows left out of its fit, and no "
                    "other recipe is better than it beyond chance"
                )
            recipe = use.recipe
        else:
            recipe = first if facts.rows >= GROUPS else NONE
            message = f"{recipe}: too few different rows to judge recipes by"
        if recipe == NONE:
            return [StepReport(self.name, {}, True, before, before, True, message, "", details)]
        self.choice = parse(recipe).to(facts.device)
        steps = run_steps(self.choice.steps_in_order(), problem, "joint")
        if any(step.capped for step in steps):
            self.reset()
            message = f"nothing: the search of {recipe} found no end on all rows"
            return [StepReport(self.name, {}, True, before, before, True, message, "", details)]
        values: dict[str, Any] = {"recipe": recipe}
        for part in reversed(steps):  # where two steps have a value of one name, the first tells
            values |= part.values
        settled = all(step.converged for step in steps)
        now, idle = steps[-1].loss_after, all(step.noop for step in steps)
        told = (replace(step, head_passes=0) for step in steps)  # those of judging were among them
        details["steps"] = [step.as_json() for step in told]
        warning = " ".join(filter(None, (step.warning for step in steps)))
        return [
            StepReport(self.name, values, idle, before, now, settled, message, warning, details)
        ]

    def suits(self, name: str, problem: Problem) -> bool:
        """Whether a recipe may be tried on such rows."""
        recipe, facts = parse(name), problem.facts
        fed = not recipe.needs_features or (problem.head is not None and facts.width > 0)
        kept = recipe.keeps_accuracy or not self.keep_predictions
        many = "svs" not in name or judged_rows(facts) >= PER_CLASS * facts.classes
        return fed and kept and many and (problem.loss.base is nll or FIRST not in name)


@final
@dataclass(frozen=True)
class Judged:
    """A recipe on rows left out of its fit.

    Attributes:
        recipe: its text.
        value: of the metric.
        difference: from that of the second row, `sample` as a rule; below 0 where it is better.
        error: the standard error of the difference, from groups of rows left out in turn.
        accuracy: of its predictions.
    """

    recipe: str
    value: float
    difference: float
    error: float
    accuracy: float


def to_use(table: Sequence[Judged]) -> Judged:
    """The recipe to use, of a table that begins with the network as it is and `sample`."""
    raw, first, *_ = table
    better = [row for row in table if row.difference < -BEYOND * row.error]
    use = min(better, key=lambda row: row.value, default=first)
    return use if use.value < raw.value else raw


def judged(names: Sequence[str], problem: Problem, metric: Loss) -> list[Judged]:
    """Each recipe on rows left out of its fit; none where a fold would have no rows.

    The first two are the network as it is and the recipe that the others are compared with. One
    that refuses the problem is left out.
    """
    rows, group = sampled(problem)
    sums = group.new_zeros(len(names), GROUPS, metric.size + 1, dtype=torch.float64)
    count = dist.total(torch.bincount(group, minlength=GROUPS).double()).cpu()
    if not bool(count.view(-1, FOLDS).sum(0).all()):
        return []
    refused: set[int] = set()
    for fold in track("choosing a recipe", range(FOLDS)):
        held = group % FOLDS == fold
        parts = tuple(cautious_part(problem, rows.rows(part)) for part in (~held, held))
        begun = {NONE: parts}  # the rows seen and unseen after a recipe, for those that go on
        groups = group[held]
        for place, name in enumerate(names):
            first = FIRST if name.startswith(f"{FIRST} | ") and FIRST in begun else NONE
            if name not in begun:
                steps = parse(name).to(problem.facts.device).steps_in_order()
                steps = steps[1:] if first == FIRST else steps
                try:
                    run_steps(steps, begun[first][0], "joint")
                except InputError:
                    refused.add(place)
                    continue
                begun[name] = tuple(reduce(after, steps, part) for part in begun[first])
            (batch,) = begun[name][1].data
            for one in range(fold, GROUPS, FOLDS):
                part = batch.rows(groups == one)
                logits = stored_logits(part)
                sums[place, one] = torch.cat([metric(logits, part), accuracy(logits, part)])
    kept = [place for place in range(len(names)) if place not in refused]
    sums = dist.total(sums).cpu()[kept]
    every, rows_in = sums.sum(1), float(count.sum())
    whole = [metric.value(part[:-1], rows_in) for part in every]
    rest = every[:, None] - sums  # without each group in turn, (recipes, groups, ...)
    left = (rows_in - count).tolist()
    values = [[metric.value(*pair) for pair in zip(one[:, :-1], left, strict=True)] for one in rest]
    without = torch.tensor(values, dtype=torch.float64)
    apart = without - without[1]
    spread = (apart - apart.mean(1, keepdim=True)).square().sum(1)
    errors = (spread * (GROUPS - 1) / GROUPS).sqrt().tolist()  # the jackknife's
    right = (every[:, -1] / rows_in).tolist()
    return [
        Judged(names[place], value, value - whole[1], error, share)
        for place, value, error, share in zip(kept, whole, errors, right, strict=True)
    ]


def sampled(problem: Problem) -> tuple[Batch, Tensor]:
    """The rows to judge by and the group of each, both by a hash of the logits.

    No more than a share of many rows is taken, so that they fit into memory. Rows of one sample
    fall into one group.
    """
    facts = problem.facts
    share = -(-facts.rows // judged_rows(facts))
    parts, groups = [], []
    for batch in problem.data:
        group = fold_of(batch, GROUPS, share)
        parts.append(batch.rows(group < GROUPS))
        groups.append(group[group < GROUPS])
    if not parts:  # a process without rows
        empty = torch.zeros(0, 1, device=facts.device)
        labels, logits = empty[:, 0].long(), empty.expand(0, facts.classes)
        features = empty.expand(0, facts.width) if facts.width else None
        return unchecked(logits, labels, features), labels
    return joined(parts), torch.cat(groups)


def judged_rows(facts: Facts) -> int:
    """How many rows, about, recipes are judged on."""
    return min(facts.rows, SAMPLE, max(LOGITS // facts.classes, 1))


def cautious_part(problem: Problem, rows: Batch) -> Problem:
    """The same problem with some of its rows alone, as cautious as these call for."""
    count = int(dist.total(torch.tensor(len(rows))))
    part = part_of(replace(problem, loss=problem.loss.base), [rows], count)
    return cautious(part, measure(part.data, accuracy)[0])
