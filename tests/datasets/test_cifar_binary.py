"""The official binary archives: read as they are, refused where they are not whole."""

import gzip
import io
import pickle
import tarfile

import made
import numpy as np
import pytest

from featcal import InputError
from featcal.core.progress import listen
from featcal.datasets import load_images
from featcal.datasets.cifar import ARCHIVES

NAMES = ("cifar10", "cifar100")


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "unpacked"])
@pytest.mark.parametrize("name", NAMES)
def test_what_was_written_is_read(tmp_path, name, packed):
    written = made.write_binary(tmp_path / "data", name, packed=packed)
    found = load_images(name, tmp_path / "data")
    assert found.name == name
    assert list(found.class_names) == made.names_of(name)
    assert found.val is None
    assert made.same(found.train, written.train)
    assert made.same(found.test, written.test)
    assert found.train.pixels.is_contiguous()


@pytest.mark.parametrize("name", NAMES)
def test_the_archive_itself_and_the_folder_of_records_can_be_given(tmp_path, name):
    archive = ARCHIVES[name]
    packed = made.write_binary(tmp_path / "packed", name)
    assert made.same(load_images(name, packed.folder / archive.file).test, packed.test)
    plain = made.write_binary(tmp_path / "plain", name, packed=False)
    assert made.same(load_images(name, str(plain.folder / archive.folder)).test, plain.test)


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


def test_nothing_is_written(tmp_path):
    made.write_binary(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    load_images("cifar10", tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


def test_the_progress_is_told(tmp_path):
    made.write_binary(tmp_path, packed=False)
    seen = []
    with listen(lambda *told: seen.append(told)):
        load_images("cifar10", tmp_path)
    assert seen[-1] == ("reading records", 7, 7)


@pytest.mark.parametrize("cut", [1, 2000])
def test_a_truncated_archive_is_refused(tmp_path, cut):
    made.write_binary(tmp_path)
    path = tmp_path / "cifar-10-binary.tar.gz"
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(InputError, match=r"is not a whole .tar.gz file .* download it again"):
        load_images("cifar10", tmp_path)


def test_a_changed_byte_is_refused(tmp_path):
    made.write_binary(tmp_path)
    path = tmp_path / "cifar-10-binary.tar.gz"
    tar = bytearray(gzip.decompress(path.read_bytes()))
    whole = gzip.compress(bytes(tar))
    tar[5000] ^= 1
    path.write_bytes(gzip.compress(bytes(tar))[:-8] + whole[-8:])
    with pytest.raises(InputError, match=r"CRC check failed"):
        load_images("cifar10", tmp_path)


def test_another_file_of_that_name_is_refused(tmp_path):
    path = tmp_path / "cifar-10-binary.tar.gz"
    path.write_bytes(b"<html>not found</html>")
    with pytest.raises(InputError, match=r"is not a whole .tar.gz file"):
        load_images("cifar10", tmp_path)
    made.write_binary(tmp_path / "other", "cifar100")
    with pytest.raises(InputError, match=r"has no cifar-10-batches-bin/.*batches.meta.txt"):
        load_images("cifar10", tmp_path / "other" / "cifar-100-binary.tar.gz")


@pytest.mark.parametrize(
    "content",
    [b"#!/bin/sh\n", b"", gzip.compress(b"no tar")],
    ids=["script", "empty", "gz"],
)
@pytest.mark.parametrize("file", ["mine.sh", "cifar-100-binary.tar.gz"])
def test_a_file_that_was_not_downloaded_is_never_to_be_removed(tmp_path, file, content):
    path = tmp_path / file
    path.write_bytes(content)
    with pytest.raises(InputError) as told:
        load_images("cifar10", path)
    said = str(told.value)
    assert said.startswith(f"{path} is not a .tar.gz of CIFAR's binary files (")
    assert said.endswith("): give that, or a folder")
    assert "remove" not in said


def test_members_count_by_their_exact_name_and_never_leave_the_archive(tmp_path):
    written = made.write_binary(tmp_path / "data" / "deep")
    path = written.folder / "cifar-10-binary.tar.gz"
    evil = made.records(made.images(3, seed=9))
    with gzip.open(path) as unzipped, tarfile.open(fileobj=unzipped) as old:
        files = [(m, old.extractfile(m).read()) for m in old.getmembers()]
    with tarfile.open(path, "w:gz") as out:
        for name in ("../../evil.bin", "/tmp/evil.bin", "x/../cifar-10-batches-bin/test_batch.bin"):
            member = tarfile.TarInfo(name)
            member.size = len(evil)
            out.addfile(member, io.BytesIO(evil))
        for member, content in files:
            out.addfile(member, io.BytesIO(content))
    found = load_images("cifar10", written.folder)
    assert made.same(found.test, written.test)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [path]


def test_a_link_in_place_of_a_file_is_not_followed(tmp_path):
    files = made.binary_files(made.write_binary(tmp_path), "cifar10")
    content = files.pop("test_batch.bin")
    (tmp_path / "secret.bin").write_bytes(content)
    path = made.pack(files, tmp_path / "plain.tar", inside="cifar-10-batches-bin")
    with tarfile.open(tmp_path / "cifar-10-binary.tar.gz", "w:gz") as out:
        with tarfile.open(path) as old:
            for member in old.getmembers():
                out.addfile(member, old.extractfile(member))
        link = tarfile.TarInfo("cifar-10-batches-bin/test_batch.bin")
        link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path / "secret.bin")
        out.addfile(link)
    with pytest.raises(InputError, match=r"has no cifar-10-batches-bin/test_batch.bin"):
        load_images("cifar10", tmp_path)


@pytest.mark.parametrize("cut", [1, 3072, None])
def test_a_truncated_file_of_records_is_refused(tmp_path, cut):
    made.write_binary(tmp_path, packed=False)
    path = tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[: -cut if cut else 0])
    with pytest.raises(InputError, match=r"data_batch_3.bin has \d+ bytes.*records of 3073"):
        load_images("cifar10", tmp_path)


