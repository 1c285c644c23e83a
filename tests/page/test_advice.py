"""What to do and what to type: no word against another."""

from dataclasses import replace

import pytest
from made_rows import GOOD, PLACE, bins_of, compared, row, told

from featcal import parse
from featcal.page.verdict import TRY_NEXT, Place, summary


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


def advised(*rows, place=PLACE):
    found, answers = told(*rows, place=place)
    return found, answers["What should I do?"]


def test_nobody_is_told_to_rely_on_what_nobody_can_judge():
    raw = row("none", n=300, ece=0.005, confidence=0.805)
    found, advice = advised(raw, row("temperature", n=300, seed=1, **{**GOOD, "ece": 0.005}))
    assert (found.kind, found.pick) == ("unclear", 1)
    assert advice == (
        "Label more rows, to fit on and to score, before you rely on its confidence. What helps so "
        "far is temperature scaling:"
    )


def test_a_modest_model_that_nothing_helps_may_be_read_as_a_low_estimate():
    raw = row("none", accuracy=0.89, confidence=0.80)
    found, advice = advised(raw, row("temperature", seed=1, spread=0.1, nll=0.89))
    assert (found.kind, found.pick) == ("under", None)
    assert found.trust.startswith("Yes, and more")
    assert advice.startswith("Read its confidence as a low estimate: on average it is right more")
    assert "thresholds" not in advice


@pytest.mark.parametrize(
    ("after", "left"),
    [
        ({"confidence": 0.82}, "(on average it is then still 2.0 points too sure)"),
        ({"confidence": 0.77}, "(it overshoots: on average it is then 3.0 points too modest)"),
        ({"confidence": 0.803, "ece": 0.008}, "(it can then be taken at its word)"),
        ({"confidence": 0.803, "ece": 0.04}, "(level by level of confidence it is then still off"),
        ({"confidence": 0.803, "spread": 0.03}, "(whether it can then be taken at its word, these"),
    ],
)
def test_what_is_left_after_the_recommended_recipe_is_said(after, left):
    found, advice = advised(
        row("none"), row("temperature", **{**GOOD, "nll": 0.6, "ece": 0.02, **after})
    )
    assert found.pick == 1
    assert advice.startswith(f"Use temperature scaling before anyone acts on the confidence {left}")


def test_still_is_said_of_what_was_so_before():
    """Off both ways before, too sure on average after: that direction is new."""
    both = bins_of((1000, 0.6, 0.75), (1000, 0.95, 0.8))
    raw = row("none", bins=both, accuracy=0.775, confidence=0.775, ece=0.15)
    after = row("temperature", accuracy=0.775, confidence=0.805, ece=0.03, nll=0.8)
    found, advice = advised(raw, after)
    assert found.kind == "mixed"
    assert advice.endswith("(on average it is then 3.0 points too sure):")


def test_what_saw_the_answers_was_not_tried():
    """A fit on the scored rows says nothing about the method."""
    cheat = row("temperature", **GOOD)
    found, advice = advised(row("none"), cheat, place=replace(PLACE, seen=(1,)))
    assert found.pick is None
    assert advice.endswith("See what mends it:")
    assert found.command.startswith("featcal compare 'my pack' none temperature ")


def test_an_overshoot_of_a_modest_model_is_said():
    raw = row("none", accuracy=0.89, confidence=0.80)
    after = row("temperature", accuracy=0.89, confidence=0.92, ece=0.03, nll=0.8)
    _, advice = advised(raw, after)
    assert advice == (
        "Use temperature scaling, which brings what it says nearer to what it achieves (it "
        "overshoots: on average it is then 3.0 points too sure):"
    )


def test_the_next_recipes_are_those_not_tried_yet_on_the_same_splits():
    place = Place("p", fit="cal", test="hold out", fit_rows=5000)
    tried = row("vector", seed=1, spread=0.1, nll=0.89)
    found, advice = advised(row("none"), tried, place=place)
    assert found.command == (
        "featcal compare p none temperature ensemble classwise isotonic --fit-split cal "
        "--test-split 'hold out'"
    )
    assert advice.endswith("collect more labelled rows to fit on, or try other methods:")


def test_where_everything_was_tried_nothing_is_typed():
    tried = [row(name, seed=1, spread=0.1, nll=0.89) for name in TRY_NEXT]
    found, advice = advised(row("none"), *tried)
    assert (found.command, found.pick) == ("", None)
    assert advice.endswith("collect more labelled rows to fit on.")


def test_what_is_recommended_can_be_typed():
    """The recipes that are named exist, and take logits alone."""
    assert not any(parse(name).needs_features or parse(name).needs_train for name in TRY_NEXT)


def test_a_file_is_used_on_the_split_that_was_scored():
    place = Place("p", test="holdout", fit_rows=5000, files=(("temperature", "cal.safetensors"),))
    found, _ = advised(row("none"), row("temperature", **GOOD), place=place)
    assert found.command == "featcal predict p cal.safetensors --split holdout -o probs.npy"


def test_where_nothing_was_tried_there_is_something_to_try():
    found, advice = advised(row("none"))
    assert advice.endswith("See what mends it:")
    assert found.command.startswith("featcal compare 'my pack' none temperature ")
