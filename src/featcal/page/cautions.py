"""What a reader must know before acting on a summary: few rows, no intervals, idle steps."""

from __future__ import annotations

from collections.abc import Iterable

from featcal.core.fitting import StepReport
from featcal.page.advice import Place
from featcal.page.contest import Choice
from featcal.page.losses import fitted_on_the_scored
from featcal.page.phrases import capital, in_words, rows
from featcal.page.verdicts import FEW_ROWS
from featcal.report.rows import Comparison, Row


def cautions(comparison: Comparison, chosen: Choice, place: Place) -> list[str]:
    """What a reader must know before acting on the summary."""
    n, fit, fit_rows = comparison[0].scores.n, place.fit, place.fit_rows
    found = [fitted_on_the_scored(comparison, chosen.seen)] if chosen.seen else []
    if chosen.pick in place.unknown:
        found.append(
            f"It is not known what rows {in_words(comparison[chosen.pick].recipe)} was fitted on: "
            "if rows that are scored here were among them, it looks better than it is."
        )
    intervals = n > 1 and bool(comparison.settings.get("resamples"))
    if n < FEW_ROWS:
        wide = "the intervals are wide, and " if intervals else ""
        found.append(
            f"Only {rows(n)} {'was' if n == 1 else 'were'} scored: {wide}every number here may "
            "move with a few more rows."
        )
    if fit_rows < FEW_ROWS:
        found.append(
            f"Recipes were fitted on only {rows(fit_rows)} of {fit}: fits with many "
            "values may follow their noise."
        )
    if not intervals:
        found.append("There are no intervals, so nothing here is known to be more than chance.")
    found += idle(comparison)
    return found


def idle(comparison: Iterable[Row]) -> list[str]:
    """Every step that changes nothing, with its reason, and every warning; each said once."""
    said: dict[str, str] = {}
    for row in comparison:
        for report in row.reports:
            for step in report.steps:
                if step.noop:
                    why = step.message.removeprefix("no-op: ")
                    named = capital(in_words(step.name))
                    said[step.name] = f"{named} changes nothing here: {why}."
                elif step.warning:
                    said.setdefault(step.warning, _warned(row.recipe, step))
    return list(said.values())


def _warned(recipe: str, step: StepReport) -> str:
    """The warning as a sentence that names the step, and the recipe where it is one of several."""
    text = step.warning
    if not text.startswith(step.name):
        text = f"{in_words(step.name)}: {text}"
    where = f" (in {recipe})" if " | " in recipe else ""
    return f"{capital(text.removesuffix('.'))}{where}."
