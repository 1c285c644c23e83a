"""Head surgery on small real models: the original stays, the weights are shared."""

import functools
import types

import pytest
import torch
from torch import nn

from featcal import (
    Batch,
    FeatureClip,
    InputError,
    Temperature,
    attach,
    detach,
    parse,
)
from featcal.heads.attach import MappedLayer
from featcal.heads.head import CalibratedHead


class Net(nn.Module):
    """A head at a nested path, and a linear layer that is registered after it."""

    def __init__(self):
        super().__init__()
        self.note = ["shared"]
        self.body = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
        self.top = nn.ModuleDict({"drop": nn.Dropout(0.1), "fc": nn.Linear(8, 3)})
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        return self.top["fc"](self.top["drop"](self.body(x)))


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture
def x():
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(1))


HOT = Temperature().assign(temperature=2.0)


def test_the_attached_model_is_calibrated_and_the_original_is_not(net, x):
    before = {key: value.clone() for key, value in net.state_dict().items()}
    modules = dict(net.named_modules())
    plain = net(x)
    found = attach(net, HOT, head="top.fc")
    assert type(found) is Net
    assert torch.equal(found(x), plain / 2)
    assert torch.equal(net(x), plain)
    assert dict(net.named_modules()) == modules
    assert net.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())


def test_only_the_path_to_the_head_is_copied(net):
    found = attach(net, HOT, head="top.fc")
    assert found is not net
    assert found.top is not net.top
    assert found.body is net.body
    assert found.top["drop"] is net.top["drop"]
    assert isinstance(found.top["fc"], CalibratedHead)
    assert found.top["fc"].uncalibrated is net.top["fc"]
    assert {id(p) for p in found.parameters()} == {id(p) for p in net.parameters()}
    assert "top.fc.calibrator.temperature" in found.state_dict()


def test_one_layer_under_several_names_is_replaced_under_all(x):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(6, 3)
            self.group = nn.ModuleList([nn.Sequential(self.first), nn.Identity()])
            self.none = None
            self.register_module("empty", None)

        def forward(self, x):
            return self.group[0](x)

    net = Tied()
    found = attach(net, HOT)
    assert found.first is found.group[0][0]
    assert isinstance(found.first, CalibratedHead)
    assert found.group[1] is net.group[1]
    assert found.empty is None
    assert torch.equal(found(x), net(x) / 2)
    assert net.group[0][0] is net.first
    assert len(list(found.parameters())) == 2
    again = detach(found)
    assert again.first is again.group[0][0] is net.first


def test_a_forward_set_for_this_one_model_runs_the_copy(net, x):
    def doubled(self, x):
        return 2 * self.top["fc"](self.body(x))

    net.forward = types.MethodType(doubled, net)
    found = attach(net, HOT, head="top.fc")
    assert torch.equal(found(x), net(x) / 2)
    assert found.forward.__self__ is found
    assert net.forward.__self__ is net


def test_a_forward_wrapped_by_a_library_runs_the_copy(net, x):
    """As accelerate does it: the old method kept, the new one a partial of the module."""

    def with_notes(module, *args):
        notes.append(module)
        return module._old_forward(*args)

    notes = []
    net._old_forward = net.forward
    net.forward = functools.update_wrapper(functools.partial(with_notes, net), net._old_forward)
    found = attach(net, HOT, head="top.fc")
    assert torch.equal(found(x), net(x) / 2)
    assert notes == [found, net]
    assert found.forward.__wrapped__ is net.forward.__wrapped__
    net.forward = functools.partial(net._old_forward)
    assert torch.equal(attach(net, HOT, head="top.fc")(x), net(x) / 2)


def test_a_forward_that_would_run_the_original_is_refused(net, x):
    own = net.forward
    net.forward = lambda x: own(x)
    with pytest.raises(InputError, match=r"model has a forward of its own.*calibrator\.wrap"):
        attach(net, HOT, head="top.fc")
    outer = nn.Sequential(nn.Sequential(nn.Linear(6, 3)))
    outer[0].forward = functools.partial(lambda x: x)
    with pytest.raises(InputError, match=r"model\.0 has a forward of its own"):
        attach(outer, HOT)


