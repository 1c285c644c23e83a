"""Finding the last layer: what is told, what is guessed, and what one batch proves."""

from collections import OrderedDict, namedtuple
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from featcal import InputError, Temperature, attach, find_head
from featcal.heads.find import check_bare, inner_layer, makes, outputs_in, positions, run, watched


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


# --- told -------------------------------------------------------------------------------------


def test_a_path_that_is_told_is_taken_without_a_batch(x):
    assert find_head(Net(), "aux") == "aux"
    assert find_head(Net(), "top", inputs=x) == "top"


def test_a_wrong_path_lists_the_last_linear_layers():
    deep = nn.Sequential(*[nn.Linear(2, 2) for _ in range(7)])
    with pytest.raises(InputError, match=r"head 'fc' is not a module .* are 2, 3, 4, 5, 6$"):
        find_head(deep, "fc")
    with pytest.raises(InputError, match="linear layers are none"):
        find_head(nn.Sequential(nn.ReLU()), "fc")


def test_a_told_layer_that_does_not_make_the_output_is_refused_with_the_one_that_does(x):
    both = Net(lambda net, h: net.top(h) + 0 * net.aux(h))
    with pytest.raises(InputError, match="output of 'aux' is not the model's output: that is 'to"):
        find_head(both, "aux", inputs=x)


def test_a_told_layer_is_refused_with_shapes_where_none_makes_the_output(x):
    twice = Net(lambda net, h: net.top(h) * 2)
    with pytest.raises(InputError, match=r"'top' does not make the model's output \(\(6, 3\)\)"):
        find_head(twice, "top", inputs=x)


def test_a_told_layer_that_never_runs_is_refused(x):
    with pytest.raises(InputError, match="'aux' is not the model's output: that is 'top'"):
        find_head(Net(), "aux", inputs=x)


def test_a_told_container_is_the_head_as_a_whole(x):
    model = nn.Sequential(nn.Linear(5, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 3), nn.ReLU()))
    assert find_head(model, "1", inputs=x) == "1"


# --- guessed ----------------------------------------------------------------------------------


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


def test_several_classifiers_need_a_batch_or_a_path():
    model = Says(lambda m: (m.out, m.tail))
    with pytest.raises(InputError, match="several classifiers: pass head="):
        find_head(model)


def test_get_classifier_that_wants_arguments_is_left_alone():
    class Other(nn.Sequential):
        def get_classifier(self, which):
            raise AssertionError(which)

    assert find_head(Other(nn.Linear(2, 2))) == "0"


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


def test_a_usual_name_that_is_no_layer_is_no_hint():
    class Scored(nn.Sequential):
        def score(self):
            raise AssertionError

    model = Scored(nn.Linear(2, 2), nn.ReLU())
    model.fc = None
    assert find_head(model) == "0"


def test_the_last_linear_layer_may_be_a_pointwise_convolution():
    model = nn.Sequential(nn.Linear(2, 2), nn.Conv1d(2, 3, 1), nn.Conv2d(2, 3, 3), nn.ReLU())
    assert find_head(model) == "1"


def test_a_model_without_linear_layers_needs_a_path():
    with pytest.raises(InputError, match="no linear layer: pass head="):
        find_head(nn.Sequential(nn.Conv2d(1, 1, 3)))


def test_a_bare_layer_is_its_own_head(x):
    assert find_head(nn.Linear(5, 3)) == ""
    assert find_head(nn.Linear(5, 3), inputs=x) == ""


# --- proved -----------------------------------------------------------------------------------


def test_a_batch_corrects_a_wrong_guess(x):
    assert find_head(Net()) == "late"
    assert find_head(Net(), inputs=x) == "top"
    assert find_head(Says(lambda m: m.tail)) == "tail"


