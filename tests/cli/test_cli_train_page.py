"""docs/training.md: its code runs, its commands can be given, and docs/cli.md has every option."""

import re
import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path

import made
import pytest
import torch
from cli_cases import done
from safetensors.torch import load_file

import featcal
from featcal import InputError, datasets, models
from featcal.cli.train import train
from featcal.losses import parse_loss
from featcal.train import Recipe

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "training.md").read_text()
COMMANDS = re.findall(r"^.*(featcal train .*)$", PAGE, flags=re.MULTILINE)


def test_every_snippet_runs(tmp_path, monkeypatch, capsys):
    """As they stand but for their size: a small network, a small data set, one epoch."""
    monkeypatch.chdir(tmp_path)
    made.write_binary(tmp_path / "data", train=80)
    monkeypatch.setattr(datasets, "split", partial(datasets.split, val=20))
    monkeypatch.setattr(models, "build", partial(models.build, width=1, depth=10))
    monkeypatch.setattr(Recipe, "scaled", lambda recipe, _: replace(recipe, epochs=1, batch=20))
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(blocks) == 5
    names = {}
    exec(blocks[0], names)
    assert len(names["history"]) == 1
    assert "Watched(nll=" in capsys.readouterr().out
    trained = names["model"].state_dict()
    exec(blocks[1], names)
    assert Path("history.png").read_bytes()[:4] == b"\x89PNG"
    exec(blocks[2], names)
    assert all(torch.equal(trained[key], v) for key, v in names["model"].state_dict().items())
    exec(blocks[3], names)
    written = Path("run/model.safetensors").read_bytes()
    with pytest.raises(InputError, match=r"run holds a finished run \(run.json\)"):
        exec(blocks[0], {})
    assert Path("run/model.safetensors").read_bytes() == written
    assert "head.calibrator.steps.0.threshold" in names["calibrated"].state_dict()


def test_from_the_files_of_a_run_to_one_image(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    pictures = made.write_folders(tmp_path / "pets", size=(24, 24))
    given = ("train", "folder", "wrn16x4", "-o", "run", "--data", "pets", "--image-size", "24")
    small = ("--network-option", "width=1", "--batch", "16", "--epochs", "1")
    done(*given, *small)
    done("fit", "run/pack", "temperature", "-o", "cal.safetensors")
    first = tmp_path / "pets" / "test" / "kind_0" / "0000.png"
    first.rename(tmp_path / "photo.png")
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    names = {"Path": Path, "torch": torch, "featcal": featcal, "build": models.build}
    exec(blocks[4], {**names, "load_file": load_file})
    label, confidence = capsys.readouterr().out.split()
    assert label in pictures.class_names
    pack = featcal.Pack.open("run/pack")
    features = next(iter(pack.split("test"))).features[:1]
    expected = featcal.load("cal.safetensors")(features, pack.head).softmax(1).max().item()
    assert float(confidence) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_can_be_given(command):
    assert len(COMMANDS) == 5
    given = train.make_context("train", shlex.split(command)[2:]).params
    parse_loss(given["loss_text"])
    assert ":" in given["network"] or given["network"] in models.MODELS


def test_the_page_of_commands_has_every_option():
    page = (DOCS / "cli.md").read_text()
    (usage,) = re.findall(r"^featcal train .*?(?=^featcal)", page, flags=re.MULTILINE | re.DOTALL)
    names = {name for option in train.params for name in (*option.opts, *option.secondary_opts)}
    names = {name for name in names if name.startswith("-")} - {"--output"}
    shown = set(re.findall(r"(?<!\S)\[?(--?[a-z][a-z-]*)", usage))
    assert shown == names
    assert "## train\n" in page
