"""featcal compare and demo: recipes side by side, with intervals, in the format asked for."""

from __future__ import annotations

import io
import json
import math
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, final

import click

from featcal.cli import app
from featcal.cli.fit import check_recipe, check_train
from featcal.core.checks import InputError
from featcal.core.files import check_free, new_file
from featcal.core.listed import METRICS, RESAMPLES
from featcal.core.table import Table

if TYPE_CHECKING:
    from featcal.core.batch import Chunked
    from featcal.data import Pack, PackSplit
    from featcal.report.compare import Comparison
    from featcal.report.tables import Block

FORMATS = {"table": ".txt", "markdown": ".md", "csv": ".csv", "latex": ".tex", "json": ".json"}
GIVEN = "given"  # the order in which the recipes were given
NAMES = ", ".join(METRICS)


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
        recipe, own = next(iter(self.recipes), ""), {"baseline": self.baseline, "sort": self.sort}
        given = [repr(recipe)] * bool(recipe) + [f"--{key} {own[key]}" for key in own if own[key]]
        if self.paper and given:
            raise InputError(
                "--paper brings its own recipes and order, and compares each method with itself "
                f"after clip: leave out --paper, or {given[0]}"
            )
        if self.every and (self.paper or recipe):
            raise InputError(f"--all names every method: leave it out, or {recipe or '--paper'}")
        if self.output is not None and app.is_first():
            check_free(self.output, overwrite=self.force)

    def run(self) -> Comparison:
        """Fits and scores the recipes, each of which the pack can serve."""
        from featcal.data import Pack
        from featcal.report import tables
        from featcal.report.compare import compare as run_comparison
        from featcal.report.compare import every_recipe, parse_all, recipe_text, usual_recipes

        pack = Pack.open(self.pack_path)
        recipes = tables.PAPER_RECIPES if self.paper else self.recipes
        if self.every:
            recipes = every_recipe(
                classes=pack.manifest.classes,
                features=pack.manifest.head is not None,
                train=self.train_split is not None,
            )
        if not recipes:
            recipes = usual_recipes(features=pack.manifest.head is not None)
        base = self.baseline
        if base is not None and recipe_text(base) not in map(recipe_text, recipes):
            recipes = (base, *recipes)
        for calibrator in filter(None, parse_all(recipes)):
            check_recipe(calibrator, pack, train=self.train_split is not None)
        fit_data, test_data, test_split = self.rows(pack, self.fit_split), None, None
        if not self.folds:
            test_split = self.scored_split
            try:
                test_data = self.rows(pack, test_split)
            except InputError as error:
                raise InputError(
                    f"{error}, or cross-fit {self.fit_split} with --folds 5"
                ) from error
        train = None if self.train_split is None else self.rows(pack, self.train_split)
        options = ("bins", "baseline", "resamples", "seed", "folds")
        how: dict[str, Any] = {key: getattr(self, key) for key in options}
        how |= {"mode": app.mode_of(self.sequential), "train": train}
        with (
            app.progress_bar(),
            app.about(pack, *dict.fromkeys((self.fit_split, self.scored_split))),
        ):
            head = app.head_on(pack, self.device)
            found = run_comparison(fit_data, test_data, recipes, head, **how)
        where = {"pack": pack.path.resolve().name, "fit_split": self.fit_split}
        found = replace(found, settings={**where, "test_split": test_split, **found.settings})
        if self.paper:
            return tables.against_own_base(found)
        order = self.sort or (self.metrics[0] if self.metrics else GIVEN)
        return found if order == GIVEN else found.sorted_by(order)

    def rows(self, pack: Pack, split: str) -> Chunked | PackSplit:
        """The rows of a split, as far as this process reads them."""
        return app.own(pack.split(split), self.device)

    def text(self, found: Comparison) -> str:
        """The comparison in the format asked for."""
        from featcal.metrics.columns import columns
        from featcal.report import tables

        blocks = self.blocks(found)
        match self.format:
            case "json":
                return json.dumps(found.as_json(), indent=2, allow_nan=False) + "\n"
            case "csv":
                return tables.as_csv(found, columns(self.metrics or METRICS))
            case "markdown":
                return tables.markdown(found, blocks)
            case "latex":
                return tables.latex(found, blocks)
        file = io.StringIO()
        app.say(*lines_of(found, blocks), file=file)
        return file.getvalue()

    def blocks(self, found: Comparison) -> list[Block]:
        """The layout of the tables."""
        from featcal.metrics.columns import USUAL, columns
        from featcal.report import tables

        if self.paper:
            return tables.paper_blocks(found, columns(self.metrics or tables.PAPER_METRICS))
        return [tables.comparison_block(found, columns(self.metrics or USUAL))]


