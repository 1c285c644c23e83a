"""Which way a network errs, and the one sentence that tells it."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, final

from featcal.analysis import EntropyGrowth
from featcal.core.fit import StepReport
from featcal.metrics.bins import Bins
from featcal.report.compare import Comparison, Row
from featcal.report.scores import COLUMNS, ROUNDING, Difference, Interval

# --- Numbers and names as sentences have them: 9.2 points, 84.3 %, "temperature scaling".

# What the literature calls a method, for a person who knows none of them.
STEPS = {
    "bbq": "Bayesian binning into quantiles",
    "classwise": "class-based temperature scaling",
    "clip": "feature clipping",
    "density": "density-aware calibration",
    "dirichlet": "Dirichlet calibration",
    "ensemble": "ensemble temperature scaling",
    "group": "group calibration",
    "histogram": "histogram binning",
    "isotonic": "isotonic regression",
    "logit_clip": "logit clipping",
    "matrix": "matrix scaling",
    "parameterised": "parameterised temperature scaling",
    "proximity": "proximity-informed calibration",
    "sms": "structured matrix scaling",
    "spline": "spline calibration",
    "svs": "structured vector scaling",
    "temperature": "temperature scaling",
    "vector": "vector scaling",
}
FROM = " from "  # between the recipe of a calibrator and its file


def percent(share: float) -> str:
    """84.3 %."""
    return f"{100 * share:.1f} %"


def about(share: float) -> str:
    """84 %, and never 100 % for what is less."""
    rounded = round(100 * share)
    if rounded in (0, 100) and 0 < share < 1:
        return f"{min(max(100 * share, 0.1), 99.9):.1f} %"
    return f"{rounded} %"


def apart(said: float, right: float) -> tuple[str, str]:
    """Two shares, with as many digits as it takes to see that they differ.

    >>> apart(0.9, 0.82), apart(0.894, 0.886)
    (('90 %', '82 %'), ('89.4 %', '88.6 %'))
    """
    for told in (about, percent, lambda share: f"{100 * share:.2f} %"):
        texts = told(said), told(right)
        if texts[0] != texts[1]:
            return texts
    return about(said), about(right)


def points(share: float) -> str:
    """9.2 points, 1 point: of 100."""
    text = f"{100 * share:.2f}" if abs(share) < 0.01 else f"{100 * share:.1f}"
    return f"{text} point" if text == "1.00" else f"{text} points"


def rows(count: int) -> str:
    """1 row, 3,000 rows."""
    return f"{count:,} row" if count == 1 else f"{count:,} rows"


def between(found: Interval, *, signed: bool = False, digits: int | None = None) -> str:
    """An interval in brackets, in points unless `digits` are given; nothing where there is none.

    >>> between(Interval(0.081, 0.102))
    ' (95 % interval 8.1 to 10.2)'
    """
    if math.isnan(found.low):
        return ""
    sign = "+z" if signed else "z"  # z: no minus before a zero
    if digits is not None:
        low, high = (f"{end:{sign}.{digits}f}" for end in (found.low, found.high))
    else:
        close = max(abs(found.low), abs(found.high)) < 0.01
        low, high = (f"{100 * end:{sign}.{2 if close else 1}f}" for end in (found.low, found.high))
    return f" (95 % interval {low} to {high})"


def mirrored(found: Interval) -> Interval:
    """The interval of the same number with its sign changed: a fall of 2, not a rise of -2."""
    return Interval(-found.high, -found.low)


def listed(names: Sequence[str]) -> str:
    """A, b and c.

    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def in_words(recipe: str) -> str:
    """The recipe by the names its steps have in the literature, where they have one.

    >>> in_words("clip(min_accuracy=0.99) | temperature")
    'feature clipping (min_accuracy=0.99) followed by temperature scaling'
    """
    recipe, where, file = recipe.partition(FROM)
    return " followed by ".join(map(_step, recipe.split(" | "))) + where + file


