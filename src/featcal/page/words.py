"""The verdict in plain words, from the numbers alone: may one trust this model's confidence?

Written for a person who has never heard of calibration. Every sentence is a pure function of a
comparison; nothing is claimed that an interval does not carry.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from featcal.page.cautions import cautions
from featcal.page.contest import contest, same
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
from featcal.page.verdicts import FEW_ROWS, Kind, headline, verdict
from featcal.report.rows import Comparison, Row

FILE = "cal.safetensors"
TRY_NEXT = "none ensemble classwise vector isotonic"

TRUST = {
    "over": "Not as it is: it claims more than it delivers.",
    "under": "Yes, and more than it says: it is right more often than it claims.",
    "calibrated": "Yes. Read its confidence as the share of such answers that are right.",
    "mixed": "Not as it is: it claims too much in some places and too little in others.",
    "unclear": "Nobody can say yet: there are too few labelled rows to judge it by.",
}


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
        command: what to type next.
    """

    kind: Kind
    headline: str
    trust: str
    points: tuple[Point, ...]
    cautions: tuple[str, ...]
    pick: int | None
    command: str

    def as_json(self) -> dict[str, Any]:
        """The public form."""
        points = [{"question": point.question, "answer": point.answer} for point in self.points]
        flat = {name: getattr(self, name) for name in ("kind", "headline", "trust", "command")}
        return {**flat, "points": points, "cautions": list(self.cautions), "pick": self.pick}


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
    """

    pack: str
    fit: str = "val"
    test: str = "test"
    fit_rows: int = FEW_ROWS
    files: tuple[tuple[str, str], ...] = ()
    changed: tuple[int, ...] = ()


def summary(comparison: Comparison, place: Place) -> Summary:
    """What the comparison says; the row of the network as it is stands first."""
    raw = comparison[0]
    kind, pick = verdict(raw), recommended(comparison)
    answers = (
        Point("How far off is it?", how_far(raw, place.test)),
        Point("What helped most?", what_helped(comparison, pick)),
        Point("Is the gain real?", is_it_real(comparison, pick)),
        Point("What does it cost?", what_it_cost(comparison, pick, place.changed)),
        Point("What should I do?", what_to_do(comparison, kind, pick)),
    )
    return Summary(
        kind,
        headline(kind, raw),
        TRUST[kind],
        answers if len(comparison) > 1 else (answers[0], answers[-1]),
        tuple(cautions(comparison, place.fit, place.fit_rows)),
        pick,
        command(comparison, kind, pick, place),
    )


def how_far(raw: Row, split: str) -> str:
    """Mean confidence beside accuracy, and the interval of what lies between them."""
    scores = raw.scores
    gap = scores.metrics["overconfidence"]
    way = "above" if gap >= 0 else "below"
    return (
        f"Over {rows(scores.n)} of {split} it is {percent(scores.metrics['confidence'])} sure on "
        f"average and right in {percent(scores.metrics['accuracy'])}: {points(abs(gap))} {way} "
        f"what it achieves{between(scores.interval('overconfidence'), signed=True)}. Level by "
        f"level of confidence, it is off by {points(scores.metrics['ece'])} on average (ECE)."
    )


def recommended(comparison: Comparison) -> int | None:
    """The place of the recipe to use: the simplest of those no other beats by NLL."""
    helped = _helped(comparison)
    found = contest(comparison, "nll", helped) if helped else None
    if found is None:
        return None
    return min(found.tied, key=lambda place: (_costs(comparison, place), _steps(comparison, place)))


def what_helped(comparison: Comparison, pick: int | None) -> str:
    """The best recipe by NLL, or that there is no clear one."""
    if pick is None:
        return (
            "Nothing that was tried, as far as these rows can tell: no recipe lowers the loss "
            "(NLL) by more than chance might."
        )
    found = contest(comparison, "nll", _helped(comparison))
    assert found is not None
    told = f"{_named(comparison, pick)} {_nll_and_ece(comparison, pick)}"
    if found.clear and len(_helped(comparison)) == len(found.alike):
        return f"{capital(told)} Nothing else that was tried helped."
    if found.clear:
        return f"{capital(told)} By likelihood (NLL) it beats everything else that was tried."
    rivals = [place for place in found.tied if not same(comparison, place, pick, "nll")]
    tied = [pick, *rivals]
    names = listed([_named(comparison, place) for place in tied])
    return (
        f"There is no clear winner by likelihood (NLL): {names} are within chance of each other. "
        f"The simplest of them, {told}"
    )


def is_it_real(comparison: Comparison, pick: int | None) -> str:
    """The paired intervals of the gain."""
    if pick is None:
        return "There is no gain to speak of."
    nll = comparison.difference(pick, "nll")
    ece = comparison.difference(pick, "ece")
    assert nll is not None
    assert ece is not None
    level = f"NLL falls by {-nll.delta:.4f}{between(mirrored(nll.interval), digits=4)}"
    if ece.verdict == "better":
        gain = f"the calibration error by {points(-ece.delta)}{between(mirrored(ece.interval))}"
        return f"Yes: {level}, {gain}. Both intervals exclude zero."
    shown = f"{points(abs(ece.delta))} {'lower' if ece.delta <= 0 else 'higher'}"
    judged = "is a loss" if ece.verdict == "worse" else "may be chance"
    return (
        f"In part: {level}, which is more than chance. The calibration error (ECE) is {shown}"
        f"{between(ece.interval, signed=True)}, which {judged}."
    )


def what_it_cost(comparison: Comparison, pick: int | None, changed: Sequence[int] = ()) -> str:
    """Accuracy before and after."""
    if pick is None:
        return "Nothing, since nothing is changed."
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


def what_to_do(comparison: Comparison, kind: Kind, pick: int | None) -> str:
    """The advice before the command."""
    if pick is None and kind == "calibrated":
        return "Nothing: use the confidence as it is, and look again when the data changes."
    if pick is None and kind == "unclear":
        return "Label more rows, to fit on and to score, and ask again."
    if pick is None:
        return (
            "Collect more labelled rows to fit on, or try other methods; until then do not set "
            "thresholds by this model's confidence."
        )
    name = _named(comparison, pick)
    if kind == "calibrated":
        return f"You can leave it as it is. If the last bit of likelihood counts, use {name}:"
    still = {"over": "too sure", "under": "too modest"}.get(verdict(comparison[pick]))
    gap = points(abs(comparison[pick].scores.metrics["overconfidence"]))
    rest = f" (it is then still {gap} {still})" if still else ""
    return f"Use {name} before anyone acts on the confidence{rest}:"


def command(comparison: Comparison, kind: Kind, pick: int | None, place: Place) -> str:
    """What to type next; nothing where there is nothing to do."""
    pack = shlex.quote(place.pack)
    if pick is None:
        return "" if kind in ("calibrated", "unclear") else f"featcal compare {pack} {TRY_NEXT}"
    recipe = comparison[pick].recipe
    for name, file in place.files:
        if name == recipe:
            return f"featcal predict {pack} {shlex.quote(file)} -o probs.npy"
    split = "" if place.fit == "val" else f" --split {shlex.quote(place.fit)}"
    steps = " --sequential" if _steps(comparison, pick) > 1 else ""
    return f"featcal fit {pack} {_quoted(recipe)}{split}{steps} -o {FILE}"


def _quoted(recipe: str) -> str:
    """In double quotes, which every shell knows, unless something inside would act there."""
    acts = any(mark in recipe for mark in '"$`\\!')
    return shlex.quote(recipe) if acts or recipe.isalnum() else f'"{recipe}"'


def _helped(comparison: Comparison) -> tuple[int, ...]:
    """The places of the rows that lower the loss by more than chance."""
    return tuple(
        place
        for place in range(1, len(comparison))
        if _verdict(comparison, place, "nll") == "better"
    )


def _named(comparison: Comparison, place: int) -> str:
    return in_words(comparison[place].recipe)


def _verdict(comparison: Comparison, place: int, metric: str) -> str | None:
    found = comparison.difference(place, metric)
    return None if found is None else found.verdict


def _costs(comparison: Comparison, place: int) -> bool:
    return _verdict(comparison, place, "accuracy") == "worse"


def _steps(comparison: Comparison, place: int) -> int:
    calibrator = comparison[place].calibrator
    return 0 if calibrator is None else len(calibrator.steps_in_order())


def _nll_and_ece(comparison: Comparison, pick: int) -> str:
    before, after = comparison[0].scores.metrics, comparison[pick].scores.metrics
    return (
        f"brings the calibration error (ECE) from {percent(before['ece'])} to "
        f"{percent(after['ece'])}, and what is left between mean confidence and accuracy to "
        f"{points(abs(after['overconfidence']))}."
    )
