"""Head surgery on small real models: the original stays, the weights are shared."""

import copy
import functools
import types

import pytest
import torch
from torch import nn

from featcal import (
    Batch,
    FeatureClip,
    InputError,
    Pipeline,
    Temperature,
    attach,
    calibrate,
    detach,
    find_head,
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
    assert found.top["fc"].uncalibrated is net.top["fc"]
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
    assert net.get_submodule(find_head(net)) is net.top["fc"]


def test_get_classifier_is_asked_before_guessing():
    assert find_head(Timm()) == "head"
    assert find_head(Timm(found=nn.Identity())) == "head"  # then the usual name
    assert find_head(Timm(found=nn.ReLU())) == "head"


def test_a_classifier_that_is_no_part_of_the_model_does_not_crash():
    class Detached(Timm):
        def get_classifier(self):
            return nn.Linear(6, 3)

    assert find_head(Detached()) == "head"


def test_no_linear_layer_is_refused_with_the_remedy():
    with pytest.raises(InputError, match="no linear layer: pass head="):
        find_head(nn.Sequential(nn.Conv2d(1, 1, 3)))
    with pytest.raises(InputError, match="no linear layer: pass head="):
        attach(nn.Sequential(nn.ReLU()), HOT)


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


# --- what else a model may be ------------------------------------------------------------------


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


def test_a_container_that_is_reached_twice_is_copied_once(x):
    inner = nn.Sequential(nn.Linear(6, 3))
    net = nn.ModuleDict({"a": inner, "b": inner})
    found = attach(net, HOT)
    assert found["a"] is found["b"]
    assert found["a"] is not inner


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


def test_a_model_compiled_in_place_is_not_run_instead_of_its_copy(net, x):
    net.compile(backend="eager")
    plain = net(x)
    found = attach(net, HOT, head="top.fc")
    assert torch.equal(found(x), plain / 2)
    assert torch.equal(net(x), plain)


def test_compiling_the_calibrated_model(net, x):
    found = attach(net, HOT, head="top.fc")
    compiled = torch.compile(found, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), net(x) / 2)
    with pytest.raises(InputError, match="wrapped in OptimizedModule"):
        detach(compiled)
    outer = nn.Sequential(torch.compile(attach(net, HOT, head="top.fc"), backend="eager"))
    with pytest.raises(InputError, match=r"model\.0 is wrapped in OptimizedModule"):
        detach(outer)


def test_flags_are_those_of_the_model(net):
    found = attach(net, HOT, head="top.fc")
    assert not found.training
    assert not found.top["fc"].training
    net.train()
    assert attach(net, HOT, head="top.fc").top["fc"].training


def test_the_head_may_be_a_container(net, x):
    model = nn.Sequential(nn.Linear(6, 4), nn.Sequential(nn.Dropout(), nn.Linear(4, 3))).eval()
    found = attach(model, FeatureClip().assign(threshold=0.1) | HOT, head="1")
    torch.testing.assert_close(found(x), model[1](model[0](x).clamp(-0.1, 0.1)) / 2)
    assert [key for key in found.state_dict() if "calib" not in key] == list(model.state_dict())


def test_sharing_is_total_and_a_deepcopy_ends_it(net):
    found = attach(net, HOT, head="top.fc")
    found.train()
    assert net.body.training
    assert not net.training  # the root was copied
    parted = copy.deepcopy(found)
    parted.body.eval()
    assert net.body.training


# --- the calibrator of another network ---------------------------------------------------------


@pytest.fixture(scope="module")
def fitted():
    """Calibrators of a network with 8 features and 3 classes."""
    draw = torch.Generator().manual_seed(0)
    head = nn.Linear(8, 3)
    features = torch.randn(60, 8, generator=draw)
    batch = Batch(None, torch.arange(60) % 3, features)
    return {recipe: parse(recipe).fit(batch, head) for recipe in ("temperature", "clip")}


@pytest.mark.parametrize("recipe", ["temperature", "clip"])
def test_other_sizes_are_refused(fitted, recipe):
    wrong = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    with pytest.raises(InputError, match=r"fitted to 3 classes and '1' has 4: attach it to the ne"):
        attach(wrong, fitted[recipe])
    attach(nn.Linear(8, 3), fitted[recipe])


