"""Every method on the real networks of ../shared/packs: no warning, no loss, no broken promise."""

import pytest
import torch
import torch.nn.functional as F

from featcal import METHODS, parse
from featcal.data import import_files
from featcal.report.tables import PAPER_METHODS

pytestmark = [pytest.mark.shared, pytest.mark.no_cover]  # large, and other rows for known lines

PACKS = [
    "cifar10-resnet50",
    "cifar10-wrn16x4",
    "cifar100-wrn16x4",
    "cifar10-vit",
    "imagenet5k-efficientnet_lite0",
]
# Each method on two networks, in turn, the slowest on one; a matrix of 100 classes takes too long,
# one of 1,000 is refused.
SMALL = {"matrix": PACKS[:2], "dirichlet": PACKS[1:4:2], "auto": PACKS[:1], "proximity": PACKS[4:]}
METHOD_PAIRS = [
    (pack, name)
    for at, name in enumerate(sorted(METHODS))
    for pack in SMALL.get(name, [PACKS[(at + by) % 5] for by in (0, 2)])
]


@pytest.fixture(scope="module")
def pack(request, shared_file, tmp_path_factory):
    path = tmp_path_factory.mktemp("packs") / request.param
    return import_files(shared_file("packs", f"{request.param}.npz"), path)


def checked(pack, recipe):
    """Fits as the paper does; warnings are errors in this suite."""
    calibrator = parse(recipe)
    train = pack.split("val") if calibrator.needs_train else None
    calibrator.fit(pack.split("val"), pack.head, mode="sequential", train=train)
    report = calibrator.report
    assert report.warnings == []
    assert report.loss_after < report.loss_before or report.noop
    with torch.no_grad():
        total = 0.0
        for batch in pack.split("test"):
            plain, found = pack.head(batch.features), calibrator(batch.features, pack.head)
            total += float(F.cross_entropy(found.double(), batch.labels.long(), reduction="sum"))
            if calibrator.keeps_accuracy:
                assert torch.equal(found.argmax(1), plain.argmax(1))
    return total / pack.split("test").rows


@pytest.mark.parametrize(("pack", "name"), sorted(METHOD_PAIRS), indirect=["pack"])
def test_every_method_lowers_the_loss_or_says_noop(name, pack):
    assert 0 < checked(pack, name) < 1.2


PAPERS = [recipe for recipe in PAPER_METHODS.values() if recipe != "none"]
PAIRS = [(PACKS[at % 5], name) for at, name in enumerate(PAPERS)]


@pytest.mark.parametrize(("pack", "name"), sorted(PAIRS), indirect=["pack"])
def test_the_papers_methods_after_clip(name, pack):
    assert 0 < checked(pack, f"clip | {name}") < 1.2
