"""A progress bar on stderr for whoever watches a terminal, silent for everyone else."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import TimeElapsedColumn as Elapsed
from rich.text import Text

from featcal.core.progress import ROWS, listen


class _Speed(ProgressColumn):
    """Rows a second, of work that counts rows."""

    def render(self, task: Task) -> Text:
        speed = task.speed if task.description.endswith(ROWS) else None
        return Text("" if speed is None else f"{speed:,.0f} rows/s")


@contextmanager
def progress_bar() -> Iterator[None]:
    """Draws the progress of the work inside the block."""
    if not sys.stderr.isatty():
        yield
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        _Speed(),
        Elapsed(),
        TimeRemainingColumn(compact=True),
    )
    shown = Console(stderr=True)
    # What is printed meanwhile goes above the bar, or to the file or pipe that asked for it.
    above = sys.stdout.isatty()
    with Progress(*columns, console=shown, transient=True, redirect_stdout=above) as bar:
        tasks: dict[str, TaskID] = {}

        def draw(label: str, done: int, of: int) -> None:
            if label not in tasks:
                tasks[label] = bar.add_task(label, total=of, completed=done)
            bar.update(tasks[label], completed=done, total=of, visible=done < of)

        with listen(draw):
            yield
