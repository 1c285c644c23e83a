"""Which recipe is the best by a metric, from which others it cannot be told apart, which to use."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

from featcal.report.columns import COLUMNS
from featcal.report.intervals import ROUNDING, Difference
from featcal.report.rows import Comparison, Row

HONESTY = ("ece", "brier")  # a lower loss is no help where one of them is known to rise


@final
@dataclass(frozen=True)
class Contest:
    """The outcome by one metric.

    Attributes:
        best: the place of the row with the best value.
        alike: places of the rows that have its value on every resample, its own among them: a
            pipeline whose first step does nothing is the same as the rest of it.
        tied: places of all rows whose paired difference from it may be chance, those among them.
    """

    best: int
    alike: tuple[int, ...]
    tied: tuple[int, ...]

    @property
    def clear(self) -> bool:
        """Whether the intervals say that nothing else is as good."""
        return self.tied == self.alike


def contest(
    comparison: Comparison, metric: str, among: tuple[int, ...] | None = None
) -> Contest | None:
    """The best rows by a metric; None where there is nothing to choose from.

    Args:
        comparison: the rows.
        metric: one of which more or less is better.
        among: the places of the rows that take part; None for all.
    """
    places = tuple(range(len(comparison))) if among is None else among
    column = COLUMNS[metric]
    if not places or column.better == 0:
        return None
    best = max(places, key=lambda place: column.merit(comparison[place].scores.metrics[metric]))
    found = {place: paired(comparison, place, best, metric) for place in places}
    alike = tuple(place for place in places if place == best or _same(found[place]))
    tied = tuple(place for place in places if place in alike or found[place].verdict != "worse")
    return Contest(best, alike, tied)


@final
@dataclass(frozen=True)
class Choice:
    """What to use, and why not the others.

    Attributes:
        pick: the place of the recipe to use: the simplest of those that helped and that no other
            of them beats by NLL; None to leave the model as it is.
        helped: places of the rows that lower the loss by more than chance, and are not known to
            make calibration worse.
        harmful: places of those that lower the loss by more than chance, and are.
        seen: places of those that were fitted on the scored rows, whose numbers say nothing.
    """

    pick: int | None
    helped: tuple[int, ...]
    harmful: tuple[int, ...]
    seen: tuple[int, ...]

    @classmethod
    def of(cls, comparison: Comparison, seen: tuple[int, ...] = ()) -> Choice:
        """Chooses by NLL, among those that do not pay for it with calibration."""
        likelier = [
            place
            for place in range(1, len(comparison))
            if place not in seen and _judged(comparison, place, "nll") == "better"
        ]
        harmful = tuple(place for place in likelier if harmed(comparison, place))
        good = tuple(place for place in likelier if place not in harmful)
        return cls(_simplest(comparison, good), good, harmful, seen)


def harmed(comparison: Comparison, place: int) -> list[str]:
    """The metrics of calibration by which a recipe is known to be worse than none."""
    return [name for name in HONESTY if _judged(comparison, place, name) == "worse"]


def _simplest(comparison: Comparison, among: tuple[int, ...]) -> int | None:
    found = contest(comparison, "nll", among)
    if found is None:
        return None
    return min(
        found.tied, key=lambda place: (costs(comparison, place), complexity(comparison[place]))
    )


def steps(row: Row) -> int:
    """How many steps a recipe has."""
    return 0 if row.calibrator is None else len(row.calibrator.steps_in_order())


def costs(comparison: Comparison, place: int) -> bool:
    """Whether a recipe is known to cost accuracy."""
    return _judged(comparison, place, "accuracy") == "worse"


def complexity(row: Row) -> tuple[int, int]:
    """The steps of a recipe, and the numbers it learned."""
    learned = () if row.calibrator is None else row.calibrator.buffers()
    return steps(row), sum(found.numel() for found in learned)


def _judged(comparison: Comparison, place: int, metric: str) -> str | None:
    found = comparison.difference(place, metric)
    return None if found is None else found.verdict


def paired(comparison: Comparison, index: int, other: int, metric: str) -> Difference:
    """Row `index` against any other row, by the resamples both were scored on."""
    against = replace(comparison, against=tuple(other for _ in comparison.rows))
    found = against.difference(index, metric)
    assert found is not None
    return found


def same(comparison: Comparison, index: int, other: int, metric: str) -> bool:
    """Whether two rows are one under two names, as far as a metric can tell."""
    return index == other or _same(paired(comparison, index, other, metric))


def _same(found: Difference) -> bool:
    """Whether two rows never differ by more than rounding; without resamples nobody knows."""
    ends = (found.delta, found.interval.low, found.interval.high)
    return all(abs(end) <= ROUNDING for end in ends)
