"""What the page decides: which way a network errs, what to use, how sure that is, what to mind.

Every decision is a pure function of a comparison, and nothing is claimed that an interval does not
carry. What is found are facts; `assets/words.txt` says them.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, final

from featcal.analysis import EntropyGrowth
from featcal.core.text import NONE
from featcal.metrics.bins import Bins
from featcal.metrics.columns import COLUMNS
from featcal.report.bootstrap import ROUNDING, Difference, Interval
from featcal.report.compare import Comparison, Row

Kind = Literal["over", "under", "calibrated", "mixed", "unclear"]
Pair = tuple[float, float]  # what it says, and how often it is right

FEW_ROWS = 500
FROM = " from "  # between the recipe of a calibrator and its file
TRY_NEXT = ("auto", "temperature", "ensemble", "classwise", "vector", "isotonic")
HONESTY = ("ece", "brier")  # a lower loss is no help where one of them is known to rise


@final
@dataclass(frozen=True)
class Place:
    """Where the numbers come from.

    Attributes:
        pack: the path of the pack as the reader would type it.
        fit: the split recipes were fitted on.
        test: the split they were scored on.
        fit_rows: rows of the former.
        files: recipe and file of the calibrators that were fitted beforehand.
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


@final
class Judged:
    """A recipe beside the network as it is.

    Attributes:
        text: of the recipe.
        scores: on the scored rows.
        nll: the paired difference from the network as it is; `ece`, `brier`, `accuracy` likewise.
        harms: the metrics of calibration by which it is known to be worse than nothing.
        chose: the recipe behind `auto`; "" for any other.
    """

    def __init__(self, comparison: Comparison, place: int) -> None:
        self.text, self.scores = comparison[place].recipe, comparison[place].scores
        self.nll, self.ece, self.brier, self.accuracy = (
            paired(comparison, place, 0, name) for name in ("nll", "ece", "brier", "accuracy")
        )
        self.chose = choice(comparison[place])
        self.harms = [name for name in HONESTY if getattr(self, name).verdict == "worse"]


