"""torch.export programs: logits alone, any number of rows, the model as it was."""

import logging
import random
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from featcal import InputError, export
from featcal.export.onnx import quiet

IMAGES = torch.randn(9, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def logits_of(model, x):
    with torch.no_grad():
        return model.eval()(x)


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch.export.load's own
def test_a_program_gives_the_models_logits_for_any_number_of_rows(net, tmp_path):
    for example in (net.images[:1], net.images[:5]):
        program = export.program(net.model, example)
        torch.export.save(program, tmp_path / "p.pt2")
        again = torch.export.load(tmp_path / "p.pt2").module()
        for rows in (1, 2, 9):
            expected = logits_of(net.model, IMAGES[:rows])
            for found in (program.module()(IMAGES[:rows]), again(IMAGES[:rows])):
                torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_program_keeps_the_precision_of_the_model(net, dtype):
    model, images = net.model.to(dtype), IMAGES.to(dtype)
    program = export.program(model, images)
    torch.testing.assert_close(program.module()(images), logits_of(model, images))
    assert program.module()(images).dtype == (
        torch.float64 if dtype == torch.float64 else torch.float32
    )


class Wrapped(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.form = form
        self.fc = nn.Linear(3, 2)

    def forward(self, left, right):
        return self.form(self.fc(left * right.sum(1, keepdim=True)), left)


FORMS = {
    "object": lambda z, x: SimpleNamespace(logits=z, hidden=x),
    "dict": lambda z, x: {"hidden": x, "logits": z},
    "tuple": lambda z, x: (None, z, x),
    "last": lambda z, x: [x, z],
    "lone": lambda z, x: {"scores": z},
}


@pytest.mark.parametrize("form", FORMS)
def test_logits_are_picked_out_of_what_a_model_gives(form):
    model, x = Wrapped(FORMS[form]), torch.randn(4, 3)
    expected = model.fc(x * x.sum(1, keepdim=True)).detach()
    torch.testing.assert_close(export.program(model, (x, x)).module()(x, x), expected)
    named = export.program(model, {"right": x, "left": x}).module()
    torch.testing.assert_close(named(right=x, left=x), expected)


def test_named_axes_may_have_any_size():
    class Tokens(nn.Module):
        def forward(self, ids):
            return torch.nn.functional.one_hot(ids, 5).float().mean(1)

    ids = torch.arange(12).view(3, 4) % 5
    program = export.program(Tokens(), ids, dynamic={"ids": {0: "batch", 1: "tokens"}})
    other = torch.arange(14).view(2, 7) % 5
    torch.testing.assert_close(program.module()(other), Tokens()(other))
    fixed = export.program(Tokens(), ids, dynamic={})
    with pytest.raises(Exception, match=r"3|size"):
        fixed.module()(other)


def test_the_model_stays_as_it_was(net):
    model = net.model
    model.drop.eval()  # a flag that differs from its parent's must survive too
    model.conv.weight.grad = torch.ones_like(model.conv.weight)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    flags = [module.training for module in model.modules()]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    export.program(model, net.images[:2])
    assert [module.training for module in model.modules()] == flags
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(model.conv.weight.grad, torch.ones_like(model.conv.weight))
    assert all(weight.requires_grad for weight in model.parameters())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2])


def test_an_example_that_asks_for_gradients_will_do(net):
    export.program(net.model, net.images[:2].clone().requires_grad_())


def test_autocast_around_the_call_does_not_enter_the_program(net):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        program = export.program(net.model, net.images[:2])
    torch.testing.assert_close(program.module()(IMAGES), logits_of(net.model, IMAGES))


class Branch(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


class Frozen(nn.Module):
    def forward(self, x):
        return x.reshape(3, 4)


@pytest.mark.parametrize("model", [Branch(), Frozen()])
def test_a_model_that_cannot_be_followed_is_refused_in_one_sentence(model, capfd):
    with pytest.raises(
        InputError, match=r"torch\.export cannot follow the model.*torch says"
    ) as told:
        export.program(model, 2 * torch.ones(3, 4))
    assert len(str(told.value)) < 600
    assert capfd.readouterr() == ("", "")


def test_quiet_is_over_afterwards(caplog):
    with quiet():
        logging.getLogger("featcal.test").error("not heard")
        warnings.warn("not heard", stacklevel=1)
    logging.getLogger("featcal.test").error("heard")
    assert [record.message for record in caplog.records] == ["heard"]
    with pytest.warns(UserWarning, match="heard"):
        warnings.warn("heard", stacklevel=1)
