"""Which way a network errs, and the sentence that tells it."""

from dataclasses import replace

import pytest
from made_rows import bins_of, row, told

from featcal.page.verdict import headline, trust, verdict


def test_errors_in_both_directions_are_mixed():
    both = bins_of((1000, 0.6, 0.75), (1000, 0.95, 0.8))
    raw = row("none", bins=both, accuracy=0.775, confidence=0.775, ece=0.15)
    assert verdict(raw) == "mixed"
    assert headline("mixed", raw) == (
        "This model is too sure in some places and too modest in others: when it says 95 % it is "
        "right 80 % of the time, and when it says 60 %, 75 %."
    )


def test_mixed_without_bins_to_show_is_said_without():
    sparse = bins_of(*((10, said, right) for said, right in ((0.3, 0.9), (0.9, 0.3))))
    assert headline("mixed", row("none", bins=sparse)) == (
        "This model's confidence is off, by 9.0 points on average, but 2,000 rows do not tell "
        "which way."
    )
    assert "do not tell which way" in trust("mixed", row("none", bins=sparse))


def test_the_example_is_an_average_where_no_bin_will_do():
    sparse = bins_of((5, 0.9, 0.2), (1995, 0.995, 0.9))
    raw = row("none", bins=sparse, accuracy=0.9, confidence=0.99, ece=0.09)
    assert "on average it is 99 % sure, and right 90 % of the time" in headline("over", raw)
    other_way = bins_of((500, 0.9, 0.95), (1500, 0.99, 0.7))
    raw = row("none", bins=other_way, accuracy=0.76, confidence=0.97, ece=0.2)
    assert "on average it is 97 % sure, and right 76 % of the time" in headline("over", raw)


@pytest.mark.parametrize(("count", "told"), [(100, "on average"), (400, "when it says 90 %")])
def test_a_bin_that_may_be_off_by_chance_is_no_example(count, told):
    """Four points are 1.3 standard errors of a hundred rows, and 2.7 of four hundred."""
    for kind, right in (("over", 0.86), ("under", 0.94)):
        bins = bins_of((count, 0.9, right), (1600, 0.99, right))
        assert f": {told}" in headline(kind, row("none", bins=bins))


def test_no_error_found_is_not_an_error_ruled_out():
    flat = bins_of((1000, 0.7, 0.7), (1000, 0.9, 0.9))
    wide = row("none", bins=flat, accuracy=0.80, confidence=0.82, ece=0.02, spread=0.03)
    assert told(wide)[0].kind == "unclear"


def test_a_mean_gap_that_is_known_counts_whatever_the_binned_error_says():
    flat = bins_of((1000, 0.74, 0.7), (1000, 0.94, 0.9))
    sure = row("none", bins=flat, accuracy=0.80, confidence=0.84, ece=0.045, spread=0.01)
    assert told(sure)[0].kind == "over"


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


def test_two_numbers_that_differ_are_not_printed_alike():
    near = bins_of((2000, 0.8945, 0.8855))
    raw = row("none", bins=near, accuracy=0.8749, confidence=0.8851, ece=0.0125)
    assert verdict(raw) == "over"
    assert headline("over", raw).endswith("on average it is 89 % sure, and right 87 % of the time.")
    enough = row("none", bins=bins_of((9000, 0.8949, 0.8849)), accuracy=0.8649, confidence=0.8751)
    assert "when it says 89 %, it is right about 88 % of" in headline("over", enough)
    halves = row("none", bins=bins_of((9000, 0.905, 0.895)), accuracy=0.8949, confidence=0.9051)
    assert "when it says 90.5 %, it is right about 89.5 % of" in headline("over", halves)


def test_a_calibrated_model_is_not_told_by_a_bin_that_is_off():
    noisy = bins_of((40, 0.9, 0.8), (1960, 0.995, 0.995))
    raw = row("none", bins=noisy, accuracy=0.991, confidence=0.993, ece=0.005)
    assert headline("calibrated", raw).endswith(
        "on average it is 99 % sure, and right 99 % of the time."
    )


@pytest.mark.parametrize(
    ("bins", "way", "words"),
    [
        (((1000, 0.7, 0.62), (1000, 0.9, 0.89)), "too sure in places", "claims more than it"),
        (((1000, 0.7, 0.78), (1000, 0.9, 0.91)), "too modest in places", "right more often"),
    ],
)
def test_errors_one_way_alone_are_not_called_mixed(bins, way, words):
    """The mean gap may be chance and the error not, with no bin that errs the other way."""
    raw = row("none", bins=bins_of(*bins), ece=0.05, accuracy=0.75, confidence=0.755)
    assert verdict(raw) == "mixed"
    assert headline("mixed", raw).startswith(f"This model is {way}: when it says 70 %, it is")
    assert words in trust("mixed", raw)


def test_a_bin_that_may_be_off_by_chance_is_no_evidence():
    """Two standard errors below in one of two bins, and a clear error in the other."""
    both = bins_of((100, 0.6, 0.7), (1000, 0.95, 0.8))
    told_of = headline("mixed", row("none", bins=both, ece=0.1))
    assert told_of.startswith("This model is too sure in places: when it says 95 %")
    saturated = bins_of((100, 1.0 + 1e-12, 1.0), (1000, 0.95, 0.8))
    assert "95 %" in headline("mixed", row("none", bins=saturated, ece=0.1))


def test_one_row_proves_nothing():
    """There is no interval, and the size cannot decide."""
    alone = row("none", n=1, accuracy=0.0, confidence=0.9, ece=0.9)
    bare = replace(alone, scores=replace(alone.scores, replicates={}))
    assert verdict(bare) == "unclear"
