"""`featcal report`: one page about one pack, for a person who has a minute."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from featcal.cli import tables
from featcal.cli.bar import progress_bar
from featcal.cli.commands import (
    BINS,
    FORCE,
    JSON,
    OVERWRITE,
    PACK,
    about,
    check_recipe,
    load_for,
    output_option,
    print_json,
    split_option,
)
from featcal.core.calibrator import Calibrator
from featcal.core.disk import check_free, new_file
from featcal.core.errors import InputError
from featcal.data import Pack
from featcal.report.comparison import DEFAULT_RECIPES, parse_all

FIT_SPLIT = click.option(
    "--fit-split", default="val", show_default=True, help="The split recipes are fitted on."
)
RECIPES = click.option(
    "--recipe",
    "recipes",
    multiple=True,
    metavar="TEXT",
    help="Show this recipe; repeat for more.  [default: those of featcal compare]",
)


@click.command()
@PACK
@click.argument("calibrators", metavar="[CALIBRATOR]...", nargs=-1, type=click.Path(path_type=Path))
@output_option("The .html file to write.")
@RECIPES
@click.option("--md", type=click.Path(path_type=Path), help="Also write a Markdown summary.")
@split_option("test")
@FIT_SPLIT
@BINS
@FORCE
@JSON
def report(
    pack_path: Path,
    calibrators: tuple[Path, ...],
    output: Path,
    recipes: tuple[str, ...],
    md: Path | None,
    split: str,
    fit_split: str,
    bins: int,
    force: bool,
    as_json: bool,
) -> None:
    """Write one page about PACK: may its confidence be trusted, what helps, and what it costs.

    Recipes are fitted on one split and scored on another; a CALIBRATOR is scored as it is. The page
    is one file that needs no network.

    Example: featcal report my-pack -o report.html
    """
    from featcal.page import Content, markdown, render  # jinja2 and plotly, for this command alone
    from featcal.page.html import check_packages

    check_packages()
    for path in filter(None, (output, md)):
        check_free(path, overwrite=force, remedy=OVERWRITE)
    if md is not None and md.absolute() == output.absolute():
        raise InputError(f"-o and --md both name {output}: give each a file of its own")
    pack = Pack.open(pack_path)
    files = loaded(calibrators, pack)
    chosen = checked_recipes(recipes, pack)
    typed = typed_again(pack_path, calibrators, output, recipes, md, split, fit_split, bins)
    with progress_bar(), about(pack, fit_split, split):
        content = Content.of(
            pack, chosen, files, fit=fit_split, test=split, bins=bins, command=typed
        )
    page = render(content)
    _write(output, page, force=force)
    if md is not None:
        _write(md, markdown(content), force=force)
    if as_json:
        told = {"output": str(output), "md": None if md is None else str(md)}
        rows = content.comparison.as_json()
        print_json(
            {**told, "bytes": len(page.encode()), "summary": content.summary.as_json(), **rows}
        )
        return
    tables.say(content.summary.headline)
    for point in content.summary.points:
        tables.say(f"{point.question} {point.answer}")
    if content.summary.command:
        tables.say(f"  {content.summary.command}")
    for path in filter(None, (output, md)):
        tables.say(f"Wrote {path}")


def loaded(paths: Sequence[Path], pack: Pack) -> dict[str, Calibrator]:
    """The calibrators by their files; each once."""
    return {str(path): load_for(path, pack) for path in paths}


def checked_recipes(recipes: Sequence[str], pack: Pack) -> tuple[str, ...]:
    """The recipes asked for, refused where the pack cannot serve them; else the default ones."""
    for calibrator in parse_all(recipes) if recipes else ():
        if calibrator is not None:
            check_recipe(calibrator, pack)
    return tuple(recipes) or DEFAULT_RECIPES


def typed_again(
    pack_path: Path,
    calibrators: Sequence[Path],
    output: Path,
    recipes: Sequence[str],
    md: Path | None,
    split: str,
    fit_split: str,
    bins: int,
) -> str:
    """The command line, without what is the default anyway."""
    words: list[Any] = ["featcal", "report", pack_path, *calibrators, "-o", output]
    for recipe in recipes:
        words += ["--recipe", recipe]
    given = (("--md", md, None), ("--split", split, "test"), ("--fit-split", fit_split, "val"))
    for name, value, usual in (*given, ("--bins", bins, 15)):
        words += [] if value == usual else [name, value]
    return shlex.join(map(str, words))


def _write(path: Path, text: str, *, force: bool) -> None:
    with new_file(path, overwrite=force) as temporary:
        temporary.write_text(text, encoding="utf-8")
