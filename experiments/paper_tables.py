"""The paper's tables as printed and our results beside them, laid out for `featcal paper`.

    python experiments/paper_tables.py [FOLDER]

Tao, Dong and Xu, "Feature Clipping for Uncertainty Calibration", AAAI 2025. Reads its transcription
(results/paper-tables.json), what is known of its cells (results/paper-marks.json), and our results
(reproduction.json and training.json in results/, or in FOLDER); writes
src/featcal/report/paper.json, or FOLDER/paper.json, which `featcal paper --results FOLDER` shows.
"""

import csv
import io
import json
import math
import re
import sys
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache, cached_property
from pathlib import Path
from statistics import fmean
from string import ascii_lowercase

from featcal.metrics.columns import COLUMNS
from featcal.report.paper import CSV_HEADER
from featcal.report.tables import PAPER_METHODS, Table, after_clip

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
PACKAGED = ROOT / "src" / "featcal" / "report" / "paper.json"
ARROW = {"down": "▼", "up": "▲", "": ""}
ARROWS = ("▼ ▲", "Lower or higher than base, and the paired 95 % interval says so.")
AS_PRINTED = (ARROWS[0], "As the paper prints them.")  # no interval stands behind those
MISSING, SPREAD, NOOP = "-", "±", "no-op"


def has_arrows(cells):
    return any(set(cell) & set(ARROW.values()) for cell in cells)


# --- the paper's tables as printed ---------------------------------------------------------------

PRINTED = re.compile(
    r"(\*\*)?(?P<value>\d+(?:\.\d+)?)(\*\*)?(?:\((?P<c>[\d.]+)\))?(?P<arrow>[▼▲]?)"
)
FACTS = ("name", "number", "label", "summary", "metric", "unit")


@dataclass(frozen=True)
class PaperTable:
    """One table of the paper.

    Attributes:
        facts: its name, number, LaTeX label, summary, our metric and the unit.
        columns: headings, one or two levels each.
        cells: row by row, each a dictionary: row, column, printed, value, threshold, arrow, bold
            and marks, which are ids.
        marks: those of its cells, once each: id, kind, evidence, sentence and what to compare with
            instead.
    """

    facts: dict
    columns: tuple
    cells: tuple
    marks: tuple

    def __getattr__(self, name):
        return self.facts[name]

    def __iter__(self):
        return (cell for row in self.cells for cell in row)

    @property
    def faulty(self):
        """How many cells carry a defect or a misprint."""
        notes = {mark["id"] for mark in self.marks if mark["kind"] == "note"}
        return sum(bool(set(cell["marks"]) - notes) for cell in self)

    def cell(self, row, column):
        """One cell by its labels."""
        return next(c for c in self if (c["row"], c["column"]) == (row, column))


@cache
def paper_tables():
    """Every table of the paper by name, in the order of their numbers."""
    return {
        entry["name"]: paper_table(entry)
        for entry in json.loads((RESULTS / "paper-tables.json").read_text())["tables"]
    }


@cache
def all_marks():
    """Everything that is known of cells, with the places where it holds."""
    return json.loads((RESULTS / "paper-marks.json").read_text())["marks"]


def paper_table(entry):
    columns = tuple(map(tuple, entry["columns"]))
    cells = []
    for row in entry["rows"]:
        where, found = " ".join(row["label"]), []
        for column, text in zip(columns, row["cells"], strict=True):
            place = entry["name"], where, " ".join(column)
            match = PRINTED.fullmatch(text)
            found.append(
                {
                    "row": where,
                    "column": place[2],
                    "printed": text.replace("*", ""),
                    "value": float(match["value"]),
                    "threshold": None if match["c"] is None else float(match["c"]),
                    "arrow": match["arrow"],
                    "bold": "**" in text,
                    "marks": [mark["id"] for mark in all_marks() if stands_at(mark, *place)],
                }
            )
        cells.append(tuple(found))
    present = {mark for row in cells for cell in row for mark in cell["marks"]}
    marks = tuple(
        {key: value for key, value in mark.items() if key != "cells"}
        for mark in all_marks()
        if mark["id"] in present
    )
    return PaperTable({key: entry[key] for key in FACTS}, columns, tuple(cells), marks)


def stands_at(mark, table, row, column):
    """Whether a mark, whose places are patterns of labels and headings, is of a cell."""
    return any(
        place["table"] == table
        and any(fnmatchcase(row, pattern) for pattern in place.get("rows", ["*"]))
        and any(fnmatchcase(column, pattern) for pattern in place.get("columns", ["*"]))
        for place in mark["cells"]
    )


