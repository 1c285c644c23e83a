"""What the page decides, from numbers made for every case."""

import math
from dataclasses import replace

import pytest
import torch
from made_rows import GOOD, OVER, PLACE, bins_of, compared, good, harmful, judged, row

from featcal import parse
from featcal.analysis import EntropyGrowth, Groups
from featcal.core.fit import FitReport, StepReport
from featcal.page.verdict import TRY_NEXT, Certainty, Place, contest, idle, verdict
from featcal.report.compare import Row
from featcal.report.scores import Scores

FLAT = bins_of((1000, 0.7, 0.7), (1000, 0.9, 0.9))
BOTH = bins_of((1000, 0.6, 0.75), (1000, 0.95, 0.8))


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("over", {}),
        ("over", {"confidence": 0.84, "ece": 0.045, "spread": 0.01}),  # the mean gap is known
        ("under", {"accuracy": 0.89, "confidence": 0.80}),
        ("calibrated", {"confidence": 0.803, "ece": 0.009, "spread": 0.0001}),  # below a point
        ("calibrated", {"confidence": 0.803, "ece": 0.02, "spread": 0.012}),  # may be chance
        ("unclear", {"confidence": 0.82, "ece": 0.02, "spread": 0.03}),  # nor ruled out
        ("unclear", {"n": 300, "confidence": 0.81, "ece": 0.02, "spread": 0.05}),
        ("unclear", {"n": 300, "bins": BOTH, "accuracy": 0.775, "confidence": 0.775}),
        ("mixed", {"bins": BOTH, "accuracy": 0.775, "confidence": 0.775, "ece": 0.15}),
        ("mixed", {"accuracy": 0.75, "confidence": 0.755, "ece": 0.05}),
    ],
)
def test_which_way_a_network_errs(kind, values):
    assert verdict(row("none", **values)) == kind


@pytest.mark.parametrize(
    ("bins", "values", "example"),
    [
        (OVER, {}, (0.9, 0.82)),
        (bins_of((5, 0.9, 0.2), (1995, 0.995, 0.9)), {}, None),  # no bin has enough rows
        (bins_of((500, 0.9, 0.95), (1500, 0.99, 0.7)), {}, None),  # the nearest errs otherwise
        (bins_of((100, 0.9, 0.86), (1600, 0.99, 0.86)), {}, None),  # 1.3 standard errors
        (bins_of((400, 0.9, 0.86), (1600, 0.99, 0.86)), {}, (0.9, 0.86)),  # 2.7 of them
        (bins_of((400, 0.9, 0.94)), {"accuracy": 0.89, "confidence": 0.8}, (0.9, 0.94)),
        (FLAT, {"confidence": 0.803, "ece": 0.009}, (0.9, 0.9)),
        (bins_of((40, 0.9, 0.8)), {"confidence": 0.803, "ece": 0.009}, None),  # off by chance
    ],
)
def test_the_example_shows_the_verdict(bins, values, example):
    facts = judged(row("none", bins=bins, **values))
    assert facts.example == (None if example is None else pytest.approx(example))


@pytest.mark.parametrize(
    ("bins", "over", "under"),
    [
        (BOTH, (0.95, 0.8), (0.6, 0.75)),
        (bins_of((1000, 0.7, 0.62), (1000, 0.9, 0.89)), (0.7, 0.62), None),
        (bins_of((100, 0.6, 0.7), (1000, 0.95, 0.8)), (0.95, 0.8), None),  # two standard errors
        (bins_of((10, 0.3, 0.9), (10, 0.9, 0.3)), None, None),  # too few rows
        (bins_of((100, 1.0 + 1e-12, 1.0), (1000, 0.95, 0.8)), (0.95, 0.8), None),  # rounding
    ],
)
def test_where_it_errs_each_way(bins, over, under):
    facts = judged(row("none", bins=bins))
    for found, wanted in ((facts.over, over), (facts.under, under)):
        assert found == (None if wanted is None else pytest.approx(wanted))


TIED = {"spread": 0.01}


