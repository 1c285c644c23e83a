"""The descent behind all affine maps: its curvature, its metric, and where it ends."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from featcal import Batch
from featcal.core.loss import nll
from featcal.methods import affine as affine_fit
from featcal.methods.affine import Task, affine, by_kind, descend, parts


def drawn(n=200, k=3, *, seed=0):
    draw = np.random.default_rng(seed)
    logits = torch.tensor(draw.normal(size=(n, k)) * 2)
    labels = (logits * 0.6 + torch.tensor(draw.gumbel(size=logits.shape))).argmax(1)
    return Batch(logits, labels)


def summed(values, batch):
    out = affine(batch.logits, *parts(values))
    return F.cross_entropy(out, batch.labels, reduction="sum")


@pytest.mark.parametrize("matrix", [False, True])
def test_the_curvature_is_that_of_autograd(matrix):
    batch = drawn()
    centre = by_kind(3, matrix=matrix, diagonal=0.7, bias=0.1, off_diagonal=0.05)
    hessian = torch.autograd.functional.hessian(lambda v: summed(v, batch), centre)
    blocks = torch.stack([hessian[c, :, c] for c in range(3)])
    halves = [batch.rows(slice(0, 80)), batch.rows(slice(80, 80)), batch.rows(slice(80, None))]
    task = Task.of(halves, 200, nll, centre)
    torch.testing.assert_close(task.bend, blocks)


def test_large_matrices_keep_the_diagonals_alone(monkeypatch):
    batch = drawn()
    centre = by_kind(3, matrix=True, diagonal=0.7)
    full = Task.of([batch], 200, nll, centre)
    pull = by_kind(3, matrix=True, diagonal=1.0, bias=2.0, off_diagonal=5.0)
    exact = descend(full, pull)
    monkeypatch.setattr(affine_fit, "BLOCKS", 0)
    slim = Task.of([batch], 200, nll, centre)
    torch.testing.assert_close(slim.bend, full.bend.diagonal(dim1=1, dim2=2))
    torch.testing.assert_close(descend(slim, pull).values, exact.values, rtol=0, atol=1e-6)


@pytest.mark.parametrize("matrix", [False, True])
def test_loss_and_pull_balance_where_it_ends(matrix):
    batch = drawn()
    centre = by_kind(3, matrix=matrix, diagonal=0.9)
    pull = by_kind(3, matrix=matrix, diagonal=0.5, bias=3.0, off_diagonal=7.0)
    found = descend(Task.of([batch], 200, nll, centre), pull)
    values = found.values.clone().requires_grad_()
    loss = summed(values, batch) + (pull * (values - centre).square()).sum()
    (slope,) = torch.autograd.grad(loss, values)
    assert float(slope.abs().max()) < 1e-5
    assert found.converged


def test_it_ends_at_the_same_place_from_anywhere():
    task = Task.of([drawn()], 200, nll, by_kind(3, matrix=True, diagonal=0.9))
    pull = by_kind(3, matrix=True, diagonal=0.5, bias=0.5, off_diagonal=0.5)
    far = by_kind(3, matrix=True, diagonal=-2.0, bias=1.0, off_diagonal=1.0)
    here, there = descend(task, pull), descend(task, pull, far)
    torch.testing.assert_close(here.values, there.values, rtol=0, atol=1e-6)


def test_logits_whose_sum_hardly_varies_converge_all_the_same():
    """As those of real networks do: without the metric this takes thousands of steps."""
    batch = drawn(n=500, k=5)
    centred = batch.logits - batch.logits.mean(1, keepdim=True)
    draw = torch.randn(500, 1, generator=torch.Generator().manual_seed(0)).double()
    nearly = Batch(centred + 1e-4 * draw, batch.labels)
    task = Task.of([nearly], 500, nll, by_kind(5, matrix=True, diagonal=0.6))
    found = descend(task, by_kind(5, matrix=True, diagonal=0.0))
    assert found.converged
    assert found.steps < 150


def test_no_curvature_and_no_pull_stay_where_they_are():
    certain = Batch(torch.tensor([[1e5, 0.0], [0.0, 1e5]]), torch.tensor([0, 1]))
    centre = by_kind(2, matrix=True, diagonal=1.0)
    found = descend(Task.of([certain], 2, nll, centre), torch.zeros_like(centre))
    assert torch.equal(found.values, centre)
