"""featcal history: a line for every run, and a picture of all of them."""

import json
from pathlib import Path

import pytest
from cli_cases import done, refused
from train_cases import words

from featcal.cli import app
from featcal.train import History


@pytest.fixture(scope="module")
def runs(train_project):
    """Two finished runs of two losses in the current folder."""
    done(*words("run-ce", "--no-pack"))
    done(*words("run-focal", "--no-pack", "--loss", "focal", "--watch-every", "2"))
    return Path("run-ce"), Path("run-focal")


def test_a_line_for_every_run(runs):
    lines = done("history", *runs).out.splitlines()
    for folder, loss in zip(runs, ("ce", "focal"), strict=True):
        (line,) = (line for line in lines if line.startswith(f"│ {folder} "))
        cells = [cell.strip() for cell in line.strip("│").split("│")]
        last = History.read(folder).epochs[-1]
        seen = last.watched
        assert cells[1:4] == [loss, "2 of 2", f"{last.loss:.4f}"]
        percent = [f"{100 * value:.2f} %" for value in (seen.accuracy, seen.ece)]
        assert cells[4:7] == [*percent, f"{seen.nll:.4f}"]
    headings = [cell.strip() for cell in lines[1].strip("┃").split("┃")]
    scores = ["val accuracy", "val ECE", "val NLL"]
    assert headings == ["run", "loss", "epochs", "training loss", *scores, "lowest val NLL"]
    assert lines[-1] == "Draw it: featcal history run-ce run-focal -o history.png"


def test_a_narrow_terminal_shows_every_number(runs, monkeypatch):
    wide = done("history", *runs).out
    monkeypatch.setattr(app, "PIPE_WIDTH", 60)
    said = done("history", *runs).out
    assert max(len(line) for line in said.splitlines() if line[:1] in "│┃") <= 60
    shown = {cell.strip() for cell in said.replace("\n", "│").split("│")}
    assert {cell.strip() for cell in wide.replace("\n", "│").split("│") if "┃" not in cell} - {
        *(line for line in wide.splitlines() if line[0] in "┏┡└")
    } <= shown


def test_the_lowest_nll_is_that_of_the_watched_epochs(tmp_path):
    scores = [(0.9, 0.5), (0.7, 0.6), (None, None), (0.8, 0.7)]
    epochs = [
        {"epoch": number, "rate": 0.1, "loss": 0.5, "seconds": 1.0}
        | ({} if nll is None else {"nll": nll, "accuracy": accuracy, "ece": 0.1})
        for number, (nll, accuracy) in enumerate(scores, start=1)
    ]
    record = {"loss": "ce", "recipe": {"epochs": 9}, "epochs": epochs}
    (tmp_path / "run.json").write_text(json.dumps(record))
    said = done("history", tmp_path).out
    assert "4 of 9 " in said
    assert "0.7000 (epoch 2)" in said
    assert "70.00 %" in said
    record["epochs"] = epochs[:3]
    (tmp_path / "run.json").write_text(json.dumps(record))
    assert "3 of 9, val after 2 " in done("history", tmp_path).out
    record["epochs"] = epochs[2:3]
    (tmp_path / "run.json").write_text(json.dumps(record))
    assert done("history", tmp_path).out.count(" - ") == 4


def test_for_programs(runs, tmp_path):
    found = done("history", *runs, "--json").json
    assert found == {
        "runs": [History.read(folder).as_json() for folder in runs],
        "output": None,
    }
    assert [len(run["epochs"]) for run in found["runs"]] == [2, 2]
    assert "ece" not in found["runs"][1]["epochs"][0]
    picture = tmp_path / "h.svg"
    assert done("history", runs[0], "-o", picture, "--json").json["output"] == str(picture)


def test_the_picture_names_runs_and_losses(runs, tmp_path):
    picture = tmp_path / "h.svg"
    said = done("history", *runs, "-o", picture).out
    assert said.endswith(f"Wrote {picture}\n")
    text = picture.read_text()
    assert "<!-- run-ce: ce -->" in text
    assert "<!-- run-focal: focal -->" in text
    assert "overwrite it with --force" in refused("history", *runs, "-o", picture)
    assert picture.read_text() == text
    done("history", runs[0], "-o", picture, "--force")
    assert "run-focal" not in picture.read_text()
