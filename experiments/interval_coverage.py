"""How often 95 % intervals hold the truth, and how often marks stand where none is due.

Usage: python experiments/interval_coverage.py [--rows 300 1000] [--workers 1] [--write]
       [--only coverage | marks]

Test sets are drawn from worlds of known truth: logits N(0, s^2) in each class, s such that the best
guess is right as often as asked; labels drawn from their softmax; a model that knows these logits,
or multiplies them by 1.5 and so is far too sure. The truth of a metric is its value on 200,000 rows
with the probabilities of the labels in place of the labels. Marks are counted where none is due: in
comparisons of five models that see the same logits, each with noise of its own. --write keeps the
numbers in `results/interval-coverage.json` and writes the table of docs/trust.md from them; --only
leaves the other part of the file as it is.
"""

import argparse
import json
import math
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path

import torch
from scipy.stats import binom

from featcal import Batch, evaluate
from featcal.core.batch import bin_index
from featcal.core.fit import survey
from featcal.metrics.columns import COLUMNS, USUAL
from featcal.report import bootstrap
from featcal.report.compare import Comparison, Row
from featcal.report.scores import score

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results" / "interval-coverage.json"
DOCS = ROOT / "docs" / "trust.md"
START = "<!-- coverage: made by experiments/interval_coverage.py -->"
END = "<!-- end of coverage -->"
METRICS = ("nll", "accuracy", "brier", "ece", "adaptive_ece", "classwise_ece")
ROWS, CLASSES, ACCURACIES = (300, 1000, 10_000), (2, 10, 100), (0.5, 0.9, 0.98, 0.995)
SHARPNESS = (1.0, 1.5)  # the model multiplies the true logits by this
MODELS = ("calibrated", "far too sure")  # of these
LEAST = 93  # percent of the sets
MANY, BINS = 200_000, 15
TWINS, NOISE = 5, 0.3  # models of a comparison, and their noise in units of the logits' spread


