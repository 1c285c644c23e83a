"""The two ways featcal speaks up: an error for input it refuses, a warning for a fit it doubts."""


class InputError(ValueError):
    """Input that cannot be used; the text names the argument, the value and the remedy."""


class CalibrationWarning(UserWarning):
    """A fit that ended somewhere a person should look at."""
