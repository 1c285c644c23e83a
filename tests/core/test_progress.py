"""Progress: silent by itself, told to whoever listens."""

import io
import itertools

from featcal.core import progress
from featcal.core.progress import listen, tell


class Terminal(io.StringIO):
    def isatty(self):
        return True


def at_work(monkeypatch, stream, seconds):
    """Three steps of work on a clock that goes on by so many seconds at each."""
    clock = itertools.count(0, seconds)
    monkeypatch.setattr(progress, "monotonic", lambda: next(clock))
    monkeypatch.setattr(progress.sys, "stderr", stream)
    with progress.shown():
        for done in (100, 200, 300):
            tell("collecting rows", done, 300)
    return stream.getvalue()


def test_a_terminal_sees_how_far_how_fast_and_how_long_still(monkeypatch):
    said = at_work(monkeypatch, Terminal(), 1.0)
    assert "collecting rows  200/300  200 rows/s  0:00 left" in said
    assert said.endswith("\r")
    assert said.rsplit("\r", 2)[1].strip() == ""  # the line is wiped


def test_quick_work_and_anything_but_a_terminal_see_nothing(monkeypatch):
    assert at_work(monkeypatch, Terminal(), 0.01) == ""
    assert at_work(monkeypatch, io.StringIO(), 1.0) == ""


def test_nothing_is_shown_where_somebody_listens(monkeypatch):
    stream, seen = Terminal(), []
    monkeypatch.setattr(progress.sys, "stderr", stream)
    with listen(lambda *told: seen.append(told)), progress.shown():
        tell("fit", 1, 2)
    assert (stream.getvalue(), seen) == ("", [("fit", 1, 2)])
