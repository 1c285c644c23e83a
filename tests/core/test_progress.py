"""Progress: silent by itself, told to whoever listens; work shared out among threads."""

import io
import itertools
import threading

import torch

from featcal.core import progress
from featcal.core.progress import listen, tell
from forked import ended, started


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


def test_items_are_spread_over_the_threads_that_torch_has_and_each_computes_alone():
    meeting = threading.Barrier(2, timeout=60)

    def work(item):
        meeting.wait()  # for the other one, which must be at work at the same time
        return item, torch.get_num_threads(), torch.is_grad_enabled()

    torch.set_num_threads(2)
    try:
        with torch.no_grad():
            assert progress.spread(work, "ab") == [("a", 1, False), ("b", 1, False)]
        assert torch.get_num_threads() == 2
        here = threading.get_ident()
        assert progress.spread(lambda _: threading.get_ident(), "a") == [here]
    finally:
        torch.set_num_threads(1)


def test_a_fork_has_threads_of_its_own(tmp_path):
    torch.set_num_threads(2)
    try:
        assert progress.spread(abs, [-1, -2]) == [1, 2]
        children = started(1, lambda rank: print(progress.spread(abs, [-3, -4])), tmp_path)
        assert ended(children, tmp_path, longest=20) == [(0, "[3, 4]\n")]
    finally:
        torch.set_num_threads(1)


def test_a_terminal_sees_how_far_how_fast_and_how_long_still(monkeypatch):
    said = at_work(monkeypatch, Terminal(), 1.0)
    assert "collecting rows  200/300  200 rows/s  0:00 left" in said
    assert said.endswith("\r")
    assert said.rsplit("\r", 2)[1].strip() == ""  # the line is wiped


def test_how_long_still_is_told_in_minutes_by_the_speed_so_far(monkeypatch):
    stream, clock = Terminal(), iter([0.0, 0.0, 40.0, 40.1, 90.0])
    monkeypatch.setattr(progress, "monotonic", lambda: next(clock))
    monkeypatch.setattr(progress.sys, "stderr", stream)
    with progress.shown():
        tell("fit", 0, 100)  # at 0 s
        tell("fit", 20, 100)  # after 40 s
        tell("fit", 25, 100)  # too soon to draw again
        tell("then", 7, 10)  # other work has a clock of its own
    drawn = [text.strip() for text in stream.getvalue().split("\r") if text.strip()]
    assert drawn[0] == "fit  20/100  2:40 left"
    assert len(drawn) == 2
    assert drawn[1].startswith("then  7/10")


def test_small_work_runs_on_one_thread_and_gives_the_others_back():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for numbers, small, inside in (
            (9, 10, 1),
            (10, 10, 2),
            (2**22 - 1, None, 1),
            (2**22, None, 2),
        ):
            with progress.calm(numbers, *([] if small is None else [small])):
                assert torch.get_num_threads() == inside
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_quick_work_and_anything_but_a_terminal_see_nothing(monkeypatch):
    assert at_work(monkeypatch, Terminal(), 0.01) == ""
    assert at_work(monkeypatch, io.StringIO(), 1.0) == ""


def test_nothing_is_shown_where_somebody_listens(monkeypatch):
    stream, seen = Terminal(), []
    monkeypatch.setattr(progress.sys, "stderr", stream)
    with listen(lambda *told: seen.append(told)), progress.shown():
        tell("fit", 1, 2)
    assert (stream.getvalue(), seen) == ("", [("fit", 1, 2)])