@final
class Facts:
    """What there is to say on the first screen. Recipes are given by their texts.

    The rows that are fitted on choose, the scored rows confirm. A recipe is confirmed where its
    search ended before a cap, it lowers the loss by more than chance, and it is not known to make
    calibration worse: NLL may fall while calibration does so, where a few rows that were given next
    to no probability (wrong labels, as a rule) weigh more than all others. To use is what
    cross-validation chose (`auto`), else the best by its table that is confirmed. What it has not
    judged, a file or a recipe outside its table, must beat that on the scored rows; without a
    table the simplest of those that are not beaten is used.

    Attributes:
        kind: which way the network errs.
        raw: its scores as it is.
        example: a bin that shows it; None where the averages must do.
        over: the worst of the bins that are known to claim too much, for "mixed".
        under: the same of those that claim too little.
        where: pack and splits.
        samples: that the scored rows belong to, where intervals draw those; else 0.
        tried: how many recipes were tried that had not seen the scored rows.
        place: of the recipe to use; None to leave the model as it is.
        pick: that recipe.
        route: how it was found: "chosen" by cross-validation, "next" in its table, "own" where it
            beats both without being judged, "" where there is no table or nothing else to use.
        refused: what `auto` chose, where the scored rows do not confirm it; "" for none.
        alike: others that helped and give the same as it does on every row.
        rivals: others that helped and cannot be told from it by NLL.
        preferred: others that helped and do better on the scored rows, which do not decide.
        spares: whether it was preferred to a simpler rival because that one costs accuracy.
        beats: whether it beats another recipe that helped.
        doubtful: recipes that are not known to help, nor to be worse than it.
        harmful: recipes that lower the loss and harm calibration, the lowest NLL first.
        endless: recipes that lower the loss with a value at the cap of its search.
        lower: the recipe with the lowest ECE, where that is known to be below that of the pick.
        lower_nll: how its NLL stands to that of the pick.
        left: which way the pick errs.
        changed: answers the pick changes.
        seen: recipes that were fitted on the scored rows.
        unknown: whether nobody knows what rows the pick was fitted on.
        intervals: whether there are any.
        idle: steps that do nothing, and warnings of fits.
        untried: further recipes that are worth a try.
        command: what to type next; "" where there is nothing to do.
    """

    pick: Judged | None = None
    route = ""
    lower: Judged | None = None
    lower_nll: str | None = None
    left: Kind | None = None
    changed = 0
    unknown = False

    def __init__(self, comparison: Comparison, where: Place) -> None:
        def against(place: int, other: int, metric: str) -> str | None:
            return paired(comparison, place, other, metric).verdict

        def costs(place: int) -> tuple[bool, tuple[int, int]]:
            return against(place, 0, "accuracy") == "worse", complexity(comparison[place])

        def by(metric: str, places: Iterable[int]) -> list[int]:
            return sorted(places, key=lambda place: comparison[place].scores.metrics[metric])

        def texts(places: Iterable[int]) -> list[str]:
            return [comparison[place].recipe for place in places]

        raw = comparison[0].scores
        self.where, self.raw, self.kind = where, raw, verdict(comparison[0])
        self.example = _example(self.kind, raw.bins)
        self.over, self.under = _astray(raw.bins)
        self.intervals = raw.n > 1 and bool(comparison.settings.get("resamples"))
        self.samples: int = (comparison.settings.get("drawn") or {}).get("samples") or 0
        self.idle, self.seen = idle(comparison), texts(where.seen)
        fair = [place for place in range(1, len(comparison)) if place not in where.seen]
        tried = {recipe.partition(FROM)[0] for recipe in texts(fair)}
        self.tried, self.untried = len(fair), [one for one in TRY_NEXT if one not in tried]
        lowering = [place for place in fair if against(place, 0, "nll") == "better"]
        likelier = [
            place
            for place in lowering
            if not any(step.capped for one in comparison[place].reports for step in one.steps)
        ]
        self.endless = texts(place for place in lowering if place not in likelier)
        harmful = [
            place
            for place in likelier
            if any(against(place, 0, name) == "worse" for name in HONESTY)
        ]
        self.harmful = [Judged(comparison, place) for place in by("nll", harmful)]
        helped = [place for place in likelier if place not in harmful]
        made = [place for place in fair if choice(comparison[place])]
        losses = cross_validated(comparison)
        known = [place for place in helped if comparison[place].recipe in losses]
        own = [place for place in helped if place not in (*made, *known)]
        known = sorted(known, key=lambda place: losses[comparison[place].recipe])
        known = [place for place in known if losses[comparison[place].recipe] < losses[NONE]]
        first = [place for place in made if place in helped] or known[:1]
        _, tied = contest(comparison, "nll", [*first, *own])
        pick = self.place = min(tied, key=lambda one: (one not in first, costs(one)), default=None)
        if first:
            self.route = "own" if pick in own else "chosen" if pick in made else "next"
        self.refused = "" if not made or made[0] in helped else choice(comparison[made[0]])
        self.command = _command(comparison, self.kind, pick, self.untried, where)
        alike, rivals, preferred, doubtful, lower = (list[int]() for _ in range(5))
        if pick is not None:
            self.pick, self.left = Judged(comparison, pick), verdict(comparison[pick])
            self.changed = where.changed[pick] if where.changed else 0
            self.unknown = pick in where.unknown
            for place in (place for place in fair if place != pick):
                nll = paired(comparison, place, pick, "nll")
                if place in helped and _same(nll):
                    alike.append(place)
                elif place in helped and nll.verdict != "worse":
                    (preferred if nll.verdict == "better" else rivals).append(place)
                elif place not in likelier and nll.verdict != "worse":
                    doubtful.append(place)
                if all(against(place, one, "ece") == "better" for one in (0, pick)):
                    lower.append(place)
            if lower:
                place = by("ece", lower)[0]
                self.lower, self.lower_nll = Judged(comparison, place), against(place, pick, "nll")
        self.alike, self.rivals, self.doubtful = map(texts, (alike, rivals, doubtful))
        self.preferred = texts(preferred)
        self.beats = len(helped) > 1 + len(alike) + len(rivals) + len(preferred)
        self.spares = any(costs(one)[1] < costs(pick)[1] for one in rivals if pick is not None)