@click.command()
@app.shared
@app.PACK
@click.argument("recipes", metavar="[RECIPE]...", nargs=-1)
@app.FIT_SPLIT
@click.option("--test-split", help="The split to score.  [default: test]")
@app.TRAIN_SPLIT
@app.SEQUENTIAL
@click.option("--folds", type=click.IntRange(min=2), help="Cross-fit on the fit split alone.")
@click.option("--all", "every", is_flag=True, help="Every method that can be fitted to PACK.")
@click.option(
    "--paper", is_flag=True, help="The paper's methods, each alone and after clip, step by step."
)
@click.option(
    "--baseline", metavar="RECIPE", help="What the others are held against.  [default: none]"
)
@click.option(
    "--metric",
    "metrics",
    multiple=True,
    type=click.Choice(METRICS, case_sensitive=False),
    metavar="NAME",
    help=f"A column to show; repeat for more. Rows are sorted by the first. One of: {NAMES}.",
)
@click.option(
    "--sort",
    type=click.Choice([*METRICS, GIVEN], case_sensitive=False),
    metavar="NAME",
    help=f'Sort by this metric instead, or keep the order as "given". One of: {NAMES}.',
)
@click.option(
    "--resamples",
    default=RESAMPLES,
    help="Resamples behind the intervals; 0 for none.",
)
@click.option("--seed", default=0, type=app.FROM_ZERO, help="Seed of resamples and folds.")
@app.BINS
@app.DEVICE
@app.MEMORY
@app.format_option(FORMATS, "Of the output.  [default: table, or what the name of the file tells]")
@app.JSON
@app.output_option("Also write this file.", required=False)
@app.FORCE
def compare(**options: Any) -> None:  # noqa: ANN401 - Request names them and their types
    """Fit each RECIPE on val and score it on test, with 95 % intervals.

    Without RECIPEs: none, auto, temperature, clip and clip | temperature. Pipelines are fitted
    jointly unless --sequential or --paper is given.

    Example: featcal compare my-pack none temperature "clip(min_accuracy=0.99) | temperature"
    """
    options["metrics"] = tuple(dict.fromkeys(options["metrics"]))  # each once
    options["sequential"] |= options["paper"]  # whose protocol it is
    request = Request(**options)
    request.check()
    found = request.run()
    if not app.is_first():
        return
    if request.output is not None:
        with new_file(request.output, overwrite=request.force) as temporary:
            temporary.write_text(request.text(found), encoding="utf-8")
        end = f"Wrote {request.output}"
    elif request.format != "table":
        click.echo(app.printable(request.text(found), sys.stdout.encoding), nl=False)
        if request.format != "json":  # JSON has the warnings in it
            for line in warnings_of(found):
                click.echo(line, err=True)
        return
    else:
        flag = " --sequential" if request.sequential else ""
        place = shlex.quote(str(request.pack_path))
        end = f"Keep a row with: featcal fit {place} RECIPE{flag} -o cal.safetensors"
    app.say(*lines_of(found, request.blocks(found)), end)


def lines_of(found: Comparison, blocks: list[Block]) -> list[app.Line]:
    """The tables with how they came about above them, and below what a reader must know."""
    from featcal.core.text import NONE
    from featcal.report.tables import notes

    title, *legend = notes(found, blocks)
    # Where there could be findings, and are none for want of something to compare with.
    compared = any(other is not None for other in found.against)
    others = any(row.recipe != NONE for row in found)
    if found.settings.get("resamples") and others and not compared:
        legend.append("No baseline: add none, or --baseline RECIPE.")
    idle: dict[tuple[str, str], str] = {}  # the reason of every no-op, of its first fold
    for row, step in ((r, step) for r in found for report in r.reports for step in report.steps):
        if step.noop and not step.warning:
            idle.setdefault((row.recipe, step.name), f"{row.recipe}: {step.message}")
    return [title, *map(_table, blocks), *legend, *warnings_of(found), *idle.values()]


def warnings_of(found: Comparison) -> list[str]:
    """Every warning of a fit, said once."""
    pairs = (
        (row.recipe, text) for row in found for report in row.reports for text in report.warnings
    )
    few = next((report.few_rows for row in found for report in row.reports if report.few_rows), "")
    told = dict.fromkeys(f"Warning: {recipe}: {text}" for recipe, text in pairs)
    return [*told, *([f"Warning: {few}"] if few else [])]