def printed(table):
    """The table for people, with its marks as letters and the sentences behind them.

    A letter stands once for many cells where it can: in the title when every cell carries the mark,
    at a heading or a label when the whole column or row does.
    """
    letters = dict(zip((mark["id"] for mark in table.marks), ascii_lowercase, strict=False))

    def shared(cells):
        return set.intersection(*(set(cell["marks"]) for cell in cells))

    def lettered(marks, space=" "):
        text = "".join(letter for mark, letter in letters.items() if mark in marks)
        return f"{space}[{text}]" if text else ""

    everywhere = shared(table)
    in_column = [shared(column) - everywhere for column in zip(*table.cells, strict=True)]
    rows = []
    for cells in table.cells:
        in_row = shared(cells) - everywhere
        row = [cells[0]["row"] + lettered(in_row)]
        for cell, of_column in zip(cells, in_column, strict=True):
            text = f"**{cell['printed']}**" if cell["bold"] else cell["printed"]
            own = set(cell["marks"]) - everywhere - in_row - of_column
            row.append(text + lettered(own, ""))
        rows.append(tuple(row))
    headings = (
        "\n".join(column) + lettered(marks)
        for column, marks in zip(table.columns, in_column, strict=True)
    )
    notes = [(letters[mark["id"]], note(mark)) for mark in table.marks]
    notes += [AS_PRINTED] if has_arrows(cell for row in rows for cell in row) else []
    title = f"Table {table.number}, {table.name}: {table.summary}, {table.unit}"
    together = 2 if len(table.columns[0]) == 2 else 1
    return Table(title + lettered(everywhere), ("", *headings), tuple(rows), tuple(notes), together)


def note(mark):
    instead, evidence = (mark[key].removesuffix(".") for key in ("instead", "evidence"))
    return (
        f"{mark['kind'].capitalize()}: {mark['sentence']} Compare with: {instead}. "
        f"Known from: {evidence}."
    )


def printed_values(table):
    """Each cell as a line of the CSV, its digits as printed."""
    for cell in table:
        match = PRINTED.fullmatch(cell["printed"])
        yield {
            "source": "paper",
            "row": cell["row"],
            "column": cell["column"],
            "value": match["value"],
            "threshold": match["c"],
            "arrow": {"▼": "down", "▲": "up", "": ""}[cell["arrow"]],
            "bold": "yes" if cell["bold"] else "",
            "marks": " ".join(cell["marks"]),
        }


# --- a row of a result file: one recipe scored on one network ------------------------------------
#
# Such rows are what `Comparison.as_json` gives, with the mode of their fit beside them. Values are
# fractions there and percent in tables.


def find(rows, recipe, mode="sequential"):
    """The row of a recipe, or None."""
    return next((r for r in rows if (r["recipe"], r["mode"]) == (recipe, mode)), None)


def direction(row, metric, against=None):
    """The way the row differs from its baseline, "up" or "down"; "" where no interval says so.

    With `against`, only a difference from that baseline counts.
    """
    found = (row.get("differences") or {}).get(metric)
    if found is None or found["verdict"] not in ("better", "worse"):
        return ""
    if against not in (None, found["baseline"]):
        return ""
    return "up" if found["delta"] > 0 else "down"


def ends(row, metric):
    return (row.get("intervals") or {}).get(metric) or (None, None)


def with_interval(row, metric):
    """The value, its interval, and an arrow where the paired difference from base is one.

    >>> with_interval({"metrics": {"ece": 0.0124}, "intervals": {"ece": [0.01, 0.015]}}, "ece")
    '1.24 [1.00, 1.50]'
    """
    if row is None:
        return ""
    number, (low, high) = COLUMNS[metric].number, ends(row, metric)
    text = number(row["metrics"][metric])
    text += "" if low is None or high is None else f" [{number(low)}, {number(high)}]"
    return f"{text} {ARROW[direction(row, metric)]}".rstrip()


def in_percent(row, metric):
    """Value and interval as a line of the CSV has them."""
    low, high = (None if end is None else 100 * end for end in ends(row, metric))
    return {"value": 100 * row["metrics"][metric], "low": low, "high": high}


def threshold(row):
    """The c of a recipe that begins with a clip; None where the clip is a no-op."""
    return row["fit"]["steps"][0]["threshold"]