@pytest.mark.parametrize(
    ("rows", "pick"),
    [
        ([good("temperature")], 1),
        ([row("temperature", seed=1, spread=0.1, nll=0.89)], None),  # may be chance
        ([harmful("temperature")], None),
        ([harmful("temperature", ece=0.02)], None),  # the Brier score alone is worse
        ([harmful("vector", nll=0.7), good("temperature")], 2),
        ([good("vector", nll=0.85), good("temperature")], 2),  # the best
        # Of equals the one with fewer steps; before that, the one that keeps accuracy.
        ([good("clip | temperature", seed=1, nll=0.799, **TIED), good("temperature", **TIED)], 2),
        ([good("clip | temperature"), good("temperature")], 2),
        (
            [
                good("clip", seed=1, accuracy=0.77, nll=0.799, **TIED),
                good("clip | temperature", seed=2, **TIED),
            ],
            2,
        ),
    ],
)
def test_what_is_recommended(rows, pick):
    facts = judged(row("none"), *rows)
    assert facts.place == pick
    assert (facts.pick and facts.pick.text) == (pick and rows[pick - 1].recipe)


def chosen(recipe, losses, **values):
    """The row of `auto`, which chose a recipe by cross-validated losses."""
    table = [{"recipe": name, "value": value} for name, value in losses.items()]
    step = StepReport("auto", {"recipe": recipe}, False, 0.9, 0.8, True, "", "", {"choice": table})
    report = FitReport("auto", "joint", "nll", 300, (step,), 0.9, 0.8, 0.1)
    return good("auto", report=report, **values)


LOSSES = {"none": 0.9, "sample": 0.8, "temperature": 0.82, "svs": 0.95}
HARMS = {"seed": 1, "ece": 0.12, "brier": 0.33}


@pytest.mark.parametrize(
    ("rows", "pick", "route"),
    [
        # The fit split chose it: another of its candidates that scores better does not matter.
        ([chosen("sample", LOSSES, nll=0.82), good("temperature", nll=0.8)], 1, "chosen"),
        # Not confirmed: it harms, or may be chance. The next by cross-validation that is confirmed.
        ([chosen("sample", LOSSES, **HARMS), good("temperature", nll=0.83)], 2, "next"),
        ([chosen("sample", LOSSES, **HARMS), harmful("temperature")], None, ""),
        (
            [chosen("sample", LOSSES, **HARMS), good("ensemble"), good("temperature", nll=0.82)],
            2,
            "own",
        ),
        # Cross-validation found it worse than nothing: the scored rows cannot overrule that.
        ([chosen("sample", LOSSES, **HARMS), good("svs", nll=0.7)], None, ""),
        # What was no candidate must beat the choice, beyond chance.
        ([chosen("sample", LOSSES), good("vector", nll=0.7)], 2, "own"),
        (
            [chosen("sample", LOSSES, seed=1, **TIED), good("vector", nll=0.799, **TIED)],
            1,
            "chosen",
        ),
    ],
)
def test_the_fit_split_chooses_and_the_scored_rows_confirm(rows, pick, route):
    facts = judged(row("none"), *rows)
    assert (facts.place, facts.route) == (pick, route)
    assert facts.refused == ("" if route == "chosen" or rows[0].scores.metrics["ece"] < 0.1 else
                             "sample")  # fmt: skip
    if pick == 1 and rows[1].recipe == "temperature":
        assert facts.preferred == ["temperature"]


def test_a_file_of_ones_own_stays_a_candidate():
    name = "vector from mine.safetensors"
    mine = replace(good("vector", nll=0.7), recipe=name)
    facts = judged(row("none"), chosen("sample", LOSSES), mine)
    assert (facts.pick.text, facts.route) == (name, "own")


def test_a_value_at_a_cap_is_never_recommended():
    step = StepReport("temperature", {"temperature": 6e-3}, False, 1.0, 0.5, False, "cap", "cap")
    report = FitReport("temperature", "joint", "nll", 300, (step,), 1.0, 0.5, 0.1)
    assert judged(row("none"), good("temperature", report=report)).pick is None
    other = judged(row("none"), good("temperature", report=report), good("svs", seed=1, nll=0.82))
    assert other.pick.text == "svs"


