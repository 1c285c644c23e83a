"""The summary: every case a reader may meet, from numbers made for it."""

import math

import pytest
import torch

from featcal import parse
from featcal.core.fitting import FitReport, StepReport
from featcal.metrics.bins import Bins
from featcal.page.contest import contest
from featcal.page.verdicts import headline, verdict
from featcal.page.words import Place, summary
from featcal.report.rows import Comparison, Row
from featcal.report.scores import Scores

PLACE = Place("my pack", fit_rows=5000)
RAW = {"accuracy": 0.80, "confidence": 0.89, "ece": 0.09, "nll": 0.9}


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
    moved = {name: value + noise(seed, spread) for name, value in metrics.items()}
    moved["accuracy"] = metrics["accuracy"] + noise(seed, accuracy_noise)
    calibrator = None if recipe == "none" else parse(recipe)
    if calibrator is not None:
        calibrator.report = report
    return Row(recipe, calibrator, Scores(n, metrics, bins, moved), 0.0)


def compared(*rows, resamples=400):
    against = (None, *(0 for _ in rows[1:]))
    return Comparison(tuple(rows), against, {"resamples": resamples, "seed": 0})


def told(*rows, place=PLACE):
    found = summary(compared(*rows), place)
    return found, {point.question: point.answer for point in found.points}


GOOD = {"confidence": 0.81, "ece": 0.02, "nll": 0.8}


def test_an_overconfident_model_is_told_with_a_number_to_picture():
    found, answers = told(row("none"), row("temperature", seed=1, **GOOD))
    assert found.kind == "over"
    assert found.headline == (
        "This model is too sure of itself: when it says 90 %, it is right about 82 % of the time."
    )
    assert "Not as it is" in found.trust
    assert (
        "89.0 % sure on average and right in 80.0 %: 9.0 points above"
        in answers["How far off is it?"]
    )
    assert answers["What helped most?"].startswith(
        "Temperature scaling brings the calibration error"
    )
    assert answers["Is the gain real?"].startswith("Yes: NLL falls by 0.1000")
    assert answers["What does it cost?"] == "No accuracy: the predicted classes stay as they are."
    assert found.pick == 1
    assert found.command == "featcal fit 'my pack' temperature -o cal.safetensors"
    assert found.cautions == ()


def test_an_underconfident_model():
    under = bins_of((1000, 0.7, 0.8), (1000, 0.9, 0.97))
    raw = row("none", bins=under, accuracy=0.89, confidence=0.80, ece=0.09)
    found, answers = told(
        raw, row("temperature", accuracy=0.89, confidence=0.885, ece=0.01, nll=0.8)
    )
    assert found.kind == "under"
    assert "better than it thinks: when it says 90 %, it is right about 97 %" in found.headline
    assert "9.0 points below what it achieves" in answers["How far off is it?"]
    assert "Yes" in found.trust


@pytest.mark.parametrize("ece", [0.009, 0.02])
def test_a_calibrated_model_is_left_alone(ece):
    """Below one point whatever the interval says, and above it where the interval holds 0."""
    spread = 0.0001 if ece < 0.01 else 0.012
    flat = bins_of((1000, 0.7, 0.7), (1000, 0.9, 0.9))
    raw = row("none", bins=flat, accuracy=0.80, confidence=0.803, ece=ece, spread=spread)
    found, answers = told(raw, row("temperature", seed=1, spread=0.05, nll=0.9, ece=ece))
    assert found.kind == "calibrated"
    assert "when it says 90 %, it is right about 90 %" in found.headline
    assert found.pick is None
    assert found.command == ""
    assert answers["What should I do?"].startswith("Nothing: use the confidence as it is")
    assert answers["What does it cost?"] == "Nothing, since nothing is changed."


def test_a_calibrated_model_may_still_gain_likelihood():
    flat = bins_of((1000, 0.7, 0.7), (1000, 0.9, 0.9))
    raw = row("none", bins=flat, accuracy=0.80, confidence=0.805, ece=0.005)
    found, answers = told(
        raw, row("temperature", seed=1, accuracy=0.80, confidence=0.8, ece=0.005, nll=0.8)
    )
    assert found.kind == "calibrated"
    assert found.pick == 1
    assert "You can leave it as it is" in answers["What should I do?"]
    assert answers["Is the gain real?"].startswith("In part: NLL falls")


