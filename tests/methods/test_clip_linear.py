"""The logits a linear head gives away, against the head itself at every threshold."""

import math

import pytest
import torch
from torch import nn

from featcal import Batch, FeatureClip
from featcal.core.fit import Counted
from featcal.methods import clip as clip_linear
from featcal.methods import clip as clip_search
from featcal.methods.clip import Path, Window, linear


@pytest.fixture
def caught(monkeypatch):
    """The Problem a fit hands to its search, with everything the library put into it."""
    problems = []
    inner = clip_search.search

    def spy(problem, *rest):
        problems.append(problem)
        return inner(problem, *rest)

    monkeypatch.setattr("featcal.methods.clip.search", spy)

    def problem(world, parts=1):
        rows = math.ceil(len(world.labels) / parts)
        data = [
            Batch(None, world.labels[i : i + rows], world.features[i : i + rows])
            for i in range(0, len(world.labels), rows)
        ]
        FeatureClip().fit(data, world.head)
        return problems[-1]

    return problem


def window_at(problem, centre, *, low, high):
    """A window around a threshold, given the head's logits there."""
    with torch.no_grad():
        there = [
            Batch(problem.head.head(b.features.clamp(-centre, centre)), b.labels)
            for b in problem.source
        ]
    return Window(problem, centre, there, low=low, high=high)


def check(view, features, head, threshold):
    found = torch.cat([batch.logits for batch in view.at(threshold)])
    with torch.no_grad():
        expected = head(features.clamp(-threshold, threshold))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("parts", [1, 4])
def test_window_is_exact_inside(made, caught, signed, parts):
    world = made(n=300, d=20, k=5, signed=signed)
    problem = caught(world, parts)
    centre = 1.3
    low, high = centre * math.exp(-0.054), centre * math.exp(0.054)
    window = window_at(problem, centre, low=low, high=high)
    for shift in (-0.054, -0.045, -0.02, -1e-4, 0.0, 1e-4, 0.02, 0.045, 0.054):
        check(window, world.features, world.head, centre * math.exp(shift))


def test_window_is_exact_at_an_activation_itself(made, caught):
    world = made(n=100, d=20, k=5)
    problem = caught(world)
    centre = float(world.features[world.features > 1][5])
    window = window_at(problem, centre, low=centre * 0.9, high=centre * 1.1)
    inside = world.features[(world.features > centre * 0.91) & (world.features < centre * 1.09)]
    for size in [centre, *inside[:10].tolist()]:
        check(window, world.features, world.head, size)


def test_a_window_gives_its_answers_in_any_order(made, caught):
    world = made(n=100, d=20, k=5)
    window = window_at(caught(world), 1.0, low=0.9, high=1.1)
    first = window.at(1.05)[0].logits.clone()
    window.at(0.95)
    assert torch.equal(window.at(1.05)[0].logits, first)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("bias", [True, False])
def test_path_is_exact_everywhere(made, signed, bias):
    world = made(n=80, d=9, k=4, signed=signed)
    if not bias:
        world.head.bias = None
    path = Path([Batch(None, world.labels, world.features)], Counted(world.head))
    some = world.features.abs()[world.features != 0].flatten()[:20].tolist()
    for threshold in [1e-6, 0.1, 0.7, 1.9, 100.0, math.inf, float(world.features.max()), *some]:
        check(path, world.features, world.head, threshold)


def test_building_costs_what_it_says(made, caught):
    world = made(n=100, d=20, k=5)
    problem = caught(world)
    head = problem.head
    assert isinstance(head, Counted)
    before = head.rows
    window_at(problem, 1.0, low=0.9, high=1.1)
    assert head.rows == before + 100
    Path(problem.source, head)
    assert head.rows == before + 200


def test_only_a_plain_linear_layer_is_linear():
    class Scaled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    layer = nn.Linear(3, 2)
    assert linear(layer) is layer
    assert linear(Counted(layer)) is layer
    assert linear(Scaled(3, 2)) is None
    assert linear(nn.Sequential(nn.Dropout(0.2), layer)) is layer
    assert linear(nn.Sequential(layer, nn.ReLU())) is None
    assert linear(nn.Sequential(nn.Linear(3, 3), layer)) is None
    for dtype in (torch.float16, torch.bfloat16):  # the same weights, in which fits are made
        assert linear(layer.to(dtype)).weight.dtype == torch.float32
    assert linear(None) is None
    assert linear(lambda x: x) is None


def test_a_layer_that_does_more_than_its_weights_is_not_taken_for_linear(made):
    """Hooks and parametrisations change what a layer computes without changing its type."""
    world = made(n=300, d=8, k=3)
    world.head.register_forward_hook(lambda _, __, output: torch.tanh(output) * 3)
    batch = Batch(None, world.labels, world.features)
    found = FeatureClip().fit(batch, world.head)
    with torch.no_grad():
        after = nn.functional.cross_entropy(found(world.features, world.head), world.labels)
    assert found.report.loss_after == pytest.approx(float(after), abs=1e-5)
    with torch.no_grad():
        best = min(
            float(
                nn.functional.cross_entropy(world.head(world.features.clamp(-c, c)), world.labels)
            )
            for c in torch.logspace(-2, 1, 200).tolist()
        )
    assert found.report.loss_after <= best + 1e-3


def test_what_is_small_is_bounded():
    assert clip_linear.SMALL <= 2**26


def test_a_window_stays_within_the_memory_it_promises(caught, made):
    """The units inside a window must not cost k numbers each: n d k is what ImageNet has."""
    world = made(n=400, d=300, k=200)
    problem = caught(world)
    window = window_at(problem, 1.0, low=0.94, high=1.06)
    numbers = sum(
        value.numel()
        for part in window.parts
        for value in (getattr(part, name) for name in part.__dataclass_fields__)
        if isinstance(value, torch.Tensor)
    )
    assert numbers <= 400 * (3 * 200 + 0.2 * 3 * 300)