def _step(step: str) -> str:
    """One step; its arguments stay, since they may be all that tells two recipes apart."""
    name, opened, arguments = step.strip().partition("(")
    return f"{STEPS[name]}{' ' if opened else ''}{opened}{arguments}" if name in STEPS else step


def capital(text: str) -> str:
    """The text with a capital first letter."""
    return text[:1].upper() + text[1:]


# --- Which recipe is the best by a metric, from which others it cannot be told apart, which to
# use.

HONESTY = ("ece", "brier")  # a lower loss is no help where one of them is known to rise


@final
@dataclass(frozen=True)
class Contest:
    """The outcome by one metric.

    Attributes:
        best: the place of the row with the best value.
        alike: places of the rows that have its value on every resample, its own among them: a
            pipeline whose first step does nothing is the same as the rest of it.
        tied: places of all rows whose paired difference from it may be chance, those among them.
    """

    best: int
    alike: tuple[int, ...]
    tied: tuple[int, ...]

    @property
    def clear(self) -> bool:
        """Whether the intervals say that nothing else is as good."""
        return self.tied == self.alike


def contest(
    comparison: Comparison, metric: str, among: tuple[int, ...] | None = None
) -> Contest | None:
    """The best rows by a metric; None where there is nothing to choose from.

    Args:
        comparison: the rows.
        metric: one of which more or less is better.
        among: the places of the rows that take part; None for all.
    """
    places = tuple(range(len(comparison))) if among is None else among
    column = COLUMNS[metric]
    if not places or column.better == 0:
        return None
    best = max(places, key=lambda place: column.merit(comparison[place].scores.metrics[metric]))
    found = {place: paired(comparison, place, best, metric) for place in places}
    alike = tuple(place for place in places if place == best or _same(found[place]))
    tied = tuple(place for place in places if place in alike or found[place].verdict != "worse")
    return Contest(best, alike, tied)


@final
@dataclass(frozen=True)
class Choice:
    """What to use, and why not the others.

    Attributes:
        pick: the place of the recipe to use: the simplest of those that helped and that no other
            of them beats by NLL; None to leave the model as it is.
        helped: places of the rows that lower the loss by more than chance, and are not known to
            make calibration worse.
        harmful: places of those that lower the loss by more than chance, and are.
        seen: places of those that were fitted on the scored rows, whose numbers say nothing.
    """

    pick: int | None
    helped: tuple[int, ...]
    harmful: tuple[int, ...]
    seen: tuple[int, ...]

    @classmethod
    def of(cls, comparison: Comparison, seen: tuple[int, ...] = ()) -> Choice:
        """Chooses by NLL, among those that do not pay for it with calibration."""
        likelier = [
            place
            for place in range(1, len(comparison))
            if place not in seen and _judged(comparison, place, "nll") == "better"
        ]
        harmful = tuple(place for place in likelier if harmed(comparison, place))
        good = tuple(place for place in likelier if place not in harmful)
        return cls(_simplest(comparison, good), good, harmful, seen)


def harmed(comparison: Comparison, place: int) -> list[str]:
    """The metrics of calibration by which a recipe is known to be worse than none."""
    return [name for name in HONESTY if _judged(comparison, place, name) == "worse"]


def _simplest(comparison: Comparison, among: tuple[int, ...]) -> int | None:
    found = contest(comparison, "nll", among)
    if found is None:
        return None
    return min(
        found.tied, key=lambda place: (costs(comparison, place), complexity(comparison[place]))
    )


def steps(row: Row) -> int:
    """How many steps a recipe has."""
    return 0 if row.calibrator is None else len(row.calibrator.steps_in_order())


def costs(comparison: Comparison, place: int) -> bool:
    """Whether a recipe is known to cost accuracy."""
    return _judged(comparison, place, "accuracy") == "worse"


def complexity(row: Row) -> tuple[int, int]:
    """The steps of a recipe, and the numbers it learned."""
    learned = () if row.calibrator is None else row.calibrator.buffers()
    return steps(row), sum(found.numel() for found in learned)


