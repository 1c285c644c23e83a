"""featcal collect and featcal export: from a function that builds a network to files."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from cli_cases import done, featcal, refused, tree

from featcal import Pack, attach, load

BUILD = """
import time, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def net():
    generator = torch.Generator().manual_seed(0)
    inner = nn.Linear(12, 8), nn.ReLU(), nn.Dropout(0.1)
    model = nn.Sequential(nn.Flatten(), *inner, nn.Linear(8, 3))
    for weight in model.parameters():
        weight.data = 2 * torch.randn(weight.shape, generator=generator)
    return model

def loader(n, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(n, 3, 2, 2, generator=generator)
    labels = torch.randint(0, 3, (n,), generator=generator)
    return DataLoader(TensorDataset(inputs, labels), batch_size=16)

def build():
    return net(), {"val": loader(150, 1), "test": loader(90, 2)}

def more():
    return {"model": net(), "loaders": loader(150, 1), "class_names": ["a", "b", "c"],
            "dataset": "made", "name": "tiny", "head": "4"}

def inner():
    return {"model": net(), "loaders": {"val": loader(150, 1)}, "layer": "2"}

class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.fc = nn.EmbeddingBag(20, 8), nn.Linear(8, 3)

    def forward(self, ids, weights):
        return self.fc(self.words(ids, per_sample_weights=weights))

def texts():
    sizes = [5, 5, 5, 7, 5]  # of the tokens; a batch of 10 each
    batches = [{"ids": torch.arange(10 * t).view(10, t) % 20, "weights": torch.ones(10, t),
                "labels": torch.arange(10) % 3} for t in sizes]
    torch.manual_seed(0)
    model = Bag()
    model.words.mode = "sum"
    return model, batches

def slow():
    model, loaders = build()
    model.register_forward_pre_hook(lambda *_: print("batch", flush=True) or time.sleep(0.2))
    return model, loaders

def words():
    model = nn.Sequential(nn.Embedding(9, 8), Mean(), nn.Linear(8, 3))
    return {"model": model, "loaders": [(torch.arange(20).reshape(4, 5) % 9, torch.arange(4) % 3)],
            "dynamic": {"input": {0: "batch", 1: "tokens"}}}

class Mean(nn.Module):
    def forward(self, x):
        return x.mean(1)

def nothing():
    return None

def unknown():
    return {"model": net(), "loaders": loader(5, 1), "classes": 3}

def broken():
    raise RuntimeError("the disk with the weights is away")

value = 3
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a module, which is the current one; the module is forgotten afterwards."""
    (tmp_path / "my_nets.py").write_text(textwrap.dedent(BUILD))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("my_nets", None)


def test_a_function_becomes_a_pack(project):
    said = done("collect", "my_nets:build", "-o", "pack")
    assert "8 features, 3 classes, with the head" in said.out
    assert "Wrote pack: 240 rows" in said.out
    pack = Pack.open("pack")
    assert pack.splits == ("val", "test")
    assert pack.manifest.model == "Sequential"
    import my_nets

    model, loaders = my_nets.build()
    inputs, labels = next(iter(loaders["test"]))
    batch = next(iter(pack.split("test")))
    model.eval()
    torch.testing.assert_close(pack.head(batch.features[:16]), model(inputs))
    assert torch.equal(batch.labels[:16], labels)


def test_a_mapping_says_more_and_options_say_the_last_word(project):
    found = done("collect", "my_nets:more", "-o", "pack", "--json").json
    assert (found["dataset"], found["model"]) == ("made", "tiny")
    assert list(found["splits"]) == ["val"]
    assert found["resumed"] is False
    assert Pack.open("pack").manifest.class_names == ("a", "b", "c")
    assert "'4'" in refused("collect", "my_nets:more", "-o", "other", "--head", "1")


def test_mixed_precision_and_inner_layers(project):
    done("collect", "my_nets:build", "-o", "half", "--autocast", "bfloat16")
    assert Pack.open("half").manifest.dtypes["features"] == "bfloat16"
    done("collect", "my_nets:build", "-o", "inner", "--layer", "2", "--shard-rows", "50")
    inner = Pack.open("inner")
    assert inner.manifest.meta == {"layer": "2"}
    assert "has no linear head" in refused("fit", "inner", "clip", "-o", "cal.safetensors")
    done("fit", "inner", "temperature", "-o", "cal.safetensors")
    assert len(inner.manifest.splits["val"]) == 3


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("my_nets", ["is not package.module:function", "my_project.models:build"]),
        ("my_nets.py:build", ["there is no module 'my_nets.py'", "my_nets:function"]),
        ("other_nets:build", ["there is no module 'other_nets'", "in the folder that holds it"]),
        ("my_nets:bild", ["no function 'bild'", "build"]),
        ("my_nets:value", ["no function 'value'"]),
        ("my_nets:nothing", ["returned NoneType", "return (model, {'val': loader"]),
        ("my_nets:net", ["returned Sequential"]),
        ("my_nets:unknown", ["returned 'classes'", "class_names"]),
    ],
)
def test_what_is_no_such_function_is_refused(project, target, words):
    said = refused("collect", target, "-o", "pack")
    assert all(word in said for word in words), said
    assert not (project / "pack").exists()


def test_an_error_inside_the_function_keeps_its_traceback(project):
    with pytest.raises(RuntimeError, match="the disk with the weights is away"):
        featcal("collect", "my_nets:broken", "-o", "pack")


def test_a_device_that_is_not_here_is_one_sentence(project):
    assert "--device" in refused("collect", "my_nets:build", "-o", "pack", "--device", "cuda:99")
    assert "--device" in refused("collect", "my_nets:build", "-o", "pack", "--device", "toaster")
    done("collect", "my_nets:build", "-o", "pack", "--device", "cpu")


def test_an_existing_folder_is_refused_before_the_model_is_built(project):
    (project / "pack").mkdir()
    assert "exists" in refused("collect", "my_nets:broken", "-o", "pack")


def test_ctrl_c_says_what_is_kept_and_the_same_command_goes_on(project):
    done("collect", "my_nets:build", "-o", "whole", "--shard-rows", "16")
    command = [sys.executable, "-m", "featcal", "collect", "my_nets:slow", "-o", "pack"]
    command += ["--shard-rows", "16"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ}
    ) as process:
        for _ in range(5):
            assert process.stdout.readline() == "batch\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (
        err
        == "Interrupted: what is done is kept in pack.partial; give the same command to go on.\n"
    )
    found = done("collect", "my_nets:build", "-o", "pack", "--shard-rows", "16", "--json").json
    assert found["resumed"] is True
    assert tree(project / "pack") == tree(project / "whole")


@pytest.fixture(scope="module")
def made_once(tmp_path_factory):
    """A pack and a calibrator of the network, for copies."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "my_nets.py").write_text(textwrap.dedent(BUILD))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", list(sys.path))
        done("collect", "my_nets:build", "-o", "pack")
        done("fit", "pack", "clip | temperature", "-o", "cal.safetensors")
    sys.modules.pop("my_nets", None)
    return folder


