"""`featcal report`: one page about one pack, for a person who has a minute."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from featcal.page import Content

USUAL = {"--split": "test", "--fit-split": "val", "--bins": 15}
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
CALIBRATORS = click.argument(
    "calibrators", metavar="[CALIBRATOR]...", nargs=-1, type=click.Path(path_type=Path)
)


@click.command()
@PACK
@CALIBRATORS
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
    chosen = checked_recipes(recipes, pack, fit_split, split)
    options = {"-o": output, "--recipe": recipes, "--md": md}
    scored = {"--split": split, "--fit-split": fit_split, "--bins": bins}
    typed = typed_again("report", pack_path, calibrators, {**options, **scored})
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
    _say(content)
    for path in filter(None, (output, md)):
        tables.say(f"Wrote {path}")


def _say(content: Content) -> None:
    """The first screen of the page: what to type comes last, after all that speaks against it."""
    summary = content.summary
    tables.say(summary.headline)
    tables.say(f"Should you trust its confidence? {summary.trust}")
    *answers, advice = summary.points
    for point in answers:
        tables.say(f"{point.question} {point.answer}")
    for caution in summary.cautions:
        tables.say(f"Mind: {caution}")
    for note in content.notes:
        tables.say(f"Left out: {note}")
    tables.say(f"{advice.question} {advice.answer}")
    if summary.command:
        tables.say(f"  {summary.command}")


def loaded(paths: Sequence[Path], pack: Pack) -> dict[str, Calibrator]:
    """The calibrators by their files; each once."""
    return {str(path): load_for(path, pack) for path in paths}


def checked_recipes(
    recipes: Sequence[str], pack: Pack, fit_split: str, split: str
) -> tuple[str, ...]:
    """The recipes asked for, else the default ones; refused before any row is looked at.

    What is wrong with a recipe, or with the names of splits, is no fault of the rows of a split.
    """
    from featcal.page.content import check_splits
    from featcal.page.entries import check_train

    check_splits(fit_split, split)
    for name in (fit_split, split):
        pack.split(name)
    for calibrator in parse_all(recipes) if recipes else ():
        if calibrator is not None:
            check_recipe(calibrator, pack)
            check_train(calibrator)
    return tuple(recipes) or DEFAULT_RECIPES


def typed_again(
    name: str, pack_path: Path, calibrators: Sequence[Path], options: Mapping[str, Any]
) -> str:
    """The command line, without what is the default anyway.

    Args:
        name: of the command.
        pack_path: as it was typed.
        calibrators: likewise.
        options: by their names; several values are given one by one, None is not.
    """
    words: list[Any] = ["featcal", name, pack_path, *calibrators]
    for option, value in options.items():
        if value != USUAL.get(option):
            for one in value if isinstance(value, tuple) else (value,):
                words += [option, one]
    return shlex.join(map(str, words))


def _write(path: Path, text: str, *, force: bool) -> None:
    with new_file(path, overwrite=force) as temporary:
        temporary.write_text(text, encoding="utf-8")
