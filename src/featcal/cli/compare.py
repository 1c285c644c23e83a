"""featcal compare and demo: recipes side by side, with intervals, in the format asked for."""

from __future__ import annotations

import io
import json
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, final

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from featcal.cli import app
from featcal.cli.fit import FITTED_WIDTH, check_recipe, check_train
from featcal.core.checks import InputError
from featcal.core.files import check_free, new_file
from featcal.data import Pack
from featcal.data.pack import demo_pack
from featcal.metrics.columns import COLUMNS, USUAL, Column, columns
from featcal.report import tables
from featcal.report.bootstrap import checked_resamples
from featcal.report.compare import (
    DEFAULT_RECIPES,
    NONE,
    RESAMPLES,
    Comparison,
    parse_all,
    recipe_text,
)
from featcal.report.compare import compare as run_comparison
from featcal.report.diagram import ReliabilityDiagram, save_comparison

FORMATS = {"table": ".txt", "markdown": ".md", "csv": ".csv", "latex": ".tex", "json": ".json"}
GIVEN = "given"  # the order in which the recipes were given
NAMES = ", ".join(COLUMNS)
PLAIN_ARROWS = {"down": "v", "up": "^"}
# What a narrow terminal does without, first to go first; columns that were asked for go last.
EXPENDABLE = ("seconds", "brier", "adaptive_ece", "fitted", "nll")
INTERVALS, FINDINGS = "intervals", "findings"  # what goes after all columns that can
STYLES = {"better": "green", "worse": "red"}


@final
class Request(SimpleNamespace):
    """The arguments and options of the command, under their own names."""

    @property
    def scored_split(self) -> str:
        """The split whose rows are scored."""
        return str(self.fit_split if self.folds else self.test_split or "test")

    @property
    def format(self) -> str:
        """The format asked for, or the one the name of the file tells."""
        asked = app.format_of(self.form, self.as_json)
        if asked is not None or self.output is None:
            return asked or "table"
        for form, suffix in FORMATS.items():
            if self.output.suffix.lower() == suffix:
                return form
        raise InputError(
            f"-o {self.output}: its name does not tell the format; add --format with one of "
            f"{', '.join(FORMATS)}, or end it in {', '.join(FORMATS.values())}"
        )

    def check(self) -> None:
        """Refuses options that contradict each other, before anything is read."""
        self.format  # noqa: B018 - refused where it cannot be told
        if self.folds and self.test_split is not None:
            raise InputError(
                f"--folds {self.folds} scores the rows of --fit-split and reads no other: "
                f"leave out --test-split {self.test_split}"
            )
        if not self.folds and self.fit_split == self.scored_split:
            raise InputError(
                f"--fit-split and --test-split are both {self.fit_split!r}: never fit on test; "
                "give two splits, or cross-fit one with --folds 5"
            )
        check_train(self.train_split, self.fit_split, self.scored_split)
        if self.paper and self.recipes:
            raise InputError(
                f"--paper brings its own recipes: leave out --paper, or {self.recipes[0]!r}"
            )
        for option, value in (("--baseline", self.baseline), ("--sort", self.sort)):
            if self.paper and value is not None:
                raise InputError(
                    f"--paper keeps the paper's order and compares each method with itself after "
                    f"clip: leave out --paper, or {option} {value}"
                )
        if self.output is not None:
            check_free(self.output, overwrite=self.force, remedy=app.OVERWRITE)

    def chosen_recipes(self, pack: Pack) -> tuple[str, ...]:
        """The recipes to run, each of which the pack can serve; the baseline is one of them."""
        headless = pack.manifest.head is None
        recipes = tables.PAPER_RECIPES if self.paper else self.recipes
        if not recipes:
            recipes = (NONE, "temperature") if headless else DEFAULT_RECIPES
        if self.baseline is not None:
            names = [recipe_text(recipe) for recipe in recipes]
            if recipe_text(self.baseline) not in names:
                recipes = (self.baseline, *recipes)
        for calibrator in parse_all(recipes):
            if calibrator is not None:
                check_recipe(calibrator, pack, train=self.train_split is not None)
        return recipes

    def columns(self, otherwise: tuple[str, ...]) -> list[Column]:
        """The columns asked for, each once, or those of other names."""
        return columns(tuple(dict.fromkeys(self.metrics)) or otherwise)

    def blocks(self, found: Comparison) -> list[tables.Block]:
        """The layout of the tables."""
        if self.paper:
            return tables.paper_blocks(found, self.columns(tables.PAPER_METRICS))
        return [tables.comparison_block(found, self.columns(USUAL))]

    def text(self, found: Comparison, arrows: Mapping[str, str]) -> str:
        """The comparison in the format asked for."""
        blocks = self.blocks(found)
        match self.format:
            case "json":
                return json.dumps(found.as_json(), indent=2, allow_nan=False) + "\n"
            case "csv":
                return tables.as_csv(found, self.columns(tuple(COLUMNS)))
            case "markdown":
                return tables.markdown(found, blocks, arrows)
            case "latex":
                return tables.latex(found, blocks)
        file = io.StringIO()
        print_comparison(found, blocks, app.console(file), tables.notes(found)[0])
        return file.getvalue()