def _judged(comparison: Comparison, place: int, metric: str) -> str | None:
    found = comparison.difference(place, metric)
    return None if found is None else found.verdict


def paired(comparison: Comparison, index: int, other: int, metric: str) -> Difference:
    """Row `index` against any other row, by the resamples both were scored on."""
    against = replace(comparison, against=tuple(other for _ in comparison.rows))
    found = against.difference(index, metric)
    assert found is not None
    return found


def same(comparison: Comparison, index: int, other: int, metric: str) -> bool:
    """Whether two rows are one under two names, as far as a metric can tell."""
    return index == other or _same(paired(comparison, index, other, metric))


def _same(found: Difference) -> bool:
    """Whether two rows never differ by more than rounding; without resamples nobody knows."""
    ends = (found.delta, found.interval.low, found.interval.high)
    return all(abs(end) <= ROUNDING for end in ends)


Kind = Literal["over", "under", "calibrated", "mixed", "unclear"]
Pair = tuple[float, float]  # what it says, and how often it is right

FEW_ROWS = 500
SMALL = 0.01  # a mean error below one point matters to nobody, however sure it is
CLOSE = 0.03  # no error was found, and one of the mean beyond this would have been
LOPSIDED = 0.5  # of the error must point one way, or it is called mixed
# Standard errors beyond which a bin is known to err: of fifteen honest ones, none does so in 24 of
# 25 pages.
CLEAR = 3.0
LIKELY = 2.0  # standard errors of a bin that is told as an example of what is known already
EXAMPLE, EXAMPLE_ROWS, EXAMPLE_RANGE = 0.9, 30, (0.6, 0.97)  # of the bin that is told as an example

TRUST = {
    "over": "Not as it is: it claims more than it delivers.",
    "under": "Yes, and more than it says: it is right more often than it claims.",
    "calibrated": "Yes. Read its confidence as the share of such answers that are right.",
    "unclear": "Nobody can say yet: there are too few labelled rows to judge it by.",
}


def verdict(raw: Row) -> Kind:
    """Which way the network errs, beyond what chance explains and beyond what anyone would mind.

    With few rows no error that can be shown is not the same as no error: only a clear one counts.
    """
    metrics = raw.scores.metrics
    gap, error = metrics["overconfidence"], metrics["ece"]
    few = raw.scores.n < FEW_ROWS
    if few and math.isnan(raw.scores.interval("overconfidence").low):
        return "unclear"
    # The mean gap first: a binned error is biased upwards, and its interval reaches 0 long after
    # that of the mean does not.
    sided = abs(gap) >= max(LOPSIDED * error, SMALL)
    if sided and not _holds_zero(raw.scores.interval("overconfidence")):
        return "over" if gap > 0 else "under"
    if error <= SMALL:
        return "unclear" if few else "calibrated"
    if _holds_zero(raw.scores.interval("ece")):
        return "calibrated" if not few and _within(raw, CLOSE) else "unclear"
    return "unclear" if few else "mixed"


def headline(kind: Kind, raw: Row) -> str:
    """One sentence with numbers anyone can picture."""
    if kind == "unclear":
        said, right = _means(raw)
        return (
            f"{rows(raw.scores.n)} cannot tell whether this model's confidence is honest: it is "
            f"{about(said)} sure on average and right in {about(right)}."
        )
    if kind == "mixed":
        return f"This model{_mixed(raw)}."
    told = {
        "calibrated": "'s confidence can be taken at its word",
        "over": " is too sure of itself",
        "under": " is better than it thinks",
    }[kind]
    example = _example(kind, raw.scores.bins)
    return f"This model{told}: {_said(raw, example, close=kind == 'calibrated')}."


