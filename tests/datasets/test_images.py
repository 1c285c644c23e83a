"""Images in memory, what networks are fed, and the published cuts, done literally."""

import json
import subprocess
import sys

import made
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import random_split

from featcal import InputError
from featcal.datasets import (
    ImageData,
    Images,
    Normalisation,
    Splits,
    imagenet_split,
    normalisations,
    published_split,
    split,
)

CIFAR = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
LITERAL = """
import json
import numpy as np
indices = list(range(50000))
np.random.seed(1)
np.random.shuffle(indices)
print(json.dumps([indices[5000:], indices[:5000]]))
"""


def numbered(n, *, start=0, classes=2, size=1):
    """Images that carry their own number."""
    numbers = torch.arange(start, start + n)
    pixels = torch.zeros(n, size, size, 3, dtype=torch.uint8)
    pixels[:, 0, 0, 0], pixels[:, 0, 0, 1] = numbers // 256, numbers % 256
    return Images(pixels, numbers % classes)


def numbers(images):
    high, low = images.pixels[:, 0, 0, 0].long(), images.pixels[:, 0, 0, 1].long()
    return (256 * high + low).tolist()


def data(train=300, **more):
    return ImageData("x", ("a", "b"), numbered(train), numbered(7, start=1000), **more)


def bytes_(n=7, size=(5, 6)):
    return torch.from_numpy(made.images(n, size=size, noise=80.0).pixels)


def test_rows_are_taken_in_the_order_of_the_index():
    found = numbered(6, classes=3, size=4).rows(torch.tensor([4, 0, 4]))
    assert numbers(found) == [4, 0, 4]
    assert found.labels.tolist() == [1, 0, 1]
    assert (len(found), found.size) == (3, (4, 4))
    assert found.to("meta").pixels.device.type == "meta"


BYTES, ONES = torch.zeros(6, 4, 4, 3).byte(), torch.ones(6).long()
NAMES = {"name": "x", "class_names": ("a", "b"), "train_index": None, "val_index": None}
PARTS = NAMES | dict.fromkeys(("train", "val", "test"), numbered(4))
REFUSED = {
    "channels first": (lambda: Images(BYTES.permute(0, 3, 1, 2), ONES), "images, h, w"),
    "fewer labels": (lambda: Images(BYTES, ONES[1:]), r"torch.int64 \(6,\)"),
    "nothing": (lambda: Images(BYTES[:0], ONES[:0]), "at least one"),
    "sizes": (lambda: data(val=numbered(4, size=5)), r"val are \(5, 5\)"),
    "held out": (lambda: Splits(**PARTS, held_out=numbered(4, size=5)), "held_out are"),
    "labels above": (lambda: data(val=numbered(6, classes=3)), "labels of val go from 0 to 2"),
    "names": (lambda: ImageData("x", ("a", "a"), numbered(4), numbered(4)), "name twice"),
    "no std": (lambda: Normalisation((0.5,) * 3, (0.5, 0.0, 0.5)), "std above 0"),
    "float pixels": (lambda: Normalisation(*CIFAR)(torch.zeros(2, 3, 4, 4)), "torch.uint8"),
    "flat": (lambda: Normalisation.measured(Images(BYTES, ONES)), "a channel is constant"),
    "test_norm": (lambda: normalisations("cifar10", "published"), "test_norm='published'"),
    "not measured": (lambda: normalisations("pets"), r"measure=splits.train"),
    "both": (
        lambda: normalisations("cifar100", "reference", measure=numbered(300)),
        "test_norm reference",
    ),
    "val of all": (lambda: published_split(10, 10), "leave at least one"),
    "four images": (lambda: imagenet_split(4), "from 5 up"),
    "split of all": (lambda: split(data(10), val=10), "val is 10 of 10"),
    "val 0": (lambda: split(data(), val=0), "val is 0"),
    "held out of all": (lambda: split(data(), val=30, held_out=270), "leave at least one"),
    "two vals": (lambda: split(data(val=numbered(9)), val=5), "its own val part"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused(case):
    make, told = REFUSED[case]
    with pytest.raises(InputError, match=told):
        make()


def test_normalised_values_are_those_of_a_plain_formula():
    pixels = bytes_()
    before = pixels.clone()
    found = Normalisation(*CIFAR)(pixels)
    expected = (pixels.numpy().astype(np.float64) / 255 - CIFAR[0]) / CIFAR[1]
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), expected.transpose(0, 3, 1, 2), atol=2e-6)
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(pixels, before)
    turned = bytes_(size=(6, 5)).transpose(1, 2)  # a view that is not contiguous
    assert Normalisation(*CIFAR)(turned).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("chunk", [4096, 7])