@pytest.fixture
def fitted(made_once, project):
    """The folder of the module with a pack and a calibrator of its network."""
    shutil.copytree(made_once / "pack", project / "pack")
    shutil.copy(made_once / "cal.safetensors", project)
    return project


def test_the_whole_network_runs_in_onnx_runtime(fitted):
    runtime = pytest.importorskip("onnxruntime")
    said = done("export", "my_nets:build", "cal.safetensors", "--onnx", "model.onnx").out
    assert "in: input float32[batch, 3, 2, 2]" in said
    assert "logits differ by at most" in said
    import my_nets

    model, loaders = my_nets.build()
    inputs, _ = next(iter(loaders["val"]))
    expected = attach(model, load("cal.safetensors"), head="4").eval()(inputs)
    session = runtime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(["logits"], {"input": inputs.numpy()})
    np.testing.assert_allclose(found, expected.detach().numpy(), atol=1e-5)
    assert "exists" in refused("export", "my_nets:build", "cal.safetensors", "--onnx", "model.onnx")


def test_the_function_may_say_which_sizes_are_free(fitted):
    pytest.importorskip("onnxruntime")
    done("collect", "my_nets:words", "-o", "words")
    done("fit", "words", "temperature", "-o", "words.safetensors")
    made = done(
        "export", "my_nets:words", "words.safetensors", "--onnx", "words.onnx", "--json"
    ).json
    assert made["inputs"] == {"input": "int64[batch, tokens]"}


