"""Batches: one value per row as two classes, chunks, logits computed once, bins (lo, hi]."""

import math
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from featcal import Batch, CalibrationWarning, FeatureClip, Temperature
from featcal.core import memory
from featcal.core.batch import (
    Chunked,
    Through,
    as_data,
    bin_edges,
    bin_index,
    device_of,
    is_single,
    one_logit,
    paired,
    predicted,
    raw_logits,
    two_classes,
    two_probs,
    wide,
    widest,
)
from featcal.core.checks import InputError
from featcal.core.fit import survey

Z = torch.tensor([-2.0, 0.0, 0.5, 3.0])
Y = torch.tensor([0, 1, 0, 1])
SHAPES = {"flat": lambda v: v, "column": lambda v: v[:, None]}
TYPES = [torch.int64, torch.uint8, torch.bool, torch.float16, torch.float64]
PARTS = ("features", "logits", "labels", "groups")
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


@pytest.fixture
def rows():
    """100 rows with 4 features and 3 logits, of 25 samples."""
    draw = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(100, 3, generator=draw), torch.arange(100) % 3
    return Batch(logits, labels, torch.randn(100, 4, generator=draw), torch.arange(100) // 4)


def test_the_shape_alone_tells_one_value_per_row():
    assert all(is_single(torch.zeros(shape)) for shape in [(4,), (4, 1), (0,), (0, 1), (1, 1)])
    for shape in [(4, 2), (4, 1, 1), (), (1, 4), (4, 0)]:
        values = torch.zeros(shape)
        assert not is_single(values)
        assert two_classes(values) is values
        assert two_probs(values) is values


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(st.floats(-(2.0**90), 2.0**90, width=32), max_size=8))
def test_two_logits_and_back_is_the_same_to_the_bit(values):
    z = torch.tensor(values)[:, None]
    two = two_classes(z)
    assert torch.equal(one_logit(two), z)
    torch.testing.assert_close(two.softmax(1)[:, 1:], z.sigmoid())


