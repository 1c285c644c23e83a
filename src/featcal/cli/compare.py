"""`featcal compare`: recipes side by side, with intervals, in the format asked for."""

from __future__ import annotations

import io
import json
import math
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, TypeVar, final

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from featcal.cli.shared import (
    BINS,
    FITTED_WIDTH,
    FORCE,
    JSON,
    OVERWRITE,
    PACK,
    about,
    check_recipe,
    check_train,
    console,
    measured,
    output_option,
    print_json,
    progress_bar,
    say,
    with_options,
)
from featcal.core.checks import InputError
from featcal.core.files import check_free, new_file
from featcal.core.fit import Mode
from featcal.data import Pack, PackSplit
from featcal.data.pack import demo_pack
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
from featcal.report.scores import COLUMNS, UNKNOWN, USUAL, Column, columns
from featcal.report.tables import (
    ARROWS,
    BETWEEN,
    PAPER_METRICS,
    PAPER_RECIPES,
    Block,
    Cell,
    against_own_base,
    as_csv,
    comparison_block,
    finding_text,
    folded,
    latex,
    markdown,
    notes,
    paper_blocks,
)

# --- The comparison on a terminal: as many columns as fit, the best in bold, findings in words.

PLAIN_ARROWS = {"down": "v", "up": "^"}
# What a narrow terminal does without, first to go first; columns that were asked for go last.
EXPENDABLE = ("seconds", "brier", "adaptive_ece", "fitted", "nll")
INTERVALS, FINDINGS = "intervals", "findings"  # what goes after all columns that can
STYLES = {"better": "green", "worse": "red"}

T = TypeVar("T")


