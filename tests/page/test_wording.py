"""Sentences from facts: one anchor for each kind, and properties that hold of all of them."""

import math
import re
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_rows import PLACE, bins_of, compared, good, harmful, row, told
from test_verdict import BOTH, HARMS, LOSSES, chosen, growth

from featcal.analysis import (
    ChangedPredictions,
    ConfidentCounts,
    FeatureValues,
    GroupCalibration,
    UnitMeans,
)
from featcal.analysis.features import NormalFit
from featcal.core.calibrator import METHODS
from featcal.core.fit import FitReport, StepReport
from featcal.page.verdict import Certainty, Facts, Idle
from featcal.page.wording import about, apart, named, points, rows, say, span, words
from featcal.report.bootstrap import UNKNOWN, Interval

SENTENCE = re.compile(r"[A-Z0-9].*[.:)]", re.DOTALL)


def test_a_model_that_is_too_sure_is_told_with_numbers_to_picture():
    found, answers = told(row("none"), good("temperature", seed=1))
    assert found.headline == (
        "This model is too sure of itself: when it says 90 %, it is right about 82 % of the time."
    )
    assert found.trust == "Not as it is: it claims more than it delivers."
    for question, part in {
        "How far off is it?": "9.0 points above what it achieves (95 % interval 8.6 to 9.4).",
        "What helped most?": "lowers the calibration error (ECE) from 9.0 % to 2.0 %; mean",
        "Is the gain real?": "Yes: NLL falls by 0.1000 (95 % interval 0.09",
        "What does it cost?": "No accuracy: the predicted classes stay as they are.",
        "What should I do?": "Use temperature scaling before anyone acts on the confidence",
    }.items():
        assert part in answers[question]
    assert (found.pick, found.cautions) == (1, ())


def test_headlines():
    under, honest = {"accuracy": 0.89, "confidence": 0.8}, {"confidence": 0.803, "ece": 0.005}
    few = {"n": 300, "ece": 0.02, "confidence": 0.81, "spread": 0.05}
    off = {"confidence": 0.805, "ece": 0.05}
    for raw, begins in (
        (under, "This model is better than it thinks: on average"),
        (honest, "This model's confidence can be taken at its word:"),
        (few, "300 rows cannot tell"),
        (
            {"bins": BOTH, "accuracy": 0.775, "confidence": 0.775, "ece": 0.15},
            "This model is too sure in some places and too modest in others: when it says 95 %",
        ),
        ({**off, "bins": bins_of((1000, 0.7, 0.62))}, "This model is too sure in places: when"),
        ({**off, "bins": bins_of((10, 0.3, 0.9))}, "This model's confidence is off, by 5.0 points"),
    ):
        assert told(row("none", **raw))[0].headline.startswith(begins)


def test_what_harms_calibration_is_said_by_what_it_harms():
    """A clip that lowers the ECE and raises the Brier score is said to do just that."""
    rows = row("none"), good("temperature"), harmful("clip", ece=0.005), harmful("vector")
    text = told(*rows)[1]["What helped most?"]
    assert "Feature clipping lowers the loss (NLL) too, but raises the Brier score beyond" in text
    assert "Vector scaling lowers the loss (NLL) too, but raises both the ECE and the Brier" in text
    assert text.endswith("Feature clipping brings the ECE lower still, to 0.5 %.")
    found, answers = told(row("none"), harmful("temperature"), harmful("vector", nll=0.85))
    assert found.pick is None
    assert "raises the calibration error (ECE) from 9.0 % to 12.0 %" in answers["What helped most?"]
    assert answers["Is the gain real?"].endswith("Its confidence becomes less honest.")
    assert "would raise the calibration error (ECE) by 3.0" in answers["What does it cost?"]