def _table(block: Block) -> Table:
    """One line per recipe: values with their findings, and below them their intervals.

    The finding stands before the value, so that the numbers of a column stay below each other;
    without an interval there is room for it below.
    """
    from featcal.report.tables import BETWEEN, finding_text

    fitted = any(line.fitted for line in block.lines)
    timed = not all(math.isnan(line.seconds) for line in block.lines)
    rows = []
    for line in block.lines:
        row = [line.label]
        for cell in line.cells:
            value = cell.column.text(cell.value)
            value = f"**{value}**" if cell.best else value
            found = finding_text(cell)
            parts = [f"{found} {value}".lstrip(), cell.range] if cell.range else [value, found]
            row.append("\n".join(filter(None, parts)))
        # Where cells have two lines anyway, so may a pipeline of two steps.
        steps = line.fitted.split(BETWEEN) if "\n" in "".join(row) else [line.fitted]
        row += ["\n".join(steps)] * fitted + [f"{line.seconds:.2f}"] * timed
        rows.append(tuple(row))
    headings = (block.labels, *block.marked, *["fitted"] * fitted, *["seconds"] * timed)
    # Of the paper's table, alone and after clip: neither means anything without the other.
    return Table(block.title, headings, tuple(rows), together=2 if block.title else 1)


@click.command()
@app.output_option(
    "Folder for the pictures and the page; made if it does not exist.",
    required=False,
    default=Path("featcal-demo"),
    type=click.Path(path_type=Path, file_okay=False),
)
@app.answered
def demo(output: Path) -> app.Answer:
    """Watch an overconfident network become honest, on real CIFAR-100 features shipped inside."""
    from featcal.core.text import NONE
    from featcal.data.pack import demo_pack
    from featcal.metrics.columns import USUAL, columns
    from featcal.page import Content, render  # jinja2 and plotly, for this alone
    from featcal.page.html import check_packages
    from featcal.report import Comparison, ReliabilityDiagram, save_comparison
    from featcal.report.tables import comparison_block

    check_packages()
    pack = demo_pack()
    with app.progress_bar():
        content = Content.of(pack, command="featcal demo")
    # Without intervals, which the page has: a screen is narrow.
    rows = [replace(r, scores=replace(r.scores, replicates={})) for r in content.comparison]
    settings = {**content.comparison.settings, "resamples": 0}
    found = Comparison(tuple(rows), (None,) * len(rows), settings)
    output.mkdir(parents=True, exist_ok=True)
    diagrams = [ReliabilityDiagram(row.scores.bins, title=row.recipe) for row in found]
    pictures = save_comparison(diagrams, output / "reliability", overwrite=True)
    page = output / "report.html"
    with new_file(page, overwrite=True) as temporary:
        temporary.write_text(render(content), encoding="utf-8")
    by_name = {row.recipe: row.scores.metrics for row in found}
    raw, own, paper = (by_name[recipe] for recipe in (NONE, "auto", "clip"))
    (made,) = (report.choice for row in found for report in row.reports if report.choice)
    files = {"pictures": [str(path) for path in pictures], "report": str(page)}
    return {"rows": [row.as_json() for row in found], **files}, [
        f"A network ({pack.manifest.model}) trained on {pack.manifest.dataset} is "
        f"{raw['confidence']:.1%} sure on average and right in {raw['accuracy']:.1%} of "
        f"{found[0].scores.n:,} test images.",
        f"Each recipe is fitted on {pack.split('val').rows:,} other images and scored on these:",
        *lines_of(found, [comparison_block(found, columns(USUAL))])[1:],
        f"featcal's own choice (auto) is {made.values.get('recipe', NONE)} here: expected "
        f"calibration error {raw['ece']:.2%} before, {own['ece']:.2%} after; NLL {raw['nll']:.4f} "
        f"before, {own['nll']:.4f} after; accuracy {raw['accuracy']:.2%} before, "
        f"{own['accuracy']:.2%} after.",
        f"The paper's clip: calibration error {paper['ece']:.2%}, NLL "
        f"{paper['nll']:.4f}, accuracy {paper['accuracy']:.2%}.",
        *(f"Picture: {path}" for path in pictures),
        "Next, with your own network:\n"
        "  featcal pack import my-features.npz -o my-pack\n"
        "  featcal fit my-pack auto -o cal.safetensors\n"
        "  featcal compare my-pack\n"
        f"or look into this one:\n  featcal pack info {shlex.quote(str(pack.path))}",
        f"Report, for a browser: {page}",
    ]
