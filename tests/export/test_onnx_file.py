"""Programs and ONNX files: names, sizes, precision, what is written and what is refused."""

import copy
import json
import random
import sys
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import featcal
from featcal import Batch, InputError, attach, export, parse
from featcal.export import onnx_file
from featcal.export.inputs import Inputs

ROWS = torch.randn(9, 4, generator=torch.Generator().manual_seed(2))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.onnx"


def logits_of(model, *x):
    with torch.no_grad():
        return copy.deepcopy(model).eval()(*x)


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch.export.load's own
def test_a_program_gives_the_models_logits_for_any_number_of_rows(net, tmp_path):
    with torch.autocast("cpu", dtype=torch.bfloat16):  # which does not enter the program
        program = export.program(net.model, net.images[:1].clone().requires_grad_())
    torch.export.save(program, tmp_path / "p.pt2")
    again = torch.export.load(tmp_path / "p.pt2").module()
    for rows in (1, 9):
        expected = logits_of(net.model, net.images[:rows])
        for found in (program.module()(net.images[:rows]), again(net.images[:rows])):
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_a_program_keeps_the_precision_of_the_model(net, dtype):
    model, images = net.model.to(dtype), net.images.to(dtype)
    found = export.program(model, images).module()(images)
    torch.testing.assert_close(found, logits_of(model, images))
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_named_axes_may_have_any_size():
    class Tokens(nn.Module):
        def forward(self, ids):
            return torch.nn.functional.one_hot(ids, 5).float().mean(1)

    ids, other = torch.arange(12).view(3, 4) % 5, torch.arange(14).view(2, 7) % 5
    program = export.program(Tokens(), ids, dynamic={"ids": {0: "batch", 1: "tokens"}})
    torch.testing.assert_close(program.module()(other), Tokens()(other))


