"""`featcal report`: one page about one pack, for a person who has a minute."""

from __future__ import annotations

import os
import shlex
import sys
import threading
import webbrowser
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from featcal.cli.shared import (
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
    progress_bar,
    say,
    split_option,
)
from featcal.core.calibrator import Calibrator
from featcal.core.checks import InputError
from featcal.core.files import check_free, new_file
from featcal.data import Pack
from featcal.report.compare import DEFAULT_RECIPES, parse_all

if TYPE_CHECKING:
    from featcal.page import Content
    from featcal.page.serve import Explorer

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
    from featcal.page import Content, markdown, render
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
        say(f"Wrote {path}")


def _say(content: Content) -> None:
    """The first screen of the page: what to type comes last, after all that speaks against it."""
    summary = content.summary
    say(summary.headline)
    say(f"Should you trust its confidence? {summary.trust}")
    *answers, advice = summary.points
    for point in answers:
        say(f"{point.question} {point.answer}")
    for caution in summary.cautions:
        say(f"Mind: {caution}")
    for note in content.notes:
        say(f"Left out: {note}")
    say(f"{advice.question} {advice.answer}")
    if summary.command:
        say(f"  {summary.command}")


def loaded(paths: Sequence[Path], pack: Pack) -> dict[str, Calibrator]:
    """The calibrators by their files; each once."""
    return {str(path): load_for(path, pack) for path in paths}


def checked_recipes(
    recipes: Sequence[str], pack: Pack, fit_split: str, split: str
) -> tuple[str, ...]:
    """The recipes asked for, else the default ones; refused before any row is looked at.

    What is wrong with a recipe, or with the names of splits, is no fault of the rows of a split.
    """
    from featcal.page.content import check_splits, check_train

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


# --- featcal explore: the report as a page of this machine, with a box for any recipe.


@click.command()
@PACK
@CALIBRATORS
@RECIPES
@click.option(
    "--port", default=0, type=click.IntRange(0, 65535), help="Where to listen; a free one if not."
)
@split_option("test")
@FIT_SPLIT
@BINS
@click.option("--browser/--no-browser", default=True, help="Open the page when it is ready.")
def explore(
    pack_path: Path,
    calibrators: tuple[Path, ...],
    recipes: tuple[str, ...],
    port: int,
    split: str,
    fit_split: str,
    bins: int,
    browser: bool,
) -> None:
    """Look at PACK in a browser, and try any recipe on it.

    The page of "featcal report", with the same recipes and CALIBRATOR files, served to this machine
    alone; what is typed into it is fitted on one split and scored on another while you wait. Ctrl-C
    ends it.

    Example: featcal explore my-pack
    """
    from featcal.page.content import Content
    from featcal.page.html import check_packages, render
    from featcal.page.serve import Explorer, Live

    check_packages()
    pack = Pack.open(pack_path)
    files = loaded(calibrators, pack)
    chosen = checked_recipes(recipes, pack, fit_split, split)
    scored = {"--split": split, "--fit-split": fit_split, "--bins": bins}
    typed = typed_again("explore", pack_path, calibrators, {"--recipe": recipes, **scored})
    with progress_bar(), about(pack, fit_split, split):
        content = Content.of(
            pack, chosen, files, fit=fit_split, test=split, bins=bins, command=typed
        )
    page = render(content, live=True)
    live = Live(content)
    with Explorer(page, live.answer, port, check=live.checked) as explorer:
        say(f"{pack_path} is at {explorer.address}; Ctrl-C ends it.")
        if browser:  # beside the server: a browser in the terminal waits for its page
            threading.Thread(target=webbrowser.open, args=(explorer.address,), daemon=True).start()
        _until_interrupted(explorer)


def _until_interrupted(explorer: Explorer) -> None:
    """Serves; Ctrl-C is how it is meant to end, and no error."""
    try:
        explorer.serve_forever()
    except KeyboardInterrupt:
        say("Stopped.")
        if explorer.one_at_a_time.locked():
            # A fit under way would bring the interpreter down while it ends: leave without it.
            sys.stdout.flush()
            os._exit(0)
