"""Every recipe on every pack, on many resplits of its rows: the study of docs/research.md.

    python experiments/study.py [--extra FOLDER] [--workers N] [--measure]
    python experiments/study.py --recipes auto "clip | sample" --sizes 250 500 [--packs NAME ...]
    python experiments/study.py --speed

val and test of a pack are put together and split again by a seeded permutation: some rows to fit
on, the last 5,000 of the others to score. The packs are those of ../shared/packs; networks of
--extra, which nobody looked at while methods were chosen, count as held out. Each result goes into
a journal, from which a stopped run goes on and one with more resplits starts; --again forgets it,
as is due once a method has changed. A run that ends puts its part into results/study.json, beside
what is there. experiments/study_docs.py makes the page of that file.

A fit has one thread, as many run at a time as there are workers, and seconds are those of the core
that it had, so that other work on the machine does not count. The first resplit tells what a fit
costs: one of more than 20 s at 250 rows, or 60 s at more, is given up and recorded as too
expensive, and one of more than 3 s, if not of auto, gets 5 resplits in place of 20. --speed times
two claims alone.
"""

import argparse
import json
import os
import signal
import time
import warnings
import zlib
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from functools import cache
from multiprocessing import get_context
from operator import contains
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

import featcal
from featcal import METHODS, Batch
from featcal.metrics import Predictions
from featcal.metrics.columns import COLUMNS
from featcal.report.compare import versions
from featcal.report.scores import calibrated_logits

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results" / "study.json"
JOURNAL = ROOT / ".cache" / "study.jsonl"
PACKS = ROOT.parent / "shared" / "packs"
SIZES, REPS, TEST, LEAST = (250, 500, 1000, 2500, 5000), 20, 5000, 2000
LIMIT, LONGEST = 20.0, 60.0  # seconds after which a first fit is given up: smallest size, others
SLOW, FEW = 3.0, 5  # seconds of a fit above which there are fewer resplits
ALWAYS = ("auto",)  # has all of them: claims are made of it
METRICS, BINS = ("nll", "ece", "adaptive_ece", "brier", "accuracy"), 15
IN_FULL = ("nll", "ece")  # kept for each resplit, so that paired tests can be done again
STEPWISE = ", step by step"
CHAINS = ("clip | temperature", f"clip | temperature{STEPWISE}", "clip | sample", "sample | svs")
TURNS, ROWS, CLASSES = 15, 25_000, 1000  # of the timing


class Job(NamedTuple):
    """One fit: a recipe, as it is written here, to some rows of a pack's resplit."""

    pack: str
    recipe: str
    size: int
    rep: int


def recipes():
    """The network as it is, every method alone and some of them together."""
    return ["none", *METHODS, *CHAINS]


def parsed(recipe):
    """The fresh calibrator and the mode of its fit; no calibrator for none."""
    text, stepwise, _ = recipe.partition(STEPWISE)
    mode = "sequential" if stepwise else "joint"
    return (None if text == "none" else featcal.parse(text)), mode


# --- packs ---------------------------------------------------------------------------------------


def held_out(folder):
    """Name -> file of networks: files of a folder, or the best one of each folder in it."""
    found = {path.stem: path for path in sorted(folder.glob("*.npz"))}
    for file in ("logits.npz", "pack.npz"):  # the latter has features
        found |= {path.parent.name: path for path in sorted(folder.glob(f"*/{file}"))}
    return found


@cache
def opened(path):
    """All rows of a file, val first, and the head; None where it holds logits alone."""
    with np.load(path, allow_pickle=False) as file:
        test = "test_matched" if "test_matched_labels" in file else "test"

        def rows(kind):
            return torch.from_numpy(np.concatenate([file[f"{s}_{kind}"] for s in ("val", test)]))

        labels = rows("labels").long()
        if "weight" not in file:
            return Batch(rows("logits").float(), labels), None
        weight, bias = (torch.from_numpy(file[key]).float() for key in ("weight", "bias"))
        features = rows("features").float()
    head = nn.Linear(*reversed(weight.shape))
    with torch.no_grad():
        head.weight.copy_(weight)
        head.bias.copy_(bias)
        return Batch(head(features), labels, features), head


def facts(path, group):
    batch, head = opened(path)
    width = 0 if head is None else head.in_features
    return {"group": group, "rows": len(batch), "classes": batch.logits.shape[1], "features": width}