@pytest.fixture(scope="module")
def fitted():
    """Calibrators of a network with 8 features and 3 classes."""
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(0)
    head = nn.Linear(8, 3)
    features = torch.randn(60, 8, generator=draw)
    with torch.no_grad():
        labels = torch.multinomial((3 * head(features)).softmax(1), 1, generator=draw)[:, 0]
    batch = Batch(None, labels, features)
    return {recipe: parse(recipe).fit(batch, head) for recipe in ("temperature", "clip")}


def test_features_count_where_they_are_used(fitted):
    wrong = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 3))
    with pytest.raises(InputError, match="fitted to 8 features and '1' has 7"):
        attach(wrong, fitted["clip"])
    attach(wrong, fitted["temperature"])
    attach(wrong, fitted["clip"], layer="0")  # its features are another layer's
    with pytest.raises(InputError, match="fitted to 3 classes and '1' has 4"):
        attach(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)), fitted["clip"], layer="0")


class Aux(nn.Module):
    """A head and an auxiliary one behind it, neither of them under a usual name."""

    def __init__(self, classes=3, others=3):
        super().__init__()
        self.body, self.out = nn.Linear(6, 8), nn.Linear(8, classes)
        self.aux = nn.Linear(8, others)

    def forward(self, x):
        return self.out(self.body(x).relu())


def test_a_guess_among_layers_that_would_all_do_is_refused(fitted):
    said = "not clear: out, aux would all do; pass head=, the path of the one that makes the logits"
    for calibrator in (fitted["temperature"], fitted["clip"], HOT):
        with pytest.raises(InputError, match=said):
            attach(Aux(), calibrator)
        assert isinstance(attach(Aux(), calibrator, head="out").out, CalibratedHead)


def test_sizes_tell_the_head_from_other_layers(fitted):
    assert isinstance(attach(Aux(others=5), fitted["clip"]).out, CalibratedHead)
    with pytest.raises(InputError, match="fitted to 3 classes and 'aux' has 5"):
        attach(Aux(4, 5), fitted["clip"])


def test_the_calibrator_of_another_device_is_copied_to_the_model(net, x):
    calibrator = FeatureClip().assign(threshold=0.5) | Temperature().assign(temperature=2.0)
    assert attach(net, calibrator, head="top.fc").top["fc"].calibrator is calibrator
    far = attach(net.to("meta"), calibrator, head="top.fc")
    assert far(x.to("meta")).device.type == "meta"
    assert float(calibrator.steps[1].temperature) == 2  # what was passed is where it was
    inside = attach(net, calibrator, head="top.fc", layer="body.0")
    assert inside(x.to("meta")).device.type == "meta"


def test_features_are_mapped_inside_and_logits_at_the_head(net, x):
    clip = FeatureClip().assign(threshold=0.3)
    plain = net(x)
    found = attach(net, clip | HOT, head="top.fc", layer="body.0")
    assert isinstance(found.body[0], MappedLayer)
    assert isinstance(found.top["fc"], CalibratedHead)
    hidden = net.body[0](x).clamp(-0.3, 0.3).relu()
    torch.testing.assert_close(found(x), net.top["fc"](hidden) / 2)
    assert torch.equal(net(x), plain)
    names = [key for key in found.state_dict() if ".calibrator." not in key]
    assert names == list(net.state_dict())
    assert {"body.0.calibrator.threshold", "top.fc.calibrator.temperature"} <= {*found.state_dict()}
    again = detach(found)
    assert torch.equal(again(x), plain)
    assert again.body[0] is net.body[0]
    assert again.top["fc"] is net.top["fc"]


CLIP = FeatureClip() | HOT
REFUSED = {
    "twice": (lambda net: attach(attach(net, HOT, head="top.fc"), HOT), "calibrated already"),
    "detach": (detach, "no calibrated head: there is nothing to detach"),
    "head": (lambda net: attach(net, HOT, head="fc"), "head 'fc' is not a module"),
    "layer": (
        lambda net: attach(net, CLIP, head="top.fc", layer="nope"),
        "layer 'nope' is not .*its parts are body, top, unused",
    ),
    "last": (
        lambda net: attach(net, CLIP, head="top.fc", layer="top.fc"),
        "'top.fc' is the last layer: .* name an earlier one",
    ),
    "logits": (
        lambda net: attach(net, HOT, head="top.fc", layer="body"),
        "temperature cannot act at layer 'body': give feature maps",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_attached_is_refused(net, case):
    call, says = REFUSED[case]
    with pytest.raises(InputError, match=says):
        call(net)
