"""Metrics: each a float over a mergeable summary of predictions.

A function takes probabilities, `ece(probs, labels)`, or logits by keyword, `ece(logits=z,
labels=y)`, and returns a fraction. For data in parts, read each part once with `Predictions.of`,
add up the summaries' `of_predictions`, and ask the sums: the summary of rows is the sum of those of
their parts, that of no rows is neutral, and a rank's part becomes the whole by `reduced()`.
"""

from featcal.metrics.bins import (
    Bins,
    ClassBins,
    ProperSums,
    accuracy,
    brier,
    classwise_ece,
    ece,
    mce,
    nll,
    rms_ce,
)
from featcal.metrics.inputs import Predictions, TopLabel, top_label
from featcal.metrics.ordered import (
    Ordered,
    adaptive_ece,
    adaptive_ece_of,
    aurc,
    aurc_of,
    auroc,
    auroc_of,
    debiased_ce,
    debiased_ce_of,
    e_aurc,
    e_aurc_of,
    ks_error,
    ks_error_of,
    smooth_ece,
    smooth_ece_of,
)

__all__ = [
    "Bins",
    "ClassBins",
    "Ordered",
    "Predictions",
    "ProperSums",
    "TopLabel",
    "accuracy",
    "adaptive_ece",
    "adaptive_ece_of",
    "aurc",
    "aurc_of",
    "auroc",
    "auroc_of",
    "brier",
    "classwise_ece",
    "debiased_ce",
    "debiased_ce_of",
    "e_aurc",
    "e_aurc_of",
    "ece",
    "ks_error",
    "ks_error_of",
    "mce",
    "nll",
    "rms_ce",
    "smooth_ece",
    "smooth_ece_of",
    "top_label",
]
