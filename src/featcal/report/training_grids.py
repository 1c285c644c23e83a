"""Tables of our own trained networks: by loss, by layer, and beside a temperature."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from featcal.report.columns import COLUMNS
from featcal.report.grids import Grid
from featcal.report.paper import PaperTable
from featcal.report.result_rows import Row, direction, with_interval
from featcal.report.training_cells import (
    MISSING,
    NOOP,
    ROWS_ALONE,
    Note,
    arrow,
    cell_notes,
    clipped,
    epochs,
    loss_notes,
    numbered,
    spread,
    training_notes,
)
from featcal.report.training_runs import PAPER_LOSSES, Run, Setting, named

Cells = Callable[[Setting], tuple[str, ...]]
# Each with the mode of its fit, under its heading.
HONEST = {
    "none": ("none", "sequential"),
    "clip": ("clip", "sequential"),
    "temperature": ("temperature", "sequential"),
    "clip | temperature": ("clip | temperature", "sequential"),
    "jointly": ("clip | temperature", "joint"),
}
TITLES = {
    "ece": "ECE in percent on test, alone and after clip at c",
    "accuracy": "accuracy in percent on test",
}


def loss_grids(found: Sequence[Setting], metric: str, name: str, made: Note) -> list[Grid]:
    """A row a network: the losses of the paper, then every other loss in a table of its own."""
    main = [setting for setting in found if setting.paper]
    rest = [setting for setting in found if any(setting.further)]
    headings, cells = _columns(metric)
    title = f"{name}, our own networks ({{}}): {{}}{TITLES[metric]}"
    grids = []
    if main:
        numbers = numbered(main)
        rows = tuple((f"{s.network} [{numbers[s.training]}]", *cells(s)) for s in main)
        groups = (runs for setting in main for runs in setting.paper.values())
        signs, losses = cell_notes(rows, groups), loss_notes(main)
        notes = (*training_notes(main), *losses, *signs, made)
        together = 2 if metric == "ece" else 1
        grids.append(Grid(title.format(epochs(main), ""), headings, rows, notes, together))
    return [*grids, *(_further(s, metric, title, made) for s in rest)]


def _columns(metric: str) -> tuple[tuple[str, ...], Cells]:
    if metric == "ece":
        pairs = ((f"{loss}\nbase", f"{loss}\n+clip (c)") for loss in PAPER_LOSSES)
        return ("", *(heading for pair in pairs for heading in pair)), _ece_cells
    return ("", *PAPER_LOSSES, "clip after\nCross Entropy"), _accuracy_cells


def _ece_cells(setting: Setting) -> tuple[str, ...]:
    pairs = (_pair(setting.paper.get(loss, []), "ece") for loss in PAPER_LOSSES)
    return tuple(cell for pair in pairs for cell in pair)


def _pair(runs: Sequence[Run], metric: str) -> tuple[str, str]:
    return spread(_rows(runs, "none"), metric), clipped(_rows(runs, "clip"), metric)


def _accuracy_cells(setting: Setting) -> tuple[str, ...]:
    base = (_rows(setting.paper.get(loss, []), "none") for loss in PAPER_LOSSES)
    clip = _rows(setting.paper.get("Cross Entropy", []), "clip")
    after = f"{spread(clip, 'accuracy')} {arrow(clip, 'accuracy')}".rstrip()
    return (*(spread(rows, "accuracy") for rows in base), after)


def _rows(runs: Sequence[Run], recipe: str) -> list[Row | None]:
    return [run.row(recipe) for run in runs]


def _further(setting: Setting, metric: str, title: str, made: Note) -> Grid:
    """The losses the paper does not have, and other forms of those it has."""
    groups = list(setting.further)
    rows = tuple((setting.label(runs[0]), *_pair(runs, metric)) for runs in groups)
    shown = setting.only(run for runs in groups for run in runs)
    notes = (*training_notes([shown]), *cell_notes(rows, groups), made)
    told = title.format(epochs([setting]), f"further losses, {setting.network} [1], ")
    return Grid(told, ("", "base", "+clip (c)"), rows, notes)


# --- beside a temperature --------------------------------------------------------------------


def temperature_grid(setting: Setting, made: Note) -> Grid:
    """Every run, uncalibrated and after clip, temperature and both: ECE with intervals, and NLL."""
    shown = {
        heading: fit
        for heading, fit in HONEST.items()
        if heading != "jointly" or any(run.row(*fit) for run in setting.runs)
    }
    rows = tuple(_honest(setting, run, shown.values()) for run in _by_loss(setting))
    headings = (*(f"ECE %\n{name}" for name in shown), *(f"NLL\n{name}" for name in shown))
    title = f"{setting.network} ({epochs([setting])}) [1]: clip beside a temperature, every run"
    notes = (*training_notes([setting]), ("intervals", ROWS_ALONE), *_baselines(setting), made)
    return Grid(title, ("", *headings), rows, notes, together=len(shown))


def _by_loss(setting: Setting) -> list[Run]:
    return [run for runs in setting.variants.values() for run in runs]


def _honest(setting: Setting, run: Run, shown: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    several = len({other.seed for other in setting.runs}) > 1
    label = setting.label(run) + (f", seed {run.seed}" if several else "")
    found = [run.row(*fit) for fit in shown]
    ece = (with_interval(row, "ece") or MISSING for row in found)
    return (label, *ece, *(_with_arrow(row, "nll") for row in found))


def _with_arrow(row: Row | None, metric: str) -> str:
    """The value and its arrow without the interval: narrow enough for a column beside others."""
    if row is None:
        return MISSING
    return with_interval({**row, "intervals": {}}, metric)


def _baselines(setting: Setting) -> list[Note]:
    """What the arrows of each recipe compare it with."""
    rows = [row for run in setting.runs for row in run.content["results"]]
    pairs = {
        f"{row['recipe']} with {row['differences'][metric]['baseline']}": None
        for row in rows
        for metric in ("ece", "nll")
        if direction(row, metric)
    }
    if not pairs:
        return []
    told = "; ".join(pairs)
    return [("▼ ▲", f"Lower or higher, and the paired 95 % interval says so, comparing {told}.")]


# --- layers ----------------------------------------------------------------------------------


def layer_grid(
    entry: dict[str, Any], found: Sequence[Setting], table: PaperTable, made: Note
) -> Grid:
    """Another layer clipped; the paper's values stand in the rows where the network is its own."""
    runs = ([run for run in setting.runs if _made(entry, run)] for setting in found)
    ours = [setting.only(own) for setting, own in zip(found, runs, strict=True) if own]
    same = named(entry) == "CIFAR-10 ResNet-50" and Run(entry).loss == "ce"
    rows = tuple(_layer_row(row, table if same else None) for row in entry["rows"])
    trained = f" ({epochs(ours)})" if ours else ""
    title = (
        f"{table.name}, our own {named(entry)}{trained}, loss {entry['loss']}, seed "
        f"{entry['seed']}: ECE and accuracy in percent when another layer is clipped"
    )
    printed = ("paper\nECE (c)", "paper\naccuracy") if same else ()
    headings = ("", "layer", "c", "ECE", "accuracy", *printed)
    return Grid(title, headings, rows, (*training_notes(ours), *_noop(rows), made))


def _made(entry: dict[str, Any], run: Run) -> bool:
    keys = ("dataset", "network", "loss", "seed")
    return all(entry[key] == run.content[key] for key in keys)


def _noop(rows: Iterable[Sequence[str]]) -> list[Note]:
    idle = any(row[2] == NOOP for row in rows)
    return (
        [(NOOP, "No clipping of this layer was best on val, nothing is changed.")] if idle else []
    )


def _layer_row(row: dict[str, Any], table: PaperTable | None) -> tuple[str, ...]:
    c, layer = row["threshold"], row["layer"] or MISSING
    idle = MISSING if layer == MISSING else NOOP
    values = (COLUMNS[key].number(row["metrics"][key]) for key in ("ece", "accuracy"))
    cells = (row["label"], layer, idle if c is None else f"{c:.3g}", *values)
    return cells if table is None else (*cells, *_printed(row["label"], table))


def _printed(label: str, table: PaperTable) -> tuple[str, ...]:
    """The paper's row of a layer: Antepenultimate Layer for antepenultimate."""
    name = label.lower()
    for cells in table.cells:
        row = cells[0].row.lower()
        if row.startswith(name) or f"({name})" in row:
            return tuple(cell.printed for cell in cells)
    return (MISSING,) * len(table.columns)
