"""The passes of a sweep: every threshold while a block of rows is in the cache."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from featcal.analysis.groups import Groups
from featcal.analysis.reading import Rows
from featcal.analysis.sweep_linear import directions, logits_along
from featcal.analysis.sweep_scores import SweepScores, Tally
from featcal.core.batch import Batch, Head
from featcal.core.calibrator import Calibrator
from featcal.core.errors import CalibrationWarning
from featcal.core.head import head_logits
from featcal.core.progress import track
from featcal.core.spec import parse

BLOCK = 2**18  # numbers of a block of rows: it stays in the cache for all thresholds
PART = 2**25  # logits of all thresholds that are held at once,
KEEP = 2**27  # and where all rows must be there: 512 MiB


def _clipped(rows: Rows, thresholds: Sequence[float]) -> Iterator[tuple[Tensor, ...]]:
    """The labels of some rows, and their logits (n, k) at every threshold."""
    head = rows.head
    assert head is not None
    step = max(PART // (len(thresholds) * rows.facts.classes), 1)
    for batch, own in rows:
        assert batch.features is not None
        for start in range(0, len(batch), step):
            part = slice(start, start + step)
            yield batch.labels[part], *_logits(batch.features[part], own[part], thresholds, head)


def _logits(features: Tensor, own: Tensor, thresholds: Sequence[float], head: Head) -> Tensor:
    """(t, n, k): the logits at every threshold; the network's own where nothing is clipped.

    A linear head with many classes is followed from threshold to threshold. Else rows go through in
    blocks that stay in the cache, since clipping is a matter of memory more than of arithmetic, and
    in the order of their largest features, so that high thresholds leave whole blocks alone.
    """
    weights = directions(head, features, own)
    if weights is not None:
        return logits_along(features, own, thresholds, weights)
    found = own.new_empty(len(thresholds), *own.shape)
    order = features.abs().amax(1).argsort()
    step = max(BLOCK // max(features.shape[1], 1), 1)
    buffer = torch.empty_like(features[:step])
    for rows in torch.split(order, step):
        block, clipped = features[rows], buffer[: len(rows)]
        unclipped, peak = own[rows], float(block.abs().max())
        for place, c in enumerate(thresholds):
            if c < peak:
                logits = head_logits(torch.clamp(block, -c, c, out=clipped), head)
                found[place, rows] = logits.to(found.dtype)
            else:
                found[place, rows] = unclipped
    return found


def sweep_val(
    rows: Rows, grid: list[float], recipes: Sequence[Calibrator | None], groups: Groups, bins: int
) -> tuple[list[SweepScores], list[list[Calibrator | None]]]:
    """Val at every threshold with each recipe, and what each recipe has learned there.

    A fit needs all rows of one threshold at once: so many thresholds at a time as fit into memory.
    """
    tallies = [Tally(len(grid), bins) for _ in recipes]
    fitted: list[list[Calibrator | None]] = [[] for _ in recipes]
    step = max(KEEP // (rows.facts.rows * rows.facts.classes), 1)
    for first in track("sweep: val", range(0, len(grid), step)):
        views: list[list[Batch]] = [[] for _ in grid[first : first + step]]
        for labels, *logits in _clipped(rows, grid[first : first + step]):
            for view, z in zip(views, logits, strict=True):
                view.append(Batch(z, labels))
        for place, view in enumerate(views, start=first):
            for recipe, tally, learned in zip(recipes, tallies, fitted, strict=True):
                tail = None if recipe is None else _refitted(recipe, view)
                learned.append(tail)
                stream = ((_after(tail, batch), batch.labels) for batch in view)
                for (z, labels), masks in groups.along(stream):
                    tally.add(place, z, labels, masks)
    return [tally.scores(rows.facts.rows, groups.sizes) for tally in tallies], fitted


def sweep_test(
    rows: Rows,
    grid: list[float],
    fitted: Sequence[Sequence[Calibrator | None]],
    groups: Groups,
    bins: int,
) -> list[SweepScores]:
    """Test at every threshold with what each recipe has learned on val."""
    tallies = [Tally(len(grid), bins) for _ in fitted]
    for (labels, *logits), masks in groups.along(_clipped(rows, grid)):
        for tally, tails in zip(tallies, fitted, strict=True):
            for place, (tail, z) in enumerate(zip(tails, logits, strict=True)):
                tally.add(place, _after(tail, Batch(z, labels)), labels, masks)
    return [tally.scores(rows.facts.rows, groups.sizes) for tally in tallies]


def _refitted(tail: Calibrator, view: list[Batch]) -> Calibrator:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)
        return parse(repr(tail)).fit(view)


def _after(tail: Calibrator | None, batch: Batch) -> Tensor:
    assert batch.logits is not None
    logits = batch.logits
    if tail is None:
        return logits
    return tail(batch.features, lambda _: logits)  # type: ignore[no-any-return]
