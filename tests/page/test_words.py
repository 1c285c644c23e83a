"""The summary: every case a reader may meet, from numbers made for it."""

import pytest
import torch
from made_rows import GOOD, OVER, bins_of, compared, row, told

from featcal.page.verdict import Place, contest, summary
from featcal.report.compare import Row
from featcal.report.scores import Scores


def test_an_overconfident_model_is_told_with_a_number_to_picture():
    found, answers = told(row("none"), row("temperature", seed=1, **GOOD))
    assert found.kind == "over"
    assert found.headline == (
        "This model is too sure of itself: when it says 90 %, it is right about 82 % of the time."
    )
    assert "Not as it is" in found.trust
    assert (
        "89.0 % sure on average and right in 80.0 % of them: 9.0 points above"
        in answers["How far off is it?"]
    )
    assert answers["What helped most?"].startswith(
        "Temperature scaling lowers the calibration error (ECE) from 9.0 % to 2.0 %; mean "
        "confidence and accuracy are then 1.0 points apart."
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
        "There is no clear winner by likelihood (NLL): temperature scaling and feature clipping "
        "followed by temperature scaling are within chance of each other. The simplest of them is "
        "temperature scaling: it lowers"
    )


def test_one_recipe_under_two_names_is_one():
    """A clip that does nothing makes clip | temperature the same as temperature."""
    first, second = (row(name, seed=0, **GOOD) for name in ("clip | temperature", "temperature"))
    found, answers = told(row("none"), first, second)
    assert found.pick == 2
    assert answers["What helped most?"].endswith(
        "Feature clipping followed by temperature scaling gives the same. Nothing else that was "
        "tried helped beyond chance."
    )
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
    found, answers = told(row("none"), dear, kind)
    assert found.pick == 2
    assert (
        "The simplest of them that costs no accuracy is feature clipping followed by temperature "
        "scaling: it lowers"
    ) in answers["What helped most?"]


def test_of_equals_with_as_many_steps_the_one_that_learned_fewer_numbers_is_the_simplest():
    wide = row("matrix", seed=1, spread=0.01, **{**GOOD, "nll": 0.799})
    wide.calibrator.assign(weight=torch.eye(4), offset=torch.zeros(4))
    plain = row("temperature", seed=2, spread=0.01, **GOOD)
    found, answers = told(row("none"), wide, plain)
    assert found.pick == 2
    assert "The simplest of them is temperature scaling" in answers["What helped most?"]


def test_two_recipes_are_told_apart_by_their_arguments():
    first = row("clip", seed=1, spread=0.01, **GOOD)
    second = row("clip(min_accuracy=0.99)", seed=2, spread=0.01, **GOOD)
    _, answers = told(row("none"), first, second)
    assert (
        "feature clipping and feature clipping (min_accuracy=0.99) are"
        in (answers["What helped most?"])
    )


def test_a_clear_winner_beats_the_rest():
    better = row("temperature", seed=0, **GOOD)
    found, answers = told(row("none"), row("vector", seed=0, **{**GOOD, "nll": 0.85}), better)
    assert found.pick == 2
    assert answers["What helped most?"].endswith("it beats everything else that was tried.")


def test_the_only_one_that_helped():
    _, answers = told(row("none"), row("temperature", **GOOD), row("clip", nll=0.9))
    assert answers["What helped most?"].endswith(
        "Nothing else that was tried helped beyond chance."
    )


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


@pytest.mark.parametrize(
    ("ece", "words"),
    [
        (
            0.092,
            "Temperature scaling raises the calibration error (ECE) from 9.0 % to 9.2 %, which",
        ),
        (0.088, "lowers the calibration error (ECE) from 9.0 % to 8.8 %, which may be chance;"),
        (0.09, "Temperature scaling leaves the calibration error (ECE) at 9.0 %; mean"),
    ],
)
def test_which_way_the_error_goes_is_said(ece, words):
    after = row("temperature", seed=1, spread=0.01, **{**GOOD, "ece": ece})
    _, answers = told(row("none", spread=0.01), after)
    assert words in answers["What helped most?"]


def test_an_error_is_lower_still_only_than_one_that_fell():
    """And nothing is called lower that is not lower than as it was."""
    raw = row("none", ece=0.02, spread=0.001)
    pick = row("temperature", seed=1, spread=0.001, **{**GOOD, "ece": 0.0199})
    lower = row("clip", seed=2, spread=0.001, **{**GOOD, "ece": 0.005, "nll": 0.85})
    _, answers = told(raw, pick, lower)
    assert (
        "Feature clipping brings the ECE lower, to 0.5 %, but has" in answers["What helped most?"]
    )
    between = row("clip", seed=2, spread=0.001, **{**GOOD, "ece": 0.0195, "nll": 0.85})
    _, answers = told(raw, pick, between)
    assert "brings the ECE" not in answers["What helped most?"]


def test_wrong_answers_that_become_other_wrong_answers_are_said():
    place = Place("p", fit_rows=5000, changed=(0, 1234))
    found = summary(compared(row("none"), row("matrix", **GOOD)), place)
    cost = {point.question: point.answer for point in found.points}["What does it cost?"]
    assert cost == "No accuracy, though 1,234 wrong answers become other wrong answers."


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ((0.85,), "By likelihood (NLL) it beats the others that helped. Whether vector scaling"),
        ((), "1.0 points apart. Whether vector scaling would do as well, these rows cannot tell."),
    ],
)
def test_what_may_be_better_is_not_called_beaten(others, words):
    """A recipe so noisy that it is not known to help is not known to be worse either."""
    noisy = row("vector", seed=5, spread=0.2, **{**GOOD, "nll": 0.6, "ece": 0.02})
    helped = [row("clip", seed=2, **{**GOOD, "nll": nll}) for nll in others]
    best = row("temperature", seed=1, **GOOD)
    _, answers = told(row("none"), best, *helped, noisy)
    assert words in answers["What helped most?"]
    assert "everything else" not in answers["What helped most?"]


def test_a_lower_ece_is_not_hidden():
    lower = {"accuracy": 0.77, "confidence": 0.77, "ece": 0.005, "nll": 0.85}
    dear = row("clip | temperature", seed=0, **lower)
    _, answers = told(row("none"), row("temperature", seed=0, **GOOD), dear)
    assert answers["What helped most?"].endswith(
        "Feature clipping followed by temperature scaling brings the ECE lower still, to 0.5 %, "
        "but has the higher NLL and costs 3.0 points of accuracy."
    )
    free = row("clip | temperature", seed=3, spread=0.03, **{**GOOD, "ece": 0.02})
    _, answers = told(row("none"), row("temperature", seed=0, **GOOD), free)
    assert "lower still" not in answers["What helped most?"]


def test_a_gap_below_has_the_interval_of_what_is_said():
    raw = row("none", accuracy=0.89, confidence=0.80, ece=0.09)
    _, answers = told(raw, row("temperature", **GOOD))
    assert "9.0 points below what it achieves (95 % interval 8." in answers["How far off is it?"]


def test_an_error_that_may_be_chance_is_said_to_be():
    _, answers = told(row("none", ece=0.02, spread=0.02))
    assert answers["How far off is it?"].endswith(
        "2.0 points on average (ECE), which may be chance."
    )
    _, answers = told(row("none"))
    assert answers["How far off is it?"].endswith("9.0 points on average (ECE).")
