"""Progress: silent by itself, told to whoever listens."""

import pytest
import torch

from featcal import Batch, FeatureClip
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
