"""The forms of a batch, where its inputs go, and how many rows a loader will give."""

from collections import UserDict, namedtuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
)

from featcal import InputError
from featcal.data.collect import checked_iter, placed, rows_expected, unpacked

x, y = torch.randn(6, 5), torch.arange(6) % 3
net = nn.Linear(5, 3)
Sample = namedtuple("Sample", ["image", "label"])


class Text(nn.Module):
    """Takes what a tokenizer gives."""

    def forward(self, input_ids, attention_mask=None, labels=None):
        raise AssertionError("it is never run here")


class Open(nn.Module):
    """Takes anything by name."""

    def forward(self, input_ids=None, **more):
        raise AssertionError("it is never run here")


# --- pairs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [(x, y), [x, y], Sample(x, y)])
def test_a_pair(batch):
    inputs, labels = unpacked(net, batch)
    assert inputs is x
    assert torch.equal(labels, y)


@pytest.mark.parametrize("inputs", [(x, x), [x, x], {"a": x}])
def test_several_inputs_stay_together(inputs):
    assert unpacked(net, (inputs, y))[0] is inputs


@pytest.mark.parametrize(
    ("labels", "dtype"),
    [
        ([0, 1, 2], torch.int64),
        ((0, 1, 2), torch.int64),
        (np.array([0, 1, 2]), torch.int64),
        (np.array([0, 1, 2], dtype=np.int32), torch.int32),
        (torch.tensor([0, 1, 2], dtype=torch.uint8), torch.uint8),
        ([0.0, 1.0, 1.0], torch.float32),
        (torch.tensor([[0.0], [1.0]]), torch.float32),
        ([True, False], torch.bool),
        ([torch.tensor(1), torch.tensor(2)], torch.int64),
        (torch.ones(3, requires_grad=True), torch.float32),
    ],
)
def test_labels_of_every_kind_become_a_tensor(labels, dtype):
    found = unpacked(net, (x, labels))[1]
    assert found.dtype == dtype
    assert torch.equal(found, torch.tensor(np.asarray(_numbers(labels)), dtype=dtype))
    assert not found.requires_grad


def _numbers(labels):
    return labels.tolist() if hasattr(labels, "tolist") else [float(label) for label in labels]


@pytest.mark.parametrize("labels", [["cat", "dog"], None, {"a": 1}, [[1], [2, 3]]])
def test_labels_that_are_no_numbers_are_refused(labels):
    with pytest.raises(InputError, match=r"the labels of a batch are a .* one class number a row"):
        unpacked(net, (x, labels))


@pytest.mark.parametrize("label", [3, torch.tensor(3), np.int64(3)])
def test_a_data_set_in_place_of_a_loader_is_found_out(label):
    with pytest.raises(InputError, match=r"gives single samples.*DataLoader\(dataset, batch_size"):
        unpacked(net, (x[0], label))


@pytest.mark.parametrize(
    ("batch", "what"), [((x, x, y), "3 values"), ((x,), "1 values"), (x, "Tensor"), ("ab", "str")]
)
def test_any_other_form_needs_unpack(batch, what):
    with pytest.raises(InputError, match=f"the loader gives {what}, and .* pass unpack=, such as"):
        unpacked(net, batch)


def test_unpack_makes_a_pair_of_any_form():
    inputs, labels = unpacked(net, (x, x, y), lambda batch: (batch[:2], batch[2]))
    assert len(inputs) == 2
    assert torch.equal(labels, y)
    assert unpacked(net, {"labels": x, "truth": y}, lambda b: (b["labels"], b["truth"]))[0] is x


@pytest.mark.parametrize("pair", [None, (x,), {"a": x, "b": y}])
def test_unpack_that_gives_no_pair_is_refused(pair):
    with pytest.raises(InputError, match=r"unpack gives .*: it must give \(inputs, labels\)"):
        unpacked(net, (x, y), lambda batch: pair)


# --- mappings ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [dict, UserDict])
@pytest.mark.parametrize("name", ["labels", "label", "targets", "target", "y"])
def test_labels_under_a_usual_name_and_inputs_by_theirs(kind, name):
    batch = kind({"input_ids": x, "attention_mask": x, name: y, "idx": y, "text": ["a"] * 6})
    inputs, labels = unpacked(Text(), batch)
    assert set(inputs) == {"input_ids", "attention_mask"}
    assert torch.equal(labels, y)


