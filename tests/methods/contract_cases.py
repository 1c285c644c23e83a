"""The recipes that keep the contract (tests/test_contract*.py), fitted once per process."""

import copy
from functools import cache
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from featcal import METHODS, Batch, parse

PIPELINES = [
    ("clip | temperature", "joint"),
    ("clip | temperature", "sequential"),
    ("clip(min_accuracy=0.99) | temperature", "joint"),
    ("norm_clip | temperature", "joint"),
    ("clip | group(partitions=3, features='clipped')", "sequential"),
    ("temperature | isotonic", "sequential"),
]
SINGLE = [(name, "joint") for name in sorted(METHODS)]
CASES = SINGLE + PIPELINES
RECIPES = list(dict.fromkeys(recipe for recipe, _ in CASES))


def make_world(n=1200, d=24, k=5, *, knee=1.5, heat=1.0, signed=False, seed=0):
    """A linear classifier that is overconfident because some activations are too large.

    The labels follow the logits of features clipped at `knee`, divided by `heat`; the network's
    own logits use the features as they are.
    """
    draw = np.random.default_rng(seed)
    features = draw.standard_t(3, size=(n, d)) * 1.2
    if not signed:
        features = np.maximum(features, 0)
    weight = draw.normal(size=(k, d)) * 0.7
    bias = draw.normal(size=k) * 0.3
    true = (np.clip(features, -knee, knee) @ weight.T + bias) / heat
    labels = (true + draw.gumbel(size=true.shape)).argmax(1)
    head = nn.Linear(d, k, device="meta")
    head.weight = nn.Parameter(torch.tensor(weight, dtype=torch.float32))
    head.bias = nn.Parameter(torch.tensor(bias, dtype=torch.float32))
    features = torch.tensor(features, dtype=torch.float32)
    with torch.no_grad():
        logits = head(features)
    return SimpleNamespace(features=features, logits=logits, labels=torch.tensor(labels), head=head)


@cache
def shared_world():
    """Enough rows that samples are used, overconfident in both ways: outliers and scale."""
    world = make_world(n=1200, heat=1.6)
    world.batch = Batch(world.logits, world.labels, world.features)
    return world


def fit(recipe, data, head=None, *, mode="joint"):
    """Fits a recipe or a calibrator; one that needs training rows gets the fit rows themselves."""
    calibrator = parse(recipe) if isinstance(recipe, str) else recipe
    return calibrator.fit(data, head, mode=mode, train=data if calibrator.needs_train else None)


@cache
def _fitted(recipe, mode):
    world = shared_world()
    return fit(recipe, world.batch, world.head, mode=mode)


def fitted(recipe, mode):
    """A copy of the calibrator fitted on the shared world, fitted once."""
    return copy.deepcopy(_fitted(recipe, mode))


def outputs(calibrator, features, head):
    with torch.no_grad():
        return calibrator(features, head)


def same_buffers(left, right):
    left, right = left.state_dict(), right.state_dict()
    assert left.keys() == right.keys()
    assert [key for key in left if not torch.equal(left[key], right[key])] == []


def same_fit(found, expected, world, rtol):
    """Single fitted numbers agree to rtol, and whatever was fitted gives the same probabilities."""
    left, right = found.state_dict(), expected.state_dict()
    assert left.keys() == right.keys()
    for key in left:
        if left[key].numel() == right[key].numel() == 1:
            torch.testing.assert_close(left[key], right[key], rtol=rtol, atol=0, msg=key)
    assert abs(found.report.loss_after - expected.report.loss_after) < 1e-6
    ours, theirs = (outputs(c, world.features, world.head).softmax(1) for c in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
