"""Numbers and names as sentences have them."""

from featcal.core.calibrator import METHODS
from featcal.page.verdict import STEPS, about, apart, between, in_words, listed, points, rows
from featcal.report.scores import UNKNOWN, Interval


def test_numbers_and_names():
    assert (rows(1), rows(2000)) == ("1 row", "2,000 rows")
    assert about(0.9999) == "99.9 %"
    assert about(0.00001) == "0.1 %"
    assert about(1.0) == "100 %"
    assert points(0.0043) == "0.43 points"
    assert between(UNKNOWN) == ""
    assert between(Interval(-0.001, 0.004), signed=True) == " (95 % interval -0.10 to +0.40)"
    assert listed(["a"]) == "a"
    assert in_words("clip | temperature from cal.safetensors") == (
        "feature clipping followed by temperature scaling from cal.safetensors"
    )
    assert in_words("spline(knots=6)") == "spline calibration (knots=6)"
    assert in_words("unheard(of=6)") == "unheard(of=6)"
    assert in_words("clip(min_accuracy=0.99) | temperature") == (
        "feature clipping (min_accuracy=0.99) followed by temperature scaling"
    )


def test_two_shares_that_differ_look_different():
    assert apart(0.9, 0.82) == ("90 %", "82 %")
    assert apart(0.894, 0.886) == ("89.4 %", "88.6 %")
    assert apart(0.8911, 0.8908) == ("89.11 %", "89.08 %")
    assert apart(0.5, 0.5) == ("50 %", "50 %")


def test_every_method_has_a_name_in_words():
    own = {name for name, kind in METHODS.items() if kind.__module__.startswith("featcal.")}
    assert own == set(STEPS)
    assert all(" " in words for words in STEPS.values())
