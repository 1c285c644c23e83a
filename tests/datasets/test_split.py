"""The published cuts against the published steps, done literally."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import random_split

from featcal import InputError
from featcal.datasets import ImageData, Images, imagenet_split, published_split
from featcal.datasets import images as split

LITERAL = """
import json
import numpy as np
indices = list(range(50000))
np.random.seed(1)
np.random.shuffle(indices)
print(json.dumps([indices[5000:], indices[:5000]]))
"""


def numbered(n, *, start=0, classes=2):
    """Images that carry their own number."""
    numbers = torch.arange(start, start + n)
    pixels = torch.zeros(n, 1, 1, 3, dtype=torch.uint8)
    pixels[:, 0, 0, 0], pixels[:, 0, 0, 1] = numbers // 256, numbers % 256
    return Images(pixels, numbers % classes)


def numbers(images):
    high, low = images.pixels[:, 0, 0, 0].long(), images.pixels[:, 0, 0, 1].long()
    return (256 * high + low).tolist()


def test_the_cut_of_cifar_is_the_published_one():
    done = subprocess.run([sys.executable, "-c", LITERAL], capture_output=True, check=True)
    train, val = json.loads(done.stdout)
    found_train, found_val = published_split()
    assert found_train.tolist() == train
    assert found_val.tolist() == val
    assert val[:5] == [26247, 35067, 34590, 16668, 12196]
    assert train[:5] == [45573, 39021, 36044, 45885, 19497]


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 300), st.data())
def test_every_image_is_in_one_part(n, data):
    val = data.draw(st.integers(1, n - 1))
    train, held = published_split(n, val)
    assert len(held) == val
    assert sorted(torch.cat([train, held]).tolist()) == list(range(n))


def test_no_global_generator_is_touched():
    before, torch_before = np.random.get_state()[1].copy(), torch.get_rng_state()
    published_split(100, 10)
    imagenet_split(100)
    assert np.array_equal(np.random.get_state()[1], before)
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


@pytest.mark.parametrize("val", [10, 11])
def test_a_cut_that_leaves_nothing_is_refused(val):
    with pytest.raises(InputError, match=f"val={val} of n=10 .* from 1 to 9"):
        published_split(10, val)
    data = ImageData("x", ("a", "b"), numbered(10), numbered(4))
    with pytest.raises(InputError, match=f"val is {val} of 10 training images and leaves nothing"):
        split(data, val=val)
    with pytest.raises(InputError, match="imagenet_split: n is 4: give a whole number from 5 up"):
        imagenet_split(4)


@pytest.mark.parametrize("val", [0, -1, 1.5, 2.0, "6", True, (6,)], ids=repr)
def test_only_whole_numbers_of_images_are_cut(val):
    told = re.escape(f"split: val is {val!r}: give a whole number from 1 up")
    with pytest.raises(InputError, match=f"^published_{told}"):
        published_split(10, val)
    for part in (None, numbered(3)):
        with pytest.raises(InputError, match=f"^{told}"):
            split(ImageData("x", ("a", "b"), numbered(10), numbered(4), part), val=val)


@pytest.mark.parametrize("held_out", [-1, 5.5, 0.0, "5", False, None], ids=repr)
def test_only_whole_numbers_of_images_are_held_out(held_out):
    told = re.escape(f"split: held_out is {held_out!r}: give a whole number from 0 up")
    with pytest.raises(InputError, match=told):
        split(ImageData("x", ("a", "b"), numbered(30), numbered(4)), val=5, held_out=held_out)


@pytest.mark.parametrize("n", [10.5, "10", True, 1], ids=repr)
def test_only_whole_numbers_of_images_are_shuffled(n):
    with pytest.raises(
        InputError, match=f"published_split: n is {n!r}: give a whole number from 2"
    ):
        published_split(n, 1)
    with pytest.raises(InputError, match=f"imagenet_split: n is {n!r}: give a whole number from 5"):
        imagenet_split(n)


def test_a_data_set_without_val_is_cut_as_published():
    data = ImageData("cifar10", ("a", "b"), numbered(300), numbered(7, start=1000))
    cut = split(data, val=30)
    train, val = published_split(300, 30)
    assert numbers(cut.train) == train.tolist() == cut.train_index.tolist()
    assert numbers(cut.val) == val.tolist() == cut.val_index.tolist()
    assert torch.equal(cut.val.labels, val % 2)
    assert numbers(cut.test) == list(range(1000, 1007))
    assert cut.held_out is None
    assert cut.held_out_index is None
    assert cut.name == "cifar10"
    assert cut.how == (
        "val: 30 of 300 training images, the first in the shuffle of numpy's legacy seed 1"
    )


@pytest.mark.parametrize(
    ("images", "val"), [(60_000, 5000), (50_000, 5000), (49_999, 4999), (74, 7), (9, 1)]
)
def test_a_tenth_is_val_by_default_and_at_most_the_published_number(images, val):
    cut = split(ImageData("x", ("a", "b"), numbered(images), numbered(2)))
    assert (len(cut.train), len(cut.val)) == (images - val, val)


def test_one_image_cannot_be_cut():
    with pytest.raises(InputError, match="val is 1 of 1 training images and leaves nothing"):
        split(ImageData("x", ("a", "b"), numbered(1), numbered(2)))


def test_the_held_out_images_come_from_train_and_leave_val_alone():
    data = ImageData("x", ("a", "b"), numbered(300), numbered(7))
    plain, cut = split(data, val=30), split(data, val=30, held_out=20)
    assert numbers(cut.val) == numbers(plain.val)
    assert sorted(numbers(cut.train) + numbers(cut.held_out)) == sorted(numbers(plain.train))
    assert numbers(cut.held_out) == cut.held_out_index.tolist()
    assert len(cut.held_out) == 20
    assert cut.how.endswith(
        "; held out: 20 of the 270 that are left, the first in the shuffle of numpy's legacy seed 1"
    )


@pytest.mark.parametrize("held_out", [270, 300])
def test_a_held_out_part_that_leaves_nothing_is_refused(held_out):
    data = ImageData("x", ("a", "b"), numbered(300), numbered(7))
    with pytest.raises(InputError, match=f"held_out is {held_out} of 270 .* at most 269"):
        split(data, val=30, held_out=held_out)


def test_a_val_part_of_its_own_is_used():
    data = ImageData("x", ("a", "b"), numbered(300), numbered(7), numbered(9, start=500))
    cut = split(data, held_out=10)
    assert numbers(cut.val) == list(range(500, 509))
    assert cut.val_index is None
    assert len(cut.train) == 290
    _, held = published_split(300, 10)
    assert cut.held_out_index.tolist() == held.tolist()
    assert cut.how == (
        "val: the data set's own; held out: 10 of the 300 training images, the first in the "
        "shuffle of numpy's legacy seed 1"
    )
    with pytest.raises(InputError, match=r"val is 5.*x has a val part of its own of 9 images"):
        split(data, val=5)