def resplit(pack, rep, rows, size):
    """The rows to fit on and those to score, the latter the same for every size if they can be."""
    order = np.random.default_rng([zlib.crc32(pack.encode()), rep]).permutation(rows)
    return torch.from_numpy(order[:size]), torch.from_numpy(order[size:][-TEST:])


# --- one fit -------------------------------------------------------------------------------------


class TooLong(Exception):
    """A fit took longer than it may."""


@contextmanager
def limited(seconds):
    """Gives up after so many seconds of a core; never where they are 0."""

    def stop(*_):
        raise TooLong

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def done(job, path):
    """The record of one fit: metrics on the test rows and seconds, or why there are none."""
    began = time.process_time()
    batch, head = opened(path)
    fit, test = (batch.rows(part) for part in resplit(job.pack, job.rep, len(batch), job.size))
    calibrator, mode = parsed(job.recipe)
    limit = LIMIT if job.size == SIZES[0] else LONGEST
    started = time.process_time()
    try:
        with warnings.catch_warnings(), limited(limit if job.rep == 0 else 0):
            warnings.simplefilter("ignore", featcal.CalibrationWarning)
            if calibrator is not None:
                calibrator.fit(fit, head, mode=mode)
            seconds = time.process_time() - started
    except TooLong:
        return {**job._asdict(), "expensive": limit}
    except (featcal.InputError, RuntimeError) as error:
        return {**job._asdict(), "refused": str(error)}
    with torch.no_grad():
        logits = calibrated_logits(test, calibrator, head)
    seen = Predictions.of(logits=logits, labels=test.labels)
    binned = {"ece": {"bins": BINS}}
    found = {
        name: COLUMNS[name].of(
            COLUMNS[name].summary.of_predictions(seen, **binned.get(name, {})), BINS
        )
        for name in METRICS
    }
    spent = time.process_time() - began
    return {**job._asdict(), **found, "seconds": seconds, "spent": spent}


# --- many ----------------------------------------------------------------------------------------


class Journal:
    """What was done so far, a line for each job; a run that was stopped goes on from it.

    Attributes:
        path: the file.
        kind: of the jobs, a tuple whose fields every record has.
        records: job -> what came of it.
    """

    def __init__(self, path, kind=Job):
        self.path, self.kind = path, kind
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        whole = [json.loads(line) for line in lines if line.endswith("\n")]
        self.records = {self.job_of(record): record for record in whole}
        self.keep()

    def job_of(self, record):
        """What a record is of."""
        return self.kind(*(record[key] for key in self.kind._fields))

    def keep(self):
        """Writes the file anew, of the records there are."""
        self.path.write_text("".join(json.dumps(each) + "\n" for each in self.records.values()))

    def add(self, record):
        """Puts a record behind the others."""
        self.records[self.job_of(record)] = record
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")


