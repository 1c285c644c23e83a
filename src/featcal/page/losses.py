"""Recipes that are not recommended although the loss falls: what they harm, or what they have seen.

NLL may fall while calibration gets worse, where a few rows that were given next to no probability
(wrong labels, as a rule) weigh more than all others.
"""

from __future__ import annotations

from collections.abc import Sequence

from featcal.page.contest import Choice, harmed
from featcal.page.phrases import between, capital, in_words, listed, mirrored, percent, points
from featcal.report.rows import Comparison

NAMES = {"ece": "the calibration error (ECE)", "brier": "the Brier score"}


def no_help(comparison: Comparison, chosen: Choice) -> str:
    """What helped, where nothing is recommended."""
    if len(comparison) == 1 + len(chosen.seen):
        return "Nobody can tell: nothing was tried that was fitted on other rows than these."
    if not chosen.harmful:
        fair = " that was fitted on other rows" if chosen.seen else ""
        return (
            f"Nothing that was tried, as far as these rows can tell: no recipe{fair} lowers the "
            "loss (NLL) by more than chance might."
        )
    first, *others = _by_loss(comparison, chosen.harmful)
    lowers, raises = ("lower", "raise") if len(others) > 1 else ("lowers", "raises")
    also = (
        f" {capital(_named(comparison, others))} {lowers} the loss too, and {raises} the ECE or "
        "the Brier score."
    )
    lead = "Likelihood improves, calibration does not"
    if _calibrates(comparison, first):
        lead = "Nothing without a loss elsewhere"
    return (
        f"{lead}: {_named(comparison, [first])} lowers the loss (NLL), but raises "
        f"{_from_to(comparison, first)}.{also if others else ''}"
    )


def no_gain(comparison: Comparison, chosen: Choice) -> str:
    """Whether the gain is real, where nothing is recommended."""
    if chosen.harmful:
        first = _by_loss(comparison, chosen.harmful)[0]
        found = comparison.difference(first, "nll")
        assert found is not None
        span = between(mirrored(found.interval), digits=4)
        but = "Its confidence is not known to become more honest."
        if "ece" in harmed(comparison, first):
            but = "Its confidence becomes less honest."
        if _calibrates(comparison, first):
            but = "ECE falls beyond chance too, but its probabilities are farther from the truth."
        return (
            f"In part: with {_named(comparison, [first])} NLL falls by {-found.delta:.4f}{span}. "
            f"{but}"
        )
    if chosen.seen:
        return (
            f"Nobody can tell: {_named(comparison, chosen.seen)} {_was(chosen.seen)} scored on the "
            "rows it was fitted on."
        )
    return "There is no gain to speak of."


def would_cost(comparison: Comparison, chosen: Choice) -> str:
    """What the likeliest of the harmful recipes is known to make worse, and by how much."""
    if not chosen.harmful:
        return ""
    first = _by_loss(comparison, chosen.harmful)[0]
    told = listed([_rise(comparison, first, name) for name in harmed(comparison, first)])
    return f" {capital(_named(comparison, [first]))} would raise {told}."


def set_aside(comparison: Comparison, chosen: Choice) -> str:
    """Recipes that lower the loss too, beside the one that is recommended."""
    if not chosen.harmful:
        return ""
    lowers, makes = ("lower", "make") if len(chosen.harmful) > 1 else ("lowers", "makes")
    return (
        f" {capital(_named(comparison, chosen.harmful))} {lowers} the loss (NLL) too, but "
        f"{makes} the ECE or the Brier score worse than it was, beyond chance."
    )


def fitted_on_the_scored(comparison: Comparison, seen: Sequence[int]) -> str:
    """The caution about calibrators that know the answers."""
    it, so = ("they seem", "they are") if len(seen) > 1 else ("it seems", "it is")
    return (
        f"{capital(_named(comparison, seen))} {_was(seen)} fitted on the very rows that are scored "
        f"here: as many rows, with the same loss before the fit. What {it} to gain says nothing "
        f"about other rows, so {so} not recommended."
    )


def _calibrates(comparison: Comparison, place: int) -> bool:
    """Whether the ECE is known to fall, so that it is the Brier score alone that is worse."""
    found = comparison.difference(place, "ece")
    return found is not None and found.verdict == "better"


def _by_loss(comparison: Comparison, places: Sequence[int]) -> list[int]:
    return sorted(places, key=lambda place: comparison[place].scores.metrics["nll"])


def _from_to(comparison: Comparison, place: int) -> str:
    return listed(
        [
            f"{NAMES[name]} from {_shown(comparison, 0, name)} to {_shown(comparison, place, name)}"
            for name in harmed(comparison, place)
        ]
    )


def _shown(comparison: Comparison, place: int, name: str) -> str:
    value = comparison[place].scores.metrics[name]
    return percent(value) if name == "ece" else f"{value:.4f}"


def _rise(comparison: Comparison, place: int, name: str) -> str:
    found = comparison.difference(place, name)
    assert found is not None
    by = points(found.delta) if name == "ece" else f"{found.delta:.4f}"
    span = between(found.interval, digits=None if name == "ece" else 4)
    return f"{NAMES[name]} by {by}{span}"


def _named(comparison: Comparison, places: Sequence[int]) -> str:
    return listed([in_words(comparison[place].recipe) for place in places])


def _was(places: Sequence[int]) -> str:
    return "were" if len(places) > 1 else "was"
