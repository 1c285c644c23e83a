"""Whether a recipe takes certainty from wrong answers or from right ones, in words and numbers.

The paper's own evidence for clipping (Tao, Dong and Xu, AAAI 2025), held against a recipe that
never looks at features.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import final

from featcal.analysis import EntropyGrowth
from featcal.page.phrases import FROM, about, capital, in_words

SAME = 1e-6  # nats; a smaller change is rounding
CONTROL = "temperature"  # divides all logits by one number, whatever the features are


@final
@dataclass(frozen=True)
class Finding:
    """What was found in one plain sentence, and the numbers behind it, "" where there are none."""

    lead: str
    numbers: str = ""

    def __str__(self) -> str:
        return f"{self.lead} {self.numbers}".rstrip()


def entropy_findings(growths: Mapping[str, EntropyGrowth]) -> list[Finding]:
    """The paper's claim for every clip among the recipes, else what the first one does.

    Args:
        growths: of each recipe by its text, that of the network as it is left out.
    """
    named = {name: replace(found, recipe=name) for name, found in growths.items()}
    clips = [found for found in named.values() if _is_clip(found.recipe)]
    return [
        entropy_finding(found, control_for(found, growths))
        for found in clips or list(named.values())[:1]
    ]


def control_for(found: EntropyGrowth, growths: Mapping[str, EntropyGrowth]) -> EntropyGrowth | None:
    """What a recipe that uses features is to be held against, where it is among these."""
    return growths.get(CONTROL) if found.recipe.startswith("clip") else None


def _is_clip(recipe: str) -> bool:
    recipe = recipe.partition(FROM)[0]
    return recipe.partition("(")[0] == "clip" and " | " not in recipe


def entropy_words(found: EntropyGrowth, control: EntropyGrowth | None = None) -> str:
    """The finding as one text."""
    return str(entropy_finding(found, control))


def entropy_finding(found: EntropyGrowth, control: EntropyGrowth | None = None) -> Finding:
    """The paper's claim, measured: clipping takes more certainty from wrong answers than right.

    Args:
        found: of the recipe it is about.
        control: of temperature scaling on the same rows: any softening may do what is claimed.
    """
    wrong, right = found.groups.sizes
    name = capital(in_words(found.recipe))
    if not wrong or not right:
        which, level = "wrong" if not wrong else "right", about(found.groups.confidence)
        return Finding(
            f"No answer above {level} confidence is {which}, so there is nothing to compare."
        )
    grew = [float(growth) for growth in found.growth]
    if max(map(abs, grew)) < SAME:
        return Finding(f"{name} leaves the entropy of confident answers as it is.")
    low, high = found.interval.low, found.interval.high
    if math.isnan(low):
        lead = f"{name}: too few confident answers to tell wrong ones from right ones."
        return Finding(lead, f"{_grown(found)}. One group is too small for an interval.")
    if max(abs(found.gap), abs(low), abs(high)) < SAME:
        return Finding(f"{name} treats wrong and right answers alike.", f"{_grown(found)}.")
    rough = " The smaller group has few rows, so the interval is rough." if found.few else ""
    if low <= 0 <= high:
        lead = f"{name} is not known to treat wrong answers and right ones differently."
        return Finding(lead, f"{_measured(found)}, which may be chance.{rough}")
    beside = _beside(found, control) if control is not None and sum(grew) > 0 and low > 0 else ""
    return Finding(_lead(found), f"{_measured(found)}.{rough}{beside}")


def _lead(found: EntropyGrowth) -> str:
    """Which answers it makes less certain, or more, and what the paper says to that."""
    more_for_wrong, takes = found.interval.low > 0, float(found.growth.sum()) > 0
    what, way = ("takes more certainty", "from") if takes else ("gives more certainty", "to")
    more, less = ("wrong", "right") if more_for_wrong == takes else ("right", "wrong")
    claim = ""
    if _is_clip(found.recipe) and takes:
        claim = ", the opposite of what the paper claims"
        if more_for_wrong:
            claim = ", as the paper claims"
    name = capital(in_words(found.recipe))
    return f"{name} {what} {way} {more} answers than {way} {less} ones{claim}."


def _grown(found: EntropyGrowth) -> str:
    """The growth of both groups."""
    (wrong, right), grew = found.groups.sizes, [float(growth) for growth in found.growth]
    return (
        f"The entropy (how undecided the model is) of the {wrong:,} wrong answers above "
        f"{about(found.groups.confidence)} confidence {_grew(grew[0])}, that of the {right:,} "
        f"right ones {_grew(grew[1])}"
    )


def _measured(found: EntropyGrowth) -> str:
    return f"{_grown(found)}. The difference is {_span(found)}"


def _span(found: EntropyGrowth) -> str:
    low, high = found.interval.low, found.interval.high
    return f"{found.gap:+.4f} nats (95 % interval {low:+.4f} to {high:+.4f})"


def _beside(found: EntropyGrowth, control: EntropyGrowth) -> str:
    """What a recipe that cannot know about features does to the same answers."""
    low, high = control.interval.low, control.interval.high
    named = f"{capital(in_words(control.recipe))}, which never looks at features,"
    span = _span(control)
    if low <= 0:
        return f" {named} does not do so beyond chance: {span}."
    if high < found.interval.low:
        return f" {named} does the same less strongly: {span}."
    much = "more strongly" if low > found.interval.high else "about as strongly"
    return (
        f" {named} does the same {much}: {span}. So this alone is no sign that the features matter."
    )


def _grew(by: float) -> str:
    if abs(by) < SAME:
        return "did not change"
    return f"{'grew' if by > 0 else 'fell'} by {abs(by):.4f} nats"