def test_cautions():
    place = replace(PLACE, fit_rows=200, seen=(2,), unknown=(1,))
    found, answers = told(
        row("none", n=300), good("temperature", n=300), good("vector", n=300), place=place
    )
    begin = ("Vector scaling was fitted on the very rows", "It is not known what rows temperature")
    begin += ("Only 300 rows were scored: the intervals", "Recipes were fitted on only 200")
    assert all(one.startswith(start) for one, start in zip(found.cautions, begin, strict=True))
    assert "vector" not in answers["What helped most?"].lower()
    alone, answers = told(row("none", n=1))
    assert list(answers) == ["How far off is it?", "What should I do?"]
    assert alone.cautions[-1].startswith("There are no intervals")
    warned = Idle("temperature", "clip | temperature", "temperature stopped at its cap", noop=False)
    assert say("idle", warned) == "Temperature stopped at its cap (in clip | temperature)."
    noop = Idle("clip", "clip", "no threshold helps", noop=True)
    assert say("idle", noop) == "Feature clipping changes nothing here: no threshold helps."


METRICS = st.fixed_dictionaries(
    {
        "accuracy": st.sampled_from([0.77, 0.8, 0.83]),
        "confidence": st.sampled_from([0.75, 0.8, 0.803, 0.85, 0.9]),
        "ece": st.sampled_from([0.005, 0.02, 0.09, 0.12]),
        "nll": st.sampled_from([0.7, 0.8, 0.85, 0.9, 1.0]),
        "brier": st.sampled_from([0.28, 0.3, 0.33]),
        "seed": st.integers(0, 3),
        "spread": st.sampled_from([0.0, 0.002, 0.02, 0.2]),
        "accuracy_noise": st.sampled_from([0.0, 0.002, 0.02]),
    }
)
RECIPES = ("temperature", "clip", "clip | temperature", "vector")


@settings(max_examples=60, deadline=None)
@given(
    raw=METRICS,
    others=st.lists(METRICS, max_size=4),
    n=st.sampled_from([1, 300, 2000]),
    seen=st.sets(st.integers(1, 4), max_size=2),
)
def test_no_summary_contradicts_itself(raw, others, n, seen):
    rows = [row("none", n=n, **raw)]
    rows += [row(name, n=n, **one) for name, one in zip(RECIPES, others, strict=False)]
    place = replace(PLACE, seen=tuple(place for place in seen if place < len(rows)))
    found, answers = told(*rows, place=place)
    text = " ".join([found.headline, found.trust, *answers.values(), *found.cautions])
    assert all(
        SENTENCE.fullmatch(one) for one in (found.headline, found.trust, *answers.values())
    ), text
    assert not re.search(r"\bnan\b|\bNone\b|  | [,.;:](\s|$)|\( | \)|[a-z][.:;,][A-Za-z]", text)
    helped = answers.get("What helped most?", "")
    for name in map(named, RECIPES):
        subject = re.escape(name[0].upper() + name[1:])
        raises = re.search(rf"{subject} lowers the loss[^.]*raises (both )?the ECE", helped)
        assert not (raises and re.search(rf"{subject} brings the ECE lower", helped))
    assert (found.pick is None) == (not answers.get("What does it cost?", "Noth").startswith(
        ("No ", "Some", "Nothing:")
    ))  # fmt: skip
    assert ("featcal fit" in found.command) == (found.pick is not None)


def test_verbs_of_change_are_kept_for_what_is_beyond_chance():
    """A page once had a clip that "worsens" and "lowers" ECE."""
    sure, unsure = good("temperature"), good("temperature", seed=1, ece=0.088)
    for after, lowers in ((sure, True), (unsure, False)):
        text = " ".join(told(row("none"), after)[1].values())
        assert ("lowers the calibration error (ECE) from 9.0 % to" in text) == lowers
        assert ("within chance of what it was (9.0 % before, 8.8 % after)" in text) != lowers
        assert "raises" not in text
    why = "no-op: no threshold helps once temperature is refitted"
    step = StepReport("clip", {}, True, 1.0, 1.0, True, why)
    report = FitReport("clip | temperature", "joint", "nll", 9, (step,), 1.0, 0.9, 0.1)
    rows = row("none"), good("clip"), good("clip | temperature", report=report)
    (caution,) = told(*rows)[0].cautions
    assert caution.startswith("In clip | temperature, feature clipping changes nothing here: no")


