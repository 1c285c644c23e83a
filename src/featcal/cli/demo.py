"""The demo: the shipped network before and after, in a table, in pictures and on a page."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from featcal.cli import tables
from featcal.cli.bar import progress_bar
from featcal.cli.commands import JSON, print_json
from featcal.cli.compare import compare_pack, print_comparison
from featcal.cli.compare_request import Request
from featcal.core.disk import new_file
from featcal.data import Pack
from featcal.data.demo import demo_pack
from featcal.report.blocks import Block
from featcal.report.diagram import ReliabilityDiagram, save_comparison
from featcal.report.rows import Comparison


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
    tables.say(f"Report, for a browser: {page}")


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
    tables.say(
        f"A network ({pack.manifest.model}) trained on {pack.manifest.dataset} is "
        f"{raw['confidence']:.1%} sure on average and right in {raw['accuracy']:.1%} of {n:,} "
        "test images."
    )
    fitted_on = pack.split("val").rows
    tables.say(
        f"Each recipe is fitted on {fitted_on:,} other images and scored on the test images:"
    )
    print_comparison(found, blocks, tables.console())
    by_ece, by_nll = (min(found, key=lambda row: row.scores.metrics[k]) for k in ("ece", "nll"))
    best = by_ece.scores.metrics
    tables.say(
        f"Expected calibration error: {raw['ece']:.2%} before, {best['ece']:.2%} after "
        f"{by_ece.recipe}; accuracy {raw['accuracy']:.2%} before, {best['accuracy']:.2%} after."
    )
    tables.say(f"The best likelihood (NLL) here is that of {by_nll.recipe}.")
    for path in pictures:
        tables.say(f"Picture: {path}")
    tables.say(
        "Next, with your own network:\n"
        "  featcal pack import my-features.npz -o my-pack\n"
        "  featcal compare my-pack\n"
        f"or look into this one:\n  featcal pack info {shlex.quote(str(pack.path))}"
    )