def contest(
    comparison: Comparison, metric: str, among: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which of some rows are the best by a metric; none where there is nothing to choose from.

    Returns:
        the places of the rows that have the best value on every resample, the best among them (a
        pipeline whose first step does nothing is the same as the rest of it); and of all rows whose
        paired difference from it may be chance, those among them. Where both are the same, the
        intervals say that nothing else is as good.
    """
    column = COLUMNS[metric]
    if not among or column.better == 0:
        return (), ()
    best = max(among, key=lambda place: column.merit(comparison[place].scores.metrics[metric]))
    found = {place: paired(comparison, place, best, metric) for place in among}
    alike = tuple(place for place in among if place == best or _same(found[place]))
    tied = tuple(place for place in among if place in alike or found[place].verdict != "worse")
    return alike, tied


def choice(row: Row) -> str:
    """The recipe that `auto` chose; "" for any other recipe, and where it chose nothing."""
    made = next((report.choice for report in row.reports), None)
    return "" if made is None or FROM in row.recipe else str(made.values.get("recipe", ""))


def cross_validated(comparison: Comparison) -> dict[str, float]:
    """The loss of each recipe on rows left out of its fit, by the table of `auto`."""
    made = (report.choice for row in comparison if FROM not in row.recipe for report in row.reports)
    tables = (step.details.get("choice", ()) for step in made if step is not None)
    return {one["recipe"]: one["value"] for one in next(filter(None, tables), ())}


def complexity(row: Row) -> tuple[int, int]:
    """The steps of a recipe, and the numbers it learned."""
    if row.calibrator is None:
        return 0, 0
    learned = sum(found.numel() for found in row.calibrator.buffers())
    return len(row.calibrator.steps_in_order()), learned


def paired(comparison: Comparison, index: int, other: int, metric: str) -> Difference:
    """Row `index` against any other row, by the resamples both were scored on."""
    against = replace(comparison, against=tuple(other for _ in comparison.rows))
    found = against.difference(index, metric)
    assert found is not None
    return found


def _same(found: Difference) -> bool:
    """Whether two rows never differ by more than rounding; without resamples nobody knows."""
    ends = (found.delta, found.interval.low, found.interval.high)
    return all(abs(end) <= ROUNDING for end in ends)


SMALL = 0.01  # a mean error below one point matters to nobody, however sure it is
CLOSE = 0.03  # no error was found, and one of the mean beyond this would have been
LOPSIDED = 0.5  # of the error must point one way, or it is called mixed


def verdict(row: Row) -> Kind:
    """Which way a network errs, beyond what chance explains and beyond what anyone would mind.

    With few rows no error that can be shown is not the same as no error: only a clear one counts.
    """
    scores = row.scores
    gap, error = scores.metrics["overconfidence"], scores.metrics["ece"]
    around, few = scores.interval("overconfidence"), scores.n < FEW_ROWS
    if few and math.isnan(around.low):
        return "unclear"
    # The mean gap first: a binned error is biased upwards, and its interval reaches 0 long after
    # that of the mean does not.
    if abs(gap) >= max(LOPSIDED * error, SMALL) and not _holds_zero(around):
        return "over" if gap > 0 else "under"
    if error <= SMALL:
        return "unclear" if few else "calibrated"
    if _holds_zero(scores.interval("ece")):
        small = math.isnan(around.low) or max(abs(around.low), abs(around.high)) <= CLOSE
        return "calibrated" if not few and small else "unclear"
    return "unclear" if few else "mixed"


def _holds_zero(found: Interval) -> bool:
    """Whether chance alone explains it; where there is no interval, the size has to decide."""
    return not math.isnan(found.low) and found.low <= 0 <= found.high


# Standard errors beyond which a bin is known to err: of fifteen honest ones, none does so in 24 of
# 25 pages.
CLEAR = 3.0
LIKELY = 2.0  # standard errors of a bin that is told as an example of what is known already
EXAMPLE, EXAMPLE_ROWS, EXAMPLE_RANGE = 0.9, 30, (0.6, 0.97)  # of the bin that is told as an example


def _example(kind: Kind, bins: Bins) -> Pair | None:
    """Confidence and accuracy of the filled bin nearest to 90 %, where it shows the verdict.

    A bin that errs the other way, or that may be off by chance, is no example of an error.
    """
    low, high = EXAMPLE_RANGE
    enough = max(EXAMPLE_ROWS, bins.n // 200)
    filled = [one for one in _filled(bins) if one[0] >= enough and low <= one[1] <= high]
    if not filled:
        return None
    count, said, right = min(filled, key=lambda one: abs(one[1] - EXAMPLE))
    if kind == "calibrated":
        return (said, right) if abs(said - right) <= CLOSE else None
    errors = _errors(count, said, right) * (1 if kind == "over" else -1)
    return (said, right) if abs(said - right) >= SMALL and errors >= LIKELY else None


def _astray(bins: Bins) -> tuple[Pair | None, Pair | None]:
    """Of the bins known to claim too much the one that adds most to the error; too little."""
    known = [
        (count * (said - right), (said, right))
        for count, said, right in _filled(bins)
        if count >= EXAMPLE_ROWS and abs(_errors(count, said, right)) > CLEAR
    ]
    over = max((one for one in known if one[0] > 0), default=None)
    under = max(((-one[0], one[1]) for one in known if one[0] <= 0), default=None)
    return over and over[1], under and under[1]


def _errors(count: float, said: float, right: float) -> float:
    """By how many standard errors a bin claims too much; by how many too little, below 0.

    The score test of a share, which Wilson's interval is the inverse of.
    """
    missed = count * (said - right)
    error = math.sqrt(count * max(said * (1 - said), 0))  # rounding may put a mean above 1
    if not error:
        return math.copysign(math.inf, missed) if missed else 0.0
    return missed / error


def _filled(bins: Bins) -> list[tuple[float, float, float]]:
    """Rows, mean confidence and accuracy of each bin that is not empty."""
    columns = (bins.count.tolist(), bins.mean_confidence.tolist(), bins.accuracy.tolist())
    return [bin_ for bin_ in zip(*columns, strict=True) if bin_[0] > 0]


def _command(
    comparison: Comparison, kind: Kind, pick: int | None, untried: list[str], where: Place
) -> str:
    """What to type next; nothing where there is nothing to do."""

    def option(name: str, value: str, default: str) -> str:
        return "" if value == default else f" {name} {shlex.quote(value)}"

    pack = shlex.quote(where.pack)
    if pick is None:
        if kind in ("calibrated", "unclear") or not untried:
            return ""
        fit = option("--fit-split", where.fit, "val")
        test = option("--test-split", where.test, "test")
        return f"featcal compare {pack} none {' '.join(untried)}{fit}{test}"
    recipe = comparison[pick].recipe
    file = dict(where.files).get(recipe)
    if file is not None:
        split = option("--test-split", where.test, "test")
        return f"featcal predict {pack} {shlex.quote(file)}{split} -o probs.npy"
    # In double quotes, which every shell knows, unless something inside would act there.
    acts = any(mark in recipe for mark in '"$`\\!')
    quoted = shlex.quote(recipe) if acts or recipe.isalnum() else f'"{recipe}"'
    stepwise = " | " in recipe and comparison.settings.get("mode") == "sequential"
    sequential = " --sequential" if stepwise else ""
    split = option("--fit-split", where.fit, "val")
    return f"featcal fit {pack} {quoted}{split}{sequential} -o cal.safetensors"


@final
@dataclass(frozen=True)
class Idle:
    """A step of a fit that a reader should know of: it does nothing, or it gave a warning."""

    step: str
    recipe: str
    why: str
    noop: bool


def idle(rows: Iterable[Row]) -> list[Idle]:
    """Every step that changes nothing, and every warning; each once."""
    said: dict[str, Idle] = {}
    for row in rows:
        for step in (step for report in row.reports for step in report.steps):
            if step.noop:
                why = step.message.removeprefix("no-op: ")
                said.setdefault(f"{step.name}: {why}", Idle(step.name, row.recipe, why, noop=True))
            elif step.warning:
                found = Idle(step.name, row.recipe, step.warning.removesuffix("."), noop=False)
                said.setdefault(step.warning, found)
    return list(said.values())


SAME = 1e-6  # nats; a smaller change is rounding
CONTROL = "temperature"  # divides all logits by one number, whatever the features are


@final
class Certainty:
    """Whether a recipe takes certainty from wrong answers or from right ones.

    The paper's own evidence for clipping (Tao, Dong and Xu, AAAI 2025), held against a recipe that
    never looks at features: any softening may do what is claimed.

    Args:
        recipe: its text.
        found: its entropies.
        growths: those of all recipes by their texts; the control may be among them.

    Attributes:
        outcome: "empty" where a group has no rows, "unchanged" where nothing happens, "unknown"
            without an interval, "alike", "undecided", "wrong" where it takes more from wrong
            answers (or gives more to them), "right".
        takes: whether entropies grow; they fall where it gives certainty.
        claim: whether the paper's claim is met; None where it says nothing about such a recipe.
        control: the entropies of a recipe that sees no features, where there is a finding.
        beside: how strongly the control does the same: "not", "less", "more" or "about as".
    """

    def __init__(
        self, recipe: str, found: EntropyGrowth, growths: Mapping[str, EntropyGrowth]
    ) -> None:
        self.recipe, self.found = recipe, found
        low, high = found.interval.low, found.interval.high
        grew = [float(growth) for growth in found.growth]
        self.takes = sum(grew) > 0
        if not all(found.groups.sizes):
            self.outcome = "empty"
        elif max(map(abs, grew)) < SAME:
            self.outcome = "unchanged"
        elif math.isnan(low):
            self.outcome = "unknown"
        elif max(abs(found.gap), abs(low), abs(high)) < SAME:
            self.outcome = "alike"
        elif low <= 0 <= high:
            self.outcome = "undecided"
        else:
            self.outcome = "wrong" if (low > 0) == self.takes else "right"
        decided = self.outcome in ("wrong", "right") and self.takes
        self.claim = self.outcome == "wrong" if _is_clip(recipe) and decided else None
        self.control: EntropyGrowth | None = None
        self.beside = ""
        if recipe.startswith("clip") and decided and self.outcome == "wrong":
            self.control = growths.get(CONTROL)
        if self.control is not None:
            other = self.control.interval
            if other.low <= 0:
                self.beside = "not"
            elif other.high < low:
                self.beside = "less"
            else:
                self.beside = "more" if other.low > high else "about as"

    @classmethod
    def of_all(cls, growths: Mapping[str, EntropyGrowth]) -> list[Certainty]:
        """The paper's claim for every clip among the recipes, else what the first one does.

        Args:
            growths: of each recipe by its text, that of the network as it is left out.
        """
        found = [cls(recipe, growth, growths) for recipe, growth in growths.items()]
        return [one for one in found if _is_clip(one.recipe)] or found[:1]


def _is_clip(recipe: str) -> bool:
    """Whether it is a clip and nothing else, which the paper makes its claim of."""
    recipe = recipe.partition(FROM)[0]
    return recipe.partition("(")[0] == "clip" and " | " not in recipe