def test_what_ended_at_a_cap_is_neither_recommended_nor_said_to_do_nothing():
    """A page once marked it "better" in the table and said that nothing else helped."""
    step = StepReport("temperature", {"temperature": 6e3}, False, 1.0, 0.5, False, "cap", "cap")
    report = FitReport("temperature", "joint", "nll", 900, (step,), 1.0, 0.5, 0.1)
    capped = good("temperature", report=report)
    for others in ((), (good("svs", seed=1, nll=0.82),)):
        text = " ".join(told(row("none"), capped, *others)[1].values())
        assert "Temperature scaling lowers the loss (NLL), but the search ended at a cap" in text
        assert "Nothing else that was tried helped" not in text
        assert ("no other recipe" in text) == (not others)


def test_rows_of_samples_are_told_apart():
    found = compared(row("none"), good("temperature"))
    assert say("answers", Facts(found, PLACE)) == ""
    settings = {**found.settings, "drawn": {"samples": 40}}
    text = say("answers", Facts(replace(found, settings=settings), PLACE))
    assert "2,000 rows of 40 samples" in text
    assert "intervals draw samples" in text


def test_how_the_recommendation_came_about_is_said():
    question = "What helped most?"
    auto = chosen("sample", LOSSES)
    text = told(row("none"), auto, good("temperature", nll=0.7))[1][question]
    assert text.startswith("Cross-validation on val chose sample temperature scaling (auto), and ")
    assert "Temperature scaling has the lower NLL on test, but val decides" in text
    text = told(row("none"), chosen("sample", LOSSES, **HARMS), good("temperature"))[1][question]
    assert "sample temperature scaling, which test does not confirm. Next by cross-val" in text
    text = told(row("none"), auto, good("vector", nll=0.7))[1][question]
    assert text.startswith("Vector scaling beats what cross-validation on val chose, without")


def test_numbers_and_names():
    assert (rows(1), rows(2000)) == ("1 row", "2,000 rows")
    assert [about(share) for share in (0.9999, 0.00001, 1.0)] == ["99.9 %", "0.1 %", "100 %"]
    assert points(0.0043) == "0.43 points"
    assert span(UNKNOWN) == ""
    assert span(Interval(-0.001, 0.004), signed=True) == "(95 % interval -0.10 to +0.40)"
    assert span(Interval(-0.3, -0.2), "nll", flip=True) == "(95 % interval 0.2000 to 0.3000)"
    assert apart(0.8911, 0.8908) == ("89.11 %", "89.08 %")
    assert apart(0.5, 0.5) == ("50 %", "50 %")
    assert named("clip | temperature from cal.safetensors") == (
        "feature clipping followed by temperature scaling from cal.safetensors"
    )
    assert named("unheard(of=6)") == "unheard(of=6)"


def test_every_method_has_a_name_in_words():
    own = {name for name, kind in METHODS.items() if kind.__module__.startswith("featcal.")}
    assert own == set(words().steps)
    assert all(" " in name for name in words().steps.values())


def test_whom_a_recipe_makes_less_certain():
    control = growth(0.9, 0.1, recipe="temperature")
    growths = {"temperature": control, "clip": growth(0.5, 0.1, wrong=20)}
    (found,) = Certainty.of_all(growths)
    lead, numbers = (say(part, found) for part in ("certainty", "certainty_numbers"))
    assert lead.endswith(
        "more certainty from wrong answers than from right ones, as the paper claims."
    )
    for part in (
        "of the 20 wrong answers above 80 % confidence grew by 0.5000 nats",
        "The difference is +0.4000 nats (95 % interval +0.3494 to +0.4506). The smaller group has",
        "Temperature scaling, which never looks at features, does the same more strongly: +0.8000",
    ):
        assert part in numbers
    cases = [growth(*by) for by in ((0.1, 0.5), (-0.5, 0.0), (0, 0), (0.11, 0.1))]
    cases += [growth(0.1, 0.1, 0.0), growth(0.5, 0.1, math.nan), growth(1, 1, wrong=0)]
    leads = {say("certainty", Certainty("clip", one, {})) for one in cases}
    assert len(leads) == len(cases)
    assert all(lead.endswith(".") for lead in leads)


