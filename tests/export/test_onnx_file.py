"""ONNX files: names, sizes, precision, what is written and what is refused."""

import copy
import json
import logging
from types import SimpleNamespace

import onnx
import pytest
import torch
from torch import nn

import featcal
from featcal import Batch, InputError, attach, export, parse
from featcal.export import onnx as onnx_file

ROWS = torch.randn(9, 4, generator=torch.Generator().manual_seed(2))


class One(nn.Module):
    """A sigmoid model: one logit a row, (n, 1) or (n,)."""

    def __init__(self, *, flat):
        super().__init__()
        self.fc = nn.Linear(4, 1)
        self.flat = flat

    def forward(self, x):
        return self.fc(x)[:, 0] if self.flat else self.fc(x)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.onnx"


def logits_of(model, *x):
    with torch.no_grad():
        return copy.deepcopy(model).eval()(*x)


@pytest.fixture(scope="module")
def exported(fitted_net, tmp_path_factory):
    """A calibrated network's file, written once for all that only read it."""
    path = tmp_path_factory.mktemp("exported") / "model.onnx"
    model, images = copy.deepcopy(fitted_net.model).train(), fitted_net.images
    done = export.onnx(model, path, images[:5], rows=images)
    return SimpleNamespace(model=model, images=images, path=path, done=done)


def test_a_calibrated_model_is_one_file_for_any_number_of_rows(exported, runtime):
    net, path, done = exported, exported.path, exported.done
    assert done.inputs == {"x": "float32[batch, 3, 8, 8]"}
    assert done.outputs == {"logits": "float32[batch, 3]"}
    assert list(path.parent.iterdir()) == [path]
    assert done.bytes == path.stat().st_size
    assert done.parity.rows == 40
    assert done.parity.predictions_changed == 0
    for rows in (1, 2, 40):
        found = runtime(path, x=net.images[:rows])["logits"]
        torch.testing.assert_close(
            found, logits_of(net.model, net.images[:rows]), rtol=0, atol=1e-5
        )


def test_what_is_said_for_people_and_for_programs(exported):
    done = exported.done
    start, _, rest = str(done).partition("; ")
    assert start.startswith(f"model.onnx: opset {done.opset}, ")
    assert start.endswith("KB")
    assert rest == str(done.parity)
    assert rest.startswith("40 rows in ONNX Runtime: logits differ by at most ")
    assert rest.endswith(", no prediction changed")
    record = json.loads(json.dumps(done.as_json(), allow_nan=False))
    assert record["path"] == str(exported.path)
    assert record["parity"]["holds"] is True
    assert record["widened"] is None


@pytest.mark.no_cover
def test_the_file_says_what_it_is_and_not_where_it_was_made(net, exported, path):
    said = {prop.key: prop.value for prop in onnx.load(exported.path).metadata_props}
    assert said["featcal.version"] == featcal.__version__
    assert said["featcal.recipe"] == "clip | temperature"
    assert "temperature=" in said["featcal.fitted"]
    assert b"conftest.py" not in exported.path.read_bytes()
    export.onnx(net.model, path, net.images[:5])  # elsewhere, by another copy: the same bytes
    assert path.read_bytes() == exported.path.read_bytes()


def test_a_model_without_calibrator_is_exported_too(path):
    export.onnx(nn.Linear(4, 3), path, ROWS)
    assert [prop.key for prop in onnx.load(path).metadata_props] == ["featcal.version"]


@pytest.mark.no_cover
def test_clip_is_one_plain_node(made, path):
    world = made(n=400, d=4, k=3, heat=1.6)
    batch = Batch(world.logits, world.labels, world.features)
    calibrator = parse("clip | temperature").fit(batch, world.head)
    assert not any(step.noop for step in calibrator.report.steps)
    export.onnx(calibrator.wrap(world.head), path, world.features[:2])
    assert [node.op_type for node in onnx.load(path).graph.node] == ["Clip", "Gemm", "Div"]


@pytest.mark.no_cover
def test_logits_in_and_logits_out(made, path, runtime):
    world = made(n=400, d=4, k=3, heat=1.6)
    head = parse("temperature").fit(Batch(world.logits, world.labels)).wrap()
    assert export.onnx(head, path, world.logits[:2]).inputs == {"logits_in": "float32[batch, 3]"}
    found = runtime(path, logits_in=world.logits)["logits"]
    torch.testing.assert_close(found, logits_of(head, world.logits))
    fresh = parse("temperature").wrap()  # the identity has no node to name
    export.onnx(fresh, path, world.logits[:2], probabilities=True, overwrite=True)


def test_an_input_called_logits_makes_room_for_the_output(path):
    class Again(nn.Module):
        def forward(self, logits):
            return logits * 2

    assert export.onnx(Again(), path, ROWS).inputs == {"logits_in": "float32[batch, 4]"}


@pytest.mark.no_cover
def test_probabilities_are_a_second_output(net, path, runtime):
    done = export.onnx(net.model, path, net.images[:3], probabilities=True)
    assert list(done.outputs) == ["logits", "probabilities"]
    found = runtime(path, x=net.images)
    torch.testing.assert_close(found["probabilities"], found["logits"].softmax(1))


