"""The verdict in plain words, from the numbers alone: may one trust this model's confidence?

Written for a person who has never heard of calibration. Every sentence is a pure function of a
comparison; nothing is claimed that an interval does not carry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from featcal.page.advice import Place, command, what_to_do
from featcal.page.cautions import cautions
from featcal.page.contest import Choice, complexity, contest, paired, same
from featcal.page.losses import no_gain, no_help, set_aside, would_cost
from featcal.page.phrases import (
    between,
    capital,
    in_words,
    listed,
    mirrored,
    percent,
    points,
    rows,
)
from featcal.page.verdicts import Kind, headline, trust, verdict
from featcal.report.rows import Comparison, Row


@final
@dataclass(frozen=True)
class Point:
    """A question a reader has, and its answer."""

    question: str
    answer: str


@final
@dataclass(frozen=True)
class Summary:
    """The first screen.

    Attributes:
        kind: which way the model errs.
        headline: one sentence.
        trust: whether to trust the confidence, in one sentence.
        points: questions and answers.
        cautions: what a reader must know before acting on it.
        pick: the place of the recommended recipe, None to leave the model as it is.
        seen: places of calibrators that were fitted on the scored rows.
        command: what to type next.
    """

    kind: Kind
    headline: str
    trust: str
    points: tuple[Point, ...]
    cautions: tuple[str, ...]
    pick: int | None
    seen: tuple[int, ...]
    command: str

    def as_json(self) -> dict[str, Any]:
        """The public form."""
        points = [{"question": point.question, "answer": point.answer} for point in self.points]
        flat = {name: getattr(self, name) for name in ("kind", "headline", "trust", "command")}
        places = {"pick": self.pick, "seen": list(self.seen)}
        return {**flat, "points": points, "cautions": list(self.cautions), **places}


def summary(comparison: Comparison, place: Place) -> Summary:
    """What the comparison says; the row of the network as it is stands first."""
    raw = comparison[0]
    kind, chosen = verdict(raw), Choice.of(comparison, place.seen)
    answers = (
        Point("How far off is it?", how_far(raw, place.test)),
        Point("What helped most?", what_helped(comparison, chosen)),
        Point("Is the gain real?", is_it_real(comparison, chosen)),
        Point("What does it cost?", what_it_cost(comparison, chosen, place.changed)),
        Point("What should I do?", what_to_do(comparison, kind, chosen)),
    )
    return Summary(
        kind,
        headline(kind, raw),
        trust(kind, raw),
        answers if len(comparison) > 1 else (answers[0], answers[-1]),
        tuple(cautions(comparison, chosen, place)),
        chosen.pick,
        chosen.seen,
        command(comparison, kind, chosen, place),
    )


def how_far(raw: Row, split: str) -> str:
    """Mean confidence beside accuracy, and the interval of what lies between them."""
    scores = raw.scores
    gap = scores.metrics["overconfidence"]
    way, ends, errors = "above", scores.interval("overconfidence"), scores.interval("ece")
    if gap < 0:
        way, ends = "below", mirrored(ends)
    return (
        f"Over {rows(scores.n)} of {split} it is {percent(scores.metrics['confidence'])} sure on "
        f"average and right in {percent(scores.metrics['accuracy'])} of them: "
        f"{points(abs(gap))} {way} what it achieves{between(ends)}. Level by level of confidence, "
        f"it is off by {points(scores.metrics['ece'])} on average (ECE)"
        f"{', which may be chance' if errors.low <= 0 else ''}."
    )


def what_helped(comparison: Comparison, chosen: Choice) -> str:
    """The best recipe by NLL, or that there is no clear one, and who does better by ECE."""
    if chosen.pick is None:
        return no_help(comparison, chosen)
    pick = chosen.pick
    found = contest(comparison, "nll", chosen.helped)
    assert found is not None
    brings = _brings(comparison, pick)
    if found.clear:
        told = f"{capital(_named(comparison, pick))} {brings}{_against_others(comparison, chosen)}"
    else:
        rivals = [place for place in found.tied if not same(comparison, place, pick, "nll")]
        names = _all_named(comparison, [pick, *rivals])
        simpler = min(complexity(comparison[place]) for place in rivals)
        kind = " that costs no accuracy" if simpler < complexity(comparison[pick]) else ""
        told = (
            f"There is no clear winner by likelihood (NLL): {names} are within chance of each "
            f"other. The simplest of them{kind} is {_named(comparison, pick)}: it {brings}"
        )
    return told + set_aside(comparison, chosen) + _lower_ece(comparison, chosen)


def _brings(comparison: Comparison, pick: int) -> str:
    """The calibration error before and after; which way it went, and whether that is chance."""
    before, after = (comparison[place].scores.metrics["ece"] for place in (0, pick))
    left = points(abs(comparison[pick].scores.metrics["overconfidence"]))
    leaves = f"mean confidence and accuracy are then {left} apart."
    if percent(before) == percent(after):
        return f"leaves the calibration error (ECE) at {percent(after)}; {leaves}"
    found = comparison.difference(pick, "ece")
    assert found is not None
    way = "lowers" if after < before else "raises"
    chance = "" if found.verdict == "better" else ", which may be chance"
    return (
        f"{way} the calibration error (ECE) from {percent(before)} to {percent(after)}{chance}; "
        f"{leaves}"
    )


def _against_others(comparison: Comparison, chosen: Choice) -> str:
    """How a clear winner stands to all others, those included that are not known to help."""
    good, pick = chosen.helped, chosen.pick
    assert pick is not None
    alike = [place for place in good if place != pick and same(comparison, place, pick, "nll")]
    doubtful = [
        place
        for place in range(1, len(comparison))
        if place not in (*good, *chosen.harmful, *chosen.seen)
        and paired(comparison, place, pick, "nll").verdict != "worse"
    ]
    give = "give" if len(alike) > 1 else "gives"
    told = f" {capital(_all_named(comparison, alike))} {give} the same." if alike else ""
    beaten = len(good) > len(alike) + 1
    if doubtful or chosen.harmful:
        told += " By likelihood (NLL) it beats the others that helped." if beaten else ""
        names = _all_named(comparison, doubtful)
        doubt = f" Whether {names} would do as well, these rows cannot tell."
        return told + doubt if doubtful else told
    if beaten:
        return f"{told} By likelihood (NLL) it beats everything else that was tried."
    return f"{told} Nothing else that was tried helped beyond chance."


def _lower_ece(comparison: Comparison, chosen: Choice) -> str:
    """The recipe with the lowest ECE, where it is known to be lower than the recommended one's."""
    pick = chosen.pick
    assert pick is not None
    lower = [
        place
        for place in range(1, len(comparison))
        if place not in (pick, *chosen.seen)
        and all(paired(comparison, place, one, "ece").verdict == "better" for one in (0, pick))
    ]
    if not lower:
        return ""
    best = min(lower, key=lambda place: comparison[place].scores.metrics["ece"])
    told = percent(comparison[best].scores.metrics["ece"])
    drawbacks = []
    if paired(comparison, best, pick, "nll").verdict == "worse":
        drawbacks.append("has the higher NLL")
    lost = comparison.difference(best, "accuracy")
    if lost is not None and lost.verdict == "worse":
        drawbacks.append(f"costs {points(-lost.delta)} of accuracy")
    but = f", but {listed(drawbacks)}" if drawbacks else ""
    lowered = paired(comparison, pick, 0, "ece").verdict == "better"
    still = "lower still" if lowered else "lower"
    return f" {capital(_named(comparison, best))} brings the ECE {still}, to {told}{but}."


