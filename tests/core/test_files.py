"""Files appear whole or not at all."""

import errno
import os
import stat
import tempfile
from pathlib import Path

import pytest
from safetensors import SafetensorError

from featcal.core.checks import InputError
from featcal.core.files import LOCK, check_free, left_over_of, locked, new_file, new_folder


def stops():
    return pytest.raises(RuntimeError, match="stop")


def left_over(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_failing_overwrite_keeps_the_old_file(tmp_path):
    target = tmp_path / "a.bin"
    target.write_bytes(b"old")
    with stops(), new_file(target, overwrite=True) as temporary:
        temporary.write_bytes(b"half")
        raise RuntimeError("stop")
    assert target.read_bytes() == b"old"
    with new_file(target, overwrite=True) as temporary:
        temporary.write_bytes(b"new")
    assert target.read_bytes() == b"new"
    assert left_over(tmp_path) == ["a.bin"]


def test_an_existing_path_is_refused(tmp_path):
    target = tmp_path / "a.bin"
    target.write_bytes(b"old")
    with pytest.raises(InputError, match=r"a\.bin exists: choose another name"), new_file(target):
        pytest.fail("the block must not run")
    with pytest.raises(InputError, match="is a folder: choose another name"):
        check_free(tmp_path, overwrite=True)
    with pytest.raises(InputError, match="exists: choose another name"):
        check_free(tmp_path)
    with pytest.raises(InputError, match=r"output folder .*nowhere does not exist: create it"):
        check_free(tmp_path / "nowhere" / "a.bin")


@pytest.mark.parametrize("umask", [0o077, 0o002])
def test_permissions_are_ordinary(tmp_path, umask):
    before = os.umask(umask)
    try:
        with new_file(tmp_path / "a.bin") as temporary:
            temporary.write_bytes(b"x")
        with new_folder(tmp_path / "pack"):
            pass
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.bin").stat().st_mode) == 0o666 & ~umask
    assert stat.S_IMODE((tmp_path / "pack").stat().st_mode) == 0o777 & ~umask


def test_a_new_folder_appears_whole(tmp_path):
    target = tmp_path / "pack"
    with new_folder(target) as temporary:
        (temporary / "part").write_text("x")
        assert not target.exists()
    assert left_over(tmp_path) == ["pack"]
    assert (target / "part").read_text() == "x"
    assert stat.S_IMODE(target.stat().st_mode) & 0o500 == 0o500
    with pytest.raises(InputError, match="exists"), new_folder(target):
        pytest.fail("the block must not run")


@pytest.mark.parametrize("new", [new_file, new_folder])
def test_the_content_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch, new):
    target, synced = tmp_path / "made", []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(target.exists()), fsync(file)))
    with new(target) as temporary:
        (temporary if new is new_file else temporary / "a.bin").write_bytes(b"whole")
    assert synced == [False]


def test_what_a_killed_process_left_is_told_by_the_file_it_was_writing(tmp_path):
    with new_file(tmp_path / "a.b.bin") as temporary:
        temporary.write_bytes(b"half")
        assert left_over_of(temporary.parent) == "a.b.bin"
        (tmp_path / ".x.featcal-abcdefgh").symlink_to(temporary.parent)
        assert left_over_of(tmp_path / ".x.featcal-abcdefgh") is None
    for name in (".git", "a.bin.featcal-abcdefgh", ".a.bin.abc"):
        (tmp_path / name).mkdir()
        assert left_over_of(tmp_path / name) is None
    (tmp_path / ".a.bin.featcal-abcdefgh").write_bytes(b"")
    assert left_over_of(tmp_path / ".a.bin.featcal-abcdefgh") is None


def test_a_folder_has_one_writer(tmp_path):
    busy = pytest.raises(InputError, match="another process: wait for it")
    with locked(tmp_path), busy, locked(tmp_path):
        pass
    with locked(tmp_path):
        assert (tmp_path / LOCK).exists()


def test_a_lock_that_was_removed_meanwhile_counts_for_nothing(tmp_path, monkeypatch):
    """The one before removes its lock file after we opened it: the lock we get is on nothing."""
    fcntl = pytest.importorskip("fcntl")
    flock, calls = fcntl.flock, []

    def after_a_removal(file, how):
        if not calls:
            (tmp_path / LOCK).unlink()
        calls.append(file)
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", after_a_removal)
    opened = len(os.listdir("/dev/fd"))
    with locked(tmp_path):
        assert len(calls) == 2
        with pytest.raises(InputError, match="another process"), locked(tmp_path):
            pass
    assert len(os.listdir("/dev/fd")) == opened


def test_only_a_regular_file_is_ever_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "real").write_bytes(b"kept")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for place in (tmp_path / "pipe", tmp_path / "link", "/dev/null"):
        with pytest.raises(InputError, match="is no regular file"), new_file(place, overwrite=True):
            pass

    def late(theirs, make):
        with new_file(theirs, overwrite=True) as temporary:
            temporary.write_bytes(b"mine")
            make(theirs)

    for name, make in (("late", os.mkfifo), ("tied", lambda path: path.symlink_to("real"))):
        with pytest.raises(InputError, match=f"{name} is no regular file"):
            late(tmp_path / name, make)
    assert (tmp_path / "late").is_fifo()
    assert (tmp_path / "real").read_bytes() == b"kept"
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "tied").is_symlink()
    assert left_over(tmp_path) == ["late", "link", "pipe", "real", "tied"]


