"""A last layer of any kind, seen as rows, and put back with its own shapes and names."""

import copy
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
from torch.nn.utils import parametrizations

from featcal import Batch, FeatureClip, InputError, Temperature, attach, parse
from featcal.heads.head import RowHead, as_head, linear_view


@pytest.fixture(autouse=True)
def _weights():
    torch.manual_seed(0)


class Squeezed(nn.Module):
    """An MLP with one logit a sample, and no axis for it."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.last(self.first(x).relu()).squeeze(-1)


class Pooled(nn.Module):
    """Takes all tokens of a sample, as the heads of RoBERTa and its kin do."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(6, 3)

    def forward(self, tokens):
        return self.out(tokens[:, 0].tanh())


def mlp(classes):
    return nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, classes))


def squeezenet():
    return nn.Sequential(
        nn.Dropout(), nn.Conv2d(6, 3, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )


# What a layer is, and the shapes it is given; the same calls reach it with and without a
# calibrator, so that a fresh one changes no bit.
SAME_CALLS = {
    "linear": (lambda: nn.Linear(6, 3), [(5, 6), (0, 6), (1, 6)]),
    "no bias": (lambda: nn.Linear(6, 3, bias=False), [(5, 6)]),
    "one logit": (lambda: nn.Linear(6, 1), [(5, 6), (1, 6)]),
    "two logits": (lambda: nn.Linear(6, 2), [(5, 6)]),
    "pixel": (lambda: nn.Conv2d(6, 3, 1), [(5, 6, 1, 1)]),
    "pixel, one logit": (lambda: nn.Conv2d(6, 1, 1), [(5, 6, 1, 1)]),
    "conv1d": (lambda: nn.Conv1d(6, 3, 1), [(5, 6, 1)]),
    "conv3d": (lambda: nn.Conv3d(6, 3, 1, bias=False), [(5, 6, 1, 1, 1)]),
    "dropout first": (lambda: nn.Sequential(nn.Dropout(), nn.Linear(6, 3)), [(5, 6)]),
    "dropout, pixel": (lambda: nn.Sequential(nn.Dropout2d(), nn.Conv2d(6, 3, 1)), [(5, 6, 1, 1)]),
    "mlp": (lambda: mlp(3), [(5, 6)]),
    "mlp, one logit": (lambda: mlp(1), [(5, 6)]),
    "no axis": (Squeezed, [(5, 6), (1, 6)]),
    "pooled tokens": (Pooled, [(5, 4, 6), (1, 4, 6)]),
    "squeezenet": (squeezenet, [(5, 6, 3, 3)]),
    "identity": (nn.Identity, [(5, 3), (5, 1), (5,)]),
    "normed": (lambda: parametrizations.weight_norm(nn.Linear(6, 3)), [(5, 6)]),
}
# One product for all positions where the bare layer has its own way: equal to rounding.
OTHER_CALLS = {
    "tokens": (lambda: nn.Linear(6, 3), [(5, 4, 6), (2, 3, 4, 6)]),
    "a sample alone": (lambda: nn.Linear(6, 3), [(6,)]),
    "tokens, one logit": (lambda: nn.Linear(6, 1), [(5, 4, 6), (6,)]),
    "dropout, tokens": (lambda: nn.Sequential(nn.Dropout(), nn.Linear(6, 3)), [(5, 4, 6)]),
    "pixels": (lambda: nn.Conv2d(6, 3, 1), [(5, 6, 4, 2), (6, 4, 2)]),
    "pixels, one logit": (lambda: nn.Conv2d(6, 1, 1), [(5, 6, 4, 2)]),
    "steps": (lambda: nn.Conv1d(6, 3, 1), [(5, 6, 4), (6, 4)]),
}
EVERY = {**SAME_CALLS, **OTHER_CALLS}


def made(name):
    make, shapes = EVERY[name]
    return make().eval(), [torch.randn(shape) for shape in shapes]


@pytest.mark.parametrize("name", EVERY)
def test_a_fresh_calibrator_changes_nothing(name):
    layer, inputs = made(name)
    wrapped = (
        Temperature().wrap() if name == "identity" else parse("clip | temperature").wrap(layer)
    )
    for features in inputs:
        own, found = layer(features), wrapped(features)
        assert found.shape == own.shape
        if name in SAME_CALLS:
            assert torch.equal(found, own)
        else:
            torch.testing.assert_close(found, own, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in EVERY if name != "identity"])
def test_clip_and_temperature_act_on_any_layer(name):
    layer, inputs = made(name)
    clip, hot = FeatureClip().assign(threshold=0.5), Temperature().assign(temperature=4.0)
    wrapped = (clip | hot).wrap(layer)
    for features in inputs:
        expected = layer(features.clamp(-0.5, 0.5)) / 4
        torch.testing.assert_close(wrapped(features), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["linear", "tokens", "one logit"])