def arrows(encoding: str | None) -> Mapping[str, str]:
    """Arrows that can be printed in this encoding."""
    try:
        "".join(ARROWS.values()).encode(encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return PLAIN_ARROWS
    return ARROWS


def comparison_table(block: Block, console: Console) -> tuple[Table, list[str]]:
    """The widest table that fits, and the headings it had to leave out."""
    for part, hidden in _narrower(block):
        labels = dict.fromkeys((_longest_label(part), _longest_step(part)))
        for width, fitted in product(labels, (None, FITTED_WIDTH)):
            table = _table(part, width, fitted, arrows(console.encoding))
            if measured(table) <= console.width:
                return table, hidden
    return table, hidden


def _narrower(block: Block) -> Iterator[tuple[Block, list[str]]]:
    """The block, and again with less and less, with the headings that are gone."""
    names = [cell.column.name for cell in block.lines[0].cells]
    asked = ("seconds", "fitted", *reversed(names[1:]))
    order = EXPENDABLE if tuple(names) == USUAL else asked
    if block.title:  # alone and after clip: neither means anything without the other
        order = ()
    hidden: list[str] = []
    yield block, list(hidden)
    for name in order:
        block, heading = _without(block, name)
        hidden += heading
        yield block, list(hidden)
    cells = [cell for line in block.lines for cell in line.cells]
    hidden += [INTERVALS] * any(cell.range for cell in cells)
    yield _mapped(block, lambda cell: replace(cell, interval=UNKNOWN)), list(hidden)
    hidden += [FINDINGS] * any(cell.finding for cell in cells)
    yield _mapped(block, lambda cell: Cell(cell.column, cell.value, best=cell.best)), hidden


def _mapped(block: Block, change: Callable[[Cell], Cell]) -> Block:
    lines = (replace(line, cells=tuple(map(change, line.cells))) for line in block.lines)
    return replace(block, lines=tuple(lines))


def _without(block: Block, name: str) -> tuple[Block, list[str]]:
    """The block without one column, and its heading where it was there."""
    if name == "fitted":
        lines = tuple(replace(line, fitted="") for line in block.lines)
        return replace(block, lines=lines), [name] * any(line.fitted for line in block.lines)
    if name == "seconds":
        lines = tuple(replace(line, seconds=float("nan")) for line in block.lines)
        return replace(block, lines=lines), [name]
    at = [cell.column.name for cell in block.lines[0].cells].index(name)
    lines = tuple(replace(line, cells=_but(line.cells, at)) for line in block.lines)
    left = replace(block, headings=_but(block.headings, at), lines=lines)
    return left, [block.headings[at]]


def _but(values: tuple[T, ...], at: int) -> tuple[T, ...]:
    return values[:at] + values[at + 1 :]


def _longest_label(block: Block) -> int:
    return max(len(block.labels), *(len(line.label) for line in block.lines))


def _longest_step(block: Block) -> int:
    """The width at which recipes break after a bar and nowhere else."""
    steps = (line.label.replace(" | ", " |\n").splitlines() for line in block.lines)
    return max(len(block.labels), *(len(step) for parts in steps for step in parts))


def _table(block: Block, labels: int, fitted_width: int | None, marks: Mapping[str, str]) -> Table:
    table = Table(title=block.title or None, title_justify="left", title_style="bold")
    table.add_column(block.labels, width=labels, overflow="fold")
    for heading in block.headings:
        table.add_column(heading, justify="right", no_wrap=True)
    fitted = any(line.fitted for line in block.lines)
    if fitted:
        table.add_column("fitted", max_width=fitted_width, overflow="fold")
    timed = any(not math.isnan(line.seconds) for line in block.lines)
    if timed:
        table.add_column("seconds", justify="right", no_wrap=True)
    tall = any(cell.range or cell.finding for line in block.lines for cell in line.cells)
    for line in block.lines:
        cells = [_cell(cell, marks) for cell in line.cells]
        # Where cells have two lines anyway, so may a pipeline of two steps.
        steps = line.fitted.split(BETWEEN) if tall else [line.fitted]
        text = "\n".join(folded(step, fitted_width or len(step)) for step in steps)
        more = [text] * fitted + [f"{line.seconds:.2f}"] * timed
        table.add_row(line.label, *cells, *more)
    return table


def _cell(cell: Cell, marks: Mapping[str, str]) -> Text:
    """The finding before the value, so that the numbers of a column stay below each other.

    Without an interval below the value there is room for the finding, which is narrower there.
    """
    value = Text(cell.column.text(cell.value), "bold" if cell.best else "")
    found = Text() if cell.finding is None else Text(finding_text(cell, marks))
    if cell.finding is not None:
        found.stylize(STYLES[cell.finding[1]])
    if not cell.range:
        return Text("\n").join([value, found]) if found else value
    first = Text(" ").join([found, value]) if found else value
    return Text("\n").join([first, Text(cell.range, "dim")])


# --- What `featcal compare` is asked for, refused where the options contradict each other.

FORMATS = {"table": ".txt", "markdown": ".md", "csv": ".csv", "latex": ".tex", "json": ".json"}
GIVEN = "given"  # the order in which the recipes were given


@final
@dataclass(frozen=True)
class Request:
    """The arguments and options of the command, under their own names."""

    pack_path: Path
    recipes: tuple[str, ...] = ()
    fit_split: str = "val"
    test_split: str | None = None
    train_split: str | None = None
    folds: int | None = None
    joint: bool = False
    paper: bool = False
    baseline: str | None = None
    metrics: tuple[str, ...] = ()
    sort: str | None = None
    resamples: int = 0
    seed: int = 0
    bins: int = 15
    form: str | None = None
    as_json: bool = False
    output: Path | None = None
    force: bool = False

    @property
    def mode(self) -> Mode:
        """How pipelines are fitted."""
        return "joint" if self.joint else "sequential"

    @property
    def scored_split(self) -> str:
        """The split whose rows are scored."""
        return self.fit_split if self.folds else self.test_split or "test"

    @property
    def format(self) -> str:
        """The format asked for, or the one the name of the file tells."""
        if self.as_json and self.form not in (None, "json"):
            raise InputError(f"--json and --format {self.form} contradict each other: give one")
        if self.form is not None or self.as_json:
            return self.form or "json"
        if self.output is None:
            return "table"
        for form, suffix in FORMATS.items():
            if self.output.suffix.lower() == suffix:
                return form
        raise InputError(
            f"-o {self.output}: its name does not tell the format; add --format with one of "
            f"{', '.join(FORMATS)}, or end it in {', '.join(FORMATS.values())}"
        )

    @property
    def order(self) -> str | None:
        """The metric rows are sorted by; None where they keep their order."""
        if self.sort is not None:
            return None if self.sort == GIVEN else self.sort
        return self.metrics[0] if self.metrics and not self.paper else None

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
        if self.train_split is not None:
            check_train(self.train_split, self.fit_split, self.scored_split)
        if self.paper:
            self._check_paper()

    def _check_paper(self) -> None:
        if self.recipes:
            raise InputError(
                f"--paper brings its own recipes: leave out --paper, or {self.recipes[0]!r}"
            )
        for option, value in (("--baseline", self.baseline), ("--sort", self.sort)):
            if value is not None:
                raise InputError(
                    f"--paper keeps the paper's order and compares each method with itself after "
                    f"clip: leave out --paper, or {option} {value}"
                )

    def chosen_recipes(self, pack: Pack) -> tuple[str, ...]:
        """The recipes to run, each of which the pack can serve; the baseline is one of them."""
        headless = pack.manifest.head is None
        if self.paper and headless:
            raise InputError(
                f"--paper clips features and {pack.path} holds logits alone: import features with "
                "the head's weight and bias"
            )
        recipes = PAPER_RECIPES if self.paper else self.recipes
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

    def check_folds(self, rows: int) -> None:
        """Refuses more folds than there are rows to deal out."""
        if self.folds and self.folds > rows:
            raise InputError(
                f"--folds is {self.folds} and {self.fit_split} has {rows} rows: give at most {rows}"
            )

    def columns(self, otherwise: tuple[str, ...]) -> list[Column]:
        """The columns asked for, each once, or those of other names."""
        return columns(tuple(dict.fromkeys(self.metrics)) or otherwise)

    def blocks(self, found: Comparison) -> list[Block]:
        """The layout of the tables."""
        if self.paper:
            return paper_blocks(found, self.columns(PAPER_METRICS))
        return [comparison_block(found, self.columns(USUAL))]


def _resamples(_context: click.Context, _option: click.Parameter, value: int) -> int:
    try:
        return checked_resamples(value)
    except InputError as error:
        raise InputError(f"--{error}".replace(": pass", ": give")) from error


NAMES = ", ".join(COLUMNS)
OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option("--fit-split", default="val", show_default=True, help="The split to fit on."),
    click.option("--test-split", help="The split to score on.  [default: test]"),
    click.option("--train-split", help="Rows the network was trained on, for recipes that ask."),
    click.option("--folds", type=click.IntRange(min=2), help="Cross-fit on the fit split alone."),
    click.option("--joint", is_flag=True, help="Fit pipelines jointly instead of step by step."),
    click.option("--paper", is_flag=True, help="The paper's methods, each alone and after clip."),
    click.option(
        "--baseline", metavar="RECIPE", help="What the others are held against.  [default: none]"
    ),
    click.option(
        "--metric",
        "metrics",
        multiple=True,
        type=click.Choice(list(COLUMNS)),
        metavar="NAME",
        help=f"A column to show; repeat for more. Rows are sorted by the first. One of: {NAMES}.",
    ),
    click.option(
        "--sort",
        type=click.Choice([*COLUMNS, GIVEN]),
        metavar="NAME",
        help=f'Sort by this metric instead, or keep the order as "given". One of: {NAMES}.',
    ),
    click.option(
        "--resamples",
        default=RESAMPLES,
        show_default=True,
        type=int,
        callback=_resamples,
        help="Resamples behind the intervals; 0 for none.",
    ),
    click.option(
        "--seed",
        default=0,
        show_default=True,
        type=click.IntRange(min=0),
        help="Seed of resamples and folds.",
    ),
    BINS,
    click.option(
        "--format",
        "form",
        type=click.Choice(list(FORMATS)),
        help="Of the output.  [default: table, or what the name of the file tells]",
    ),
    JSON,
    output_option("Also write this file.", required=False),
    FORCE,
)