def test_an_auxiliary_head_beside_the_head_is_not_taken(x):
    """As in Inception: two heads run, and the first part of the output is the right one."""
    net = Net(lambda net, h: (net.top(h), net.aux(h).mean(1, keepdim=True)))
    assert find_head(net, inputs=x) == "top"


ENDINGS = {
    "logits": lambda z: z,
    "softmax": lambda z: z.softmax(1),
    "log_softmax": lambda z: z.log_softmax(1),
}
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


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


@pytest.mark.parametrize("ending", [torch.sigmoid, nn.functional.logsigmoid])
def test_a_sigmoid_of_several_logits_is_refused(ending, x):
    net = Net(lambda net, h: ending(net.top(h)))
    with pytest.raises(InputError, match=r"sigmoid of each of the logits of 'top'.*several class"):
        find_head(net, inputs=x)


def test_a_softmax_over_the_channels_of_a_single_pixel(x):
    model = nn.Sequential(nn.Conv2d(5, 3, 1), nn.Softmax(1))
    assert find_head(model, inputs=x[:, :, None, None]) == "0"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_logits_returned_in_another_type(dtype, x):
    assert find_head(Net(lambda net, h: net.top(h).to(dtype)), inputs=x) == "top"


def test_half_precision_does_not_blur_two_heads():
    """Within the digits of a 16-bit softmax, but not the same logits."""
    given = torch.randn(4, 3)
    assert makes(given, given.bfloat16())
    assert not makes(given, (given * 1.004).bfloat16())


Pair = namedtuple("Pair", ["logits", "hidden"])
Two = namedtuple("Two", ["first", "second"])

FORMS = {
    "tuple": lambda z, h: (z, h),
    "list": lambda z, h: [h, z],
    "dict": lambda z, h: {"hidden": h, "scores": z},
    "dict with logits": lambda z, h: {"hidden": h, "logits": z},
    "ordered": lambda z, h: OrderedDict(logits=z, hidden=h),
    "object": lambda z, h: SimpleNamespace(logits=z, hidden=h),
    "named tuple": lambda z, h: Pair(z, h),
    "other named tuple": lambda z, h: Two(h, z),
    "loss before": lambda z, h: (h.sum(), z),
    "none before": lambda z, h: (None, z),
    "nested": lambda z, h: ({"all": [h, (h, z)]}, None),
    "predictions beside": lambda z, h: (z.argmax(1), z),
    "two forms": lambda z, h: (z.softmax(1), z),
}


@pytest.mark.parametrize("form", FORMS)
def test_outputs_of_every_form(form, x):
    net = Net(lambda net, h: FORMS[form](net.top(h), h))
    assert find_head(net, inputs=x) == "top"


def test_logits_by_name_are_the_output_and_nothing_else():
    z, h = torch.ones(2, 3), torch.zeros(2, 4)
    assert [id(t) for t in outputs_in({"hidden": h, "logits": z})] == [id(z)]
    assert [id(t) for t in outputs_in(SimpleNamespace(logits=z, hidden=h))] == [id(z)]
    assert [id(t) for t in outputs_in((h, {"logits": z, "hidden": h}))] == [id(h), id(z)]
    assert outputs_in({"logits": None, "hidden": 3}) == []
    assert outputs_in("text") == []


@pytest.mark.parametrize("shape", [(-1,), (-1, 1), (-1, 1, 1, 1)])
@pytest.mark.parametrize("link", [lambda z: z, torch.sigmoid])
def test_a_single_logit_in_any_shape(shape, link, x):
    model = Net(lambda net, h: link(net.one(h)).reshape(shape))
    model.one = nn.Linear(4, 1)
    assert find_head(model, inputs=x) == "one"


def test_certain_probabilities_of_one_class_are_not_proof_of_any_layer(x):
    """A softmax over one value is 1 whatever the value."""
    ones = torch.ones(4, 1)
    assert not makes(torch.randn(4, 1), ones)
    assert makes(torch.full((4, 1), 40.0), ones)


