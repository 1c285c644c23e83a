"""What help and completion say of the library, known without loading it: torch takes seconds.

The orders in which the library lists its parts, and the defaults that it shares with options.
"""

# Methods that are not among them come after.
METHODS = (
    *("auto",),
    *("vector", "matrix", "dirichlet", "bbq", "classwise", "clip", "density", "ensemble", "group"),
    *("histogram", "isotonic", "logit_clip", "norm_clip", "parameterised", "proximity", "sample"),
    *("spline", "svs", "sms", "temperature"),
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
