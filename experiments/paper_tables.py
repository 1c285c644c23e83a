"""The paper's tables as printed and our results beside them, laid out for `featcal paper`.

    python experiments/paper_tables.py [FOLDER]

Tao, Dong and Xu, "Feature Clipping for Uncertainty Calibration", AAAI 2025. Reads its transcription
(results/paper-tables.json), what is known of its cells (results/paper-marks.json), and our results
(reproduction.json and published.json in results/, or in FOLDER, and training.json for the layers
of a short run while no long one has them); writes
src/featcal/assets/paper.json, or FOLDER/paper.json, which `featcal paper --results FOLDER` shows.
"""

import csv
import io
import json
import math
import re
import sys
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from statistics import fmean
from string import ascii_lowercase

from featcal.metrics.columns import COLUMNS
from featcal.paper import CSV_HEADER
from featcal.report.tables import PAPER_METHODS, Table, after_clip

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
PACKAGED = ROOT / "src" / "featcal" / "assets" / "paper.json"
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


def direction(row, metric):
    """The way the row differs from its baseline, "up" or "down"; "" where no interval says so."""
    found = (row.get("differences") or {}).get(metric)
    if found is None or found["verdict"] not in ("better", "worse"):
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
    return row["values"]["threshold"] if "values" in row else row["fit"]["steps"][0]["threshold"]


# --- results/reproduction.json: other networks, and the paper's own logits -----------------------
#
# `replays` are cells of the paper computed again from its own logits, `packs` the paper's recipes
# on other networks, `beside` small tables of ours that belong to one of the paper's.

METRICS = {"ece": "ECE", "adaptive_ece": "adaptive ECE", "nll": "NLL", "accuracy": "accuracy"}
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
    if table.metric not in METRICS or table.name in WITHOUT_PACKS:
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
        f"{METRICS[metric]} in percent on {pack['rows']['test']:,} test rows{how}"
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


# --- results/published.json: networks of our own, trained as the paper's --------------------------
#
# A run is one network, trained with one loss and one seed. Its `results` hold, for each way the
# test images were normalised, the scores of every recipe with their paired differences.

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
CE = "Cross Entropy"
REDUCTION = re.compile(r"(, )?reduction=['\"]\w+['\"]")
DATASETS = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}
NETWORKS = {
    **{"resnet50": "ResNet-50", "resnet110": "ResNet-110", "densenet121": "DenseNet-121"},
    **{"wrn26x10": "Wide-Resnet-26", "wrn16x4": "WRN-16-4"},
}
NEAREST = {"WRN-16-4": "Wide-Resnet-26"}  # of the paper's, where it has not the same
# Each with the mode of its fit, under its heading.
RECIPES = {
    **{name: (name, "sequential") for name in ("none", "temperature", "clip")},
    "clip | temperature": ("clip | temperature", "sequential"),
    "jointly": ("clip | temperature", "joint"),
    **{name: (name, "sequential") for name in ("sample", "clip | sample")},
}
# The paper's CIFAR-100 test images were normalised unlike its training images, CIFAR-10's alike.
AS_PUBLISHED, MATCHED = "reference", "matched"
NORMALISED = {AS_PUBLISHED: "test as published", MATCHED: "test as in training"}
# Words for what a recipe calls otherwise; what is not here is said by its own name.
WORDS = {
    **{"lr": "learning rate", "schedule": "rate by", "augment": "images shifted and mirrored"},
    "clip_norm": "gradient norm at most",
}
BESIDE_PAPER = "Our networks, trained as the paper's, beside them"
BY_NETWORK = {  # what every run is shown by, beside a table
    "train-time": ("ece", "nll"),
    "accuracy": ("accuracy",),
    "adaece-posthoc": ("adaptive_ece",),
}
POSTHOC, BY_LAYER, ENTROPY = ("ece-posthoc", "adaece-posthoc"), "layers", "entropy"


