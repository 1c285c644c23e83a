"""Published logits of ResNet-50 on CIFAR-10: numbers known from other implementations."""

from pathlib import Path

import numpy as np
import pytest

from featcal import metrics

ANCHORS = Path(__file__).parents[2].parent / "shared" / "anchors"
pytestmark = pytest.mark.shared


def read_split(name):
    path = ANCHORS / f"resnet50-cifar10-{name}.npz"
    if not path.exists():
        pytest.skip(f"the anchor logits are not beside the project: {path}")
    with np.load(path, allow_pickle=False) as file:
        return {"logits": file["test_logits"], "labels": file["test_labels"]}


@pytest.fixture(scope="module")
def ce():
    return read_split("ce")


@pytest.mark.parametrize(
    ("name", "percent", "digits"),
    [
        ("ece", 4.354, 3),
        ("adaptive_ece", 4.338, 3),
        ("classwise_ece", 0.9080, 4),
        ("nll", 41.21, 2),
        ("accuracy", 95.05, 3),
        ("mce", 39.426, 3),
        ("brier", 9.2177, 4),
        ("smooth_ece", 4.338, 3),
    ],
)
def test_cross_entropy_logits(ce, name, percent, digits):
    assert round(100 * getattr(metrics, name)(**ce), digits) == percent


def test_the_published_adaptive_ece(ce):
    assert round(100 * metrics.adaptive_ece(**ce, reference=True), 3) == 4.334


def test_rms_ce_depends_on_the_bin_of_certain_rows(ce):
    """52 rows are certain and right: in a bin of their own, as in torchmetrics, they give 5.703."""
    assert round(100 * metrics.rms_ce(**ce), 3) == 5.697
    bins, top = metrics.Bins.of(**ce), metrics.top_label(**ce)
    certain = top.confidence == 1
    assert int(certain.sum()) == int(top.correct[certain].sum()) == 52
    # Their gap is 0, so leaving changes the last bin's count alone.
    count = bins.count.clone()
    count[-1] -= 52
    squares = ((bins.confidence - bins.correct).square() / count).nansum()
    assert round(100 * float(squares / 10000) ** 0.5, 3) == 5.703


def test_debiased_ce_is_free_of_the_row_order(ce):
    """Groups cut through tied confidences: 9.319 in the file's order, 9.316 to 9.324 in others."""
    assert round(100 * metrics.debiased_ce(**ce), 3) == 9.318
    rows = metrics.Ordered.of(**ce)
    order = np.argsort(rows.confidence.numpy(), kind="stable")
    confidence, correct = rows.confidence.double().numpy()[order], rows.correct.numpy()[order]
    square = 0.0
    for c, y in zip(np.array_split(confidence, 15), np.array_split(correct, 15), strict=True):
        square += len(c) * ((c.mean() - y.mean()) ** 2 - y.mean() * (1 - y.mean()) / (len(c) - 1))
    assert round(100 * (square / 10000) ** 0.5, 3) == 9.319


def test_focal_logits():
    flsd = read_split("flsd53")
    assert round(100 * metrics.ece(**flsd), 3) == 1.551
    assert round(100 * metrics.accuracy(**flsd), 2) == 95.02
