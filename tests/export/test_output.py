"""Which tensor of a model's output is exported, and what it is called: proved, or refused."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from featcal import InputError, attach, parse
from featcal.export.inputs import Inputs, Output, chances, proved_output

ROWS = torch.randn(7, 6, generator=torch.Generator().manual_seed(3))
LOGITS, PROBABILITIES = Output(0, "logits"), Output(0, "probabilities")


class Net(nn.Module):
    """Two heads of the same shape; gives whatever it is told to make of features and logits."""

    def __init__(self, give, classes=3):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.body, self.a, self.b = nn.Linear(6, 8), nn.Linear(8, classes), nn.Linear(8, classes)
        for weight in self.parameters():
            weight.data = torch.randn(weight.shape, generator=generator)
        self.give = give

    def forward(self, x):
        h = self.body(x).relu()
        return self.give(h, self.a(h), self.b(h))


def calibrated(give, head="b", classes=3):
    calibrator = parse("temperature")
    calibrator.assign(temperature=torch.tensor(1.7))
    return attach(Net(give, classes), calibrator, head=head)


def found(model, rows=ROWS):
    return proved_output(model.eval(), Inputs.of(model, rows))


def test_of_two_tensors_the_calibrated_one_is_taken():
    both = lambda h, a, b: (a, b)  # noqa: E731
    assert found(calibrated(both, head="a")) == Output(0)
    assert found(calibrated(both, head="b")) == Output(1)
    with pytest.raises(InputError, match=r"several tensors .* \(7, 3\), \(7, 3\)\): let it give"):
        found(Net(both))
    with pytest.raises(InputError, match="several tensors"):
        found(attach_second(calibrated(both, head="a")))


def attach_second(model):
    """By hand: a calibrator on the other head too."""
    model.b = parse("temperature").wrap(model.b)
    return model


@pytest.mark.parametrize("give", [lambda h, a, b: (h, b), lambda h, a, b: {"h": h, "scores": b}])
def test_features_beside_the_logits_are_not_exported(give):
    assert found(calibrated(give)) == found(Net(give)) == Output(1)


def test_logits_are_taken_before_their_own_probabilities():
    assert found(calibrated(lambda h, a, b: (b.softmax(1), b))) == Output(1, "logits")
    assert found(calibrated(lambda h, a, b: (b.softmax(1), h))) == Output(0, "probabilities")


def test_losses_and_predicted_classes_are_no_logits():
    give = lambda h, a, b: (h.sum(), b.argmax(1), 2 * b)  # noqa: E731
    assert found(calibrated(give)) == found(Net(give)) == Output(2)


@pytest.mark.parametrize("make", [Net, calibrated])
@pytest.mark.parametrize(
    ("link", "expected"),
    [
        (lambda z: z, LOGITS),
        (lambda z: z.half(), LOGITS),
        (lambda z: z.log_softmax(1), LOGITS),
        (lambda z: z.softmax(1), PROBABILITIES),
        (lambda z: z.bfloat16().softmax(1), PROBABILITIES),
        (lambda z: z[..., None, None].softmax(1), PROBABILITIES),
    ],
)
def test_what_stands_behind_the_last_layer_says_what_the_output_holds(make, link, expected):
    assert found(make(lambda h, a, b: link(b))) == expected


@pytest.mark.parametrize("make", [Net, calibrated])
def test_one_value_a_row_is_a_logit_or_its_sigmoid(make):
    for shape in ((-1,), (-1, 1)):
        for link, expected in ((lambda z: z, LOGITS), (torch.sigmoid, PROBABILITIES)):
            give = lambda h, a, b, link=link, shape=shape: link(b).reshape(shape)  # noqa: E731
            assert found(make(give, classes=1)) == expected


def test_a_log_sigmoid_is_neither():
    with pytest.raises(InputError, match=r"log-sigmoid .* give its logits, or their sigmoid"):
        found(calibrated(lambda h, a, b: functional.logsigmoid(b), classes=1))


@pytest.mark.parametrize("link", [torch.sigmoid, functional.logsigmoid])
def test_a_sigmoid_a_class_is_refused(link):
    for make in (Net, calibrated):
        with pytest.raises(InputError, match="a sample may be of several classes"):
            found(make(lambda h, a, b: link(b)))


def test_what_no_layer_makes_is_told_by_its_numbers():
    assert found(calibrated(lambda h, a, b: 2 * b)) == LOGITS
    assert found(calibrated(lambda h, a, b: (a.softmax(1) + b.softmax(1)) / 2)) == PROBABILITIES
    for give in (lambda h, a, b: (a.sigmoid() + b.sigmoid()) / 2, lambda h, a, b: b.sigmoid() ** 2):
        with pytest.raises(
            InputError, match=r"values from 0 to 1.* an example in which some logit"
        ):
            found(calibrated(give))


def test_several_tensors_that_no_layer_makes_are_refused():
    for make in (Net, calibrated):
        with pytest.raises(InputError, match="several tensors that may be its logits"):
            found(make(lambda h, a, b: (2 * a, 2 * b)))


@pytest.mark.parametrize("given", [None, ("a",), {"class": torch.ones(7).long()}])
def test_outputs_without_logits_are_refused(given):
    with pytest.raises(InputError, match=f"a {type(given).__name__} without logits: let it give"):
        found(Net(lambda h, a, b: given))


def test_a_single_row_will_do():
    assert found(calibrated(lambda h, a, b: b.softmax(1).squeeze(0)), ROWS[:1]) == PROBABILITIES
    assert found(calibrated(lambda h, a, b: b.squeeze()), ROWS[:1]) == LOGITS


def test_a_row_a_sample_is_asked_for():
    with pytest.raises(InputError, match=r"probabilities of shape \(7, 3, 2\): a classifier gives"):
        found(Net(lambda h, a, b: torch.stack([a, b], 2).softmax(1) / 2))


def test_a_calibrated_layer_that_is_not_called_is_refused():
    model = calibrated(lambda h, a, b: b)
    assert found(model) == LOGITS
    model.forward = lambda x: model.a(model.body(x))
    with pytest.raises(InputError, match="does not call its calibrated layer 'b'"):
        found(model)


@pytest.mark.parametrize(
    "give", [lambda h, a, b: {"logits": a, "b": b}, lambda h, a, b: 2 * a, lambda h, a, b: a]
)
def test_an_output_that_does_not_come_from_the_calibrated_layer_is_refused(give):
    assert found(Net(give)) == LOGITS
    with pytest.raises(InputError, match="do not come from its calibrated layer 'b'"):
        found(calibrated(give))


def test_one_position_out_of_those_a_head_scored():
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.score = parse("temperature").wrap(nn.Linear(2, 3))

        def forward(self, x):
            return self.score(x.reshape(-1, 3, 2))[:, 1]

    assert found(Last()) == LOGITS


def test_a_mapped_layer_alone_leaves_the_last_one_to_be_found():
    calibrator = parse("clip")
    calibrator.assign(threshold=torch.tensor(0.5))
    model = attach(Net(lambda h, a, b: (h, b.softmax(1))), calibrator, head="b", layer="body")
    assert found(model) == Output(1, "probabilities")


def test_an_inplace_change_of_the_output_is_no_proof():
    assert found(calibrated(lambda h, a, b: b.sigmoid_().neg_())) == LOGITS


def test_nothing_stays_behind(net):
    found(net.model, net.images)
    assert not any(module._forward_hooks for module in net.model.modules())


def test_chances_are_softmax_or_sigmoid():
    logits = torch.tensor([[0.0, 1.0], [2.0, -1.0]])
    assert torch.equal(chances(logits), logits.softmax(1))
    assert torch.equal(chances(logits[:, 1]), logits[:, 1].sigmoid())
    assert torch.equal(chances(logits[:, 1:]), logits[:, 1:].sigmoid())
    pixels = logits[..., None, None]
    assert torch.equal(chances(pixels), logits.softmax(1)[..., None, None])
    assert torch.equal(chances(pixels[:, 1:]), pixels[:, 1:].sigmoid())
    assert torch.equal(PROBABILITIES.chances(logits), logits)
