"""One call for every data set; image files in a folder per class."""

import os
import resource
import sys

import made
import numpy as np
import pytest
import torch
from model_packages import package
from PIL import Image
from PIL.Image import Resampling

from featcal import InputError
from featcal.core.progress import listen
from featcal.datasets import imagenet_split, load_images, split
from featcal.datasets.load import fitted

FEW = {"train": 3, "test": 3}


def test_images_of_the_right_size_are_read_as_they_are(tmp_path):
    written = made.write_folders(tmp_path / "pets", parts={"train": 6, "test": 3})
    seen = []
    with listen(lambda *told: seen.append(told)):
        found = load_images("folder", tmp_path / "pets", image_size=32)
    assert (found.name, list(found.class_names)) == ("pets", written.class_names)
    assert made.same(found.train, written.train)
    assert made.same(found.test, written.test)
    assert found.val is None
    assert seen == [
        *[("reading train, images", done, 6) for done in range(7)],
        *[("reading test, images", done, 3) for done in range(4)],
    ]


def test_a_val_part_of_its_own(tmp_path):
    """As it is beside test; cut as published for ImageNet where it is alone."""
    written = made.write_folders(tmp_path / "three", parts={"train": 12, "val": 6, "test": 9})
    found = load_images("folder", tmp_path / "three", image_size=32)
    assert made.same(found.val, written.val)
    assert split(found).how == "val: the data set's own"
    written = made.write_folders(tmp_path / "two", parts={"train": 12, "val": 30})
    found = load_images("folder", tmp_path / "two", image_size=32)
    val, test = imagenet_split(30)
    assert (len(val), len(test)) == (6, 24)
    assert np.array_equal(found.val.pixels, written.val.pixels[val])
    assert np.array_equal(found.test.labels, written.val.labels[test])
    assert "a fifth of the 30 images in val/, shuffled by torch's seed 42" in split(found).how


@pytest.mark.parametrize("size", [(300, 401), (401, 300), (256, 256), (100, 333)])
@pytest.mark.parametrize(("side", "crop"), [(256, 224), (33, 32)])
def test_an_image_is_made_small_as_torchvision_does_it(size, side, crop):
    transforms = package("torchvision.transforms")
    pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    expected = transforms.CenterCrop(crop)(transforms.Resize(side)(image))
    assert np.array_equal(fitted(image, side, crop), expected)


def test_the_published_size_is_224_of_256(tmp_path):
    made.write_folders(tmp_path, parts=FEW, size=(300, 280), end="jpg")
    found = load_images("folder", tmp_path, image_size=224)
    path = sorted((tmp_path / "train" / "kind_0").iterdir())[0]
    with Image.open(path) as image:
        expected = fitted(image.convert("RGB"), 256, 224)
    assert np.array_equal(found.train.pixels[0], expected)
    plain = load_images("folder", tmp_path, image_size=224, resize=224)
    assert not torch.equal(found.train.pixels, plain.train.pixels)


def test_which_files_count(tmp_path):
    """Every kind of image becomes RGB; other files are left alone, and counted where they show."""
    made.write_folders(tmp_path, parts=FEW)
    deep = tmp_path / "train" / "kind_1" / "images"
    deep.mkdir()
    for mode in ("L", "LA", "RGBA", "P", "CMYK", "1"):
        end = "JPEG" if mode == "CMYK" else "png"
        Image.new(mode, (40, 50)).save(deep / f"x{mode}.{end}")
    for name in ("boxes.txt", "._x.JPEG", "Thumbs.db", "LICENSE"):
        (deep / name).write_text("")
    (tmp_path / "train" / ".cache").mkdir()
    found = load_images("folder", tmp_path, image_size=32)
    assert found.train.labels.tolist() == [0, *[1] * 7, 2]
    assert found.note == "left out, no images: 2 (.txt, LICENSE)"


def first(folder):
    return sorted((folder / "train" / "kind_0").iterdir())[0]


def deep_pixels(folder):
    pixels = np.arange(1600, dtype=np.uint16).reshape(40, 40) * 20
    Image.fromarray(pixels).save(folder / "test" / "kind_2" / "depth.png")


def emptied(part):
    return lambda folder: [path.unlink() for path in (folder / part).rglob("*.png")]