# --- results/reproduction.json: other networks, and the paper's own logits -----------------------
#
# `replays` are cells of the paper computed again from its own logits, `packs` the paper's recipes
# on other networks, `beside` small tables of ours that belong to one of the paper's.

PACK_METRICS = {"ece": "ECE", "adaptive_ece": "adaptive ECE", "accuracy": "accuracy"}
WITHOUT_PACKS = ("train-time", "layers")  # packs have no other losses and no other layers


def number(value, digits):
    return MISSING if value is None else f"{value:.{digits}f}"


def of_table(results, key, table):
    return [entry for entry in results[key] if entry["table"] == table.name]


def replays(results, table):
    """The cells that the paper's own logits give again; no table or one."""
    found = of_table(results, "replays", table)
    if not found:
        return []
    forms = list(dict.fromkeys(form for entry in found for form in entry["forms"]))
    digits = 4 if table.unit == "nats" else 2
    rows = tuple(
        (
            f"{entry['row']}, {entry['column']}",
            table.cell(entry["row"], entry["column"])["printed"],
            *(number(entry["forms"].get(form), digits) for form in forms),
        )
        for entry in found
    )
    reference = " (reference: as the published code has it)" if "reference" in forms else ""
    title = f"{table.name} again, from the paper's own logits, {table.unit}{reference}"
    return [Table(title, ("", "printed", *forms), rows)]


def small(results, table):
    """Small tables of our own networks."""
    return [
        Table(
            entry["title"],
            ("", *entry["columns"]),
            tuple(
                (row["label"], *(number(value, entry["digits"]) for value in row["values"]))
                for row in entry["rows"]
            ),
        )
        for entry in of_table(results, "beside", table)
    ]


def packs_of(results, table):
    """The packs that stand beside a table."""
    if table.metric not in PACK_METRICS or table.name in WITHOUT_PACKS:
        return []
    return [p for p in results["packs"] if table.name != "vit" or "vit" in p["name"]]


def pack_table(pack, metric):
    """The six methods on one network: alone, after a clip, and with a clip fitted jointly."""
    rows, results = [], pack["results"]
    for name, method in PAPER_METHODS.items():
        alone, after = find(results, method), find(results, after_clip(method))
        joint = None if method == "none" else find(results, after_clip(method), "joint")
        if alone is not None:
            cells = (with_interval(row, metric) for row in (alone, after, joint))
            rows.append((f"{name} ({method})", *cells))
    clip = find(results, "clip")
    how = ""
    if clip is not None:
        c = threshold(clip)
        how = "; clip is a no-op" if c is None else f"; clip at c = {c:.3g}"
    title = (
        f"{pack['name']}, another network ({pack['dataset']}, {pack['model']}): "
        f"{PACK_METRICS[metric]} in percent on {pack['rows']['test']:,} test rows{how}"
    )
    headings = ("", "base", "after clip", "jointly with clip")
    return Table(title, headings, tuple(rows), (ARROWS,))


def reproduced_values(results, table):
    """The replayed values and those of packs as lines of the CSV."""
    for entry in of_table(results, "replays", table):
        for form, value in entry["forms"].items():
            where = {"row": entry["row"], "column": entry["column"]}
            yield {"source": f"paper's logits, {form}", **where, "value": value}
    for pack in packs_of(results, table):
        for row in pack["results"]:
            where = {"source": pack["name"], "row": row["recipe"], "column": row["mode"]}
            yield {**where, **in_percent(row, table.metric)}


# --- results/training.json: networks of our own --------------------------------------------------
#
# It holds `runs` (one network each, with the scores of a few recipes on it) and `layers` (the same
# when other layers are clipped). Runs are put beside each other only where all of their training
# but loss and seed is the same: a network trained for 40 epochs and one trained for 350 never share
# a row.

