"""The fitted values in a few characters: c = 2.26, T = 1.14, or over folds T = 1.14 to 1.16."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from featcal.core.fitting import FitReport, StepReport

SYMBOLS = {
    **{"threshold": "c", "temperature": "T", "proximity": "mean proximity"},
    **{"ridge": "penalty", "off_diagonal": "penalty", "bias": "penalty"},
}
# What a step was held back by: the first that it names is shown, after what it learned.
PENALTIES = ("ridge", "off_diagonal", "bias")
ENDS = {"lowest": ("values", "highest")}  # and X_min with X_max: the two ends of one range
SHOWN = 4  # values of a step; JSON has them all
BETWEEN = ", "  # steps
WITHIN = "; "  # the values of a step


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
    found = _found(acting)
    told = [f"{name} {text}" for name, text in _named(found) if text]
    text = WITHIN.join([*told[:SHOWN], *(["..."] if len(told) > SHOWN else [])])
    if len(acting) < len(steps):
        return f"{text} ({idle} in {len(steps) - len(acting)} of {len(steps)} folds)".lstrip()
    return text


def _found(acting: Sequence[StepReport]) -> dict[str, list[float]]:
    """The numbers under each key, over all folds that have it; one penalty, and that last."""
    keys = list(dict.fromkeys(key for step in acting for key in step.values))
    learned = [key for key in keys if key not in PENALTIES]
    held = [key for key in PENALTIES if key in keys][:1]
    return {
        key: list(_numbers(step.values[key] for step in acting if key in step.values))
        for key in [*learned, *held]
    }


def _named(found: dict[str, list[float]]) -> Iterator[tuple[str, str]]:
    """Names and texts; two ends of a range, as T_min and T_max, are one: T 1.35 to 2.18."""
    left = dict(found)
    for key in found:
        if key not in left:
            continue
        numbers, stem = left.pop(key), key.removesuffix("_min")
        name, other = ENDS.get(key, (stem, f"{stem}_max" if stem != key else ""))
        if other in left:
            yield name, _text(numbers + left.pop(other), ends=True)
        else:
            yield SYMBOLS.get(key, key), _text(numbers)


def _text(numbers: Sequence[float], *, ends: bool = False) -> str:
    if not numbers:
        return ""
    low, high = f"{min(numbers):.4g}", f"{max(numbers):.4g}"
    if low == high:
        return f"= {low}"
    return f"{low} to {high}" if ends else f"= {low} to {high}"


def folded(text: str, width: int) -> str:
    """The text in lines no wider than `width` where that can be: broken between values alone."""
    lines: list[str] = []
    for part in re.split("(?<=[;,]) ", text):
        if lines and len(lines[-1]) + 1 + len(part) <= width:
            lines[-1] += f" {part}"
        else:
            lines.append(part)
    return "\n".join(lines)


def _numbers(values: Iterable[Any]) -> Iterator[float]:
    """Every number in values, which may be lists of numbers; words and switches are no numbers."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _numbers(value)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield float(value)
