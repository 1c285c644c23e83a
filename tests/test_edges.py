"""Odd data, on every method: a sound result or one clear sentence, never NaN."""

import warnings

import pytest
import torch
from torch import nn

from featcal import METHODS, Batch, CalibrationWarning, InputError, parse
from featcal.heads.head import as_head

pytestmark = pytest.mark.no_cover  # other rows for known lines
RECIPES = sorted(METHODS) + [f"clip | {name}" for name in ("temperature", "group", "isotonic")]


def scene(features, labels, classes, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    head = nn.Linear(features.shape[1], classes, device="meta")
    weight = torch.randn(classes, features.shape[1], generator=generator) * scale
    head.weight = nn.Parameter(weight)
    head.bias = nn.Parameter(torch.zeros(classes))
    return features, labels, head


def drawn(rows, width=12, seed=1):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).relu()


def two_rows_a_class():
    return scene(drawn(2000), torch.arange(2000) % 1000, 1000)


def absent_classes():
    return scene(drawn(300), torch.arange(300) % 3, 10)


def all_right():
    features, _, head = scene(drawn(200), torch.zeros(200), 5)
    return features, head(features).argmax(1), head


def all_wrong():
    features, _, head = scene(drawn(200), torch.zeros(200), 5)
    return features, head(features).argmin(1), head


def constant_logits():
    return scene(drawn(150), torch.arange(150) % 4, 4, scale=0.0)


def one_label():
    return scene(drawn(150), torch.zeros(150, dtype=torch.int64), 6)


def one_logit():
    features, _, head = scene(drawn(160), torch.zeros(160), 1)
    uniform = torch.rand(160, generator=torch.Generator().manual_seed(2))
    return features, uniform < (head(features)[:, 0] / 2).sigmoid(), head


def one_logit_one_label():
    return scene(drawn(80), torch.zeros(80, 1), 1)


def one_logit_no_say():
    """A sigmoid of one half for every row."""
    return scene(drawn(80), torch.arange(80) % 2 == 0, 1, scale=0.0)


def one_row():
    return scene(drawn(1), torch.tensor([1]), 3)


def the_same_row():
    return scene(drawn(1).repeat(120, 1), torch.arange(120) % 3, 3)


def huge_logits():
    return scene(drawn(200), torch.arange(200) % 4, 4, scale=3e3)


def tiny_logits():
    return scene(drawn(200), torch.arange(200) % 4, 4, scale=1e-6)


def silent_features():
    return scene(torch.zeros(90, 7), torch.arange(90) % 3, 3)


def one_group_alone():
    """All rows on one side of every direction: the other group of each partition is empty."""
    return scene(1 + drawn(160) * 1e-3, torch.arange(160) % 3, 3)


CASES = [
    two_rows_a_class,
    absent_classes,
    all_right,
    all_wrong,
    constant_logits,
    one_label,
    one_logit,
    one_logit_one_label,
    one_logit_no_say,
    one_row,
    the_same_row,
    huge_logits,
    tiny_logits,
    silent_features,
    one_group_alone,
]


# A matrix of a million values is refused, by name and with the remedy; nothing else is.
REFUSED = [("matrix", "two_rows_a_class"), ("dirichlet", "two_rows_a_class")]


@pytest.fixture(scope="module", params=CASES, ids=lambda make: make.__name__)
def case(request):
    with torch.no_grad():
        features, labels, head = request.param()
        return request.param.__name__, Batch(head(features), labels, features), head


def fitted(recipe, batch, head):
    # In the search of a joint fit a temperature stands in for group and isotonic: one is enough.
    mode = "joint" if recipe == "clip | temperature" else "sequential"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)
        return parse(recipe).fit(batch, head, mode=mode, train=batch)


@pytest.mark.parametrize("recipe", RECIPES)
def test_odd_data_gives_a_sound_result_or_one_sentence(recipe, case):
    name, batch, head = case
    if (recipe, name) in REFUSED:
        with pytest.raises(InputError, match=r"1000 classes .* use sms or svs"):
            fitted(recipe, batch, head)
        return
    calibrator = fitted(recipe, batch, head)
    with torch.no_grad():
        found = calibrator(batch.features, as_head(head))
        shipped = calibrator.wrap(head)(batch.features)
    assert torch.isfinite(found).all()
    assert torch.isfinite(shipped).all()
    probs = found.softmax(1)
    torch.testing.assert_close(probs.sum(1), torch.ones(len(batch)))
    report = calibrator.report
    assert report.loss_after <= report.loss_before + 1e-9
    direct = float(nn.functional.cross_entropy(found.double(), batch.labels))
    assert report.loss_after == pytest.approx(direct, rel=1e-5, abs=1e-6)
    if calibrator.keeps_accuracy:
        assert torch.equal(found.argmax(1), batch.logits.argmax(1))


@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_unlike_any_fitted_ones_stay_sound(recipe):
    features, labels, head = absent_classes()
    with torch.no_grad():
        batch = Batch(head(features), labels, features)
        calibrator = fitted(recipe, batch, head)
        odd = torch.stack(
            [torch.zeros(12), torch.full((12,), 1e4), torch.full((12,), -1e4), -features[0]]
        )
        found = calibrator(odd, head)
        assert torch.isfinite(found).all()
        if calibrator.keeps_accuracy:
            assert torch.equal(found.argmax(1), head(odd).argmax(1))
