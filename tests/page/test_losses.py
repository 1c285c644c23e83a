"""What is not recommended although the loss falls, and what is said of it."""

from made_rows import GOOD, row, told


def worse(recipe, **values):
    """A recipe that lowers the loss, and makes calibration worse."""
    return row(recipe, seed=1, **{**GOOD, "ece": 0.12, "brier": 0.33, **values})


def test_a_lower_loss_is_no_help_where_calibration_is_worse():
    found, answers = told(row("none"), worse("temperature"))
    assert found.pick is None
    assert answers["What helped most?"] == (
        "Likelihood improves, calibration does not: temperature scaling lowers the loss (NLL), but "
        "raises the calibration error (ECE) from 9.0 % to 12.0 % and the Brier score from 0.3000 "
        "to 0.3300."
    )
    assert answers["Is the gain real?"].startswith(
        "In part: with temperature scaling NLL falls by 0.1000 (95 % interval 0.09"
    )
    assert answers["Is the gain real?"].endswith("Its confidence becomes less honest.")
    assert answers["What does it cost?"].startswith(
        "Nothing, since nothing is changed. Temperature scaling would raise the calibration error "
        "(ECE) by 3.0 points (95 % interval 2."
    )
    assert "and the Brier score by 0.0300 (95 %" in answers["What does it cost?"]
    assert not answers["What should I do?"].startswith("Use")
    assert answers["What should I do?"].endswith("or try other methods:")
    assert found.command == "featcal compare 'my pack' none ensemble classwise vector isotonic"


def test_a_worse_brier_score_and_an_error_that_may_be_the_same():
    wide = {"ece": 0.091, "spread": 0.01}
    _, answers = told(row("none", spread=0.01), worse("temperature", **wide))
    assert answers["What helped most?"].startswith("Likelihood improves, calibration does not: ")
    assert answers["Is the gain real?"].endswith("is not known to become more honest.")


def test_several_that_make_calibration_worse_are_all_named():
    rows = (worse("temperature", nll=0.7), worse("vector"), worse("clip"))
    _, answers = told(row("none"), *rows)
    assert answers["What helped most?"].endswith(
        "Vector scaling and feature clipping lower the loss too, and raise the ECE or the Brier "
        "score."
    )
    _, answers = told(row("none"), *rows[:2])
    assert "Vector scaling lowers the loss too, and raises the ECE" in answers["What helped most?"]


def test_a_worse_brier_score_alone_is_told_as_what_it_is():
    """As of a clip that costs accuracy: the error falls, so that calibration does improve."""
    found, answers = told(row("none"), worse("clip", ece=0.02))
    assert found.pick is None
    assert answers["What helped most?"] == (
        "Nothing without a loss elsewhere: feature clipping lowers the loss (NLL), but raises the "
        "Brier score from 0.3000 to 0.3300."
    )
    assert answers["Is the gain real?"].endswith("its probabilities are farther from the truth.")


def test_what_makes_calibration_worse_is_set_aside_for_what_does_not():
    """Whatever its loss is, and without a word that it was beaten."""
    found, answers = told(row("none"), row("temperature", **GOOD), worse("vector", nll=0.7))
    assert found.pick == 1
    assert answers["What helped most?"].endswith(
        "1.0 points apart. Vector scaling lowers the loss (NLL) too, but makes the ECE or the "
        "Brier score worse than it was, beyond chance."
    )
    several = (worse("vector", nll=0.7), worse("isotonic", nll=0.75))
    _, answers = told(row("none"), row("temperature", **GOOD), *several)
    assert "Vector scaling and isotonic regression lower the" in answers["What helped most?"]