def _resamples(_context: click.Context, _option: click.Parameter, value: int) -> int:
    try:
        return checked_resamples(value)
    except InputError as error:
        raise InputError(f"--{error}".replace(": pass", ": give")) from error


@click.command()
@app.PACK
@click.argument("recipes", metavar="[RECIPE]...", nargs=-1)
@click.option("--fit-split", default="val", help="The split to fit on.")
@click.option("--test-split", help="The split to score on.  [default: test]")
@app.TRAIN_SPLIT
@click.option("--folds", type=click.IntRange(min=2), help="Cross-fit on the fit split alone.")
@click.option("--joint", is_flag=True, help="Fit pipelines jointly instead of step by step.")
@click.option("--paper", is_flag=True, help="The paper's methods, each alone and after clip.")
@click.option(
    "--baseline", metavar="RECIPE", help="What the others are held against.  [default: none]"
)
@click.option(
    "--metric",
    "metrics",
    multiple=True,
    type=click.Choice(list(COLUMNS)),
    metavar="NAME",
    help=f"A column to show; repeat for more. Rows are sorted by the first. One of: {NAMES}.",
)
@click.option(
    "--sort",
    type=click.Choice([*COLUMNS, GIVEN]),
    metavar="NAME",
    help=f'Sort by this metric instead, or keep the order as "given". One of: {NAMES}.',
)
@click.option(
    "--resamples",
    default=RESAMPLES,
    type=int,
    callback=_resamples,
    help="Resamples behind the intervals; 0 for none.",
)
@click.option("--seed", default=0, type=app.FROM_ZERO, help="Seed of resamples and folds.")
@app.BINS
@app.format_option(FORMATS, "Of the output.  [default: table, or what the name of the file tells]")
@app.JSON
@app.output_option("Also write this file.", required=False)
@app.FORCE
def compare(**options: Any) -> None:  # noqa: ANN401 - Request names them and their types
    """Fit each RECIPE on val and score it on test, with 95 % intervals.

    Without RECIPEs: none, temperature, clip and clip | temperature. Pipelines are fitted step by
    step, as in the paper, unless --joint is given.

    Example: featcal compare my-pack none temperature "clip(min_accuracy=0.99) | temperature"
    """
    request = Request(**options)
    request.check()
    found = compare_pack(Pack.open(request.pack_path), request)
    if request.output is not None:
        with new_file(request.output, overwrite=request.force) as temporary:
            temporary.write_text(request.text(found, tables.ARROWS), encoding="utf-8")
    elif request.format != "table":
        click.echo(request.text(found, arrows(sys.stdout.encoding)), nl=False)
        if request.format != "json":  # JSON has the warnings in it
            for line in warnings_of(found):
                click.echo(line, err=True)
        return
    print_comparison(found, request.blocks(found), app.console(), tables.notes(found)[0])
    if request.output is not None:
        app.say(f"Wrote {request.output}")
    else:
        flag = "" if request.joint else " --sequential"
        place = shlex.quote(str(request.pack_path))
        app.say(f"Keep a row with: featcal fit {place} RECIPE{flag} -o cal.safetensors")