PUBLISHED_EPOCHS = 350
# The losses of the paper by their headings, and the texts of ours that are meant by them. The
# published gamma of dual focal loss differs from network to network.
PAPER_LOSSES = {
    "Cross Entropy": r"ce",
    "Brier Loss": r"brier",
    "MMCE": r"mmce\(variant='weighted', form='published'\)",
    "LS-0.05": r"label_smoothing(\(\w+=0\.05\))?",
    "Focal Loss": r"focal(\(gamma=3(\.0)?\))?",
    "FLSD-53": r"flsd",
    "Dual Focal Loss": r"dual_focal(\(gamma=[\d.]+\))?",
}
REDUCTION = re.compile(r"reduction=['\"](\w+)['\"](?:, )?")
DATASETS = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}
NETWORKS = {
    "resnet50": "ResNet-50",
    "resnet110": "ResNet-110",
    "densenet121": "DenseNet-121",
    "wrn26x10": "Wide-Resnet-26",
    "wrn16x4": "WRN-16-4",
    "vit": "ViT",
}
# Words for what a recipe calls otherwise; what is not here is said by its own name.
WORDS = {
    **{"lr": "learning rate", "schedule": "rate by", "augment": "images shifted and mirrored"},
    "clip_norm": "gradient norm at most",
}
NORMALISED = {
    "matched": "test images normalised as in training",
    "reference": "test images normalised as published, unlike those of CIFAR-100's training",
}


@dataclass(frozen=True)
class Run:
    """One network, trained with one loss and one seed."""

    content: dict

    @property
    def network(self):
        """Data and network under the paper's names: CIFAR-10 ResNet-50."""
        return named(self.content)

    @property
    def seed(self):
        """Of weights, order and augmentation."""
        return self.content["seed"]

    @property
    def epochs(self):
        """How long it was trained."""
        return self.content["recipe"]["epochs"]

    @cached_property
    def reduction(self):
        """Whether the loss is the "mean" over a batch or its "sum"."""
        found = REDUCTION.search(self.content["loss"])
        return found[1] if found else self.content["recipe"].get("reduction", "mean")

    @cached_property
    def loss(self):
        """The text of the loss without its reduction.

        >>> Run({"loss": "focal(gamma=2.0, reduction='sum')"}).loss, Run({"loss": "ce"}).loss
        ('focal(gamma=2.0)', 'ce')
        """
        return REDUCTION.sub("", self.content["loss"]).replace(", )", ")").removesuffix("()")

    @property
    def variant(self):
        """What runs of several seeds must share."""
        return self.loss, self.reduction

    @property
    def source(self):
        """Where a value comes from, for programs."""
        return source(self.content, f", {self.epochs} epochs")

    @cached_property
    def training(self):
        """Everything about the training but loss and seed, in words."""
        recipe, rows = self.content["recipe"], self.content["rows"]
        apart = ("epochs", "seed", "reduction")  # said elsewhere
        apart += () if recipe["schedule"] == "steps" else ("drops",)
        told = (setting_text(key, value) for key, value in recipe.items() if key not in apart)
        instead = f", the paper's have {PUBLISHED_EPOCHS}"
        return (
            f"{self.epochs} epochs{'' if self.epochs == PUBLISHED_EPOCHS else instead}; "
            f"{', '.join(filter(None, told))}; "
            f"{self.content['precision']}; {NORMALISED[self.content['test_norm']]}; "
            f"trained on {rows['train']:,} rows, fitted on {rows['val']:,} of val, scored on "
            f"{rows['test']:,} of test"
        )

    def row(self, recipe, mode="sequential"):
        """The scores of a recipe."""
        return find(self.content["results"], recipe, mode)


@dataclass(frozen=True)
class Setting:
    """The runs of one network that differ in loss and seed alone."""

    network: str
    training: str
    runs: tuple

    @cached_property
    def variants(self):
        """The runs by loss, each with all of its seeds, the paper's losses first."""
        found = {}
        for run in self.runs:
            found.setdefault(run.variant, []).append(run)
        order = sorted(found, key=lambda variant: place(heading_of(variant[0]), PAPER_LOSSES))
        return {key: found[key] for key in order}

    @cached_property
    def paper(self):
        """The runs of each loss of the paper; of two forms of one loss the shorter text's."""
        return {
            heading: self.variants[min(forms, key=lambda form: (len(form[0]), form[1]))]
            for heading in PAPER_LOSSES
            if (forms := [form for form in self.variants if heading_of(form[0]) == heading])
        }

    @property
    def further(self):
        """The runs of every other loss."""
        taken = [runs[0].variant for runs in self.paper.values()]
        return [runs for variant, runs in self.variants.items() if variant not in taken]

    def label(self, run):
        """The loss of a run as the label of a row: its heading in the paper, else its text."""
        heading = heading_of(run.loss)
        if heading and self.paper[heading][0].variant == run.variant:
            return heading
        return run.loss + (", sum" if run.reduction == "sum" else "")


