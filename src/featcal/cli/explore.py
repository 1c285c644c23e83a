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
from featcal.cli.commands import PACK, about, split_option
from featcal.data import Pack

if TYPE_CHECKING:
    from featcal.page.serve import Explorer


@click.command()
@PACK
@click.option(
    "--port", default=0, type=click.IntRange(0, 65535), help="Where to listen; a free one if not."
)
@click.option("--fit-split", default="val", show_default=True, help="The split to fit on.")
@split_option("test")
@click.option("--browser/--no-browser", default=True, help="Open the page when it is ready.")
def explore(pack_path: Path, port: int, fit_split: str, split: str, browser: bool) -> None:
    """Look at PACK in a browser, and try any recipe on it.

    The page of "featcal report", served to this machine alone; what is typed into it is fitted on
    one split and scored on another while you wait. Ctrl-C ends it.

    Example: featcal explore my-pack
    """
    from featcal.page.content import Content
    from featcal.page.html import check_packages, render
    from featcal.page.live import Live
    from featcal.page.serve import Explorer

    check_packages()
    pack = Pack.open(pack_path)
    with progress_bar(), about(pack, fit_split, split):
        content = Content.of(pack, fit=fit_split, test=split)
    page = render(content, live=True)
    with Explorer(page, Live(content).answer, port) as explorer:
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
