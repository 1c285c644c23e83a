"""Sample temperature against autograd, refits without a row, numpy, and made data."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from contract_cases import make_world
from scipy.optimize import minimize

from featcal import Batch, InputError, Temperature
from featcal.core.batch import Through, stored_logits
from featcal.core.fit import Facts, Problem, brier, nll
from featcal.methods.sample import (
    RIDGE,
    SIZE,
    TOP,
    Rows,
    SampleTemperature,
    _Fit,
    curves,
    paired,
    terms_of,
)

NAMES = ("gap", "energy", "spread", "norm", "sparsity")


@pytest.fixture(scope="module")
def world():
    return make_world(n=900, d=12, k=4, heat=1.7)


@pytest.fixture(scope="module")
def fitted(world):
    return SampleTemperature().fit(Batch(world.logits, world.labels, world.features), world.head)


def the_fit(world, rows=slice(None), terms=None):
    """The inside of a fit to some rows."""
    batch = Batch(world.logits[rows].double(), world.labels[rows], world.features[rows])
    data = Through([batch], stored_logits)
    facts = Facts(len(batch), 4, 12, torch.device("cpu"))
    problem = Problem([batch], data, world.head, nll, facts)
    return _Fit(SampleTemperature(terms=terms), problem)


def test_the_terms_are_what_their_names_say(world):
    z, x = world.logits.double().numpy(), world.features.double().numpy()
    ranked = np.sort(z, 1)
    norm = np.linalg.norm(x, axis=1)
    expected = [
        np.log1p(ranked[:, -1] - ranked[:, -2]),
        np.log(np.log(np.exp(z).sum(1)) - z.mean(1)),
        np.log(z.std(1)),
        np.log(norm),
        np.log(np.abs(x).sum(1) / norm),
    ]
    logits = world.logits.double()
    found = terms_of(NAMES, world.features.double(), logits, logits.argmax(1, keepdim=True))
    np.testing.assert_allclose(found.T.numpy(), expected, rtol=1e-10, atol=1e-12)


def test_the_curves_are_those_of_autograd(world):
    logits, labels = world.logits[:50].double(), world.labels[:50]
    top = logits.argmax(1)
    for u, b in ((0.0, 0.0), (-0.7, 0.4), (0.5, -0.6)):
        at = torch.tensor([[u, b]] * 50, dtype=torch.float64, requires_grad=True)
        raised = logits * at[:, :1].exp() + at[:, 1:] * F.one_hot(top, 4)
        value = F.cross_entropy(raised, labels, reduction="none")
        (slope,) = torch.autograd.grad(value.sum(), at, create_graph=True)
        bend = [torch.autograd.grad(s.sum(), at, retain_graph=True)[0] for s in slope.unbind(1)]
        expected = [value, *slope.unbind(1), bend[0][:, 0], bend[0][:, 1], bend[1][:, 1]]
        below, own, ones = logits.sort(1).values.diff()[:, -1], torch.arange(50), torch.ones(50)
        rows = Rows(logits, labels, top, -below, ones[:, None], own, ones)
        *found, kept = curves(rows, ones.double() * math.exp(u), ones.double() * b)
        wanted = torch.stack(expected).detach()
        torch.testing.assert_close(torch.stack(found), wanted, rtol=1e-9, atol=1e-12)
        ahead = raised.detach().argmax(1) == top
        assert torch.equal(kept[ahead], found[0][ahead])
        assert b >= 0 or not ahead.all()


def test_newton_ends_where_scipy_does(world):
    fit = the_fit(world)
    rows = list(fit.rows(sampled=False))
    at, _, settled = fit.newton(lambda: rows, 900, 1.0, torch.zeros(fit.size).double())
    assert settled
    (own,) = rows
    ridge = np.array([0.0] + [RIDGE["a"]] * 5 + [RIDGE["b"]] + [RIDGE["c"]] * 4) / 900
    # Energy, spread and norm measure size, and share what is expected of it; gap and sparsity none.
    expected = np.array([0, 0, SIZE / 3, SIZE / 3, SIZE / 3, 0, TOP, 0, 0, 0, 0])

    def objective(point):
        p = torch.tensor(point, requires_grad=True)
        u = own.terms @ p[:6] + p[7:][own.top]
        raised = own.logits * fit.inverse * u.exp()[:, None] + p[6] * F.one_hot(own.top, 4)
        away = p - torch.tensor(expected)
        value = F.cross_entropy(raised, own.labels) + (torch.tensor(ridge) * away * away).sum() / 2
        value.backward()
        return value.item(), p.grad.numpy()

    found = minimize(objective, np.zeros(11), jac=True, options={"gtol": 1e-9, "maxiter": 500})
    assert objective(at.numpy() + expected)[0] == pytest.approx(found.fun, abs=1e-9)
    np.testing.assert_allclose(at.numpy() + expected, found.x, atol=1e-4)


def test_leave_one_out_is_that_of_refits(world):
    fit = the_fit(world, slice(0, 120), "norm, gap")
    rows = list(fit.rows(sampled=False))
    at, system, _ = fit.newton(lambda: rows, 120, 1.0, torch.zeros(fit.size).double())
    (own,) = rows
    total = []
    for out in range(120):
        rest = torch.arange(120) != out
        part = [Rows(*(getattr(own, key)[rest] for key in vars(own)))]
        there, _, _ = fit.newton(lambda part=part: part, 119, 1.0, at)
        alone = Rows(*(getattr(own, key)[~rest] for key in vars(own)))
        total.append(float(fit.at(alone, there)[0]))
    (found,) = fit.left_out(rows, at, system, 120)
    assert float(found.mean()) == pytest.approx(np.mean(total), rel=2e-3)
    assert np.corrcoef(found, total)[0, 1] > 0.999


def test_the_error_of_a_gain_is_that_over_samples():
    draw = np.random.default_rng(5)
    group = np.repeat(np.arange(40), draw.integers(1, 9, 40))
    before = draw.normal(size=len(group))
    now = before - 0.1 - 0.3 * draw.normal(size=40)[group]
    parts = [np.flatnonzero(group < 25), np.flatnonzero(group >= 25)]
    rows = [
        Rows(*[torch.zeros(1)] * 5, torch.tensor(group[part]), torch.zeros(1)) for part in parts
    ]
    split = ([torch.tensor(values[part]) for part in parts] for values in (before, now))
    gain, error = paired(rows, *split)
    assert gain == pytest.approx((before - now).mean())
    sums = np.bincount(group, before - now - (before - now).mean())
    assert error == pytest.approx(np.sqrt((sums**2).sum()) / len(group))


def test_what_is_expected_rules_with_few_rows_and_not_with_many():
    draw = np.random.default_rng(1)

    def drawn(rows, pull):
        z = draw.normal(size=(rows, 6)) * np.exp(draw.normal(size=(rows, 1)) * 0.3) * 3
        size = np.log(z.std(1))
        true = z * np.exp(pull * (size - size.mean()))[:, None] / 1.3
        labels = (true + draw.gumbel(size=z.shape)).argmax(1)
        return Batch(torch.tensor(z, dtype=torch.float32), torch.tensor(labels))

    few = SampleTemperature(terms="spread").fit(drawn(60, -0.9)).report.steps[0]
    assert -1 < few.values["spread"] < -0.2
    against = SampleTemperature(terms="spread").fit(drawn(8000, 0.6)).report.steps[0]
    assert against.values["spread"] == pytest.approx(0.6, abs=0.15)
    assert against.details["share"] == 1


def test_it_finds_a_temperature_that_grows_with_the_features(world):
    draw = np.random.default_rng(3)
    x = draw.normal(size=(4000, 12)) * np.exp(draw.normal(size=(4000, 1)) * 0.4)
    z = x @ draw.normal(size=(12, 5))
    size = np.log(np.linalg.norm(x, axis=1))
    true = z * np.exp(-0.8 * (size - size.mean()))[:, None] / 1.5
    labels = torch.tensor((true + draw.gumbel(size=z.shape)).argmax(1))
    logits, features = (torch.tensor(v, dtype=torch.float32) for v in (z, x))
    head = torch.nn.Linear(12, 5, bias=False)
    head.weight.data = torch.linalg.lstsq(features, logits).solution.T
    batch = Batch(None, labels, features)
    found = SampleTemperature(terms="norm").fit(batch, head)
    values = found.report.steps[0].values
    assert values["norm"] == pytest.approx(-0.8, abs=0.1)
    assert values["temperature"] == pytest.approx(1.5, rel=0.05)
    assert "long feature vectors were the most overconfident" in found.report.steps[0].message
    one = Temperature().fit(batch, head)
    assert found.report.loss_after < one.report.loss_after - 0.02


def test_where_one_temperature_is_true_it_loses_next_to_nothing():
    draw = np.random.default_rng(0)
    z = torch.tensor(draw.normal(size=(20600, 5)) * 3, dtype=torch.float32)
    labels = torch.tensor((z.numpy() / 2 + draw.gumbel(size=z.shape)).argmax(1))
    fit, test = Batch(z[:600], labels[:600]), (z[600:], labels[600:])
    losses = []
    for method in (Temperature(), SampleTemperature()):
        method.fit(fit)
        with torch.no_grad():
            losses.append(float(F.cross_entropy(method(test[0], lambda rows: rows), test[1])))
    assert losses[1] < losses[0] + 0.002


@pytest.mark.parametrize("share", [1.0, 0.4])
def test_the_loss_it_reports_is_that_of_its_logits(world, share, monkeypatch):
    def chosen(fit, details):
        fit.starts = {1.0: torch.zeros_like(fit.expected)}
        return 1.0, share

    monkeypatch.setattr(_Fit, "chosen", chosen)
    batch = Batch(world.logits, world.labels, world.features)
    found = SampleTemperature().fit(batch, world.head)
    with torch.no_grad():
        own = F.cross_entropy(found(world.features, world.head), world.labels)
    assert found.report.loss_after == pytest.approx(float(own), abs=5e-6)


def test_gradients_flow_through_it(world, fitted):
    features = world.features[:30].double().requires_grad_()
    head = torch.nn.Linear(12, 4).double().requires_grad_(False)
    head.load_state_dict(world.head.state_dict())
    weight = torch.randn(30, 4, generator=torch.Generator().manual_seed(0)).double()
    (fitted(features, head) * weight).sum().backward()
    step = 1e-6 * torch.randn(30, 12, generator=torch.Generator().manual_seed(1)).double()
    with torch.no_grad():
        ends = [(fitted(features + side * step, head) * weight).sum() for side in (1, -1)]
    torch.testing.assert_close(
        (features.grad * step).sum() * 2, ends[0] - ends[1], rtol=1e-4, atol=0
    )


def test_it_reads_logits_alone_where_there_are_no_features(world, fitted):
    found = SampleTemperature().fit(Batch(world.logits, world.labels))
    assert len(found.weights) == 3
    assert len(fitted.weights) == 5
    assert fitted.needs_features
    assert not found.needs_features


def test_few_rows_and_extreme_ones_keep_finite_probabilities_and_predictions(world, fitted):
    wild = torch.cat([world.features[:20] * 1e6, torch.zeros(1, 12), world.features[:20] * 1e-9])
    with torch.no_grad():
        found, own = fitted(wild, world.head), world.head(wild)
    assert found.isfinite().all()
    assert torch.equal(found.argmax(1), own.argmax(1))


def test_refusals(world):
    for terms in ("size", "", "norm, norm"):
        with pytest.raises(InputError, match=r"terms is .*: choose among gap"):
            SampleTemperature(terms=terms)
    with pytest.raises(InputError, match="works on features"):
        SampleTemperature(terms="norm").fit(Batch(world.logits, world.labels))
    with pytest.raises(InputError, match="fitted by nll alone"):
        SampleTemperature().fit(Batch(world.logits, world.labels), loss=brier)