def test_a_model_that_takes_anything_gets_every_tensor():
    batch = {"input_ids": x, "image": x, "labels": y, "text": ["a"] * 6}
    assert set(unpacked(Open(), batch)[0]) == {"input_ids", "image"}


@pytest.mark.parametrize("model", [Text(), Open(), net])
def test_one_input_under_any_name(model):
    assert unpacked(model, {"picture": x, "label": y})[0] is x


def test_the_first_usual_name_counts():
    batch = {"y": x, "label": y, "input_ids": x}
    assert torch.equal(unpacked(Text(), batch)[1], y)


def test_a_mapping_without_labels_is_refused():
    with pytest.raises(InputError, match=r"mapping of input_ids, truth, and none .* labels or lab"):
        unpacked(Text(), {"input_ids": x, "truth": y})


def test_a_mapping_the_model_does_not_know_is_refused():
    with pytest.raises(InputError, match=r"gives a, b, and the model takes input_ids, attention"):
        unpacked(Text(), {"a": x, "b": x, "label": y})
    with pytest.raises(InputError, match="gives labels alone"):
        unpacked(Text(), {"label": y})


# --- where inputs go --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_floats_for_a_model_in_half_precision(dtype):
    model = nn.Linear(5, 3).to(dtype)
    ids = torch.arange(6)
    found = placed({"x": x, "ids": ids, "more": [x, "text", None]}, model)
    assert found["x"].dtype == dtype
    assert found["ids"].dtype == torch.int64
    assert found["more"][0].dtype == dtype
    assert found["more"][1:] == ("text", None)


def test_a_model_of_several_precisions_casts_for_itself():
    model = nn.Sequential(nn.Linear(5, 5).bfloat16(), nn.LayerNorm(5))
    assert placed(x, model).dtype == torch.float32
    assert placed(x.double(), net).dtype == torch.float64


def test_inputs_go_to_the_device_of_weights_or_buffers():
    away = nn.Linear(5, 3, device="meta")
    assert placed((x, x), away)[1].device.type == "meta"
    buffers = nn.Module()
    buffers.register_buffer("scale", torch.ones(1, device="meta"))
    assert placed(x, buffers).device.type == "meta"
    assert placed(x, nn.ReLU()) is x


def test_a_batch_that_moves_itself():
    class Graphs:
        def to(self, device):
            self.device = device
            return self

    graphs = Graphs()
    assert placed(graphs, net) is graphs
    assert graphs.device == torch.device("cpu")
    plain = object()
    assert placed(plain, net) is plain


# --- how many rows ----------------------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self):
        yield from zip(x, y, strict=True)


class Batches(Dataset):
    """Gives whole batches."""

    def __len__(self):
        return 3

    def __getitem__(self, place):
        if place >= 3:
            raise IndexError
        return x, y


data = TensorDataset(x, y)


@pytest.mark.parametrize(
    ("loader", "rows"),
    [
        (DataLoader(data, batch_size=4), 6),
        (DataLoader(data, batch_size=4, drop_last=True), 4),
        (DataLoader(data, batch_size=4, shuffle=True), 6),
        (DataLoader(data, batch_size=2, sampler=SubsetRandomSampler([1, 2, 3])), 3),
        (DataLoader(data, batch_size=2, sampler=[0, 1, 2], drop_last=True), 2),
        (DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 4, False)), 6),
        (DataLoader(Batches(), batch_size=None), 0),
        (DataLoader(Stream(), batch_size=4), 0),
        ([(x, y), (x[:2], y[:2])], 8),
        ([{"x": x, "label": y}, [x, y.tolist()]], 12),
        ([(x, y), (x, x, y)], 0),
        ([(x[0], 3), (x[0], torch.tensor(3))], 0),
        ([], 0),
        (iter([(x, y)]), 0),
    ],
)
def test_rows_a_loader_will_give(loader, rows):
    assert rows_expected(loader) == rows
    if rows:
        assert sum(len(unpacked(net, batch)[1]) for batch in loader) == rows


def test_what_is_no_loader_is_refused():
    with pytest.raises(InputError, match=r"loader is a int: pass an iterable of \(inputs, labels"):
        checked_iter(3)
