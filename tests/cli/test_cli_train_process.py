"""featcal train as a process: killed for good, started by torchrun, on a terminal."""

import json
import os
import pty
import signal
import subprocess
import sys
import time

import pytest
from cli_cases import done, refused
from safetensors.torch import load_file
from train_cases import words

# The command, killed as by the system at the moment when its seventh checkpoint is written.
KILLED = """
import os, signal, sys
from featcal.train import run_folder as checkpoint
save, seen = checkpoint.save_file, []
def killed(*args):
    save(*args)
    seen.append(1)
    if len(seen) == 7:
        os.kill(os.getpid(), signal.SIGKILL)
checkpoint.save_file = killed
from featcal.cli import main
main(sys.argv[1:])
"""
LONGEST = 120  # seconds to wait for a process


def process(*command):
    return subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=LONGEST,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_a_killed_run_goes_on_and_ends_with_the_same_bytes(train_project):
    done(*words("whole"))
    ran = process("-c", KILLED, *words("killed", "--checkpoint-every", "0"))
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    left = sorted(path.name for path in (train_project / "killed").iterdir())
    assert left[0].startswith(".checkpoint.safetensors.")  # half written
    assert left[1:] == [".lock", "checkpoint.safetensors"]
    assert "Going on from" in done(*words("killed")).out
    left = sorted(path.name for path in (train_project / "killed").iterdir())
    assert left == ["model.safetensors", "pack", "run.json"]
    whole, again = (train_project / run / "model.safetensors" for run in ("whole", "killed"))
    assert whole.read_bytes() == again.read_bytes()


def test_a_reader_that_goes_away_costs_nothing(train_project):
    """`featcal train ... | head`: what is done is kept, and the same command goes on."""
    command = [sys.executable, "-m", "featcal", *map(str, words("run", epochs=2000))]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, env={**os.environ, "OMP_NUM_THREADS": "1"}) as ran:
        while "/2000 " not in ran.stdout.readline():
            assert ran.poll() is None
        ran.stdout.close()
        said = ran.stderr.read()
        assert ran.wait(LONGEST) == 130
    assert said.startswith("Interrupted: what is done is kept in run/checkpoint.safetensors;")
    assert (train_project / "run" / "checkpoint.safetensors").exists()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--loss", "fokal"), "did you mean focal"),
        (("--batch", "15"), "--batch is 15: give a multiple of the 2 processes"),
        (("--val", "80"), "--val is 80 of 80 training images and leaves nothing"),
    ],
)
def test_of_two_processes_one_refuses(more, said, train_project):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    ran = process(*torchrun, "-m", "featcal", *words("both", *more))
    assert ran.returncode != 0
    assert ran.stderr.count(said) == 1
    assert not (train_project / "both").exists()


def test_what_another_process_alone_refuses_is_said_too(train_project, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("featcal.cli.train.PATIENCE", 0.2)
    started = time.monotonic()
    assert "did you mean focal" in refused(*words("run", "--loss", "fokal"))
    assert time.monotonic() - started > 0.2


def test_two_processes_share_the_work_and_one_speaks(train_project):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    ran = process(*torchrun, "-m", "featcal", *words("both", "--device", "cpu"))
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("2 processes") == ran.stdout.count("\n      1/2 ") == 1
    assert ran.stdout.count("Wrote both") == 1
    record = json.loads((train_project / "both" / "run.json").read_text())
    assert record["processes"] == 2
    files = sorted(path.name for path in (train_project / "both").iterdir())
    assert files == ["model.safetensors", "pack", "run.json"]
    weights = load_file(train_project / "both" / "model.safetensors")
    assert all(value.isfinite().all() for value in weights.values())
    assert done("eval", "both/pack", "--json").json["n"] == 20


def on_a_terminal(folder, *command):
    """What a terminal of 100 columns shows."""
    seen = b""
    pid, screen = pty.fork()
    if pid == 0:
        os.chdir(folder)
        more = {"TERM": "xterm-256color", "COLUMNS": "100", "OMP_NUM_THREADS": "1"}
        arguments = [sys.executable, "-m", "featcal", *map(str, command)]
        os.execve(sys.executable, arguments, {**os.environ, **more})
    while True:
        try:
            part = os.read(screen, 65536)
        except OSError:  # the other side has closed
            break
        if not part:
            break
        seen += part
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, seen
    return seen.decode()


def test_lines_stand_above_the_bar(train_project):
    seen = on_a_terminal(train_project, *words("shown", "--no-pack", epochs=20))
    assert "training" in seen  # the bar
    lines = [line for line in seen.replace("\r", "\n").split("\n") if "/20 " in line]
    plain = [line for line in lines if "training" not in line]
    assert sum(line.lstrip("\x1b[2K").split()[0].endswith("/20") for line in plain) >= 20
    assert not any("training" in line and " % " in line for line in lines)