@dataclass(frozen=True)
class Network:
    """A network trained with one loss: a run for each seed.

    Attributes:
        name: data and network under the paper's names, CIFAR-10 ResNet-50.
        loss: the paper's heading for it.
        runs: as in the file.
    """

    name: str
    loss: str
    runs: tuple

    def __str__(self):
        return f"{self.name}, {self.loss}"

    def results(self, norm=AS_PUBLISHED):
        """What was found for each seed; data sets with one normalisation have it under both."""
        return [run["results"].get(norm, run["results"][MATCHED]) for run in self.runs]

    def rows(self, heading, norm=AS_PUBLISHED):
        """The scores of a recipe for each seed, those that there are."""
        found = (find(result["rows"], *RECIPES[heading]) for result in self.results(norm))
        return [row for row in found if row is not None]

    def printed(self, recipe, metric):
        """The paper's cell of a recipe on this network, or on the nearest it has; None without."""
        row = self.name
        for ours, theirs in NEAREST.items():
            row = row.replace(ours, theirs)
        alone = {"none": f"{self.loss} base", "clip": f"{self.loss} +ours"}
        after = {"none": "Original Feature base", "clip": "Original Feature +ours(c)"}
        after |= {"temperature": "TS base", "clip | temperature": "TS +ours"}
        accuracy = {"none": "Baseline", "clip": "FC (ours)"}
        places = {
            "ece": [("train-time", alone), ("ece-posthoc", after if self.loss == CE else {})],
            "adaptive_ece": [("adaece-posthoc", after if self.loss == CE else {})],
            "accuracy": [("accuracy", accuracy if self.loss == CE else {"none": self.loss})],
        }
        for table, columns in places[metric]:
            for cell in paper_tables()[table]:
                if (cell["row"], cell["column"]) == (row, columns.get(recipe)):
                    return cell
        return None


def networks(published):
    """Every network with every loss, in the order of the paper."""
    found = {}
    for run in published["runs"]:
        text = REDUCTION.sub("", run["loss"]).removesuffix("()")
        loss = next(name for name, form in PAPER_LOSSES.items() if re.fullmatch(form, text))
        found.setdefault((run["dataset"], run["network"], loss), []).append(run)
    order = (list(DATASETS), list(NETWORKS), list(PAPER_LOSSES))
    keys = sorted(
        found, key=lambda key: [names.index(n) for names, n in zip(order, key, strict=True)]
    )
    return [Network(named(found[key][0]), key[2], tuple(found[key])) for key in keys]


def named(entry):
    return f"{DATASETS[entry['dataset']]} {NETWORKS[entry['network']]}"


def listed(values):
    """Values in words: 1, 2 and 3."""
    *most, last = map(str, values)
    return f"{', '.join(most)} and {last}" if most else last


def training_note(run):
    """Everything about the training but loss and seed, in words."""
    recipe, rows = run["recipe"], run["rows"]
    apart = ("epochs", "seed", "reduction")  # said elsewhere
    told = (setting_text(key, value) for key, value in recipe.items() if key not in apart)
    return (
        f"{recipe['epochs']} epochs, {', '.join(filter(None, told))}; {run['precision']} on an "
        f"{run['device']}; trained on {rows['train']:,} rows, fitted on {rows['val']:,} of val, "
        f"scored on {rows['test']:,} of test."
    )


def setting_text(key, value):
    """One setting of a recipe in words; nothing for what was not used."""
    if value is None or value is False or value in (0, []):
        return ""
    word = WORDS.get(key, key.replace("_", " "))
    if value is True:
        return word
    values = value if isinstance(value, list) else [value]
    return f"{word} {listed(f'{v:.3g}' if isinstance(v, float) else v for v in values)}"


def facts_text(facts):
    """Hardware or versions in words.

    >>> facts_text({"device": "NVIDIA H200", "compiled": True, "graph": False})
    'device NVIDIA H200, compiled'
    """
    given = {key: value for key, value in facts.items() if value is not False}
    return ", ".join(key if value is True else f"{key} {value}" for key, value in given.items())


