"""The names of the methods, for help and completion, which know them without loading any."""

# The order in which help and pages list them, that of docs/methods.md; others come after.
LISTED = (
    *("auto", "clip", "norm_clip", "temperature", "ensemble", "parameterised", "sample"),
    *("classwise", "group", "proximity", "density", "logit_clip", "histogram", "isotonic"),
    *("spline", "bbq", "vector", "matrix", "dirichlet", "svs", "sms"),
)
