"""Any layer inside a network: a map on what it gives, and the rest of the network as a head."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import featcal
from featcal import FeatureClip, InputError, attach, collect
from featcal.heads.attach import MappedLayer, Rest, first_tensor


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


@pytest.mark.parametrize("repeat", [False, True])
def test_the_rest_is_the_second_half_of_the_network(net, x, repeat):
    rest = rest_of(net, x, repeat=repeat)
    with torch.no_grad():
        own = net.block1(x)
        torch.testing.assert_close(rest(own.flatten(1)), net(x))
        other = 3 * torch.rand(11, *own.shape[1:])  # of other samples, and more of them
        torch.testing.assert_close(rest(other.flatten(1)), second_half(net, other))


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
