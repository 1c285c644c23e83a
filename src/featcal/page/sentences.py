"""One sentence under each figure: what it shows here, in numbers, whatever the paper says."""

from __future__ import annotations

import math

from featcal.analysis import (
    ChangedPredictions,
    ClipSweep,
    ConfidentCounts,
    EntropyGrowth,
    FeatureValues,
    GroupCalibration,
    UnitMeans,
)
from featcal.page.phrases import about, capital, in_words, percent

SAME = 1e-6  # nats; a smaller change is rounding


def entropy_words(found: EntropyGrowth) -> str:
    """The paper's claim, measured: clipping takes more certainty from wrong answers than right."""
    groups = found.groups
    wrong, right = groups.sizes
    level = about(groups.confidence)
    if not wrong or not right:
        which = "wrong" if not wrong else "right"
        return f"No answer above {level} confidence is {which}, so there is nothing to compare."
    grew = [float(growth) for growth in found.growth]
    told = (
        f"With {in_words(found.recipe)}, the entropy of confident wrong answers "
        f"({wrong:,} above {level}) {_grew(grew[0])}, that of confident right ones ({right:,}) "
        f"{_grew(grew[1])}."
    )
    if max(map(abs, grew)) < SAME:
        return (
            f"{capital(in_words(found.recipe))} leaves the entropy of confident answers as it is."
        )
    low, high = found.interval.low, found.interval.high
    if math.isnan(low):
        return f"{told} One group is too small for an interval."
    span = f"{found.gap:+.4f} nats (95 % interval {low:+.4f} to {high:+.4f})"
    rough = " The smaller group has few rows, so the interval is rough." if found.few else ""
    if low <= 0 <= high:
        return f"{told} The difference is {span}, which may be chance.{rough}"
    takes = sum(grew) > 0
    what, way = ("takes more certainty", "from") if takes else ("gives more certainty", "to")
    more, less = ("wrong", "right") if (low > 0) == takes else ("right", "wrong")
    claim = ""
    if found.recipe.startswith("clip") and takes:
        claim = ", as the paper claims" if low > 0 else ", the opposite of what the paper claims"
    so = f"it {what} {way} {more} answers than {way} {less} ones{claim}"
    return f"{told} The difference is {span}: {so}.{rough}"


def _grew(by: float) -> str:
    if abs(by) < SAME:
        return "did not change"
    return f"{'grew' if by > 0 else 'fell'} by {abs(by):.4f} nats"


def units_words(found: UnitMeans) -> str:
    """Whether features are larger where the network is sure and wrong."""
    if math.isnan(found.higher):
        return "One of the groups has no rows, so their features cannot be compared."
    means = [float(group.mean()) for group in (found.hce, found.lce)]
    what = "mean absolute feature" if found.absolute else "mean feature"
    return (
        f"The {what} over all {len(found.hce):,} units is {means[0]:.4g} for confident wrong "
        f"answers and {means[1]:.4g} for confident right ones; {percent(found.higher)} of the "
        "units are larger where the answer is wrong."
    )


def values_words(found: FeatureValues) -> str:
    """How wide the two distributions are."""
    wrong, right = (fit.sigma for fit in found.fits)
    if math.isnan(wrong) or math.isnan(right):
        return "One of the groups has no rows, so their values cannot be compared."
    kind = "normal" if found.signed else "rectified normal"
    told = (
        f"Fitted with a {kind} of mean 0, the values have sigma {wrong:.4g} where a confident "
        f"answer is wrong and {right:.4g} where it is right"
    )
    if wrong > right:
        return f"{told}: wider where it is wrong, as the paper reports of its networks."
    return f"{told}: not wider where it is wrong, unlike what the paper reports of its networks."


def counts_words(found: ConfidentCounts, level: float = 0.95) -> str:
    """How many confident answers are wrong, before and after."""
    at = found.levels.index(level) if level in found.levels else len(found.levels) - 1
    shown = []
    name = in_words(found.recipe)
    for word, counts in (("as they are", found.before), (f"with {name}", found.after)):
        right, wrong = (int(count) for count in counts[:, at])
        share = f", {percent(wrong / (right + wrong))}" if right + wrong else ""
        shown.append(f"{wrong:,} of {right + wrong:,} are wrong {word}{share}")
    return f"Of the answers above {about(found.levels[at])} confidence, {'; '.join(shown)}."


def changed_words(found: ChangedPredictions) -> str:
    """How many predictions became others, and how that went."""
    name = capital(in_words(found.recipe))
    if not len(found.rows):
        return f"{name} changes no predicted class."
    fixed, broken, other = (int(kind.sum()) for kind in (found.fixed, found.broken, found.other))
    return (
        f"{name} changes the predicted class of {len(found.rows):,} of {found.n:,} rows "
        f"({percent(len(found.rows) / found.n)}): {fixed:,} became right, {broken:,} became wrong, "
        f"{other:,} went from one wrong class to another."
    )


def classes_words(found: GroupCalibration) -> str:
    """For how many classes the interval excludes 0, and for how many it would by chance."""
    low, high = found.interval.T
    over, under = int((low > 0).sum()), int((high < 0).sum())
    filled = int((found.count > 0).sum())
    few = int((found.few & (found.count > 0)).sum())
    some = f" {few:,} of the {filled:,} have fewer than 100 rows." if few else ""
    return (
        f"Predicted classes: {filled:,}. By the 95 % interval of each, the model as it is claims "
        f"too much in {over:,} and too little in {under:,}; about {0.05 * filled:.0f} would be so "
        f"by chance alone.{some}"
    )


def sweep_words(found: ClipSweep) -> str:
    """Where the optimum lies, and what it gives on the scored rows."""
    best = found.best
    if math.isinf(float(found.thresholds[best])):
        return (
            f"For {in_words(found.recipe)} no threshold on this grid lowers the loss of the fit "
            "split: the best is not to clip."
        )
    c, last = float(found.thresholds[best]), len(found.thresholds) - 1
    before, after = (float(found.test.ece[place]) for place in (last, best))
    return (
        f"For {in_words(found.recipe)} the loss of the fit split is lowest at c = {c:.4g}; on the "
        f"scored rows ECE is then {percent(after)}, and {percent(before)} without clipping."
    )