def test_a_pack_gives_its_calibrated_last_layer(fitted):
    pytest.importorskip("onnxruntime")
    made = done(
        *("export", "pack", "cal.safetensors", "--onnx", "head.onnx", "--split", "val"),
        *("--rows", "40", "--probabilities", "--json"),
    ).json
    assert made["inputs"] == {"features": "float32[batch, 8]"}
    assert list(made["outputs"]) == ["logits", "probabilities"]
    assert made["parity"]["rows"] == 40
    assert made["parity"]["holds"] is True


@pytest.mark.no_cover  # four exports
def test_as_many_rows_are_compared_as_were_asked_for(fitted):
    pytest.importorskip("onnxruntime")
    assert exported("my_nets:build", "--rows", "70")["parity"]["rows"] == 70
    assert exported("my_nets:build", "--rows", "1")["parity"]["rows"] == 1
    assert exported("my_nets:build", "--rows", "900")["parity"]["rows"] == 90
    assert exported("pack", "--split", "val", "--rows", "120")["parity"]["rows"] == 120


def exported(source, *options, calibrator="cal.safetensors"):
    command = ("export", source, calibrator, "--onnx", "m.onnx", "--force", "--json")
    return done(*command, *options).json


def test_batches_are_joined_up_to_one_of_another_length(project):
    pytest.importorskip("onnxruntime")
    done("collect", "my_nets:texts", "-o", "pack")
    done("fit", "pack", "temperature", "-o", "cal.safetensors")
    found = exported("my_nets:texts")
    assert found["parity"]["rows"] == 30
    assert found["inputs"] == {"ids": "int64[batch, 5]", "weights": "float32[batch, 5]"}


def test_a_pack_of_an_inner_layer_serves_calibrators_of_features_and_of_logits(fitted):
    pytest.importorskip("onnxruntime")
    done("collect", "my_nets:inner", "-o", "inner")
    done("fit", "inner", "temperature", "-o", "late.safetensors")
    assert exported("my_nets:inner", calibrator="late.safetensors")["parity"]["holds"]
    import my_nets

    found = attach(my_nets.net(), load("late.safetensors"), head="4").eval()
    session = pytest.importorskip("onnxruntime").InferenceSession("m.onnx")
    inputs = torch.randn(5, 3, 2, 2)
    (logits,) = session.run(["logits"], {"input": inputs.numpy()})
    np.testing.assert_allclose(logits, found(inputs).detach().numpy(), atol=1e-5)
    early = exported("my_nets:inner", calibrator="cal.safetensors")  # clip acts at the layer
    assert early["parity"]["holds"]


def test_the_tolerance_may_be_chosen(fitted):
    pytest.importorskip("onnxruntime")
    assert exported("pack", "--tolerance", "0.5")["parity"]["tolerance"] == 0.5


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("nowhere", "cal.safetensors"), ["neither a folder nor package.module:function"]),
        (("pack", "none.safetensors"), ["none.safetensors does not exist"]),
        (("pack", "cal.safetensors", "--split", "train"), ["no split 'train'", "val, test"]),
        (("pack", "cal.safetensors", "--head", "fc"), ["--head"]),
        (("my_nets:build", "cal.safetensors", "--split", "train"), ["no loader 'train'"]),
        (("my_nets:build", "cal.safetensors", "--head", "1"), ["'1'", "is not the model's output"]),
    ],
)
def test_export_refuses_in_one_sentence(fitted, args, words):
    said = refused("export", *args, "--onnx", "out.onnx")
    assert all(word in said for word in words), said
    assert not (fitted / "out.onnx").exists()