def test_the_one_logit_of_any_two_has_the_same_probability(rows):
    two = rows.logits[:, :2]
    torch.testing.assert_close(one_logit(two).sigmoid(), two.softmax(1)[:, 1:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_rest_of_a_16_bit_probability_loses_no_digits(dtype):
    """In bfloat16 1 - 0.01 would be 0.98828, and the confidence wrong by 0.2 points."""
    p = torch.tensor([0.01, 0.003, 0.6], dtype=dtype)
    two = two_probs(p)
    assert two.dtype == torch.float32
    assert torch.equal(two.sum(1), torch.ones(3))
    assert torch.equal(two[:, 1], p.float())


@every_shape
@pytest.mark.parametrize("dtype", TYPES)
def test_a_batch_keeps_two_columns_and_integers(shape, dtype):
    labels = shape(Y.to(dtype))
    batch = Batch(shape(Z), labels, torch.ones(4, 3))
    assert torch.equal(batch.logits, torch.stack([torch.zeros(4), Z], 1))
    assert batch.labels.tolist() == [0, 1, 0, 1]
    assert labels.dtype == dtype
    facts = survey(Chunked([batch]), None)
    assert (facts.rows, facts.classes, facts.width) == (4, 2, 3)
    p = torch.tensor([0.25, 0.5, 0.999, 1e-6])
    found = Batch.from_probs(shape(p), labels)
    torch.testing.assert_close(found.logits.softmax(1)[:, 1], p, rtol=1e-5, atol=0)
    assert found.labels.tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_from_probs_of_a_certain_model_stays_finite(dtype):
    for probs in ([[1.0, 0.0], [0.0, 1.0]], [0.0, 1.0]):
        given = torch.tensor(probs, dtype=dtype)
        found = Batch.from_probs(given, torch.tensor([0, 0])).logits
        assert torch.isfinite(found).all()
        expected = given.float().reshape(2, -1)[:, -1]
        torch.testing.assert_close(found.float().softmax(1)[:, 1], expected, rtol=0, atol=1e-4)


def test_rows_pick_every_tensor_alike_and_labels_may_be_a_list(rows):
    part = rows.rows(slice(3, 9))
    assert len(part) == 6
    for name in PARTS:
        assert torch.equal(getattr(part, name), getattr(rows, name)[3:9])
    assert Batch(None, rows.labels).rows(rows.labels == 1).logits is None
    assert Batch(torch.randn(3, 2), [1, 0, 1]).labels.tolist() == [1, 0, 1]


def test_chunks_are_bounded_joined_and_lose_no_row(rows, monkeypatch):
    parts = [rows.rows(slice(start, start + 3)) for start in range(0, 25, 3)]
    assert [len(chunk) for chunk in Chunked(parts, rows=10)] == [9, 9, 9]
    for data, sizes in (([rows], [40, 40, 20]), ([*parts, rows.rows(slice(27, 100))], None)):
        chunks = list(Chunked(data, rows=40))
        assert sizes is None or [len(chunk) for chunk in chunks] == sizes
        for name in PARTS:
            together = torch.cat([getattr(chunk, name) for chunk in chunks])
            assert torch.equal(together, getattr(rows, name))
    odd = [rows.rows(slice(0, 2)), Batch(rows.logits, rows.labels).rows(slice(2, 4)), parts[2]]
    assert [len(chunk) for chunk in Chunked(odd, rows=10)] == [2, 2, 3]
    # What an inner layer gives may be a thousand times as wide as what enters the last one.
    monkeypatch.setattr(memory, "CHUNK_VALUES", 2**10)
    wide_rows = Batch(None, torch.zeros(70, dtype=torch.long), torch.zeros(70, 30))
    assert [len(part) for part in Chunked([wide_rows])] == [34, 34, 2]
    assert [len(part) for part in Chunked([wide_rows] * 2, rows=20)] == [20, 20, 20, 10] * 2
    once = as_data(rows)
    assert as_data(once) is once


def test_no_rows_are_one_chunk_and_rows_may_come_one_by_one(rows):
    empty, two = rows.rows(slice(0, 0)), rows.rows(slice(0, 2))
    assert [len(chunk) for chunk in Chunked([empty], rows=1)] == [0]
    assert [len(chunk) for chunk in Chunked([two], rows=1)] == [1, 1]
    assert [len(chunk) for chunk in Chunked([two] * 6, rows=4)] == [4, 4, 4]
    assert [len(chunk) for chunk in Chunked([two] * 3, rows=5)] == [4, 2]


def test_a_batch_goes_to_a_device_and_stays_without_one(rows):
    there = rows.to(torch.device("meta"))
    assert {getattr(there, name).device.type for name in PARTS} == {"meta"}
    assert rows.to(None).logits is rows.logits
    bare = Batch(None, rows.labels).to(torch.device("meta"))
    assert (bare.features, bare.logits) == (None, None)
    assert device_of(torch.nn.Linear(4, 3, device="meta")).type == "meta"
    assert device_of(torch.neg) is device_of(torch.nn.Identity()) is device_of(None) is None
    moved = next(iter(Chunked([rows], torch.device("meta"))))
    assert moved.labels.device.type == "meta"


def test_a_head_is_as_wide_as_its_widest_weight():
    head = torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.Linear(9, 3))
    head.register_parameter("scale", torch.nn.Parameter(torch.tensor(2.0)))
    assert widest(head) == 9
    assert widest(torch.neg) == widest(None) == 0


def test_probabilities_in_a_pair_of_arrays_are_doubted(rows):
    probs, several = rows.logits.softmax(1), torch.arange(300).view(100, 3) % 2
    with pytest.warns(CalibrationWarning, match=r"pair .* as probabilities do.*Batch.from_probs"):
        assert torch.equal(paired((probs, rows.labels)).logits, probs)
    for logits, labels in ((rows.logits, rows.labels), (probs, several)):  # nothing to say of those
        assert torch.equal(paired((logits.numpy(), labels.tolist())).labels, labels)


def test_groups_are_one_whole_number_per_row_and_go_through_every_view(rows):
    view = Through(Chunked([rows], rows=40), lambda batch: batch.logits)
    for _ in ("computed", "kept"):
        assert torch.equal(torch.cat([batch.groups for batch in view]), rows.groups)
    assert "of 25 samples" in repr(rows)
    assert Batch(rows.logits, rows.labels, groups=rows.groups.to(torch.uint8)).groups.dtype == (
        torch.int64
    )
    whole = rows.groups
    for wrong in (whole[:9], whole.float(), whole - 1, whole > 3, whole[:, None], whole.tolist()):
        with pytest.raises(InputError, match="groups"):
            Batch(rows.logits, rows.labels, groups=wrong)
    assert len(Batch(rows.logits[:0], rows.labels[:0], groups=whole[:0]).groups) == 0


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_labels_of_every_integer_type_fit_alike(dtype, rows):
    narrow = Batch(rows.logits, rows.labels.to(dtype))
    expected = Temperature().fit(Batch(rows.logits, rows.labels))
    assert Temperature().fit(narrow).temperature == expected.temperature


def test_data_is_surveyed_once_for_a_head(rows):
    class Counts(list):
        passes = 0

        def __iter__(self):
            Counts.passes += 1
            return super().__iter__()

    data = as_data(Counts([Batch(rows.logits, rows.labels)]))
    before, facts = Counts.passes, survey(data, None)
    assert survey(data, None) is facts
    assert Counts.passes == before + 1


class Calls:
    """Counts the rows it is asked for."""

    def __init__(self):
        self.rows = 0

    def __call__(self, batch):
        self.rows += len(batch)
        return batch.features * 2


@pytest.mark.parametrize("with_features", [True, False])
@pytest.mark.parametrize("fits", [True, False])
def test_through_computes_the_logits_once_or_recomputes_what_is_over_budget(
    with_features, fits, rows
):
    parts, calls = [rows.rows(slice(i, i + 10)) for i in range(0, 100, 10)], Calls()
    keep = rows.features.nbytes - (0 if fits else 1)
    view = Through(parts, calls, features=with_features, keep=keep)
    next(iter(view))  # nothing is kept of a pass that was broken off
    assert not view.kept
    for _ in range(3):
        seen = list(view)
        assert torch.equal(torch.cat([b.logits for b in seen]), rows.features * 2)
        assert all((b.features is not None) == with_features for b in seen)
    assert view.kept == fits
    assert calls.rows == (110 if fits else 310)
    ample = Through(parts, calls)  # features come along, and memory suffices, unless said otherwise
    assert all(batch.features is not None for batch in [*ample, *ample])
    assert ample.kept


def test_nothing_stays_of_logits_that_turn_out_too_many(rows):
    parts = [rows.rows(slice(i, i + 10)) for i in range(0, 100, 10)]
    one = rows.features[:10].nbytes
    seen = []
    for batch in Through(parts, lambda batch: batch.features * 2, keep=2 * one):
        seen.append(weakref.ref(batch.logits))
        del batch
    assert [ref() for ref in seen[:3]] == [None] * 3


def test_a_fit_over_budget_gives_the_same_values(monkeypatch, made):
    world = made(n=600, heat=1.5)
    data = [Batch(None, world.labels, world.features)]
    temperature = Temperature().fit(data, world.head)
    clip = FeatureClip().fit(data, world.head)
    monkeypatch.setattr(Through.__init__, "__kwdefaults__", {"features": True, "keep": 0})
    again = Temperature().fit(data, world.head)
    assert again.temperature == temperature.temperature
    assert again.report.steps[0].head_passes > temperature.report.steps[0].head_passes
    after = FeatureClip().fit(data, world.head).report.loss_after
    assert after == pytest.approx(clip.report.loss_after, abs=1e-5)


def test_stored_logits_are_taken_when_they_are_exact_and_the_head_otherwise(rows):
    assert raw_logits(rows, torch.neg) is rows.logits
    for narrow in (torch.float16, torch.bfloat16):
        rounded = Batch(rows.logits.to(narrow), rows.labels, rows.features)
        assert torch.equal(raw_logits(rounded, torch.neg), -rows.features)
        assert raw_logits(Batch(rounded.logits, rows.labels), None).dtype == narrow
        assert wide(rounded.logits).dtype == torch.float32
        (seen,) = Through([rounded], lambda batch: batch.logits)
        assert seen.logits.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bins", [1, 2, 5, 10, 15, 100])
def test_an_edge_belongs_to_the_bin_below_it(bins, dtype):
    edges = bin_edges(bins, dtype)
    assert bin_index(edges, bins).tolist() == [0, *range(bins)]
    above = edges[:-1] * (1 + 16 * torch.finfo(dtype).eps)  # by more than rounding
    assert bin_index(above, bins).tolist() == list(range(bins))


@given(st.floats(0, 1), st.integers(1, 50))
def test_the_bin_is_the_naive_one(confidence, bins):
    found = int(bin_index(torch.tensor([confidence], dtype=torch.float64), bins)[0])
    exact = confidence * bins
    if abs(exact - round(exact)) > 1e-9:  # away from the edges there is no doubt
        assert found == max(math.ceil(exact) - 1, 0)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
def test_predicted_is_the_first_of_equal_maxima(dtype):
    draw = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(200, 5, generator=draw)).round().to(dtype)
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert predicted(logits).tolist() == expected
    assert predicted(logits).dtype == torch.int64
    assert predicted(logits.requires_grad_()).tolist() == expected
