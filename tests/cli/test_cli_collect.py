"""featcal collect and featcal export: from a function that builds a network to files."""

import sys
import textwrap

import numpy as np
import pytest
import torch
from cli_cases import done, featcal, refused, tree
from nets import BUILD

from featcal import Pack, attach, load
from featcal.core.progress import listen


@pytest.fixture(scope="module", autouse=True)
def project(tmp_path_factory):
    """The current folder, with a module of networks, and a pack and a calibrator of one of them."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "my_nets.py").write_text(textwrap.dedent(BUILD))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", list(sys.path))
        said = done("collect", "my_nets:build", "-o", "pack").out
        assert "8 features, 3 classes, with the head" in said
        assert "Wrote pack: 240 rows" in said
        done("fit", "pack", "clip | temperature", "-o", "cal.safetensors")
        yield folder
    sys.modules.pop("my_nets", None)


def test_a_function_becomes_a_pack():
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


def test_a_mapping_says_more_and_options_say_the_last_word():
    found = done("collect", "my_nets:more", "-o", "more", "--json").json
    assert (found["dataset"], found["model"]) == ("made", "tiny")
    assert list(found["splits"]) == ["val"]
    assert found["resumed"] is False
    assert Pack.open("more").manifest.class_names == ("a", "b", "c")


def test_mixed_precision_and_inner_layers():
    done("collect", "my_nets:build", "-o", "half", "--autocast", "bfloat16")
    assert Pack.open("half").manifest.dtypes["features"] == "bfloat16"
    done("collect", "my_nets:build", "-o", "layer", "--layer", "2", "--shard-rows", "50")
    layer = Pack.open("layer")
    assert layer.manifest.meta == {"layer": "2"}
    assert "has no linear head" in refused("fit", "layer", "clip", "-o", "none.safetensors")
    assert len(layer.manifest.splits["val"]) == 3


def test_ctrl_c_says_what_is_kept_and_the_same_command_goes_on(project):
    done("collect", "my_nets:build", "-o", "whole", "--shard-rows", "16")
    command = ("collect", "my_nets:build", "-o", "cut", "--shard-rows", "16")

    def stop(_, rows, __):
        if rows > 40:
            raise KeyboardInterrupt

    with listen(stop):
        ran = featcal(*command)
    kept = "what is done is kept in cut.partial; give the same command to go on."
    assert (ran.code, ran.err) == (130, f"Interrupted: {kept}\n")
    assert done(*command, "--json").json["resumed"] is True
    assert tree(project / "cut") == tree(project / "whole")


@pytest.fixture(scope="module")
def exported():
    """Exports to a file, and returns what is said of it."""
    pytest.importorskip("onnxruntime")

    def export(source, *options, calibrator="cal.safetensors"):
        command = ("export", source, calibrator, "-o", "m.onnx", "--force", "--json")
        return done(*command, *options).json

    return export


def run(inputs):
    session = pytest.importorskip("onnxruntime").InferenceSession("m.onnx")
    return session.run(["logits"], {"input": inputs.numpy()})[0]


def test_the_whole_network_runs_in_onnx_runtime(exported):
    assert exported("my_nets:build", "--rows", "900")["parity"]["rows"] == 90
    found = exported("my_nets:build", "--rows", "70", "--tolerance", "0.5")
    assert found["parity"]["rows"] == 70
    assert found["inputs"] == {"input": "float32[batch, 3, 2, 2]"}
    import my_nets

    model, loaders = my_nets.build()
    inputs, _ = next(iter(loaders["val"]))
    expected = attach(model, load("cal.safetensors"), head="4").eval()(inputs)
    np.testing.assert_allclose(run(inputs), expected.detach().numpy(), atol=1e-5)
    command = ("export", "my_nets:build", "cal.safetensors", "-o", "m.onnx")
    assert "exists" in refused(*command)
    said = done(*command, "--force").out
    assert "in: input float32[batch, 3, 2, 2]" in said
    assert "logits differ by at most" in said


def test_the_function_may_say_which_sizes_are_free(exported):
    done("collect", "my_nets:words", "-o", "words")
    done("fit", "words", "temperature", "-o", "words.safetensors")
    made = exported("my_nets:words", calibrator="words.safetensors")
    assert made["inputs"] == {"input": "int64[batch, tokens]"}


def test_a_pack_gives_its_calibrated_last_layer(exported):
    made = exported("pack", "--test-split", "val", "--rows", "40", "--probabilities")
    assert made["inputs"] == {"features": "float32[batch, 8]"}
    assert list(made["outputs"]) == ["logits", "probabilities"]
    assert made["parity"]["rows"] == 40
    assert made["parity"]["holds"] is True


def test_batches_are_joined_up_to_one_of_another_length(exported):
    done("collect", "my_nets:texts", "-o", "texts")
    done("fit", "texts", "temperature", "-o", "texts.safetensors")
    found = exported("my_nets:texts", calibrator="texts.safetensors")
    assert found["parity"]["rows"] == 30
    assert found["inputs"] == {"ids": "int64[batch, 5]", "weights": "float32[batch, 5]"}


def test_a_pack_of_an_inner_layer_serves_calibrators_of_features_and_of_logits(exported):
    done("collect", "my_nets:inner", "-o", "inner")
    done("fit", "inner", "temperature", "-o", "late.safetensors")
    assert exported("my_nets:inner", calibrator="late.safetensors")["parity"]["holds"]
    import my_nets

    expected = attach(my_nets.net(), load("late.safetensors"), head="4").eval()
    inputs = torch.randn(5, 3, 2, 2)
    np.testing.assert_allclose(run(inputs), expected(inputs).detach().numpy(), atol=1e-5)
    assert exported("my_nets:inner")["parity"]["holds"]  # clip acts at the layer