@pytest.mark.parametrize("links", [True, False])
def test_a_file_that_appears_meanwhile_is_not_replaced(tmp_path, links, monkeypatch):
    if not links:

        def refused(*_):
            raise OSError(errno.EPERM, "no hard links here")

        monkeypatch.setattr(os, "link", refused)
    with monkeypatch.context() as only:
        if links:  # in one step, with no moment at which the file is there and empty
            only.setattr(os, "replace", None)
        with new_file(tmp_path / "first") as temporary:
            temporary.write_bytes(b"mine")
    assert (tmp_path / "first").read_bytes() == b"mine"

    def late():
        with new_file(tmp_path / "a") as temporary:
            temporary.write_bytes(b"mine")
            (tmp_path / "a").write_bytes(b"theirs")

    with pytest.raises(InputError, match="meanwhile"):
        late()
    assert (tmp_path / "a").read_bytes() == b"theirs"
    assert left_over(tmp_path) == ["a", "first"]


def test_a_folder_that_appears_meanwhile_is_not_replaced(tmp_path):
    def late(theirs):
        with new_folder(theirs) as temporary:
            (temporary / "part").write_text("mine")
            if theirs.name == "file":
                theirs.write_text("theirs")
            else:
                theirs.mkdir()
                (theirs / "part").write_text("theirs")

    for name in ("file", "folder"):
        with pytest.raises(InputError, match=f"{name} has come to exist meanwhile"):
            late(tmp_path / name)
    assert (tmp_path / "folder" / "part").read_text() == "theirs"
    assert left_over(tmp_path) == ["file", "folder"]


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS])
def test_a_finished_file_outlives_a_refused_change_of_mode(tmp_path, monkeypatch, number):
    def refused(*_, **__):
        raise OSError(number, "not here")

    monkeypatch.setattr(Path, "chmod", refused)
    with new_file(tmp_path / "a") as temporary, new_folder(tmp_path / "b") as folder:
        temporary.write_bytes(b"done")
        (folder / "part").write_bytes(b"done")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b" / "part").read_bytes() == b"done"


def test_what_a_killed_writer_left_goes_with_the_next_one_and_a_living_ones_stays(tmp_path):
    left = tmp_path / ".a.bin.featcal-abcdefgh"
    left.mkdir()
    (left / "a.bin").write_bytes(b"half")
    others = [tmp_path / name for name in (".b.bin.featcal-abcdefgh", ".a.bin.settings")]
    for other in others:
        other.mkdir()
    with new_file(tmp_path / "a.bin") as living:
        living.write_bytes(b"one")
        with new_file(tmp_path / "a.bin") as second:
            second.write_bytes(b"two")
            assert living.exists()
        assert not left.exists()
        (tmp_path / "a.bin").unlink()
    assert (tmp_path / "a.bin").read_bytes() == b"one"
    assert all(other.exists() for other in others)


def test_a_folder_that_another_took_for_left_over_is_made_once_more(tmp_path, monkeypatch):
    """In the moment between its making and its lock."""
    make, made = tempfile.mkdtemp, []

    def taken(**options):
        made.append(make(**options))
        if len(made) == 1:
            os.rmdir(made[0])
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", taken)
    with new_file(tmp_path / "a") as temporary:
        temporary.write_bytes(b"mine")
    assert len(made) == 2
    assert left_over(tmp_path) == ["a"]


def test_what_cannot_be_written_is_said_of_the_output_and_of_nothing_else(tmp_path):
    def fails(error):
        with new_file(tmp_path / "a.bin") as temporary:
            temporary.write_bytes(b"half")
            raise error(temporary)

    full = "No space left on device"
    for error in (
        lambda _: OSError(errno.ENOSPC, full),
        lambda temporary: OSError(errno.ENOSPC, full, temporary),
        lambda _: SafetensorError(full),
    ):
        with pytest.raises(InputError) as caught:
            fails(error)
        assert str(caught.value) == f"output {tmp_path / 'a.bin'} cannot be written: {full}"
    with pytest.raises(FileNotFoundError):
        fails(lambda _: FileNotFoundError(errno.ENOENT, "gone", "input"))
    with pytest.raises(BrokenPipeError):
        fails(BrokenPipeError)
    refused = InputError("rows are too few")
    with pytest.raises(InputError) as caught:
        fails(lambda _: refused)
    assert caught.value is refused
    assert left_over(tmp_path) == []


def test_without_locks_the_work_goes_on(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def none(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    (tmp_path / ".a.bin.featcal-abcdefgh").mkdir()
    with locked(tmp_path) as held, new_file(tmp_path / "a.bin") as temporary:
        assert not held
        temporary.write_bytes(b"x")
    assert (tmp_path / ".a.bin.featcal-abcdefgh").exists()  # nobody knows whether its writer lives