def compare_pack(pack: Pack, request: Request) -> Comparison:
    """Fits and scores the recipes of a request on the splits of a pack."""
    recipes = request.chosen_recipes(pack)
    fit_split, scored, folds = request.fit_split, request.scored_split, request.folds
    fit_data, test_data = pack.split(fit_split), None
    if not folds:
        try:
            test_data = pack.split(scored)
        except InputError as error:
            raise InputError(f"{error}, or cross-fit {fit_split} with --folds 5") from error
    elif folds > fit_data.rows:
        raise InputError(
            f"--folds is {folds} and {fit_split} has {fit_data.rows} rows: give at most "
            f"{fit_data.rows}"
        )
    with app.progress_bar(), app.about(pack, *dict.fromkeys((fit_split, scored))):
        found = run_comparison(
            fit_data,
            test_data,
            recipes,
            pack.head,
            mode="joint" if request.joint else "sequential",
            bins=request.bins,
            baseline=request.baseline,
            resamples=request.resamples,
            seed=request.seed,
            folds=folds,
            train=None if request.train_split is None else pack.split(request.train_split),
        )
    where = {
        "pack": pack.path.resolve().name,
        "fit_split": fit_split,
        "test_split": None if folds else scored,
    }
    found = replace(found, settings={**where, **found.settings})
    if request.paper:
        return tables.against_own_base(found)
    order = request.sort or (request.metrics[0] if request.metrics else GIVEN)
    return found if order == GIVEN else found.sorted_by(order)


def print_comparison(
    found: Comparison, blocks: Sequence[tables.Block], console: Console, title: str = ""
) -> None:
    """The tables, and below them what a reader must know to read them."""
    if title:
        console.print(title, soft_wrap=True)
    hidden: dict[str, None] = {}
    everywhere = {INTERVALS, FINDINGS}
    for block in blocks:
        table, left_out = comparison_table(block, console)
        console.print(table)
        hidden |= dict.fromkeys(left_out)
        everywhere &= set(left_out)
    shown = {"intervals": INTERVALS not in everywhere, "findings": FINDINGS not in everywhere}
    _, *legend = tables.notes(found, **shown)
    # Where there could be findings, and are none for want of something to compare with.
    compared = any(other is not None for other in found.against)
    others = any(row.recipe != NONE for row in found)
    if found.settings.get("resamples") and others and not compared:
        legend.append("No baseline: add none, or --baseline RECIPE.")
    if hidden:
        legend.append(f"Too narrow for: {', '.join(hidden)} (see --metric, or --format csv).")
    idle: dict[tuple[str, str], str] = {}  # the reason of every no-op, of its first fold
    for row, step in ((r, step) for r in found for report in r.reports for step in report.steps):
        if step.noop and not step.warning:
            idle.setdefault((row.recipe, step.name), f"{row.recipe}: {step.message}")
    for line in [*legend, *warnings_of(found), *idle.values()]:
        console.print(line, soft_wrap=True)


def warnings_of(found: Comparison) -> list[str]:
    """Every warning of a fit, said once."""
    pairs = (
        (row.recipe, text) for row in found for report in row.reports for text in report.warnings
    )
    return list(dict.fromkeys(f"Warning: {recipe}: {text}" for recipe, text in pairs))


