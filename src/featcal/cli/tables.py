"""Tables for people: the same numbers as --json, rounded, best ones in bold."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from featcal.core.calibrator import Calibrator
from featcal.core.fitting import FitReport, StepReport
from featcal.report.comparison import Row
from featcal.report.scores import Scores

PIPE_WIDTH = 120  # a pipe has no width of its own, and a table must not be cut there

Format = Callable[[float], str]


def percent(value: float) -> str:
    """A fraction as percent with two digits."""
    return "n/a" if value != value else f"{100 * value:.2f} %"


def digits(value: float) -> str:
    """Four digits after the point."""
    return "n/a" if value != value else f"{value:.4f}"


# name in JSON, heading, format, and whether lower (-1) or higher (+1) is better
COLUMNS: tuple[tuple[str, str, Format, int], ...] = (
    ("accuracy", "accuracy", percent, +1),
    ("ece", "ECE", percent, -1),
    ("adaptive_ece", "adaptive ECE", percent, -1),
    ("nll", "NLL", digits, -1),
    ("brier", "Brier", digits, -1),
)

ALL_METRICS: tuple[tuple[str, str, Format], ...] = (
    ("accuracy", "accuracy", percent),
    ("confidence", "mean confidence", percent),
    ("overconfidence", "overconfidence (confidence - accuracy)", percent),
    ("ece", "ECE (equal-width bins)", percent),
    ("adaptive_ece", "adaptive ECE (equal-mass bins)", percent),
    ("classwise_ece", "classwise ECE", percent),
    ("mce", "MCE (worst bin)", percent),
    ("rms_ce", "RMS calibration error", percent),
    ("debiased_ce", "debiased RMS calibration error", percent),
    ("smooth_ece", "smooth ECE (no bins)", percent),
    ("nll", "NLL", digits),
    ("brier", "Brier score", digits),
    ("auroc", "AUROC of correctness", digits),
    ("aurc", "AURC (area under risk-coverage)", digits),
)


def console() -> Console:
    """Standard output, as wide as the terminal; wide enough for any table when it is a pipe."""
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)


def comparison_table(rows: Sequence[Row], title: str) -> Table:
    """One row a recipe; the best value of each column in bold."""
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("recipe", no_wrap=True)
    for _, heading, _, _ in COLUMNS:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("fitted", no_wrap=True)
    table.add_column("seconds", justify="right", no_wrap=True)
    best = {key: max(sign * row.scores.metrics[key] for row in rows) for key, _, _, sign in COLUMNS}
    for row in rows:
        cells = [_cell(row.scores.metrics[k], f, s, best[k]) for k, _, f, s in COLUMNS]
        table.add_row(row.recipe, *cells, fitted_text(row.calibrator), f"{row.seconds:.2f}")
    return table


def _cell(value: float, form: Format, sign: int, best: float) -> str:
    # Equal as printed is equal to the reader: both are bold.
    text = form(value)
    return f"[bold green]{text}[/]" if text == form(sign * best) else text


def fitted_text(calibrator: Calibrator | None) -> str:
    """The fitted values in a few characters: c = 2.26, T = 1.14."""
    report = None if calibrator is None else calibrator.report
    if report is None:
        return ""
    return ", ".join(_step_text(step) for step in report.steps)


SYMBOLS = {"threshold": "c", "temperature": "T"}


def _step_text(step: StepReport) -> str:
    if step.noop:
        return f"{step.name}: no-op"
    return " ".join(f"{SYMBOLS.get(k, k)} = {v:.4g}" for k, v in step.values.items())


def fit_table(report: FitReport) -> Table:
    """One row a step: what it learned, what it did to the loss, what it cost."""
    title = f"{report.recipe}   fitted on {report.rows:,} rows by {report.loss.upper()}"
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("step", no_wrap=True)
    table.add_column("fitted", no_wrap=True)
    for heading in ("before", "after", "head passes", "seconds"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("what happened", overflow="fold")
    for step in report.steps:
        numbers = (digits(step.loss_before), digits(step.loss_after), str(step.head_passes))
        table.add_row(step.name, _step_text(step), *numbers, f"{step.seconds:.2f}", step.message)
    return table


def scores_table(scores: Scores, title: str) -> Table:
    """Every metric, one a line."""
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False)
    table.add_column("metric", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    for key, heading, form in ALL_METRICS:
        table.add_row(heading, form(scores.metrics[key]))
    return table


def pack_table(summary: dict[str, Any]) -> Table:
    """What a pack holds."""
    title = f"{summary['name']}: {summary['dataset'] or '?'}, {summary['model'] or '?'}"
    table = Table(title=title, title_justify="left", title_style="bold")
    for heading in ("split", "rows", "shards", "MB"):
        table.add_column(heading, justify="left" if heading == "split" else "right")
    for name, split in summary["splits"].items():
        size = f"{split['bytes'] / 1e6:.1f}"
        table.add_row(name, f"{split['rows']:,}", str(split["shards"]), size)
    stored = ", ".join(f"{name} {dtype}" for name, dtype in summary["tensors"].items())
    features = summary["features"] or "no"
    head = "with a head" if summary["head"] else "without a head"
    table.caption = f"{features} features, {summary['classes']} classes, {head}; {stored}"
    return table
