"""Batches and what is refused of them: by argument, value and remedy."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from featcal.core import batch as module
from featcal.core.batch import Batch, Chunked, Through, as_data, raw_logits, wide
from featcal.core.checks import InputError
from featcal.core.fit import survey
from featcal.methods import FeatureClip, Temperature


def simple(rows=100, d=4, k=3, *, seed=0):
    draw = torch.Generator().manual_seed(seed)
    head = nn.Linear(d, k, device="meta")
    head.weight = nn.Parameter(torch.randn(k, d, generator=draw))
    head.bias = nn.Parameter(torch.randn(k, generator=draw))
    features = torch.randn(rows, d, generator=draw)
    labels = torch.randint(k, (rows,), generator=draw)
    return features, head(features).detach(), labels, head


# --- Batch ------------------------------------------------------------------------------------


def test_rows_pick_every_tensor_alike_and_keep_what_is_missing():
    features, logits, labels, _ = simple()
    part = Batch(logits, labels, features).rows(slice(3, 9))
    assert len(part) == 6
    assert torch.equal(part.features, features[3:9])
    assert torch.equal(part.logits, logits[3:9])
    assert torch.equal(part.labels, labels[3:9])
    assert Batch(None, labels).rows(labels == 1).logits is None


def test_labels_may_be_a_list_and_must_be_one_for_each_row():
    assert Batch(torch.randn(3, 2), [1, 0, 1]).labels.tolist() == [1, 0, 1]
    assert Batch(torch.randn(3), [True, False, True]).labels.tolist() == [1, 0, 1]
    assert float(Temperature().fit(Batch(torch.eye(3), [0, 1, 0])).temperature) > 0
    with pytest.raises(InputError, match="labels are one number: give one for each row"):
        Batch(torch.randn(10), torch.tensor(3))
    with pytest.raises(InputError, match="labels are a list that is no tensor of class numbers"):
        Batch(torch.randn(2, 3), ["cat", "dog"])


def test_logits_and_features_are_tensors():
    labels = torch.tensor([0])
    with pytest.raises(InputError, match=r"logits are a list: pass a tensor, such as torch.as_te"):
        Batch([[0.0, 1.0]], labels)
    with pytest.raises(InputError, match="features are a ndarray"):
        Batch(None, labels, torch.zeros(1, 2).numpy())


@pytest.mark.parametrize("probs", [torch.tensor(0.3), torch.rand(3, 2, 2), [0.3, 0.7]])
def test_probs_of_another_shape_are_refused(probs):
    with pytest.raises(InputError, match=r"probs are .*: pass a tensor of shape \(n, k\), or \(n,"):
        Batch.from_probs(probs, torch.zeros(3).long())


def test_from_probs_gives_the_probabilities_back():
    probs = torch.rand(50, 4, dtype=torch.float64).softmax(1)
    found = Batch.from_probs(probs, torch.zeros(50, dtype=torch.long))
    torch.testing.assert_close(found.logits.softmax(1), probs, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_from_probs_of_a_certain_model_stays_finite(dtype):
    probs = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=dtype)
    found = Batch.from_probs(probs, torch.tensor([0, 0]))
    assert torch.isfinite(found.logits).all()
    assert torch.equal(found.logits.float().softmax(1).argmax(1), torch.tensor([0, 1]))


# --- data as chunks ---------------------------------------------------------------------------


def test_chunks_are_bounded_and_lose_no_row():
    features, logits, labels, _ = simple(rows=25)
    parts = list(Chunked([Batch(logits, labels, features)], rows=10))
    assert [len(part) for part in parts] == [10, 10, 5]
    assert torch.equal(torch.cat([part.features for part in parts]), features)
    small = Batch(logits[:3], labels[:3])
    (whole,) = Chunked([small], rows=10)
    assert torch.equal(whole.logits, small.logits)
    assert torch.equal(whole.labels, small.labels)


def test_short_batches_are_put_together_and_odd_ones_left_apart():
    features, logits, labels, _ = simple(rows=25)
    whole = Batch(logits, labels, features)
    parts = [whole.rows(slice(start, start + 3)) for start in range(0, 25, 3)]
    chunks = list(Chunked(parts, rows=10))
    assert [len(chunk) for chunk in chunks] == [9, 9, 7]
    for name in ("features", "logits", "labels"):
        together = torch.cat([getattr(chunk, name) for chunk in chunks])
        assert torch.equal(together, getattr(whole, name))
    odd = [whole.rows(slice(0, 2)), Batch(logits[2:4], labels[2:4]), whole.rows(slice(4, 6))]
    assert [len(chunk) for chunk in Chunked(odd, rows=10)] == [2, 2, 2]


def test_one_batch_stands_for_a_list_of_one():
    _, logits, labels, _ = simple()
    assert [len(part) for part in as_data(Batch(logits, labels))] == [100]


@pytest.mark.parametrize("data", [3, None, object()])
def test_data_that_is_no_iterable_is_refused(data):
    with pytest.raises(InputError, match=f"data is {type(data).__name__}: pass a Batch"):
        as_data(data)


def test_data_of_other_things_is_refused_by_type():
    with pytest.raises(InputError, match="data holds a tuple: every item must be a Batch"):
        Temperature().fit([(torch.zeros(3, 2), torch.zeros(3))])


@pytest.mark.parametrize(
    "make", [lambda b: (x for x in [b]), lambda b: iter([b]), lambda b: map(lambda x: x, [b])]
)
def test_what_can_be_read_only_once_is_refused(make):
    _, logits, labels, _ = simple()
    with pytest.raises(InputError, match=r"can be read only once.*pass list\(data\)"):
        as_data(make(Batch(logits, labels)))


# --- Through ----------------------------------------------------------------------------------


class Calls:
    """Counts the rows it is asked for."""

    def __init__(self):
        self.rows = 0

    def __call__(self, batch):
        self.rows += len(batch)
        return batch.features * 2


def parts_of(features, labels):
    return [Batch(None, labels[i : i + 10], features[i : i + 10]) for i in range(0, 100, 10)]


@pytest.mark.parametrize("with_features", [True, False])
def test_through_computes_the_logits_once(with_features):
    features, _, labels, _ = simple()
    calls = Calls()
    view = Through(parts_of(features, labels), calls, features=with_features)
    assert not view.kept
    for _ in range(3):
        seen = list(view)
        assert torch.equal(torch.cat([b.logits for b in seen]), features * 2)
        assert all((b.features is not None) == with_features for b in seen)
    assert view.kept
    assert calls.rows == 100


def test_through_recomputes_what_is_over_budget():
    features, _, labels, _ = simple()
    calls = Calls()
    view = Through(parts_of(features, labels), calls, keep=features.nbytes - 1)
    for _ in range(3):
        assert torch.equal(torch.cat([b.logits for b in view]), features * 2)
    assert not view.kept
    assert calls.rows == 300
    exact = Through(parts_of(features, labels), Calls(), keep=features.nbytes)
    list(exact)
    assert exact.kept


def test_through_keeps_nothing_of_a_pass_that_was_broken_off():
    features, _, labels, _ = simple()
    calls = Calls()
    view = Through(parts_of(features, labels), calls)
    next(iter(view))
    assert not view.kept
    assert torch.equal(torch.cat([b.logits for b in view]), features * 2)
    assert calls.rows == 110


def test_through_gives_wide_logits_without_gradient():
    features, _, labels, head = simple()
    view = Through([Batch(None, labels, features.half())], lambda b: head(b.features.float()))
    (seen,) = view
    assert not seen.logits.requires_grad
    half = Through([Batch(None, labels, features.half())], lambda b: b.features)
    assert next(iter(half)).logits.dtype == torch.float32


def test_a_fit_over_budget_gives_the_same_values(monkeypatch, made):
    world = made(n=2500, heat=1.5)
    data = [Batch(None, world.labels, world.features)]
    temperature = Temperature().fit(data, world.head)
    clip = FeatureClip().fit(data, world.head)
    monkeypatch.setattr(Through.__init__, "__kwdefaults__", {"features": True, "keep": 0})
    again = Temperature().fit(data, world.head)
    assert again.temperature == temperature.temperature
    assert again.report.steps[0].head_passes > temperature.report.steps[0].head_passes
    after = FeatureClip().fit(data, world.head).report.loss_after
    assert after == pytest.approx(clip.report.loss_after, abs=1e-5)


def test_stored_logits_are_taken_when_they_are_exact_and_the_head_otherwise():
    features, logits, labels, head = simple()
    stored = logits + 1
    assert raw_logits(Batch(stored, labels, features), head) is stored
    for narrow in (torch.float16, torch.bfloat16):
        found = raw_logits(Batch(stored.to(narrow), labels, features), head)
        assert torch.equal(found, head(features))
    assert raw_logits(Batch(stored.half(), labels), None).dtype == torch.float16
    assert wide(stored.half()).dtype == torch.float32
    assert wide(stored.double()).dtype == torch.float64


# --- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["features", "logits"])
@pytest.mark.parametrize("row", [0, 70, 99])
def test_values_that_are_not_finite_are_refused_by_row(bad, name, row):
    features, logits, labels, head = simple()
    values = {"features": features, "logits": logits}
    values[name][row, 1] = bad
    batch = Batch(logits if name == "logits" else None, labels, features)
    with pytest.raises(InputError, match=f"{name} are NaN or infinite in row {row}: remove them"):
        survey([batch], head if name == "features" else None)


def test_many_bad_rows_are_counted_and_the_first_named():
    _, logits, labels, _ = simple()
    logits[10:20] = math.nan
    match = r"logits are NaN or infinite in 10 rows \(10, 11, 12, 13, 14, \.\.\.\)"
    with pytest.raises(InputError, match=match):
        survey([Batch(logits, labels)], None)


def test_rows_are_counted_over_batches():
    _, logits, labels, _ = simple()
    labels[63] = 7
    parts = [Batch(logits[:60], labels[:60]), Batch(logits[60:], labels[60:])]
    with pytest.raises(InputError, match=r"labels are outside 0\.\.2 in row 63: correct them"):
        survey(parts, None)


@pytest.mark.parametrize("label", [-1, 3, 1000, -(2**63), 2**63 - 1])
def test_labels_out_of_range_are_refused(label):
    _, logits, labels, _ = simple()
    labels[5] = label
    with pytest.raises(InputError, match=r"labels are outside 0\.\.2 in row 5"):
        survey([Batch(logits, labels)], None)


@pytest.mark.parametrize(
    "change",
    [
        lambda y: y.float(),
        lambda y: y.bool(),
        lambda y: y[:, None],
        lambda y: F.one_hot(y, 3),
        lambda y: y.half(),
    ],
    ids=["float", "bool", "column", "one-hot", "half"],
)
def test_labels_must_be_one_integer_a_row(change):
    _, logits, labels, _ = simple()
    with pytest.raises(InputError, match=r"labels have shape .* one integer a row"):
        survey([Batch(logits, change(labels))], None)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
def test_labels_of_every_integer_type_fit_alike(dtype):
    features, logits, _, head = simple(rows=300)
    labels = (logits + torch.randn(300, 3, generator=torch.Generator().manual_seed(1))).argmax(1)
    logits = logits * 4
    expected = Temperature().fit(Batch(logits, labels)).temperature
    assert Temperature().fit(Batch(logits, labels.to(dtype))).temperature == expected
    FeatureClip().fit(Batch(None, labels.to(dtype), features), head)


@pytest.mark.parametrize("name", ["features", "logits"])
@pytest.mark.parametrize(
    "change",
    [lambda v: v[:99], lambda v: v.long(), lambda v: v[:, :, None], lambda v: v[0, 0]],
    ids=["short", "integer", "3-d", "0-d"],
)
def test_values_of_a_wrong_shape_or_type_are_refused_by_name(name, change):
    features, logits, labels, _ = simple()
    values = {"features": features, "logits": logits}
    values[name] = change(values[name])
    with pytest.raises(InputError, match=f"{name} have shape"):
        survey([Batch(values["logits"], labels, values["features"])], None)


def test_one_feature_a_row_needs_its_column_and_one_logit_a_row_is_a_binary_models():
    features, logits, labels, _ = simple()
    with pytest.raises(InputError, match=r"features have shape \(100,\)"):
        survey([Batch(logits, labels, features[:, 0])], None)
    assert survey([Batch(logits[:, 0], labels % 2)], None).classes == 2
    with pytest.raises(InputError, match=r"labels are outside 0\.\.1 in \d+ rows"):
        survey([Batch(logits[:, 0], labels)], None)


@pytest.mark.parametrize("data", [[], [Batch(torch.zeros(0, 3), torch.zeros(0, dtype=torch.long))]])
def test_empty_data_is_refused(data):
    with pytest.raises(InputError, match="data is empty: a fit needs at least one labelled row"):
        Temperature().fit(data)


def test_neither_logits_nor_features_is_refused():
    with pytest.raises(InputError, match="neither logits nor features"):
        Temperature().fit(Batch(None, torch.tensor([0, 1])))


def test_features_without_head_and_logits_are_refused():
    features, _, labels, _ = simple()
    with pytest.raises(InputError, match="features but no logits: pass the classifier head"):
        Temperature().fit(Batch(None, labels, features))


@pytest.mark.parametrize(
    ("later", "method", "with_head", "says"),
    [
        (lambda x, z, y: Batch(z[:, :2], y % 2), Temperature, False, "logits|classes"),
        (lambda x, z, y: Batch(None, y), Temperature, False, "logits|features"),
        (lambda x, z, y: Batch(None, y, x), Temperature, False, "logits|features"),
        (lambda x, z, y: Batch(None, y, x[:, :3]), Temperature, True, "features"),
        (lambda x, z, y: Batch(z, y), FeatureClip, True, "features"),
    ],
    ids=["other classes", "bare", "no logits", "other width", "no features"],
)
def test_a_later_batch_is_held_to_the_first(later, method, with_head, says):
    features, logits, _, head = simple()
    labels = logits.argmax(1)
    labels[::5] = 0
    first = Batch(logits, labels, features if with_head else None)
    data = [first, later(features, logits, labels)]
    with pytest.raises(InputError, match=says):
        method().fit(data, head if with_head else None)


def test_features_of_another_width_than_the_head_are_refused():
    features, _, labels, head = simple()
    with pytest.raises(InputError, match=r"head does not accept features of shape \(64, 3\)"):
        FeatureClip().fit(Batch(None, labels, features[:, :3]), head)


def test_a_head_of_another_number_of_classes_is_refused():
    features, logits, labels, _ = simple()
    other = simple(k=5)[3]
    with pytest.raises(InputError, match="head gives 5 classes and the stored logits have 3"):
        Temperature().fit(Batch(logits, labels, features), other)


@pytest.mark.parametrize(
    ("head", "shape"), [(lambda x: x[:30], r"\(30, 4\)"), (lambda x: x.sum(), r"\(\)")]
)
def test_a_head_that_returns_no_row_a_row_is_refused(head, shape):
    features, _, labels, _ = simple()
    with pytest.raises(InputError, match=f"head returned shape {shape} for 64 rows"):
        Temperature().fit(Batch(None, labels, features), head)


def test_a_head_that_returns_one_number_a_row_is_a_binary_models():
    features, _, labels, _ = simple()
    batch = Batch(None, labels % 2, features)
    flat = Temperature().fit(batch, lambda x: x[:, 0])
    column = Temperature().fit(batch, lambda x: x[:, :1])
    assert flat.report.classes == 2
    assert torch.equal(flat.temperature, column.temperature)


def test_features_taken_before_the_relu_are_found_out():
    """The classic mistake: the hook sat one layer too early, and nobody noticed."""
    before, _, labels, head = simple()
    logits = head(before.relu()).detach()
    with pytest.raises(InputError, match=r"differs from the stored logits by .*a missing ReLU"):
        FeatureClip().fit(Batch(logits, labels, before), head)
    FeatureClip().fit(Batch(logits, labels, before.relu()), head)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounded_logits_pass_for_the_heads_own(dtype):
    features, logits, labels, head = simple()
    facts = survey([Batch(logits.to(dtype), labels, features)], head)
    assert (facts.rows, facts.classes) == (100, 3)


def test_chunk_constants_are_sane():
    assert module.CHUNK_ROWS >= 1024
    assert module.KEEP_BYTES >= 2**20


def test_wide_rows_come_in_shorter_chunks():
    """What an inner layer gives may be a thousand times as wide as what enters the last one."""
    wide_rows = Batch(None, torch.zeros(70, dtype=torch.long), torch.zeros(70, 2**21))
    assert [len(part) for part in Chunked([wide_rows])] == [32, 32, 6]
