"""A share of `make kills`: whatever ends a command, its output is whole, and the rest untouched."""

import json
import os
import random
import signal
import sys

import pytest
from experiments import kills

from featcal.core import files

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


@pytest.fixture
def work(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("kill_networks", None)


def test_killed_commands_leave_nothing_half_lose_nothing_and_go_on_to_the_same_bytes(work):
    names = ("fit", "collect", "pack import", "train")
    rows, found, _ = kills.attacked(names, work, kills=8, rooms=(), pairs=1)
    assert found == []
    assert sum(row["times"] for row in rows) == 8 + len(names)


def test_a_half_file_does_not_go_unnoticed(work, monkeypatch):
    """With a last step that is two steps, killed between them."""

    def halves(temporary, path):
        for part in (slice(0, 99), slice(99, None)):
            with open(path, "ab") as file:
                file.write(temporary.read_bytes()[part])

    (work / "given").mkdir()
    kills.make_inputs(work / "given")
    monkeypatch.setattr(files, "publish", halves)
    attack = kills.Attack(kills.commands(work / "given")[0], work, random.Random(0))
    for at in range(attack.operations - 5, attack.operations + 1):
        with attack.hit("killed"):
            killed = kills.Process(attack.command.typed(), attack.folder, signal.SIGKILL, at)
            assert killed.end() == -signal.SIGKILL
    assert attack.wrong["killed", "half"] > 0
    assert not os.listdir(attack.folder)


def test_the_page_shows_the_results():
    results = json.loads(kills.RESULTS.read_text())
    assert kills.tables(results) in kills.DOCS.read_text()
    assert results["found"] == []
