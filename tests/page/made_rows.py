"""Rows of a comparison made up for a test: values, and replicates around them."""

import torch

from featcal import parse
from featcal.metrics.bins import Bins
from featcal.page.verdict import Facts, Place
from featcal.page.wording import Summary
from featcal.report.compare import Comparison, Row
from featcal.report.scores import Scores

PLACE = Place("my pack", fit_rows=5000)
RAW = {"accuracy": 0.80, "confidence": 0.89, "ece": 0.09, "nll": 0.9, "brier": 0.3}
GOOD = {"confidence": 0.81, "ece": 0.02, "nll": 0.8, "brier": 0.28}


def bins_of(*rows):
    """Bins with (count, confidence, accuracy) each."""
    count, said, right = (
        torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True)
    )
    return Bins(count, count * said, count * right)


OVER = bins_of((200, 0.5, 0.4), (800, 0.9, 0.82), (1000, 0.98, 0.9))


def noise(seed, spread, size=400):
    return spread * torch.randn(size, generator=torch.Generator().manual_seed(seed)).double()


def row(
    recipe, *, n=2000, bins=OVER, spread=0.002, seed=0, accuracy_noise=0.0, report=None, **values
):
    """A row whose replicates are its values and some noise; `seed` tells rows apart."""
    metrics = {**RAW, **values}
    metrics.setdefault("overconfidence", metrics["confidence"] - metrics["accuracy"])
    # Rows that differ never do so by the same on every resample.
    moved = {
        name: value + noise(seed, spread * (1 + 0.01 * value)) for name, value in metrics.items()
    }
    own = accuracy_noise + 0.01 * abs(metrics["accuracy"] - RAW["accuracy"])
    moved["accuracy"] = metrics["accuracy"] + noise(seed, own)
    for name, values in moved.items():
        values[0] = metrics[name]  # what the others scatter around
    calibrator = None if recipe == "none" else parse(recipe)
    if calibrator is not None:
        calibrator.report = report
    return Row(recipe, calibrator, Scores(n, metrics, bins, moved), 0.0)


def good(recipe, **values):
    """A row that helps."""
    return row(recipe, **{**GOOD, **values})


def harmful(recipe, **values):
    """A recipe that lowers the loss, and makes calibration worse."""
    return good(recipe, **{"seed": 1, "ece": 0.12, "brier": 0.33, **values})


def compared(*rows, resamples=400):
    against = (None, *(0 for _ in rows[1:]))
    return Comparison(tuple(rows), against, {"resamples": resamples, "seed": 0})


def judged(*rows, place=PLACE):
    """The facts."""
    return Facts(compared(*rows), place)


def told(*rows, place=PLACE):
    """The summary, and its answers by their questions."""
    found = Summary.of(judged(*rows, place=place))
    return found, {point.question: point.answer for point in found.points}