def test_a_missing_file_is_named(tmp_path):
    made.write_binary(tmp_path, packed=False)
    (tmp_path / "cifar-10-batches-bin" / "test_batch.bin").unlink()
    with pytest.raises(InputError, match=r"test_batch.bin is missing: unpack cifar-10-binary"):
        load_images("cifar10", tmp_path)


def test_labels_out_of_range_are_refused(tmp_path):
    made.write_binary(tmp_path, packed=False)
    path = tmp_path / "cifar-10-batches-bin" / "test_batch.bin"
    path.write_bytes(b"\x0a" + path.read_bytes()[1:])
    with pytest.raises(InputError, match=r"test_batch.bin go from 0 to 10 and there are 10 class"):
        load_images("cifar10", tmp_path)


def test_class_names_of_another_number_are_refused(tmp_path):
    made.write_binary(tmp_path, packed=False)
    (tmp_path / "cifar-10-batches-bin" / "batches.meta.txt").write_text("cat\ndog\n")
    with pytest.raises(InputError, match="names 2 classes and cifar10 has 10"):
        load_images("cifar10", tmp_path)


class Trap:
    """A pickle that would leave a trace if it were read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("unpacked", [True, False])
def test_the_archives_of_pickles_are_refused_unread(tmp_path, name, unpacked):
    file, folder = ARCHIVES[name].python
    content = {"data_batch_1": pickle.dumps(Trap(tmp_path / "trace"))}
    if unpacked:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "data_batch_1").write_bytes(content["data_batch_1"])
    else:
        made.pack(content, tmp_path / file, inside=folder)
        with pytest.raises(InputError, match=f"holds pickles.*{ARCHIVES[name].file}"):
            load_images(name, tmp_path / file)
    with pytest.raises(InputError, match=f"holds pickles.*{ARCHIVES[name].file}"):
        load_images(name, tmp_path)
    assert not (tmp_path / "trace").exists()