def test_measured_values_are_those_of_all_pixels(chunk, monkeypatch):
    monkeypatch.setattr("featcal.datasets.images.CHUNK", chunk)
    pixels = bytes_(50)
    images = Images(pixels, torch.zeros(50).long())
    found = Normalisation.measured(images)
    plain = pixels.numpy().reshape(-1, 3) / 255
    np.testing.assert_allclose(found.mean, plain.mean(0), rtol=1e-12)
    np.testing.assert_allclose(found.std, plain.std(0), rtol=1e-12)
    assert normalisations("pets", measure=images) == (found, found)


@pytest.mark.parametrize(
    ("name", "norm", "train", "test"),
    [
        ("cifar10", "matched", CIFAR, CIFAR),
        ("cifar100", "matched", CIFAR, CIFAR),
        ("cifar10", "reference", CIFAR, CIFAR),
        ("cifar100", "reference", CIFAR, IMAGENET),
        ("imagenet", "reference", IMAGENET, IMAGENET),
    ],
)
def test_published_values(name, norm, train, test):
    found = normalisations(name, norm)
    assert [(each.mean, each.std) for each in found] == [train, test]
    assert normalisations(name) == (found[0], found[0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_graph_can_record_it():
    normalise, pixels = Normalisation(*CIFAR), bytes_().cuda()
    graph = torch.cuda.CUDAGraph()
    normalise(pixels)
    with torch.cuda.graph(graph):
        found = normalise(pixels)
    pixels.copy_(255 - pixels)
    graph.replay()
    assert torch.equal(found, normalise(pixels))


def test_the_cut_of_cifar_is_the_published_one():
    done = subprocess.run([sys.executable, "-c", LITERAL], capture_output=True, check=True)
    train, val = json.loads(done.stdout)
    before, torch_before = np.random.get_state()[1].copy(), torch.get_rng_state()
    found_train, found_val = published_split()
    assert found_train.tolist() == train
    assert found_val.tolist() == val
    assert val[:5] == [26247, 35067, 34590, 16668, 12196]
    imagenet_split(100)
    assert np.array_equal(np.random.get_state()[1], before)  # no global generator is touched
    assert torch.equal(torch.get_rng_state(), torch_before)


@pytest.mark.parametrize("n", [50_000, 5, 103])
def test_the_cut_of_imagenet_is_the_published_one(n):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(42)
        size = int(0.2 * n)
        val, test = random_split(range(n), [size, n - size])
    found_val, found_test = imagenet_split(n)
    assert found_val.tolist() == list(val.indices)
    assert found_test.tolist() == list(test.indices)


@settings(deadline=None, max_examples=20)
@given(st.integers(2, 300), st.data())
def test_every_image_is_in_one_part(n, data):
    val = data.draw(st.integers(1, n - 1))
    train, held = published_split(n, val)
    assert len(held) == val
    assert sorted(torch.cat([train, held]).tolist()) == list(range(n))


def test_a_data_set_without_val_is_cut_as_published():
    cut = split(data(), val=30)
    train, val = published_split(300, 30)
    assert numbers(cut.train) == train.tolist() == cut.train_index.tolist()
    assert numbers(cut.val) == val.tolist() == cut.val_index.tolist()
    assert torch.equal(cut.val.labels, val % 2)
    assert numbers(cut.test) == list(range(1000, 1007))
    assert (cut.held_out, cut.held_out_index) == (None, None)
    how = "val: 30 of 300 training images, the first in the shuffle of numpy's legacy seed 1"
    assert cut.how == how
    more = split(data(), val=30, held_out=20)  # comes from train and leaves val alone
    assert numbers(more.val) == numbers(cut.val)
    assert sorted(numbers(more.train) + numbers(more.held_out)) == sorted(numbers(cut.train))
    assert numbers(more.held_out) == more.held_out_index.tolist()
    assert f"{how}; held out: 20 of the 270 that are left" in more.how


@pytest.mark.parametrize(("images", "val"), [(60_000, 5000), (49_999, 4999), (74, 7), (9, 1)])
def test_a_tenth_is_val_by_default_and_at_most_the_published_number(images, val):
    cut = split(data(images))
    assert (len(cut.train), len(cut.val)) == (images - val, val)


def test_a_val_part_of_its_own_is_used():
    cut = split(data(val=numbered(9, start=500), note="left out: 1"), held_out=10)
    assert numbers(cut.val) == list(range(500, 509))
    assert cut.val_index is None
    assert len(cut.train) == 290
    assert cut.held_out_index.tolist() == published_split(300, 10)[1].tolist()
    assert cut.how.startswith("val: the data set's own; held out: 10 of the 300 training images")
    assert cut.how.endswith("; left out: 1")
