"""Finding the last layer: what is told, what is guessed, and what one batch proves."""

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from featcal import InputError, Temperature, attach, calibrate, collect, find_head
from featcal.heads.find import (
    check_bare,
    outputs_in,
    submodule,
)


class Net(nn.Module):
    """Body, auxiliary head, head, and a layer registered last; `give` says what it returns."""

    def __init__(self, give=lambda net, h: net.top(h)):
        super().__init__()
        self.body = nn.Linear(5, 4)
        self.aux = nn.Linear(4, 3)
        self.top = nn.Linear(4, 3)
        self.late = nn.Linear(5, 4)
        self.give = give

    def forward(self, x):
        return self.give(self, self.body(x).relu() + self.late(x))


@pytest.fixture(autouse=True)
def _weights():
    torch.manual_seed(0)


@pytest.fixture
def x():
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(1))


class Says(nn.Module):
    """A model with timm's method; `says` is what the method gives."""

    def __init__(self, says):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 4))
        self.out = nn.Sequential(nn.Dropout(), nn.Linear(4, 3))
        self.pixel = nn.Conv2d(4, 3, 1)
        self.tail = nn.Linear(4, 4)
        self.says = says

    def get_classifier(self):
        return self.says(self)


@pytest.mark.parametrize(
    ("says", "path"),
    [
        (lambda m: m.out[1], "out.1"),
        (lambda m: m.pixel, "pixel"),
        (lambda m: m.out, "out.1"),
        (lambda m: nn.Identity(), "tail"),
        (lambda m: nn.Linear(4, 3), "tail"),  # no part of the model
        (lambda m: None, "tail"),
        (lambda m: "out.1", "tail"),
        (lambda m: m.nothing, "tail"),
    ],
    ids=["linear", "conv", "container", "identity", "foreign", "none", "text", "error"],
)
def test_what_get_classifier_says(says, path):
    assert find_head(Says(says)) == path


@pytest.mark.parametrize("name", ["classifier", "score", "classification_head", "fc", "head"])
def test_usual_names_come_before_the_last_layer(name):
    model = nn.Module()
    model.add_module(name, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)))
    model.later = nn.Linear(2, 2)
    assert find_head(model) == f"{name}.1"


@pytest.mark.parametrize(
    ("behind", "path"),
    [
        ([], "classifier.1"),
        ([nn.Softmax(1)], "classifier.1"),
        ([nn.Flatten(), nn.Identity(), nn.Dropout()], "classifier.1"),
        ([nn.ReLU(), nn.AdaptiveAvgPool2d(1)], "classifier"),
        ([nn.Sequential(nn.ReLU())], "classifier"),
        ([nn.Sequential(nn.Dropout(), nn.Linear(3, 3))], "classifier.2.1"),
    ],
)
def test_a_container_that_does_more_behind_its_layers_is_the_head_as_a_whole(behind, path):
    model = nn.Module()
    model.classifier = nn.Sequential(nn.Dropout(), nn.Conv2d(4, 3, 1), *behind)
    model.later = nn.Linear(2, 2)
    assert find_head(model) == path


ENDINGS = {
    "logits": lambda z: z,
    "softmax": lambda z: z.softmax(1),
    "log_softmax": lambda z: z.log_softmax(1),
}
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_head_is_the_layer_before_a_softmax(ending, dtype, x):
    net = Net(lambda net, h: ENDINGS[ending](net.top(h))).to(dtype)
    assert find_head(net, inputs=x.to(dtype)) == "top"


@pytest.mark.parametrize("ending", [torch.sigmoid, nn.functional.logsigmoid])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_head_is_the_layer_before_a_sigmoid_of_one_logit(ending, dtype, x):
    net = Net(lambda net, h: ending(net.top(h)))
    net.top = nn.Linear(4, 1)
    assert find_head(net.to(dtype), inputs=x.to(dtype)) == "top"


Two = namedtuple("Two", ["first", "second"])

FORMS = {
    "tuple": lambda z, h: (z, h),
    "dict with logits": lambda z, h: {"hidden": h, "logits": z},
    "other named tuple": lambda z, h: Two(h, z),
    "loss before": lambda z, h: (h.sum(), z),
    "nested": lambda z, h: ({"all": [h, (h, z)]}, None),
    "predictions beside": lambda z, h: (z.argmax(1), z),
}


