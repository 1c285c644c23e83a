"""A small network and its rows, and the real ones beside the project."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from featcal import Batch, parse
from featcal.heads.head import linear_of


def pieces(batch, size):
    """The same rows as a list of short batches."""
    return [batch.rows(slice(start, start + size)) for start in range(0, len(batch), size)]


@pytest.fixture(scope="session")
def net(made):
    """A classifier that is too sure, its rows, and a clip fitted to the first half of them."""
    found = made(1200, 24, 5, knee=1.0, seed=3)
    found.head.requires_grad_(False)
    whole = Batch(found.logits, found.labels, found.features)
    val, test = whole.rows(slice(0, 600)), whole.rows(slice(600, None))
    clip = parse("clip").fit(val, found.head)
    assert float(clip.threshold) < 10
    return SimpleNamespace(val=val, test=test, head=found.head, clip=clip, pieces=pieces)


@pytest.fixture(scope="session")
def anchor(shared_file):
    """The paper's own logits of ResNet-50 on CIFAR-10, the val split."""
    with np.load(shared_file("anchors", "resnet50-cifar10-ce.npz"), allow_pickle=False) as file:
        return Batch(torch.from_numpy(file["val_logits"]), torch.from_numpy(file["val_labels"]))


@pytest.fixture(scope="session")
def resnet(shared_file):
    """Features of our own ResNet-50 on CIFAR-10, its head, and a clip fitted on val."""
    with np.load(shared_file("packs", "cifar10-resnet50.npz"), allow_pickle=False) as file:
        arrays = {name: torch.from_numpy(file[name]) for name in file.files if name != "meta"}
    val, test = (
        Batch(None, arrays[f"{split}_labels"].long(), arrays[f"{split}_features"].float())
        for split in ("val", "test")
    )
    head = linear_of(arrays["weight"].float(), arrays["bias"].float())
    return SimpleNamespace(val=val, test=test, head=head, clip=parse("clip").fit(val, head))