def trust(kind: Kind, raw: Row) -> str:
    """Whether to trust the confidence, in one sentence."""
    if kind != "mixed":
        return TRUST[kind]
    over, under = _astray(raw.scores.bins)
    if over and under:
        return "Not as it is: it claims too much in some places and too little in others."
    if over:
        return "Not everywhere: in places it claims more than it delivers."
    if under:
        return "Only as a rough guide: in places it is right more often than it claims."
    return "Only as a rough guide: it is off, and these rows do not tell which way."


def _said(raw: Row, example: Pair | None, *, close: bool) -> str:
    """A bin as an example, or the averages, which are nothing the model ever says."""
    pair = example or _means(raw)
    said, right = map(about, pair) if close else apart(*pair)
    if example is None:
        return f"on average it is {said} sure, and right {right} of the time"
    return f"when it says {said}, it is right about {right} of the time"


def _mixed(raw: Row) -> str:
    """Where it errs in each direction, as far as single bins can show it."""
    over, under = _astray(raw.scores.bins)
    if over and under:
        return (
            f" is too sure in some places and too modest in others: when it says {about(over[0])} "
            f"it is right {about(over[1])} of the time, and when it says {about(under[0])}, "
            f"{about(under[1])}"
        )
    found = over or under
    if found is None:
        error = points(raw.scores.metrics["ece"])
        return (
            f"'s confidence is off, by {error} on average, but {rows(raw.scores.n)} do not tell "
            "which way"
        )
    way = "too sure" if over else "too modest"
    return f" is {way} in places: {_said(raw, found, close=False)}"


