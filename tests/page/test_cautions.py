"""What a reader must know first."""

import math

from made_rows import GOOD, OVER, PLACE, compared, row

from featcal.core.fit import FitReport, StepReport
from featcal.page.verdict import Place, summary
from featcal.report.compare import Row
from featcal.report.scores import Scores


def test_few_rows_are_said():
    found = summary(compared(row("none", n=300)), Place("p", fit_rows=200))
    scored, fitted = found.cautions
    assert scored.startswith("Only 300 rows were scored: the intervals are wide")
    assert fitted.startswith("Recipes were fitted on only 200 rows of val")
    assert [point.question for point in found.points] == ["How far off is it?", "What should I do?"]


def test_without_intervals_nothing_is_claimed():
    raw, after = row("none", n=1), row("temperature", n=1, **GOOD)
    bare = [
        Row(r.recipe, r.calibrator, Scores(1, r.scores.metrics, OVER), 0.0) for r in (raw, after)
    ]
    found = summary(compared(*bare), PLACE)
    assert (found.kind, found.pick) == ("unclear", None)
    assert found.cautions == (
        "Only 1 row was scored: every number here may move with a few more rows.",
        "There are no intervals, so nothing here is known to be more than chance.",
    )


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
    assert found.cautions == ("Vector scaling: 4 classes are absent.",)


def test_a_warning_is_a_sentence_that_names_its_step_once():
    """Said once for two recipes that share a step, with the recipe where it has several."""
    capped = "temperature stopped at its cap T = 20: the logits are no better than guessing"
    other = capped.replace("20", "10")
    steps = [
        StepReport("temperature", {}, False, 1.0, 0.9, True, text, warning=text)
        for text in (capped, capped, other)
    ]
    reports = [FitReport("any", "sequential", "nll", 9, (step,), 1.0, 0.9, 0.1) for step in steps]
    names = ("temperature", "temperature | vector", "clip | temperature")
    rows = [row(name, report=one) for name, one in zip(names, reports, strict=True)]
    found = summary(compared(row("none"), *rows), PLACE)
    assert found.cautions == (
        "Temperature stopped at its cap T = 20: the logits are no better than guessing.",
        "Temperature stopped at its cap T = 10: the logits are no better than guessing "
        "(in clip | temperature).",
    )
