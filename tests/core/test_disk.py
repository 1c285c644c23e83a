"""Files appear whole or not at all."""

import os
import signal
import stat
import subprocess
import sys
import time

import pytest

from featcal.core.checks import InputError
from featcal.core.files import LOCK, check_free, left_over_of, locked, new_file, new_folder


def stops():
    return pytest.raises(RuntimeError, match="stop")


def left_over(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_new_file_is_there_after_the_block_and_not_before(tmp_path):
    target = tmp_path / "a.bin"
    with new_file(target) as temporary:
        temporary.write_bytes(b"whole")
        assert not target.exists()
    assert target.read_bytes() == b"whole"
    assert left_over(tmp_path) == ["a.bin"]


def test_a_failing_block_leaves_nothing(tmp_path):
    with stops(), new_file(tmp_path / "a.bin") as temporary:
        temporary.write_bytes(b"half")
        raise RuntimeError("stop")
    assert left_over(tmp_path) == []


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


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"output folder .*nowhere does not exist: create it"):
        check_free(tmp_path / "nowhere" / "a.bin")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="does not exist: create it first"):
        check_free(tmp_path / "file" / "a.bin")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_folder_is_refused(tmp_path):
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(InputError, match="cannot be written: choose another"):
            check_free(tmp_path / "a.bin")
    finally:
        tmp_path.chmod(0o755)


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_permissions_are_ordinary(tmp_path, umask):
    before = os.umask(umask)
    try:
        with new_file(tmp_path / "a.bin") as temporary:
            temporary.write_bytes(b"x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.bin").stat().st_mode) == 0o666 & ~umask


def test_a_relative_path_is_taken_from_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with new_file("a.bin") as temporary:
        temporary.write_bytes(b"x")
    with new_folder("folder") as temporary:
        (temporary / "b").write_text("y")
    assert left_over(tmp_path) == ["a.bin", "folder"]


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


def test_a_failing_new_folder_leaves_nothing(tmp_path):
    with stops(), new_folder(tmp_path / "pack") as temporary:
        (temporary / "part").write_text("x")
        raise RuntimeError("stop")
    assert left_over(tmp_path) == []


WRITER = """
import sys, time
from featcal.core.files import new_file
with new_file(sys.argv[1], overwrite=True) as temporary:
    with open(temporary, "wb") as file:
        file.write(b"half")
        file.flush()
        print("writing", flush=True)
        time.sleep(60)
"""


@pytest.mark.parametrize("old", [None, b"old"])
def test_a_killed_writer_leaves_the_final_name_as_it_was(tmp_path, old):
    target = tmp_path / "a.bin"
    if old is not None:
        target.write_bytes(old)
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, target], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "writing\n"
    process.send_signal(signal.SIGKILL)
    assert process.wait(timeout=20) == -signal.SIGKILL
    process.stdout.close()
    time.sleep(0.05)
    assert (target.read_bytes() if target.exists() else None) == old
    with new_file(target, overwrite=True) as temporary:  # and the way is free for another try
        temporary.write_bytes(b"new")
    assert target.read_bytes() == b"new"


# --- what lies on the disk, and who may write there --------------------------------------------


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
        (tmp_path / ".x.abcdefgh").symlink_to(temporary.parent)
        assert left_over_of(tmp_path / ".x.abcdefgh") is None
    for name in (".git", "a.bin.abcdefgh", ".a.bin.abc"):
        (tmp_path / name).mkdir()
        assert left_over_of(tmp_path / name) is None
    (tmp_path / ".a.bin.abcdefgh").write_bytes(b"")
    assert left_over_of(tmp_path / ".a.bin.abcdefgh") is None


def test_a_folder_has_one_writer(tmp_path):
    busy = pytest.raises(InputError, match="another process: wait for it")
    with locked(tmp_path), busy, locked(tmp_path):
        pass
    with locked(tmp_path):
        assert (tmp_path / LOCK).exists()


def test_a_folder_that_cannot_be_written_to_says_so(tmp_path, monkeypatch):
    def denied(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(InputError, match="cannot be written to: check its permissions"):
        locked(tmp_path).__enter__()


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
    with locked(tmp_path):
        assert len(calls) == 2
        with pytest.raises(InputError, match="another process"), locked(tmp_path):
            pass