def _example(kind: Kind, bins: Bins) -> Pair | None:
    """Confidence and accuracy of the filled bin nearest to 90 %, where it shows the verdict.

    A bin that errs the other way, or that may be off by chance, is no example of an error.
    """
    enough = max(EXAMPLE_ROWS, bins.n // 200)
    low, high = EXAMPLE_RANGE
    filled = [one for one in _filled(bins) if one[0] >= enough and low <= one[1] <= high]
    if not filled:
        return None
    nearest = min(filled, key=lambda one: abs(one[1] - EXAMPLE))
    _, said, right = nearest
    if kind == "calibrated":
        return (said, right) if abs(said - right) <= CLOSE else None
    errors = _errors(*nearest) if kind == "over" else -_errors(*nearest)
    return (said, right) if abs(said - right) >= SMALL and errors >= LIKELY else None


def _astray(bins: Bins) -> tuple[Pair | None, Pair | None]:
    """Of the bins known to claim too much the one that adds most to the error; too little.

    The bins are judged by the score test of a share, which Wilson's interval is the inverse of.
    """
    over: list[tuple[float, Pair]] = []
    under: list[tuple[float, Pair]] = []
    for count, said, right in _filled(bins):
        missed = count * (said - right)
        if count >= EXAMPLE_ROWS and abs(_errors(count, said, right)) > CLEAR:
            (over if missed > 0 else under).append((abs(missed), (said, right)))
    worst = [max(side)[1] if side else None for side in (over, under)]
    return worst[0], worst[1]


def _errors(count: float, said: float, right: float) -> float:
    """By how many standard errors a bin claims too much; by how many too little, below 0."""
    missed = count * (said - right)
    error = math.sqrt(count * max(said * (1 - said), 0))  # rounding may put a mean above 1
    if not error:
        return math.copysign(math.inf, missed) if missed else 0.0
    return missed / error


def _filled(bins: Bins) -> list[tuple[float, float, float]]:
    """Rows, mean confidence and accuracy of each bin that is not empty."""
    columns = (bins.count, bins.mean_confidence, bins.accuracy)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [(count, said, right) for count, said, right in rows if count > 0]


def _means(raw: Row) -> Pair:
    return raw.scores.metrics["confidence"], raw.scores.metrics["accuracy"]


def _within(raw: Row, most: float) -> bool:
    """Whether the mean gap is known to be small, rather than not known to be large."""
    found = raw.scores.interval("overconfidence")
    return math.isnan(found.low) or max(abs(found.low), abs(found.high)) <= most


def _holds_zero(found: Interval) -> bool:
    """Whether chance alone explains it; where there is no interval, the size has to decide."""
    return not math.isnan(found.low) and found.low <= 0 <= found.high


# --- Recipes that are not recommended although the loss falls: what they harm, or what they have
# seen.
#
# NLL may fall while calibration gets worse, where a few rows that were given next to no probability
# (wrong labels, as a rule) weigh more than all others.

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


# --- What to do about a network's confidence, and what to type.

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


# --- What a reader must know before acting on a summary: few rows, no intervals, idle steps.


def cautions(comparison: Comparison, chosen: Choice, place: Place) -> list[str]:
    """What a reader must know before acting on the summary."""
    n, fit, fit_rows = comparison[0].scores.n, place.fit, place.fit_rows
    found = [fitted_on_the_scored(comparison, chosen.seen)] if chosen.seen else []
    if chosen.pick in place.unknown:
        found.append(
            f"It is not known what rows {in_words(comparison[chosen.pick].recipe)} was fitted on: "
            "if rows that are scored here were among them, it looks better than it is."
        )
    intervals = n > 1 and bool(comparison.settings.get("resamples"))
    if n < FEW_ROWS:
        wide = "the intervals are wide, and " if intervals else ""
        found.append(
            f"Only {rows(n)} {'was' if n == 1 else 'were'} scored: {wide}every number here may "
            "move with a few more rows."
        )
    if fit_rows < FEW_ROWS:
        found.append(
            f"Recipes were fitted on only {rows(fit_rows)} of {fit}: fits with many "
            "values may follow their noise."
        )
    if not intervals:
        found.append("There are no intervals, so nothing here is known to be more than chance.")
    found += idle(comparison)
    return found


def idle(comparison: Iterable[Row]) -> list[str]:
    """Every step that changes nothing, with its reason, and every warning; each said once."""
    said: dict[str, str] = {}
    for row in comparison:
        for report in row.reports:
            for step in report.steps:
                if step.noop:
                    why = step.message.removeprefix("no-op: ")
                    named = capital(in_words(step.name))
                    said[step.name] = f"{named} changes nothing here: {why}."
                elif step.warning:
                    said.setdefault(step.warning, _warned(row.recipe, step))
    return list(said.values())


def _warned(recipe: str, step: StepReport) -> str:
    """The warning as a sentence that names the step, and the recipe where it is one of several."""
    text = step.warning
    if not text.startswith(step.name):
        text = f"{in_words(step.name)}: {text}"
    where = f" (in {recipe})" if " | " in recipe else ""
    return f"{capital(text.removesuffix('.'))}{where}."


# --- The verdict in plain words, from the numbers alone: may one trust this model's confidence?
#
# Written for a person who has never heard of calibration. Every sentence is a pure function of a
# comparison; nothing is claimed that an interval does not carry.


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
        named = capital(_words_named(comparison, pick))
        told = f"{named} {brings}{_against_others(comparison, chosen)}"
    else:
        rivals = [place for place in found.tied if not same(comparison, place, pick, "nll")]
        names = _all_named(comparison, [pick, *rivals])
        simpler = min(complexity(comparison[place]) for place in rivals)
        kind = " that costs no accuracy" if simpler < complexity(comparison[pick]) else ""
        told = (
            f"There is no clear winner by likelihood (NLL): {names} are within chance of each "
            f"other. The simplest of them{kind} is {_words_named(comparison, pick)}: it {brings}"
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
    return f" {capital(_words_named(comparison, best))} brings the ECE {still}, to {told}{but}."


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


def _words_named(comparison: Comparison, place: int) -> str:
    return in_words(comparison[place].recipe)


def _all_named(comparison: Comparison, places: Sequence[int]) -> str:
    return listed([_words_named(comparison, place) for place in places])


# --- Whether a recipe takes certainty from wrong answers or from right ones, in words and
# numbers.
#
# The paper's own evidence for clipping (Tao, Dong and Xu, AAAI 2025), held against a recipe that
# never looks at features.

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
