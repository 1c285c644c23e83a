"""One file for a calibrator: to the bit, never a pickle, and nothing broken gets in."""

import json
import math
import os
import signal
import stat
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import featcal
from featcal import Batch, FeatureClip, InputError, Temperature, parse


@pytest.fixture
def fitted(made):
    world = made(n=300, d=8, k=3, heat=2.0)
    batch = Batch(None, world.labels, world.features)
    return parse("clip(min_accuracy=0.5) | temperature").fit(batch, world.head, mode="sequential")


@pytest.fixture
def parts(fitted, tmp_path):
    """The metadata and the tensors of a good file, to be spoiled."""
    with safe_open(featcal.save(fitted, tmp_path / "good.safetensors"), framework="pt") as file:
        return file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


def test_what_is_saved_comes_back_to_the_bit(fitted, tmp_path):
    path = featcal.save(fitted, tmp_path / "c.safetensors")
    assert path == tmp_path / "c.safetensors"
    again = featcal.load(str(path))
    assert repr(again) == repr(fitted)
    for key, value in fitted.state_dict().items():
        assert torch.equal(again.state_dict()[key], value)
        assert again.state_dict()[key].dtype == value.dtype
    assert again.report == fitted.report


def test_a_noop_comes_back_as_it_was(tmp_path):
    head = torch.nn.Linear(3, 2)
    data = Batch(None, torch.tensor([0, 1]), torch.zeros(2, 3))
    clip = FeatureClip().fit(data, head)
    again = featcal.load(featcal.save(clip, tmp_path / "c.safetensors"))
    assert math.isinf(float(again.threshold))
    assert again.report.noop
    assert again.report.as_json() == clip.report.as_json()
    assert again.report == clip.report


def test_a_loaded_calibrator_can_be_fitted_and_saved_again(fitted, made, tmp_path):
    again = featcal.load(featcal.save(fitted, tmp_path / "a.safetensors"))
    twice = featcal.load(featcal.save(again, tmp_path / "b.safetensors"))
    assert twice.report == fitted.report
    world = made(n=300, d=8, k=3, heat=1.0, seed=4)
    twice.fit(Batch(None, world.labels, world.features), world.head)
    assert twice.report != fitted.report


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_a_calibrator_in_another_type_is_kept(dtype, tmp_path):
    hot = Temperature().assign(temperature=1.5).to(dtype)
    again = featcal.load(featcal.save(hot, tmp_path / "c.safetensors"))
    assert float(again.temperature) == 1.5


def test_the_header_is_readable_by_anyone(parts):
    metadata, tensors = parts
    assert metadata["format"] == "featcal.calibrator"
    assert metadata["recipe"] == "clip(min_accuracy=0.5) | temperature"
    assert json.loads(metadata["versions"])["featcal"] == featcal.__version__
    assert json.loads(metadata["report"])["mode"] == "sequential"
    assert set(tensors) == {"steps.0.threshold", "steps.1.temperature"}


def test_the_file_has_ordinary_permissions(tmp_path):
    umask = os.umask(0o022)
    try:
        path = featcal.save(Temperature(), tmp_path / "c.safetensors")
    finally:
        os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


# --- writing ----------------------------------------------------------------------------------


def test_an_existing_file_is_kept_unless_told_otherwise(tmp_path):
    path = featcal.save(Temperature(), tmp_path / "c.safetensors")
    before = path.read_bytes()
    other = Temperature().assign(temperature=2.0)
    with pytest.raises(InputError, match=r"c\.safetensors exists: choose another name"):
        featcal.save(other, path)
    assert path.read_bytes() == before
    featcal.save(other, path, overwrite=True)
    assert featcal.load(path).temperature == 2
    assert [p.name for p in tmp_path.iterdir()] == ["c.safetensors"]


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(InputError, match="does not exist: create it first"):
        featcal.save(Temperature(), tmp_path / "no" / "c.safetensors")


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = featcal.save(Temperature(), tmp_path / "c.safetensors")
    before = path.read_bytes()

    def fails(tensors, target, metadata=None):
        target.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("featcal.io.save_file", fails)
    with pytest.raises((OSError, InputError), match="disk full"):
        featcal.save(Temperature(), path, overwrite=True)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["c.safetensors"]


KILLED = """
import os, signal, sys
import featcal, featcal.io
def dies(tensors, target, metadata=None):
    target.write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
featcal.io.save_file = dies
featcal.save(featcal.Temperature(), sys.argv[1])
"""