@pytest.mark.parametrize("form", FORMS)
def test_outputs_of_every_form(form, x):
    net = Net(lambda net, h: FORMS[form](net.top(h), h))
    assert find_head(net, inputs=x) == "top"


def test_the_model_is_as_it_was_after_the_proof(x):
    net = Net().train()
    net.body = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout()).eval()
    net.body[1:].train()
    flags = [part.training for part in net.modules()]
    state, before = torch.get_rng_state(), {k: v.clone() for k, v in net.state_dict().items()}
    assert find_head(net, inputs=x) == "top"
    assert [part.training for part in net.modules()] == flags
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())
    assert not any(part._forward_hooks for part in net.modules())


class FullyShardedDataParallel(nn.Module):
    """FSDP itself needs a process group; only its name is looked at."""

    def __init__(self, module):
        super().__init__()
        self.module = module


@pytest.mark.parametrize(
    ("wrap", "inner"),
    [
        (nn.DataParallel, "module"),
        (FullyShardedDataParallel, "module"),
        (lambda m: torch.compile(m, backend="eager"), "_orig_mod"),
    ],
    ids=["DataParallel", "FSDP", "compile"],
)
def test_a_wrapped_model_is_refused_with_what_to_pass(wrap, inner, x):
    model = wrap(Net())
    with pytest.raises(InputError, match=f"model is wrapped in .* take model.{inner} instead"):
        find_head(model, inputs=x)
    with pytest.raises(InputError, match="wrapped in"):
        attach(model, Temperature())
    check_bare(getattr(model, inner))


def test_a_wrapped_part_on_the_way_to_the_head_is_refused(x):
    top = nn.Sequential(nn.ReLU(), nn.Linear(4, 3))
    model = nn.Sequential(nn.Linear(5, 4), nn.Sequential(torch.compile(top, backend="eager")))
    with pytest.raises(InputError, match=r"model\.1\.0 is wrapped in OptimizedModule: take"):
        find_head(model)
    with pytest.raises(InputError, match=r"model\.1\.0 is wrapped in OptimizedModule: take"):
        find_head(model, inputs=x)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.fc = nn.GRU(4, 8), nn.Linear(8, 3)

    def forward(self, packed):
        assert isinstance(packed, PackedSequence)
        return self.fc(self.body(packed)[1][-1])


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


REFUSED = {
    "wrong path": (Net, {"head": "fc"}, r"'fc' is not a module .* are body, aux, top, late$"),
    "other layer": (Net, {"head": "aux"}, "'aux' is not the model's: that is 'top'"),
    "scaled": (lambda: Net(lambda n, h: 2 * n.top(h)), {"head": "top"}, r"'top' does not make"),
    "in place": (lambda: Net(lambda n, h: n.top(h).mul_(2)), {}, "no linear layer makes"),
    "no tensor": (lambda: Net(lambda n, h: n.top(h).tolist()), {}, r"output \(no tensor\)"),
    "listed": (lambda: Net(lambda n, h: n.top(h) + n.aux(h)), {}, r"top \(3,\), aux \(3,\)"),
    "two heads": (lambda: Net(lambda n, h: (n.aux(h), n.top(h))), {}, "several layers, aux, top"),
    "multilabel": (
        lambda: Net(lambda n, h: n.top(h).sigmoid()),
        {},
        "sigmoid of each of the logits of 'top'.*several classes",
    ),
    "no rows": (Net, {"inputs": torch.zeros(0, 5)}, "inputs have no rows"),
    "no layers": (lambda: nn.Sequential(nn.ReLU()), {"inputs": None}, "no linear layer: pass head"),
    "several": (lambda: Says(lambda m: (m.out, m.tail)), {"inputs": None}, "several classifiers"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_will_not_do_is_refused_by_name_and_leaves_no_hook(case, x):
    make, given, says = REFUSED[case]
    model = make()
    with pytest.raises(InputError, match=says):
        find_head(model, **{"inputs": x, **given})
    assert not any(part._forward_hooks for part in model.modules())
    with pytest.raises(InputError, match=r"layer 'x\.y' is not a module"):
        submodule(model, "x.y", "layer")