def settings(results):
    """The runs by network and training, networks in the order of the paper."""
    found = {}
    for run in map(Run, results["runs"]):
        alike = found.setdefault((run.network, run.training), [])
        if any((other.variant, other.seed) == (run.variant, run.seed) for other in alike):
            # Two of them would pass for two seeds.
            raise SystemExit(f"{run.source}, {run.loss} is in the file twice: keep one of them")
        alike.append(run)

    def order(key):
        first = found[key][0].content
        return place(first["dataset"], DATASETS), place(first["network"], NETWORKS)

    return [Setting(*key, tuple(found[key])) for key in sorted(found, key=order)]


def place(name, names):
    names = list(names)
    return names.index(name) if name in names else len(names)


def heading_of(loss):
    """The paper's heading for the text of a loss, "" for a loss of ours.

    >>> heading_of("focal(gamma=3.0)"), heading_of("focal(gamma=2.0)")
    ('Focal Loss', '')
    """
    headings = (heading for heading, text in PAPER_LOSSES.items() if re.fullmatch(text, loss))
    return next(headings, "")


def named(entry):
    dataset, network = entry["dataset"], entry["network"]
    return f"{DATASETS.get(dataset, dataset)} {NETWORKS.get(network, network)}"


def source(entry, more):
    return f"our {entry['dataset']} {entry['network']}{more}, seed {entry['seed']}"


def listed(values):
    """Values in words: 1, 2 and 3."""
    *most, last = map(str, values)
    return f"{', '.join(most)} and {last}" if most else last


def setting_text(key, value):
    """One setting of a recipe in words; nothing for what was not used."""
    if key == "clip_norm" and value is None:
        return "gradients not clipped"
    if value is None or value is False or value in (0, []):
        return ""
    word = WORDS.get(key, key.replace("_", " "))
    if value is True:
        return word
    values = value if isinstance(value, list) else [value]
    return f"{word} {listed(f'{v:.3g}' if isinstance(v, float) else v for v in values)}"


# --- cells over several seeds, and the footnotes that say what stands behind them ----------------


def spread(rows, metric):
    """The mean over seeds and half the distance from the lowest to the highest.

    >>> spread([{"metrics": {"ece": 0.04}}, {"metrics": {"ece": 0.05}}], "ece")
    '4.50 ± 0.50'
    """
    values = [row["metrics"][metric] for row in rows if row is not None]
    if not values:
        return MISSING
    number = COLUMNS[metric].number
    half = f" {SPREAD} {number((max(values) - min(values)) / 2)}" if len(values) > 1 else ""
    return number(fmean(values)) + half


def clipped(rows, metric):
    """The same for rows after a clip, with the mean c and an arrow: 1.38 (0.245)▼.

    "/-" follows c where the clip is a no-op for some of the seeds.
    """
    found = [row for row in rows if row is not None]
    if not found:
        return MISSING
    acting = [threshold(row) for row in found if threshold(row) is not None]
    c = f"{fmean(acting):.3g}" + ("/-" if len(acting) < len(found) else "") if acting else NOOP
    return f"{spread(found, metric)} ({c}){agreed_arrow(found, metric)}"


def agreed_arrow(rows, metric):
    """The arrow that the paired intervals of every seed agree on, against no calibration."""
    found = {direction(row, metric, "none") for row in rows if row is not None}
    return ARROW[found.pop()] if len(found) == 1 else ""


def numbered(found):
    """A number for every way the networks were trained; the paper's own notes have letters."""
    trainings = dict.fromkeys(setting.training for setting in found)
    return {training: str(number) for number, training in enumerate(trainings, 1)}


def training_notes(found):
    """How the networks were trained, a note for every way."""
    notes = []
    for training, number in numbered(found).items():
        alike = [run for setting in found if setting.training == training for run in setting.runs]
        notes.append((number, f"{training}; {seeds(alike)}."))
    return notes


def seeds(runs):
    found = sorted({run.seed for run in runs})
    return f"seed{'s' if len(found) > 1 else ''} {listed(found)}"


def epochs(found):
    """How long the networks were trained, for titles, which are often shown without notes."""
    every = sorted({run.epochs for setting in found for run in setting.runs})
    told = f"{every[0]} epochs" if len(every) == 1 else f"{every[0]} to {every[-1]} epochs"
    return told if every == [PUBLISHED_EPOCHS] else f"{told}, the paper's have {PUBLISHED_EPOCHS}"