@click.command()
@PACK
@click.argument("recipes", metavar="[RECIPE]...", nargs=-1)
@with_options(OPTIONS)
def compare(**options: Any) -> None:  # noqa: ANN401 - Request names them and their types
    """Fit each RECIPE on val and score it on test, with 95 % intervals.

    Without RECIPEs: none, temperature, clip and clip | temperature. Pipelines are fitted step by
    step, as in the paper, unless --joint is given.

    Example: featcal compare my-pack none temperature "clip(min_accuracy=0.99) | temperature"
    """
    request = Request(**options)
    request.check()
    if request.output is not None:
        check_free(request.output, overwrite=request.force, remedy=OVERWRITE)
    found = compare_pack(Pack.open(request.pack_path), request)
    if request.output is not None:
        with new_file(request.output, overwrite=request.force) as temporary:
            temporary.write_text(_text(found, request, ARROWS), encoding="utf-8")
    elif request.format != "table":
        click.echo(_text(found, request, arrows(sys.stdout.encoding)), nl=False)
        if request.format != "json":  # JSON has the warnings in it
            for line in warnings_of(found):
                click.echo(line, err=True)
        return
    say(notes(found)[0])
    print_comparison(found, request.blocks(found), console())
    if request.output is not None:
        say(f"Wrote {request.output}")
    else:
        flag = "" if request.joint else " --sequential"
        place = shlex.quote(str(request.pack_path))
        say(f"Keep a row with: featcal fit {place} RECIPE{flag} -o cal.safetensors")


