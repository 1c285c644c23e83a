"""What to do about a network's confidence, and what to type."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import final

from featcal.page.contest import Choice, steps
from featcal.page.phrases import FROM, in_words, points
from featcal.page.verdicts import FEW_ROWS, Kind, verdict
from featcal.report.rows import Comparison, Row

FILE = "cal.safetensors"
TRY_NEXT = ("temperature", "ensemble", "classwise", "vector", "isotonic")


@final
@dataclass(frozen=True)
class Place:
    """Where the numbers come from, for the command that is recommended.

    Attributes:
        pack: the path of the pack as the reader would type it.
        fit: the split recipes were fitted on.
        test: the split they were scored on.
        fit_rows: rows of the former.
        files: recipe -> file, for calibrators that were fitted beforehand.
        changed: predictions that became others, by the place of the recipe.
        seen: places of calibrators from files that were fitted on the scored rows.
        unknown: places of those of which nobody knows what rows they were fitted on.
    """

    pack: str
    fit: str = "val"
    test: str = "test"
    fit_rows: int = FEW_ROWS
    files: tuple[tuple[str, str], ...] = ()
    changed: tuple[int, ...] = ()
    seen: tuple[int, ...] = ()
    unknown: tuple[int, ...] = ()


def what_to_do(comparison: Comparison, kind: Kind, chosen: Choice) -> str:
    """The advice before the command."""
    if chosen.pick is None:
        return _without(comparison, kind, chosen)
    pick = chosen.pick
    name = in_words(comparison[pick].recipe)
    if kind == "calibrated":
        return f"You can leave it as it is. If the last bit of likelihood counts, use {name}:"
    if kind == "unclear":
        return (
            "Label more rows, to fit on and to score, before you rely on its confidence. What "
            f"helps so far is {name}:"
        )
    left = _left(comparison[pick], kind)
    if kind == "under":
        return f"Use {name}, which brings what it says nearer to what it achieves{left}:"
    return f"Use {name} before anyone acts on the confidence{left}:"


def _without(comparison: Comparison, kind: Kind, chosen: Choice) -> str:
    """The advice where no recipe helped."""
    if kind == "calibrated":
        return "Nothing: use the confidence as it is, and look again when the data changes."
    if kind == "unclear":
        return "Label more rows, to fit on and to score, and ask again."
    until = "Do not set thresholds by this model's confidence as it is."
    if kind == "under":
        until = (
            "Read its confidence as a low estimate: on average it is right more often than it says."
        )
    if len(comparison) == 1 + len(chosen.seen):
        return f"{until} See what mends it:"
    other = ", or try other methods:" if _untried(comparison, chosen) else "."
    return f"{until} To mend it, collect more labelled rows to fit on{other}"


def _left(after: Row, before: Kind) -> str:
    """What the recommended recipe leaves undone, in brackets."""
    kind = verdict(after)
    gap = points(abs(after.scores.metrics["overconfidence"]))
    ways = {"over": "too sure", "under": "too modest"}
    if kind in ways:
        if before in ways and kind != before:
            return f" (it overshoots: on average it is then {gap} {ways[kind]})"
        still = "still " if kind == before else ""
        return f" (on average it is then {still}{gap} {ways[kind]})"
    if kind == "calibrated":
        return " (it can then be taken at its word)"
    if kind == "unclear":
        return " (whether it can then be taken at its word, these rows cannot tell)"
    error = points(after.scores.metrics["ece"])
    return f" (level by level of confidence it is then still off by {error} on average)"


def command(comparison: Comparison, kind: Kind, chosen: Choice, place: Place) -> str:
    """What to type next; nothing where there is nothing to do."""
    pack = shlex.quote(place.pack)
    if chosen.pick is None:
        untried = _untried(comparison, chosen)
        if kind in ("calibrated", "unclear") or not untried:
            return ""
        splits = _option("--fit-split", place.fit, "val")
        splits += _option("--test-split", place.test, "test")
        return f"featcal compare {pack} none {' '.join(untried)}{splits}"
    row = comparison[chosen.pick]
    for name, file in place.files:
        if name == row.recipe:
            split = _option("--split", place.test, "test")
            return f"featcal predict {pack} {shlex.quote(file)}{split} -o probs.npy"
    split = _option("--split", place.fit, "val")
    sequential = " --sequential" if steps(row) > 1 else ""
    return f"featcal fit {pack} {_quoted(row.recipe)}{split}{sequential} -o {FILE}"


def _untried(comparison: Comparison, chosen: Choice) -> list[str]:
    """Further recipes that are worth a try; one that saw the answers was not tried."""
    tried = {
        row.recipe.partition(FROM)[0]
        for place, row in enumerate(comparison)
        if place not in chosen.seen
    }
    return [recipe for recipe in TRY_NEXT if recipe not in tried]


def _option(name: str, value: str, default: str) -> str:
    return "" if value == default else f" {name} {shlex.quote(value)}"


def _quoted(recipe: str) -> str:
    """In double quotes, which every shell knows, unless something inside would act there."""
    acts = any(mark in recipe for mark in '"$`\\!')
    return shlex.quote(recipe) if acts or recipe.isalnum() else f'"{recipe}"'