@contextmanager
def progress(title, total):
    """A bar, or now and then a line where rich is missing; yields what moves it on."""
    try:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
    except ModuleNotFoundError:
        began, count = time.perf_counter(), 0

        def advance():
            nonlocal count
            count += 1
            if count % max(total // 20, 1) == 0:
                print(f"{title}: {count} of {total}, {time.perf_counter() - began:.0f} s")

        yield advance
        return
    words = TextColumn("{task.description}")
    parts = (words, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*parts) as bar:
        task = bar.add_task(title, total=total)
        yield lambda: bar.advance(task)


def run(pool, journal, jobs, paths, title):
    """Does those jobs that the journal does not know, in the order given."""
    left = [job for job in jobs if job not in journal.records]
    if not left:
        return
    with progress(title, len(left)) as advance:
        for future in as_completed([pool.submit(done, job, paths[job.pack]) for job in left]):
            journal.add(future.result())
            advance()


def reps_of(first, wanted):
    """How many resplits a recipe gets where the first one went like this."""
    if "seconds" not in first:
        return 1
    few = first["seconds"] > SLOW and first["recipe"] not in ALWAYS
    return min(wanted, FEW) if few else wanted


def study(options, paths, packs, journal):
    """Does all jobs and returns them: one resplit by size, then the others, the longest first."""
    context = get_context("spawn")
    with ProcessPoolExecutor(options.workers, context, torch.set_num_threads, (1,)) as pool:
        stopped, firsts, known = set(), [], []
        for size in sorted(options.sizes):
            jobs = [
                Job(pack, recipe, size, 0)
                for pack in packs
                for recipe in options.recipes
                if packs[pack]["rows"] - size >= LEAST and (pack, recipe) not in stopped
            ]
            run(pool, journal, jobs, paths, f"one resplit, {size} rows")
            known += jobs
            for job in jobs:
                record = journal.records[job]
                if "seconds" in record:
                    firsts.append(job)
                elif "expensive" in record:  # it will not be cheaper with more rows
                    stopped.add((job.pack, job.recipe))
        jobs = sorted(firsts, key=lambda job: -journal.records[job]["spent"])
        rest = [
            job._replace(rep=rep)
            for job in jobs
            for rep in range(1, reps_of(journal.records[job], options.reps))
        ]
        tell(journal, rest, options.workers)
        if not options.measure:
            run(pool, journal, rest, paths, "the other resplits")
    return known + rest


def tell(journal, rest, workers):
    """Prints what a fit takes, by recipe and pack, and what the rest will take."""
    firsts = [r for job, r in journal.records.items() if job.rep == 0 and "seconds" in r]
    packs = list(dict.fromkeys(r["pack"] for r in firsts))
    for recipe in dict.fromkeys(r["recipe"] for r in firsts):
        cells = []
        for pack in packs:
            of = [r for r in firsts if (r["pack"], r["recipe"]) == (pack, recipe)]
            taken = [r["seconds"] for r in sorted(of, key=lambda r: r["size"])]
            cells.append(f"{taken[0]:.2f}-{taken[-1]:.2f}" if taken else "-")
        print(f"{recipe:34}" + " ".join(f"{cell:>13}" for cell in cells))
    print("packs: " + ", ".join(packs))
    left = [job for job in rest if job not in journal.records]
    total = sum(journal.records[job._replace(rep=0)]["spent"] for job in left)
    print(f"{len(left)} fits to go, about {total / workers / 60:.1f} minutes of {workers} workers")


def speed():
    """Median seconds of fits side by side: sample beside temperature, and auto on the demo pack."""
    draw = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(ROWS, CLASSES, generator=draw)
    lead = torch.rand(ROWS, 1, generator=draw)
    logits.scatter_add_(1, torch.randint(CLASSES, (ROWS, 1), generator=draw), 8 + 8 * lead)
    # The further ahead a class is, the less it deserves it: one temperature will not do.
    noise = -torch.rand(ROWS, CLASSES, generator=draw).log()
    labels = (logits * (1 - lead / 2) - noise.log()).argmax(1)
    large, demo = Batch(logits, labels), featcal.demo_pack()
    todo = {"temperature": (large, None), "sample": (large, None)}
    if "auto" in METHODS:
        todo["auto"] = (demo.split("val"), demo.head)
    taken = {recipe: [] for recipe in todo}
    for _ in range(TURNS):
        for recipe, data in todo.items():
            began = time.perf_counter()
            featcal.parse(recipe).fit(*data)
            taken[recipe].append(time.perf_counter() - began)
    seconds = {recipe: float(f"{median(each):.4g}") for recipe, each in taken.items()}
    size = {"rows": ROWS, "classes": CLASSES, "demo_rows": demo.split("val").rows}
    return {**size, "threads": torch.get_num_threads(), "seconds": seconds}


# --- the result file -----------------------------------------------------------------------------


def cell(records):
    """What is kept of the resplits of one recipe, in their order."""
    for why in ("refused", "expensive"):
        if any(why in record for record in records):
            return {why: next(record[why] for record in records if why in record)}
    means = {
        name: float(f"{fmean(r[name] for r in records):.5g}")
        for name in (*METRICS, "seconds")
        if name not in IN_FULL
    }
    return {name: [round(r[name], 5) for r in records] for name in IN_FULL} | means


def cells(records):
    """Pack -> size -> recipe -> what is kept, of records in any order."""
    groups = {}
    for record in sorted(records, key=lambda r: r["rep"]):
        groups.setdefault((record["pack"], str(record["size"]), record["recipe"]), []).append(
            record
        )
    found = {}
    for (pack, size, recipe), of in groups.items():
        found.setdefault(pack, {}).setdefault(size, {})[recipe] = cell(of)
    return found


def merged(old, packs, found):
    """The old results with a new part in them: cells of the same name are replaced."""
    order = [*recipes(), *(r for of in found.values() for c in of.values() for r in c)]
    results = old.get("results", {})
    for pack, of_pack in found.items():
        for size, new in of_pack.items():
            both = results.setdefault(pack, {}).get(size, {}) | new
            results[pack][size] = dict(sorted(both.items(), key=lambda item: order.index(item[0])))
        results[pack] = dict(sorted(results[pack].items(), key=lambda item: int(item[0])))
    kept = (c for of in results.values() for some in of.values() for c in some.values())
    most = max((len(c["nll"]) for c in kept if "nll" in c), default=0)
    return {
        "made_by": "experiments/study.py",
        "versions": versions(),
        "setting": {
            **{"resplits": most, "test_rows_at_most": TEST, "test_rows_at_least": LEAST},
            **{
                "bins": BINS,
                "limit_seconds": [LIMIT, LONGEST],
                "slow_seconds": SLOW,
                "slow_resplits": FEW,
            },
        },
        "speed": old.get("speed", {}),
        "packs": old.get("packs", {}) | packs,
        "results": results,
    }


def write(results, path):
    """JSON with a line for each recipe: a change shows what it changed."""
    text = json.dumps({k: v for k, v in results.items() if k != "results"}, indent=1)[:-2]
    blocks = []
    for pack, of_pack in results["results"].items():
        for size, found in of_pack.items():
            lines = (
                f"   {json.dumps(name)}: {json.dumps(kept, separators=(',', ':'))}"
                for name, kept in found.items()
            )
            blocks.append((pack, f'  "{size}": {{\n' + ",\n".join(lines) + "\n  }"))
    parts = [
        f" {json.dumps(pack)}: {{\n" + ",\n".join(b for p, b in blocks if p == pack) + "\n }"
        for pack in results["results"]
    ]
    path.write_text(f'{text},\n "results": {{\n' + ",\n".join(parts) + "\n }\n}\n")


def readable(wanted):
    """Those recipes that this featcal knows; says which it does not."""
    found = []
    for recipe in wanted:
        try:
            parsed(recipe)
            found.append(recipe)
        except featcal.InputError as error:
            print(f"left out: {error}")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--packs", nargs="+", metavar="NAME", help="these alone")
    parser.add_argument("--recipes", nargs="+", metavar="RECIPE", default=recipes())
    parser.add_argument("--sizes", nargs="+", type=int, metavar="ROWS", default=SIZES)
    parser.add_argument("--reps", type=int, default=REPS, help="resplits, 20 by default")
    parser.add_argument("--shared", type=Path, default=PACKS, metavar="FOLDER")
    parser.add_argument("--extra", type=Path, metavar="FOLDER", help="networks that are held out")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument(
        "--measure", action="store_true", help="one resplit, and what all will take"
    )
    parser.add_argument("--again", action="store_true", help="forget what the journal knows of it")
    parser.add_argument("--journal", type=Path, default=JOURNAL, metavar="FILE")
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="FILE")
    parser.add_argument("--speed", action="store_true", help="the timings alone, on all cores")
    options = parser.parse_args()
    old = json.loads(options.output.read_text()) if options.output.exists() else {}
    if options.speed:
        write({**merged(old, {}, {}), "speed": speed()}, options.output)
        return
    torch.set_num_threads(1)
    shared = {path.stem: path for path in sorted(options.shared.glob("*.npz"))}
    extra = held_out(options.extra) if options.extra else {}
    paths = shared | {name: path for name, path in extra.items() if name not in shared}
    unknown = [name for name in options.packs or () if name not in paths]
    if unknown or not paths:
        raise SystemExit(f"no such packs: {unknown}; there are {', '.join(paths) or 'none'}")
    options.recipes = readable(options.recipes)
    packs = {
        name: facts(paths[name], "shared" if name in shared else "held out")
        for name in options.packs or paths
    }
    opened.cache_clear()
    journal = Journal(options.journal)
    asked = (set(packs), set(options.recipes), set(options.sizes))
    known = [job for job in journal.records if all(map(contains, asked, job))]
    if options.again:
        for job in known:
            del journal.records[job]
        journal.keep()
    elif known:
        print(f"{len(known)} fits are in {options.journal} already: --again does them anew")
    jobs = study(options, paths, packs, journal)
    if options.measure:
        return
    found = cells(journal.records[job] for job in jobs)
    write(merged(old, packs, found), options.output)
    print(f"Wrote {options.output}")


if __name__ == "__main__":
    main()