def test_features_count_where_they_are_used(fitted):
    wrong = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 3))
    with pytest.raises(InputError, match="fitted to 8 features and '1' has 7"):
        attach(wrong, fitted["clip"])
    attach(wrong, fitted["temperature"])
    attach(wrong, fitted["clip"], layer="0")  # its features are another layer's
    with pytest.raises(InputError, match="fitted to 3 classes and '1' has 4"):
        attach(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)), fitted["clip"], layer="0")


def test_a_single_logit_counts_as_two_classes(fitted):
    with pytest.raises(InputError, match="fitted to 3 classes and '' has 2"):
        attach(nn.Linear(8, 1), fitted["temperature"])


def test_without_a_report_or_a_linear_head_the_sizes_are_not_known(fitted):
    attach(nn.Linear(5, 9), HOT)
    attach(nn.Sequential(nn.Linear(5, 9), nn.ReLU()), fitted["temperature"], head="1")


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


def test_layers_in_a_row_run_in_their_order(fitted):
    square = nn.Sequential(nn.Linear(8, 3), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    assert isinstance(attach(square, fitted["temperature"])[1][1], CalibratedHead)


# --- the calibrator's device -------------------------------------------------------------------


def test_the_calibrator_of_another_device_is_copied_to_the_model(net, x):
    calibrator = FeatureClip().assign(threshold=0.5) | Temperature().assign(temperature=2.0)
    assert attach(net, calibrator, head="top.fc").top["fc"].calibrator is calibrator
    far = attach(net.to("meta"), calibrator, head="top.fc")
    assert far(x.to("meta")).device.type == "meta"
    assert float(calibrator.steps[1].temperature) == 2  # what was passed is where it was
    inside = attach(net, calibrator, head="top.fc", layer="body.0")
    assert inside(x.to("meta")).device.type == "meta"


# --- an inner layer ----------------------------------------------------------------------------


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


def test_the_last_layer_is_no_inner_layer(net):
    with pytest.raises(InputError, match=r"'top.fc' is the last layer, .* name an earlier one"):
        attach(net, FeatureClip() | HOT, head="top.fc", layer="top.fc")


def test_a_feature_step_alone_leaves_the_head_as_it_is(net):
    found = attach(net, FeatureClip(), head="top.fc", layer="body")
    assert isinstance(found.body, MappedLayer)
    assert found.top["fc"] is net.top["fc"]


def test_several_logit_steps_stay_together(net):
    steps = FeatureClip() | Temperature() | parse("vector")
    found = attach(net, steps, head="top.fc", layer="body")
    assert isinstance(found.top["fc"].calibrator, Pipeline)
    assert repr(found.top["fc"].calibrator) == "temperature | vector"


@pytest.mark.parametrize(
    ("recipe", "what"),
    [
        ("temperature", "temperature"),
        ("temperature | vector", r"temperature \| vector"),
        ("group(groups=3)", r"group\(groups=3\)"),
        ("clip | group(groups=3)", r"group\(groups=3\)"),
    ],
)
def test_only_feature_maps_act_inside(net, recipe, what):
    with pytest.raises(InputError, match=f"^{what} cannot act at layer 'body': give feature maps"):
        attach(net, parse(recipe), head="top.fc", layer="body")


def test_a_recipe_that_cannot_act_inside_costs_no_pass_over_the_data(net):
    def never():
        pytest.fail("the loader was read")
        yield

    with pytest.raises(InputError, match="cannot act at layer"):
        calibrate(net, never(), "temperature", head="top.fc", layer="body")


def test_an_unknown_layer_lists_the_parts(net):
    with pytest.raises(InputError, match=r"layer 'nope' is not .*its parts are body, top, unused"):
        attach(net, FeatureClip(), head="top.fc", layer="nope")


def test_a_second_calibrator_is_refused_wherever_the_first_one_is(net):
    inside = attach(net, FeatureClip(), head="top.fc", layer="body")
    with pytest.raises(InputError, match="calibrated already: detach"):
        attach(inside, HOT, head="top.fc")
    with pytest.raises(InputError, match="calibrated already: detach"):
        attach(inside, FeatureClip(), head="top.fc", layer="body.0")


def test_calibrators_one_inside_the_other_are_both_taken_off(x):
    net = nn.Sequential(nn.Sequential(nn.Linear(6, 3)))
    found = attach(net, FeatureClip() | HOT, layer="0")
    again = detach(found)
    assert not any(isinstance(part, (MappedLayer, CalibratedHead)) for part in again.modules())
    assert torch.equal(again(x), net(x))
