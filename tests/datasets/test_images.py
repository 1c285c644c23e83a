"""Images in memory: what they hold and what they refuse."""

import pytest
import torch

from featcal import InputError
from featcal.datasets import ImageData, Images, Splits


def some(n=6, *, size=4, classes=3):
    pixels = torch.arange(n, dtype=torch.uint8)[:, None, None, None].expand(n, size, size, 3)
    return Images(pixels, torch.arange(n) % classes)


def test_rows_are_taken_in_the_order_of_the_index():
    found = some().rows(torch.tensor([4, 0, 4]))
    assert found.pixels[:, 0, 0, 0].tolist() == [4, 0, 4]
    assert found.labels.tolist() == [1, 0, 1]
    assert len(found) == 3
    assert found.size == (4, 4)


def test_images_move_to_a_device():
    assert some().to("meta").pixels.device.type == "meta"


@pytest.mark.parametrize(
    "pixels",
    [torch.zeros(2, 4, 4, 3), torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.zeros(2).byte()],
    ids=["floats", "channels first", "one dimension"],
)
def test_pixels_of_another_form_are_refused(pixels):
    with pytest.raises(InputError, match=r"give torch.uint8 of shape \(images, height, width, 3\)"):
        Images(pixels, torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize(
    "labels", [torch.zeros(6), torch.zeros(5).long(), torch.zeros(6, 1).long()]
)
def test_labels_of_another_form_are_refused(labels):
    with pytest.raises(InputError, match=r"give torch.int64 of shape \(6,\), one label an image"):
        Images(some().pixels, labels)


def test_no_images_are_refused():
    with pytest.raises(InputError, match="give at least one"):
        Images(torch.zeros(0, 4, 4, 3, dtype=torch.uint8), torch.zeros(0).long())


def test_parts_of_several_sizes_are_refused():
    with pytest.raises(InputError, match=r"images of val are \(5, 5\) and those of train \(4, 4\)"):
        ImageData("x", ("a", "b", "c"), some(), some(), some(size=5))


def test_held_out_images_of_another_size_are_refused():
    parts = {"train": some(), "val": some(), "test": some(), "held_out": some(size=5)}
    with pytest.raises(InputError, match=r"images of held_out are \(5, 5\)"):
        Splits(name="x", class_names=tuple("abc"), train_index=None, val_index=None, **parts)


def test_labels_without_a_class_are_refused():
    with pytest.raises(InputError, match="labels of test go from 0 to 2 and there are 2 classes"):
        ImageData("x", ("a", "b"), some(classes=2), some())
    with pytest.raises(InputError, match="go from -1 to"):
        ImageData("x", ("a",), some(classes=1), Images(some().pixels, -torch.ones(6).long()))


def test_a_class_name_twice_is_refused():
    with pytest.raises(InputError, match="a name twice"):
        ImageData("x", ("a", "b", "a"), some(), some())
