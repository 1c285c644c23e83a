"""The command as a process: exit codes, signals, pipes and a terminal."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
import urllib.request

from cli_cases import arrays, done, featcal, packed, refused, tree
from train_cases import words

from featcal.cli import app
from featcal.data.pack import DEMO

FEATCAL = [sys.executable, "-m", "featcal"]
LONGEST = 120  # seconds to wait for a sign of life


def environment(**more):
    quiet = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    return {**quiet, "OMP_NUM_THREADS": "1", **more}


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, *args, columns):
        self.seen = ""
        self.pid, self.screen = pty.fork()
        if self.pid == 0:
            more = {"LANG": "C.UTF-8", "TERM": os.environ.get("TERM", "xterm-256color")}
            os.execve(FEATCAL[0], [*FEATCAL, *map(str, args)], environment(**more))
        fcntl.ioctl(self.screen, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))

    def read(self, until=None):
        """Reads to the end, or until a text has appeared."""
        end = time.monotonic() + LONGEST
        while time.monotonic() < end and (until is None or until not in self.seen):
            if not select.select([self.screen], [], [], 1)[0]:
                continue
            try:
                part = os.read(self.screen, 65536)
            except OSError:  # the other side has closed
                break
            if not part:
                break
            self.seen += part.decode(errors="replace")
        return self.seen

    def close(self):
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self.screen)
        return code


def plain(text):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_an_interrupt_that_a_library_turned_into_an_error_is_still_one(monkeypatch):
    def swallows(**_):
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            raise ValueError("what a library made of it") from None

    monkeypatch.setattr(app.group, "main", swallows)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        ran = featcal()
    finally:
        signal.signal(signal.SIGINT, before)
    assert (ran.code, ran.err) == (130, "Interrupted: nothing was written.\n")


def test_progress_is_drawn_and_ctrl_c_stops_it(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    screen = Terminal("fit", DEMO, "clip(reference=True)", "-o", tmp_path / "cal", columns=80)
    screen.read(until="/2000")  # the bar of the published grid
    os.kill(screen.pid, signal.SIGINT)
    seen = screen.read()
    assert screen.close() == 130, seen
    assert "Traceback" not in seen
    assert plain(seen).rstrip().endswith("Interrupted: nothing was written.")
    assert seen.count("\x1b[?25l") == seen.count("\x1b[?25h") == 1  # the cursor is back
    assert tree(tmp_path) == {}


def test_the_comparison_fits_a_usual_terminal(pack, monkeypatch):
    """Eighty columns: every number that matters is there to the last digit."""
    monkeypatch.setenv("TERM", "dumb")  # which rich takes for 80 columns, whatever it is
    screen = Terminal("compare", pack, columns=80)
    seen = plain(screen.read())
    assert screen.close() == 0
    assert "…" not in seen
    for row in done("compare", pack, "--json").json["rows"]:
        assert row["recipe"] in seen
        for key in ("accuracy", "ece"):
            assert f"{100 * row['metrics'][key]:.2f} %" in seen, seen
        assert f"{row['metrics']['nll']:.4f}" in seen, seen


def test_a_reader_that_leaves_early(tmp_path):
    """Like `featcal pack info PACK | true`: no traceback, and no failure."""
    pack = packed(tmp_path, arrays(val=40, test=50))
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        ran = subprocess.run(
            [*FEATCAL, "pack", "info", pack],
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            timeout=LONGEST,
            env=environment(),
        )
    assert (ran.returncode, ran.stderr) == (0, "")


def test_the_page_is_served_computes_and_ends_with_ctrl_c(pack):
    command = [*FEATCAL, "explore", str(pack), "--no-browser"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, env=environment()) as running:
        try:
            line = running.stdout.readline()
            assert line.startswith(f"{pack} is at http://127.0.0.1:")
            address = line.split()[3].rstrip(";")
            with urllib.request.urlopen(address, timeout=LONGEST) as answer:
                assert b'id="recipe-form"' in answer.read()
            body = json.dumps({"recipe": "vector"}).encode()
            sent = urllib.request.Request(
                f"{address}recipe", body, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(sent, timeout=LONGEST) as answer:
                assert json.load(answer)["entry"]["recipe"] == "vector"
            running.send_signal(signal.SIGINT)
            out, err = running.communicate(timeout=LONGEST)
            assert (running.returncode, out, err) == (0, "Stopped.\n", "")
        finally:
            running.kill()


# The command, killed as by the system at the moment when its seventh checkpoint is written.
KILLED = """
import os, signal, sys
from featcal.train import run_folder
save, seen = run_folder.save_file, []
def killed(*args):
    save(*args)
    seen.append(1)
    if len(seen) == 7:
        os.kill(os.getpid(), signal.SIGKILL)
