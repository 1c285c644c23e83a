"""Progress: silent by itself, told to whoever listens."""

import io
import itertools

import pytest
import torch

from featcal import Batch, FeatureClip
from featcal.core import progress
from featcal.core.progress import listen, tell, track


def test_nobody_listens_nothing_happens(capfd):
    tell("work", 1, 2)
    assert list(track("work", [1, 2])) == [1, 2]
    assert capfd.readouterr() == ("", "")


def test_a_listener_hears_and_is_gone_after_the_block():
    seen = []
    with listen(lambda *step: seen.append(step)):
        tell("a", 1, 3)
    tell("b", 1, 3)
    assert seen == [("a", 1, 3)]


def test_the_inner_listener_takes_over_for_its_block():
    outer, inner = [], []
    with listen(lambda *step: outer.append(step)):
        with listen(lambda *step: inner.append(step)):
            tell("x", 0, 1)
        tell("y", 0, 1)
    assert inner == [("x", 0, 1)]
    assert outer == [("y", 0, 1)]


def test_a_failing_block_takes_its_listener_along():
    seen = []
    with pytest.raises(RuntimeError), listen(lambda *step: seen.append(step)):
        raise RuntimeError
    tell("late", 0, 1)
    assert seen == []


def test_a_fit_tells_how_far_it_is_and_never_more_than_all(made):
    world = made(n=300, d=6, k=3)
    seen = []
    with listen(lambda *step: seen.append(step)):
        FeatureClip().fit(Batch(None, world.labels, world.features), world.head)
    assert seen
    assert all(0 <= done <= of for _, done, of in seen)
    assert torch.get_num_threads() == 1


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
