"""Folders of image files, against torchvision where it can be imported."""

import re

import made
import numpy as np
import pytest
import torch
from model_packages import package
from PIL import Image

from featcal import InputError
from featcal.core.progress import listen
from featcal.datasets import imagenet_split, load_images
from featcal.datasets import images as split
from featcal.datasets.folder import fitted


def test_images_of_the_right_size_are_read_as_they_are(tmp_path):
    written = made.write_folders(tmp_path / "pets")
    found = load_images("folder", tmp_path / "pets", image_size=32)
    assert found.name == "pets"
    assert list(found.class_names) == written.class_names
    assert made.same(found.train, written.train)
    assert made.same(found.test, written.test)
    assert found.val is None


def test_three_parts_are_used_as_they_are(tmp_path):
    written = made.write_folders(tmp_path, parts={"train": 12, "val": 6, "test": 9})
    found = load_images("folder", tmp_path, image_size=32)
    assert made.same(found.val, written.val)
    assert made.same(found.test, written.test)
    assert split(found).how == "val: the data set's own"


def test_a_val_part_alone_is_cut_as_published_for_imagenet(tmp_path):
    written = made.write_folders(tmp_path, parts={"train": 12, "val": 30})
    found = load_images("folder", tmp_path, image_size=32)
    val, test = imagenet_split(30)
    assert (len(val), len(test)) == (6, 24)
    assert np.array_equal(found.val.pixels, written.val.pixels[val])
    assert np.array_equal(found.test.labels, written.val.labels[test])
    assert split(found).how == (
        "val: a fifth of the 30 images in val/, shuffled by torch's seed 42; test: the rest of them"
    )


@pytest.mark.parametrize("size", [(300, 401), (401, 300), (256, 256), (100, 333), (257, 256)])
@pytest.mark.parametrize(("side", "crop"), [(256, 224), (32, 32), (33, 32)])
def test_an_image_is_made_small_as_torchvision_does_it(size, side, crop):
    transforms = package("torchvision.transforms")
    pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    expected = transforms.CenterCrop(crop)(transforms.Resize(side)(image))
    assert np.array_equal(fitted(image, side, crop), expected)


def test_the_published_size_is_224_of_256(tmp_path):
    made.write_folders(tmp_path, parts={"train": 3, "test": 3}, size=(300, 280), end="jpg")
    found = load_images("folder", tmp_path, image_size=224)
    path = sorted((tmp_path / "train" / "kind_0").iterdir())[0]
    with Image.open(path) as image:
        expected = fitted(image.convert("RGB"), 256, 224)
    assert np.array_equal(found.train.pixels[0], expected)
    plain = load_images("folder", tmp_path, image_size=224, resize=224)
    assert not torch.equal(found.train.pixels, plain.train.pixels)


def test_every_kind_of_image_becomes_rgb(tmp_path):
    made.write_folders(tmp_path, parts={"train": 3, "test": 3})
    for mode in ("L", "LA", "RGBA", "P", "CMYK", "1"):
        end = "jpg" if mode == "CMYK" else "png"
        Image.new(mode, (40, 50)).save(tmp_path / "train" / "kind_1" / f"x{mode}.{end}")
    found = load_images("folder", tmp_path, image_size=32)
    assert len(found.train) == 9


@pytest.mark.parametrize(
    ("kind", "end"),
    [(np.uint16, "png"), (np.uint16, "tif"), (np.int32, "tif"), (np.float32, "tif")],
)
def test_pixels_of_more_than_8_bits_are_refused(tmp_path, kind, end):
    made.write_folders(tmp_path, parts={"train": 3, "test": 3})
    path = tmp_path / "test" / "kind_2" / f"depth.{end}"
    Image.fromarray(np.arange(1600, dtype=kind).reshape(40, 40) * 20).save(path)
    with pytest.raises(InputError) as told:
        load_images("folder", tmp_path, image_size=32)
    assert str(told.value) == (f"{path} has 16-bit or float pixels: save it with 8 bits a channel")


def test_files_are_found_below_a_class_and_others_are_left_alone(tmp_path):
    made.write_folders(tmp_path, parts={"train": 3, "test": 3})
    deep = tmp_path / "train" / "kind_0" / "images"
    deep.mkdir()
    Image.new("RGB", (32, 32)).save(deep / "x.JPEG")
    (deep / "boxes.txt").write_text("0 0 1 1")
    (deep / "._x.JPEG").write_text("what some file systems leave behind")
    (tmp_path / "train" / ".cache").mkdir()
    assert load_images("folder", tmp_path, image_size=32).train.labels.tolist() == [0, 0, 1, 2]


def test_the_progress_is_told(tmp_path):
    made.write_folders(tmp_path, parts={"train": 6, "test": 3})
    seen = []
    with listen(lambda *told: seen.append(told)):
        load_images("folder", tmp_path, image_size=32)
    assert seen == [
        *[("reading train, images", done, 6) for done in range(7)],
        *[("reading test, images", done, 3) for done in range(4)],
    ]


