"""Tables for people: the same numbers as --json, rounded, best ones in bold."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table
from rich.text import Text

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
# What a narrow terminal does without, first to go first.
EXPENDABLE = ("seconds", "brier", "adaptive_ece", "fitted", "nll")

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


class _Console(Console):
    """A console that leaves a closed pipe to the caller."""

    def on_broken_pipe(self) -> NoReturn:
        """Rich would leave with exit code 1; a reader that has seen enough is no failure."""
        raise BrokenPipeError


def console() -> Console:
    """Standard output, as wide as the terminal; wide enough for any table when it is a pipe.

    No markup: a file called [red] is called that.
    """
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    return _Console(width=width, highlight=False, markup=False, emoji=False)


def say(text: str) -> None:
    """One line of text; a terminal wraps it, nothing cuts it."""
    console().print(text, soft_wrap=True)


def comparison_table(rows: Sequence[Row], width: int) -> Table:
    """One row a recipe, the best value of each column in bold, as many columns as fit."""
    screen = Console(width=10_000)
    for count in range(len(EXPENDABLE) + 1):
        table = _comparison(rows, EXPENDABLE[:count])
        if screen.measure(table).maximum <= width:
            break
    return table


def _comparison(rows: Sequence[Row], without: Sequence[str]) -> Table:
    shown = [column for column in COLUMNS if column[0] not in without]
    best = {key: max(sign * row.scores.metrics[key] for row in rows) for key, _, _, sign in shown}
    table = Table()
    table.add_column("recipe", overflow="fold", min_width=10)
    for _, heading, _, _ in shown:
        table.add_column(heading, justify="right", no_wrap=True)
    extras = [name for name in ("fitted", "seconds") if name not in without]
    for name in extras:
        table.add_column(name, justify="right" if name == "seconds" else "left", no_wrap=True)
    for row in rows:
        cells = [_cell(row.scores.metrics[k], f, s, best[k]) for k, _, f, s in shown]
        more = {"fitted": fitted_text(row.calibrator), "seconds": f"{row.seconds:.2f}"}
        table.add_row(row.recipe, *cells, *(more[name] for name in extras))
    return table


def _cell(value: float, form: Format, sign: int, best: float) -> Text:
    # Equal as printed is equal to the reader: both are bold.
    text = form(value)
    return Text(text, style="bold green" if text == form(sign * best) else "")


def fitted_text(calibrator: Calibrator | None) -> str:
    """The fitted values in a few characters: c = 2.26, T = 1.14."""
    report = None if calibrator is None else calibrator.report
    return "" if report is None else ", ".join(_step_text(step) for step in report.steps)


SYMBOLS = {"threshold": "c", "temperature": "T"}


def _step_text(step: StepReport) -> str:
    if step.noop:
        return f"{step.name}: no-op"
    return " ".join(f"{SYMBOLS.get(k, k)} = {v:.4g}" for k, v in step.values.items())


def fit_table(report: FitReport) -> Table:
    """One row a step: what it learned, what it did to the loss, what it cost."""
    table = Table()
    table.add_column("step")
    table.add_column("fitted")
    name = report.loss.upper()
    for heading in (f"{name} before", f"{name} after", "head passes", "seconds"):
        table.add_column(heading, justify="right")
    for step in report.steps:
        numbers = (digits(step.loss_before), digits(step.loss_after), str(step.head_passes))
        table.add_row(step.name, _step_text(step), *numbers, f"{step.seconds:.2f}")
    return table


def scores_table(scores: Scores) -> Table:
    """Every metric, one a line."""
    table = Table(show_header=False)
    table.add_column("metric")
    table.add_column("value", justify="right", no_wrap=True)
    for key, heading, form in ALL_METRICS:
        table.add_row(heading, form(scores.metrics[key]))
    return table


def pack_table(summary: dict[str, Any]) -> Table:
    """The splits of a pack."""
    table = Table()
    for heading in ("split", "rows", "shards", "MB"):
        table.add_column(heading, justify="left" if heading == "split" else "right")
    for name, split in summary["splits"].items():
        size = f"{split['bytes'] / 1e6:.1f}"
        table.add_row(name, f"{split['rows']:,}", str(split["shards"]), size)
    return table


def pack_lines(summary: dict[str, Any]) -> list[str]:
    """What a pack is, in words."""
    origin = ", ".join(part for part in (summary["dataset"], summary["model"]) if part)
    stored = ", ".join(f"{name} {dtype}" for name, dtype in summary["tensors"].items())
    width = f"{summary['features']} features" if summary["features"] else "logits alone"
    head = "with the head" if summary["head"] else "without a head"
    title = f"{summary['name']}: {origin}" if origin else summary["name"]
    return [title, f"{width}, {summary['classes']} classes, {head}; stored as {stored}"]