def test_the_scores_of_one_token_a_row(x):
    class Causal(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Linear(5, 4)
            self.score = nn.Linear(4, 3, bias=False)
            self.lm = nn.Linear(4, 9)

        def forward(self, tokens, last):
            hidden = self.embed(tokens)
            self.lm(hidden)
            scores = self.score(hidden)
            return scores[torch.arange(len(scores)), last]

    tokens, last = torch.randn(6, 7, 5), torch.tensor([6, 2, 0, 3, 3, 1])
    assert find_head(Causal(), inputs=(tokens, last)) == "score"


def test_positions_are_where_the_output_came_from():
    given = torch.randn(4, 5, 3)
    place = torch.tensor([4, 0, 2, 2])
    kept = given[torch.arange(4), place]
    assert torch.equal(positions(given, kept), place)
    assert torch.equal(positions(given[..., :1], kept[:, 0]), place)
    assert positions(given, kept[:, 0]) is None
    assert positions(given, kept + 1) is None
    assert positions(given, given[:, 0, :2]) is None
    assert positions(given, given) is None
    assert positions(given[:, 0], kept) is None


def test_of_two_layers_that_both_match_the_guess_is_taken_and_else_the_last(x):
    same = nn.Linear(3, 3)
    with torch.no_grad():
        same.weight.copy_(torch.eye(3))
        same.bias.zero_()
    model = nn.Sequential(OrderedDict(fc=nn.Linear(5, 3), same=same))
    assert find_head(model, inputs=x) == "fc"
    assert find_head(nn.Sequential(model.fc, same), inputs=x) == "1"
    assert find_head(model, "same", inputs=x) == "same"
    net = Net(lambda net, h: net.aux(net.top(h)))
    net.aux = same
    assert find_head(net, inputs=x) == "aux"  # called last; the guess was another layer


def test_two_outputs_of_two_layers_are_for_the_caller_to_choose(x):
    model = Net(lambda net, h: (net.aux(h), net.top(h)))
    with pytest.raises(InputError, match=r"outputs of several layers, aux, top: pass head="):
        find_head(model, inputs=x)
    assert find_head(model, "aux", inputs=x) == "aux"


def test_heads_of_zeros_are_told_apart_by_name_alone(x):
    net = Net()
    for layer in (net.top, net.aux, net.late):
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    net.head = net.top
    assert find_head(net, inputs=x) == "top"


def test_when_nothing_matches_the_layers_are_listed_with_their_shapes(x):
    net = Net(lambda net, h: (net.top(h) + net.aux(h)) / 2)
    with pytest.raises(InputError) as refusal:
        find_head(net, inputs=x)
    text = str(refusal.value)
    assert "no linear layer makes the model's output ((6, 3))" in text
    assert "pass head=" in text
    for layer in ("body (4,)", "aux (3,)", "top (3,)", "late (4,)"):
        assert layer in text


def test_an_output_without_tensors_is_said(x):
    with pytest.raises(InputError, match=r"model's output \(no tensor\)"):
        find_head(Net(lambda net, h: net.top(h).tolist()), inputs=x)


def test_nan_does_not_hide_the_head(x):
    """The head is known by name and place; the fit says which rows are NaN."""
    x = x.clone()
    x[1] = float("nan")
    assert find_head(Net(), inputs=x) == "top"


@pytest.mark.parametrize("rows", [1, 2, 100])
def test_any_number_of_rows_will_do(rows):
    assert find_head(Net(), inputs=torch.randn(rows, 5)) == "top"


def test_the_axis_of_a_single_row_may_be_dropped():
    row = torch.randn(1, 5)
    assert find_head(Net(lambda net, h: net.top(h).squeeze()), inputs=row) == "top"
    soft = Net(lambda net, h: net.top(h).softmax(1).squeeze())
    assert find_head(soft, inputs=row) == "top"
    for link in (lambda z: z, torch.sigmoid):
        single = nn.Sequential(nn.Linear(5, 1), nn.Flatten(0))
        single.forward = lambda x, link=link, layer=single[0]: link(layer(x)).squeeze()
        assert find_head(single, inputs=row) == "0"


def test_a_batch_without_rows_proves_nothing():
    with pytest.raises(InputError, match="inputs have no rows"):
        find_head(Net(), inputs=torch.randn(0, 5))


def test_a_layer_is_known_by_all_its_names(x):
    net = Net(lambda net, h: net.classifier(h))
    net.classifier = net.top
    for head in ("top", "classifier"):
        assert find_head(net, head, inputs=x) == find_head(net, head) == head
    assert find_head(net, inputs=x) == "top"
    found = attach(net, Temperature().assign(temperature=2.0), head="classifier")
    assert found.top is found.classifier
    assert torch.equal(found(x), net(x) / 2)


def test_a_scaled_output_is_refused_because_the_head_would_be_calibrated_before_the_scale(x):
    net = Net(lambda net, h: net.top(h) * 1.1)
    with pytest.raises(InputError, match="no linear layer makes"):
        find_head(net, inputs=x)


def test_an_output_changed_in_place_is_found_out(x):
    net = Net(lambda net, h: net.top(h).mul_(2))
    with pytest.raises(InputError, match="no linear layer makes"):
        find_head(net, inputs=x)


def test_several_inputs_and_named_inputs(x):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(10, 3)

        def forward(self, left, right):
            return self.out(torch.cat([left, right], 1))

    for inputs in ((x, x), [x, x], {"right": x, "left": x}):
        assert find_head(Two(), inputs=inputs) == "out"
        assert run(Two(), inputs).shape == (6, 3)


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


def test_no_hook_is_left_after_an_error(x):
    net = Net(lambda net, h: net.top(h[:, :2]))
    with pytest.raises(RuntimeError):
        find_head(net, inputs=x)
    assert not any(part._forward_hooks for part in net.modules())
    with pytest.raises(AttributeError), watched(net, ["top", "nothing"]):
        pass
    assert not any(part._forward_hooks for part in net.modules())


def test_watching_tells_calls_in_order_with_their_only_argument(x):
    net = Net(lambda net, h: net.top(input=net.body(x) + h))
    with watched(net, ["top", "body"]) as calls:
        net(x)
    assert [path for path, _, _ in calls] == ["body", "body", "top"]
    assert calls[0][1] is x
    assert calls[2][1] is None  # given by name


# --- models that cannot be taken apart --------------------------------------------------------


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


def test_a_wrapped_part_elsewhere_does_no_harm(x):
    body = torch.compile(nn.Linear(5, 4), backend="eager")
    assert find_head(nn.Sequential(body, nn.Linear(4, 3)), inputs=x) == "1"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_is_refused(x):
    model = torch.jit.trace(nn.Sequential(nn.Linear(5, 3)), x)
    with pytest.raises(InputError, match="TorchScript module, whose layers are fixed: take the"):
        find_head(model)


def test_a_model_without_parameters_is_taken_where_it_is_told(x):
    model = nn.Sequential(nn.ReLU(), nn.Softmax(1))
    with pytest.raises(InputError, match="no linear layer"):
        find_head(model)
    assert find_head(nn.Sequential(nn.Flatten(), nn.Identity()), "1", inputs=x) == "1"


def test_a_calibrated_head_is_one_layer(x):
    calibrated = attach(Net(), Temperature().assign(temperature=2.0), head="top")
    assert find_head(calibrated, inputs=x) == "top"
    assert find_head(attach(nn.Linear(5, 3), Temperature()), inputs=x) == ""


def test_an_inner_layer_by_name():
    net = Net()
    assert inner_layer(net, "body") is net.body
    with pytest.raises(InputError, match=r"layer 'x\.y' is not .* parts are body, aux, top, late$"):
        inner_layer(net, "x.y")
