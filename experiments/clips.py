"""Which clip? The maps of features that the paper's last section asks for, side by side.

Usage: python experiments/clips.py [PACK.npz ...] [--maps NAME ...]

Val and test rows of a pack are put together and split anew ten times (five for 1,000 classes): 500
or 2,500 rows to fit, the rows after the first 2,500 to test. Every map has one number, or two,
found by NLL on the fit rows: on a grid and by a parabola around its lowest point, once for itself
and once with a temperature refitted for every value. What a map knows of single units comes from
the fit rows.

Reads the packs given, or those in ../shared/packs; a pack from elsewhere is marked as held out.
Writes `results/clips.json`, keeping what it holds of other packs and maps, and the tables between
the markers in docs/research-clips.md.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from featcal import Batch
from featcal.core.scalar import temper
from featcal.metrics import accuracy, ece

ROOT = Path(__file__).resolve().parents[1]
PACKS = ROOT.parent / "shared" / "packs"
RESULTS, DOCS = ROOT / "results" / "clips.json", ROOT / "docs" / "research-clips.md"
START, END = "<!-- made by experiments/clips.py -->", "<!-- end of those tables -->"
SIZES, MODES = (500, 2500), ("alone", "tempered")
NODES = 0.5 * np.cos(np.pi * (np.arange(7) + 0.5) / 7)  # log 1/T around that of all rows
FINE = np.linspace(-0.5, 0.5, 201)
ENOUGH = 2**20  # logits from which the middle of those nodes is found
IN_WORDS = {
    "none": "nothing",
    "hard": "`clip`: clamp(x, -c, c)",
    "tanh": "c tanh(x / c)",
    "root": "x / sqrt(1 + (x / c)²)",
    "log": "sign(x) c log(1 + abs(x) / c)",
    "leaky": "slope 1/2 beyond c",
    "leaky2": "slope s beyond c",
    "band": "clamp at c, and 0 below a (VRA)",
    "power": "sign(x) abs(x)^p",
    "row": "clamp at c times the row's rms",
    "norm": "x of norm c at most",
    "norm_logits": "`norm_clip`: z min(1, c / norm)",
    "norm_root": "x / sqrt(1 + (norm / c)²)",
    "norm_power": "x norm^(p - 1)",
    "norm_power_mean": "x (norm / typical norm)^(p - 1)",
    "unit_quantile": "unit j clamped at its q-quantile",
    "unit_mean": "unit j clamped at c times its mean size",
    "unit_std": "unit j clamped at mean ± c std (BATS)",
}


class Facts(NamedTuple):
    """What a map may know of the fit rows."""

    sizes: Tensor  # |x|, (n, d), each unit's in order
    mean: Tensor  # (d,)
    std: Tensor  # (d,)
    norm: float  # geometric mean

    @classmethod
    def of(cls, x):
        """Of these rows."""
        return cls(
            x.abs().sort(0).values,
            x.mean(0),
            x.std(0),
            float(norm_of(x).double().log().mean().exp()),
        )


@dataclass(frozen=True)
class Map:
    """A family of maps of features: its values, and what one of them does.

    Attributes:
        grid: features and number of points -> values of the number that grid and parabola find.
        apply: features, value, facts, other -> features; or -> a factor of the logits, (n, 1).
        others: values of a second number, found by trying all.
        log: whether the grid is one of logarithms.
        split: whether it knows the fit rows.
        factor: whether it acts on logits.
    """

    grid: Callable[[Tensor, int], np.ndarray]
    apply: Callable[[Tensor, float, Facts | None, float], Tensor]
    others: tuple[float, ...] = (0.0,)
    log: bool = True
    split: bool = False
    factor: bool = False

    def logits(self, pack, x, value, facts, other):
        """The logits of features with a value of this family."""
        made = self.apply(x, value, facts, other)
        return pack.logits(x) * made if self.factor else pack.logits(made)


def norm_of(x):
    return x.norm(dim=1, keepdim=True).clamp(min=1e-12)


def rms(x):
    return norm_of(x) / x.shape[1] ** 0.5


def within(x, low, high):
    return torch.minimum(torch.maximum(x, low), high)


def leaky(x, c, _, s):
    inner = x.clamp(-c, c)
    return inner + s * (x - inner)


def quantile(x, tail, facts, _):
    n = len(facts.sizes)
    bound = facts.sizes[n - max(round(tail * n), 1)]
    return within(x, -bound, bound)


def sizes(reach):
    """Thresholds for units, up to `reach` times the largest activation."""

    def grid(x, points):
        some = x.abs().flatten()[:: max(x.numel() // 2**20, 1)]
        low = float(some[some > 0].median()) / 4
        return np.geomspace(low, reach * float(x.abs().max()), points)

    return grid


def norms(reach):
    """Thresholds for norms, up to `reach` times the largest."""

    def grid(x, points):
        found = norm_of(x)
        return np.geomspace(float(found.median()) / 4, reach * float(found.max()), points)

    return grid


def ratios(low, high):
    return lambda x, points: np.geomspace(low, high, points)


def powers(low):
    return lambda x, points: np.linspace(low, 2.0, points)


def shortened(x, c, *_):
    return (c / norm_of(x)).clamp(max=1)


MAPS = {
    "hard": Map(sizes(1), lambda x, c, f, o: x.clamp(-c, c)),
    "tanh": Map(sizes(8), lambda x, c, f, o: c * (x / c).tanh()),
    "root": Map(sizes(8), lambda x, c, f, o: x / (1 + (x / c) ** 2).sqrt()),
    "log": Map(sizes(64), lambda x, c, f, o: x.sign() * c * (x.abs() / c).log1p()),
    "leaky": Map(sizes(1), leaky, others=(0.5,)),
    "leaky2": Map(sizes(1), leaky, others=(0.0, 0.25, 0.5, 0.75)),
    "band": Map(
        sizes(1),
        lambda x, c, f, a: torch.where(x.abs() < a * c, 0.0, x.clamp(-c, c)),
        others=(0.0, 0.02, 0.05, 0.1, 0.2),
    ),
    "power": Map(powers(0.1), lambda x, p, f, o: x.sign() * x.abs() ** p, log=False),
    "row": Map(ratios(0.3, 30), lambda x, c, f, o: within(x, -c * rms(x), c * rms(x))),
    "norm": Map(norms(1), lambda x, c, f, o: x * shortened(x, c)),
    "norm_logits": Map(norms(1), shortened, factor=True),
    "norm_root": Map(norms(8), lambda x, c, f, o: x / (1 + (norm_of(x) / c) ** 2).sqrt()),
    "norm_power": Map(powers(0.1), lambda x, p, f, o: x * norm_of(x) ** (p - 1), log=False),
    "norm_power_mean": Map(
        powers(0.1),
        lambda x, p, f, o: x * (norm_of(x) / f.norm) ** (p - 1),
        log=False,
        split=True,
    ),
    "unit_quantile": Map(ratios(0.5, 0.002), quantile, split=True),
    "unit_mean": Map(
        ratios(0.2, 100),
        lambda x, c, f, o: within(x, -c * f.sizes.mean(0), c * f.sizes.mean(0)),
        split=True,
    ),
    "unit_std": Map(
        ratios(0.2, 50),
        lambda x, c, f, o: within(x, f.mean - c * f.std, f.mean + c * f.std),
        split=True,
    ),
}


class Pack:
    """All labelled rows of a pack, its head, and the splits."""

    def __init__(self, path):
        data = np.load(path)
        parts = ("val", "test" if "test_features" in data else "test_matched")
        x, y = (np.concatenate([data[f"{p}_{w}"] for p in parts]) for w in ("features", "labels"))
        self.x, self.y = torch.from_numpy(x).float(), torch.from_numpy(y.astype(np.int64))
        self.weight, self.bias = (torch.from_numpy(data[k]).float() for k in ("weight", "bias"))
        many = len(self.bias) >= 1000
        self.points, self.repeats = (16, 5) if many else (40, 10)
        self.splits = {}
        for split in range(self.repeats):
            order = torch.randperm(len(y), generator=torch.Generator().manual_seed(split))
            for size in SIZES:
                self.splits[size, split] = order[:size], order[max(SIZES) :]

    def logits(self, x):
        """What the head makes of features."""
        return F.linear(x, self.weight, self.bias)


def row_nll(z, y, b=1.0):
    z = z * b
    return (torch.logsumexp(z, 1) - z.gather(1, y[:, None])[:, 0]).double().numpy()


def inverse(z, y):
    """The best 1/T of rows."""
    found = temper([Batch(z, y)])
    return 1.0 if found is None else 1 / found.temperature


def table_of(z, y):
    """Each row's NLL as it is, and over temperatures around the best of all: (n, 1 + nodes)."""
    every = slice(None, None, max(1, z.numel() // ENOUGH))
    b = inverse(z[every], y[every])
    return np.stack([row_nll(z, y), *(row_nll(z, y, b * np.exp(u)) for u in NODES)], 1)


def scores_of(rows):
    """The mean NLL of rows of a table: as it is, and at their best temperature."""
    mean = rows.mean(0)
    curve = np.polynomial.Polynomial.fit(NODES, mean[1:], len(NODES) - 1)
    return mean[0], curve(FINE).min()


def lowest(at, scores, before):
    """Where a parabola around the lowest score is lowest; None where nothing beats the identity."""
    best = int(np.argmin(scores))
    if not scores[best] < before - 1e-7:
        return None
    if not 0 < best < len(at) - 1:
        return float(at[best])
    three = slice(best - 1, best + 2)
    curve = np.polynomial.Polynomial.fit(at[three], scores[three], 2)
    grid = np.linspace(at[best - 1], at[best + 1], 201)
    return float(grid[curve(grid).argmin()])


def result(pack, z, fit, test, mode, value=None, other=None):
    """Scores on the test rows of logits of all rows."""
    z, y = z[test] * (inverse(z[fit], pack.y[fit]) if mode == "tempered" else 1.0), pack.y[test]
    found = {"nll": row_nll(z, y).mean(), "ece": ece(logits=z, labels=y)}
    found["accuracy"] = accuracy(logits=z, labels=y)
    rounded = {name: round(float(score), 6) for name, score in found.items()}
    return rounded | {"value": None if value is None else float(f"{value:.5g}"), "other": other}


def run_map(pack, name, own):
    """What a family gives on every split, in both modes."""
    if name == "none":
        z, found = pack.logits(pack.x), {}
        for key, split in pack.splits.items():
            found |= {(*key, mode): result(pack, z, *split, mode) for mode in MODES}
        return found
    family, tables, found = MAPS[name], {}, {}
    grid = family.grid(pack.x, pack.points)
    at = np.log(grid) if family.log else grid
    pairs = [(other, place) for other in family.others for place in range(len(grid))]
    if not family.split:
        for other, place in pairs:
            z = family.logits(pack, pack.x, float(grid[place]), None, other)
            tables[other, place] = table_of(z, pack.y)
    for key, (fit, test) in pack.splits.items():
        x, y = pack.x[fit], pack.y[fit]
        facts, scores = Facts.of(x) if family.split else None, {}
        for other, place in pairs:
            if family.split:
                rows = table_of(family.logits(pack, x, float(grid[place]), facts, other), y)
            else:
                rows = tables[other, place][fit]
            scores.setdefault(other, []).append(scores_of(rows))
        for mode, column in zip(MODES, (0, 1), strict=True):
            curves = {other: np.array(rows)[:, column] for other, rows in scores.items()}
            other = min(curves, key=lambda o, curves=curves: curves[o].min())
            value = lowest(at, curves[other], scores_of(own[fit])[column])
            if value is None:
                z = pack.logits(pack.x)
            else:
                value = float(np.exp(value)) if family.log else value
                z = family.logits(pack, pack.x, value, facts, other)
            found[(*key, mode)] = result(pack, z, fit, test, mode, value, other)
    return found


def records(pack, name, own):
    """A record for each size of the fit split and each mode, with a value for each split."""
    found = run_map(pack, name, own)
    for size in SIZES:
        for mode in MODES:
            parts = [found[size, split, mode] for split in range(pack.repeats)]
            lists = {what: [part[what] for part in parts] for what in parts[0]}
            yield {"map": name, "rows": size, "mode": mode} | lists


def write(results):
    """The result file, one record a line."""
    lines = []
    for name, pack in sorted(results.items()):
        rows = ",\n   ".join(json.dumps(row) for row in pack["runs"])
        lines.append(
            f' "{name}": {{"held_out": {json.dumps(pack["held_out"])}, "runs": [\n   {rows}]}}'
        )
    RESULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def means(pack, size, mode):
    """What each map gives on a pack beside the clip, the temperature and no map, in percent."""
    runs = {(run["map"], run["mode"]): run for run in pack["runs"] if run["rows"] == size}

    def of(name, what, mode=mode):
        return np.array(runs[name, mode][what])

    return {
        name: {
            "over_hard": 100 * float((of(name, "nll") / of("hard", "nll") - 1).mean()),
            "over_temperature": 100
            * float((of(name, "nll") / of("none", "nll", "tempered") - 1).mean()),
            "ece": 100 * float((of(name, "ece") - of("hard", "ece")).mean()),
            "accuracy": 100 * float((of(name, "accuracy") - of("none", "accuracy")).mean()),
        }
        for name in IN_WORDS
    }


def tables(results):
    """The tables of the page, over all packs; results/clips.json has every pack."""
    text = ""
    found = {
        (mode, size): {name: means(pack, size, mode) for name, pack in results.items()}
        for mode in MODES
        for size in SIZES
    }
    for mode in MODES:
        then = "" if mode == "alone" else ", each followed by `temperature`"
        text += f"**Mean over {len(results)} packs{then}**\n\n"
        text += "| map | NLL over `clip` %, 500 rows | 2,500 rows | won | NLL over `temperature` % "
        text += "| ECE less `clip`'s, points | accuracy gained, points |\n"
        text += "|---|--:|--:|--:|--:|--:|--:|\n"
        for name, words in IN_WORDS.items():
            each = [[pack[name] for pack in found[mode, size].values()] for size in SIZES]
            few, many = (np.mean([one["over_hard"] for one in part]) for part in each)
            both = each[0] + each[1]
            won = sum(one["over_hard"] < 0 for one in both)
            mean = {what: np.mean([one[what] for one in both]) for what in both[0]}
            text += f"| {words} | {few:+.2f} | {many:+.2f} | {won} of {len(both)} "
            text += f"| {mean['over_temperature']:+.2f} | {mean['ece']:+.2f} "
            text += f"| {mean['accuracy']:+.2f} |\n"
        text += "\n"
    return text.strip()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("packs", nargs="*", type=Path, default=sorted(PACKS.glob("*.npz")))
    parser.add_argument("--maps", nargs="+", choices=IN_WORDS, default=list(IN_WORDS))
    options = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for path in options.packs:
        place = path.parent.name if path.stem == "pack" else path.stem
        held_out = path.parent.resolve() != PACKS.resolve()
        pack, of_pack = Pack(path), results.setdefault(place, {"held_out": held_out, "runs": []})
        own = table_of(pack.logits(pack.x), pack.y)
        for name in options.maps:
            others = [run for run in of_pack["runs"] if run["map"] != name]
            of_pack["runs"] = sorted(
                [*others, *records(pack, name, own)],
                key=lambda run: list(IN_WORDS).index(run["map"]),
            )
            write(results)
            print(place, name, flush=True)
    before, rest = DOCS.read_text().split(START)
    shown = tables(dict(sorted(results.items())))
    DOCS.write_text(f"{before}{START}\n{shown}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    with torch.no_grad():
        main()
