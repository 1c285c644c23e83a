"""Models called with inputs of any form, and what they give read as tensors."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from featcal import calibrate, collect, find_head
from featcal.heads.find import mapped, outputs_in, run


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.fc = nn.GRU(4, 8), nn.Linear(8, 3)

    def forward(self, packed):
        assert isinstance(packed, PackedSequence)
        return self.fc(self.body(packed)[1][-1])


class Pair(NamedTuple):
    one: Tensor
    other: Tensor


def packed(seed=0):
    draw = torch.Generator().manual_seed(seed)
    return pack_sequence([torch.randn(n, 4, generator=draw) for n in (5, 3, 2)])


@pytest.mark.parametrize("alone", [True, False])
def test_a_packed_sequence_is_one_object(alone):
    torch.manual_seed(0)
    loader = [(packed(i) if alone else (packed(i),), torch.tensor([0, 1, 2])) for i in range(2)]
    data = collect(Recurrent(), loader)
    assert (data.rows, data[0].features.shape) == (6, (3, 8))
    assert find_head(Recurrent(), inputs=packed()) == "fc"


def test_named_fields_are_one_input_and_stay_what_they_are():
    seen = mapped(Pair(torch.ones(2), torch.ones(3)), lambda t: t + 1)
    assert isinstance(seen, Pair)
    assert seen.other.tolist() == [2, 2, 2]

    class Sum(nn.Module):
        def forward(self, pair):
            return pair.one.sum() + pair.other.sum()

    assert float(run(Sum(), seen)) == 10


def test_other_objects_are_changed_by_a_way_of_their_own():
    sequence, change = packed(), lambda t: t * 0
    assert mapped({"a": sequence, "b": 3}, change)["a"] is sequence
    assert mapped([sequence, 3], change, lambda value: [value]) == ([sequence], [3])


def test_arrays_of_numbers_become_tensors_and_others_stay():
    names = np.array(["a", "b"])
    found = mapped((np.arange(3), np.zeros(2, np.float32), names), lambda t: t)
    assert torch.equal(found[0], torch.arange(3))
    assert found[1].dtype == torch.float32
    assert found[2] is names


def test_a_loader_of_arrays():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    x = torch.randn(20, 4)
    data = collect(model, [(x.numpy(), np.arange(20) % 3)])
    assert torch.equal(data[0].logits, model(x).detach())
    assert find_head(model, inputs=x.numpy()) == "2"


@dataclass
class Scores:
    note: str
    scores: Tensor


def test_the_fields_of_a_dataclass_are_read_like_those_of_a_mapping():
    scores = torch.randn(4, 3)
    assert outputs_in(Scores("mine", scores)) == [scores]
    assert outputs_in({"deep": [None, Scores("mine", scores)]}) == [scores]
    assert outputs_in(Scores) == []

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x):
            return Scores("mine", self.fc(x))

    torch.manual_seed(0)
    model, x = Net(), torch.randn(60, 4)
    labels = torch.distributions.Categorical(logits=3 * model(x).scores.detach()).sample()
    assert isinstance(calibrate(model, [(x, labels)], "temperature")(x), Scores)
