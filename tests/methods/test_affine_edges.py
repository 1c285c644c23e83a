"""Vector, matrix and Dirichlet scaling on data that is hard, odd or too little."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from method_cases import drawn_affine as drawn
from method_cases import log_probs

from featcal import Batch, CalibrationWarning, InputError, parse
from featcal.methods import VectorScaling
from featcal.methods.affine import descend

PLAIN_MATRIX = "matrix(off_diagonal=0, bias=0, ridge=0)"
DEFAULTS = ["vector", "matrix", "dirichlet"]


def nll64(logits, labels):
    return float(F.cross_entropy(torch.as_tensor(logits).double(), torch.as_tensor(labels)))


@pytest.mark.parametrize("recipe", DEFAULTS)
def test_classes_without_rows_stay_finite_and_rare(recipe):
    logits, labels = drawn(n=500, k=6)
    labels = labels % 3  # classes 3, 4 and 5 never occur
    found = parse(recipe).fit(Batch(logits, labels))
    assert found.report.steps[0].converged
    out = log_probs(found, logits)
    assert torch.isfinite(out).all()
    assert out.exp()[:, 3:].sum(1).mean() < 0.1
    assert out.min() > -60
    assert found.report.loss_after < found.report.loss_before


@pytest.mark.parametrize("recipe", DEFAULTS)
def test_all_predictions_right(recipe):
    logits, _ = drawn(n=200)
    with pytest.warns(CalibrationWarning, match=f"{recipe} starts from.*its cap.*separate"):
        found = parse(recipe).fit(Batch(logits, logits.argmax(1)))
    assert torch.isfinite(found.wrap()(logits)).all()
    assert torch.equal(found.wrap()(logits).argmax(1), logits.argmax(1))


@pytest.mark.filterwarnings("ignore::featcal.CalibrationWarning")
@pytest.mark.parametrize("recipe", [*DEFAULTS, "vector(ridge=0)", PLAIN_MATRIX])
@pytest.mark.parametrize(
    ("logits", "labels"),
    [
        (torch.tensor([[3.0, 1.0, 0.0], [0.0, 2.0, 1.0]] * 20), torch.tensor([1, 0] * 20)),
        (torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0])),
        (torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([2])),
        (torch.full((20, 3), 7.0), torch.tensor([0, 1, 1, 1] * 5)),
        (torch.zeros(20, 3), torch.zeros(20, dtype=torch.int64)),
        (torch.tensor([[1.0, 2.0]]).repeat(30, 1), torch.tensor([0, 1, 1] * 10)),
        (torch.tensor([[1e4, 0.0], [0.0, 1e4], [1e4, 0.0]] * 9), torch.tensor([0, 1, 1] * 9)),
        (torch.randn(9, 1), torch.zeros(9, dtype=torch.int64)),
    ],
    ids=["wrong", "row", "wrong row", "constant", "label", "duplicates", "huge", "one class"],
)
def test_hard_data_gives_finite_logits_no_worse_than_before(recipe, logits, labels):
    found = parse(recipe).fit(Batch(logits, labels))
    out = found.wrap()(logits)
    assert torch.isfinite(out).all()
    assert nll64(out, labels) <= nll64(logits, labels) + 1e-6
    assert found.report.noop == torch.equal(out, logits)


def test_one_logit_is_fitted_as_two():
    draw = torch.Generator().manual_seed(0)
    z = 3 * torch.randn(90, 1, generator=draw)
    labels = (torch.rand(90, generator=draw) < z[:, 0].sigmoid()).long()
    one = VectorScaling().fit(Batch(z, labels))
    two = VectorScaling().fit(Batch(torch.cat([torch.zeros_like(z), z], 1), labels))
    assert all(torch.equal(a, b) for a, b in zip(one.buffers(), two.buffers(), strict=True))


def many_classes():
    draw = np.random.default_rng(0)
    labels = torch.arange(2000) % 1000
    logits = torch.tensor(draw.normal(size=(2000, 1000)), dtype=torch.float32)
    logits[torch.arange(2000), labels] += torch.tensor(draw.normal(3.5, 2, 2000)).float()
    return Batch(logits, labels)


def test_a_thousand_classes_with_two_rows_each():
    batch = many_classes()
    found = VectorScaling().fit(batch)
    assert found.report.steps[0].converged
    assert found.report.steps[0].values["ridge"] >= 1000  # two rows a class bear no less
    assert found.report.loss_after < found.report.loss_before


@pytest.mark.parametrize("recipe", ["matrix", "dirichlet"])
def test_a_matrix_for_a_thousand_classes_is_refused_at_once(recipe):
    with pytest.raises(
        InputError, match=rf"{recipe}: 1000 classes.*1,000,000 values.*use sms or svs, or give off"
    ):
        parse(recipe).fit(many_classes())


def test_a_likelihood_without_a_maximum_is_said():
    draw = np.random.default_rng(0)
    logits = torch.tensor(draw.normal(size=(60, 30)) * 2)
    labels = (logits + torch.tensor(draw.gumbel(size=logits.shape))).argmax(1)
    with pytest.warns(CalibrationWarning, match="matrix fits every row.*give a stronger penalty"):
        found = parse(PLAIN_MATRIX).fit(Batch(logits, labels))
    assert torch.isfinite(found.wrap()(logits)).all()
    assert not found.report.steps[0].converged


def test_a_search_that_was_cut_short_is_said(monkeypatch):
    def hasty(task, pull):
        return descend(task, pull, iterations=2)

    monkeypatch.setattr("featcal.methods.affine.descend", hasty)
    logits, labels = drawn()
    with pytest.warns(CalibrationWarning, match=r"vector had not settled after \d+ passes"):
        found = VectorScaling().fit(Batch(logits, labels))
    assert found.report.loss_after < found.report.loss_before
