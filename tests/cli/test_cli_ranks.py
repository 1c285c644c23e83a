"""Commands that several processes share: the answer of one process, written and said once."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
import torch
from cli_cases import arrays, done, featcal, logits_alone, packed, tree
from nets import BUILD
from torch.distributed.rendezvous import rendezvous
from train_cases import words, write_data, write_network

from featcal import Pack, load
from featcal.cli import app, main
from featcal.core import dist, fit
from featcal.data import pack as pack_module
from featcal.data.pack import DEMO
from forked import ended, started

pytestmark = pytest.mark.no_cover  # forked


@pytest.fixture(autouse=True, scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "rank_nets.py").write_text(textwrap.dedent(BUILD))
    write_data(folder)
    write_network(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", list(sys.path))
        patch.setattr(app, "PATIENCE", 1.0)
        yield folder


@pytest.fixture(scope="module")
def pack(project):
    return packed(project, arrays(val=301, test=250))


def shared(world, folder, *args, change=None):
    """Each process's exit code and words."""

    def work(rank):
        torch.set_num_threads(1)
        if change is not None:
            change(rank)
        main([str(arg) for arg in args])

    folder.mkdir(exist_ok=True)
    return ended(started(world, work, folder), folder)


def first_says(told):
    """What the first process said, of several that all succeeded and were silent but for it."""
    assert [code for code, _ in told] == [0] * len(told), told
    assert [words for _, words in told[1:]] == [""] * (len(told) - 1)
    return told[0][1]