def test_an_image_that_cannot_be_read_is_named(tmp_path):
    made.write_folders(tmp_path, size=(64, 64))
    path = sorted((tmp_path / "train" / "kind_1").iterdir())[1]
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(InputError, match=f"{path.name} cannot be read as an image .* remove it"):
        load_images("folder", tmp_path, image_size=32)
    path.write_bytes(b"")
    with pytest.raises(InputError, match=r"image \(cannot identify image file\): copy it again"):
        load_images("folder", tmp_path, image_size=32)


def test_an_empty_class_is_refused(tmp_path):
    made.write_folders(tmp_path)
    (tmp_path / "test" / "kind_9").mkdir()
    with pytest.raises(InputError, match=r"kind_9 has no image \(.*.jpg"):
        load_images("folder", tmp_path, image_size=32)


def test_a_single_class_is_refused(tmp_path):
    made.write_folders(tmp_path, classes=1)
    with pytest.raises(InputError) as told:
        load_images("folder", tmp_path, image_size=32)
    assert str(told.value) == (
        f"{tmp_path / 'train'} has one class (kind_0): give at least two folders"
    )


def test_a_val_part_alone_that_is_too_small_is_named(tmp_path):
    made.write_folders(tmp_path, parts={"train": 6, "val": 2}, classes=2)
    with pytest.raises(InputError) as told:
        load_images("folder", tmp_path, image_size=32)
    assert str(told.value) == (
        f"{tmp_path / 'val'} has 2 images, too few to be cut into val and test: put at least 5 "
        f"there, or the test images into {tmp_path / 'test'}"
    )
    made.write_folders(tmp_path, parts={"train": 6, "val": 2, "test": 2}, classes=2)
    assert len(load_images("folder", tmp_path, image_size=32).val) == 2


def test_parts_of_other_classes_are_refused(tmp_path):
    made.write_folders(tmp_path)
    (tmp_path / "test" / "kind_2").rename(tmp_path / "test" / "cat")
    with pytest.raises(InputError, match=r"\(in one alone: cat, kind_2\)"):
        load_images("folder", tmp_path, image_size=32)


def test_classes_without_parts_are_refused(tmp_path):
    written = made.write_folders(tmp_path, parts={"train": 6})
    with pytest.raises(InputError, match="has neither val nor test beside train"):
        load_images("folder", tmp_path, image_size=32)
    with pytest.raises(InputError, match=r"has no folder train: .*move those into train/"):
        load_images("folder", written.folder / "train", image_size=32)
    (tmp_path / "test").mkdir()
    with pytest.raises(InputError, match="test has no folders"):
        load_images("folder", tmp_path, image_size=32)


def test_more_memory_than_allowed_is_refused_before_reading(tmp_path):
    made.write_folders(tmp_path)
    for path in tmp_path.rglob("*.png"):
        path.write_bytes(b"never read")
    with pytest.raises(InputError) as told:
        load_images("folder", tmp_path, image_size=8000, memory_gib=2)
    assert str(told.value) == (
        "36 images of 8000 x 8000 pixels take 6.4 GiB of memory, above the limit of 2 GiB: give a "
        "smaller image_size, fewer images, or from Python a larger memory_gib of load_images"
    )


@pytest.mark.parametrize("limit", [0, -1.0, float("nan"), "16", True, None], ids=repr)
def test_a_limit_that_is_no_number_is_refused(tmp_path, limit):
    made.write_folders(tmp_path)
    told = f"load_images: memory_gib is {limit!r}: give a number above 0"
    with pytest.raises(InputError, match=told):
        load_images("folder", tmp_path, image_size=32, memory_gib=limit)


def test_a_resize_below_the_size_is_refused(tmp_path):
    made.write_folders(tmp_path)
    with pytest.raises(InputError, match="image_size=32, resize=16: give a resize that is not"):
        load_images("folder", tmp_path, image_size=32, resize=16)


@pytest.mark.parametrize("given", [0, -3, (32, 32), "32", 32.5, 32.0, True], ids=repr)
def test_sizes_are_whole_numbers(tmp_path, given):
    made.write_folders(tmp_path)
    told = re.escape(f"{given!r}: give a whole number from 1 up")
    with pytest.raises(InputError, match=f"load_images: image_size is {told}"):
        load_images("folder", tmp_path, image_size=given, resize=40)
    with pytest.raises(InputError, match=f"load_images: image_size is {told}"):
        load_images("folder", tmp_path, image_size=given)
    with pytest.raises(InputError, match=f"load_images: resize is {told}"):
        load_images("folder", tmp_path, image_size=32, resize=given)


def test_the_size_must_be_given(tmp_path):
    with pytest.raises(InputError, match="image_size is not given"):
        load_images("folder", tmp_path)
