"""featcal explore: the report as a page of this machine, with a box for any recipe."""

from __future__ import annotations

import os
import sys
import threading
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

import click

from featcal.cli import tables
from featcal.cli.bar import progress_bar
from featcal.cli.commands import BINS, PACK, about, split_option
from featcal.cli.report import (
    CALIBRATORS,
    FIT_SPLIT,
    RECIPES,
    checked_recipes,
    loaded,
    typed_again,
)
from featcal.data import Pack

if TYPE_CHECKING:
    from featcal.page.serve import Explorer


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
    from featcal.page.live import Live
    from featcal.page.serve import Explorer

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
        tables.say(f"{pack_path} is at {explorer.address}; Ctrl-C ends it.")
        if browser:  # beside the server: a browser in the terminal waits for its page
            threading.Thread(target=webbrowser.open, args=(explorer.address,), daemon=True).start()
        _until_interrupted(explorer)


def _until_interrupted(explorer: Explorer) -> None:
    """Serves; Ctrl-C is how it is meant to end, and no error."""
    try:
        explorer.serve_forever()
    except KeyboardInterrupt:
        tables.say("Stopped.")
        if explorer.one_at_a_time.locked():
            # A fit under way would bring the interpreter down while it ends: leave without it.
            sys.stdout.flush()
            os._exit(0)
