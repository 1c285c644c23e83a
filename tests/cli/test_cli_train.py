"""featcal train: from images to a folder that can be calibrated; docs/training.md can be typed."""

import json
import re
import shlex
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import made
import pytest
import torch
from cli_cases import done, featcal, refused
from safetensors.torch import load_file
from train_cases import words

import featcal as library
from featcal import InputError, Pack, datasets, models
from featcal.cli.app import HELP
from featcal.cli.train import train
from featcal.datasets import load_images, normalisations
from featcal.losses import LOSSES, parse_loss
from featcal.models import MODELS, build
from featcal.train import Recipe, run_folder

SMALL = ("--network-option", "width=1", "--network-option", "depth=10")
ONE = ("--batch", "16", "--epochs", "1")
FOLDER = ["model.safetensors", "pack", "run.json"]
DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "training.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


def listing(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def whole(train_project):
    """The folder of a run that nothing stops, and what it said."""
    said = done(*words("whole", "--schedule", "cosine", "--network-option", "width=5")).out
    return train_project / "whole", said


def again(*more):
    """The same command for another folder."""
    return words(*more, "--schedule", "cosine", "--network-option", "width=5")


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


def test_the_weights_are_those_of_the_pack(train_project, run):
    done(*words(run, *SMALL, network="wrn16x4", epochs=1))
    model = build("wrn16x4", 10, width=1, depth=10).eval()
    model.load_state_dict(load_file(run / "model.safetensors"))
    pack = Pack.open(run / "pack")
    assert torch.equal(pack.head.weight, model.head.weight)
    images = normalisations("cifar10")[1](load_images("cifar10", "data").test.pixels)
    (batch,) = pack.split("test")
    torch.testing.assert_close(batch.features, model.features(images))
    said = refused("compare", run)
    assert f"give {run}/pack" in said


def test_what_people_read(whole):
    folder, said = whole
    lines = said.splitlines()
    assert lines[0].startswith("cifar10: 72 train, 8 val, 20 test (val: 8 of 80")
    how = "batch 16, sgd, rate 0.1, cosine, seed 1"
    assert lines[1] == f"train_nets:tiny, width 5, ce: 2 epochs, {how}"
    assert lines[2] == "cpu, float32"
    assert lines[3].split() == ["epoch", "rate", "loss", "val", "accuracy", "val", "ECE", "seconds"]
    assert [line.split()[0] for line in lines[4:6]] == ["1/2", "2/2"]
    assert len({len(line) for line in lines[3:6]}) == 1
    shown = json.loads((folder / "run.json").read_text())["scores"]
    for split in ("val", "test"):
        (row,) = (line for line in lines if f" {split} " in line and "│" in line)
        assert f"{100 * shown[split]['accuracy']:.2f} %" in row
        assert f"{shown[split]['nll']:.4f}" in row
    assert lines[-3:] == [
        "Next: featcal compare whole/pack",
        "  or: featcal fit whole/pack auto -o cal.safetensors",
        "  or: featcal history whole -o history.png",
    ]
    found = done("eval", folder / "pack", "--json").json["metrics"]
    for name in ("accuracy", "ece", "nll"):
        assert shown["test"][name] == pytest.approx(found[name], abs=1e-6)


def test_what_to_type_next_can_be_typed_without_a_linear_layer(train_project):
    said = done(*words("bare", "--head", "2", network="train_nets:bare", epochs=1)).out
    *_, fit, look = (line.split(" or: ")[-1] for line in said.splitlines())
    assert fit == "featcal fit bare/pack auto -o cal.safetensors"
    for line in (fit, look):
        done(*line.split()[1:])
    assert (train_project / "history.png").is_file()
    said = done(*words("none", "--no-pack", "--watch-every", "2", epochs=3)).out
    assert [w for w in said.split() if w.endswith("/3")] == ["2/3", "3/3"]
    assert "No pack was made (--no-pack)" in said.splitlines()[-2]


OWN_LOSS = """
from dataclasses import dataclass
from featcal.losses import RowLoss
from train_nets import tiny

@dataclass(frozen=True, kw_only=True, repr=False)
class Missed(RowLoss):
    name = "missed"
    title = "Missed"

    def rows(self, logits, labels):
        return 1 - logits.softmax(1).gather(1, labels[:, None])[:, 0]
"""


def test_a_loss_of_ones_own_comes_with_the_module_of_the_network(train_project, run):
    (train_project / "own_loss.py").write_text(OWN_LOSS)
    text = "missed(reduction='sum')"
    try:
        found = done(*words(run, "--loss", text, "--json", network="own_loss:tiny", epochs=1)).json
    finally:
        LOSSES.pop("missed", None)
    assert found["loss"] == text


def test_json_is_one_object_and_the_record(train_project, run):
    options = ("--lr", "0.02", "--schedule", "cosine", "--mixup", "0.2", "--smoothing", "0.1")
    more = ("--clip-norm", "5", "--seed", "7", "--val", "20", "--precision", "bfloat16")
    command = words(run, *options, *more, "--budget", "0.005", "--json", "--no-pack")
    at = command.index("--epochs")
    found = done(*command[:at], *command[at + 2 :]).json
    assert found.pop("output") == str(run)
    assert found == json.loads((run / "run.json").read_text())
    assert listing(run) == ["model.safetensors", "run.json"]
    recipe = {key: found["recipe"][key] for key in ("lr", "schedule", "mixup", "smoothing", "seed")}
    assert tuple(recipe.values()) == (0.02, "cosine", 0.2, 0.1, 7)
    assert (found["recipe"]["clip_norm"], found["recipe"]["epochs"]) == (5.0, 2)
    assert (found["seed"], found["precision"]) == (7, "bfloat16")
    assert [epoch["epoch"] for epoch in found["epochs"]] == [1, 2]
    assert found["rows"] == {"train": 60, "val": 20, "test": 20}
    assert set(found["scores"]["test"]) == {"accuracy", "ece", "nll"}
    assert {"torch", "featcal"} <= set(found["versions"])


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_every_loss_by_its_text(train_project, run, loss):
    found = done(*words(run, "--loss", loss, "--no-pack", "--json", epochs=1)).json
    assert found["loss"] == loss
    assert found["rows"].get("held_out", 0) == (8 if loss == "adafocal" else 0)


@pytest.mark.parametrize(
    ("more", "rows"),
    [
        (("--val", "4"), "72 train, 4 val, 20 test, 4 held out"),
        (("--val", "20"), "52 train, 20 val, 20 test, 8 held out"),
        (("--held-out", "12"), "60 train, 8 val, 20 test, 12 held out"),
    ],
)
def test_adafocal_has_as_many_rows_as_val_and_at_most_a_tenth(train_project, run, more, rows):
    said = done(*words(run, "--loss", "adafocal", "--no-pack", *more, epochs=1)).out
    assert said.startswith(f"cifar10: {rows} (val: ")


def test_the_published_recipe(train_project, tmp_path):
    def published(name, *more):
        command = words(tmp_path / name, "--published", "--no-pack", "--json", *more, epochs=1)
        return done(*command).json

    found = published("ce", "--clip-norm", "0.5")
    assert found["loss"] == "ce(reduction='sum')"
    recipe = found["recipe"]
    assert (recipe["reduction"], recipe["clip_norm"], recipe["warmup"]) == ("sum", 0.5, 0)
    recipe = published("brier", "--loss", "brier")["recipe"]
    assert (recipe["reduction"], recipe["clip_norm"]) == ("mean", 2.0)


def test_a_transformer_takes_the_size_of_the_images(tmp_path, run):
    made.write_folders(tmp_path / "images", parts={"train": 24, "val": 10, "test": 10})
    given = ("train", "folder", "vit", "-o", run, "--data", tmp_path / "images")
    sizes = [f"--network-option={text}" for text in ("width=12", "depth=1", "heads=2")]
    record = done(*given, "--image-size", "16", *sizes, *ONE, "--json").json
    assert record["recipe"]["optimizer"] == "adamw"
    assert record["split"] == "val: the data set's own"
    assert record["normalise"]["train"] == record["normalise"]["test"]
    assert record["class_names"] == ["kind_0", "kind_1", "kind_2"]
    assert record["image_size"] == [16, 16]
    assert record["network_options"] == {"image_size": 16, "width": 12, "depth": 1, "heads": 2}
    model = build(record["network"], record["classes"], **record["network_options"])
    model.load_state_dict(load_file(run / "model.safetensors"))


def interrupted(*args, steps):
    """Ctrl-C after so many checkpoints, one per step."""
    save, seen = run_folder.Checkpoint.save, []

    def once_more(self, *state):
        save(self, *state)
        seen.append(state)
        if len(seen) == steps:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_folder.Checkpoint, "save", once_more)
        return featcal(*args, "--checkpoint-every", "0")


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        (2, "epoch 1, step 3 of 5"),
        (5, "end of epoch 1"),
        (7, "epoch 2, step 3 of 5"),
        (11, "every epoch is done"),
    ],
)
def test_ctrl_c_says_what_is_kept_and_the_same_command_goes_on(steps, told, whole, run):
    ran = interrupted(*again(run), steps=steps)
    assert ran.code == 130
    kept = run / "checkpoint.safetensors"
    assert ran.err == (
        f"Interrupted: what is done is kept in {kept}; give the same command to go on.\n"
    )
    assert listing(run) == ["checkpoint.safetensors"]
    (run / ".checkpoint.safetensors.featcal-abcdefgh").mkdir()  # what a kill would leave
    if steps == 11:  # killed while it was finishing
        shutil.copytree(whole[0] / "pack", run / "pack")
    assert f"Going on from {kept}: {told}\n" in done(*again(run)).out
    assert listing(run) == FOLDER
    files = ("val-00000.safetensors", "test-00000.safetensors", "head.safetensors")
    for file in ("model.safetensors", *(f"pack/{name}" for name in files)):
        assert (whole[0] / file).read_bytes() == (run / file).read_bytes()