def test_errors_in_both_directions_are_mixed():
    both = bins_of((1000, 0.6, 0.75), (1000, 0.95, 0.8))
    raw = row("none", bins=both, accuracy=0.775, confidence=0.775, ece=0.15)
    assert verdict(raw) == "mixed"
    assert headline("mixed", raw) == (
        "This model is too sure in some places and too modest in others: when it says 95 % it is "
        "right 80 % of the time, and when it says 60 %, 75 %."
    )


def test_nothing_helped():
    found, answers = told(row("none"), row("temperature", seed=1, spread=0.1, nll=0.89))
    assert (found.kind, found.pick) == ("over", None)
    assert "Nothing that was tried" in answers["What helped most?"]
    assert answers["Is the gain real?"] == "There is no gain to speak of."
    assert found.command.startswith("featcal compare 'my pack' none ")


def test_no_clear_winner_and_the_simplest_is_chosen():
    """Two rows whose paired difference may be chance: fewer steps win, and the words say so."""
    first = row("clip | temperature", seed=1, spread=0.01, **{**GOOD, "nll": 0.799})
    second = row("temperature", seed=2, spread=0.01, **GOOD)
    found, answers = told(row("none"), first, second)
    assert found.pick == 2
    assert answers["What helped most?"].startswith(
        "There is no clear winner by likelihood (NLL): temperature scaling and feature clipping, "
        "then temperature scaling are within chance of each other. The simplest of them, "
        "temperature scaling brings"
    )


def test_one_recipe_under_two_names_is_one():
    """A clip that does nothing makes clip | temperature the same as temperature."""
    first, second = (row(name, seed=0, **GOOD) for name in ("clip | temperature", "temperature"))
    found, answers = told(row("none"), first, second)
    assert found.pick == 2
    assert answers["What helped most?"].endswith("Nothing else that was tried helped.")
    best = contest(compared(row("none"), first, second), "nll")
    assert (best.alike, best.clear) == ((1, 2), True)


def test_who_is_best_needs_something_to_choose_from():
    rows = compared(row("none"))
    assert contest(rows, "nll", ()) is None
    assert contest(rows, "confidence") is None
    bare = [Row("none", None, Scores(9, row("none").scores.metrics, OVER), 0.0)] * 2
    assert not contest(compared(*bare), "nll").clear


def test_of_equals_the_one_that_keeps_accuracy_is_chosen():
    dear = row("clip", seed=1, spread=0.01, **{**GOOD, "accuracy": 0.77, "nll": 0.799})
    kind = row("clip | temperature", seed=2, spread=0.01, **GOOD)
    assert summary(compared(row("none"), dear, kind), PLACE).pick == 2


def test_a_clear_winner_beats_the_rest():
    better = row("temperature", seed=0, **GOOD)
    found, answers = told(row("none"), row("vector", seed=0, **{**GOOD, "nll": 0.85}), better)
    assert found.pick == 2
    assert answers["What helped most?"].endswith("it beats everything else that was tried.")


def test_the_only_one_that_helped():
    _, answers = told(row("none"), row("temperature", **GOOD), row("clip", nll=0.9))
    assert answers["What helped most?"].endswith("Nothing else that was tried helped.")


@pytest.mark.parametrize(
    ("accuracy", "spread", "words"),
    [
        (0.77, 0.001, "Some answers: accuracy falls by 3.0 points (95 % interval 2."),
        (0.83, 0.001, "Nothing: accuracy even rises by 3.0 points"),
        (0.799, 0.01, "No accuracy that can be measured here: it falls by 0.10 points"),
    ],
)
def test_what_it_cost(accuracy, spread, words):
    after = row("clip", seed=1, accuracy_noise=spread, **{**GOOD, "accuracy": accuracy})
    _, answers = told(row("none"), after)
    assert answers["What does it cost?"].startswith(words)


def test_a_worse_ece_is_called_a_loss():
    _, answers = told(row("none", ece=0.03), row("temperature", seed=1, **{**GOOD, "ece": 0.06}))
    assert answers["Is the gain real?"].startswith("In part: NLL falls")
    assert answers["Is the gain real?"].endswith("which is a loss.")


def test_pipelines_are_fitted_as_they_were_and_splits_are_named():
    better = row("clip(criterion='ece') | temperature", **GOOD)
    place = Place("p", fit="dev", fit_rows=5000)
    found = summary(compared(row("none"), better), place)
    assert found.command == (
        "featcal fit p \"clip(criterion='ece') | temperature\" --split dev --sequential "
        "-o cal.safetensors"
    )


