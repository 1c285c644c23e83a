"""Kills every command that writes files, fills its disk, and starts it twice at once.

    python experiments/kills.py [--kills 200] [--seed 0]

After each fault: whatever has its final name is whole, nothing of the user's was touched, the same
command given again succeeds, and the folder is then what an undisturbed run leaves, byte for byte.
Writes results/kills.json and its table in docs/trust.md. Random moments are shares of the time an
undisturbed run takes; all else repeats by the seed. Processes are forked, for torch takes seconds
to load; in them the clock of featcal stands still, for files that hold seconds would differ.
"""

import argparse
import io
import json
import multiprocessing
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

import numpy as np
import torch

from featcal.cli import main as featcal
from featcal.core.files import OURS
from featcal.report.tables import Table
from featcal.version import __version__

ROOT = Path(__file__).resolve().parents[1]
RESULTS, DOCS = ROOT / "results" / "kills.json", ROOT / "docs" / "trust.md"
START, END = "<!-- kills: made by experiments/kills.py -->", "<!-- end of kills -->"
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
MOMENTS = ("at a random moment", "at a file operation")
FULL, READ_ONLY, TWO = "full disk", "read-only folder", "two writers at once"
ROOMS = (0, 0.25, 0.5, 0.75, 0.95)  # of the bytes a command writes, left on the disk
DISK = "16m"
PAIRS = 5
# What Python tells before it does it; the writers below Python are met at random moments.
OPERATIONS = {
    *("open", "fcntl.flock", "tempfile.mkdtemp", "shutil.rmtree"),
    *("os.chmod", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir"),
}
WRONG = {
    "half": "half files under a final name",
    "lost": "files of the user changed or lost",
    "said": "ends without a word or with a traceback",
    "rerun": "reruns that failed or differ",
    "left": "left-overs after the rerun",
}
OUT = "out"
NETWORKS = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def tiny(classes):
    body = nn.Conv2d(3, 4, 3, stride=4), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(*body, nn.Flatten(), nn.Dropout(0.1), nn.Linear(4, classes))

def rows(n):
    draw = torch.Generator().manual_seed(n)
    inputs = torch.randn(n, 3, 8, 8, generator=draw)
    return DataLoader(TensorDataset(inputs, torch.arange(n) % 3), batch_size=16)

def build():
    torch.manual_seed(0)
    return tiny(3), {"val": rows(150), "test": rows(90)}
"""


@dataclass(frozen=True)
class Command:
    """A command that writes.

    Attributes:
        name: of the command.
        words: what is typed, but for the output.
        output: the file or folder it makes.
        option: what names the output.
        whole: the names that must be whole or absent at any time; the output's own without any.
        force: whether it may be told to replace a file.
    """

    name: str
    words: tuple[str, ...]
    output: str
    option: str = "-o"
    whole: tuple[str, ...] = ()
    force: bool = True

    def typed(self, *, force=False):
        """The words, with the output."""
        return [*self.words, self.option, self.output, *["--force"] * (force and self.force)]


def commands(given):
    """Every command that writes, over the inputs in a folder."""
    pack, cal = str(given / "pack"), str(given / "cal")
    train = ("train", "cifar10", "kill_networks:tiny", "--data", str(given), "--epochs", "2")
    shown = ("none", "temperature")
    recipes = tuple(word for recipe in shown for word in ("--recipe", recipe))
    inside = tuple(f"{OUT}/{name}" for name in ("pack", "model.safetensors", "run.json"))
    return (
        Command("fit", ("fit", pack, "temperature"), OUT),
        Command("compare", ("compare", pack, *shown, "--resamples", "100"), f"{OUT}.json"),
        Command("predict", ("predict", pack, cal), f"{OUT}.npy"),
        Command("report", ("report", pack, *recipes), f"{OUT}.html"),
        Command("export", ("export", pack, cal), f"{OUT}.onnx"),
        Command("history", ("history", str(given / "run")), f"{OUT}.png"),
        Command(
            "collect", ("collect", "kill_networks:build", "--shard-rows", "40"), OUT, force=False
        ),
        Command("pack import", ("pack", "import", str(given / "arrays.npz")), OUT, force=False),
        Command(
            "train",
            (*train, "--batch", "16", "--val", "20", "--checkpoint-every", "0"),
            OUT,
            whole=inside,
            force=False,
        ),
    )


def make_inputs(given):
    """A pack, a calibrator, a finished run, arrays, images and networks."""
    draw = np.random.default_rng(0)
    made = {"weight": draw.normal(size=(4, 6)), "bias": draw.normal(size=4)}
    for split, n in (("val", 80), ("test", 100)):
        features = np.maximum(draw.standard_t(3, size=(n, 6)), 0)
        logits = np.minimum(features, 1) @ made["weight"].T + made["bias"]
        made[f"{split}_features"] = features
        made[f"{split}_labels"] = (logits + draw.gumbel(size=logits.shape)).argmax(1)
    np.savez(given / "arrays.npz", **made)
    images = given / "cifar-10-batches-bin"
    images.mkdir()
    for name in (*(f"data_batch_{part}" for part in range(1, 6)), "test_batch"):
        planes = draw.integers(256, size=(16, 3073), dtype=np.uint8)
        planes[:, 0] = np.arange(16) % 10
        (images / f"{name}.bin").write_bytes(planes.tobytes())
    (images / "batches.meta.txt").write_text("\n".join(map(str, range(10))) + "\n")
    (given / "kill_networks.py").write_text(textwrap.dedent(NETWORKS))
    if str(given) not in sys.path:
        sys.path.insert(0, str(given))
    sys.modules.pop("kill_networks", None)
    *_, packed, trained = commands(given)
    for words in (
        [*packed.words, "-o", str(given / "pack")],
        ["fit", str(given / "pack"), "temperature", "-o", str(given / "cal")],
        [*trained.words, "-o", str(given / "run")],
    ):
        run_here(words, given)


def tree(folder):
    """Every file and folder below a folder, hidden ones too, with the bytes of the files."""
    return {
        str(path.relative_to(folder)): content(path) if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def content(path):
    """The bytes of a file, a header sorted that safetensors writes in any order."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    if data[8:23] != b'{"__metadata__"' or len(data) < 8 + size:
        return data
    header = json.dumps(json.loads(data[8 : 8 + size]), sort_keys=True)
    return header.encode() + data[8 + size :]


def below(found, name):
    return {
        path: value
        for path, value in found.items()
        if Path(name) in [Path(path), *Path(path).parents]
    }


def run_here(words, folder):
    """A command in this process, which must succeed."""
    before, said = os.getcwd(), io.StringIO()
    try:
        os.chdir(folder)
        with redirect_stdout(said), redirect_stderr(said):
            featcal(words)
    except SystemExit as end:
        if end.code:
            raise RuntimeError(said.getvalue()) from end
    finally:
        os.chdir(before)


class Process:
    """A command in a process of its own, with an end that can be set."""

    def __init__(self, words, folder, number=0, operation=0):
        self.said = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        self.count = tempfile.TemporaryFile()  # noqa: SIM115
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # until the child can hear it
        self.pid = os.fork()
        if self.pid:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
            return
        code = 99
        try:
            os.chdir(folder)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(self.said.fileno(), 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            signal.signal(signal.SIGINT, signal.default_int_handler)
            stop_clocks()
            self._watch(number, operation)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
            featcal(words)
        except SystemExit as end:
            code = end.code
        except KeyboardInterrupt:  # before the command was there to hear it, or after
            code = 130
        except BaseException as error:
            print(f"Traceback: {error!r}", file=sys.stderr)
        finally:
            with suppress(BaseException):
                sys.stderr.flush()
            os._exit(code)

    def _watch(self, number, operation):
        """Counts the file operations in this folder, and sends the signal before one of them."""
        here, seen, count = os.getcwd(), [0], self.count.fileno()

        def hear(event, args):
            if event not in OPERATIONS:
                return
            name = args[0]
            if isinstance(name, (str, os.PathLike)):
                if not os.path.abspath(name).startswith(here):
                    return
            elif event != "fcntl.flock":
                return
            seen[0] += 1
            os.pwrite(count, b"%8d" % seen[0], 0)
            if seen[0] == operation:
                os.kill(os.getpid(), number)

        sys.addaudithook(hear)

    def end(self):
        """The exit code; what was said of errors, and the operations, are then known."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.said.seek(0)
        self.text = self.said.read().decode(errors="replace")
        self.operations = int(os.pread(self.count.fileno(), 8, 0) or 0)
        self.said.close()
        self.count.close()
        return code


def stop_clocks():
    for name, module in list(sys.modules.items()):
        if name.startswith("featcal."):
            for clock in ("perf_counter", "monotonic"):
                if hasattr(module, clock):
                    setattr(module, clock, lambda: 0.0)


class Attack:
    """The faults of one command, one after the other, and how often what went wrong.

    Attributes:
        times: how often each fault came.
        late: of these, how often the command had ended by then, or had room enough.
        wrong: (fault, kind of WRONG) and how often.
        found: the first things that went wrong, in words.
    """

    def __init__(self, command, work, draw):
        self.command, self.folder, self.draw = command, work / OUT, draw
        self.times, self.late, self.wrong, self.found = Counter(), Counter(), Counter(), []
        self.fault = ""
        with self.fresh():
            run_here(command.typed(), self.folder)  # loads what it needs, for all that are forked
        with self.fresh() as before:
            started, ran = time.monotonic(), Process(command.typed(), self.folder)
            assert ran.end() == 0, ran.text
            self.seconds, self.operations = time.monotonic() - started, ran.operations
            self.whole = tree(self.folder)
        self.size = sum(len(self.whole[name] or b"") for name in self.whole.keys() - before.keys())

    @contextmanager
    def fresh(self, *, over=False):
        """The folder with the user's own files in it alone, a former output among them."""
        self.folder.mkdir(exist_ok=True)
        try:
            # Folders and files that look like our own left-overs, and are not.
            for name in ("notes.txt", f".{self.command.output}.settings/mine", ".hidden/.lock"):
                (self.folder / name).parent.mkdir(exist_ok=True)
                (self.folder / name).write_text("mine")
            if over:
                (self.folder / self.command.output).write_text("old")
            yield tree(self.folder)
        finally:
            for path in self.folder.iterdir():
                remove = shutil.rmtree if path.is_dir() else os.unlink
                remove(path)

    @contextmanager
    def hit(self, fault, *, over=False):
        """A fault of a fresh folder; whatever stands there then is looked at, twice."""
        self.fault = fault
        self.times[fault] += 1
        with self.fresh(over=over) as before:
            yield
            found, names = tree(self.folder), self.command.whole or (self.command.output,)
            for name in names:
                part = below(found, name)
                if part not in ({}, below(before, name), below(self.whole, name)):
                    self.note("half", name)
            for name in before.keys() - set(names):
                if found.get(name, "gone") != before[name]:
                    self.note("lost", name)
            self.rerun(done=names[-1] in found and not over, over=over)

    def rerun(self, *, done, over):
        """The same command again, as a user gives it, and what is there afterwards."""
        command = self.command
        ran = Process(command.typed(force=done or over), self.folder)
        code = ran.end()
        if code != (2 if done and not command.force else 0):
            self.note("rerun", f"{code}: {ran.text}")
        found = tree(self.folder)
        if {name: found.get(name, "gone") for name in self.whole} != self.whole:
            self.note("rerun", "another result")
        if found.keys() - self.whole.keys():
            self.note("left", ", ".join(found.keys() - self.whole.keys()))

    def note(self, kind, words):
        """Something went wrong."""
        self.wrong[self.fault, kind] += 1
        self.found.append(f"{self.command.name}, {self.fault}: {WRONG[kind]}: {words}"[:2000])

    def kill(self, number, moment):
        """A signal, by a clock or by the count of operations."""
        name, over = signal.Signals(number).name, self.command.force and self.draw.random() < 0.5
        with self.hit(f"{name} {moment}", over=over):
            typed = self.command.typed(force=over)
            if moment == MOMENTS[1]:
                at = self.draw.randint(1, self.operations)
                ran = Process(typed, self.folder, number, at)
            else:
                ran = Process(typed, self.folder)
                time.sleep(self.draw.random() * self.seconds)
                os.kill(ran.pid, number)
            code = ran.end()
            self.late[self.fault] += code == 0
            if code not in (0, -number, 130) or "Traceback" in ran.text:
                self.note("said", f"{code}: {ran.text}")

    def wait(self, *running):
        """Lets commands end that may be refused, in one sentence; how many were not."""
        codes = [ran.end() for ran in running]
        for ran, code in zip(running, codes, strict=True):
            sentence = ran.text.startswith("Error: ") and ran.text.count("\n") == 1
            if code and not (code == 2 and sentence and OURS not in ran.text):
                self.note("said", f"{code}: {ran.text}")
        return codes.count(0)

    def fill(self, room):
        """A disk with room for a share of what the command writes."""
        with mounted(self.folder), self.hit(FULL):
            filler, free = self.folder / "notes.txt", os.statvfs(self.folder)
            filler.write_bytes(bytes(free.f_bavail * free.f_bsize - int(room * self.size)))
            self.late[FULL] += self.wait(Process(self.command.typed(), self.folder))
            filler.write_text("mine")  # room again

    def forbid(self):
        """A folder in which nothing can be written."""
        with mounted(self.folder), self.hit(READ_ONLY):
            mount("-o", "remount,ro", self.folder)
            if self.wait(Process(self.command.typed(), self.folder)):
                self.note("said", "success")
            mount("-o", "remount,rw", self.folder)

    def twice(self):
        """Two processes that make the same; one may be refused."""
        over = self.command.force and self.draw.random() < 0.5
        with self.hit(TWO, over=over):
            first = Process(self.command.typed(force=over), self.folder)
            time.sleep(self.draw.random() * self.seconds)
            second = Process(self.command.typed(force=over), self.folder)
            if not self.wait(first, second):
                self.note("said", f"both refused: {first.text}{second.text}")

    def as_rows(self):
        """The counts by fault."""
        return [
            {
                **{"command": self.command.name, "fault": fault, "times": times},
                "without_effect": self.late[fault],
                **{kind: self.wrong[fault, kind] for kind in WRONG},
            }
            for fault, times in self.times.items()
        ]


def mount(*words):
    subprocess.run(["mount", *words], check=True, capture_output=True)


@contextmanager
def mounted(folder):
    """A disk of its own in memory."""
    folder.mkdir(exist_ok=True)
    mount("-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", folder)
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def no_mount(work):
    """Why no disk can be mounted here; empty where one can."""
    try:
        with mounted(work / OUT):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no disk can be mounted here ({error})"


def attacked(names, work, *, kills, seed=0, rooms=ROOMS, pairs=PAIRS):
    """All faults of these commands in an empty folder: counts, what went wrong, what was skipped.

    Without rooms no disk is mounted.
    """
    given = work / "given"
    given.mkdir()
    make_inputs(given)
    before, skipped = tree(given), no_mount(work) if rooms else "no disk was asked for"
    chosen = [command for command in commands(given) if command.name in names]
    attacks = [Attack(one, work, random.Random(f"{seed} {one.name}")) for one in chosen]
    ways = [(number, moment) for number in SIGNALS for moment in MOMENTS]
    for index in range(kills):
        turn, which = divmod(index, len(attacks))
        attacks[which].kill(*ways[(turn + which) % len(ways)])
    for attack in attacks:
        for room in () if skipped else rooms:
            attack.fill(room)
        if not skipped:
            attack.forbid()
        for _ in range(pairs):
            attack.twice()
    assert tree(given) == before, "a command has changed its inputs"
    rows = [row for attack in attacks for row in attack.as_rows()]
    return rows, [text for attack in attacks for text in attack.found], skipped


def attacked_alone(name, kills, seed):
    """All faults of one command, in a process of its own."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as work:
        return attacked([name], Path(work), kills=kills, seed=seed)


def run(names, kills, seed, jobs):
    """All faults of these commands, some of them at a time."""
    shares = [kills // len(names) + (index < kills % len(names)) for index in range(len(names))]
    forked = multiprocessing.get_context("fork")
    rows, found, reasons = [], [], set()
    with ProcessPoolExecutor(jobs, forked) as pool:
        for name, (counted, wrong, skipped) in zip(
            names, pool.map(attacked_alone, names, shares, repeat(seed)), strict=True
        ):
            print(name, flush=True)
            rows += counted
            found += wrong
            reasons.add(skipped)
    return {
        **{"seed": seed, "kills": kills, "skipped": " ".join(reasons)},
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "versions": {"featcal": __version__, "torch": torch.__version__},
        **{"rows": rows, "found": found},
    }


def tables(results):
    """By fault, from the result file alone."""
    rows = results["rows"]
    faults = list(dict.fromkeys(row["fault"] for row in rows))
    headings = ("fault", "times", "of these, without effect", *WRONG.values())
    keys = ("times", "without_effect", *WRONG)

    def total(key, value, count):
        return str(sum(row[count] for row in rows if row[key] == value))

    by_fault = Table(
        "", headings, tuple((f, *(total("fault", f, key) for key in keys)) for f in faults)
    )
    return by_fault.markdown()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", help="these commands alone; nothing is written")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="commands at a time")
    asked = parser.parse_args()
    names = asked.only or [command.name for command in commands(Path())]
    results = run(names, asked.kills, asked.seed, asked.jobs)
    print("\n".join(results["found"]))
    print(tables(results))
    if asked.only is None:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        head, rest = DOCS.read_text().split(START)
        DOCS.write_text(f"{head}{START}\n{tables(results)}\n{END}{rest.split(END)[1]}")
        print(f"Wrote {RESULTS.relative_to(ROOT)} and its tables in {DOCS.relative_to(ROOT)}")
    sys.exit(bool(results["found"]))


if __name__ == "__main__":
    main()