def cell_notes(rows, groups):
    """What the signs in the cells mean, of those that are there."""
    cells = [cell for row in rows for cell in row[1:]]
    several = sorted({len(runs) for runs in groups if len(runs) > 1})
    notes = []
    if any(SPREAD in cell for cell in cells):
        count = " to ".join(str(n) for n in dict.fromkeys((several[0], several[-1])))
        told = f"Mean over {count} seeds, and half the distance from the lowest to the highest."
        if any(SPREAD in cell and "(" in cell and f"({NOOP})" not in cell for cell in cells):
            told += " c is the mean of those that clip."
        agree = " An arrow beside it: so for each seed." if has_arrows(cells) else ""
        notes.append((SPREAD, f"{told} Cells without it are of one seed.{agree}"))
    if has_arrows(cells):
        notes.append(ARROWS)
    if any(f"({NOOP})" in cell or "/-" in cell for cell in cells):
        notes.append((NOOP, "No clipping was best on val, nothing is changed; /- for some seeds."))
    if MISSING in cells:
        notes.append((MISSING, "Not trained."))
    return notes


def loss_note(found):
    """The text of each loss, as `featcal.losses` reads it, and whether it was a sum."""
    texts, summed = {}, {}
    for setting in found:
        for heading, (run, *_) in setting.paper.items():
            texts.setdefault(heading, {})[run.loss] = None
            if run.reduction == "sum":
                summed[heading] = None
    names = "; ".join(f"{heading} is {' or '.join(forms)}" for heading, forms in texts.items())
    how = "each is the mean over a batch"
    if summed:
        every = summed.keys() == texts.keys()
        how = f"{'each is' if every else listed(summed)} summed over a batch"
    return "losses", f"{names}; {how}."


def made_note(results):
    """What the runs were made with."""
    facts = (facts_text(results.get(key) or {}) for key in ("hardware", "versions"))
    return "made", "; ".join((results.get("made_by", "by hand"), *filter(None, facts))) + "."


def facts_text(facts):
    """Hardware or versions in words.

    >>> facts_text({"device": "NVIDIA H200", "compiled": True, "graph": False})
    'device NVIDIA H200, compiled'
    """
    given = {key: value for key, value in facts.items() if value is not False}
    return ", ".join(key if value is True else f"{key} {value}" for key, value in given.items())


# --- tables of our own networks: by loss, by layer, and beside a temperature ---------------------

BY_LOSS, BY_LAYER = ("train-time", "accuracy"), "layers"
TITLES = {
    "ece": "ECE in percent on test, alone and after clip at c",
    "accuracy": "accuracy in percent on test",
}
# Each with the mode of its fit, under its heading.
HONEST = {
    "none": ("none", "sequential"),
    "clip": ("clip", "sequential"),
    "temperature": ("temperature", "sequential"),
    "clip | temperature": ("clip | temperature", "sequential"),
    "jointly": ("clip | temperature", "joint"),
}
ROWS_ALONE = "Intervals are over the test rows of one network; another seed gives another network."


def loss_tables(results, table):
    """One row per network: the losses of the paper, then every other loss in a table of its own."""
    every, metric, made = settings(results), table.metric, made_note(results)
    main = [setting for setting in every if setting.paper]
    title = f"{table.name}, our own networks ({{}}): {{}}{TITLES[metric]}"
    tables = []
    if main:
        numbers = numbered(main)
        headings, cells = by_loss(metric)
        rows = tuple((f"{s.network} [{numbers[s.training]}]", *cells(s)) for s in main)
        signs = cell_notes(rows, (runs for setting in main for runs in setting.paper.values()))
        notes = (*training_notes(main), loss_note(main), *signs, made)
        together = 2 if metric == "ece" else 1
        tables.append(Table(title.format(epochs(main), ""), headings, rows, notes, together))
    for setting in every:
        groups = setting.further
        if groups:
            rows = tuple((setting.label(runs[0]), *base_and_clip(runs, metric)) for runs in groups)
            shown = replace(setting, runs=tuple(run for runs in groups for run in runs))
            notes = (*training_notes([shown]), *cell_notes(rows, groups), made)
            where = f"further losses, {setting.network} [1], "
            told = title.format(epochs([setting]), where)
            tables.append(Table(told, ("", "base", "+clip (c)"), rows, notes))
    return tables