def test_a_killed_save_leaves_nothing_under_the_name(tmp_path):
    path = tmp_path / "c.safetensors"
    done = subprocess.run([sys.executable, "-c", KILLED, path], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert not path.exists()
    featcal.save(Temperature(), path)
    assert featcal.load(path).temperature == 1


# --- reading ----------------------------------------------------------------------------------


def test_what_is_not_there_is_said(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        featcal.load(tmp_path / "none.safetensors")


def test_a_folder_is_refused_as_one(tmp_path):
    with pytest.raises(InputError, match="folder"):
        featcal.load(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"x", b"\x00" * 8, b"\xff" * 64, b"PK\x03\x04" + b"0" * 99]
)
def test_other_bytes_are_refused(tmp_path, content):
    path = tmp_path / "c.safetensors"
    path.write_bytes(content)
    with pytest.raises(InputError, match="not a whole safetensors file"):
        featcal.load(path)


def test_a_truncated_file_is_refused_wherever_it_ends(fitted, tmp_path):
    whole = featcal.save(fitted, tmp_path / "whole.safetensors").read_bytes()
    path = tmp_path / "part.safetensors"
    for end in range(0, len(whole), 10):
        path.write_bytes(whole[:end])
        with pytest.raises(InputError, match="not a whole safetensors file"):
            featcal.load(path)
    path.write_bytes(whole)
    featcal.load(path)


def test_foreign_safetensors_are_refused(tmp_path):
    path = tmp_path / "foreign.safetensors"
    save_file({"weight": torch.zeros(2)}, path)
    with pytest.raises(InputError, match="is not a featcal calibrator"):
        featcal.load(path)
    save_file({"weight": torch.zeros(2)}, path, metadata={"format": "pt"})
    with pytest.raises(InputError, match="is not a featcal calibrator"):
        featcal.load(path)


@pytest.mark.parametrize("version", ["2", "99", "", "one"])
def test_another_version_is_refused(parts, tmp_path, version):
    metadata, tensors = parts
    path = tmp_path / "c.safetensors"
    save_file(tensors, path, metadata={**metadata, "version": version})
    with pytest.raises(InputError, match=r"has calibrator format .* update featcal"):
        featcal.load(path)


@pytest.mark.parametrize(
    "recipe",
    [
        "__import__('os')",
        "__import__('os').system('touch /tmp/pwned')",
        "clip(min_accuracy=__import__('os').getpid())",
        "(lambda: 1)()",
        "",
        "nope",
        "temperature | clip",
        "clip(" * 300,
    ],
)
def test_a_tampered_recipe_is_refused_not_run(parts, tmp_path, recipe):
    metadata, tensors = parts
    path = tmp_path / "c.safetensors"
    save_file(tensors, path, metadata={**metadata, "recipe": recipe})
    with pytest.raises(InputError):
        featcal.load(path)


def test_a_refused_recipe_names_its_file(parts, tmp_path):
    metadata, tensors = parts
    path = tmp_path / "spoiled.safetensors"
    save_file(tensors, path, metadata={**metadata, "recipe": "nope"})
    with pytest.raises(InputError, match=r"spoiled\.safetensors"):
        featcal.load(path)


def without(tensors, key):
    return {name: value for name, value in tensors.items() if name != key}


@pytest.mark.parametrize(
    "change",
    [
        lambda t: without(t, "steps.1.temperature"),
        lambda t: {},
        lambda t: {**t, "steps.2.temperature": torch.ones(())},
        lambda t: {"threshold": t["steps.0.threshold"]},
    ],
    ids=[
        "one missing",
        "all missing",
        "one too many",
        "other names",
    ],
)
def test_tensors_that_the_recipe_does_not_mean_are_refused(parts, tmp_path, change):
    metadata, tensors = parts
    path = tmp_path / "c.safetensors"
    save_file(change(tensors), path, metadata=metadata)
    with pytest.raises(InputError, match=r"does not hold what its recipe .* needs: fit it again"):
        featcal.load(path)


@pytest.mark.parametrize(
    "report", ["{", "[]", "3", '"text"', "{}", '{"steps": 3}', '{"steps": [{}]}', "[" * 5000]
)
def test_a_spoiled_report_is_refused(parts, tmp_path, report):
    metadata, tensors = parts
    path = tmp_path / "c.safetensors"
    save_file(tensors, path, metadata={**metadata, "report": report})
    with pytest.raises(InputError, match="fit it again"):
        featcal.load(path)


def test_a_file_without_a_report_loads(parts, tmp_path):
    metadata, tensors = parts
    path = tmp_path / "c.safetensors"
    del metadata["report"]
    save_file(tensors, path, metadata=metadata)
    assert featcal.load(path).report is None


def test_a_numpy_hyperparameter_does_not_make_an_unreadable_file(tmp_path):
    numpy = pytest.importorskip("numpy")
    clip = FeatureClip(min_accuracy=numpy.float64(0.99))
    again = featcal.load(featcal.save(clip, tmp_path / "c.safetensors"))
    assert again.min_accuracy == 0.99