def arrows(encoding: str | None) -> Mapping[str, str]:
    """Arrows that can be printed in this encoding."""
    try:
        "".join(tables.ARROWS.values()).encode(encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return PLAIN_ARROWS
    return tables.ARROWS


def comparison_table(block: tables.Block, console: Console) -> tuple[Table, list[str]]:
    """The widest table that fits, and the headings it had to leave out."""
    names = [cell.column.name for cell in block.lines[0].cells]
    order = EXPENDABLE if tuple(names) == USUAL else ("seconds", "fitted", *reversed(names[1:]))
    if block.title:  # alone and after clip: neither means anything without the other
        order = ()
    order = (*order, INTERVALS, FINDINGS)
    # As wide as the longest recipe, or where recipes break after a bar and nowhere else.
    labels = [line.label for line in block.lines]
    steps = [step for label in labels for step in label.replace(" | ", " |\n").splitlines()]
    widths = dict.fromkeys(max(map(len, (block.labels, *texts))) for texts in (labels, steps))
    marks = arrows(console.encoding)
    for count, width, fitted in product(range(len(order) + 1), widths, (None, FITTED_WIDTH)):
        hidden = order[:count]
        table = _table(block, hidden, width, fitted, marks)
        if app.measured(table) <= console.width:
            break
    kept = [cell for line in block.lines for cell in line.cells if cell.column.name not in hidden]
    there = {
        "fitted": any(line.fitted for line in block.lines),
        INTERVALS: any(cell.range for cell in kept),
        FINDINGS: any(cell.finding for cell in kept),
    }
    titles = dict(zip(names, block.headings, strict=True))
    return table, [titles.get(name, name) for name in hidden if there.get(name, True)]


def _table(
    block: tables.Block,
    hidden: Sequence[str],
    labels: int,
    fitted_width: int | None,
    marks: Mapping[str, str],
) -> Table:
    """The block without the columns and parts of cells that are hidden."""
    table = Table(title=block.title or None, title_justify="left", title_style="bold")
    table.add_column(block.labels, width=labels, overflow="fold")
    for cell, heading in zip(block.lines[0].cells, block.headings, strict=True):
        if cell.column.name not in hidden:
            table.add_column(heading, justify="right", no_wrap=True)
    fitted = "fitted" not in hidden and any(line.fitted for line in block.lines)
    if fitted:
        table.add_column("fitted", max_width=fitted_width, overflow="fold")
    timed = "seconds" not in hidden and not all(math.isnan(line.seconds) for line in block.lines)
    if timed:
        table.add_column("seconds", justify="right", no_wrap=True)
    rows = [
        [_cell(cell, hidden, marks) for cell in line.cells if cell.column.name not in hidden]
        for line in block.lines
    ]
    tall = any("\n" in cell.plain for cells in rows for cell in cells)
    for line, cells in zip(block.lines, rows, strict=True):
        # Where cells have two lines anyway, so may a pipeline of two steps.
        steps = line.fitted.split(tables.BETWEEN) if tall else [line.fitted]
        text = "\n".join(tables.folded(step, fitted_width or len(step)) for step in steps)
        more = [text] * fitted + [f"{line.seconds:.2f}"] * timed
        table.add_row(line.label, *cells, *more)
    return table


def _cell(cell: tables.Cell, hidden: Sequence[str], marks: Mapping[str, str]) -> Text:
    """The finding before the value, so that the numbers of a column stay below each other.

    Without an interval below the value there is room for the finding, which is narrower there.
    """
    value = Text(cell.column.text(cell.value), "bold" if cell.best else "")
    found = Text()
    if cell.finding is not None and FINDINGS not in hidden:
        found = Text(tables.finding_text(cell, marks), STYLES[cell.finding[1]])
    if not cell.range or INTERVALS in hidden:
        return Text("\n").join([value, found]) if found else value
    first = Text(" ").join([found, value]) if found else value
    return Text("\n").join([first, Text(cell.range, "dim")])


@click.command()
@click.option(
    "--out",
    default=Path("featcal-demo"),
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for the pictures and the page; made if it does not exist.",
)
@app.JSON
def demo(out: Path, as_json: bool) -> None:
    """Watch an overconfident network become honest, on real CIFAR-100 features shipped inside."""
    from featcal.page import Content, render  # jinja2 and plotly, for this alone
    from featcal.page.html import check_packages

    check_packages()
    pack = demo_pack()
    request = Request(**compare.make_context("compare", [str(pack.path), "--resamples=0"]).params)
    found = compare_pack(pack, request)
    out.mkdir(parents=True, exist_ok=True)
    diagrams = [ReliabilityDiagram(row.scores.bins, title=row.recipe) for row in found]
    pictures = save_comparison(diagrams, out / "reliability", overwrite=True)
    page = out / "report.html"
    with app.progress_bar():
        content = Content.of(pack, command="featcal demo")
    with new_file(page, overwrite=True) as temporary:
        temporary.write_text(render(content), encoding="utf-8")
    if as_json:
        body = [row.as_json() for row in found]
        files = {"pictures": [str(path) for path in pictures], "report": str(page)}
        app.print_json({"rows": body, **files})
        return
    raw, n = found[0].scores.metrics, found[0].scores.n
    app.say(
        f"A network ({pack.manifest.model}) trained on {pack.manifest.dataset} is "
        f"{raw['confidence']:.1%} sure on average and right in {raw['accuracy']:.1%} of {n:,} "
        "test images."
    )
    fitted_on = pack.split("val").rows
    app.say(f"Each recipe is fitted on {fitted_on:,} other images and scored on the test images:")
    print_comparison(found, request.blocks(found), app.console())
    by_ece, by_nll = (min(found, key=lambda row: row.scores.metrics[k]) for k in ("ece", "nll"))
    best = by_ece.scores.metrics
    app.say(
        f"Expected calibration error: {raw['ece']:.2%} before, {best['ece']:.2%} after "
        f"{by_ece.recipe}; accuracy {raw['accuracy']:.2%} before, {best['accuracy']:.2%} after."
    )
    app.say(f"The best likelihood (NLL) here is that of {by_nll.recipe}.")
    for path in pictures:
        app.say(f"Picture: {path}")
    app.say(
        "Next, with your own network:\n"
        "  featcal pack import my-features.npz -o my-pack\n"
        "  featcal compare my-pack\n"
        f"or look into this one:\n  featcal pack info {shlex.quote(str(pack.path))}"
    )
    app.say(f"Report, for a browser: {page}")