# --- their cells, over the seeds, and their tables -----------------------------------------------


def spread(rows, metric):
    """The mean over seeds and half the distance from the lowest to the highest.

    >>> spread([{"metrics": {"ece": 0.04}}, {"metrics": {"ece": 0.05}}], "ece")
    '4.50 ± 0.50'
    """
    values = [row["metrics"][metric] for row in rows]
    if not values:
        return MISSING
    number = COLUMNS[metric].number
    half = f" {SPREAD} {number((max(values) - min(values)) / 2)}" if len(values) > 1 else ""
    return number(fmean(values)) + half


def our_cell(rows, metric, *, with_c):
    """Over the seeds, with the mean c and an arrow where all of them agree: 1.38 (0.245)▼."""
    text = spread(rows, metric)
    if with_c and rows:
        acting = [c for c in map(threshold, rows) if c is not None]
        text += f" ({fmean(acting):.3g})" if len(acting) == len(rows) else f" ({NOOP})"
    found = {direction(row, metric) for row in rows}
    return text + (ARROW[found.pop()] if len(found) == 1 else "")


def side_by_side(found, metric):
    """The paper's cells and ours, network by network; one table."""
    shown = [r for r in RECIPES if any(one.printed(r, metric) for one in found)]
    rows = []
    for one in found:
        cells = []
        for recipe in shown:
            theirs = one.printed(recipe, metric)
            cells.append(MISSING if theirs is None else theirs["printed"].strip("▼▲"))
            cells.append(
                our_cell(one.rows(recipe), metric, with_c=recipe == "clip" and metric != "accuracy")
            )
        mark = " [w]" if stands_for(one) and set(cells[::2]) != {MISSING} else ""
        rows.append((f"{one}{mark}", *cells))
    title = f"{BESIDE_PAPER}: {METRICS[metric]} in percent on test images normalised as the paper's"
    headings = (f"{recipe}\n{who}" for recipe in shown for who in ("paper", "ours"))
    cells = [cell for row in rows for cell in row]
    arrows = "the paired 95 % interval says so, for each seed: clip and temperature beside none, "
    notes = {
        SPREAD: "Mean over the seeds, and half the distance from the lowest to the highest.",
        ARROWS[0]: f"Lower or higher, and {arrows}clip | temperature beside temperature.",
        NOOP: "No clipping was best on val, for one seed at least.",
        "w": f"The paper's cells are of {listed(NEAREST.values())}, the nearest network it has.",
    }
    signs = {SPREAD: SPREAD, ARROWS[0]: "[▼▲]", NOOP: NOOP, "w": r"\[w\]"}
    told = [(k, v) for k, v in notes.items() if any(re.search(signs[k], cell) for cell in cells)]
    return Table(title, ("", *headings), tuple(rows), (*told, *training_notes(found)), 2)


def stands_for(network):
    return any(network.name.endswith(f" {name}") for name in NEAREST)


def training_notes(found):
    if not found:
        return ()
    losses = dict.fromkeys((one.loss, run["loss"]) for one in found for run in one.runs)
    return (
        ("training", training_note(found[0].runs[0])),
        ("losses", "; ".join(f"{heading} is {text}" for heading, text in losses) + "."),
    )


