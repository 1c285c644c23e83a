"""L-BFGS over batches against scipy, and the published search against torch's own loop."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import optimize

from featcal import Batch
from featcal.core.batch import stored_logits
from featcal.core.gradient import gathered, minimize, published_lbfgs


def drawn(n=300, k=4, *, seed=0, dtype=torch.float32):
    draw = np.random.default_rng(seed)
    logits = draw.normal(size=(n, k)) * 3
    labels = (logits / 2 + draw.gumbel(size=logits.shape)).argmax(1)
    return torch.tensor(logits, dtype=dtype), torch.tensor(labels)


def biased(at, batch):
    """NLL of logits with one bias a class."""
    return F.cross_entropy(stored_logits(batch) + at, batch.labels, reduction="sum")


def ridge(at):
    return 0.05 * at.square().sum()


# --- minimize ---------------------------------------------------------------------------------


def test_minimize_agrees_with_scipy():
    logits, labels = drawn()

    def score(x):
        at = torch.tensor(x, requires_grad=True)
        value = F.cross_entropy(logits.double() + at, labels) + ridge(at)
        return value.item(), torch.autograd.grad(value, at)[0].numpy()

    exact = optimize.minimize(score, np.zeros(4), jac=True, tol=1e-12)
    found = minimize(biased, torch.zeros(4), [Batch(logits, labels)], 300, penalty=ridge)
    assert found.converged
    assert found.value == pytest.approx(exact.fun, abs=1e-10)
    assert found.at.numpy() == pytest.approx(exact.x, abs=1e-5)
    assert found.at.dtype == torch.float64
    assert found.steps < 60


def test_minimize_solves_least_squares_in_closed_form():
    draw = np.random.default_rng(1)
    matrix, target = draw.normal(size=(80, 6)), draw.normal(size=80)

    def squares(at, batch):
        return (stored_logits(batch) @ at - batch.features[:, 0]).square().sum()

    data = [
        Batch(
            torch.tensor(matrix[a:b]),
            torch.zeros(b - a, dtype=torch.long),
            torch.tensor(target[a:b, None]),
        )
        for a, b in ((0, 30), (30, 30), (30, 80))
    ]
    found = minimize(squares, torch.zeros(6), data, 80)
    exact = np.linalg.lstsq(matrix, target)[0]
    assert found.at.numpy() == pytest.approx(exact, abs=1e-5)


def test_the_objective_sees_float64_logits():
    logits, labels = drawn()
    seen = set()

    def watching(at, batch):
        seen.add(stored_logits(batch).dtype)
        return biased(at, batch)

    minimize(watching, torch.zeros(4), [Batch(logits, labels)], 300)
    assert seen == {torch.float64}


def test_the_cut_into_batches_changes_rounding_alone():
    logits, labels = drawn(dtype=torch.float64)
    whole = minimize(biased, torch.zeros(4), [Batch(logits, labels)], 300, penalty=ridge)
    parts = [Batch(logits[a:b], labels[a:b]) for a, b in ((0, 1), (1, 200), (200, 300))]
    cut = minimize(biased, torch.zeros(4), parts, 300, penalty=ridge)
    torch.testing.assert_close(cut.at, whole.at, rtol=0, atol=1e-6)


def test_the_result_is_never_worse_than_the_start():
    def trap(at, batch):
        return torch.where(at.abs() < 1e-3, at.square() * 0, 1e3 + at.abs()).sum()

    data = [Batch(torch.zeros(1, 1), torch.zeros(1, dtype=torch.long))]
    found = minimize(trap, torch.zeros(1), data, 1)
    assert found.value == 0
    assert found.at.tolist() == [0]


def test_too_few_iterations_are_said_so():
    def valley(at, batch):
        return 100 * (at[1] - at[0] ** 2) ** 2 + (1 - at[0]) ** 2  # Rosenbrock

    data = [Batch(torch.zeros(1, 1), torch.zeros(1, dtype=torch.long))]
    start = torch.tensor([-1.2, 1.0])
    short = minimize(valley, start, data, 1, iterations=3)
    assert not short.converged
    assert short.value < 24.2
    full = minimize(valley, start, data, 1)
    assert full.converged
    assert full.at.tolist() == pytest.approx([1, 1], abs=1e-5)


def test_no_gradient_is_left_on_anything_of_the_caller():
    logits, labels = drawn()
    start = torch.zeros(4)
    weight = torch.ones(4, requires_grad=True)

    def with_weight(at, batch):
        return biased(at * weight.double(), batch)

    with torch.no_grad():
        found = minimize(with_weight, start, [Batch(logits, labels)], 300, iterations=5)
    assert weight.grad is None
    assert start.tolist() == [0, 0, 0, 0]
    assert not found.at.requires_grad


# --- the published search ---------------------------------------------------------------------


def test_the_published_search_is_torchs_own_lbfgs_of_those_settings():
    logits, labels = drawn(n=500)
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.LBFGS([parameter], lr=0.02, max_iter=1000)

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(logits / parameter, labels)
        loss.backward()
        return loss

    optimizer.step(closure)
    found = published_lbfgs(lambda at, z: z / at, torch.ones(1), [Batch(logits, labels)], 4)
    assert float(found.at) == pytest.approx(parameter.item(), abs=1e-6)
    assert found.value == pytest.approx(float(F.cross_entropy(logits / found.at, labels)), abs=1e-6)


def test_the_published_search_stops_a_little_short():
    logits, labels = drawn(n=500)
    exact = optimize.minimize_scalar(
        lambda u: float(F.cross_entropy(logits.double() / math.exp(u), labels)),
        bounds=(-3, 3),
        method="bounded",
        options={"xatol": 1e-9},
    )
    found = published_lbfgs(lambda at, z: z / at, torch.ones(1), [Batch(logits, labels)], 4)
    assert float(found.at) == pytest.approx(math.exp(exact.x), rel=0.01)
    assert float(found.at) != pytest.approx(math.exp(exact.x), rel=1e-6)


# --- gathering --------------------------------------------------------------------------------


def test_gathered_is_all_rows_in_float32():
    logits, labels = drawn(dtype=torch.float64)
    parts = [Batch(logits[a:b], labels[a:b]) for a, b in ((0, 7), (7, 7), (7, 300))]
    z, y = gathered(parts, 4)
    assert z.dtype == torch.float32
    assert torch.equal(z, logits.float())
    assert torch.equal(y, labels)


def test_gathered_of_no_rows_knows_its_width():
    z, y = gathered([], 6)
    assert z.shape == (0, 6)
    assert y.shape == (0,)
    assert y.dtype == torch.int64
