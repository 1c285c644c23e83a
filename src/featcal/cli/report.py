"""featcal report and explore: the page about a pack."""

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

if TYPE_CHECKING:
    from featcal.page import Content

USUAL = {"--test-split": "test", "--fit-split": "val", "--bins": 15}
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
@app.FIT_SPLIT
@app.TEST_SPLIT
@app.SEQUENTIAL
@app.BINS
@app.FORCE
@app.answered
def report(output: Path, md: Path | None, force: bool, **asked: Any) -> app.Answer:  # noqa: ANN401
    """Write one page about PACK: may its confidence be trusted, what helps, and what it costs.

    Recipes are fitted on one split and scored on another; a CALIBRATOR is scored as it is. The page
    is one file that needs no network.

    Example: featcal report my-pack -o report.html
    """
    from featcal.page import markdown
    from featcal.page.html import check_packages
    from featcal.page.write import check_page, write_page

    check_packages()
    check_page(output)
    for path in filter(None, (output, md)):
        check_free(path, overwrite=force)
    if md is not None and md.absolute() == output.absolute():
        raise InputError(f"-o and --md both name {output}: give each a file of its own")
    content = _content("report", output=output, md=md, **asked)
    page = write_page(content, output, overwrite=force)
    if md is not None:
        with new_file(md, overwrite=force) as temporary:
            temporary.write_text(markdown(content), encoding="utf-8")
    summary = content.summary
    told: dict[str, Any] = {"output": str(output), "md": None if md is None else str(md)}
    told |= {"bytes": len(page.encode()), "summary": summary.as_json()}
    # The first screen of the page: what to type comes last, after all that speaks against it.
    *answers, advice = (f"{point.question} {point.answer}" for point in summary.points)
    return {**told, **content.comparison.as_json()}, [
        summary.headline,
        f"Should you trust its confidence? {summary.trust}",
        *answers,
        *(f"Mind: {caution}" for caution in summary.cautions),
        *(f"Left out: {note}" for note in content.notes),
        advice,
        *([f"  {summary.command}"] if summary.command else []),
        *(f"Wrote {path}" for path in (output, md) if path is not None),
    ]


def _content(
    command: str,
    *,
    pack_path: Path,
    calibrators: tuple[Path, ...],
    recipes: tuple[str, ...],
    fit_split: str,
    test_split: str,
    sequential: bool,
    bins: int,
    output: Path | None = None,
    md: Path | None = None,
) -> Content:
    """The content of the page of a command."""
    from featcal.data import Pack
    from featcal.page import Content
    from featcal.page.content import check_splits, check_train
    from featcal.report.compare import DEFAULT_RECIPES, parse_all

    pack = Pack.open(pack_path)
    files = {str(path): load_for(path, pack) for path in calibrators}
    # Refused before any row is looked at: what is wrong here is no fault of the rows of a split.
    check_splits(pack, fit_split, test_split)
    for calibrator in parse_all(recipes) if recipes else ():
        if calibrator is not None:
            check_recipe(calibrator, pack)
            check_train(calibrator)
    # The command as typed, without what is the default anyway.
    words = ["featcal", command, pack_path, *calibrators, *(["-o", output] if output else [])]
    words += [word for recipe in recipes for word in ("--recipe", recipe)]
    given = {"--md": md, "--fit-split": fit_split, "--test-split": test_split, "--bins": bins}
    for option, value in given.items():
        words += [option, value] if value != USUAL.get(option) else []
    words += ["--sequential"] * sequential
    with app.progress_bar(), app.about(pack, fit_split, test_split):
        return Content.of(
            pack,
            recipes or DEFAULT_RECIPES,
            files,
            fit=fit_split,
            test=test_split,
            mode=app.mode_of(sequential),
            bins=bins,
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
@app.FIT_SPLIT
@app.TEST_SPLIT
@app.SEQUENTIAL
@app.BINS
@click.option(
    "--browser/--no-browser",
    default=True,
    show_default=False,
    help="Open the page when it is ready.",
)
def explore(port: int, browser: bool, **asked: Any) -> None:  # noqa: ANN401 - as in _content
    """Look at PACK in a browser, and try any recipe on it.

    The page of "featcal report", with the same recipes and CALIBRATOR files, served to this machine
    alone; what is typed into it is fitted on one split and scored on another while you wait. Ctrl-C
    ends it.

    Example: featcal explore my-pack
    """
    from featcal.page.html import check_packages, render
    from featcal.page.serve import Explorer, Live

    check_packages()
    content = _content("explore", **asked)
    page, live = render(content, live=True), Live(content)
    with Explorer(page, live, port) as explorer:
        app.say(f"{asked['pack_path']} is at {explorer.address}; Ctrl-C ends it.")
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
