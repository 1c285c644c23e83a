"""Head surgery on small real models: the original stays, the weights are shared."""

import copy

import pytest
import torch
from torch import nn

from featcal import FeatureClip, InputError, Temperature, attach, detach, find_head
from featcal.core.attach import head_of
from featcal.core.calibrator import CalibratedHead


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


class Timm(nn.Module):
    """Says by itself where its classifier is, as timm's models do."""

    def __init__(self, found=None):
        super().__init__()
        self.head = nn.Linear(6, 3)
        self.aux = nn.Linear(6, 3)
        self.found = found

    def get_classifier(self):
        return self.head if self.found is None else self.found

    def forward(self, x):
        return self.head(x)


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
    assert found.top["fc"].head is net.top["fc"]
    assert {id(p) for p in found.parameters()} == {id(p) for p in net.parameters()}
    assert "top.fc.calibrator.temperature" in found.state_dict()


def test_detach_undoes_attach(net, x):
    again = detach(attach(net, HOT, head="top.fc"))
    assert type(again) is Net
    assert again.top["fc"] is net.top["fc"]
    assert torch.equal(again(x), net(x))
    assert again.state_dict().keys() == net.state_dict().keys()


def test_double_attach_is_refused_however_it_is_asked(net):
    del net.unused
    once = attach(net, HOT)
    for head in (None, "top.fc", "top.fc.head"):
        with pytest.raises(InputError, match="calibrated already: detach"):
            attach(once, HOT, head=head)


def test_detach_of_a_plain_model_is_refused(net):
    with pytest.raises(InputError, match="no calibrated head: there is nothing to detach"):
        detach(net)


def test_an_unknown_head_lists_the_candidates(net):
    with pytest.raises(InputError, match=r"head 'fc' is not a module.*body\.0, top\.fc, unused"):
        attach(net, HOT, head="fc")
    with pytest.raises(InputError, match="linear layers are none"):
        find_head(nn.Sequential(nn.ReLU()), "fc")


def test_the_last_linear_layer_is_the_guess(net):
    assert find_head(net) == "unused"  # a guess; `collect` proves it on the first batch
    del net.unused
    assert find_head(net) == "top.fc"
    assert head_of(net) is net.top["fc"]


def test_get_classifier_is_asked_before_guessing():
    assert find_head(Timm()) == "head"
    assert find_head(Timm(found=nn.Identity())) == "aux"


def test_a_classifier_that_is_no_part_of_the_model_does_not_crash():
    class Detached(Timm):
        def get_classifier(self):
            return nn.Linear(6, 3)

    try:
        assert find_head(Detached()) in ("head", "aux")
    except InputError as error:
        assert str(error)  # noqa: PT017 - a clear refusal is as good as a guess


def test_no_linear_layer_is_refused_with_the_remedy():
    with pytest.raises(InputError, match=r"no nn.Linear layer: pass head="):
        find_head(nn.Sequential(nn.Conv2d(1, 1, 1)))


def test_a_bare_linear_layer_is_its_own_head(x):
    layer = nn.Linear(6, 3)
    found = attach(layer, HOT)
    assert isinstance(found, CalibratedHead)
    assert torch.equal(found(x), layer(x) / 2)
    assert detach(found) is layer
    with pytest.raises(InputError, match="calibrated already"):
        attach(found, HOT)


def test_a_head_that_is_not_linear(x):
    model = nn.Sequential(nn.Linear(6, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 3)))
    found = attach(model, FeatureClip().assign(threshold=0.1), head="1")
    hidden = model[0](x).clamp(-0.1, 0.1)
    assert torch.equal(found(x), model[1](hidden))


def test_training_reaches_the_shared_weights(net, x):
    found = attach(net, HOT, head="top.fc")
    found(x).sum().backward()
    assert net.top["fc"].weight.grad is not None
    with torch.no_grad():
        net.top["fc"].bias += 1
    assert torch.equal(found(x), net(x) / 2)


def test_a_deepcopy_parts_the_models(net, x):
    found = copy.deepcopy(attach(net, HOT, head="top.fc"))
    expected = found(x)
    with torch.no_grad():
        net.top["fc"].bias += 1
    assert torch.equal(found(x), expected)


def test_a_hook_on_the_attached_model_stays_off_the_original(net, x):
    found = attach(net, HOT, head="top.fc")
    calls = []
    found.register_forward_hook(lambda *_: calls.append("hook"))
    net(x)
    assert calls == []


def test_the_state_of_an_attached_model_loads_into_a_fresh_one(net, x):
    first = attach(net, Temperature().assign(temperature=3.0), head="top.fc")
    other = attach(Net().eval(), Temperature(), head="top.fc")
    other.load_state_dict(first.state_dict())
    assert torch.equal(other(x), first(x))
