"""A last layer of any kind, seen as rows, and put back with its own shapes and names."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.export import Dim, export
from torch.nn.utils import parametrizations

from featcal import Batch, CalibratedHead, FeatureClip, InputError, Temperature, parse
from featcal.heads.head import (
    RowHead,
    as_head,
    channels,
    is_pointwise_conv,
    linear_view,
    logit_rows,
    rows_of,
    sample_shape,
)


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


@pytest.mark.parametrize("recipe", ["temperature", "clip", "clip | temperature"])
@pytest.mark.parametrize("name", EVERY)
def test_a_fresh_calibrator_changes_nothing(name, recipe):
    layer, inputs = made(name)
    wrapped = Temperature().wrap() if name == "identity" else parse(recipe).wrap(layer)
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


@pytest.mark.parametrize("shape", [(5, 3), (5, 1), (5,)])
def test_logits_alone(shape):
    logits = torch.randn(shape)
    hot = Temperature().assign(temperature=2.0)
    torch.testing.assert_close(hot.wrap()(logits), logits / 2, rtol=1e-6, atol=0)
    assert rows_of(nn.Identity(), logits).shape == (5, logits[0].numel())


def test_a_feature_method_needs_a_layer():
    with pytest.raises(InputError, match=r"clip works on features: pass the .* last layer to wra"):
        FeatureClip().wrap()


# --- exports ----------------------------------------------------------------------------------


@pytest.mark.no_cover
@pytest.mark.parametrize("name", [name for name in EVERY if name != "a sample alone"])
def test_export_with_any_number_of_rows(name):
    layer, inputs = made(name)
    clip, hot = FeatureClip().assign(threshold=0.5), Temperature().assign(temperature=4.0)
    module = (hot if name == "identity" else clip | hot).wrap(layer).eval()
    features = torch.cat([inputs[0]] * 2)[:6] if len(inputs[0]) else inputs[0]
    program = export(module, (features,), dynamic_shapes=({0: Dim.DYNAMIC},), strict=False)
    for rows in (1, 4):
        torch.testing.assert_close(
            program.module()(features[:rows]), module(features[:rows]), rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("name", ["linear", "tokens", "pixel", "one logit", "no axis"])
def test_compile_in_one_graph(name):
    layer, inputs = made(name)
    module = (FeatureClip().assign(threshold=0.5) | Temperature()).wrap(layer).eval()
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(inputs[0]), module(inputs[0]))


# --- rows -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "shape", "axis", "sample"),
    [
        (nn.Linear(6, 3), (5, 6), -1, None),
        (nn.Linear(6, 3), (5, 4, 6), -1, None),
        (nn.Linear(6, 3), (6,), -1, None),
        (nn.Conv1d(6, 3, 1), (5, 6, 4), -2, (6, 1)),
        (nn.Conv2d(6, 3, 1), (5, 6, 4, 2), -3, (6, 1, 1)),
        (nn.Conv2d(6, 3, 1), (6, 4, 2), -3, (6, 1, 1)),
        (nn.Sequential(nn.Dropout(), nn.Linear(6, 3)), (5, 4, 6), -1, None),
        (nn.Sequential(nn.Identity(), nn.Conv2d(6, 3, 1)), (5, 6, 4, 2), -3, (6, 1, 1)),
    ],
)
def test_rows_are_the_positions_of_the_axis_a_layer_works_along(layer, shape, axis, sample):
    features = torch.randn(shape)
    assert channels(layer, features) == axis
    found = rows_of(layer, features)
    assert torch.equal(found, torch.stack(features.unbind(axis), -1).reshape(-1, 6))
    assert sample_shape(layer, features) == (None if sample is None else torch.Size(sample))
    head = as_head(layer, sample_shape(layer, features))
    own = layer.eval()(features).movedim(axis, -1).reshape(-1, 3)
    torch.testing.assert_close(head(found), own, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (mlp(3), (5, 6)),
        (Pooled(), (5, 4, 6)),
        (squeezenet(), (5, 6, 3, 3)),
        (nn.Sequential(nn.Linear(6, 3), nn.Conv1d(6, 3, 1)), (5, 4, 6)),
        (nn.Conv2d(6, 3, 3), (5, 6, 3, 3)),
        (nn.Conv2d(6, 3, 1, stride=2), (5, 6, 1, 1)),
        (nn.Conv2d(6, 3, 1, padding=1), (5, 6, 1, 1)),
        (nn.Conv2d(6, 3, 1, groups=3), (5, 6, 1, 1)),
        (nn.Sequential(), (5, 6)),
        (lambda x: x, (5, 6)),
    ],
)
def test_any_other_layer_takes_whole_samples(layer, shape):
    features = torch.randn(shape)
    assert channels(layer, features) is None
    assert rows_of(layer, features).shape == (5, features[0].numel())
    assert sample_shape(layer, features) == (None if len(shape) == 2 else features.shape[1:])


@pytest.mark.parametrize("padding", [0, "same", "valid"])
def test_padding_of_a_pointwise_convolution_is_none_by_any_name(padding):
    assert is_pointwise_conv(nn.Conv2d(6, 3, 1, padding=padding))
    assert not is_pointwise_conv(nn.Linear(6, 3))


def test_more_than_one_row_of_logits_a_sample_is_refused():
    with pytest.raises(InputError, match=r"values of shape \(4, 3\) for a sample"):
        logit_rows(torch.zeros(5, 4, 3))
    assert logit_rows(torch.zeros(5, 3, 1, 1)).shape == (5, 3)
    with pytest.raises(InputError, match=r"values of shape \(4, 3\)"):
        Temperature().wrap(mlp(3))(torch.zeros(5, 4, 6))


def test_one_logit_becomes_two():
    z = torch.tensor([1.5, -2.0])
    expected = torch.tensor([[0.0, 1.5], [0.0, -2.0]])
    for given in (z, z[:, None], z[:, None, None, None]):
        assert torch.equal(logit_rows(given), expected)


# --- as a head --------------------------------------------------------------------------------


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_16_bit_layer_that_is_not_linear_gets_its_own_digits(dtype):
    layer = mlp(3).to(dtype)
    rows = torch.randn(5, 6)
    assert torch.equal(as_head(layer)(rows), layer(rows.to(dtype)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_calibrated_logits_of_16_bit_features_are_wide(dtype):
    for name in ("linear", "one logit", "pixel", "mlp", "no axis"):
        layer, (features, *_) = made(name)
        layer.to(dtype)
        found = (FeatureClip() | Temperature()).wrap(layer)(features.to(dtype))
        assert found.dtype == torch.float32
        assert torch.equal(found, layer(features.to(dtype)).float())


class Doubled(nn.Linear):
    def forward(self, x):
        return super().forward(2 * x)


class AlwaysDropped(nn.Dropout):
    """Monte Carlo dropout: it drops in eval mode too."""

    def forward(self, x):
        return nn.functional.dropout(x, self.p, training=True)


def hooked():
    layer = nn.Linear(6, 3)
    layer.register_forward_pre_hook(lambda _, inputs: (2 * inputs[0],))
    return layer


def after():
    layer = nn.Sequential(nn.Linear(6, 3))
    layer.register_forward_hook(lambda _, __, output: 2 * output)
    return layer


def overridden():
    layer = nn.Linear(6, 3)
    layer.forward = lambda x: nn.functional.linear(2 * x, layer.weight)
    return layer


def dropped():
    dropout = nn.Dropout()
    dropout.register_forward_hook(lambda _, __, output: 2 * output)
    return nn.Sequential(dropout, nn.Linear(6, 3))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Doubled(6, 3),
        lambda: nn.Sequential(nn.Dropout(), Doubled(6, 3)),
        hooked,
        after,
        overridden,
        dropped,
        lambda: parametrizations.weight_norm(nn.Linear(6, 3)),
        lambda: parametrizations.orthogonal(nn.Linear(6, 3)),
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


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_weight_normed_layer_of_the_old_kind():
    layer = nn.utils.weight_norm(nn.Linear(6, 3))
    assert linear_view(layer) is None
    rows = torch.randn(5, 6)
    assert torch.equal(as_head(layer)(rows), layer(rows))
    assert torch.equal(Temperature().wrap(layer)(rows), layer(rows))


def test_dropout_that_never_rests_is_not_left_out():
    assert linear_view(nn.Sequential(AlwaysDropped(), nn.Linear(6, 3))) is None


def test_no_random_number_is_drawn():
    state = torch.get_rng_state()
    linear_view(nn.Conv2d(6, 1, 1, device="meta"))
    as_head(lambda x: x)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("recipe", ["clip", "temperature"])
def test_a_fit_sees_one_head_in_every_kind_of_layer(recipe):
    """Linear, 1 x 1 convolution and Dropout + Linear of the same weights learn the same."""
    linear = nn.Linear(6, 3)
    pixel = nn.Conv2d(6, 3, 1)
    pixel.load_state_dict({"weight": linear.weight[:, :, None, None], "bias": linear.bias})
    features = 3 * torch.randn(200, 6)
    labels = torch.multinomial((linear(features) / 3).softmax(1), 1)[:, 0]
    batch = Batch(None, labels, features)
    layers = (linear, pixel, nn.Sequential(nn.Dropout(), linear).train())
    states = [parse(recipe).fit(batch, layer).state_dict() for layer in layers]
    for state in states[1:]:
        for key, value in states[0].items():
            assert torch.equal(state[key], value)
    assert layers[2].training


# --- names, attributes and copies -------------------------------------------------------------


def wrapped_net(temperature=2.0, layer=None):
    net = nn.Module()
    net.body = nn.Linear(4, 6)
    layer = nn.Linear(6, 3) if layer is None else layer
    net.fc = Temperature().assign(temperature=temperature).wrap(layer)
    net.tail = nn.Linear(2, 2)
    return net


def plain_net():
    net = nn.Module()
    net.body, net.fc, net.tail = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(2, 2)
    return net


def test_the_names_are_those_of_the_model_without_a_calibrator_in_their_order():
    names = list(wrapped_net().state_dict())
    assert [name for name in names if "calibrator" not in name] == list(plain_net().state_dict())
    assert "fc.calibrator.temperature" in names
    alone = Temperature().wrap(nn.Linear(6, 3))
    assert list(alone.state_dict()) == ["weight", "bias", "calibrator.temperature"]


def test_names_inside_a_container_that_itself_has_a_part_called_head():
    layer = nn.Module()
    layer.head, layer.norm = nn.Linear(6, 3), nn.BatchNorm1d(6)
    names = list(layer.state_dict())
    wrapped = Temperature().wrap(layer)
    assert list(wrapped.state_dict())[:-1] == names
    other = nn.Module()
    other.head, other.norm = nn.Linear(6, 3), nn.BatchNorm1d(6)
    wrapped.load_state_dict(other.state_dict())
    assert torch.equal(layer.head.weight, other.head.weight)


def test_the_original_state_loads_and_keeps_the_calibrator():
    plain, net = plain_net(), wrapped_net(3.0)
    state = plain.state_dict()
    before = dict(state)
    assert str(net.load_state_dict(state)) == "<All keys matched successfully>"
    assert dict(state) == before  # the caller's own
    assert torch.equal(net.fc.weight, plain.fc.weight)
    assert float(net.fc.calibrator.temperature) == 3


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_with_a_calibrator_loads_it(assign):
    first, second = wrapped_net(5.0), wrapped_net(1.0)
    second.load_state_dict(first.state_dict(), assign=assign)
    assert float(second.fc.calibrator.temperature) == 5
    assert torch.equal(second.fc.weight, first.fc.weight)


def test_a_state_with_a_part_of_the_calibrator_is_refused():
    head = (FeatureClip() | Temperature()).wrap(nn.Linear(6, 3))
    state = head.state_dict()
    del state["calibrator.steps.1.temperature"]
    with pytest.raises(RuntimeError, match=r"Missing key.*calibrator\.steps\.1\.temperature"):
        head.load_state_dict(state)


def test_missing_and_unexpected_names_of_the_layer_are_refused():
    net = wrapped_net()
    state = net.state_dict()
    state["fc.scale"] = state.pop("fc.bias")
    with pytest.raises(RuntimeError, match=r"(?s)Missing key.*bias.*Unexpected key.*scale"):
        net.load_state_dict(state)


def test_a_state_of_another_shape_is_refused():
    net = wrapped_net()
    state = {**net.state_dict(), "fc.weight": torch.zeros(4, 6)}
    with pytest.raises(RuntimeError, match="size mismatch for fc"):
        net.load_state_dict(state)


def test_the_state_through_a_file():
    first, second = wrapped_net(5.0), wrapped_net(1.0)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert float(second.fc.calibrator.temperature) == 5


def test_attributes_of_the_layer_are_reached():
    layer = nn.Linear(6, 3)
    layer.note = "mine"
    head = Temperature().wrap(layer)
    assert (head.in_features, head.out_features, head.note) == (6, 3, "mine")
    assert head.weight is layer.weight
    assert head.uncalibrated is layer


def test_parameters_have_the_names_of_the_model_without_a_calibrator_too():
    net, plain = wrapped_net(), plain_net()
    assert [n for n, _ in net.named_parameters()] == [n for n, _ in plain.named_parameters()]
    head, rows = net.fc, torch.randn(5, 6)
    other = {"weight": torch.randn(3, 6), "bias": torch.zeros(3)}
    found = torch.func.functional_call(head, other, (rows,))
    torch.testing.assert_close(found, rows @ other["weight"].T / 2)
    assert torch.equal(head(rows), head.uncalibrated(rows) / 2)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda head: pickle.loads(pickle.dumps(head))])
@pytest.mark.parametrize("layer", [nn.Linear(6, 3), nn.Sequential(nn.BatchNorm1d(6), mlp(3))])
def test_a_copy_and_its_layer_have_one_set_of_tensors(again, layer):
    head = Temperature().assign(temperature=2.0).wrap(layer)
    twin = again(head)
    assert twin.uncalibrated is not layer
    ours, theirs = dict(twin.named_parameters()), dict(twin.uncalibrated.named_parameters())
    assert all(ours[name] is weight for name, weight in theirs.items())
    with torch.no_grad():
        for weight in ours.values():
            weight.zero_()
    twin.eval()
    rows = torch.randn(5, 6)
    assert torch.equal(twin(rows), torch.zeros(5, 3))
    assert not torch.equal(head.eval()(rows), torch.zeros(5, 3))
    twin.load_state_dict(head.state_dict(), assign=True)
    assert torch.equal(twin(rows), head(rows))
    assert twin.double()(rows.double()).dtype == torch.float64


def test_a_layer_with_a_part_called_calibrator_is_refused():
    layer = nn.Module()
    layer.calibrator = nn.Linear(6, 3)
    with pytest.raises(InputError, match="part called calibrator already"):
        Temperature().wrap(layer)


def test_a_missing_attribute_is_still_an_attribute_error():
    head = Temperature().wrap(nn.Linear(6, 3))
    with pytest.raises(AttributeError, match="nothing"):
        _ = head.nothing
    assert not hasattr(head, "__nothing__")
    assert getattr(head, "nothing", 3) == 3
    with pytest.raises(AttributeError):
        _ = CalibratedHead.__new__(CalibratedHead).calibrator


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda head: pickle.loads(pickle.dumps(head)), copy.copy]
)
def test_copies_act_alike_and_keep_their_names(again):
    head = Temperature().assign(temperature=2.0).wrap(nn.Linear(6, 3))
    twin = again(head)
    rows = torch.randn(5, 6)
    assert torch.equal(twin(rows), head(rows))
    assert list(twin.state_dict()) == ["weight", "bias", "calibrator.temperature"]
    twin.load_state_dict(head.state_dict())


def test_to_moves_the_layer_and_keeps_the_digits_of_the_calibrator():
    head = Temperature().assign(temperature=1.2345678).wrap(nn.Linear(6, 3)).half()
    assert head.weight.dtype == torch.float16
    assert head.calibrator.temperature.dtype == torch.float32
    assert float(head.calibrator.temperature) == pytest.approx(1.2345678)
    assert head.double().calibrator.temperature.dtype == torch.float64


def test_the_flag_of_the_layer_is_the_flag_of_the_head():
    assert Temperature().wrap(nn.Linear(6, 3)).training
    assert not Temperature().wrap(nn.Linear(6, 3).eval()).training


def test_a_row_head_knows_device_and_mode_of_its_layer():
    layer = mlp(3)
    head = as_head(layer)
    assert len(list(head.parameters())) == 4
    head.eval()
    assert not layer.training


# --- mixed precision --------------------------------------------------------------------------

MIXED = ["temperature", "matrix", "dirichlet", "sms", "proximity", "clip | temperature", "group"]


@pytest.fixture(scope="module")
def network():
    """A body, a head, and rows with labels the head is too sure of."""
    torch.manual_seed(0)
    body, head, rows = nn.Linear(5, 6), nn.Linear(6, 3), torch.randn(300, 5)
    with torch.no_grad():
        head.weight.mul_(6)
        labels = torch.multinomial((head(body(rows)) / 3).softmax(1), 1)[:, 0]
    return body, head, rows, labels


@pytest.mark.parametrize("recipe", MIXED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
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


@pytest.mark.parametrize("name", ["linear", "one logit", "mlp", "pixel"])
def test_compiled_under_autocast_in_one_graph(name):
    make, shapes = SAME_CALLS[name]
    head = Temperature().assign(temperature=2.0).wrap(make()).eval()
    compiled = torch.compile(head, backend="eager", fullgraph=True)
    rows = torch.randn(shapes[0])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = compiled(rows)
        assert found.dtype == torch.float32
        assert torch.equal(found, head(rows))
    with torch.no_grad():
        assert torch.equal(compiled(rows), head(rows))
    torch._dynamo.reset()