@pytest.mark.no_cover
@pytest.mark.parametrize("flat", [True, False])
def test_a_single_logit_has_a_sigmoid_and_keeps_its_shape(flat, tmp_path, runtime):
    path = tmp_path / "model.onnx"
    model = One(flat=flat)
    logits = torch.linspace(-2, 2, 9)
    calibrator = parse("temperature").fit(Batch(logits, (logits > 0.6).long()))
    calibrated = attach(model, calibrator, head="fc")
    export.onnx(calibrated, path, ROWS[:3], probabilities=True)
    found = runtime(path, x=ROWS)
    assert found["logits"].shape == ((9,) if flat else (9, 1))
    torch.testing.assert_close(found["logits"], logits_of(calibrated, ROWS))
    torch.testing.assert_close(found["probabilities"], found["logits"].sigmoid())


@pytest.mark.parametrize(
    ("classes", "link"), [(3, nn.Softmax(1)), (1, nn.Sigmoid())], ids=["softmax", "sigmoid"]
)
def test_a_model_that_ends_in_probabilities_gives_them_once(classes, link, path, runtime):
    model = nn.Sequential(nn.Linear(4, classes), link)
    calibrator = parse("temperature")
    calibrator.assign(temperature=torch.tensor(2.0))
    calibrated = attach(model, calibrator, head="0")
    done = export.onnx(calibrated, path, ROWS[:3], rows=ROWS, probabilities=True)
    assert done.outputs == {"probabilities": f"float32[batch, {classes}]"}
    assert done.parity.output == "probabilities"
    expected = link(model[0](ROWS) / 2).detach()
    torch.testing.assert_close(runtime(path, input=ROWS)["probabilities"], expected)
    assert "probabilities differ by at most" in str(done)


@pytest.mark.no_cover
def test_log_probabilities_are_logits(path, runtime):
    model = nn.Sequential(nn.Linear(4, 3), nn.LogSoftmax(1))
    assert list(export.onnx(model, path, ROWS, probabilities=True).outputs) == [
        "logits",
        "probabilities",
    ]
    found = runtime(path, input=ROWS)
    torch.testing.assert_close(found["logits"], logits_of(model, ROWS))
    torch.testing.assert_close(found["probabilities"], model[0](ROWS).softmax(1).detach())


@pytest.mark.no_cover
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_of_16_bits_is_exported_in_32(net, dtype, path, runtime):
    model = net.model.to(dtype)
    done = export.onnx(model, path, net.images[:2].to(dtype))
    assert done.inputs == {"x": "float32[batch, 3, 8, 8]"}
    name = str(dtype).removeprefix("torch.")
    assert done.as_json()["widened"] == name
    assert f" in float32 (the model is {name}); " in str(done)
    assert model.conv.weight.dtype == dtype
    found = runtime(path, x=net.images.to(dtype).float())["logits"]
    torch.testing.assert_close(
        found, logits_of(copy.deepcopy(model).float(), net.images.to(dtype).float())
    )
    assert (found - logits_of(model, net.images.to(dtype))).abs().max() < 0.05


@pytest.mark.no_cover
def test_a_model_of_64_bits_stays_so(path):
    model = nn.Linear(4, 3).double()
    assert export.onnx(model, path, ROWS.double()).inputs == {"input": "float64[batch, 4]"}


def test_tied_weights_stay_tied_in_the_copy():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).half()
    model[1].weight = model[0].weight
    copied = onnx_file._portable(model)
    assert copied[0].weight is copied[1].weight
    assert copied[0].weight.dtype == torch.float32
    assert onnx_file._portable(copied) is copied


@pytest.mark.no_cover
def test_the_model_and_the_random_state_stay_as_they_were(net, path, capfd, caplog):
    model = net.model
    model.norm.eval()
    model.conv.weight.grad = torch.ones_like(model.conv.weight)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    flags, state = [module.training for module in model.modules()], torch.get_rng_state()
    with caplog.at_level(logging.WARNING):
        export.onnx(model, path, net.images[:2], probabilities=True)
    assert [module.training for module in model.modules()] == flags
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(model.conv.weight.grad, torch.ones_like(model.conv.weight))
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []


class Text(nn.Module):
    """Self-attention over tokens, some of them masked; gives an object, as Hugging Face's do."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.1, batch_first=True)
        self.classifier = nn.Linear(16, 3)

    def forward(self, input_ids, attention_mask=None, labels=None):
        hidden = self.layer(self.words(input_ids), src_key_padding_mask=attention_mask == 0)
        return SimpleNamespace(loss=labels, logits=self.classifier(hidden[:, 0]))


@pytest.mark.no_cover
def test_inputs_by_name_in_any_order_and_any_number_of_tokens(path, runtime):
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
    assert model.training


@pytest.mark.no_cover
def test_a_tensor_clamped_twice_keeps_both_pairs_of_bounds(path, runtime):
    """The optimiser's own defect: see `onnx_graph._keep_constants`."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("low", torch.tensor(0.3))
            self.register_buffer("high", torch.tensor(1.5))

        def forward(self, x):
            return x.clamp(-self.low, self.low) * x.clamp(-self.high, self.high) - 1

    export.onnx(Twice(), path, ROWS[:2])
    torch.testing.assert_close(runtime(path, x=ROWS)["logits"], Twice()(ROWS))


def test_no_axis_may_be_free(path, runtime):
    assert export.onnx(nn.Linear(4, 3), path, ROWS, dynamic={}).inputs == {"input": "float32[9, 4]"}


@pytest.mark.no_cover
@pytest.mark.parametrize("opset", [18, 21])
def test_the_opset_may_be_chosen(opset, path):
    assert export.onnx(nn.Linear(4, 3), path, ROWS, opset=opset).opset == opset
    assert onnx.load(path).opset_import[0].version == opset


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
    export.onnx(model, path, ROWS, overwrite=True)
