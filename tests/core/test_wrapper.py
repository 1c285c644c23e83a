"""A wrapped layer under its own names, wherever torch asks for names or reaches into modules."""

import copy
import pickle
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.export import Dim, export
from torch.func import functional_call

from featcal import FeatureClip, InputError, Temperature, attach


@pytest.fixture(autouse=True)
def _weights():
    torch.manual_seed(0)


class Own(nn.Module):
    """A layer with a weight of its own beside that of a part called head."""

    def __init__(self):
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.randn(8, 8)), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(x @ self.weight)


class Noted(nn.Linear):
    """A layer with a state beyond its tensors."""

    note = "new"

    def get_extra_state(self):
        return {"note": self.note}

    def set_extra_state(self, state):
        self.note = state["note"]


LAYERS = {
    "linear": lambda: nn.Linear(8, 3),
    "container": lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 3)),
    "own": Own,
    "extra state": lambda: Noted(8, 3),
    "normed": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 3)),
}


def net_of(name):
    return nn.Sequential(OrderedDict(body=nn.Linear(6, 8), fc=LAYERS[name]())).eval()


def calibrated_of(name):
    steps = FeatureClip().assign(threshold=0.3) | Temperature().assign(temperature=2.0)
    return attach(net_of(name), steps, head="fc")


@pytest.fixture(params=LAYERS)
def calibrated(request):
    return calibrated_of(request.param)


@pytest.fixture
def x():
    return torch.randn(7, 6)


def zeroed(model):
    model = copy.deepcopy(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    return model


@pytest.mark.parametrize("name", LAYERS)
def test_every_name_is_the_one_of_the_model_without_a_calibrator(name):
    plain, calibrated = net_of(name), calibrated_of(name)
    assert [n for n, _ in calibrated.named_parameters()] == [n for n, _ in plain.named_parameters()]
    names = [n for n in calibrated.state_dict() if "calibrator" not in n]
    assert names == list(plain.state_dict())
    assert calibrated.load_state_dict(plain.state_dict()).missing_keys == []


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_loads_into_the_layer_itself(calibrated, x, assign):
    other = zeroed(calibrated)
    assert not torch.equal(other(x), calibrated(x))
    other.load_state_dict(calibrated.state_dict(), assign=assign)
    assert torch.equal(other(x), calibrated(x))


def test_an_extra_state_is_the_layers():
    calibrated = calibrated_of("extra state")
    calibrated.fc.uncalibrated.note = "old"
    other = calibrated_of("extra state")
    other.load_state_dict(calibrated.state_dict())
    assert other.fc.note == "old"


def test_missing_and_unexpected_names_are_told_as_the_model_has_them():
    calibrated = calibrated_of("linear")
    state = calibrated.state_dict()
    state["fc.scale"] = state.pop("fc.bias")
    said = r'(?s)Missing key.*: "fc.bias"\..*Unexpected key.*: "fc.scale"\.'
    with pytest.raises(RuntimeError, match=said):
        calibrated.load_state_dict(state)


def test_a_functional_call_with_the_models_own_names(calibrated, x):
    state = {name: value * 3 for name, value in calibrated.named_parameters()}
    other = copy.deepcopy(calibrated)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(3)
    before = calibrated(x)
    assert torch.equal(functional_call(calibrated, state, x), other(x))
    assert torch.equal(calibrated(x), before)
    tensors = {k: v for k, v in calibrated.state_dict().items() if "extra_state" not in k}
    assert torch.equal(functional_call(calibrated, tensors, x), before)


def test_checkpoints_of_model_and_optimiser_go_by_the_same_names(calibrated, x):
    optimiser = torch.optim.Adam(calibrated.parameters())
    calibrated(x).square().sum().backward()
    optimiser.step()
    state = get_optimizer_state_dict(calibrated, optimiser)
    assert list(state["state"]) == [name for name, _ in calibrated.named_parameters()]
    other = zeroed(calibrated)
    again = torch.optim.Adam(other.parameters())
    set_optimizer_state_dict(other, again, state)
    set_model_state_dict(other, get_model_state_dict(calibrated))
    assert torch.equal(other(x), calibrated(x))
    moments = zip(optimiser.state.values(), again.state.values(), strict=True)
    assert all(torch.equal(a["exp_avg"], b["exp_avg"]) for a, b in moments)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_has_these_names_too(calibrated, x, strict):
    program = export(calibrated, (x,), dynamic_shapes=({0: Dim("rows")},), strict=strict)
    assert set(dict(calibrated.named_parameters())) <= set(program.state_dict)
    assert torch.equal(program.module()(x[:3]), calibrated(x[:3]))


def test_a_compiled_model_sees_new_weights(calibrated, x):
    compiled = torch.compile(calibrated, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), calibrated(x))
    with torch.no_grad():
        for weight in calibrated.parameters():
            weight.mul_(2)
    assert torch.equal(compiled(x), calibrated(x))
    tensors = {name: value.clone() * 2 for name, value in calibrated.named_parameters()}
    calibrated.load_state_dict(tensors, assign=True, strict=False)
    assert torch.equal(compiled(x), calibrated(x))
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["linear", "container", "own", "extra state"])
@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_hold_their_layer_together(name, again, x):
    calibrated = calibrated_of(name)
    twin = again(calibrated)
    assert torch.equal(twin(x), calibrated(x))
    twin.double()
    assert twin(x.double()).dtype == torch.float64
    assert calibrated(x).dtype == torch.float32
    with torch.no_grad():
        for weight in twin.parameters():
            weight.zero_()
        assert float(twin(x.double()).abs().max()) == 0


