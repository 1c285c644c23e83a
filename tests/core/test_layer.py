"""Any layer inside a network: a map on what it gives, and the rest of the network as a head."""

from collections import namedtuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import featcal
from featcal import Batch, FeatureClip, InputError, Temperature, attach, collect
from featcal.heads.attach import MappedLayer, Rest, first_row_of, first_tensor, repeated, with_first
from featcal.heads.find import mapped


class Conv(nn.Module):
    """Two blocks of convolutions, pooling and a linear head."""

    def __init__(self):
        super().__init__()
        self.block1 = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.block2 = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.ReLU())
        self.fc = nn.Linear(6, 3)

    def forward(self, x):
        return self.fc(self.block2(self.block1(x)).mean((2, 3)))


@pytest.fixture(autouse=True)
def _weights():
    torch.manual_seed(0)


@pytest.fixture
def net():
    net = Conv()
    net.block1[1].running_var.fill_(0.3)
    with torch.no_grad():
        net.fc.weight.mul_(12)
        net.block1[0].weight.mul_(2)
    return net.eval()


@pytest.fixture
def x():
    return torch.randn(7, 2, 5, 5, generator=torch.Generator().manual_seed(1))


def second_half(net, h):
    """What stands behind block1, written out."""
    h = F.conv2d(h, net.block2[0].weight, net.block2[0].bias, padding=1).relu()
    return F.linear(h.mean((2, 3)), net.fc.weight, net.fc.bias)


def rest_of(net, x, layer="block1", head="fc", **more):
    with torch.no_grad():
        sample = first_tensor(net.get_submodule(layer)(x) if layer == "block1" else x).shape[1:]
    return Rest(net, x, layer=layer, head=head, sample=sample, **more).eval()


# --- the rest of the network ------------------------------------------------------------------


@pytest.mark.parametrize("repeat", [False, True])
def test_the_rest_is_the_second_half_of_the_network(net, x, repeat):
    rest = rest_of(net, x, repeat=repeat)
    with torch.no_grad():
        own = net.block1(x)
        torch.testing.assert_close(rest(own.flatten(1)), net(x))
        other = 3 * torch.rand(11, *own.shape[1:])  # of other samples, and more of them
        torch.testing.assert_close(rest(other.flatten(1)), second_half(net, other))


def test_no_hook_is_left(net, x):
    rest = rest_of(net, x)
    with torch.no_grad():
        rest(net.block1(x).flatten(1))
        with pytest.raises(RuntimeError):
            rest(torch.zeros(3, 7))
    assert not any(part._forward_hooks for part in net.modules())