def compare_pack(pack: Pack, request: Request) -> Comparison:
    """Fits and scores the recipes of a request on the splits of a pack."""
    recipes = request.chosen_recipes(pack)
    fit_data = pack.split(request.fit_split)
    test_data = None if request.folds else _test_split(pack, request)
    train = None if request.train_split is None else pack.split(request.train_split)
    request.check_folds(fit_data.rows)
    splits = dict.fromkeys((request.fit_split, request.scored_split))
    with progress_bar(), about(pack, *splits):
        found = run_comparison(
            fit_data,
            test_data,
            recipes,
            pack.head,
            mode=request.mode,
            bins=request.bins,
            baseline=request.baseline,
            resamples=request.resamples,
            seed=request.seed,
            folds=request.folds,
            train=train,
        )
    where = {
        "pack": pack.path.resolve().name,
        "fit_split": request.fit_split,
        "test_split": None if request.folds else request.scored_split,
    }
    found = replace(found, settings={**where, **found.settings})
    if request.paper:
        return against_own_base(found)
    return found if request.order is None else found.sorted_by(request.order)


def _test_split(pack: Pack, request: Request) -> PackSplit:
    try:
        return pack.split(request.scored_split)
    except InputError as error:
        remedy = f"or cross-fit {request.fit_split} with --folds 5"
        raise InputError(f"{error}, {remedy}") from error


def _text(found: Comparison, request: Request, arrows: Mapping[str, str]) -> str:
    """The comparison in the format asked for."""
    blocks = request.blocks(found)
    match request.format:
        case "json":
            return json.dumps(found.as_json(), indent=2, allow_nan=False) + "\n"
        case "csv":
            return as_csv(found, request.columns(tuple(COLUMNS)))
        case "markdown":
            return markdown(found, blocks, arrows)
        case "latex":
            return latex(found, blocks)
    file = io.StringIO()
    screen = console(file)
    screen.print(notes(found)[0], soft_wrap=True)
    print_comparison(found, blocks, screen)
    return file.getvalue()


def print_comparison(found: Comparison, blocks: Sequence[Block], console: Console) -> None:
    """The tables, and below them what a reader must know to read them."""
    hidden: dict[str, None] = {}
    everywhere = {INTERVALS, FINDINGS}
    for block in blocks:
        table, left_out = comparison_table(block, console)
        console.print(table)
        hidden |= dict.fromkeys(left_out)
        everywhere &= set(left_out)
    shown = {"intervals": INTERVALS not in everywhere, "findings": FINDINGS not in everywhere}
    _, *legend = notes(found, **shown)
    if _lacks_baseline(found):
        legend.append("No baseline: add none, or --baseline RECIPE.")
    if hidden:
        legend.append(f"Too narrow for: {', '.join(hidden)} (see --metric, or --format csv).")
    for line in [*legend, *warnings_of(found), *idle_steps(found)]:
        console.print(line, soft_wrap=True)