def close(found, expected):
    """The same up to seconds, with numbers to solver tolerance."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            if key not in ("seconds", "output"):
                close(found[key], expected[key])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            close(one, other)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=2e-4, abs=2e-6)
    else:
        assert found == expected


def few_at_a_time(_):
    """Shards are cut, and rows are many: nothing is brought together."""
    pack_module.CHUNK_ROWS = 32
    fit.FEW_NUMBERS = 0


@pytest.mark.parametrize(("world", "rows"), [(2, "few"), (2, "many"), (4, "many")])
def test_fit_eval_compare_and_predict_as_one_process(world, rows, pack, tmp_path):
    change = few_at_a_time if rows == "many" else None
    out = tmp_path / "said"
    one, cal = tmp_path / "one.safetensors", tmp_path / "cal.safetensors"
    expected = done("fit", pack, "clip | temperature", "-o", one, "--json").json
    told = shared(
        *(world, out, "fit", pack, "clip | temperature", "-o", cal, "--json"), change=change
    )
    close(json.loads(first_says(told)), expected)
    assert load(cal).report.rows == 301
    expected = done("eval", pack, one, "--json").json
    close(
        json.loads(first_says(shared(world, out, "eval", pack, one, "--json", change=change))),
        expected,
    )
    recipes = (
        "none",
        "ensemble",
        "--resamples",
        "100",
        "--json",
        *["--folds", "3"] * (rows == "few"),
    )
    expected = done("compare", pack, *recipes).json
    told = shared(world, out, "compare", pack, *recipes, change=change)
    close(json.loads(first_says(told)), expected)
    done("predict", pack, one, "-o", tmp_path / "one.npy")
    told = shared(*(world, out, "predict", pack, one, "-o", tmp_path / "probs.npy"), change=change)
    assert "250 rows" in first_says(told)
    found, expected = (np.load(tmp_path / f"{name}.npy") for name in ("probs", "one"))
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_more_processes_than_rows(project, tmp_path):
    tiny = packed(project, logits_alone(val=3, test=2), "tiny")
    expected = done("eval", tiny, "--json").json
    close(json.loads(first_says(shared(4, tmp_path, "eval", tiny, "--json"))), expected)
    cal, probs = tmp_path / "cal.safetensors", tmp_path / "probs.csv"
    first_says(shared(4, tmp_path, "fit", tiny, "temperature", "-o", cal))
    first_says(shared(4, tmp_path, "predict", tiny, cal, "-o", probs))
    assert len(probs.read_text().splitlines()) == 3


def test_no_process_reads_the_rows_of_another(pack):
    whole = Pack.open(pack).split("val")
    labels = torch.cat([batch.labels for batch in whole])
    for world in (2, 3, 302):
        parts = [pack_module.replace(whole, part=(rank, world)) for rank in range(world)]
        seen = [torch.cat([torch.zeros(0), *(b.labels for b in part)]) for part in parts]
        assert [len(one) for one in seen] == [part.rows for part in parts]
        assert torch.equal(torch.cat(seen), labels)


@pytest.mark.parametrize(("rows", "most"), [("few", 20), ("many", 250)])
def test_a_joint_fit_waits_for_the_others_a_few_times(rows, most, pack, tmp_path):
    """Few rows are brought together; of many the sums are, once for a look at all of them."""

    def counting(rank):
        told, real = [], dist._reduced

        def counted(values, operation):
            told.append(dist.active())
            return real(values, operation)

        dist._reduced, fit.FEW_NUMBERS = counted, 2**24 if rows == "few" else 0
        app._leave = lambda code: print("waited", sum(told))

    cal, data = tmp_path / "cal.safetensors", pack if rows == "few" else DEMO
    told = shared(2, tmp_path, "fit", data, "clip | temperature", "-o", cal, change=counting)
    assert int(told[1][1].split()[-1]) < most


@pytest.mark.parametrize(("target", "rows"), [("build", 240), ("pixels", 660)])
def test_collect_by_two_processes_goes_on_where_it_was(target, rows, project, tmp_path):
    first, second = f"{target}-one", f"{target}-both"
    done("collect", f"rank_nets:{target}", "-o", first, "--shard-rows", "30")
    command = ("collect", f"rank_nets:{target}", "-o", second, "--shard-rows", "30")

    def killed(rank):
        if rank == 1:
            from featcal.core.progress import tell
            from featcal.data import resume

            def dies(label, done, of):
                if label.startswith("collecting test"):
                    os.kill(os.getpid(), signal.SIGKILL)
                tell(label, done, of)

            resume.tell = dies

    told = shared(2, tmp_path, *command, change=killed)
    assert told[1][0] == -signal.SIGKILL
    assert told[0][0] == 2
    assert told[0][1].startswith("Error: another process of this job has ended")
    assert told[0][1].count("\n") == 1
    assert not (project / second).exists()
    assert "was begun by 2 processes" in shared(3, tmp_path, *command)[0][1]
    assert f"Wrote {second}: {rows} rows" in first_says(shared(2, tmp_path, *command))
    assert not (project / f"{second}.parts").exists()
    one, both = Pack.open(first), Pack.open(second)
    both.verify()
    assert both.splits == one.splits
    for split in one.splits:
        pairs = [list(each.split(split)) for each in (one, both)]
        for name in ("features", "labels", *["groups"] * (target == "pixels")):
            found = [torch.cat([getattr(batch, name) for batch in each]) for each in pairs]
            assert torch.equal(*found), name
    if target == "pixels":  # 220 rows of 11 images: the sixth is cut in the middle
        asked = ("compare", second, "none", "temperature", "--resamples", "100", "--json")
        for more in ((), ("--folds", "11")):
            expected = done(*asked, *more).json
            close(json.loads(first_says(shared(2, tmp_path, *asked, *more))), expected)
        folds = (*asked, "--fit-split", "test", "--folds", "12")
        said = [words for _, words in shared(2, tmp_path, *folds)]
        assert sum("for 11 samples" in words for words in said) == 1, said  # whoever is first


def test_collect_by_more_processes_than_batches(project, tmp_path):
    done("collect", "rank_nets:few", "-o", "few-one")
    command = ("collect", "rank_nets:few", "-o", "few-all")
    assert "Wrote few-all: 22 rows" in first_says(shared(3, tmp_path, *command))
    for split in ("val", "test"):
        one, several = (Pack.open(name).split(split) for name in ("few-one", "few-all"))
        (first,), (second,) = one, several
        assert torch.equal(first.features, second.features)
        assert torch.equal(first.labels, second.labels)
    told = shared(2, tmp_path, "collect", "rank_nets:empty", "-o", "none")
    assert [code for code, _ in told] == [2, 2]
    assert [words.startswith("Error: split 'test' is empty") for _, words in told if words] == [
        True
    ]
    assert not (project / "none").exists()


def test_train_by_two_processes(project, tmp_path):
    said = first_says(shared(2, tmp_path, *words("trained", "--device", "cpu")))
    assert said.count("2 processes") == said.count("\n      1/2 ") == 1
    assert said.count("Wrote trained") == 1
    assert json.loads((project / "trained" / "run.json").read_text())["processes"] == 2
    names = sorted(path.name for path in (project / "trained").iterdir())
    assert names == ["model.safetensors", "pack", "run.json"]
    assert done("eval", "trained/pack", "--json").json["n"] == 20


def test_what_is_wrong_is_said_once_by_the_process_that_knows(pack, tmp_path):
    cal = tmp_path / "cal.safetensors"
    told = shared(2, tmp_path, "fit", pack, "clop", "-o", cal)
    assert [code for code, _ in told] == [2, 2]
    assert sum("did you mean clip?" in words for _, words in told) == 1
    # Only the second process has the row, and only the first has the output's name.
    made = logits_alone(val=60, test=60)
    damaged = packed(tmp_path, made, "damaged")
    path = next(damaged.glob("val-*"))
    raw = bytearray(path.read_bytes())
    values = made["val_logits"].astype("<f4")
    place = bytes(raw).index(values[55].tobytes())
    raw[place : place + 4] = np.float32(np.nan).tobytes()
    path.write_bytes(raw)
    manifest = damaged / "manifest.json"
    known = pack_module.sha256(path)
    old = next(one["sha256"] for one in json.loads(manifest.read_text())["splits"]["val"]["shards"])
    manifest.write_text(manifest.read_text().replace(old, known))
    told = shared(2, tmp_path, "fit", damaged, "temperature", "-o", cal)
    assert [code for code, _ in told] == [2, 2]
    said = [words for _, words in told if words]
    assert len(said) == 1
    assert "NaN or infinite" in said[0]
    cal.write_text("mine")
    told = shared(2, tmp_path, "fit", pack, "temperature", "-o", cal)
    assert told[0][0] == 2
    assert "exists" in told[0][1]
    assert cal.read_text() == "mine"


def test_a_killed_process_ends_the_job_with_one_sentence_and_no_file(pack, tmp_path):
    def killed(rank):
        real = dist._reduced

        def counted(values, operation, seen=[0]):  # noqa: B006 - counts
            seen[0] += 1
            if rank == 2 and seen[0] == 12:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(values, operation)

        dist._reduced = counted
        fit.FEW_NUMBERS = 0

    out = tmp_path / "made"
    out.mkdir()
    told = shared(
        *(3, tmp_path, "fit", pack, "clip | temperature", "-o", out / "cal"), change=killed
    )
    assert [code for code, _ in told] == [2, 2, -signal.SIGKILL]
    said = {words for _, words in told if words}  # one or all of those that are left
    assert len(said) == 1
    assert said.pop().startswith("Error: another process of this job has ended: see what it said")
    assert tree(out) == {}


@pytest.mark.parametrize("met", [False, True])
@pytest.mark.parametrize(
    ("number", "code", "words"),
    [
        (signal.SIGTERM, 2, "Error: another process of"),
        (signal.SIGINT, 130, "Interrupted: no file"),
    ],
)
def test_a_process_whose_others_never_come_can_be_ended(number, code, words, met, pack, tmp_path):
    def lone(rank):
        real = dist._join

        def join(*given):
            threading.Timer(0.5, os.kill, (os.getpid(), number)).start()
            real(*given)

        dist._join = join
        if rank == 1:  # comes to where they meet, or not even there, and no further
            if met:
                next(rendezvous("env://"))
                time.sleep(3)
            os._exit(0)

    out = tmp_path / "made"
    out.mkdir()
    told = shared(2, tmp_path, "fit", pack, "temperature", "-o", out / "cal", change=lone)
    assert [one for one, _ in told] == [code, 0]
    assert told[0][1].startswith(words)
    assert told[0][1].count("\n") == 1
    assert tree(out) == {}


def test_a_command_for_one_process_runs_once(pack, tmp_path):
    told = shared(2, tmp_path, "pack", "info", pack)
    assert "301" in first_says(told)


def test_the_real_launcher(pack, tmp_path):
    words = ("fit", pack, "clip | temperature", "--json", "-o", tmp_path / "cal.safetensors")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *launcher, "-m", "featcal", *map(str, words)]
    quiet = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, env=quiet)
    assert ran.returncode == 0, ran.stderr
    expected = done("fit", pack, "clip | temperature", "-o", tmp_path / "one", "--json").json
    close(json.loads(ran.stdout), expected)
    assert featcal("eval", pack, tmp_path / "cal.safetensors").code == 0
