"""featcal report and explore: one page about one pack, as a file or served to this machine."""

from __future__ import annotations

import os
import shlex
import sys
import threading
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from featcal.cli import app
from featcal.cli.fit import check_recipe, load_for
from featcal.core.checks import InputError
from featcal.core.files import check_free, new_file
from featcal.data import Pack
from featcal.report.compare import DEFAULT_RECIPES, parse_all

if TYPE_CHECKING:
    from featcal.page import Content

USUAL = {"--split": "test", "--fit-split": "val", "--bins": 15}
FIT_SPLIT = click.option("--fit-split", default="val", help="The split recipes are fitted on.")
RECIPES = click.option(
    "--recipe",
    "recipes",
    multiple=True,
    metavar="TEXT",
    help="Show this recipe; repeat for more.  [default: those of featcal compare]",
)
CALIBRATORS = click.argument("calibrators", metavar="[CALIBRATOR]...", nargs=-1, type=app.PATH)


@click.command()
@app.PACK
@CALIBRATORS
@app.output_option("The .html file to write.")
@RECIPES
@click.option("--md", type=app.PATH, help="Also write a Markdown summary.")
@app.split_option("test")
@FIT_SPLIT
@app.BINS
@app.FORCE
@app.JSON
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
    from featcal.page import markdown, render
    from featcal.page.html import check_packages

    check_packages()
    for path in filter(None, (output, md)):
        check_free(path, overwrite=force, remedy=app.OVERWRITE)
    if md is not None and md.absolute() == output.absolute():
        raise InputError(f"-o and --md both name {output}: give each a file of its own")
    options = {"-o": output, "--recipe": recipes, "--md": md}
    scored = {"--split": split, "--fit-split": fit_split, "--bins": bins}
    content = _content("report", pack_path, calibrators, {**options, **scored})
    page = render(content)
    files = {output: page} if md is None else {output: page, md: markdown(content)}
    for path, text in files.items():
        with new_file(path, overwrite=force) as temporary:
            temporary.write_text(text, encoding="utf-8")
    summary = content.summary
    if as_json:
        told = {"output": str(output), "md": None if md is None else str(md)}
        rows = content.comparison.as_json()
        app.print_json({**told, "bytes": len(page.encode()), "summary": summary.as_json(), **rows})
        return
    # The first screen of the page: what to type comes last, after all that speaks against it.
    app.say(summary.headline)
    app.say(f"Should you trust its confidence? {summary.trust}")
    *answers, advice = summary.points
    for point in answers:
        app.say(f"{point.question} {point.answer}")
    for caution in summary.cautions:
        app.say(f"Mind: {caution}")
    for note in content.notes:
        app.say(f"Left out: {note}")
    app.say(f"{advice.question} {advice.answer}")
    if summary.command:
        app.say(f"  {summary.command}")
    for path in files:
        app.say(f"Wrote {path}")


def _content(
    name: str, pack_path: Path, calibrators: tuple[Path, ...], options: dict[str, Any]
) -> Content:
    """The content of the page of a command, given with these options."""
    from featcal.page import Content
    from featcal.page.content import check_splits, check_train

    pack = Pack.open(pack_path)
    files = {str(path): load_for(path, pack) for path in calibrators}
    # Refused before any row is looked at: what is wrong here is no fault of the rows of a split.
    fit_split, split, recipes = options["--fit-split"], options["--split"], options["--recipe"]
    check_splits(fit_split, split)
    for part in (fit_split, split):
        pack.split(part)
    for calibrator in parse_all(recipes) if recipes else ():
        if calibrator is not None:
            check_recipe(calibrator, pack)
            check_train(calibrator)
    # The command as typed, without what is the default anyway.
    words: list[Any] = ["featcal", name, pack_path, *calibrators]
    for option, value in options.items():
        if value != USUAL.get(option):
            for one in value if isinstance(value, tuple) else (value,):
                words += [option, one]
    with app.progress_bar(), app.about(pack, fit_split, split):
        return Content.of(
            pack,
            recipes or DEFAULT_RECIPES,
            files,
            fit=fit_split,
            test=split,
            bins=options["--bins"],
            command=shlex.join(map(str, words)),
        )


@click.command()
@app.PACK
@CALIBRATORS
@RECIPES
@click.option(
    "--port",
    default=0,
    show_default=False,
    type=click.IntRange(0, 65535),
    help="Where to listen; a free one if not.",
)
@app.split_option("test")
@FIT_SPLIT
@app.BINS
@click.option(
    "--browser/--no-browser",
    default=True,
    show_default=False,
    help="Open the page when it is ready.",
)
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
    from featcal.page.html import check_packages, render
    from featcal.page.serve import Explorer, Live

    check_packages()
    scored = {"--split": split, "--fit-split": fit_split, "--bins": bins}
    content = _content("explore", pack_path, calibrators, {"--recipe": recipes, **scored})
    page, live = render(content, live=True), Live(content)
    with Explorer(page, live, port) as explorer:
        app.say(f"{pack_path} is at {explorer.address}; Ctrl-C ends it.")
        if browser:  # beside the server: a browser in the terminal waits for its page
            threading.Thread(target=webbrowser.open, args=(explorer.address,), daemon=True).start()
        try:
            explorer.serve_forever()
        except KeyboardInterrupt:  # how it is meant to end, and no error
            app.say("Stopped.")
            if explorer.one_at_a_time.locked():
                # A fit under way would bring the interpreter down while it ends: leave without it.
                sys.stdout.flush()
                os._exit(0)
