"""What a loss may be called with: labels, soft targets, pairs of labels, and what is refused."""

from functools import partial

import pytest
import torch

from featcal import InputError
from featcal.losses import CE, LOSSES, mixed

NAMES = sorted(LOSSES)
LOGITS, LABELS = torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("logits", "labels", "says"),
    [
        (torch.zeros(3), LABELS, r"logits have shape \(3,\): give \(n, k\)"),
        (torch.zeros(3, 1), LABELS, r"logits have shape \(3, 1\).* make the two columns 0 and z"),
        (torch.zeros(0, 4), LABELS[:0], r"logits have shape \(0, 4\)"),
        (torch.zeros(3, 4, 2), LABELS, r"logits have shape \(3, 4, 2\)"),
        (torch.zeros(3, 4, dtype=torch.int64), LABELS, "logits are torch.int64"),
        (LOGITS, LABELS.int(), r"labels are torch.int32 of shape \(3,\): give int64"),
        (LOGITS, LABELS[:2], r"of shape \(2,\): give int64 class numbers of shape \(3,\)"),
        (LOGITS, LABELS[:, None], r"of shape \(3, 1\)"),
        (LOGITS, LABELS.float(), r"labels are torch.float32 of shape \(3,\)"),
        (LOGITS, LABELS.bool(), "labels are torch.bool"),
    ],
)
def test_what_is_no_batch_is_refused(name, logits, labels, says):
    with pytest.raises(InputError, match=f"{name}: .*{says}"):
        LOSSES[name]()(logits, labels)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("label", [-100, -1, 4])
def test_labels_out_of_range_never_pass_silently(name, label, batch):
    labels = LABELS.clone()
    labels[1] = label
    with pytest.raises((IndexError, RuntimeError)):
        LOSSES[name]()(LOGITS, labels)


@pytest.mark.parametrize("name", NAMES)
def test_soft_targets_are_taken_or_refused_by_name(name):
    loss, soft = LOSSES[name](), torch.full((3, 4), 0.25)
    if loss.soft_targets:
        assert loss(LOGITS, soft).isfinite()
        with pytest.raises(InputError, match=rf"{name}: labels have shape \(3, 5\)"):
            loss(LOGITS, torch.zeros(3, 5))
    else:
        with pytest.raises(InputError, match=f"{name}: labels are rows of probabilities.*mixed"):
            loss(LOGITS, soft)


@pytest.mark.parametrize("name", [name for name in NAMES if LOSSES[name].soft_targets])
@pytest.mark.parametrize("rows", [1, 7])
def test_one_hot_targets_are_labels(name, rows, batch):
    logits, labels = batch(rows)
    hot = torch.nn.functional.one_hot(labels, 5)
    for soft in (hot.double(), hot.float()):
        torch.testing.assert_close(LOSSES[name]()(logits, soft), LOSSES[name]()(logits, labels))


@pytest.mark.parametrize("name", [name for name in NAMES if LOSSES[name].soft_targets])
def test_gradients_of_soft_targets(name, batch):
    logits, _ = batch()
    soft = batch(seed=3)[0].softmax(1)
    assert torch.autograd.gradcheck(lambda z: LOSSES[name]()(z, soft), logits.requires_grad_())


@pytest.mark.parametrize("name", NAMES)
def test_mixed_is_the_weighted_mean_of_two(name, batch):
    logits, labels = batch()
    partners, loss = labels.roll(1), LOSSES[name]()
    want = 0.3 * loss(logits, labels) + 0.7 * loss(logits, partners)
    for weight in (0.3, torch.tensor(0.3, dtype=torch.float64)):
        torch.testing.assert_close(mixed(loss, logits, labels, partners, weight), want)
    assert torch.equal(mixed(loss, logits, labels, partners, 1.0), loss(logits, labels))


def test_mixed_cross_entropy_is_that_of_mixed_targets(batch):
    logits, labels = batch()
    partners = labels.roll(1)
    hot = partial(torch.nn.functional.one_hot, num_classes=5)
    soft = 0.3 * hot(labels) + 0.7 * hot(partners)
    torch.testing.assert_close(
        mixed(CE(), logits, labels, partners, 0.3), CE()(logits, soft.double())
    )


def test_mixed_wants_one_weight(batch):
    logits, labels = batch()
    with pytest.raises(InputError, match=r"mixed: weight has shape \(12,\): give one number"):
        mixed(CE(), logits, labels, labels, torch.ones(12))