def test_a_file_that_is_fitted_already_is_used():
    place = Place("p", fit_rows=5000, files=(("temperature", "my cal.safetensors"),))
    found = summary(compared(row("none"), row("temperature", **GOOD)), place)
    assert found.command == "featcal predict p 'my cal.safetensors' -o probs.npy"


def test_few_rows_are_said():
    found = summary(compared(row("none", n=300)), Place("p", fit_rows=200))
    scored, fitted = found.cautions
    assert scored.startswith("Only 300 rows were scored: the intervals are wide")
    assert fitted.startswith("Recipes were fitted on only 200 rows of val")
    assert [point.question for point in found.points] == ["How far off is it?", "What should I do?"]


def test_few_rows_that_show_no_error_prove_nothing():
    raw = row("none", n=300, ece=0.02, confidence=0.81, spread=0.05)
    found, answers = told(raw, row("temperature", n=300, seed=1, spread=0.1))
    assert found.kind == "unclear"
    assert found.headline == (
        "300 rows cannot tell whether this model's confidence is honest: it is 81 % sure on "
        "average and right in 80 %."
    )
    assert answers["What should I do?"].startswith("Label more rows")
    assert found.command == ""
    both = bins_of((150, 0.6, 0.75), (150, 0.95, 0.8))
    assert verdict(row("none", n=300, bins=both, accuracy=0.775, confidence=0.775)) == "unclear"


def test_mixed_without_bins_to_show_is_said_without():
    sparse = bins_of(*((10, said, right) for said, right in ((0.3, 0.9), (0.9, 0.3))))
    assert headline("mixed", row("none", bins=sparse)).endswith("and too modest in others.")


def test_without_intervals_nothing_is_claimed():
    raw, after = row("none", n=1), row("temperature", n=1, **GOOD)
    bare = [
        Row(r.recipe, r.calibrator, Scores(1, r.scores.metrics, OVER), 0.0) for r in (raw, after)
    ]
    found = summary(compared(*bare), PLACE)
    assert (found.kind, found.pick) == ("over", None)
    assert any("no intervals" in caution for caution in found.cautions)


def test_a_clip_that_does_nothing_is_explained():
    step = StepReport(
        "clip", {"threshold": math.inf}, True, 1.0, 1.0, True, "no-op: no threshold helps"
    )
    report = FitReport("clip", "sequential", "nll", 9, (step,), 1.0, 1.0, 0.1)
    found = summary(compared(row("none"), row("clip", report=report)), PLACE)
    assert found.cautions == ("Feature clipping changes nothing here: no threshold helps.",)


def test_a_warning_of_a_fit_is_passed_on():
    step = StepReport("vector", {}, False, 1.0, 0.9, True, "fitted", warning="4 classes are absent")
    report = FitReport("vector", "sequential", "nll", 9, (step,), 1.0, 0.9, 0.1)
    found = summary(compared(row("none"), row("vector", report=report)), PLACE)
    assert found.cautions == ("vector: 4 classes are absent",)


def test_the_example_is_an_average_where_no_bin_will_do():
    sparse = bins_of((5, 0.9, 0.2), (1995, 0.995, 0.9))
    raw = row("none", bins=sparse, accuracy=0.9, confidence=0.99, ece=0.09)
    assert "when it says 99 %, it is right about 90 %" in headline("over", raw)
    other_way = bins_of((500, 0.9, 0.95), (1500, 0.99, 0.7))
    raw = row("none", bins=other_way, accuracy=0.76, confidence=0.97, ece=0.2)
    assert "when it says 97 %, it is right about 76 %" in headline("over", raw)


def test_no_error_found_is_not_an_error_ruled_out():
    flat = bins_of((1000, 0.7, 0.7), (1000, 0.9, 0.9))
    wide = row("none", bins=flat, accuracy=0.80, confidence=0.82, ece=0.02, spread=0.03)
    assert told(wide)[0].kind == "unclear"


def test_a_mean_gap_that_is_known_counts_whatever_the_binned_error_says():
    flat = bins_of((1000, 0.74, 0.7), (1000, 0.94, 0.9))
    sure = row("none", bins=flat, accuracy=0.80, confidence=0.84, ece=0.045, spread=0.01)
    assert told(sure)[0].kind == "over"


def test_wrong_answers_that_become_other_wrong_answers_are_said():
    place = Place("p", fit_rows=5000, changed=(0, 1234))
    found = summary(compared(row("none"), row("matrix", **GOOD)), place)
    cost = {point.question: point.answer for point in found.points}["What does it cost?"]
    assert cost == "No accuracy, though 1,234 wrong answers become other wrong answers."