def spread(classes, accuracy):
    """The s at which the best guess is right with this chance."""
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(MANY // 4, classes, generator=draw)
    low, high = 0.0, 2000.0
    for _ in range(40):
        middle = (low + high) / 2
        right = float((middle * logits).softmax(1).amax(1).mean())
        low, high = (middle, high) if right < accuracy else (low, middle)
    return low


def world(rows, classes, scale, seed):
    """True logits, and labels drawn from them."""
    draw = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(rows, classes, generator=draw)
    noise = -torch.rand(rows, classes, generator=draw).log()
    return logits, (logits - noise.log()).argmax(1)


def truth(classes, scale, sharpness):
    """Metric -> its value on the whole world, with the chances of the labels for the labels."""

    def binned(said, so):
        sums = torch.zeros(BINS, dtype=torch.float64)
        return float(sums.index_add_(0, bin_index(said, BINS), (said - so).double()).abs().sum())

    sums = dict.fromkeys(METRICS, 0.0)
    gaps, sure, right = torch.zeros(classes, BINS, dtype=torch.float64), [], []
    for part in range(20):
        logits, _ = world(MANY // 20, classes, scale, 10**6 + part)
        logits = logits.double()
        chance, claim = logits.softmax(1), (sharpness * logits).softmax(1)
        sums["nll"] += float(-(chance * (sharpness * logits).log_softmax(1)).sum()) / MANY
        top = claim.argmax(1)
        hit = chance.gather(1, top[:, None])[:, 0]
        sums["accuracy"] += float(hit.sum()) / MANY
        square = claim.square().sum(1) + 1 - 2 * (chance * claim).sum(1)
        sums["brier"] += float(square.sum()) / MANY
        sure.append(claim.amax(1))
        right.append(hit)
        for one in range(classes):
            gaps[one].index_add_(
                0, bin_index(claim[:, one].contiguous(), BINS), claim[:, one] - chance[:, one]
            )
    sure, right = torch.cat(sure), torch.cat(right)
    if sharpness == 1:  # exactly calibrated
        return sums
    sums["ece"] = binned(sure, right) / MANY
    order = sure.argsort()
    groups = zip(sure[order].chunk(BINS), right[order].chunk(BINS), strict=True)
    sums["adaptive_ece"] = sum(abs(float((s - r).sum())) for s, r in groups) / MANY
    sums["classwise_ece"] = float(gaps.abs().sum()) / MANY / classes
    return sums


def alone():
    """One thread, and no time for what is not looked at here: the smooth error, AUROC, AURC."""
    torch.set_num_threads(1)
    bootstrap.smooth_replicates = lambda _, __, rows, ___: torch.full_like(rows, math.nan)
    bootstrap._Ranked._selective = lambda *_: None


def chance_of(classes, accuracy):
    """As asked, but above that of a coin where there are two classes."""
    return max(accuracy, 0.6) if classes == 2 else accuracy


def few_wrong(setting):
    """Whether so few rows are wrong, on average, that tables mark their intervals."""
    chance = chance_of(setting["classes"], setting["accuracy"])
    return setting["rows"] * (1 - chance) < bootstrap.FEW_WRONG


def coverage(cell, sets, resamples):
    """Metric -> for each sharpness the share of sets whose interval holds the truth."""
    alone()
    rows, classes, accuracy = cell
    scale = spread(classes, chance_of(classes, accuracy))
    shares = {name: [0.0] * len(SHARPNESS) for name in METRICS}
    for place, sharpness in enumerate(SHARPNESS):
        known = truth(classes, scale, sharpness)
        for seed in range(1, sets + 1):
            logits, labels = world(rows, classes, scale, seed)
            scores = evaluate(Batch(sharpness * logits, labels), resamples=resamples, seed=seed)
            for name in METRICS:
                found = scores.interval(name)
                shares[name][place] += (found.low <= known[name] <= found.high) / sets
    return shares


def marks(cell, sets, resamples):
    """Metric -> shares of false "better", of false "worse"; shares of columns and of tables."""
    alone()
    rows, classes, accuracy = cell
    scale = spread(classes, chance_of(classes, accuracy))
    words = {name: {"better": 0.0, "worse": 0.0} for name in METRICS}
    columns, tables = 0.0, 0.0
    for seed in range(1, sets + 1):
        logits, labels = world(rows, classes, scale, seed)
        draw = torch.Generator().manual_seed(10**7 + seed)
        noisy = [
            logits + NOISE * scale * torch.randn(logits.shape, generator=draw) for _ in range(TWINS)
        ]
        data = [Batch(noisy[0], labels)]
        facts = survey(data, None)
        drawn = bootstrap.Resamples.of(data, None, rows, resamples, seed)
        found = []
        for place, each in enumerate(noisy):
            kept = bootstrap.Bootstrap(drawn, 0, BINS)
            scores = score([(Batch(each, labels), each)], facts, BINS, kept)
            found.append(Row(f"model {place}", None, scores, 0.0))
        table = Comparison(tuple(found), (None, *[0] * (TWINS - 1)))
        said = {name: [d.verdict for d in table.differences(name)[1:]] for name in METRICS}
        for name, answers in said.items():
            for word in words[name]:
                words[name][word] += answers.count(word) / len(answers) / sets
        wrong = [any(one != "undecided" for one in said[name]) for name in USUAL]
        columns += sum(wrong) / len(wrong) / sets
        tables += any(wrong) / sets
    return {"metrics": words, "columns": columns, "tables": tables}


def measured(job):
    what, cell, sets, resamples = job
    names = ("rows", "classes", "accuracy")
    found = dict(zip(names, cell, strict=True))
    return what, {**found, what: globals()[what](cell, sets, resamples)}


def points(sets):
    """Two standard errors of a share near 95 % among so many sets, in percent."""
    return 200 * math.sqrt(0.0475 / sets)


def table(results):
    """The part of docs/trust.md, from the result file alone."""
    about = results["setting"]
    many, tried = (about["sets"][what] for what in ("coverage", "marks"))
    rows = " ".join(map(str, about["rows"]))
    lines = [
        f"`python experiments/interval_coverage.py --rows {rows} --sets {many} {tried} --write`",
        "",
        f"The share of {many:,} test sets whose 95 % interval holds the truth, in percent: for a "
        "calibrated model / for one that is far too sure, the lowest and the highest of "
        f"{len(CLASSES) * len(ACCURACIES)} settings ({min(CLASSES)} to {max(CLASSES)} classes, "
        f"{100 * min(ACCURACIES):g} to {100 * max(ACCURACIES):g} % right; all of them are in "
        "`results/interval-coverage.json`). Between 93 and 97 is as it should be; "
        f"{many:,} sets tell a share to {points(many):.1f} points. † marks settings in which fewer "
        "than ten rows are wrong on average, and ‡ kinds of which some intervals are longer than "
        "they need be: as `featcal compare` marks both. A calibrated model has no calibration "
        "error, and 97.5 would be right there.",
        "",
        f"| rows | {' | '.join(f'`{name}`' + '‡' * COLUMNS[name].wide for name in METRICS)} |",
        "|---:|" + "---:|" * len(METRICS),
    ]
    for size, few in product(about["rows"], (False, True)):
        cells = [
            one["coverage"]
            for one in results["coverage"]
            if (one["rows"], few_wrong(one)) == (size, few)
        ]
        if cells:
            shares = (
                " / ".join(span([100 * cell[name][kind] for cell in cells]) for kind in (0, 1))
                for name in METRICS
            )
            lines.append(f"| {size:,}{' †' * few} | {' | '.join(shares)} |")
    lines += [
        "",
        below(results),
        "",
        f"Marks where none is due, in {tried} comparisons of four models with a fifth, none of "
        "them better: the largest share marked better / worse in any setting, in percent (at most "
        "3 each); the largest share of columns, and of tables of the five usual columns, with any "
        "mark. Holm's correction is for the recipes of a column, not for the columns.",
        "",
        f"| rows | {' | '.join(f'`{name}`' for name in METRICS)} | columns | tables |",
        "|---:|" + "---:|" * (len(METRICS) + 2),
    ]
    for size in about["rows"]:
        cells = [one["marks"] for one in results["marks"] if one["rows"] == size]
        words = (
            " / ".join(
                f"{max(100 * cell['metrics'][name][word] for cell in cells):.1f}"
                for word in ("better", "worse")
            )
            for name in METRICS
        )
        shares = (max(100 * cell[what] for cell in cells) for what in ("columns", "tables"))
        lines.append(
            f"| {size:,} | {' | '.join(words)} | {' | '.join(f'{s:.0f}' for s in shares)} |"
        )
    return "\n".join(lines)


def below(results):
    """Names every share below LEAST, lowest first, and says how many of them chance makes."""
    many, found, count = results["setting"]["sets"]["coverage"], [], 0
    for one, name in product(results["coverage"], METRICS):
        for share, model in zip(one["coverage"][name], MODELS, strict=True):
            held, count = round(share * many), count + 1
            if 100 * held < LEAST * many:
                right = 100 * chance_of(one["classes"], one["accuracy"])
                setting = f"{one['rows']:,} rows{' †' * few_wrong(one)}, {one['classes']} classes"
                text = f"`{name}` {100 * held / many:.1f} ({setting}, {right:g} % right, {model})"
                found.append((held, text))
    if not found:
        return f"None of the {count} shares is below {LEAST}."
    chance = binom.cdf(math.ceil(LEAST * many / 100) - 1, many, 0.95)
    told = "; ".join(text for _, text in sorted(found, key=lambda each: each[0]))
    return (
        f"Below {LEAST} are {len(found)} of the {count} shares (of intervals that hold the truth "
        f"in 95 % of all sets, {100 * chance:.0f} in 100 would be, by chance): {told}."
    )


def span(values):
    return f"{min(values):.1f} to {max(values):.1f}"


def write_docs():
    before, rest = DOCS.read_text().split(START)
    text = table(json.loads(RESULTS.read_text()))
    DOCS.write_text(f"{before}{START}\n{text}\n{END}{rest.split(END)[1]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[300, 1000])
    parser.add_argument("--sets", type=int, nargs=2, default=[100, 50], help="coverage, marks")
    parser.add_argument("--resamples", type=int, default=400)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--only", choices=("coverage", "marks"), help="one part alone")
    parser.add_argument("--write", action="store_true", help="the result file and the page")
    parser.add_argument("--docs", action="store_true", help="the page from the result file alone")
    asked = parser.parse_args()
    if asked.docs:
        write_docs()
        return
    sets = dict(zip(("coverage", "marks"), asked.sets, strict=True))
    cells = list(product(asked.rows, CLASSES, ACCURACIES))
    # The large ones first, so that no worker waits for another at the end.
    parts = [asked.only] if asked.only else list(sets)
    jobs = [(what, cell, sets[what], asked.resamples) for cell in reversed(cells) for what in parts]
    found = {what: [] for what in parts}
    with ProcessPoolExecutor(asked.workers) as pool:
        for what, one in pool.map(measured, jobs):
            found[what].insert(0, one)
            print(json.dumps(one), flush=True)
    if asked.write:
        if asked.only:
            kept = json.loads(RESULTS.read_text())
            other = next(what for what in sets if what != asked.only)
            sets[other], found[other] = kept["setting"]["sets"][other], kept[other]
        setting = {"rows": asked.rows, "sets": sets, "resamples": asked.resamples, "level": 0.95}
        results = {"setting": setting, **{what: found[what] for what in sets}}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        write_docs()


if __name__ == "__main__":
    main()
