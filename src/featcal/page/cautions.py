"""What a reader must know before acting on a summary: few rows, no intervals, idle steps."""

from __future__ import annotations

from featcal.page.phrases import capital, in_words, rows
from featcal.page.verdicts import FEW_ROWS
from featcal.report.rows import Comparison


def cautions(comparison: Comparison, fit: str, fit_rows: int) -> list[str]:
    """What a reader must know before acting on the summary."""
    n = comparison[0].scores.n
    found = []
    if n < FEW_ROWS:
        found.append(
            f"Only {rows(n)} {'was' if n == 1 else 'were'} scored: the intervals are wide, and "
            "every number here may move with a few more rows."
        )
    if fit_rows < FEW_ROWS:
        found.append(
            f"Recipes were fitted on only {rows(fit_rows)} of {fit}: fits with many "
            "values may follow their noise."
        )
    if n < 2 or not comparison.settings.get("resamples"):
        found.append("There are no intervals, so nothing here is known to be more than chance.")
    found += _idle(comparison)
    return found


def _idle(comparison: Comparison) -> list[str]:
    """Every step that changes nothing, with its reason, said once."""
    said = {}
    for row in comparison:
        for report in row.reports:
            for step in report.steps:
                if step.noop:
                    why = step.message.removeprefix("no-op: ")
                    named = capital(in_words(step.name))
                    said[step.name] = f"{named} changes nothing here: {why}."
                elif step.warning:
                    said.setdefault(step.warning, f"{row.recipe}: {step.warning}")
    return list(said.values())
