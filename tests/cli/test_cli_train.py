"""featcal train: from images to a folder that can be calibrated."""

import json
import os
import re
import shutil
import signal
import sys
from contextlib import contextmanager

import made
import pytest
import torch
from cli_cases import done, featcal, refused
from safetensors.torch import load_file
from train_cases import words, write_data, write_network

from featcal import Pack
from featcal.cli import train as train_job
from featcal.core.progress import listen
from featcal.losses import LOSSES
from featcal.models import MODELS, build
from featcal.train import run_folder as checkpoint

SMALL = ("--network-option", "width=1", "--network-option", "depth=10")
FOLDER = ["model.safetensors", "pack", "run.json"]


def listing(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The current folder, with data/ and a module of networks."""
    write_data(tmp_path)
    write_network(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("train_nets", None)


@pytest.mark.parametrize(
    ("dataset", "write", "more"),
    [
        ("cifar10", made.write_binary, ()),
        ("cifar100", made.write_webp, ("--test-norm", "reference")),
        ("cifar10", made.write_png, ()),
        ("folder", made.write_folders, ("--image-size", "24")),
    ],
    ids=["binary", "webp", "png", "folder"],
)
def test_from_every_format_to_a_calibrator(dataset, write, more, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "images")
    given = ("train", dataset, "wrn16x4", "-o", "run", "--data", "images", *SMALL, *more)
    said = done(*given, "--batch", "16", "--epochs", "1").out
    assert listing(tmp_path / "run") == FOLDER
    pack = Pack.open("run/pack")
    assert pack.splits == ("val", "test")
    assert pack.manifest.features == 64
    assert pack.manifest.meta["network_options"] == {"width": 1, "depth": 10}
    assert "Next: featcal compare run/pack" in said
    done("fit", "run/pack", "clip | temperature", "-o", "cal.safetensors")


def test_the_weights_are_those_of_the_pack(project):
    done(*words("run", *SMALL, network="wrn16x4", epochs=1))
    model = build("wrn16x4", 10, width=1, depth=10).eval()
    model.load_state_dict(load_file("run/model.safetensors"))
    pack = Pack.open("run/pack")
    assert torch.equal(pack.head.weight, model.head.weight)
    from featcal.datasets import load_images, normalisations

    images = normalisations("cifar10")[1](load_images("cifar10", "data").test.pixels)
    (batch,) = pack.split("test")
    torch.testing.assert_close(batch.features, model.features(images))


def test_what_people_read(project):
    said = done(*words("run", "--loss", "focal(gamma=2)", "--schedule", "cosine", epochs=3)).out
    lines = said.splitlines()
    assert lines[0].startswith("cifar10: 72 train, 8 val, 20 test (val: 8 of 80")
    assert lines[1].startswith("train_nets:tiny, focal(gamma=2.0): 3 epochs, batch 16, sgd")
    assert lines[2] == "cpu, float32"
    assert lines[3].split() == ["epoch", "rate", "loss", "val", "accuracy", "val", "ECE", "seconds"]
    assert [line.split()[0] for line in lines[4:7]] == ["1/3", "2/3", "3/3"]
    assert len({len(line) for line in lines[3:7]}) == 1
    shown = json.loads((project / "run" / "run.json").read_text())["scores"]
    for split in ("val", "test"):
        (row,) = (line for line in lines if f" {split} " in line and "│" in line)
        assert f"{100 * shown[split]['accuracy']:.2f} %" in row
        assert f"{shown[split]['nll']:.4f}" in row
    assert lines[-3:] == [
        "Next: featcal compare run/pack",
        '  or: featcal fit run/pack "clip | temperature" -o cal.safetensors',
        "  or: featcal history run -o history.png",
    ]
    found = done("eval", "run/pack", "--json").json["metrics"]
    for name in ("accuracy", "ece", "nll"):
        assert shown["test"][name] == pytest.approx(found[name], abs=1e-6)


def test_what_to_type_next_can_be_typed_without_a_linear_layer(project):
    said = done(*words("run", "--head", "2", network="train_nets:bare")).out
    assert "no linear" not in said
    *_, fit, look = (line.split(" or: ")[-1] for line in said.splitlines())
    assert fit == "featcal fit run/pack temperature -o cal.safetensors"
    assert look == "featcal history run -o history.png"
    for line in (fit, look):
        done(*line.split()[1:])
    assert (project / "history.png").is_file()


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


def test_a_loss_of_ones_own_comes_with_the_module_of_the_network(project):
    (project / "own_loss.py").write_text(OWN_LOSS)
    try:
        done(*words("run", "--loss", "missed(reduction='sum')", network="own_loss:tiny"))
    finally:
        LOSSES.pop("missed", None)
    assert (
        json.loads((project / "run" / "run.json").read_text())["loss"] == "missed(reduction='sum')"
    )


def test_epochs_that_are_not_watched_have_no_line(project):
    said = done(*words("run", "--watch-every", "2", epochs=5)).out
    assert [w for w in said.split() if w.endswith("/5")] == ["2/5", "4/5", "5/5"]


def test_json_is_one_object_and_the_record(project):
    found = done(*words("run", "--json", "--no-pack", "--seed", "7")).json
    assert found.pop("output") == "run"
    assert found == json.loads((project / "run" / "run.json").read_text())
    assert listing(project / "run") == ["model.safetensors", "run.json"]
    assert found["recipe"]["seed"] == found["seed"] == 7
    assert [epoch["epoch"] for epoch in found["epochs"]] == [1, 2]
    assert found["rows"] == {"train": 72, "val": 8, "test": 20}
    assert set(found["scores"]["test"]) == {"accuracy", "ece", "nll"}
    assert {"torch", "featcal"} <= set(found["versions"])


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_every_loss_by_its_text(project, loss):
    found = done(*words("run", "--loss", loss, "--no-pack", "--json", epochs=1)).json
    assert found["loss"] == loss
    assert found["rows"].get("held_out", 0) == (8 if loss == "adafocal" else 0)


def test_the_rows_of_adafocal_are_said(project):
    said = done(*words("run", "--loss", "adafocal", "--held-out", "12", "--no-pack", epochs=1)).out
    assert said.startswith("cifar10: 60 train, 8 val, 20 test, 12 held out (val: ")
    assert "held out: 12 of the 72 that are left" in said


@pytest.mark.parametrize(("val", "held_out"), [("4", 4), ("20", 8)])
def test_adafocal_has_as_many_rows_as_val_and_at_most_a_tenth(project, val, held_out):
    more = ("--loss", "adafocal", "--val", val, "--no-pack", "--json")
    rows = done(*words("run", *more, epochs=1)).json["rows"]
    assert rows == {"train": 80 - int(val) - held_out, "val": int(val), "test": 20} | {
        "held_out": held_out
    }


def test_the_published_recipe(project):
    found = done(*words("run", "--published", "--no-pack", "--json", epochs=4)).json
    assert found["loss"] == "ce(reduction='sum')"
    recipe = found["recipe"]
    assert (recipe["reduction"], recipe["clip_norm"], recipe["warmup"]) == ("sum", 2.0, 0)
    more = ("--published", "--clip-norm", "0.5", "--no-pack", "--json")
    assert done(*words("shorter", *more)).json["recipe"]["clip_norm"] == 0.5
    brier = done(*words("b", "--published", "--loss", "brier", "--no-pack", "--json")).json
    assert brier["recipe"]["reduction"] == "mean"


def test_options_reach_the_recipe(project):
    given = ("--lr", "0.02", "--schedule", "cosine", "--mixup", "0.2", "--smoothing", "0.1")
    given += ("--clip-norm", "5")
    more = ("--budget", "0.01", "--val", "20", "--json", "--no-pack", "--precision", "bfloat16")
    command = [word for word in words("run", *given, *more) if word not in ("--epochs", 2)]
    found = done(*command).json
    recipe = found["recipe"]
    assert (recipe["lr"], recipe["schedule"], recipe["mixup"]) == (0.02, "cosine", 0.2)
    assert (recipe["smoothing"], recipe["epochs"], found["precision"]) == (0.1, 4, "bfloat16")
    assert (recipe["clip_norm"], recipe["warmup"]) == (5.0, 0)
    assert found["rows"]["val"] == 20


def test_a_transformer_takes_the_size_of_the_images(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made.write_folders(tmp_path / "images", parts={"train": 24, "val": 10, "test": 10})
    given = ("train", "folder", "vit", "-o", "run", "--data", "images", "--image-size", "16")
    sizes = [f"--network-option={text}" for text in ("width=12", "depth=1", "heads=2")]
    found = done(*given, *sizes, "--batch", "8", "--epochs", "1", "--json").json
    assert found["recipe"]["optimizer"] == "adamw"
    assert found["split"] == "val: the data set's own"
    assert found["normalise"]["train"] == found["normalise"]["test"]


def interrupted(*args, steps):
    """Ctrl-C after so many steps."""
    save, seen = checkpoint.Checkpoint.save, []

    def once_more(self, *state):
        save(self, *state)
        seen.append(state)
        if len(seen) == steps:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint.Checkpoint, "save", once_more)
        return featcal(*args, "--checkpoint-every", "0")


def test_ctrl_c_says_what_is_kept_and_the_same_command_goes_on(project):
    done(*words("whole"))
    ran = interrupted(*words("run"), steps=7)
    assert ran.code == 130
    kept = "run/checkpoint.safetensors"
    assert (
        ran.err == f"Interrupted: what is done is kept in {kept}; give the same command to go on.\n"
    )
    assert listing(project / "run") == ["checkpoint.safetensors"]
    (project / "run" / ".checkpoint.safetensors.abcdefgh").mkdir()  # what a kill would leave
    said = done(*words("run")).out
    assert f"Going on from {kept}: epoch 2, step 3 of 5\n" in said
    assert listing(project / "run") == FOLDER
    whole, run = project / "whole", project / "run"
    same = "model.safetensors"
    assert (whole / same).read_bytes() == (run / same).read_bytes()
    for file in ("val-00000.safetensors", "test-00000.safetensors", "head.safetensors"):
        assert (whole / "pack" / file).read_bytes() == (run / "pack" / file).read_bytes()


@pytest.mark.parametrize(
    ("epoch", "step", "told"),
    [
        (0, 2, "epoch 1, step 3 of 5"),
        (1, 0, "epoch 2, step 1 of 5"),
        (1, 5, "end of epoch 2"),
        (3, 0, "every epoch is done"),
    ],
)
def test_where_a_run_goes_on_is_said_in_words(epoch, step, told):
    assert train_job._place(checkpoint.Position(epoch=epoch, step=step), 3, 5) == told


@contextmanager
def sent_at_step_three(number, handler):
    """Sends this process a signal in its third step, which finds that handler in place."""

    def press(label, done, _):
        if (label, done) == ("training", 3):
            os.kill(os.getpid(), number)

    before = signal.signal(number, handler)
    try:
        with listen(press):
            yield
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize(
    ("name", "handler"),
    [
        ("SIGINT", signal.default_int_handler),
        ("SIGTERM", signal.SIG_DFL),
        ("SIGHUP", signal.SIG_DFL),
    ],
)
def test_a_signal_long_before_the_first_checkpoint_keeps_what_is_done(name, handler, project):
    with sent_at_step_three(getattr(signal, name), handler):
        ran = featcal(*words("run"))
    assert ran.code == 130
    assert ran.err.startswith("Interrupted: what is done is kept in run/checkpoint.safetensors;")
    done(*words("whole"))
    done(*words("run"))
    whole, run = (project / name / "model.safetensors" for name in ("whole", "run"))
    assert whole.read_bytes() == run.read_bytes()


def test_under_nohup_a_closed_terminal_stops_nothing(project):
    with sent_at_step_three(signal.SIGHUP, signal.SIG_IGN):
        assert featcal(*words("run")).code == 0


def test_without_a_pack_it_says_how_to_get_one(project):
    said = done(*words("run", "--no-pack", epochs=1)).out.splitlines()
    assert said[-3:] == [
        "Wrote run",
        "No pack was made (--no-pack): featcal collect makes one of a network of yours",
        "Next: featcal history run -o history.png",
    ]


def test_what_changes_the_result_is_in_the_first_lines(project):
    more = ("--mixup", "0.2", "--smoothing", "0.1", "--seed", "3", "--network-option", "width=5")
    line = done(*words("run", *more, epochs=1)).out.splitlines()[1]
    how = "batch 16, sgd, rate 0.1, steps, mixup 0.2, smoothing 0.1, seed 3"
    assert line == f"train_nets:tiny, width 5, ce: 1 epoch, {how}"


def test_the_help_names_every_loss_and_every_network():
    said = done("train", "--help").out
    assert set(LOSSES) | set(MODELS) <= set(re.findall(r"\w+", said))


def test_the_folder_of_a_run_is_told_from_a_pack(project):
    done(*words("run"))
    said = refused("compare", "run")
    assert "run is not a feature pack, but the folder of a run: give run/pack" in said


def test_the_record_says_what_the_network_is_fed(project):
    made.write_folders(project / "pets")
    given = ("train", "folder", "vit", "-o", "run", "--data", "pets", "--image-size", "24")
    small = ("width=8", "depth=1", "heads=1")
    options = [word for text in small for word in ("--network-option", text)]
    record = done(*given, *options, "--batch", "16", "--epochs", "1", "--json").json
    assert record["class_names"] == ["kind_0", "kind_1", "kind_2"]
    assert record["image_size"] == [24, 24]
    assert record["network_options"] == {"image_size": 24, "width": 8, "depth": 1, "heads": 1}
    model = build(record["network"], record["classes"], **record["network_options"])
    model.load_state_dict(load_file("run/model.safetensors"))


def test_files_that_are_no_images_are_counted(project):
    made.write_folders(project / "pets")
    for name in ("photo.avif", "labels.csv", "Thumbs.db", ".DS_Store", "LICENSE"):
        (project / "pets" / "train" / "kind_0" / name).write_bytes(b"")
    given = ("train", "folder", "train_nets:tiny", "-o", "run", "--data", "pets")
    said = done(*given, "--image-size", "24", "--batch", "16", "--epochs", "1").out
    left_out = "left out: 3 files that are no images (.avif, .csv, LICENSE)"
    assert said.splitlines()[0].endswith(f"of numpy's legacy seed 1; {left_out})")


def test_ctrl_c_before_the_first_step_leaves_nothing(project):
    def stop(*_):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("featcal.train.loop.Plan.of", stop)
        ran = featcal(*words("run"))
    assert (ran.code, ran.err.strip()) == (130, "Interrupted: nothing was written.")
    assert not (project / "run").exists()


@pytest.mark.parametrize("left", ["pack", "pack.partial"])
def test_a_run_killed_while_it_was_finishing_goes_on(project, left):
    done(*words("whole"))
    interrupted(*words("run"), steps=11)  # ten steps and the end
    assert listing(project / "run") == ["checkpoint.safetensors"]
    if left == "pack":
        shutil.copytree(project / "whole" / "pack", project / "run" / "pack")
    else:
        (project / "run" / left).mkdir()
    done(*words("run"))
    assert listing(project / "run") == FOLDER
    files = [project / run / "model.safetensors" for run in ("whole", "run")]
    assert files[0].read_bytes() == files[1].read_bytes()
