"""The names of the methods, for help and completion, which know them without loading any."""

# The order in which help and pages list them; others come after.
LISTED = (
    *("auto",),
    *("vector", "matrix", "dirichlet", "bbq", "classwise", "clip", "density", "ensemble", "group"),
    *("histogram", "isotonic", "logit_clip", "norm_clip", "parameterised", "proximity", "sample"),
    *("spline", "svs", "sms", "temperature"),
)
