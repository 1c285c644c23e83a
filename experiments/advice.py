"""How often the report's recommendation does harm: docs/trust.md.

    python experiments/advice.py [--repetitions 200] [--workers N] [--only TEXT] [--packs FOLDER]

Recommends as `featcal report` does: the usual recipes are fitted on one split and scored on another
of 500 rows, and the page's own rule picks one of them or none. The pick is then tried on fresh rows
of the test split's kind: 20,000 in made worlds, in a pack all rows that are left (the shipped demo,
and those of ../shared/packs where they are). It does harm where its NLL there is above that of
the network as it is by more than 1.96 standard errors of the paired difference. Every repetition
draws all rows again, with its own seed. What was tried goes into a journal, from which a stopped
run goes on and which a finished one removes. Writes results/advice.json, settings that were not
asked for kept, and the table of the page.
"""

import argparse
import json
import os
import zlib
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from textwrap import fill as wrap
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from paper_docs import fill
from study import PACKS, Journal, opened

import featcal
from featcal import Batch
from featcal.page.verdict import Facts, Place
from featcal.report.compare import compare, usual_recipes, versions
from featcal.report.scores import calibrated_logits

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "results" / "advice.json", ROOT / "docs" / "trust.md"
JOURNAL = ROOT / ".cache" / "advice.jsonl"
START = "<!-- {}: made by experiments/advice.py -->"
TEST, FRESH, RESAMPLES = 500, 20_000, 1000
SIZES = (100, 200, 500)
SHARP = 1.5  # of a network so sure that advice is due, and not so sure that it is easy
SURE = 1.96  # standard errors beyond which a pick is worse than nothing
MOST = 0.05  # of the repetitions


@dataclass(frozen=True)
class World:
    """Rows whose labels follow softmax(z), and a network that says softmax(sharpness z).

    Attributes:
        classes: how many.
        sharpness: of the network.
        spread: of the true logits, N(0, spread^2) in each class.
        lead: how far one class stands above the others; 0 for none that does.
        accuracy: of the predictions, whatever the row looks like; None where z decides.
        noise: the share of labels that are any class.
        tilt: the logarithm of how much likelier the first class is than the last.
        shift: of the rows that are fitted: noise on the network's logits that others have not.
    """

    classes: int = 10
    sharpness: float = 1.0
    spread: float = 2.0
    lead: float = 0.0
    accuracy: float | None = None
    noise: float = 0.0
    tilt: float = 0.0
    shift: float = 0.0

    def rows(self, count, draw, *, fitted=False):
        """A batch of logits and labels."""
        tilt = torch.linspace(self.tilt / 2, -self.tilt / 2, self.classes)
        z = self.spread * torch.randn(count, self.classes, generator=draw) + tilt
        if self.lead:
            top = torch.randint(self.classes, (count,), generator=draw)
            z[torch.arange(count), top] += self.lead * (
                1 + 0.15 * torch.randn(count, generator=draw)
            )
        gumbel = -(-torch.rand(z.shape, generator=draw).log()).log()
        labels = (z + gumbel).argmax(1)
        other = torch.randint(self.classes, (count,), generator=draw)
        if self.accuracy is not None:
            first, second = z.topk(2, 1).indices.unbind(1)
            right = torch.rand(count, generator=draw) < self.accuracy
            labels = torch.where(right, first, torch.where(other == first, second, other))
        labels = torch.where(torch.rand(count, generator=draw) < self.noise, other, labels)
        if fitted:
            z = z + self.shift * torch.randn(z.shape, generator=draw)
        return Batch(self.sharpness * z, labels)


def worlds():
    """Name -> world and rows to fit on."""
    found = {
        f"{name}, {size}": (world, size)
        for name, world in (
            ("as sure as it should be", World()),
            ("a little too sure", World(sharpness=1.1)),
        )
        for size in SIZES
    }
    kinds = {"far too sure": World(sharpness=2.0), "not sure enough": World(sharpness=0.6)}
    for name, world in (
        ("one label in ten is any class", World(noise=0.1)),
        ("the first class 150 times as likely as the last", World(tilt=5.0)),
        ("fitted on noisier rows than it is used on", World(shift=1.0)),
        ("2 classes", World(classes=2)),
        ("1,000 classes", World(classes=1000, spread=2.5)),
    ):
        # A network that is as sure as it should be gets no advice that could do harm.
        kinds[name] = world
        kinds[f"{name}, {SHARP} times too sure"] = replace(world, sharpness=SHARP)
    for accuracy, lead in ((0.995, 9.0), (0.998, 10.2), (0.999, 11.1), (0.9995, 12.05)):
        right = f"{accuracy:.2%} right"
        kinds[f"{right}, errors anywhere"] = World(spread=0.8, lead=7.0, accuracy=accuracy)
        kinds[f"{right}, errors where unsure"] = World(spread=0.8, lead=lead)
    return found | {f"{name}, 200": (world, 200) for name, world in kinds.items()}


def packs(folder=PACKS):
    """Name -> file and rows to fit on."""
    files = {"demo": None} | {path.stem: path for path in sorted(folder.glob("*.npz"))}
    return {f"{name}, {size}": (file, size) for name, file in files.items() for size in SIZES}