def by_loss(metric):
    """The headings, and the function that makes the cells of a setting."""
    if metric == "ece":
        pairs = ((f"{loss}\nbase", f"{loss}\n+clip (c)") for loss in PAPER_LOSSES)
        return ("", *(heading for pair in pairs for heading in pair)), lambda setting: [
            cell
            for loss in PAPER_LOSSES
            for cell in base_and_clip(setting.paper.get(loss, []), metric)
        ]

    def cells(setting):
        for loss in PAPER_LOSSES:
            yield spread([run.row("none") for run in setting.paper.get(loss, [])], metric)
        clip = [run.row("clip") for run in setting.paper.get("Cross Entropy", [])]
        yield f"{spread(clip, metric)} {agreed_arrow(clip, metric)}".rstrip()

    return ("", *PAPER_LOSSES, "clip after\nCross Entropy"), cells


def base_and_clip(runs, metric):
    none, clip = ([run.row(recipe) for run in runs] for recipe in ("none", "clip"))
    return spread(none, metric), clipped(clip, metric)


def temperature_tables(results):
    """Every run, uncalibrated and after clip, temperature and both: ECE with intervals, and NLL."""
    tables = []
    for setting in settings(results):
        shown = {
            heading: fit
            for heading, fit in HONEST.items()
            if heading != "jointly" or any(run.row(*fit) for run in setting.runs)
        }
        several = len({run.seed for run in setting.runs}) > 1
        rows = []
        for run in (run for runs in setting.variants.values() for run in runs):
            found = [run.row(*fit) for fit in shown.values()]
            label = setting.label(run) + (f", seed {run.seed}" if several else "")
            ece = (with_interval(row, "ece") or MISSING for row in found)
            # Without intervals, to be narrow enough for columns beside others.
            nll = (with_interval(row and {**row, "intervals": {}}, "nll") for row in found)
            rows.append((label, *ece, *(cell or MISSING for cell in nll)))
        headings = (f"{metric}\n{name}" for metric in ("ECE %", "NLL") for name in shown)
        title = f"{setting.network} ({epochs([setting])}) [1]: clip beside a temperature, every run"
        notes = [*training_notes([setting]), ("intervals", ROWS_ALONE)]
        compared = dict.fromkeys(
            f"{row['recipe']} with {row['differences'][metric]['baseline']}"
            for run in setting.runs
            for row in run.content["results"]
            for metric in ("ece", "nll")
            if direction(row, metric)
        )
        if compared:
            told = "Lower or higher, and the paired 95 % interval says so, comparing"
            notes.append((ARROWS[0], f"{told} {'; '.join(compared)}."))
        notes = (*notes, made_note(results))
        tables.append(Table(title, ("", *headings), tuple(rows), notes, len(shown)))
    return tables


def layer_tables(results, table):
    """Another layer clipped, by network; the paper's values stand beside those of its own."""
    return [layer_table(results, entry, table) for entry in results["layers"]]


def layer_table(results, entry, table):
    keys = ("dataset", "network", "loss", "seed")
    made = (
        (s, [r for r in s.runs if all(entry[key] == r.content[key] for key in keys)])
        for s in settings(results)
    )
    ours = [replace(setting, runs=tuple(runs)) for setting, runs in made if runs]
    same = named(entry) == "CIFAR-10 ResNet-50" and Run(entry).loss == "ce"
    rows = []
    for row in entry["rows"]:
        c, layer = row["threshold"], row["layer"] or MISSING
        idle = MISSING if layer == MISSING else NOOP
        values = (COLUMNS[key].number(row["metrics"][key]) for key in ("ece", "accuracy"))
        cells = (row["label"], layer, idle if c is None else f"{c:.3g}", *values)
        rows.append((*cells, *(printed_layer(row["label"].lower(), table) if same else ())))
    trained = f" ({epochs(ours)})" if ours else ""
    title = (
        f"{table.name}, our own {named(entry)}{trained}, loss {entry['loss']}, seed "
        f"{entry['seed']}: ECE and accuracy in percent when another layer is clipped"
    )
    beside = ("paper\nECE (c)", "paper\naccuracy") if same else ()
    notes = training_notes(ours)
    if any(row[2] == NOOP for row in rows):
        notes.append((NOOP, "No clipping of this layer was best on val, nothing is changed."))
    headings = ("", "layer", "c", "ECE", "accuracy", *beside)
    return Table(title, headings, tuple(rows), (*notes, made_note(results)))


def printed_layer(name, table):
    """The paper's row of a layer: Antepenultimate Layer for antepenultimate."""
    for cells in table.cells:
        row = cells[0]["row"].lower()
        if row.startswith(name) or f"({name})" in row:
            return [cell["printed"] for cell in cells]
    return [MISSING] * len(table.columns)


