"""One file for a calibrator: to the bit, never a pickle, and nothing broken gets in."""

import json
import math
import os
import stat

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import featcal
import featcal.io
from featcal import Batch, FeatureClip, InputError, Temperature, parse


@pytest.fixture(scope="module")
def fitted(made):
    world = made(n=300, d=8, k=3, heat=2.0)
    batch = Batch(None, world.labels, world.features)
    return parse("clip(min_accuracy=0.5) | temperature").fit(batch, world.head, mode="sequential")


@pytest.fixture
def parts(fitted, tmp_path):
    """The metadata and the tensors of a good file, to be spoiled."""
    with safe_open(featcal.save(fitted, tmp_path / "good.safetensors"), framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        # As those of earlier versions were, without a sha256 that would tell of any change.
        return {key: text for key, text in file.metadata().items() if key != "sha256"}, tensors


def test_what_is_saved_comes_back_to_the_bit(fitted, tmp_path):
    path = featcal.save(fitted, tmp_path / "c.safetensors")
    assert path == tmp_path / "c.safetensors"
    again = featcal.load(str(path))
    assert repr(again) == repr(fitted)
    for key, value in fitted.state_dict().items():
        assert torch.equal(again.state_dict()[key], value)
        assert again.state_dict()[key].dtype == value.dtype
    assert again.report == fitted.report
    assert featcal.load(featcal.save(again, tmp_path / "d.safetensors")).report == fitted.report


def test_a_noop_another_type_and_numpy_numbers_come_back(tmp_path):
    data = Batch(None, torch.tensor([0, 1]), torch.zeros(2, 3))
    clip = FeatureClip().fit(data, torch.nn.Linear(3, 2))
    again = featcal.load(featcal.save(clip, tmp_path / "a.safetensors"))
    assert math.isinf(float(again.threshold))
    assert again.report == clip.report
    assert again.report.noop
    hot = Temperature().assign(temperature=1.5).half()
    assert featcal.load(featcal.save(hot, tmp_path / "b.safetensors")).temperature == 1.5
    clip = FeatureClip(min_accuracy=np.float64(0.99))
    assert featcal.load(featcal.save(clip, tmp_path / "c.safetensors")).min_accuracy == 0.99


def test_the_header_is_readable_by_anyone(parts):
    metadata, tensors = parts
    assert metadata["format"] == "featcal.calibrator"
    assert metadata["recipe"] == "clip(min_accuracy=0.5) | temperature"
    assert json.loads(metadata["versions"])["featcal"] == featcal.__version__
    assert json.loads(metadata["report"])["mode"] == "sequential"
    assert set(tensors) == {"steps.0.threshold", "steps.1.temperature"}


def test_an_existing_file_is_kept_unless_told_otherwise(tmp_path):
    umask = os.umask(0o022)
    try:
        path = featcal.save(Temperature(), tmp_path / "c.safetensors")
    finally:
        os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    before = path.read_bytes()
    other = Temperature().assign(temperature=2.0)
    with pytest.raises(InputError, match=r"c\.safetensors exists: choose another name"):
        featcal.save(other, path)
    with pytest.raises(InputError, match="does not exist: create it first"):
        featcal.save(other, tmp_path / "no" / "c.safetensors")
    assert path.read_bytes() == before
    featcal.save(other, path, overwrite=True)
    assert featcal.load(path).temperature == 2
    assert [p.name for p in tmp_path.iterdir()] == ["c.safetensors"]


def test_a_failed_write_leaves_what_was_there(tmp_path, monkeypatch):
    path = featcal.save(Temperature(), tmp_path / "c.safetensors")
    before = path.read_bytes()

    def fails(tensors, target, metadata=None):
        target.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("safetensors.torch.save_file", fails)
    with pytest.raises(InputError, match="disk full"):
        featcal.save(Temperature(), path, overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["c.safetensors"]
    assert path.read_bytes() == before


def test_what_is_no_calibrator_is_refused(fitted, tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        featcal.load(tmp_path / "none.safetensors")
    with pytest.raises(InputError, match="folder"):
        featcal.load(tmp_path)
    whole = featcal.save(fitted, tmp_path / "whole.safetensors").read_bytes()
    path = tmp_path / "part.safetensors"
    ends = range(0, len(whole), 97)
    for content in (b"\xff" * 64, b"PK\x03\x04" + b"0" * 99, *(whole[:end] for end in ends)):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"cannot be read .*fit it again"):
            featcal.load(path)
    for metadata in (None, {"format": "pt"}):
        save_file({"weight": torch.zeros(2)}, path, metadata=metadata)
        with pytest.raises(InputError, match="is not a featcal calibrator"):
            featcal.load(path)


SPOILED = [
    *[({"version": version}, "update featcal") for version in ("2", "", "one")],
    *[
        ({"recipe": recipe}, r"c\.safetensors")
        for recipe in (
            *("__import__('os').system('touch /tmp/pwned')", "(lambda: 1)()", "", "nope"),
            *("clip(min_accuracy=__import__('os').getpid())", "temperature | clip", "clip(" * 300),
        )
    ],
    *[
        ({"report": report}, "fit it again")
        for report in ("{", "[]", '"text"', "{}", '{"steps": [{}]}', "[" * 5000)
    ],
]


@pytest.mark.parametrize(("change", "message"), SPOILED)
def test_a_tampered_header_is_refused_not_run(parts, tmp_path, change, message):
    metadata, tensors = parts
    save_file(tensors, tmp_path / "c.safetensors", metadata={**metadata, **change})
    with pytest.raises(InputError, match=message):
        featcal.load(tmp_path / "c.safetensors")


def test_tensors_that_the_recipe_does_not_mean_are_refused(parts, tmp_path):
    metadata, tensors = parts
    path = tmp_path / "c.safetensors"
    clip = {"steps.0.threshold": tensors["steps.0.threshold"]}
    for spoiled in ({}, clip, {**tensors, "steps.2.temperature": torch.ones(())}):
        save_file(spoiled, path, metadata=metadata)
        with pytest.raises(InputError, match=r"c\.safetensors cannot be read .*fit it again"):
            featcal.load(path)
    del metadata["report"]
    save_file(tensors, path, metadata=metadata)
    assert featcal.load(path).report is None


def test_bits_that_rot_and_values_no_fit_gives_are_refused(fitted, parts, tmp_path):
    path = featcal.save(fitted, tmp_path / "c.safetensors")
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 2]) + whole[place + 1 :])
        with pytest.raises(InputError, match=r"c\.safetensors"):
            featcal.load(path)
    metadata, tensors = parts
    for key, value in (
        ("steps.1.temperature", math.nan),
        ("steps.1.temperature", math.inf),
        ("steps.0.threshold", math.nan),
    ):
        save_file({**tensors, key: torch.tensor(value)}, path, metadata=metadata)
        with pytest.raises(InputError, match=f"{key} "):
            featcal.load(path)
    save_file({**tensors, "steps.0.threshold": torch.tensor(math.inf)}, path, metadata=metadata)
    assert featcal.load(path).steps[0].threshold == math.inf


def test_what_can_be_saved_can_be_read(tmp_path):
    with pytest.raises(InputError, match="steps: give 1 to 16"):
        parse("|".join(["temperature"] * 160))
    longest = "group(partitions=199, groups=99, base='ensemble', min_rows=10000000, "
    longest += "features='clipped', held_out=False, seed=4611686018427387904)"
    many = parse(" | ".join([longest] * 16))
    assert repr(featcal.load(featcal.save(many, tmp_path / "c.safetensors"))) == repr(many)