run_folder.save_file = killed
from featcal.cli import main
main(sys.argv[1:])
"""


def left(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_killed_run_goes_on_and_ends_with_the_same_bytes(train_project):
    done(*words("whole"))
    command = [sys.executable, "-c", KILLED, *map(str, words("run", "--checkpoint-every", "0"))]
    ran = subprocess.run(command, capture_output=True, timeout=LONGEST, env=environment())
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    half, *others = left(train_project / "run")
    assert half.startswith(".checkpoint.safetensors.")  # half written
    assert others == [".lock", "checkpoint.safetensors"]
    assert "Going on from" in done(*words("run")).out
    assert left(train_project / "run") == ["model.safetensors", "pack", "run.json"]
    whole, again = (train_project / run / "model.safetensors" for run in ("whole", "run"))
    assert whole.read_bytes() == again.read_bytes()


def test_a_reader_of_a_run_that_goes_away_costs_nothing(train_project):
    """`featcal train ... | head`: what is done is kept, and the same command goes on."""
    command = [*FEATCAL, *map(str, words("read", epochs=2000))]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, env=environment()) as ran:
        while "/2000 " not in ran.stdout.readline():
            assert ran.poll() is None
        ran.stdout.close()
        said = ran.stderr.read()
        assert ran.wait(LONGEST) == 130
    assert said.startswith("Interrupted: what is done is kept in read/checkpoint.safetensors;")
    assert (train_project / "read" / "checkpoint.safetensors").exists()


def torchrun(*args):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    command = [sys.executable, *launcher, "-m", "featcal", *map(str, args)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=LONGEST, env=environment()
    )


def test_two_processes_share_the_work_and_one_speaks(train_project):
    ran = torchrun(*words("both", "--device", "cpu"))
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("2 processes") == ran.stdout.count("\n      1/2 ") == 1
    assert ran.stdout.count("Wrote both") == 1
    record = json.loads((train_project / "both" / "run.json").read_text())
    assert record["processes"] == 2
    assert left(train_project / "both") == ["model.safetensors", "pack", "run.json"]
    assert done("eval", "both/pack", "--json").json["n"] == 20


def test_of_two_processes_one_refuses(train_project, monkeypatch):
    ran = torchrun(*words("odd", "--batch", "15"))
    assert ran.returncode != 0
    assert ran.stderr.count("--batch is 15: give a multiple of the 2 processes") == 1
    assert not (train_project / "odd").exists()
    # What another process alone refuses is said, too, but late.
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("featcal.cli.train.PATIENCE", 0.2)
    started = time.monotonic()
    assert "did you mean focal" in refused(*words("odd", "--loss", "fokal"))
    assert time.monotonic() - started > 0.2


def test_lines_of_epochs_stand_above_the_bar(train_project, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    screen = Terminal(*words("shown", "--no-pack", epochs=20), columns=100)
    seen = screen.read()
    assert screen.close() == 0, seen
    assert "training" in seen  # the bar
    lines = [line for line in seen.replace("\r", "\n").split("\n") if "/20 " in line]
    told = [plain(line).split() for line in lines if "training" not in line]
    assert sum(bool(line) and line[0].endswith("/20") for line in told) >= 20
    assert not any("training" in line and " % " in line for line in lines)
