"""One sentence under each figure: what it shows here, in numbers, whatever the paper says."""

from __future__ import annotations

import math

from featcal.analysis import (
    ChangedPredictions,
    ClipSweep,
    ConfidentCounts,
    FeatureValues,
    GroupCalibration,
    UnitMeans,
)
from featcal.analysis.entropy import FEW
from featcal.page.phrases import about, capital, in_words, percent

HALF, NEAR = 0.5, 0.1  # of values at 0 as a rectified normal of mean 0 has them, and how nearly


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
    kind = "rectified normal of mean 0, as the paper's theory has it"
    if found.signed:
        kind = "normal of mean 0"
    told = (
        f"Fitted with a {kind}, the values have sigma (their spread) {wrong:.4g} where a confident "
        f"answer is wrong and {right:.4g} where it is right"
    )
    return f"{told}{_wider(found)}{_zeros(found)}"


def _wider(found: FeatureValues) -> str:
    """Whether the values of wrong answers are spread more, as far as these rows can tell."""
    low, high = found.interval.low, found.interval.high
    if math.isnan(low):
        return "; there are too few rows to tell whether that is more than chance."
    if max(abs(found.gap), abs(low), abs(high)) == 0:
        return ": there is no difference."
    digits = _digits((high - low) / 2)
    gap, low_text, high_text = (f"{end:+z.{digits}f}" for end in (found.gap, low, high))
    span = f". The difference is {gap} (95 % interval {low_text} to {high_text})"
    rough = " The smaller group has few rows, so the interval is rough."
    few = rough if min(found.groups.sizes) < FEW else ""
    if low <= 0 <= high:
        return f"{span}, which may be chance.{few}"
    if low > 0:
        return f"{span}: wider where it is wrong, as the paper reports of its networks.{few}"
    return (
        f"{span}: narrower where it is wrong, the opposite of what the paper reports of its "
        f"networks.{few}"
    )


def _digits(error: float) -> int:
    """Decimals that show two figures of an error."""
    return max(0, 1 - math.floor(math.log10(error))) if error > 0 else 4


def _zeros(found: FeatureValues) -> str:
    """Where the values are no rectified normals of mean 0, which have half of them at 0."""
    if found.signed or all(abs(share - HALF) <= NEAR for share in found.zeros):
        return ""
    wrong, right = (percent(share) for share in found.zeros)
    return (
        f" Of such a normal half the values would be 0; of these, {wrong} (wrong answers) and "
        f"{right} (right ones) are. It does not describe them, so read sigma as no more than the "
        "root mean square of the values above 0."
    )


def counts_words(found: ConfidentCounts, level: float = 0.95) -> str:
    """How many confident answers are wrong, before and after."""
    at = found.levels.index(level) if level in found.levels else len(found.levels) - 1
    (right, wrong), (right_after, wrong_after) = (
        [int(count) for count in counts[:, at]] for counts in (found.before, found.after)
    )
    told, tail = f"No answer is above {about(found.levels[at])} confidence", " of such are wrong"
    if right + wrong:
        told = f"Of the answers above {about(found.levels[at])} confidence, "
        told, tail = f"{told}{_share(wrong, right + wrong)} are wrong", ""
    if found.recipe == "none":
        return f"{told} as the model is."
    after = "no answer is that sure"
    if right_after + wrong_after:
        after = _share(wrong_after, right_after + wrong_after) + tail
    return f"{told} as the model is; with {in_words(found.recipe)}, {after}."


def _share(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,} ({percent(part / whole)})"


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
    which = "All" if few == filled else f"{few:,} of the {filled:,}"
    some = f" {which} have fewer than 100 rows." if few else ""
    chance = 0.05 * filled
    expected = f"about {chance:.0f}" if chance >= 1 else "fewer than one"
    beside = f"; {expected} would be so by chance alone"
    if 0 < over + under <= chance:
        beside = f", no more than chance alone would give ({expected})"
    return (
        f"Predicted classes: {filled:,}. By the 95 % interval of each, the model as it is claims "
        f"too much in {over:,} and too little in {under:,}{beside}.{some}"
    )


def sweep_words(found: ClipSweep) -> str:
    """Where the optimum lies, and what it gives on the scored rows."""
    best, name = found.best, in_words(found.recipe)
    if math.isinf(float(found.thresholds[best])):
        return (
            f"No threshold on this grid lowers the loss of {name} on the rows it is fitted on: the "
            "best is not to clip."
        )
    c, last = float(found.thresholds[best]), len(found.thresholds) - 1
    before, after = (float(found.test.ece[place]) for place in (last, best))
    return (
        f"The loss of {name} on the rows it is fitted on is lowest at c = {c:.4g}; on the scored "
        f"rows ECE is then {percent(after)}, and {percent(before)} without clipping."
    )
