"""Fits to rows of which next to none is wrong: nothing may grow without end, nothing may harm."""

import warnings
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from method_cases import drawn, nll64
from scipy.optimize import minimize_scalar
from torch import nn

from featcal import CalibrationWarning
from featcal.core.batch import Batch
from featcal.core.calibrator import METHODS
from featcal.core.fit import FEW, brier, ece, nll
from featcal.core.text import parse

ROWS, CLASSES, WIDTH = 200, 10, 12
OPTIONS = {  # what else a likelihood decides, and smaller forms of what takes long
    "temperature": (
        "temperature",
        "temperature(grid=True)",
        "temperature(criterion='brier')",
        "temperature(criterion='ece')",
    ),
    "ensemble": ("ensemble", "ensemble(criterion='brier')"),
    "classwise": ("classwise", "classwise(reading='logit')", "classwise(grid=True)"),
    "parameterised": ("parameterised(top=2, hidden=1, restarts=1)",),
    "group": ("group(partitions=2)", "group(partitions=2, base='ensemble')"),
    "clip": ("clip", "clip | temperature"),
}
RECIPES = [text for name in METHODS for text in OPTIONS.get(name, (name,))]


def rows(n, *, margin=3.0, seed=0):
    """Features whose first columns are logits, and the class that these put ahead."""
    draw = torch.Generator().manual_seed(seed)
    features = torch.randn(n, WIDTH, generator=draw)
    top = torch.randint(CLASSES, (n,), generator=draw)
    ahead = features[:, :CLASSES].amax(1) + margin + torch.randn(n, generator=draw).abs()
    features[torch.arange(n), top] = ahead
    return features, top


def layer():
    head = nn.Linear(WIDTH, CLASSES, bias=False)
    head.weight.data = torch.eye(CLASSES, WIDTH)
    return head


def expected(logits, top, accuracy):
    """The NLL where the prediction is right with this chance, whatever the row says."""
    log_p = logits.double().log_softmax(1)
    right = log_p.gather(1, top[:, None])[:, 0]
    other = (log_p.sum(1) - right) / (CLASSES - 1)
    return -float((accuracy * right + (1 - accuracy) * other).mean())


@pytest.mark.filterwarnings("ignore::featcal.CalibrationWarning")
@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_that_are_all_right_teach_nothing_harmful(recipe):
    (features, labels), (train, known), (fresh, top) = (
        rows(n, seed=seed) for seed, n in enumerate((ROWS, 100, 2000))
    )
    # `auto` without features: it tries fewer recipes then.
    seen = None if recipe == "auto" else features
    head = None if seen is None else layer()
    data = Batch(features[:, :CLASSES], labels, seen)
    fitted = parse(recipe).fit(data, head, train=Batch(None, known, train))
    with torch.no_grad():
        after = fitted.wrap(head)(fresh if head else fresh[:, :CLASSES])
    for accuracy in (0.995, 0.999, 1.0):
        before = expected(fresh[:, :CLASSES], top, accuracy)
        assert expected(after, top, accuracy) < before + 1e-9
    step = fitted.report.steps[-1]
    assert step.converged
    if "temperature" in step.values:
        assert 0.2 < step.values["temperature"] <= 1


@pytest.mark.parametrize("wrong", [0, FEW])
@pytest.mark.parametrize("method", ["temperature", "ensemble", "classwise", "parameterised"])
def test_a_published_form_says_where_too_few_rows_are_wrong(method, wrong):
    features, labels = rows(ROWS)
    labels[:wrong] = (labels[:wrong] + 1) % CLASSES
    data, recipe = Batch(features[:, :CLASSES], labels), f"{method}(reference=True)"
    said = f"^0 of 200 predictions are wrong, too few for {method}.reference=True"
    with nullcontext() if wrong else pytest.warns(CalibrationWarning, match=said):
        report = parse(recipe).fit(data).report
    assert (not wrong) == ("too few" in report.steps[0].message)  # what the command line prints
    assert not report.noop
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parse(method).fit(data)


@pytest.mark.parametrize("text", ["all_labels", "per_label"])
def test_published_forms_for_several_labels_say_so_too(text):
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(ROWS, 2, generator=draw)
    logits += 3 * logits.sign()
    data = Batch(logits, (logits > 0).long())
    with pytest.warns(CalibrationWarning, match="0 of (2|4)00 predictions are wrong"):
        parse(f"{text}(temperature(reference=True))").fit(data)


def independent(logits, labels, smoothing=0.0):
    def loss(log_b):
        scaled = logits.double() * float(np.exp(log_b))
        return float(F.cross_entropy(scaled, labels, label_smoothing=smoothing))

    return 1 / float(np.exp(minimize_scalar(loss, bounds=(-4, 4), options={"xatol": 1e-10}).x))


@pytest.mark.parametrize("wrong", [0, 4, FEW - 1, FEW])
def test_one_more_row_of_any_label_fades_as_wrong_rows_come_in(wrong):
    features, labels = rows(ROWS)
    logits = features[:, :CLASSES] / 3
    labels[:wrong] = (labels[:wrong] + 1) % CLASSES
    weight = 1 - wrong / FEW
    found = float(parse("temperature").fit(Batch(logits, labels)).temperature)
    assert found == pytest.approx(independent(logits, labels, weight / (ROWS + weight)), rel=2e-6)


def test_rows_that_ask_for_less_confidence_are_believed():
    features, labels = rows(ROWS)
    logits = 3 * features[:, :CLASSES]
    labels[:3] = (labels[:3] + 1) % CLASSES
    found = float(parse("temperature").fit(Batch(logits, labels)).temperature)
    assert found > 1
    assert found == pytest.approx(independent(logits, labels), rel=2e-6)


@pytest.mark.parametrize("recipe", ["temperature", "vector", "sample"])
def test_caution_never_takes_confidence_away(recipe):
    """One more wrong row would ask for T > 1, of which the rows themselves know nothing."""
    features, labels = rows(ROWS, margin=12.0)
    fitted = parse(recipe).fit(Batch(features[:, :CLASSES], labels))
    assert fitted.report.noop
    assert fitted.report.loss_after == fitted.report.loss_before


def test_reports_are_of_the_labels_as_they_are():
    features, labels = rows(ROWS)
    logits = features[:, :CLASSES]
    fitted = parse("temperature | vector").fit(Batch(logits, labels), mode="sequential")
    first, last = fitted.report.steps
    with torch.no_grad():
        after = nll64(fitted.wrap()(logits), labels)
    assert first.loss_before == pytest.approx(nll64(logits, labels), rel=1e-6)
    assert first.loss_after == last.loss_before
    assert fitted.report.loss_after == last.loss_after == pytest.approx(after, rel=1e-5)


@pytest.mark.parametrize("loss", [nll, brier, ece], ids=lambda loss: loss.name)
def test_a_smoothed_loss_is_the_mean_over_labels(loss):
    logits, labels = drawn(n=50)
    every = [loss(logits, Batch(logits, torch.full_like(labels, k))) for k in range(4)]
    wanted = 0.9 * loss(logits, Batch(logits, labels)) + 0.1 * torch.stack(every).mean(0)
    torch.testing.assert_close(loss.smoothed(0.1)(logits, Batch(logits, labels)), wanted)
    assert loss.smoothed(0.0) is loss
