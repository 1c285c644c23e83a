"""L-BFGS over batches and the weights of a mixture, against scipy, a grid and plain EM."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize

from featcal import Batch
from featcal.core.batch import stored_logits
from featcal.core.gradient import likeliest_weights, minimize, published_lbfgs, simplex_minimum


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


def test_every_pass_counts_empty_batches_do_not_and_a_start_at_the_minimum_stays():
    class Counts(list):
        passes = 0

        def __iter__(self):
            self.passes += 1
            return super().__iter__()

    logits, labels = drawn()
    data = Counts([Batch(logits[:0], labels[:0]), Batch(logits[:100], labels[:100])])
    data += [Batch(logits[100:], labels[100:])]
    found = minimize(biased, torch.zeros(4), data, 300, penalty=ridge)
    assert found.steps == data.passes
    again = minimize(biased, found.at, data, 300, penalty=ridge)
    assert again.steps <= 3
    assert again.value <= found.value


def test_a_descent_into_nothing_gives_back_its_start():
    def cliff(at, batch):
        return torch.where(at < 0.9, at * torch.nan, at.square()).sum()

    data = [Batch(torch.zeros(1, 1), torch.zeros(1, dtype=torch.long))]
    found = minimize(cliff, torch.ones(1), data, 1)
    assert 0.81 <= found.value <= 1
    assert float(found.at) ** 2 == found.value


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


@given(st.integers(0, 200))
@settings(max_examples=25, deadline=None)
def test_the_simplex_minimum_is_that_of_a_fine_grid(seed):
    draw = np.random.default_rng(seed)
    root = draw.normal(size=(3, 3))
    products, hits = root @ root.T, draw.normal(size=3)
    found = simplex_minimum(2 * products, -2 * hits)
    assert found.min() >= 0
    assert found.sum() == pytest.approx(1)

    def value(w):
        return w @ products @ w - 2 * hits @ w

    steps = np.arange(41) / 40
    grid = [np.array([a, b, 1 - a - b]) for a in steps for b in steps if a + b <= 1]
    assert value(found) <= min(map(value, grid)) + 1e-9


def test_of_equal_minima_of_the_simplex_a_corner_wins():
    same = np.ones((3, 3))
    assert simplex_minimum(same, np.full(3, -1.0)).tolist() == [1, 0, 0]
    assert simplex_minimum(same, np.array([-0.5, -1.0, -1.0])).tolist() == [0, 1, 0]
    twice = np.array([[2.0, 0, 0], [0, 2, 2], [0, 2, 2]])  # the last two parts are the same
    np.testing.assert_allclose(simplex_minimum(twice, np.zeros(3)), [0.5, 0.5, 0], atol=1e-12)


@pytest.mark.parametrize("seed", range(2))
def test_long_em_ends_at_the_same_likelihood(seed):
    draw = np.random.default_rng(seed)
    parts = np.log(draw.random(size=(300, 3)) ** 2 + 1e-3)
    value, weights = likeliest_weights(torch.from_numpy(parts), 300)
    chances, em = np.exp(parts), np.full(3, 1 / 3)
    for _ in range(5_000):
        shares = chances * em
        em = (shares / shares.sum(1, keepdims=True)).mean(0)
    assert value == pytest.approx(-np.log(chances @ weights).mean(), abs=1e-12)
    assert value <= -np.log(chances @ em).mean() + 1e-10
    np.testing.assert_allclose(weights, em, atol=1e-3)