def is_it_real(comparison: Comparison, chosen: Choice) -> str:
    """The paired intervals of the gain."""
    pick = chosen.pick
    if pick is None:
        return no_gain(comparison, chosen)
    nll = comparison.difference(pick, "nll")
    ece = comparison.difference(pick, "ece")
    assert nll is not None
    assert ece is not None
    level = f"NLL falls by {-nll.delta:.4f}{between(mirrored(nll.interval), digits=4)}"
    if ece.verdict == "better":
        gain = f"the calibration error by {points(-ece.delta)}{between(mirrored(ece.interval))}"
        return f"Yes: {level}, {gain}. Both intervals exclude zero."
    shown = f"{points(abs(ece.delta))} {'lower' if ece.delta <= 0 else 'higher'}"
    return (
        f"In part: {level}, which is more than chance. The calibration error (ECE) is {shown}"
        f"{between(ece.interval, signed=True)}, which may be chance."
    )


def what_it_cost(comparison: Comparison, chosen: Choice, changed: Sequence[int] = ()) -> str:
    """Accuracy before and after; what a recipe would cost that is not recommended for it."""
    pick = chosen.pick
    if pick is None:
        return f"Nothing, since nothing is changed.{would_cost(comparison, chosen)}"
    found = comparison.difference(pick, "accuracy")
    assert found is not None
    others = changed[pick] if changed else 0
    if found.delta == 0 and found.interval.low == found.interval.high:
        if others:
            return f"No accuracy, though {others:,} wrong answers become other wrong answers."
        return "No accuracy: the predicted classes stay as they are."
    if found.delta == 0:
        return f"No accuracy that can be measured here: it is the same{between(found.interval)}."
    rises = found.delta > 0
    ends = found.interval if rises else mirrored(found.interval)
    change = f"{'rises' if rises else 'falls'} by {points(abs(found.delta))}{between(ends)}"
    if found.verdict == "worse":
        return f"Some answers: accuracy {change}, which is more than chance."
    if found.verdict == "better":
        return f"Nothing: accuracy even {change}."
    return f"No accuracy that can be measured here: it {change}, which may be chance."


def _named(comparison: Comparison, place: int) -> str:
    return in_words(comparison[place].recipe)


def _all_named(comparison: Comparison, places: Sequence[int]) -> str:
    return listed([_named(comparison, place) for place in places])