class Branch(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


def test_a_model_that_cannot_be_followed_is_refused_in_one_sentence(capfd):
    with pytest.raises(InputError, match=r"torch\.export cannot follow .*torch says") as told:
        export.program(Branch(), 2 * torch.ones(3, 4))
    assert len(str(told.value)) < 600
    assert capfd.readouterr() == ("", "")


@pytest.fixture(scope="module")
def exported(fitted_net, tmp_path_factory):
    """A calibrated network's file, written once; what the call did to the model and around it."""
    path = tmp_path_factory.mktemp("exported") / "model.onnx"
    model, images = copy.deepcopy(fitted_net.model).train(), fitted_net.images
    model.norm.eval()  # a flag that differs from its parent's must survive too
    model.conv.weight.grad = torch.ones_like(model.conv.weight)

    def state():
        flags = [(m.training, len(m._forward_pre_hooks)) for m in model.modules()]
        weights = [v.tolist() for v in (*model.state_dict().values(), model.conv.weight.grad)]
        drawn = torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()
        return repr((flags, weights, drawn))

    before = state()
    done = export.onnx(model, path, images[:5], rows=images, probabilities=True)
    same = state() == before
    return SimpleNamespace(model=model, images=images, path=path, done=done, same=same)


def test_a_calibrated_model_is_one_file_for_any_number_of_rows(exported, runtime):
    done, path = exported.done, exported.path
    assert exported.same  # the model, its gradients and every generator
    assert done.inputs == {"x": "float32[batch, 3, 8, 8]"}
    assert done.outputs == dict.fromkeys(["logits", "probabilities"], "float32[batch, 3]")
    assert list(path.parent.iterdir()) == [path]
    assert done.bytes == path.stat().st_size
    assert (done.parity.rows, done.parity.predictions_changed) == (40, 0)
    for rows in (1, 2, 40):
        found = runtime(path, x=exported.images[:rows])
        expected = logits_of(exported.model, exported.images[:rows])
        torch.testing.assert_close(found["logits"], expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(found["probabilities"], found["logits"].softmax(1))


def test_what_is_said_for_people_and_for_programs(exported):
    done = exported.done
    start, _, rest = str(done).partition("; ")
    assert start.startswith(f"model.onnx: opset {done.opset}, ")
    assert start.endswith("KB")
    assert rest == str(done.parity)
    record = json.loads(json.dumps(done.as_json(), allow_nan=False))
    assert record["path"] == str(exported.path)
    assert record["parity"]["holds"] is True
    assert record["widened"] is None
    said = {prop.key: prop.value for prop in onnx.load(exported.path).metadata_props}
    assert said["featcal.version"] == featcal.__version__
    assert said["featcal.recipe"] == "clip | temperature"
    assert "temperature=" in said["featcal.fitted"]
    assert b"conftest.py" not in exported.path.read_bytes()  # nor any path of this machine


@pytest.mark.no_cover
def test_clip_is_one_plain_node_and_logits_may_come_in(made, path, runtime):
    world = made(n=200, d=4, k=3, heat=1.6)
    batch = Batch(world.logits, world.labels, world.features)
    calibrator = parse("clip | temperature").fit(batch, world.head)
    export.onnx(calibrator.wrap(world.head), path, world.features[:2])
    assert [node.op_type for node in onnx.load(path).graph.node] == ["Clip", "Gemm", "Div"]
    head = parse("temperature").fit(Batch(world.logits, world.labels)).wrap()
    other = path.with_name("logits.onnx")
    assert export.onnx(head, other, world.logits[:2]).inputs == {"logits_in": "float32[batch, 3]"}
    found = runtime(other, logits_in=world.logits)["logits"]
    torch.testing.assert_close(found, logits_of(head, world.logits))
    fresh = parse("temperature").wrap()  # the identity has no node to name
    export.onnx(fresh, path, world.logits[:2], overwrite=True)


@pytest.mark.no_cover
def test_a_single_logit_has_a_sigmoid_and_keeps_its_shape(path, runtime):
    class One(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 1)

        def forward(self, x):
            return self.fc(x)[:, 0]

    calibrator = parse("temperature").assign(temperature=torch.tensor(2.0))
    calibrated = attach(One(), calibrator, head="fc")
    export.onnx(calibrated, path, ROWS[:3], probabilities=True)
    found = runtime(path, x=ROWS)
    assert found["logits"].shape == (9,)
    torch.testing.assert_close(found["logits"], logits_of(calibrated, ROWS))
    torch.testing.assert_close(found["probabilities"], found["logits"].sigmoid())


def test_a_model_that_ends_in_probabilities_gives_them_once(path, runtime):
    model = nn.Sequential(nn.Linear(4, 3), nn.Softmax(1))
    calibrated = attach(model, parse("temperature").assign(temperature=torch.tensor(2.0)), head="0")
    done = export.onnx(calibrated, path, ROWS[:3], rows=ROWS, probabilities=True)
    assert done.outputs == {"probabilities": "float32[batch, 3]"}
    assert "probabilities differ by at most" in str(done)
    expected = (model[0](ROWS) / 2).softmax(1).detach()
    torch.testing.assert_close(runtime(path, input=ROWS)["probabilities"], expected)


@pytest.mark.no_cover
def test_a_model_of_16_bits_is_exported_in_32(net, path, runtime):
    model, images = net.model.bfloat16(), net.images.bfloat16()
    done = export.onnx(model, path, images[:2])
    assert done.inputs == {"x": "float32[batch, 3, 8, 8]"}
    assert done.as_json()["widened"] == "bfloat16"
    assert " in float32 (the model is bfloat16); " in str(done)
    assert model.conv.weight.dtype == torch.bfloat16
    found = runtime(path, x=images.float())["logits"]
    torch.testing.assert_close(found, logits_of(copy.deepcopy(model).float(), images.float()))


def test_tied_weights_stay_tied_in_the_copy():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).half()
    model[1].weight = model[0].weight
    copied = onnx_file._portable(model)
    assert copied[0].weight is copied[1].weight
    assert copied[0].weight.dtype == torch.float32
    assert onnx_file._portable(copied) is copied


@pytest.mark.no_cover
def test_inputs_by_name_in_any_order_and_any_number_of_tokens(path, runtime):
    class Text(nn.Module):
        """Self-attention over tokens, some of them masked; gives an object, as Hugging Face's."""

        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(50, 16)
            self.layer = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.1, batch_first=True)
            self.classifier = nn.Linear(16, 3)

        def forward(self, input_ids, attention_mask=None, labels=None):
            hidden = self.layer(self.words(input_ids), src_key_padding_mask=attention_mask == 0)
            return SimpleNamespace(loss=labels, logits=self.classifier(hidden[:, 0]))

    model = Text()
    ids = torch.randint(50, (4, 10), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(4, 10).long()
    mask[1, 6:] = 0
    example = {"attention_mask": mask, "input_ids": ids}
    free = {name: {0: "batch", 1: "tokens"} for name in example}
    done = export.onnx(model, path, example, dynamic=free)
    assert done.inputs == dict.fromkeys(example, "int64[batch, tokens]")
    shorter = {"attention_mask": mask[:3, :7], "input_ids": ids[:3, :7]}
    with torch.no_grad():
        expected = copy.deepcopy(model).eval()(**shorter).logits
    found = runtime(path, **shorter)["logits"]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_options_of_a_plain_model(path):
    done = export.onnx(nn.Linear(4, 3).double(), path, ROWS.double(), dynamic={}, opset=21)
    assert (done.inputs, done.opset) == ({"input": "float64[9, 4]"}, 21)
    assert [prop.key for prop in onnx.load(path).metadata_props] == ["featcal.version"]


def test_weights_too_many_for_one_file_lie_beside_it(path, monkeypatch, runtime):
    monkeypatch.setattr(onnx_file, "ONE_FILE", 1000)
    model = nn.Linear(4, 300)
    done = export.onnx(model, path, ROWS)
    weights = path.with_name("model.onnx.data")
    assert sorted(path.parent.iterdir()) == [path, weights]
    assert done.bytes == path.stat().st_size + weights.stat().st_size
    torch.testing.assert_close(runtime(path, input=ROWS)["logits"], logits_of(model, ROWS))
    path.unlink()
    with pytest.raises(InputError, match=r"model\.onnx\.data exists"):
        export.onnx(model, path, ROWS)
    assert not path.exists()


class Noise(nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x)


class Nothing(nn.Module):
    def forward(self, x):
        return x * torch.nan


class Unknown(nn.Module):
    def forward(self, x):
        return torch.linalg.eigvals(x[:, :, None] * x[:, None]).real


@pytest.mark.parametrize(
    ("model", "options", "text"),
    [
        (Noise(), {}, r"differ from the model's by up to \d.*than 0.0001: not kept"),
        (nn.Linear(4, 3), {"tolerance": -1}, "tolerance is -1"),
        (Nothing(), {}, "the model gives NaN"),
        (Unknown(), {}, "the model has no form in ONNX"),
        (nn.Linear(4, 3), {"opset": 9}, r"opset 9 cannot express the model: take \d+"),
        (nn.Linear(4, 3), {"opset": "20"}, "opset is '20'"),
        (nn.Linear(4, 3), {"probabilities": 1}, "probabilities is 1"),
        (nn.Linear(4, 3), {"rows": ROWS[:, :2]}, "give rows of the same kind"),
        (nn.Linear(5, 3), {}, "does not take the example"),
    ],
)
def test_what_cannot_be_exported_leaves_no_file(model, options, text, path):
    with pytest.raises(InputError, match=text):
        export.onnx(model, path, ROWS, **options)
    assert list(path.parent.iterdir()) == []


def test_a_file_is_not_replaced_unless_asked_and_survives_a_refusal(path, monkeypatch):
    path.write_text("mine")
    with pytest.raises(InputError, match="exists: choose another name"):
        export.onnx(nn.Linear(4, 3), path, ROWS)
    with pytest.raises(InputError, match="not kept"):
        export.onnx(Noise(), path, ROWS, overwrite=True)
    assert path.read_text() == "mine"
    with pytest.raises(InputError, match="ONNX Runtime cannot load the model"):
        onnx_file.runner(path)
    export.onnx(nn.Linear(4, 3), path, ROWS, overwrite=True)
    wrong = Inputs.of(nn.Linear(5, 3), torch.ones(2, 5))
    with pytest.raises(InputError, match=r"cannot run the file on inputs of \(2, 5\)"):
        onnx_file.runner(path)(wrong)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(InputError, match=r"needs onnxscript: pip install 'featcal\[onnx\]'"):
        export.onnx(nn.Linear(4, 3), path, ROWS)
