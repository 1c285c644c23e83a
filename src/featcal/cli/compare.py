"""`featcal compare`: recipes side by side, with intervals, in the format asked for."""

from __future__ import annotations

import io
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import click
from rich.console import Console

from featcal.cli import compare_table, tables
from featcal.cli.bar import progress_bar
from featcal.cli.commands import (
    BINS,
    FORCE,
    JSON,
    OVERWRITE,
    PACK,
    about,
    output_option,
    with_options,
)
from featcal.cli.compare_request import FORMATS, GIVEN, Request
from featcal.cli.compare_table import FINDINGS, INTERVALS
from featcal.core.disk import check_free, new_file
from featcal.core.errors import InputError
from featcal.data import Pack, PackSplit
from featcal.report import render
from featcal.report.blocks import Block, against_own_base
from featcal.report.columns import COLUMNS
from featcal.report.comparison import NONE, RESAMPLES
from featcal.report.comparison import compare as run_comparison
from featcal.report.render import ARROWS
from featcal.report.resample import checked_resamples
from featcal.report.rows import Comparison


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
        click.echo(_text(found, request, compare_table.arrows(sys.stdout.encoding)), nl=False)
        if request.format != "json":  # JSON has the warnings in it
            for line in warnings_of(found):
                click.echo(line, err=True)
        return
    tables.say(render.notes(found)[0])
    print_comparison(found, request.blocks(found), tables.console())
    if request.output is not None:
        tables.say(f"Wrote {request.output}")
    else:
        flag = "" if request.joint else " --sequential"
        place = shlex.quote(str(request.pack_path))
        tables.say(f"Keep a row with: featcal fit {place} RECIPE{flag} -o cal.safetensors")


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
            return render.as_csv(found, request.columns(tuple(COLUMNS)))
        case "markdown":
            return render.markdown(found, blocks, arrows)
        case "latex":
            return render.latex(found, blocks)
    file = io.StringIO()
    console = tables.console(file)
    console.print(render.notes(found)[0], soft_wrap=True)
    print_comparison(found, blocks, console)
    return file.getvalue()


def print_comparison(found: Comparison, blocks: Sequence[Block], console: Console) -> None:
    """The tables, and below them what a reader must know to read them."""
    hidden: dict[str, None] = {}
    everywhere = {INTERVALS, FINDINGS}
    for block in blocks:
        table, left_out = compare_table.comparison_table(block, console)
        console.print(table)
        hidden |= dict.fromkeys(left_out)
        everywhere &= set(left_out)
    shown = {"intervals": INTERVALS not in everywhere, "findings": FINDINGS not in everywhere}
    _, *legend = render.notes(found, **shown)
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