def values(sigmas, errors=(0.1, 0.1), zeros=(0.5, 0.5), signed=False, wrong=40):
    fits = tuple(NormalFit(sigma, 0.0, sigma, not signed) for sigma in sigmas)
    edges, counts = torch.tensor([0.0, 1.0]), torch.ones(2, 1)
    groups = growth(0, 0, wrong=wrong).groups
    return FeatureValues(groups, edges, counts, (1, 1), fits, signed, errors, zeros)


def test_the_spread_of_features():
    for found, part in (
        (values((2.0, 1.0)), "is +1.00 (95 % interval +0.72 to +1.28): wider where it is wrong"),
        (values((1.0, 2.0), signed=True), "a normal of mean 0, the values have sigma"),
        (values((1.0, 2.0)), "narrower where it is wrong, the opposite of what the paper"),
        (values((1.188, 1.172)), "(95 % interval -0.26 to +0.29), which may be chance."),
        (values((2.0, 1.0), wrong=17), "The smaller group has few rows"),
        (values((2.0, 1.0), (math.nan, 0.1)), "; there are too few rows to tell"),
        (values((1.0, 1.0), (0.0, 0.0)), "where it is right: there is no difference."),
        (values((math.nan, 1.0)), "One of the groups has no rows"),
        (values((2.0, 1.0), zeros=(0.003, 0.45)), "of these, 0.3 % (wrong answers) and 45.0 %"),
    ):
        text = say("values", found)
        assert part in text
        assert ("half the values" in text) == (found.zeros[0] < 0.4)


def test_sentences_under_the_other_figures(content):
    means = torch.tensor([2.0, 1.0]), torch.tensor([1.0, 2.0]), torch.arange(2)
    units = UnitMeans(growth(0, 0).groups, *means, False)
    empty = replace(units, hce=torch.full((2,), math.nan))
    before, after = torch.tensor([[90], [10]]), torch.tensor([[0], [0]])
    counts = ConfidentCounts(200, "clip", (0.95,), before, after)
    columns = [torch.tensor(column) for column in ([0, 1, 2], [1, 0, 2], [0, 0, 0], [1, 1, 1])]
    changed = ChangedPredictions(100, "clip", *columns, torch.ones(3), torch.ones(3))
    sums = torch.tensor([[500.0, 450.0, 250.0], [50.0, 25.0, 45.0], [0.0, 0.0, 0.0]])
    classes = GroupCalibration("none", ("a", "b", "c"), sums[:, :, None].double())
    honest = torch.tensor([90.0, 72.0, 72.0]).repeat(30, 1)
    honest[0, 1] = 50
    many = GroupCalibration("none", tuple(map(str, range(30))), honest[:, :, None].double())
    sweep = content.sweeps[0]
    lowest = f"lowest at c = {float(sweep.thresholds[sweep.best]):.4g}"
    for macro, found, part in [
        ("units", units, "1.5 for confident right ones; 50.0 % of the units are larger where"),
        ("units", empty, "no rows"),
        ("counts", counts, "10 of 100 (10.0 %) are wrong as the model is; with feature clipping,"),
        ("counts", replace(counts, before=after, after=before), "10 of 100 (10.0 %) of such are"),
        ("counts", replace(counts, recipe="none"), "are wrong as the model is."),
        ("changed", changed, "3 of 100 rows (3.0 %): 1 became right, 1 became wrong, 1 went from"),
        ("changed", replace(changed, rows=torch.ones(0)), "changes no predicted class."),
        ("classes", classes, "too much in 1 and too little in 1; fewer than one would be so by"),
        ("classes", classes, "1 of the 2 have fewer than 100 rows."),
        ("classes", many, ", no more than chance alone would give (about 2). All have fewer"),
        ("sweep", sweep, lowest),
        ("sweep", replace(sweep, best=len(sweep.thresholds) - 1), "the best is not to clip."),
    ]:
        assert part in say(macro, found)
