"""What help and completion say of the library, known without loading it: torch takes seconds.

The orders in which the library lists its parts, and the defaults that it shares with options.
"""

# Methods in the order of docs/methods.md; those that are not among them come after.
METHODS = (
    *("auto", "clip", "norm_clip", "temperature", "ensemble", "parameterised", "sample"),
    *("classwise", "group", "proximity", "density", "logit_clip", "histogram", "isotonic"),
    *("spline", "bbq", "vector", "matrix", "dirichlet", "svs", "sms"),
)
LOSSES = (
    *("adafocal", "dual_focal", "focal", "flsd", "flsc", "mmce"),
    *("ce", "brier", "max_entropy", "label_smoothing", "soft_ece"),
)
METRICS = (
    *("accuracy", "confidence", "overconfidence", "ece", "adaptive_ece", "classwise_ece", "mce"),
    *("rms_ce", "debiased_ce", "smooth_ece", "nll", "brier", "auroc", "aurc"),
)
RESAMPLES = 1000  # behind the intervals of a comparison
COLLECTED_ROWS = 8192  # in a shard: what a kill costs, and what is in memory at a time
TOLERANCE = 1e-4  # of an exported network, held against its original