def test_of_equals_with_as_many_steps_the_one_that_learned_fewer_numbers_is_the_simplest():
    wide = good("matrix", seed=1, nll=0.799, **TIED)
    wide.calibrator.assign(weight=torch.eye(4), offset=torch.zeros(4))
    assert judged(row("none"), wide, good("temperature", seed=2, **TIED)).place == 2


def test_how_the_pick_stands_to_the_others():
    rows = [
        row("none"),
        good("temperature"),
        good("clip | temperature"),  # the same on every resample
        good("clip", nll=0.85),
        row("vector", seed=5, spread=0.2, **{**GOOD, "nll": 0.6}),  # so noisy that nobody knows
        harmful("isotonic", nll=0.7),
        good("matrix", ece=0.005, nll=0.85, accuracy=0.77),
    ]
    facts = judged(*rows)
    assert facts.place == 1
    assert (facts.alike, facts.rivals, facts.doubtful) == (["clip | temperature"], [], ["vector"])
    assert facts.beats
    assert [one.text for one in facts.harmful] == ["isotonic"]
    assert facts.harmful[0].harms == ["ece", "brier"]
    assert (facts.lower.text, facts.lower_nll) == ("matrix", "worse")
    assert facts.lower.accuracy.verdict == "worse"
    near = good("clip", seed=1, accuracy=0.77, nll=0.799, **TIED)
    facts = judged(row("none"), near, good("clip | temperature", seed=2, **TIED))
    assert (facts.rivals, facts.spares) == (["clip"], True)

    # An error is lower only where it is below that of the network too.
    tight = {"spread": 0.001}
    rows = row("none", ece=0.02, **tight), good("temperature", seed=1, ece=0.0199, **tight)
    for ece, lower in ((0.005, True), (0.0195, False)):
        other = good("clip", seed=2, spread=0.001, ece=ece, nll=0.85)
        assert (judged(*rows, other).lower is not None) == lower


def test_what_saw_the_answers_is_neither_chosen_nor_counted_as_tried():
    facts = judged(row("none"), good("temperature"), place=replace(PLACE, seen=(1,)))
    assert (facts.place, facts.tried, facts.seen) == (None, 0, ["temperature"])
    assert facts.untried == list(TRY_NEXT)
    assert facts.command == "featcal compare 'my pack' none " + " ".join(TRY_NEXT)


@pytest.mark.parametrize(
    ("rows", "place", "command"),
    [
        (
            [good("clip(criterion='ece') | temperature")],
            Place("p", fit="dev"),
            "featcal fit p \"clip(criterion='ece') | temperature\" --fit-split dev "
            "-o cal.safetensors",
        ),
        (
            [good("temperature")],
            Place("p", test="hold out", files=(("temperature", "my cal.safetensors"),)),
            "featcal predict p 'my cal.safetensors' --test-split 'hold out' -o probs.npy",
        ),
        (
            [row("vector", seed=1, spread=0.1)],
            Place("my p", fit="cal", test="hold out"),
            "featcal compare 'my p' none auto temperature ensemble classwise isotonic "
            "--fit-split cal --test-split 'hold out'",
        ),
        ([row(name, seed=1, spread=0.1) for name in TRY_NEXT], PLACE, ""),
    ],
)
def test_what_to_type_next(rows, place, command):
    assert judged(row("none"), *rows, place=place).command == command


def test_what_is_advised_can_be_fitted_to_logits_alone():
    assert not any(parse(name).needs_features or parse(name).needs_train for name in TRY_NEXT)
    sure = row("none", bins=FLAT, confidence=0.803, ece=0.005)
    assert judged(sure, row("vector", seed=1, spread=0.1)).command == ""  # nothing to mend


def test_who_is_best_needs_something_to_choose_from():
    rows = compared(row("none"), good("clip | temperature"), good("temperature"))
    assert contest(rows, "nll", ()) == contest(rows, "confidence", (0, 1)) == ((), ())
    assert contest(rows, "nll", (0, 1, 2)) == ((1, 2), (1, 2))
    bare = [Row("none", None, Scores(9, row("none").scores.metrics, OVER), 0.0)] * 2
    alike, tied = contest(compared(*bare), "nll", (0, 1))
    assert alike != tied


