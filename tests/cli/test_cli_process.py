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

import pytest
from cli_cases import arrays, done, packed, tree

from featcal.data.pack import DEMO

FEATCAL = [sys.executable, "-m", "featcal"]
# The command, stopped for good at the moment when the finished file is to be renamed.
STUCK = """
import os, sys, time
def wait(*_):
    print("ready", flush=True)
    time.sleep(600)
os.replace = os.rename = wait
from featcal.cli import main
main(sys.argv[1:])
"""
LONGEST = 120  # seconds to wait for a sign of life


def environment(**more):
    quiet = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    return {**quiet, "OMP_NUM_THREADS": "1", **more}


def process(*args, **options):
    return subprocess.run(
        [*FEATCAL, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=LONGEST,
        env=environment(),
        **options,
    )


def test_exit_codes(pack, tmp_path):
    ran = process("fit", pack, "clip | temperature", "-o", tmp_path / "cal", "--json")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert json.loads(ran.stdout)["recipe"] == "clip | temperature"
    ran = process("fit", pack, "klip", "-o", tmp_path / "other")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith("Error: recipe 'klip'")
    assert list(tree(tmp_path)) == ["cal"]


@pytest.mark.parametrize("command", ["predict", "import"])
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "kill"])
def test_no_half_file_under_the_final_name(pack, cal, tmp_path, command, sign):
    out = tmp_path / "out"
    words = {
        "predict": ["predict", pack, cal, "-o", out],
        "import": ["pack", "import", pack.with_suffix(".npz"), "-o", out],
    }[command]
    running = subprocess.Popen(
        [sys.executable, "-c", STUCK, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    with running:
        assert running.stdout.readline() == "ready\n"
        assert not out.exists()
        running.send_signal(sign)
        _, said = running.communicate(timeout=LONGEST)
    assert not out.exists()
    if sign == signal.SIGINT:
        assert running.returncode == 130
        assert said.strip() == "Interrupted: nothing was written."
        assert tree(tmp_path) == {}
    else:
        assert running.returncode == -signal.SIGKILL
        done(*words)  # what the dead run left behind is in nobody's way
        assert out.exists()


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, *args, columns):
        self.seen = ""
        self.pid, self.screen = pty.fork()
        if self.pid == 0:
            more = {"TERM": "xterm-256color", "LANG": "C.UTF-8"}
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


SWALLOWED = """
import os, signal, sys
from featcal.cli import app

def swallows(**_):
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        raise ValueError("what a library made of it") from None

app.group.main = swallows
app.main()
"""


def test_an_interrupt_that_a_library_turned_into_an_error_is_still_one():
    ran = subprocess.run(
        [sys.executable, "-c", SWALLOWED], capture_output=True, text=True, timeout=LONGEST
    )
    assert ran.returncode == 130, ran.stderr
    assert ran.stderr == "Interrupted: nothing was written.\n"


def test_progress_is_drawn_and_ctrl_c_stops_it(tmp_path):
    screen = Terminal("fit", DEMO, "clip(reference=True)", "-o", tmp_path / "cal", columns=80)
    screen.read(until="/2000")  # the bar of the published grid
    os.kill(screen.pid, signal.SIGINT)
    seen = screen.read()
    assert screen.close() == 130, seen
    assert "Traceback" not in seen
    assert plain(seen).rstrip().endswith("Interrupted: nothing was written.")
    assert seen.count("\x1b[?25l") == seen.count("\x1b[?25h") == 1  # the cursor is back
    assert tree(tmp_path) == {}


def test_the_comparison_fits_a_usual_terminal(pack):
    """Eighty columns: every number that matters is there to the last digit."""
    screen = Terminal("compare", pack, columns=80)
    seen = plain(screen.read())
    assert screen.close() == 0
    for row in done("compare", pack, "--json").json["rows"]:
        assert row["recipe"] in seen
        for key in ("accuracy", "ece"):
            assert f"{100 * row['metrics'][key]:.2f} %" in seen, seen
        assert f"{row['metrics']['nll']:.4f}" in seen, seen


@pytest.mark.parametrize("term", ["dumb", "xterm"])
def test_a_terminal_of_any_kind_has_the_width_it_says(pack, term, monkeypatch):
    """Rich takes a dumb one for 80 columns wide, whatever it is, and would cut numbers there."""
    monkeypatch.setenv("TERM", term)
    screen = Terminal("compare", pack, "none", "temperature", "--resamples", "100", columns=140)
    seen = plain(screen.read())
    assert screen.close() == 0
    assert "…" not in seen
    assert "Too narrow" not in seen


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