def test_a_single_logit_and_a_pixel_head_give_two_and_three_logits(net, x):
    net.fc = nn.Linear(6, 1)
    rest = rest_of(net, x)
    with torch.no_grad():
        z = rest(net.block1(x).flatten(1))
        torch.testing.assert_close(z, torch.cat([torch.zeros(7, 1), net(x)], 1))

    pixel = nn.Sequential(nn.Conv2d(2, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Conv2d(4, 3, 1)).eval()
    rest = Rest(pixel, x, layer="0", head="2", sample=torch.Size((4, 3, 3)))
    with torch.no_grad():
        found = rest(pixel[0](x).flatten(1))
        torch.testing.assert_close(found, pixel(x).flatten(1))


def test_a_layer_that_gives_a_tuple():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.fc = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

        def forward(self, x):
            every, _ = self.lstm(x)
            return self.fc(every[:, -1])

    net, x = Recurrent().eval(), torch.randn(6, 5, 3)
    data = collect(net, [(x, torch.zeros(6).long())], layer="lstm")
    with torch.no_grad():
        own = net.lstm(x)[0]
        assert torch.equal(data[0].features, own.flatten(1))
        clamped = own.clamp(-0.1, 0.1)
        expected = net.fc(clamped[:, -1])
        found = attach(net, FeatureClip().assign(threshold=0.1), layer="lstm", head="fc")
        torch.testing.assert_close(found(x), expected)
        torch.testing.assert_close(data.head(clamped.flatten(1)), expected)


class Skip(Conv):
    """The input leads around block1 to the head."""

    def forward(self, x):
        h = self.block2(self.block1(x)).mean((2, 3))
        return self.fc(h + 9 * x.mean((1, 2, 3))[:, None])


REFUSED = "cannot be computed from what layer 'block1' gives alone: .* name a later layer"


def test_a_way_around_the_layer_is_refused(x):
    with pytest.raises(InputError, match=REFUSED):
        collect(Skip(), [(x, torch.zeros(7).long())], layer="block1")


def test_a_way_around_the_layer_is_refused_where_every_batch_has_one_row(x):
    """One row alone cannot show it: the second batch does."""
    net = Skip().eval()
    rows = [(row[None], torch.tensor([place % 3])) for place, row in enumerate(x)]
    assert collect(net, rows[:1], layer="block1").rows == 1
    with pytest.raises(InputError, match=REFUSED):
        featcal.calibrate(net, rows, "clip", layer="block1")


def test_a_network_that_counts_its_inputs_gets_as_many(x):
    class Counts(Conv):
        def forward(self, x):
            h = self.block2(self.block1(x)).mean((2, 3))
            return self.fc(h.reshape(x.shape[0], 6))

    net = Counts().eval()
    data = collect(net, [(x, torch.zeros(7).long())], layer="block1")
    other = torch.rand(11, *net.block1(x).shape[1:])
    with torch.no_grad():
        torch.testing.assert_close(data.head(other.flatten(1)), second_half(net, other))


def test_a_layer_behind_the_head_or_around_it_is_refused(net, x):
    labels = torch.zeros(7).long()
    with pytest.raises(InputError, match="name a later layer"):
        collect(nn.Sequential(net, nn.Identity()), [(x, labels)], head="0.fc", layer="1")


def test_layers_that_give_no_tensor_or_run_twice(net, x):
    class Odd(Conv):
        def forward(self, x):
            self.twice(x)
            self.mapping(x)
            return super().forward(self.twice(x))

    class Mapping(nn.Module):
        def forward(self, x):
            return {"x": x}

    odd = Odd()
    odd.twice, odd.mapping = nn.Identity(), Mapping()
    labels = torch.zeros(7).long()
    with pytest.raises(InputError, match="'twice' ran 2 times in one forward pass"):
        collect(odd, [(x, labels)], layer="twice")
    with pytest.raises(InputError, match="the layer gives a dict: name a layer that gives a tens"):
        collect(odd, [(x, labels)], layer="mapping")
    odd.never = nn.Linear(2, 2)
    with pytest.raises(InputError, match="'never' ran 0 times"):
        collect(odd, [(x, labels)], layer="never")


def test_a_layer_whose_samples_are_not_along_the_first_axis_is_refused():
    class TimeFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.fc = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.fc(self.embed(x.transpose(0, 1)).mean(0))

    with pytest.raises(InputError, match=r"'embed' works on 5 rows for 6 labels: name a la"):
        collect(TimeFirst(), [(torch.randn(6, 5, 3), torch.zeros(6).long())], layer="embed")


# --- fitting through it -----------------------------------------------------------------------


@pytest.fixture
def overconfident(net):
    """Labels that follow the network with block1 clipped at 0.6 and its logits halved."""
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(160, 2, 5, 5, generator=draw)
    with torch.no_grad():
        probs = (second_half(net, net.block1(x).clamp(-0.6, 0.6)) / 2).softmax(1)
    return x, torch.multinomial(probs, 1, generator=draw)[:, 0]


def batches(x, y, size=64):
    return [(x[i : i + size], y[i : i + size]) for i in range(0, len(x), size)]


@torch.no_grad()
def nll_at(net, x, y, c):
    return float(F.cross_entropy(second_half(net, net.block1(x).clamp(-c, c)).double(), y))


def test_the_threshold_of_an_inner_layer_is_the_best_of_a_search_by_hand(net, overconfident):
    x, y = overconfident
    data = collect(net, batches(x, y), layer="block1")
    clip = FeatureClip().fit(data, data.head)
    grid = torch.logspace(-2, 1, 300).tolist()
    lowest = min(nll_at(net, x, y, c) for c in grid)
    assert lowest < nll_at(net, x, y, 1e9) - 0.01  # clipping helps
    found = nll_at(net, x, y, float(clip.threshold))
    assert found <= lowest + 2e-3
    assert clip.report.loss_after == pytest.approx(found, abs=1e-5)


def test_the_attached_model_computes_what_was_fitted(net, overconfident):
    x, y = overconfident
    before = {key: value.clone() for key, value in net.state_dict().items()}
    recipe, data = "clip | temperature", batches(x, y)
    found = featcal.calibrate(net, data, recipe, layer="block1", mode="sequential")
    assert type(found) is Conv
    assert isinstance(found.block1, MappedLayer)
    clip, hot = found.block1.calibrator, found.fc.calibrator
    c, t = float(clip.threshold), float(hot.temperature)
    assert 0 < c < 10
    assert t > 1
    with torch.no_grad():
        expected = second_half(net, net.block1(x).clamp(-c, c)) / t
        torch.testing.assert_close(found(x), expected)
        data = collect(net, data, layer="block1")
        both = clip | hot
        by_head = torch.cat([both(part.features, data.head) for part in data])
        torch.testing.assert_close(found(x), by_head)
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert not any(part._forward_hooks for part in net.modules())


def test_the_report_of_a_fit_through_an_inner_layer_counts_its_activations(net, overconfident):
    x, y = overconfident
    data = collect(net, batches(x, y), layer="block1")
    hot = Temperature().fit(data, data.head)
    assert (hot.report.classes, hot.report.features) == (3, 4 * 5 * 5)
    assert data.layer == "block1"
    assert data.path == "fc"


def test_bfloat16_inside(net, overconfident):
    x, y = overconfident
    net = net.bfloat16()
    found = featcal.calibrate(net, batches(x, y), "clip", layer="block1")
    c = found.block1.calibrator.threshold
    assert torch.isfinite(c)
    with torch.no_grad():
        h = net.block1(x.bfloat16())
        clamped = h.float().clamp(-c, c).bfloat16()
        torch.testing.assert_close(found(x.bfloat16()).float(), second_half(net, clamped).float())


# --- the layer itself -------------------------------------------------------------------------


def test_a_fresh_map_changes_nothing(net, x):
    made = MappedLayer(net.block1, FeatureClip())
    assert torch.equal(made(x), net.block1(x))
    assert list(made.state_dict()) == [*net.block1.state_dict(), "calibrator.threshold"]
    half = MappedLayer(net.block1.half(), FeatureClip().assign(threshold=0.25))
    assert half(x.half()).dtype == torch.float16
    assert float(half(x.half()).detach().max()) == 0.25


def test_arguments_of_the_layer_pass_through():
    class Odd(nn.Module):
        def forward(self, x, *, scale):
            return x * scale

    made = MappedLayer(Odd(), FeatureClip().assign(threshold=1.0))
    assert torch.equal(made(torch.ones(2, 3), scale=5.0), torch.ones(2, 3))


def test_whatever_stands_beside_the_first_tensor_stays():
    Pair = namedtuple("Pair", ["one", "two"])
    new = torch.ones(1)
    for output in ((torch.zeros(1), "b"), [torch.zeros(1), "b"], Pair(torch.zeros(1), "b")):
        found = with_first(output, new)
        assert type(found) is type(output)
        assert found[0] is new
        assert found[1] == "b"
    assert with_first(torch.zeros(1), new) is new


@pytest.mark.parametrize("output", [None, 3, {"x": torch.zeros(1)}, (None, torch.zeros(1))])
def test_what_gives_no_tensor_is_refused(output):
    with pytest.raises(InputError, match="name a layer that gives a tensor"):
        first_tensor(output)


def test_one_row_stands_in_for_all_of_an_input():
    inputs = {"a": torch.arange(6).reshape(3, 2), "b": (torch.tensor(5), "text"), "c": None}
    one = first_row_of(inputs)
    assert torch.equal(one["a"], torch.tensor([[0, 1]]))
    assert one["b"] == (torch.tensor(5), "text")
    many = repeated(one, 4)
    assert torch.equal(many["a"], torch.tensor([[0, 1]] * 4))
    assert many["b"][0].ndim == 0
    assert mapped(3.5, lambda t: t) == 3.5


def test_the_rest_of_a_fitted_batch_is_checked_before_the_fit(net, x):
    rest = rest_of(net, x)
    with torch.no_grad():
        features, logits = net.block1(x).flatten(1), net(x) + 1
    with pytest.raises(InputError, match="differs from the stored logits"):
        FeatureClip().fit(Batch(logits, torch.zeros(7).long(), features), rest)