def trained_tables(results, table):
    """Everything of our own training that belongs beside a table."""
    if table.name == BY_LAYER:
        return layer_tables(results, table)
    if table.name not in BY_LOSS:
        return []
    return loss_tables(results, table) + (
        temperature_tables(results) if table.name == BY_LOSS[0] else []
    )


def trained_values(results, table):
    """The scores of every recipe on every network, or of every layer, as lines of the CSV."""

    def c(value):
        """A threshold; one that clips nothing is infinite."""
        return math.inf if value is None else value

    if table.name in BY_LOSS:
        for run in map(Run, results["runs"]):
            for row in run.content["results"]:
                clip = row["recipe"].startswith("clip")
                yield {
                    "source": run.source,
                    "row": run.content["loss"],
                    "column": row["recipe"] + (", joint" if row["mode"] == "joint" else ""),
                    **in_percent(row, table.metric),
                    "arrow": direction(row, table.metric),
                    **({"threshold": c(threshold(row))} if clip else {}),
                }
    elif table.name == BY_LAYER:
        for entry in results["layers"]:
            for row in entry["rows"]:
                for column, metric in (("ECE (c)", "ece"), ("Accuracy", "accuracy")):
                    yield {
                        "source": source(entry, f", {entry['loss']}"),
                        "row": row["label"],
                        "column": column,
                        "value": 100 * row["metrics"][metric],
                        **({"threshold": c(row["threshold"])} if row["layer"] else {}),
                    }


# --- the file ------------------------------------------------------------------------------------


def read(folder, name, *keys):
    """A result file; without it, empty lists."""
    path = folder / name
    return json.loads(path.read_text()) if path.is_file() else {key: [] for key in keys}


def read_reproduction(folder=RESULTS):
    return read(folder, "reproduction.json", "replays", "packs", "beside")


def read_training(folder=RESULTS):
    return read(folder, "training.json", "runs", "layers")


def assembled(reproduction, training):
    """The content of paper.json; packs and runs, which stand beside several tables, only once."""
    tables = []
    for table in paper_tables().values():
        values = [
            *printed_values(table),
            *reproduced_values(reproduction, table),
            *trained_values(training, table),
        ]
        shown = [
            printed(table),
            *replays(reproduction, table),
            *small(reproduction, table),
            *(pack_table(pack, table.metric) for pack in packs_of(reproduction, table)),
            *trained_tables(training, table),
        ]
        names = [pack["name"] for pack in packs_of(reproduction, table)]
        facts = {key: training.get(key) for key in ("made_by", "hardware", "versions")}
        ours = {
            "replays": of_table(reproduction, "replays", table),
            "beside": of_table(reproduction, "beside", table),
            "packs": [i for i, p in enumerate(reproduction["packs"]) if p["name"] in names],
            "training": {
                **facts,
                "runs": list(range(len(training["runs"]))) if table.name in BY_LOSS else [],
                "layers": training["layers"] if table.name == BY_LAYER else [],
            },
        }
        body = {**table.facts, "cells": list(table), "marks": list(table.marks), "ours": ours}
        tables.append(
            {
                "json": body,
                "faulty": table.faulty,
                "csv": csv_lines(table.name, values),
                "shown": [vars(one) for one in shown],
            }
        )
    runs = [{key: run[key] for key in run if key != "curve"} for run in training["runs"]]
    return {"tables": tables, "packs": reproduction["packs"], "runs": runs}


def csv_lines(name, values):
    text = io.StringIO()
    writer = csv.DictWriter(text, CSV_HEADER, lineterminator="\n")
    writer.writerows({"table": name, **value} for value in values)
    return text.getvalue().splitlines()


def as_text(content):
    """JSON with one line per table, pack and run, so that a diff shows which of them changed."""

    def line(value):
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))

    lists = (f"{line(key)}:[\n" + ",\n".join(map(line, content[key])) + "\n]" for key in content)
    return "{" + ",\n".join(lists) + "}\n"


def main():
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    if not any((folder / name).is_file() for name in ("reproduction.json", "training.json")):
        raise SystemExit(f"{folder} holds no reproduction.json and no training.json")
    output = PACKAGED if folder == RESULTS else folder / "paper.json"
    output.write_text(as_text(assembled(read_reproduction(folder), read_training(folder))))
    print(f"Wrote {output}")


if __name__ == "__main__":
    main()
