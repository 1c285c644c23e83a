"""What is refused leaves no file, and says why in a sentence."""

import sys

import pytest
import torch
from torch import nn

from featcal import InputError, export
from featcal.export import onnx as onnx_file

ROWS = torch.randn(9, 4, generator=torch.Generator().manual_seed(2))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.onnx"


class Noise(nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x)


class Nothing(nn.Module):
    def forward(self, x):
        return x * torch.nan


class Pixels(nn.Module):
    def forward(self, x):
        return x[:, :, None].expand(-1, -1, 3)


class Unknown(nn.Module):
    def forward(self, x):
        return torch.linalg.eigvals(x[:, :, None] * x[:, None]).real


@pytest.mark.parametrize(
    ("model", "options", "text"),
    [
        (
            Noise(),
            {},
            r"differ from the model's by up to \d.*of 0.0001: .*larger tolerance= allows",
        ),
        (nn.Linear(4, 3), {"tolerance": -1}, "tolerance is -1: give a number from 0 up"),
        (Nothing(), {}, "the model gives NaN"),
        (Pixels(), {}, r"logits of shape \(9, 4, 3\)"),
        (Unknown(), {}, "the model has no form in ONNX"),
        (nn.Linear(4, 3), {"opset": 9}, r"opset 9 cannot express the model: take \d+"),
        (nn.Linear(4, 3), {"opset": "20"}, "opset is '20': give a whole number"),
        (nn.Linear(4, 3), {"probabilities": 1}, "probabilities is 1: give True or False"),
        (nn.Linear(4, 3), {"rows": ROWS[:, :2]}, "give rows of the same kind"),
        (nn.Linear(5, 3), {}, "does not take the example"),
    ],
)
def test_what_cannot_be_exported_leaves_no_file(model, options, text, path):
    with pytest.raises(InputError, match=text):
        export.onnx(model, path, ROWS, **options)
    assert list(path.parent.iterdir()) == []


def test_a_file_is_not_replaced_unless_asked_and_survives_a_refusal(path):
    path.write_text("mine")
    with pytest.raises(InputError, match="exists: choose another name"):
        export.onnx(nn.Linear(4, 3), path, ROWS)
    with pytest.raises(InputError, match="not kept"):
        export.onnx(Noise(), path, ROWS, overwrite=True)
    assert path.read_text() == "mine"


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_package_is_named_with_the_remedy(package, path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError, match=rf"package {package}: pip install 'featcal\[onnx\]'"):
        export.onnx(nn.Linear(4, 3), path, ROWS)


def test_a_runtime_that_cannot_load_or_run_the_file_is_quoted(path, tmp_path):
    path.write_bytes(b"not a model")
    with pytest.raises(InputError, match="ONNX Runtime cannot load the model"):
        onnx_file._session(path)
    good = tmp_path / "good.onnx"
    export.onnx(nn.Linear(4, 3), good, ROWS)
    wrong = onnx_file.Inputs.of(nn.Linear(5, 3), torch.ones(2, 5))
    with pytest.raises(InputError, match=r"cannot run the file on inputs of \(2, 5\)"):
        onnx_file._run(onnx_file._session(good), wrong)
