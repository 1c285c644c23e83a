"""One call for every data set; image files in a folder per class."""

import gzip
import os
import sys
from pathlib import Path

import made
import numpy as np
import PIL.Image
import pytest
import torch
from model_packages import package
from PIL import Image

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
    assert found.note == "left out: 2 files that are no images (.txt, LICENSE)"


def first(folder):
    return sorted((folder / "train" / "kind_0").iterdir())[0]


def deep_pixels(folder):
    pixels = np.arange(1600, dtype=np.uint16).reshape(40, 40) * 20
    Image.fromarray(pixels).save(folder / "test" / "kind_2" / "depth.png")


def emptied(part):
    return lambda folder: [path.unlink() for path in (folder / part).rglob("*.png")]


REFUSED = {
    "half an image": (lambda f: first(f).write_bytes(first(f).read_bytes()[:200]), {}, "0000.png"),
    "no image": (lambda f: first(f).write_bytes(b""), {}, "0000.png"),
    "16 bits": (deep_pixels, {}, "depth.png has 16-bit"),
    "an empty class": (lambda f: (f / "test" / "kind_9").mkdir(), {}, "kind_9 has no image"),
    "other classes": (
        lambda f: (f / "test" / "kind_2").rename(f / "test" / "cat"),
        {},
        "cat, kind_2",
    ),
    "no test": (lambda f: (f / "test").rename(f / "other"), {}, "neither val nor test"),
    "no train": (lambda f: (f / "train").rename(f / "other"), {}, "has no folder train"),
    "no classes": (lambda f: (f / "val").mkdir(), {}, "val has 0 folders"),
    "little val": (lambda f: (f / "test").rename(f / "val"), {}, "val has 3 images, too few"),
    "a file": (lambda f: None, {"folder": "train/kind_0/0000.png"}, "is a file"),
    "nowhere": (lambda f: None, {"folder": "nowhere"}, "nowhere does not exist"),
    "memory": (emptied("none"), {"image_size": 8000, "memory_gib": 1}, "smaller image_size"),
    "no size": (emptied("none"), {"image_size": None}, "image_size is missing"),
    "half a size": (emptied("none"), {"image_size": 32.5}, "image_size is 32.5"),
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


@pytest.mark.parametrize(
    ("place", "module", "function"),
    [
        ("packed/cifar-10-binary.tar.gz", gzip, "open"),
        ("pets/train/kind_1/0000.png", PIL.Image, "open"),
        ("pets/train/kind_1/deep", os, "scandir"),
        ("webp/classes.json", Path, "read_text"),
        ("webp/train-labels.npy", np, "load"),
    ],
)
def test_what_may_not_be_read_is_named(tmp_path, place, module, function, monkeypatch):
    """And nobody is told to copy it again."""
    made.write_binary(tmp_path / "packed")
    made.write_folders(tmp_path / "pets", parts=FEW)
    made.write_webp(tmp_path / "webp")
    sorted((tmp_path / "pets/train/kind_1").iterdir())[0].rename(
        tmp_path / "pets/train/kind_1/0000.png"
    )
    (tmp_path / "pets/train/kind_1/deep").mkdir()
    plain = getattr(module, function)

    def opened(path, *given, **options):
        if os.fspath(path) == str(tmp_path / place):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return plain(path, *given, **options)

    monkeypatch.setattr(module, function, opened)
    folder = tmp_path / place.split("/")[0]
    name = {"pets": "folder", "webp": "cifar100"}.get(folder.name, "cifar10")
    with pytest.raises(InputError) as told:
        load_images(name, folder, image_size=32 if name == "folder" else None)
    assert str(told.value) == f"{tmp_path / place} cannot be read: check its permissions"


def test_pillow_is_asked_for_by_its_extra(tmp_path, monkeypatch):
    made.write_png(tmp_path)
    made.write_binary(tmp_path / "binary")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(InputError, match=r"pip install 'featcal\[train\]'"):
        load_images("cifar10", tmp_path)
    load_images("cifar10", tmp_path / "binary")  # needs none