def test_a_weight_set_on_the_wrapper_is_the_layers(x):
    calibrated = calibrated_of("linear")
    calibrated.fc.weight = nn.Parameter(torch.zeros(3, 8))
    torch.testing.assert_close(calibrated(x), (calibrated.fc.bias / 2).expand(7, 3))
    assert len(list(calibrated.parameters())) == 4


class Moded(nn.Linear):
    """Acts on its mode, as LoRA layers do, and looks at its flag."""

    merged = True

    def train(self, mode=True):
        self.merged = not mode
        return super().train(mode)

    def forward(self, x):
        return super().forward(x) * (1 if self.training else 0)


def test_the_mode_is_the_layers_however_it_is_set(x):
    layer = Moded(6, 3)
    head = Temperature().wrap(layer)
    assert head.eval() is head
    assert (layer.training, layer.merged, head.training) == (False, True, False)
    assert not head(x).any()
    head.training = True
    assert layer.training
    head.train()
    assert (layer.training, layer.merged, head.calibrator.training) == (True, False, True)


@pytest.mark.parametrize("name", ["linear", "container", "own", "extra state"])
def test_the_copies_of_data_parallel_use_their_own_tensors(name, x):
    """What nn.DataParallel does on several devices, with tensors of other values."""
    calibrated = calibrated_of(name)
    expected = copy.deepcopy(calibrated)
    with torch.no_grad():
        for weight in expected.parameters():
            weight.mul_(3)
    parts = list(calibrated.modules())
    copies = {id(part): part._replicate_for_data_parallel() for part in parts}
    for part in parts:
        mine = copies[id(part)]
        mine._former_parameters = OrderedDict()
        for key, child in part._modules.items():
            setattr(mine, key, copies[id(child)])
        for key, weight in part._parameters.items():
            mine._former_parameters[key] = weight * 3
            setattr(mine, key, mine._former_parameters[key])
        for key, value in part._buffers.items():
            setattr(mine, key, value.clone())
    assert torch.equal(copies[id(calibrated)](x), expected(x))
    assert not torch.equal(calibrated(x), expected(x))


def test_the_layer_is_shown():
    shown = repr(calibrated_of("linear"))
    assert "Linear(in_features=8, out_features=3, bias=True)" in shown
    assert "(calibrator): clip | temperature" in shown


def test_a_part_called_calibrator_is_refused():
    layer = nn.Sequential(OrderedDict(calibrator=nn.Linear(6, 3)))
    with pytest.raises(InputError, match="a part called calibrator already: rename it"):
        Temperature().wrap(layer)
