"""What is refused of data, by argument, row and remedy: one table for every boundary."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from featcal import Batch, FeatureClip, InputError, Temperature
from featcal.core.batch import as_data, two_classes
from featcal.core.checks import (
    check_batch,
    check_finite,
    check_multi_hot,
    check_probs,
    check_same,
    check_whole,
    checked_labels,
    like_probs,
    rows_text,
)
from featcal.core.fit import survey

DRAW = torch.Generator().manual_seed(0)
Z = torch.randn(100, 3, generator=DRAW)
X = torch.randn(100, 4, generator=DRAW)
Y = torch.arange(100) % 3


def put(values, row, value):
    values = values.clone()
    values[row] = value
    return values


# Logits, labels and features, and what the refusal says.
BAD = {
    "nan": (put(Z, 70, math.nan), Y, None, "logits are NaN or infinite in row 70: remove"),
    "inf": (Z, Y, put(X, (99, 1), math.inf), "features are NaN or infinite in row 99"),
    "many": (put(Z, slice(10, 20), -math.inf), Y, None, "in rows 10, 11, 12, 13, 14 and 5 more"),
    "low label": (Z, put(Y, 5, -1), None, "labels are outside 0..2 in row 5: correct them"),
    "high label": (Z, put(Y, 5, 2**63 - 1), None, "labels are outside 0..2 in row 5"),
    "binary label": (Z[:, 0], put(Y % 2, 3, 2), None, "labels are outside 0..1 in row 3"),
    "half label": (Z[:, 0], put((Y % 2).float(), 3, 0.9), None, "fractions such as 0.9"),
    "float labels": (Z, Y.float(), None, "labels have shape (100,) and type torch.float32"),
    "bool labels": (Z, Y.bool(), None, "one integer per row; take"),
    "column": (Z, Y[:, None], None, "labels[:, 0] of a single column"),
    "one-hot": (Z, F.one_hot(Y, 3), None, "single 1 in every row"),
    "short": (Z[:99], Y, None, "logits have shape (99, 3)"),
    "integers": (Z.long(), Y, None, "logits have shape (100, 3) and type torch.int64"),
    "3-d": (Z, Y, X[:, :, None], "features have shape (100, 4, 1)"),
    "flat features": (Z, Y, X[:, 0], "features have shape (100,)"),
    "nothing": (None, Y, None, "neither logits nor features"),
    "no head": (None, Y, X, "features but no logits: pass the classifier head"),
}


@pytest.mark.parametrize("case", BAD)
def test_data_no_fit_can_use_is_refused_by_name(case):
    logits, labels, features, says = BAD[case]
    with pytest.raises(InputError, match=re.escape(says)):
        Temperature().fit(Batch(logits, labels, features))


MADE = {
    "list": (lambda: Batch([[0.0, 1.0]], Y[:1]), "logits are a list: pass a tensor"),
    "array": (lambda: Batch(None, Y, X.numpy()), "features are a ndarray"),
    "names": (lambda: Batch(Z[:2], ["cat", "dog"]), "labels are a list that is no tensor"),
    "number": (lambda: Batch(Z, torch.tensor(3)), "labels are one number"),
    "generator": (lambda: as_data(b for b in [Batch(Z, Y)]), r"only once.*pass list\(data\)"),
    "no data": (lambda: as_data(3), "data is int: pass a Batch"),
    "tuples": (lambda: Temperature().fit([(Z, Y)]), "data holds a tuple: every item must be a"),
    "no rows": (lambda: Temperature().fit(Batch(Z[:0], Y[:0])), "data is empty"),
    "mode": (lambda: Temperature().fit(Batch(Z, Y), mode="both"), "mode is 'both': choose one of"),
    "no batches": (lambda: Temperature().fit([]), "data is empty"),
    "probs of 3": (lambda: Batch.from_probs(Z[..., None], Y), r"probs are .*shape \(n, k\), or"),
    "logits": (lambda: Batch.from_probs(Z, Y), r"probs\[0\] holds .* go into Batch\("),
    "above 1": (lambda: Batch.from_probs(put(Z[:, 0].sigmoid(), 7, 1.5), Y), r"\[7\] holds 1.5"),
}


@pytest.mark.parametrize("case", MADE)
def test_what_is_no_data_is_refused(case):
    make, says = MADE[case]
    with pytest.raises(InputError, match=says):
        make()


@pytest.mark.parametrize(
    ("later", "with_head"),
    [
        (Batch(Z[:, :2], Y % 2), False),
        (Batch(None, Y), False),
        (Batch(None, Y, X), False),
        (Batch(None, Y, X[:, :3]), True),
        (Batch(Z, put(Y, 63, 7)), False),
    ],
    ids=["other classes", "bare", "no logits", "other width", "row 163"],
)
def test_a_later_batch_is_held_to_the_first_and_rows_are_counted_on(later, with_head, request):
    head = nn.Linear(4, 3)
    first = Batch(None, Y, X) if with_head else Batch(Z, Y)
    with pytest.raises(InputError, match=r"row 100 on has|neither|row 163"):
        survey([first, later], head if with_head else None)


@pytest.mark.parametrize(
    ("batch", "head", "says"),
    [
        (Batch(None, Y, X[:, :3]), nn.Linear(4, 3), r"does not accept features of shape \(64, 3\)"),
        (Batch(Z, Y, X), nn.Linear(4, 5), "head gives 5 classes and the stored logits have 3"),
        (Batch(None, Y, X), lambda x: x[:30], r"head returned shape \(30, 4\) for 64 rows"),
        (Batch(Z, Y, X), lambda x: x[:, :3], r"differs from the stored logits by .*a missing ReLU"),
        (Batch(None, Y, X * 1e30), lambda x: x[:, :3] * 1e30, "the head's logits are NaN or infin"),
    ],
    ids=["width", "classes", "rows", "values", "huge"],
)
def test_a_head_that_does_not_fit_is_refused(batch, head, says):
    with pytest.raises(InputError, match=says):
        FeatureClip().fit(batch, head)


def test_the_heads_own_logits_pass_in_any_precision_and_one_entry_that_differs_does_not():
    logits = 5 * Z
    for same in (logits, logits + 1e-4, logits.bfloat16(), logits.half()):
        check_same(logits, same)
    check_same(logits[:0], logits[:0])
    for value in (0.02 + logits[7, 2], 1e3, math.nan, math.inf):
        with pytest.raises(InputError, match="differs from the stored logits"):
            check_same(put(logits, (7, 2), value), logits)
    check_same(logits, put(logits, (3, 1), math.nan))  # another check names the row


def test_masked_classes_excuse_no_other_and_a_top_near_zero_rounds_like_other_rows():
    logits = put(5 * Z, (slice(None), 0), -1e9)
    check_same(logits * (1 + 1e-5), logits)
    with pytest.raises(InputError, match=r"stored logits by 0\.1:"):
        check_same(logits + torch.tensor([0.0, 0.0, 0.1]), logits)
    stored = torch.tensor([[0.01, -40.0], [35.0, 1.0], [30.0, -3.0]], dtype=torch.bfloat16)
    check_same(stored.float() + 0.2, stored)


@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 1e-3), (torch.bfloat16, 0.05)])
def test_stored_logits_may_be_off_by_a_share_of_the_rows_largest(dtype, share):
    stored = torch.tensor([[64.0, 1.0], [64.0, -64.0]]).to(dtype)
    for column in (0, 1):
        check_same(stored.float() + put(torch.zeros(2, 2), (0, column), 64 * share * 0.99), stored)
        with pytest.raises(InputError, match="differs"):
            check_same(
                stored.float() + put(torch.zeros(2, 2), (0, column), 64 * share * 1.01), stored
            )
    small = stored.float() / 2**12  # where logits are near 0 their size is 1
    check_same(small + 0.99 * share, small.to(dtype))
    with pytest.raises(InputError, match="differs"):
        check_same(small + 1.01 * share, small.to(dtype))


def test_rows_are_counted_from_0_or_where_a_caller_says():
    labels, bad = put(Y, 5, 3), put(Z, 5, math.nan)
    for refused in (
        lambda **first: checked_labels(labels, 3, **first),
        lambda **first: check_finite("logits", bad, **first),
        lambda **first: check_batch(Batch(Z, labels), classes=3, **first),
        lambda **first: check_batch(Batch(bad, Y), classes=3, **first),
    ):
        with pytest.raises(InputError, match="in row 5:"):
            refused()
        with pytest.raises(InputError, match="in row 25:"):
            refused(first_row=20)
    assert checked_labels(Y.to(torch.int8), 3, rows=100).dtype == torch.int64
    assert rows_text(torch.tensor([4])) == "row 4"
    assert rows_text(torch.arange(5)) == "rows 0, 1, 2, 3, 4"
    assert rows_text(torch.arange(6)) == "rows 0, 1, 2, 3, 4 and 1 more"


def test_no_rows_of_several_labels_may_have_any_type():
    check_multi_hot(torch.zeros(0, 3), 3)
    for labels in (torch.zeros(1, 3), torch.zeros(0, 2), torch.zeros(0, 3, dtype=torch.cfloat)):
        with pytest.raises(InputError, match=r"labels have shape \(., .\)"):
            check_multi_hot(labels, 3)


@pytest.mark.parametrize(
    ("key", "most"),
    [
        *(("partitions", 200), ("groups", 100), ("restarts", 100), ("hidden", 200), ("layers", 10)),
        *(("bins", 10_000), ("knots", 1000), ("top", 1000), ("neighbours", 10**6)),
        *(("references", 10**7), ("min_rows", 10**9), ("seed", 2**62)),
    ],
)
def test_whole_numbers_have_a_most(key, most):
    check_whole("method", 1, **{key: most})
    with pytest.raises(InputError, match=f"method: {key} is .* from 1 to {most}$"):
        check_whole("method", 1, **{key: most + 1})


def test_a_probability_may_round_out_of_range_by_a_millionth():
    for edge, out in ((-1e-6, -1.001e-6), (1 + 1e-6, 1 + 1.001e-6)):
        for row in ([1 - edge, edge], [edge]):
            check_probs(torch.tensor([row], dtype=torch.float64))
        for row in ([1 - out, out], [out]):
            with pytest.raises(InputError, match=r"probs\[0\]"):
                check_probs(torch.tensor([row], dtype=torch.float64))


def test_probabilities_among_logits_are_told_from_logits():
    probs = Z.softmax(1)
    for rows in (probs, probs.bfloat16(), torch.round(probs, decimals=2), torch.eye(3)):
        assert like_probs(rows)
    z = torch.linspace(0.995, 1, 100)
    for rows in (Z, Z[:0], probs - 0.01, probs + 0.01, two_classes(z), two_classes(z)[:1], z):
        assert not like_probs(rows)


def test_probabilities_may_be_off_by_what_their_precision_or_the_caller_allows():
    probs = Z.softmax(1)
    check_probs(probs + 3e-4)
    check_probs(probs.bfloat16())
    check_probs(probs + 3e-3, slack=1e-2)
    check_probs(probs[:0])
    for off, dtype in ((0.002, torch.float32), (0.002, torch.float64), (0.03, torch.bfloat16)):
        with pytest.raises(InputError, match="with the sum"):
            check_probs((probs + off).to(dtype))
    with pytest.raises(InputError, match="with the sum"):
        Batch.from_probs(probs + 0.01, Y)
    Batch.from_probs(probs + 0.003, Y)  # a logarithm forgives more
    check_probs(torch.tensor([0.0, 1.0 + 1e-7]))
    with pytest.raises(InputError, match=r"line 4 holds .* with the sum 1.0\d+: .*; mend it"):
        check_probs(
            put(probs, 3, probs[3] + 0.01), place=lambda n: f"line {n + 1}", remedy="mend it"
        )
    with pytest.raises(InputError, match=r"probs\[1\] holds -0.5 to 1.5 with the sum 1"):
        check_probs(torch.tensor([[1.0, 0.0], [-0.5, 1.5]]))
    with pytest.raises(InputError, match="have type"):
        check_probs(probs.long())
    for wrong in (put(probs, (5, 1), math.nan), torch.tensor([0.5, -0.1])):
        with pytest.raises(InputError, match="prob"):
            check_probs(wrong)
