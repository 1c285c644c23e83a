"""CIFAR as sheets, tiny and (where the shared folder is here) whole."""

import json

import made
import numpy as np
import pytest
import torch
from PIL import Image

from featcal import InputError
from featcal.core.progress import listen
from featcal.datasets import Normalisation, load_images
from featcal.datasets import images as split


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_webp_sheets_are_read(tmp_path, name):
    written = made.write_webp(tmp_path, name)
    found = load_images(name, tmp_path)
    assert list(found.class_names) == made.names_of(name)
    assert made.same(found.train, written.train)
    assert made.same(found.test, written.test)


@pytest.mark.parametrize("inside", ["", "package"])
def test_png_sheets_are_read(tmp_path, inside):
    written = made.write_png(tmp_path / inside, train=43, test=7)  # five sheets of several sizes
    found = load_images("cifar10", tmp_path)
    assert found.class_names[3] == "cat"
    assert made.same(found.train, written.train)
    assert made.same(found.test, written.test)


def test_tiles_go_row_by_row(tmp_path):
    made.write_webp(tmp_path, train=12, test=6, columns=3)
    sheet = np.zeros((64, 96, 3), np.uint8)
    for tile in range(6):
        row, column = divmod(tile, 3)
        sheet[32 * row : 32 * row + 32, 32 * column : 32 * column + 32] = 40 * tile
    Image.fromarray(sheet).save(tmp_path / "test-00.webp", lossless=True)
    pixels = load_images("cifar100", tmp_path).test.pixels
    assert [p.unique().tolist() for p in pixels] == [[40 * tile] for tile in range(6)]


def test_sheets_are_ordered_by_number_not_by_text(tmp_path):
    written = made.write_png(tmp_path, train=22)
    for old in tmp_path.glob("data_batch_*.png"):
        old.unlink()
    for number, row in enumerate(written.train.pixels, start=1):  # 10 stands after 9, not after 1
        Image.fromarray(row.reshape(1, 1024, 3)).save(tmp_path / f"data_batch_{number}.png")
    assert made.same(load_images("cifar10", tmp_path).train, written.train)


def test_the_progress_is_told(tmp_path):
    made.write_webp(tmp_path)
    seen = []
    with listen(lambda *told: seen.append(told)):
        load_images("cifar100", tmp_path)
    assert seen[:3] == [("reading sheets", done, 2) for done in range(3)]


def write_labels(path, labels):
    np.save(path, labels) if path.suffix == ".npy" else path.write_text(json.dumps(labels))


@pytest.mark.parametrize(
    ("write", "file", "name"),
    [
        (made.write_webp, "train-labels.npy", "cifar100"),
        (made.write_png, "train_lables.json", "cifar10"),
    ],
)
@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0] * 39, "40 images and 39 labels: one of the files is incomplete"),
        ([0] * 39 + [100], "labels must be 0 to"),
        ([0] * 39 + [-1], "labels must be 0 to"),
        ([0.5] * 40, "whole numbers"),
        ([[0, 1]] * 40, "whole numbers"),
        ([], "whole numbers|there is none"),
    ],
    ids=["count", "high", "low", "floats", "one-hot", "none"],
)
def test_labels_that_do_not_fit_are_refused(tmp_path, write, file, name, labels, message):
    write(tmp_path)
    write_labels(tmp_path / file, labels)
    with pytest.raises(InputError, match=message):
        load_images(name, tmp_path)


@pytest.mark.parametrize("file", ["train-labels.npy", "classes.json"])
def test_files_that_are_missing_or_damaged_are_named(tmp_path, file):
    made.write_webp(tmp_path)
    (tmp_path / file).write_bytes(b"\x93NUMPY oh")
    with pytest.raises(InputError, match=f"{file} cannot be read .*: copy it again"):
        load_images("cifar100", tmp_path)
    (tmp_path / file).unlink()
    with pytest.raises(InputError, match=f"{file} is missing: copy it beside the sheets"):
        load_images("cifar100", tmp_path)


def test_labels_as_pickled_objects_are_refused(tmp_path):
    made.write_webp(tmp_path)
    np.save(tmp_path / "test-labels.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(InputError, match=r"test-labels.npy cannot be read"):
        load_images("cifar100", tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "is not a list of class names"),
        ('["a", "b"]', "names 2 classes and cifar100 has 100"),
    ],
)
def test_class_names_that_do_not_fit_are_refused(tmp_path, content, message):
    made.write_webp(tmp_path)
    (tmp_path / "classes.json").write_text(content)
    with pytest.raises(InputError, match=message):
        load_images("cifar100", tmp_path)


def test_the_sheets_of_another_data_set_are_refused(tmp_path):
    made.write_webp(tmp_path, "cifar100")
    with pytest.raises(InputError, match="names 100 classes and cifar10 has 10"):
        load_images("cifar10", tmp_path)


def test_a_damaged_sheet_is_named(tmp_path):
    made.write_webp(tmp_path)
    path = tmp_path / "train-01.webp"
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(InputError, match=r"train-01.webp cannot be read as an image"):
        load_images("cifar100", tmp_path)


def test_a_sheet_of_another_form_is_refused(tmp_path):
    webp, png = made.write_webp(tmp_path / "webp").folder, made.write_png(tmp_path / "png").folder
    Image.new("RGB", (70, 64)).save(webp / "test-00.webp", lossless=True)
    with pytest.raises(InputError, match=r"test-00.webp is 70 x 64 .* 32 x 32 tiles"):
        load_images("cifar100", webp)
    Image.new("RGB", (1000, 3)).save(png / "test_batch.png")
    with pytest.raises(InputError, match=r"test_batch.png is 1000 x 3 .* images of 1024"):
        load_images("cifar10", png)


def test_missing_sheets_are_noticed(tmp_path):
    webp, png = made.write_webp(tmp_path / "webp").folder, made.write_png(tmp_path / "png").folder
    (png / "data_batch_2.png").unlink()
    with pytest.raises(InputError, match=r"numbers 1, 3, 4, 5, which do not go from 1 without"):
        load_images("cifar10", png)
    (png / "test_batch.png").unlink()
    for sheet in png.glob("data_batch_*"):
        sheet.unlink()
    (webp / "test-00.webp").unlink()
    with pytest.raises(InputError, match="test has 0 images and 20 labels"):
        load_images("cifar100", webp)
    made.write_png(png)
    (png / "test_batch.png").unlink()
    with pytest.raises(InputError, match=r"test_batch.png is missing"):
        load_images("cifar10", png)


@pytest.mark.shared
def test_the_whole_of_cifar100_is_read(shared_file):
    folder = shared_file("data", "cifar100", "classes.json").parent
    data = load_images("cifar100", folder)
    assert data.train.pixels.shape == (50_000, 32, 32, 3)
    assert data.test.pixels.shape == (10_000, 32, 32, 3)
    assert torch.bincount(data.train.labels).tolist() == [500] * 100
    assert torch.bincount(data.test.labels).tolist() == [100] * 100
    assert data.class_names[19] == "cattle"  # what the first training image shows
    assert data.train.labels[0] == 19
    found = Normalisation.measured(data.train)  # as known for this data set to four digits
    assert found.mean == pytest.approx((0.5071, 0.4865, 0.4409), abs=5e-5)
    assert found.std == pytest.approx((0.2673, 0.2564, 0.2762), abs=5e-5)
    cut = split(data)
    assert (len(cut.train), len(cut.val), len(cut.test)) == (45_000, 5_000, 10_000)
    assert torch.equal(cut.val.pixels[0], data.train.pixels[26247])