REFUSED = {
    "half an image": (lambda f: first(f).write_bytes(first(f).read_bytes()[:200]), {}, "0000.png"),
    "16 bits": (deep_pixels, {}, "depth.png has 16-bit"),
    "an empty class": (lambda f: (f / "test" / "kind_9").mkdir(), {}, "kind_9 has no image"),
    "other classes": (
        lambda f: (f / "test" / "kind_2").rename(f / "test" / "cat"),
        {},
        "cat, kind_2",
    ),
    "no test": (lambda f: (f / "test").rename(f / "other"), {}, "neither val nor test"),
    "no train": (lambda f: (f / "train").rename(f / "other"), {}, "has no folder train"),
    "little val": (
        lambda f: (f / "test").rename(f / "val"),
        {},
        "n is 3: give a whole number from 5 up",
    ),
    "nowhere": (lambda f: None, {"folder": "nowhere"}, "nowhere does not exist"),
    "memory": (emptied("none"), {"image_size": 8000, "memory_gib": 1}, "smaller image_size"),
    "no size": (emptied("none"), {"image_size": None}, "image_size is missing"),
    "a smaller resize": (emptied("none"), {"resize": 16}, "resize is 16"),
    "a download": (emptied("none"), {"download": True}, "download"),
    "a name": (emptied("none"), {"name": "mnist"}, "cifar10, cifar100"),
    "a size for CIFAR": (emptied("none"), {"name": "cifar10"}, "image_size"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_refused(tmp_path, case):
    spoil, options, told = REFUSED[case]
    made.write_folders(tmp_path, parts=FEW, size=(64, 64))
    spoil(tmp_path)
    given = {"name": "folder", "image_size": 32, **options}
    folder = tmp_path / given.pop("folder", "")
    with pytest.raises(InputError, match=told):
        load_images(given.pop("name"), folder, **given)


def test_a_folder_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    """And not passed over, as glob does it."""
    made.write_folders(tmp_path, parts=FEW)
    deep, plain = tmp_path / "train" / "kind_1" / "deep", os.scandir
    deep.mkdir()

    def denied(path):
        if os.fspath(path) == str(deep):
            raise PermissionError(13, "Permission denied", str(path))
        return plain(path)

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(InputError, match=f"^{deep} cannot be read .*Permission denied"):
        load_images("folder", tmp_path, image_size=32)


def test_pillow_is_asked_for_by_its_extra(tmp_path, monkeypatch):
    made.write_png(tmp_path)
    made.write_binary(tmp_path / "binary")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(InputError, match=r"pip install 'featcal\[train\]'"):
        load_images("cifar10", tmp_path)
    load_images("cifar10", tmp_path / "binary")  # needs none


def test_images_are_bounded_before_they_are_decoded(tmp_path, monkeypatch):
    made.write_folders(tmp_path)
    file = next((tmp_path / "train").glob("*/*.png"))
    gradient = np.repeat(np.arange(256, dtype=np.uint8), 1000)[None, :200_000]
    Image.fromarray(gradient).save(file)  # whole, it would be scaled to a million by eight
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    images = load_images("folder", tmp_path, image_size=64).train
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - grown < 200_000  # KiB
    assert int(gradient[0, 100_000]) in images.pixels[0].flatten().tolist()
    with monkeypatch.context() as smaller:
        smaller.setattr("featcal.datasets.load.LARGEST", 199_999)
        with pytest.raises(InputError, match=f"^{file} has 200000 x 1 pixels"):
            load_images("folder", tmp_path, image_size=64)
    file.write_bytes(b"P5 1 60000000 255\n")  # few pixels, but a pointer for every row
    with pytest.raises(InputError, match=f"^{file} has 1 x 60000000 pixels"):
        load_images("folder", tmp_path, image_size=64)
    monkeypatch.setattr("featcal.datasets.load.LARGE", 0)  # one at a time: the same images
    file.unlink()
    assert len(load_images("folder", tmp_path, image_size=32).train)


def test_a_very_long_image_is_scaled_after_its_middle_is_cut_out():
    noise = np.random.default_rng(0).integers(0, 256, (40, 360, 3), np.uint8)
    for image in (Image.fromarray(noise), Image.fromarray(noise.swapaxes(0, 1))):
        found = np.array(fitted(image, 24, 20)).astype(int)
        whole = image.resize([int(24 * side / 40) for side in image.size], Resampling.BILINEAR)
        left, top = (round((side - 20) / 2) for side in whole.size)
        wanted = np.array(whole.crop((left, top, left + 20, top + 20))).astype(int)
        assert np.abs(found - wanted).max() <= 2  # the rounding of the box
