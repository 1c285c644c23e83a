"""The fitted values in a few characters: c = 2.26, T = 1.14, or over folds T = 1.14 to 1.16."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from featcal.core.fitting import FitReport, StepReport

SYMBOLS = {"threshold": "c", "temperature": "T"}
SHOWN = 3  # values of a step; JSON has them all
BETWEEN = ", "  # steps


def fitted_text(reports: Sequence[FitReport]) -> str:
    """What one fit, or the fits of the same recipe on several folds, chose."""
    steps = zip(*(report.steps for report in reports), strict=True)
    return BETWEEN.join(filter(None, map(_over_folds, steps)))


def step_text(step: StepReport) -> str:
    """What one step chose."""
    return _over_folds([step])


def _over_folds(steps: Sequence[StepReport]) -> str:
    acting = [step for step in steps if not step.noop]
    idle = f"{steps[0].name}: no-op"
    if not acting:
        return idle
    values = [_value_text(key, [step.values[key] for step in acting]) for key in acting[0].values]
    told = [value for value in values if value]
    text = " ".join([*told[:SHOWN], *(["..."] if len(told) > SHOWN else [])])
    if len(acting) < len(steps):
        return f"{text} ({idle} in {len(steps) - len(acting)} of {len(steps)} folds)".lstrip()
    return text


def _value_text(key: str, values: Iterable[Any]) -> str:
    numbers = list(_numbers(values))
    if not numbers:
        return ""
    low, high = f"{min(numbers):.4g}", f"{max(numbers):.4g}"
    return f"{SYMBOLS.get(key, key)} = {low if low == high else f'{low} to {high}'}"


def _numbers(values: Iterable[Any]) -> Iterator[float]:
    """Every number in values, which may be lists of numbers; words and switches are no numbers."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _numbers(value)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield float(value)