def test_ctrl_c_before_the_first_step_leaves_nothing(train_project, run, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("featcal.train.loop.steps_of", stop)
    ran = featcal(*words(run))
    assert (ran.code, ran.err.strip()) == (130, "Interrupted: no file was left half written.")
    assert not run.exists()


def test_the_help_names_every_loss_and_network_and_the_page_what_exists():
    said = done("train", "--help").out
    assert set(LOSSES) | set(MODELS) <= set(re.findall(r"\w+", said))
    commands = re.findall(r"^.*(featcal train .*)$", PAGE, flags=re.MULTILINE)
    assert len(commands) == 5
    for command in commands:
        given = train.make_context("train", shlex.split(command)[2:], **HELP).params
        parse_loss(given["loss_text"])
        assert ":" in given["network"] or given["network"] in MODELS


def test_every_snippet_of_the_page_runs(tmp_path, monkeypatch, capsys):
    """As they stand but for their size: a small network, a small data set, one epoch."""
    monkeypatch.chdir(tmp_path)
    made.write_binary(tmp_path / "data", train=80)
    monkeypatch.setattr(datasets, "split", partial(datasets.split, val=20))
    monkeypatch.setattr(models, "build", partial(models.build, width=1, depth=10))
    monkeypatch.setattr(Recipe, "scaled", lambda recipe, _: replace(recipe, epochs=1, batch=20))
    assert len(BLOCKS) == 5
    names = {}
    exec(BLOCKS[0], names)
    assert len(names["history"]) == 1
    assert "Watched(nll=" in capsys.readouterr().out
    trained = names["model"].state_dict()
    exec(BLOCKS[1], names)
    assert Path("history.png").read_bytes()[:4] == b"\x89PNG"
    exec(BLOCKS[2], names)
    assert all(torch.equal(trained[key], v) for key, v in names["model"].state_dict().items())
    exec(BLOCKS[3], names)
    with pytest.raises(InputError, match=r"run holds a finished run \(run.json\)"):
        exec(BLOCKS[0], {})
    assert "head.calibrator.steps.0.threshold" in names["calibrated"].state_dict()


def test_from_the_files_of_a_run_to_one_image(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    pictures = made.write_folders(tmp_path / "pets", size=(24, 24))
    given = ("train", "folder", "wrn16x4", "-o", "run", "--data", "pets", "--image-size", "24")
    done(*given, *SMALL, *ONE)
    done("fit", "run/pack", "temperature", "-o", "cal.safetensors")
    first = tmp_path / "pets" / "test" / "kind_0" / "0000.png"
    first.rename(tmp_path / "photo.png")
    names = {"Path": Path, "torch": torch, "featcal": library, "build": models.build}
    exec(BLOCKS[4], {**names, "load_file": load_file})
    label, confidence = capsys.readouterr().out.split()
    assert label in pictures.class_names
    pack = Pack.open("run/pack")
    features = next(iter(pack.split("test"))).features[:1]
    expected = library.load("cal.safetensors")(features, pack.head).softmax(1).max().item()
    assert float(confidence) == pytest.approx(expected, rel=1e-4)