def every_run(found, metric):
    """Each run and each normalisation of the test images: every recipe, with its interval."""
    rows = []
    for one in found:
        for run in one.runs:
            for norm, result in run["results"].items():
                which = " [p]" if norm == AS_PUBLISHED else ""
                cells = (find(result["rows"], *fit) for fit in RECIPES.values())
                told = (with_interval(row, metric) or MISSING for row in cells)
                rows.append((f"{one} {run['seed']}{which}", *told))
    unit = "" if metric == "nll" else " in percent"
    title = f"Every run of ours: {METRICS[metric]}{unit} on test with its 95 % interval"
    beside = "none, clip | temperature, jointly and sample beside temperature, and the last beside"
    notes = (
        (
            ARROWS[0],
            f"Where the paired interval says so: temperature and clip beside {beside} sample.",
        ),
        ("intervals", "Over the test rows of one network; another seed gives another network."),
        ("seed", "The number after the loss."),
    )
    if any(row[0].endswith("[p]") for row in rows):
        notes += (("p", "Test images normalised as the paper's; elsewhere as in training."),)
    if any(MISSING in row for row in rows):
        told = "sample is from their lengths, and on CIFAR-100 from logits in half precision."
        notes += ((MISSING, f"The features of this network were not kept: {told}"),)
    return Table(title, ("", *RECIPES), tuple(rows), notes)


def entropy_table(found):
    """Softmax entropies of confident wrong and right rows, the paper's first."""
    keys = ("before", "after", "growth")
    theirs = paper_tables()[ENTROPY].cells
    rows = [("paper, CIFAR-10 ResNet-50, above 0.80", *(c["printed"] for r in theirs for c in r))]
    for one in found:
        for run, result in zip(one.runs, one.results(), strict=True):
            entropy = result["entropy_0.9"]
            cells = (f"{entropy[group][key]:.4f}" for group in ("hce", "lce") for key in keys)
            rows.append((f"{one}, seed {run['seed']}, above 0.9", *cells))
    headings = (f"{group}\n{key}" for group in ("HCE", "LCE") for key in keys)
    title = f"{BESIDE_PAPER}: softmax entropy in nats, before and after a clip"
    return Table(title, ("", *headings), tuple(rows), (), 3)


def layer_table(entry):
    """Another layer clipped; the paper's values stand beside those of its own network."""
    table, rows = paper_tables()[BY_LAYER], []
    for row in entry["rows"]:
        c, layer = row["threshold"], row["layer"] or MISSING
        idle = MISSING if layer == MISSING else NOOP
        values = (COLUMNS[key].number(row["metrics"][key]) for key in ("ece", "accuracy"))
        cells = (row["label"], layer, idle if c is None else f"{c:.3g}", *values)
        rows.append((*cells, *printed_layer(row["label"].lower(), table)))
    title = (
        f"Our {named(entry)} ({entry['recipe']['epochs']} epochs, seed {entry['seed']}): ECE and "
        "accuracy in percent when another layer is clipped"
    )
    headings = ("", "layer", "c", "ECE", "accuracy", "paper\nECE (c)", "paper\naccuracy")
    noop = (NOOP, "No clipping of this layer was best on val, nothing is changed.")
    return Table(title, headings, tuple(rows), (noop,) if any(r[2] == NOOP for r in rows) else ())


def printed_layer(name, table):
    """The paper's row of a layer: Antepenultimate Layer for antepenultimate."""
    for cells in table.cells:
        row = cells[0]["row"].lower()
        if row.startswith(name) or f"({name})" in row:
            return [cell["printed"] for cell in cells]
    return [MISSING] * len(table.columns)


def layers_of(published, short):
    """The networks with other layers clipped: as long as the paper's, else a short one."""
    keys = ("dataset", "network", "loss", "seed", "recipe")
    long = [run for run in published["runs"] if "layers" in run]
    return [{**{k: run[k] for k in keys}, "rows": run["layers"]} for run in long] or short


def trained_tables(published, layers, table):
    """Everything of our own training that belongs beside a table."""
    found = networks(published)
    ce = [one for one in found if one.loss == CE]
    if table.name == BY_LAYER:
        return [layer_table(entry) for entry in layers]
    if table.name == ENTROPY:
        return [entropy_table(ce)]
    if table.name not in (*BY_NETWORK, *POSTHOC):
        return []
    side = side_by_side(ce if table.name in POSTHOC else found, table.metric)
    return [side, *(every_run(found, metric) for metric in BY_NETWORK.get(table.name, ()))]