def _lacks_baseline(found: Comparison) -> bool:
    """Whether there could be findings, and are none for want of something to compare with."""
    compared = any(other is not None for other in found.against)
    possible = found.settings.get("resamples") and any(row.recipe != NONE for row in found)
    return bool(possible) and not compared


def warnings_of(found: Comparison) -> list[str]:
    """Every warning of a fit, said once."""
    said = {
        f"Warning: {row.recipe}: {warning}": None
        for row in found
        for report in row.reports
        for warning in report.warnings
    }
    return list(said)


def idle_steps(found: Comparison) -> list[str]:
    """The reason of every no-op, of the first fold that has one."""
    said: dict[tuple[str, str], str] = {}
    for row in found:
        for report in row.reports:
            for step in report.steps:
                if step.noop and not step.warning:
                    said.setdefault((row.recipe, step.name), f"{row.recipe}: {step.message}")
    return list(said.values())


# --- The demo: the shipped network before and after, in a table, in pictures and on a page.


@click.command()
@click.option(
    "--out",
    default=Path("featcal-demo"),
    show_default=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for the pictures and the page; made if it does not exist.",
)
@JSON
def demo(out: Path, as_json: bool) -> None:
    """Watch an overconfident network become honest, on real CIFAR-100 features shipped inside."""
    from featcal.page.html import check_packages

    check_packages()
    pack = demo_pack()
    request = Request(pack.path)
    found = compare_pack(pack, request)
    out.mkdir(parents=True, exist_ok=True)
    diagrams = [ReliabilityDiagram(row.scores.bins, title=row.recipe) for row in found]
    pictures = save_comparison(diagrams, out / "reliability", overwrite=True)
    page = _page(pack, out / "report.html")
    if as_json:
        body = [row.as_json() for row in found]
        files = {"pictures": [str(path) for path in pictures], "report": str(page)}
        print_json({"rows": body, **files})
        return
    _print_demo(pack, found, request.blocks(found), pictures)
    say(f"Report, for a browser: {page}")


def _page(pack: Pack, path: Path) -> Path:
    """The page of `featcal report` about the same network."""
    from featcal.page import Content, render  # jinja2 and plotly, for this alone

    with progress_bar():
        content = Content.of(pack, command="featcal demo")
    with new_file(path, overwrite=True) as temporary:
        temporary.write_text(render(content), encoding="utf-8")
    return path


def _print_demo(pack: Pack, found: Comparison, blocks: list[Block], pictures: list[Path]) -> None:
    raw, n = found[0].scores.metrics, found[0].scores.n
    say(
        f"A network ({pack.manifest.model}) trained on {pack.manifest.dataset} is "
        f"{raw['confidence']:.1%} sure on average and right in {raw['accuracy']:.1%} of {n:,} "
        "test images."
    )
    fitted_on = pack.split("val").rows
    say(f"Each recipe is fitted on {fitted_on:,} other images and scored on the test images:")
    print_comparison(found, blocks, console())
    by_ece, by_nll = (min(found, key=lambda row: row.scores.metrics[k]) for k in ("ece", "nll"))
    best = by_ece.scores.metrics
    say(
        f"Expected calibration error: {raw['ece']:.2%} before, {best['ece']:.2%} after "
        f"{by_ece.recipe}; accuracy {raw['accuracy']:.2%} before, {best['accuracy']:.2%} after."
    )
    say(f"The best likelihood (NLL) here is that of {by_nll.recipe}.")
    for path in pictures:
        say(f"Picture: {path}")
    say(
        "Next, with your own network:\n"
        "  featcal pack import my-features.npz -o my-pack\n"
        "  featcal compare my-pack\n"
        f"or look into this one:\n  featcal pack info {shlex.quote(str(pack.path))}"
    )