def test_compile_in_one_graph(name):
    layer, inputs = made(name)
    module = (FeatureClip().assign(threshold=0.5) | Temperature()).wrap(layer).eval()
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(inputs[0]), module(inputs[0]))


def test_a_plain_linear_layer_is_its_own_head():
    layer = nn.Linear(6, 3)
    assert as_head(layer) is layer
    assert as_head(nn.Sequential(nn.Dropout(), nn.Identity(), layer)) is layer
    assert as_head(None) is None
    rows = RowHead(lambda x: x)
    assert as_head(rows) is rows


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        lambda bias: nn.Linear(6, 1, bias=bias),
        lambda bias: nn.Conv2d(6, 1, 1, bias=bias),
        lambda bias: nn.Sequential(nn.Dropout(), nn.Conv1d(6, 1, 1, bias=bias)),
    ],
)
def test_a_single_logit_is_a_linear_head_of_two(make, bias):
    layer = make(bias)
    head = linear_view(layer)
    rows = torch.randn(5, 6)
    weight, *rest = layer.parameters()
    z = rows @ weight.reshape(1, 6).T + (rest[0] if bias else 0)
    torch.testing.assert_close(head(rows), torch.cat([torch.zeros(5, 1), z], 1))
    assert (head.bias is not None) == bias
    assert not any(parameter.requires_grad for parameter in head.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [lambda: nn.Linear(6, 3), lambda: nn.Conv2d(6, 3, 1)])
def test_a_16_bit_layer_is_computed_in_float32(make, dtype):
    layer = make().to(dtype)
    head = linear_view(layer)
    assert head.weight.dtype == torch.float32
    rows = torch.randn(50, 6)
    weight, bias = layer.weight.reshape(3, 6).float(), layer.bias.float()
    torch.testing.assert_close(head(rows), rows @ weight.T + bias)
    assert layer.weight.dtype == dtype
    float64 = nn.Linear(6, 3).double()
    assert linear_view(float64) is float64


class Doubled(nn.Linear):
    def forward(self, x):
        return super().forward(2 * x)


def hooked():
    layer = nn.Linear(6, 3)
    layer.register_forward_pre_hook(lambda _, inputs: (2 * inputs[0],))
    return layer


def overridden():
    layer = nn.Linear(6, 3)
    layer.forward = lambda x: nn.functional.linear(2 * x, layer.weight)
    return layer


@pytest.mark.parametrize(
    "make",
    [
        lambda: Doubled(6, 3),
        lambda: nn.Sequential(nn.Dropout(), Doubled(6, 3)),
        hooked,
        overridden,
        lambda: parametrizations.weight_norm(nn.Linear(6, 3)),
        lambda: mlp(3),
        lambda: nn.Sequential(nn.Linear(6, 3), nn.Softmax(1)),
    ],
)
def test_a_layer_that_may_compute_anything_is_not_taken_for_a_plain_one(make):
    layer = make().eval()
    assert linear_view(layer) is None
    rows = torch.randn(5, 6)
    with torch.no_grad():
        assert torch.equal(as_head(layer)(rows), layer(rows))


def test_a_layer_with_a_part_called_calibrator_is_refused():
    layer = nn.Module()
    layer.calibrator = nn.Linear(6, 3)
    with pytest.raises(InputError, match="part called calibrator already"):
        Temperature().wrap(layer)


@pytest.fixture(scope="module")
def network():
    """A body, a head, and rows with labels the head is too sure of."""
    torch.manual_seed(0)
    body, head, rows = nn.Linear(5, 6), nn.Linear(6, 3), torch.randn(150, 5)
    with torch.no_grad():
        head.weight.mul_(6)
        labels = torch.multinomial((head(body(rows)) / 3).softmax(1), 1)[:, 0]
    return body, head, rows, labels


@pytest.mark.parametrize(
    ("recipe", "dtype"), [("proximity", torch.bfloat16), ("clip | temperature", torch.float16)]
)
def test_under_autocast_only_the_network_runs_in_fewer_digits(recipe, dtype, network):
    body, head, rows, labels = network
    with torch.no_grad():
        with torch.autocast("cpu", dtype):
            features = body(rows)
        fitted = parse(recipe).fit(Batch(None, labels, features), head)

        def mixed(part):
            with torch.autocast("cpu", dtype):
                return head(part)

        expected = fitted(features, mixed)
        with torch.autocast("cpu", dtype):
            found = fitted.wrap(head)(body(rows))
            assert torch.is_autocast_enabled("cpu")
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)


class Own(nn.Module):
    """A layer with a weight of its own beside that of a part called head."""

    def __init__(self):
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.randn(8, 8)), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(x @ self.weight)


LAYERS = {
    "linear": lambda: nn.Linear(8, 3),
    "container": lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 3)),
    "own": Own,
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


@pytest.mark.parametrize("name", ["linear", "container", "own"])
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