def test_without_intervals_nothing_is_known():
    raw, after = row("none", n=1), good("temperature", n=1)
    bare = [replace(one, scores=replace(one.scores, replicates={})) for one in (raw, after)]
    facts = judged(*bare)
    assert (facts.kind, facts.place, facts.intervals) == ("unclear", None, False)


def test_steps_that_do_nothing_and_warnings_are_told_once():
    noop = StepReport("clip", {"threshold": math.inf}, True, 1.0, 1.0, True, "no-op: none helps")
    warned = StepReport("vector", {}, False, 1.0, 0.9, True, "", warning="4 classes are absent.")
    rows = [
        row(name, report=FitReport(name, "sequential", "nll", 9, steps, 1.0, 0.9, 0.1))
        for name, steps in {"clip | vector": (noop, warned), "vector": (warned,)}.items()
    ]
    found = [(one.step, one.recipe, one.why, one.noop) for one in idle(rows)]
    assert found == [
        ("clip", "clip | vector", "none helps", True),
        ("vector", "clip | vector", "4 classes are absent", False),
    ]


def growth(hce, lce, spread=0.1, wrong=40, right=60, recipe="clip"):
    before = torch.tensor([0.2, 0.1], dtype=torch.float64)
    after = before + torch.tensor([hce, lce], dtype=torch.float64)
    rows = torch.tensor([False] * wrong + [True] * right)
    groups = Groups(0.8, torch.full((wrong + right,), 0.9), rows)
    return EntropyGrowth(groups, recipe, before, after, torch.full((2,), spread).double())


@pytest.mark.parametrize(
    ("found", "outcome", "takes", "claim"),
    [
        (growth(0.5, 0.1), "wrong", True, True),
        (growth(0.1, 0.5), "right", True, False),
        (growth(-0.5, -0.1), "wrong", False, None),  # gives more certainty to wrong answers
        (growth(-0.1, -0.5), "right", False, None),
        (growth(0.0, 0.0), "unchanged", False, None),
        (growth(0.11, 0.1), "undecided", True, None),
        (growth(0.1, 0.1, spread=0.0), "alike", True, None),
        (growth(0.5, 0.1, spread=math.nan), "unknown", True, None),
        (growth(0.5, 0.1, wrong=0), "empty", True, None),
        (growth(0.5, 0.1, right=0), "empty", True, None),
    ],
)
def test_whom_a_clip_makes_less_certain(found, outcome, takes, claim):
    judged = Certainty("clip", found, {})
    assert (judged.outcome, judged.takes, judged.claim) == (outcome, takes, claim)
    assert judged.control is None


@pytest.mark.parametrize(
    ("control", "beside"),
    [((0.9, 0.1), "more"), ((0.51, 0.1), "about as"), ((0.3, 0.1), "less"), ((0.1, 0.1), "not")],
)
def test_a_clip_is_held_against_a_recipe_that_sees_no_features(control, beside):
    growths = {"temperature": growth(*control, recipe="temperature"), "clip": growth(0.5, 0.1)}
    (clip,) = Certainty.of_all(growths)
    assert (clip.recipe, clip.beside) == ("clip", beside)
    assert clip.control is growths["temperature"]
    assert Certainty("clip", growth(0.11, 0.1), growths).control is None  # nothing was found
    both = Certainty("clip | temperature", growth(0.5, 0.1), growths)
    assert (both.claim, both.beside) == (None, beside)  # the paper claims nothing of pipelines
    (alone,) = Certainty.of_all({"temperature": growths["temperature"]})
    assert (alone.recipe, alone.claim, alone.control) == ("temperature", None, None)


def test_every_clip_is_judged_under_its_own_name():
    names = ("vector", "clip(min_accuracy=0.99)", "clip from a.safetensors", "clip | vector")
    found = Certainty.of_all(dict.fromkeys(names, growth(0.5, 0.1)))
    assert [(one.recipe, one.claim) for one in found] == [(name, True) for name in names[1:3]]
