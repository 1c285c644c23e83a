"""A progress bar on stderr for whoever watches a terminal, silent for everyone else."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.progress import TimeElapsedColumn as Elapsed

from featcal.core.progress import listen


@contextmanager
def progress_bar() -> Iterator[None]:
    """Draws the progress of the work inside the block."""
    if not sys.stderr.isatty():
        yield
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Elapsed())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, TaskID] = {}

        def draw(label: str, done: int, of: int) -> None:
            if label not in tasks:
                tasks[label] = bar.add_task(label, total=of)
            bar.update(tasks[label], completed=done, total=of, visible=done < of)

        with listen(draw):
            yield
