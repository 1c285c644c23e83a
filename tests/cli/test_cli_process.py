"""The command as a process: exit codes, signals, pipes and a terminal.

They are made by fork, for torch takes seconds to load.
"""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
import traceback
import urllib.request

import pytest
from cli_cases import arrays, done, featcal, packed, refused, tree
from train_cases import words

from featcal.cli import app, main
from featcal.data.pack import DEMO

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
LONGEST = 120  # seconds to wait for a sign of life


def run_command(args, out, err, environment):
    """What the child does: the command, with its output to these files, and the end."""
    code = 99
    try:
        os.environ.update(environment)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.stdout, sys.stderr = os.fdopen(out, "w"), os.fdopen(err, "w")
        main([str(arg) for arg in args])
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


class Process:
    """A command in a process of its own, whose output is read as it comes."""

    def __init__(self, *args, **environment):
        self.out, out = os.pipe()
        self.err, err = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.out)
            os.close(self.err)
            run_command(args, out, err, environment)
        os.close(out)
        os.close(err)
        self.out, self.err = os.fdopen(self.out), os.fdopen(self.err)

    def end(self):
        """Exit code, and what else was said."""
        said, errors = ("" if pipe.closed else pipe.read() for pipe in (self.out, self.err))
        self.out.close()
        self.err.close()
        return ended(self.pid), said, errors


def ended(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, *args, columns):
        self.seen = ""
        self.pid, self.screen = pty.fork()
        if self.pid == 0:
            os.environ.pop("COLUMNS", None)
            fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
            run_command(args, 1, 2, {"LANG": "C.UTF-8", "TERM": "xterm-256color"})

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
        os.close(self.screen)
        return ended(self.pid)


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
    assert (ran.code, ran.err) == (130, "Interrupted: no file was left half written.\n")


def test_progress_is_drawn_and_ctrl_c_stops_it(tmp_path):
    screen = Terminal("fit", DEMO, "clip(reference=True)", "-o", tmp_path / "cal", columns=80)
    screen.read(until="/2000")  # the bar of the published grid
    os.kill(screen.pid, signal.SIGINT)
    seen = screen.read()
    assert screen.close() == 130, seen
    assert "Traceback" not in seen
    assert plain(seen).rstrip().endswith("Interrupted: no file was left half written.")
    assert seen.count("\x1b[?25l") == seen.count("\x1b[?25h") == 1  # the cursor is back
    assert tree(tmp_path) == {}


def test_the_comparison_fits_a_usual_terminal(pack):
    """Eighty columns: every number that matters is there to the last digit."""
    screen = Terminal("compare", pack, "--resamples", "100", columns=80)
    seen = plain(screen.read())
    assert screen.close() == 0
    assert "…" not in seen
    assert max(len(line) for line in seen.splitlines() if line[:1] in "│┃") <= 80
    for row in done("compare", pack, "--resamples", "100", "--json").json["rows"]:
        for key in ("accuracy", "ece"):
            assert f"{100 * row['metrics'][key]:.2f} %" in seen, seen
        assert f"{row['metrics']['nll']:.4f}" in seen, seen


def test_a_reader_that_leaves_early(tmp_path):
    """Like `featcal pack info PACK | true`: no traceback, and no failure."""
    running = Process("pack", "info", packed(tmp_path, arrays(val=40, test=50)))
    running.out.close()
    assert running.end() == (0, "", "")


def test_the_page_is_served_computes_and_ends_with_ctrl_c(pack):
    running = Process("explore", pack, "--no-browser")
    line = running.out.readline()
    assert line.startswith(f"{pack} is at http://127.0.0.1:")
    address = line.split()[3].rstrip(";")
    with urllib.request.urlopen(address, timeout=LONGEST) as answer:
        assert b'id="recipe-form"' in answer.read()
    body = json.dumps({"recipe": "vector"}).encode()
    sent = urllib.request.Request(f"{address}recipe", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(sent, timeout=LONGEST) as answer:
        assert json.load(answer)["entry"]["recipe"] == "vector"
    os.kill(running.pid, signal.SIGINT)
    assert running.end() == (0, "Stopped.\n", "")


def test_a_reader_of_a_run_that_goes_away_costs_nothing(train_project):
    """`featcal train ... | head`: what is done is kept, and the same command goes on."""
    running = Process(*words("read", epochs=2000))
    while "/2000 " not in running.out.readline():
        pass
    running.out.close()
    code, _, said = running.end()
    assert code == 130
    assert said.startswith("Interrupted: what is done is kept in read/checkpoint.safetensors;")
    assert (train_project / "read" / "checkpoint.safetensors").exists()


def test_what_another_process_alone_refuses_is_said_late(train_project, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("featcal.cli.train.PATIENCE", 0.2)
    started = time.monotonic()
    assert "did you mean focal" in refused(*words("odd", "--loss", "fokal"))
    assert time.monotonic() - started > 0.2


def test_lines_of_epochs_stand_above_the_bar(train_project):
    screen = Terminal(*words("shown", "--no-pack", epochs=20), columns=100)
    seen = screen.read()
    assert screen.close() == 0, seen
    assert "training" in seen  # the bar
    lines = [line for line in seen.replace("\r", "\n").split("\n") if "/20 " in line]
    told = [plain(line).split() for line in lines if "training" not in line]
    assert sum(bool(line) and line[0].endswith("/20") for line in told) >= 20
    assert not any("training" in line and " % " in line for line in lines)