def split(setting, seed, folder=PACKS):
    """Rows to fit on, to score and fresh ones, and the head."""
    if setting in worlds():
        (world, size), draw = worlds()[setting], torch.Generator().manual_seed(seed)
        rows = (world.rows(size, draw, fitted=True), *(world.rows(n, draw) for n in (TEST, FRESH)))
        return *rows, None
    file, size = packs(folder)[setting]
    if file is None:
        pack = featcal.demo_pack()
        parts = [batch for name in ("val", "test") for batch in pack.split(name)]
        features = torch.cat([batch.features for batch in parts]).float()
        head, labels = pack.head, torch.cat([batch.labels for batch in parts])
        with torch.no_grad():
            every = Batch(head(features), labels, features)
    else:
        every, head = opened(file)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(every)))
    cuts = (order[:size], order[size : size + TEST], order[size + TEST :])
    return *(every.rows(part) for part in cuts), head


class Try(NamedTuple):
    """One repetition of a setting."""

    setting: str
    repetition: int


def tried(job, folder=PACKS):
    """What was recommended in one repetition, and what that does to fresh rows."""
    setting, repetition = job
    torch.set_num_threads(1)
    seed = zlib.crc32(f"{setting} {repetition}".encode())
    fit, test, fresh, head = split(setting, seed, folder)
    recipes = list(usual_recipes(features=head is not None))
    found = compare(fit, test, recipes, head, resamples=RESAMPLES, seed=repetition)
    place = Facts(found, Place("made", fit_rows=len(fit))).place
    if place is None:
        return {"pick": None, "delta": 0.0, "harm": False}
    with torch.no_grad():
        before, after = (
            F.cross_entropy(
                calibrated_logits(fresh, one, head).double(), fresh.labels, reduction="none"
            )
            for one in (None, found[place].calibrator)
        )
    delta = after - before
    error = float(delta.std()) / len(delta) ** 0.5
    return {
        "pick": found[place].recipe,
        "delta": float(delta.mean()),
        "harm": float(delta.mean()) > SURE * error,
    }


def summed(rows):
    """One setting's repetitions in numbers."""
    deltas = [row["delta"] for row in rows]
    picks = [row["pick"] for row in rows if row["pick"] is not None]
    return {
        "repetitions": len(rows),
        "recommended": len(picks) / len(rows),
        "harm": fmean(row["harm"] for row in rows),
        "mean": fmean(deltas),
        "worst": max(deltas),
        "picks": {pick: picks.count(pick) for pick in sorted(set(picks))},
    }


def table(results):
    """The page's part."""
    found = results["settings"]
    counts = sorted({one["repetitions"] for one in found.values()})
    above = [name for name, one in found.items() if one["harm"] > MOST]
    said = f"at most {max(one['harm'] for one in found.values()):.1%} of the repetitions"
    above = f"; above 5 %: {', '.join(above)}" if above else ""
    text = (
        f"`make advice`: the recommendation of `featcal report`, from {results['test']} scored "
        "rows, tried on fresh rows. It does harm where the network as it is has the lower NLL "
        f"there by more than {SURE} standard errors. Each setting was repeated "
        f"{' or '.join(map(str, counts))} times, all rows drawn again; the number beside it is "
        f"that of the rows to fit on. Harm was done in {said} of a setting{above}."
    )
    lines = [
        wrap(text, 120),
        "",
        "| setting | recommended | does harm | mean change of NLL | worst change |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, one in found.items():
        lines.append(
            f"| {name} | {one['recommended']:.0%} | {one['harm']:.1%} | {one['mean']:+.4f} | "
            f"{one['worst']:+.4f} |"
        )
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=200)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", nargs="+", default=[""], help="settings whose name has this")
    parser.add_argument("--packs", type=Path, default=PACKS, help="folder of .npz packs")
    parser.add_argument("--journal", type=Path, default=JOURNAL, metavar="FILE")
    asked = parser.parse_args()
    every = [*worlds(), *packs(asked.packs)]
    chosen = [name for name in every if any(text in name for text in asked.only)]
    jobs = [Try(name, one) for one in range(asked.repetitions) for name in chosen]
    journal = Journal(asked.journal, Try)
    left = [job for job in jobs if job not in journal.records]
    print(f"{len(left)} of {len(jobs)} to go; the others are in {asked.journal}", flush=True)
    with ProcessPoolExecutor(asked.workers, mp_context=get_context("spawn")) as pool:
        for job, row in zip(left, pool.map(partial(tried, folder=asked.packs), left), strict=True):
            journal.add({**job._asdict(), **row})
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"settings": {}}
    new = {
        name: summed([journal.records[job] for job in jobs if job.setting == name])
        for name in chosen
    }
    settings = results["settings"] | new
    settings = {name: settings[name] for name in every if name in settings}
    results = {"test": TEST, "fresh": FRESH, "versions": versions(), "settings": settings}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(fill(PAGE.read_text(), {"advice": table(results)}, START), encoding="utf-8")
    asked.journal.unlink()


if __name__ == "__main__":
    main()
