"""What may not be read is named, and nobody is told to copy or remove it."""

import gzip
import os
from pathlib import Path

import made
import numpy as np
import PIL.Image
import pytest

from featcal import InputError
from featcal.datasets import load_images

ARCHIVE = "packed/cifar-10-binary.tar.gz"
IMAGE = "pets/train/kind_1/0000.png"
DEEP = "pets/train/kind_1/deep"
JSON, LABELS = "webp/classes.json", "webp/train-labels.npy"
FUNCTIONS = {
    ARCHIVE: (gzip, "open"),
    IMAGE: (PIL.Image, "open"),
    DEEP: (os, "scandir"),
    JSON: (Path, "read_text"),
    LABELS: (np, "load"),
    "png/train_lables.json": (Path, "read_text"),
}
UNREADABLE = [
    *FUNCTIONS,
    "packed",
    "unpacked/cifar-10-batches-bin",
    "unpacked/cifar-10-batches-bin/test_batch.bin",
    "pets",
    "pets/test",
    "pets/train/kind_1",
]


@pytest.fixture
def data(tmp_path):
    """A data set of every form."""
    made.write_binary(tmp_path / "packed")
    made.write_binary(tmp_path / "unpacked", packed=False)
    made.write_folders(tmp_path / "pets")
    made.write_webp(tmp_path / "webp")
    made.write_png(tmp_path / "png")
    sorted((tmp_path / "pets/train/kind_1").iterdir())[0].rename(tmp_path / IMAGE)
    (tmp_path / DEEP).mkdir()
    return tmp_path


def refusal(data, place):
    """What is said of the data set that the place belongs to."""
    folder = data / Path(place).parts[0]
    options = {"image_size": 32} if folder.name == "pets" else {}
    name = {"pets": "folder", "webp": "cifar100"}.get(folder.name, "cifar10")
    with pytest.raises(InputError) as told:
        load_images(name, folder, **options)
    return str(told.value)


@pytest.mark.parametrize("place", FUNCTIONS)
def test_the_place_is_named(data, place, monkeypatch):
    module, name = FUNCTIONS[place]
    plain = getattr(module, name)

    def opened(path, *given, **options):
        if os.fspath(path) == str(data / place):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return plain(path, *given, **options)

    monkeypatch.setattr(module, name, opened)
    assert refusal(data, place) == f"{data / place} cannot be read: check its permissions"


def test_an_archive_that_is_given_itself_is_named(data, monkeypatch):
    def opened(path):
        raise PermissionError(13, "Permission denied")  # without a name, as some file systems do

    monkeypatch.setattr(gzip, "open", opened)
    with pytest.raises(InputError) as told:
        load_images("cifar10", data / ARCHIVE)
    assert str(told.value) == f"{data / ARCHIVE} cannot be read: check its permissions"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("place", UNREADABLE)
def test_without_the_right_the_place_is_named(data, place):
    mode = (data / place).stat().st_mode
    (data / place).chmod(0)
    try:
        said = refusal(data, place)
    finally:
        (data / place).chmod(mode)
    assert said.startswith(str(data / place))
    assert said.endswith(" cannot be read: check its permissions")