def trained_values(published, layers, table):
    """The scores of every recipe on every network, or of every layer, as lines of the CSV."""
    if table.name in BY_NETWORK:
        for run in published["runs"]:
            for norm, result in run["results"].items():
                for row in result["rows"]:
                    c = row["values"].get("threshold", MISSING)
                    yield {
                        "source": f"our {run['name']}, {NORMALISED[norm]}",
                        "row": run["loss"],
                        "column": row["recipe"] + (", joint" if row["mode"] == "joint" else ""),
                        **in_percent(row, table.metric),
                        "arrow": direction(row, table.metric),
                        **({} if c == MISSING else {"threshold": math.inf if c is None else c}),
                    }
    elif table.name == BY_LAYER:
        for entry in layers:
            for row in entry["rows"]:
                for column, metric in (("ECE (c)", "ece"), ("Accuracy", "accuracy")):
                    c = math.inf if row["threshold"] is None else row["threshold"]
                    yield {
                        "source": f"our {entry['dataset']} {entry['network']}, {entry['loss']}, "
                        f"{entry['recipe']['epochs']} epochs, seed {entry['seed']}",
                        "row": row["label"],
                        "column": column,
                        "value": 100 * row["metrics"][metric],
                        **({"threshold": c} if row["layer"] else {}),
                    }


# --- the file ------------------------------------------------------------------------------------


def read(folder, name, *keys):
    """A result file; without it, empty lists."""
    path = folder / name
    return json.loads(path.read_text()) if path.is_file() else {key: [] for key in keys}


def read_reproduction(folder=RESULTS):
    return read(folder, "reproduction.json", "replays", "packs", "beside")


def read_published(folder=RESULTS):
    return read(folder, "published.json", "runs")


def read_layers(folder=RESULTS):
    return layers_of(read_published(folder), read(folder, "training.json", "layers")["layers"])


def assembled(reproduction, published, layers):
    """The content of paper.json; packs and runs, which stand beside several tables, only once."""
    tables = []
    for table in paper_tables().values():
        values = [
            *printed_values(table),
            *reproduced_values(reproduction, table),
            *trained_values(published, layers, table),
        ]
        shown = [
            printed(table),
            *trained_tables(published, layers, table),
            *replays(reproduction, table),
            *small(reproduction, table),
            *(pack_table(pack, table.metric) for pack in packs_of(reproduction, table)),
        ]
        names = [pack["name"] for pack in packs_of(reproduction, table)]
        ours = {
            "replays": of_table(reproduction, "replays", table),
            "beside": of_table(reproduction, "beside", table),
            "packs": [i for i, p in enumerate(reproduction["packs"]) if p["name"] in names],
            "training": {
                **{key: published.get(key) for key in ("made_by", "versions")},
                "runs": list(range(len(published["runs"]))) if table.name in BY_NETWORK else [],
                "layers": layers if table.name == BY_LAYER else [],
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
    return {
        "tables": tables,
        "packs": reproduction["packs"],
        "runs": list(map(kept, published["runs"])),
    }


def kept(run):
    """A run without its epochs, the histograms of its features and the details of its fits."""
    results = {
        norm: {
            "rows": [{key: row[key] for key in row if key != "fit"} for row in result["rows"]],
            "pairs": result["pairs"],
        }
        for norm, result in run["results"].items()
    }
    return {**{key: run[key] for key in run if key not in ("curve", "layers")}, "results": results}


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
    if not any((folder / name).is_file() for name in ("reproduction.json", "published.json")):
        raise SystemExit(f"{folder} holds no reproduction.json and no published.json")
    output = PACKAGED if folder == RESULTS else folder / "paper.json"
    read_all = (read_reproduction, read_published, read_layers)
    output.write_text(as_text(assembled(*(one(folder) for one in read_all))))
    print(f"Wrote {output}")


if __name__ == "__main__":
    main()
