"""The page from Python, of a model and loaders, a pack or rows: `featcal.report` is this."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any

from torch import nn

from featcal.core.batch import Batch, Data, Head, as_data, head_of, paired
from featcal.core.checks import InputError
from featcal.core.files import check_free, new_file
from featcal.core.labels import all_labels
from featcal.core.text import parse
from featcal.data.collect import IGNORED, Unpack, check_loader
from featcal.data.pack import SPLIT_NAME, Pack, write_pack
from featcal.data.resume import KEPT, collect_pack
from featcal.heads.attach import check_uncalibrated
from featcal.heads.head import as_head, linear_view
from featcal.page.content import Content
from featcal.page.html import check_packages, render
from featcal.report.compare import DEFAULT_RECIPES, check_apart

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
    data: nn.Module | Pack | Batch | Data,
    *others: Any,  # noqa: ANN401 - see the docstring
    path: Path | str = "report.html",
    recipes: Sequence[str] = DEFAULT_RECIPES,
    head: Head | str | None = None,
    unpack: Unpack | None = None,
    ignore_index: int = IGNORED,
    positions: int | None = None,
    overwrite: bool = False,
    **options: Any,  # noqa: ANN401 - of `Content.of`
) -> Content:
    """Writes one page: may the confidence be trusted, what helps, is the gain real, what it costs.

    `report(model, val_loader, test_loader, path)` runs the model, `report(pack, path)` reads its
    splits val and test, `report(val, test, path)` takes rows in any form that `evaluate` does.

    Args:
        data: the model, without a calibrator; or a pack; or the rows to fit on.
        others: of a model the loaders of val and test, of a pack the names of other splits, else
            the rows to score; behind them the path.
        path: the .html file to write, which must not exist.
        recipes: their texts.
        head: path of a model's last layer; for rows the layer itself, where they bring none along.
        unpack: makes (inputs, labels) of a batch in a form `collect` does not know.
        ignore_index: the label of pixels and tokens that do not count.
        positions: how many pixels or tokens of a sample to keep at most; see `collect`.
        overwrite: replace the file instead.
        options: mode, bins, resamples, seed, calibrators.

    Returns:
        What stands on the page.
    """
    check_packages()
    given = list(others)
    if given and isinstance(given[-1], (str, Path)) and not SPLIT_NAME.fullmatch(str(given[-1])):
        path = given.pop()
    path = Path(path)
    check_page(path)
    check_free(path, overwrite=overwrite)
    if isinstance(data, Pack):
        splits: Any = dict(zip(("fit", "test"), given, strict=False))
        content = Content.of(data, recipes, **splits, **options)
        write_page(content, path, overwrite=overwrite)
        return content
    is_model = isinstance(data, nn.Module)
    if len(given) == is_model and not any(isinstance(one, str) for one in given):
        raise InputError(
            "a page needs rows to score, beside those to fit on: give them behind val; "
            "featcal.compare(...) does without, by cross-fitting"
        )
    if len(given) != 1 + is_model or any(isinstance(one, str) for one in given):
        raise InputError(
            "pass what the page is about, and where it goes: report(model, val_loader, "
            'test_loader, "report.html"), report(pack, "report.html"), or '
            'report(val, test, "report.html") of rows'
        )
    if isinstance(data, nn.Module):
        check_uncalibrated(data)
        for loader in given:
            check_loader(loader)
        check_apart(*given)
    else:
        data, *given = map(paired, (data, *given), repeat(4))  # `featcal.report` stands above
        check_apart(data, *given)
    with tempfile.TemporaryDirectory() as folder:
        name = type(data).__name__ if is_model else "rows"
        place = Path(folder) / name
        if isinstance(data, nn.Module):
            drawn: Any = {"ignore_index": ignore_index, "positions": positions}
            drawn["seed"] = options.get("seed", 0)
            loaders = dict(zip(("val", "test"), given, strict=True))
            try:
                pack = collect_pack(data, loaders, place, head=head, unpack=unpack, **drawn)  # type: ignore[arg-type]
            except InputError as error:  # nothing is kept here
                raise InputError(str(error).partition(KEPT)[0]) from error
            more = "" if ignore_index == IGNORED else f", ignore_index={ignore_index}"
            more += "" if positions is None else f", positions={positions}"
            typed, compared = f"model, val, test, {str(path)!r}{more}", f"model, val, test{more}"
            fitted = f"model = featcal.calibrate(model, val, {{!r}}{{}}{more})"
        else:
            layer = head_of(data) if head is None else head
            rows = {"val": as_data(data), "test": as_data(given[0])}  # type: ignore[arg-type]
            pack = write_pack(place, rows, head=linear_view(as_head(layer)))  # type: ignore[arg-type]
            typed, compared = f"val, test, {str(path)!r}", "val, test"
            fitted = "calibrator = featcal.parse({!r}).fit(val{})"
        content = Content.of(pack, recipes, command=f"featcal.report({typed})", **options)
        # The pack is gone when the page is read: what to type next is Python's.
        summary, pick = content.summary, content.summary.pick
        told = f"featcal.compare({compared})" if summary.command else ""
        if pick is not None:
            stepwise = options.get("mode") == "sequential"
            mode = ', mode="sequential"' if stepwise else ""
            recipe = content.entries[pick].recipe
            if pack.manifest.several and not is_model:  # which fit does not do by itself
                one = parse(recipe)
                recipe = recipe if one.several else repr(all_labels(one))
            told = fitted.format(recipe, mode)
        about = {**content.about, "pack": {**content.about["pack"], "path": name}}
        content = replace(content, summary=replace(summary, command=told), about=about)
        write_page(content, path, overwrite=overwrite)
    return content
