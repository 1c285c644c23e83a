"""The page from Python, of a model with its loaders or of a pack: `featcal.report` is this."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from featcal.core.checks import InputError
from featcal.core.files import check_free, new_file
from featcal.data.collect import Unpack
from featcal.data.pack import Pack
from featcal.data.resume import collect_pack
from featcal.heads.attach import check_uncalibrated
from featcal.page.content import Content
from featcal.page.html import check_packages, render
from featcal.report.compare import DEFAULT_RECIPES

ENDINGS = (".html", ".htm")


def check_page(path: Path) -> None:
    """Refuses a file whose ending promises another format."""
    if path.suffix.lower() not in ENDINGS:
        raise InputError(f"output {path} is of no known format: end it in .html")


def write_page(content: Content, path: Path, *, overwrite: bool = False) -> str:
    """Writes the page to a file, whole or not at all; gives its text."""
    page = render(content)
    with new_file(path, overwrite=overwrite) as temporary:
        temporary.write_text(page, encoding="utf-8")
    return page


def write_report(
    data: nn.Module | Pack,
    val: Iterable[Any] | str = "val",
    test: Iterable[Any] | str = "test",
    path: Path | str = "report.html",
    *,
    recipes: Sequence[str] = DEFAULT_RECIPES,
    head: str | None = None,
    unpack: Unpack | None = None,
    overwrite: bool = False,
    **options: Any,  # noqa: ANN401 - of `Content.of`
) -> Content:
    """Writes one page: may the confidence be trusted, what helps, is the gain real, what it costs.

    Args:
        data: the model, without a calibrator; or a pack.
        val: labelled batches to fit on; of a pack the name of the split.
        test: other such batches to score; of a pack the name of the split.
        path: the .html file to write, which must not exist.
        recipes: their texts.
        head: path of the model's last layer, when it is not found by itself.
        unpack: makes (inputs, labels) of a batch in a form `collect` does not know.
        overwrite: replace it instead.
        options: mode, bins, resamples, seed, calibrators.

    Returns:
        What stands on the page.
    """
    check_packages()
    path = Path(path)
    check_page(path)
    check_free(path, overwrite=overwrite)
    if isinstance(data, Pack):
        content = Content.of(data, recipes, fit=val, test=test, **options)  # type: ignore[arg-type]
        write_page(content, path, overwrite=overwrite)
        return content
    if not isinstance(data, nn.Module):
        raise InputError(f"data is a {type(data).__name__}: give a model with loaders, or a pack")
    if isinstance(val, str) or isinstance(test, str):
        raise InputError("val and test are names of splits: of a model give the loaders")
    check_uncalibrated(data)
    name = type(data).__name__
    with tempfile.TemporaryDirectory() as folder:
        loaders: Any = {"val": val, "test": test}
        pack = collect_pack(data, loaders, Path(folder) / name, head=head, unpack=unpack)
        typed = f"featcal.report(model, val, test, {str(path)!r})"
        content = Content.of(pack, recipes, command=typed, **options)
        # The pack is gone when the page is read: what to type next is Python's.
        summary, pick = content.summary, content.summary.pick
        told = "featcal.compare(model, val, test)" if summary.command else ""
        if pick is not None:
            recipe, stepwise = content.entries[pick].recipe, options.get("mode") == "sequential"
            mode = ', mode="sequential"' if stepwise else ""
            told = f"model = featcal.calibrate(model, val, {recipe!r}{mode})"
        about = {**content.about, "pack": {**content.about["pack"], "path": name}}
        content = replace(content, summary=replace(summary, command=told), about=about)
        write_page(content, path, overwrite=overwrite)
    return content
