"""What docs/export.md shows is what happens."""

import re
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

from featcal import Batch, attach, export, parse
from featcal.export.onnx_file import TOLERANCE

PAGE = Path(__file__).parents[2] / "docs" / "export.md"
START, END = "<!-- made by the test of this page -->", "<!-- end of that table -->"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.ReLU())
        self.fc = nn.Linear(16, 3)

    def forward(self, x):
        return self.fc(self.body(x))


def blocks(kind):
    return re.findall(rf"```{kind}\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Runs the Python of the page, in order, in one folder."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        plain, x = Net().eval(), torch.randn(300, 6)
        with torch.no_grad():
            features = plain.body(x)
            logits = 5 * plain.fc(features)
            plain.fc.weight *= 5
            plain.fc.bias *= 5
            labels = (logits / 3 + torch.randn(300, 3)).argmax(1)
    data = Batch(logits, labels, features)
    calibrator = parse("clip | temperature").fit(data, plain.fc)
    names = {
        "model": attach(plain, calibrator, head="fc"),
        "x": x,
        "calibrator": calibrator,
        "head": plain.fc,
        "features": features,
        "logits": logits,
        "logit_calibrator": parse("temperature").fit(Batch(logits, labels)),
        "images": x.numpy(),
    }
    folder = tmp_path_factory.mktemp("page")
    said = []
    names["print"] = said.append
    ran = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for block in blocks("python"):
            if "text.onnx" in block:  # the call is tested with a real text model elsewhere
                continue
            exec(compile(block, "export.md", "exec"), names)
            ran += 1
    assert ran == 3
    return names, folder, said


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch.export.load's own
def test_the_python_of_the_page_runs_and_the_served_logits_are_the_models(page):
    names, folder, said = page
    assert sorted(path.name for path in folder.iterdir()) == [
        "head.onnx",
        "logits.onnx",
        "model.onnx",
        "model.pt2",
    ]
    with torch.no_grad():
        expected = names["model"](names["x"])
    torch.testing.assert_close(torch.from_numpy(names["logits"]), expected)
    again = torch.export.load(folder / "model.pt2").module()
    torch.testing.assert_close(again(names["x"]), expected)
    assert said[-1] == "clip | temperature"


def test_the_printed_line_has_the_form_the_page_shows(page):
    (shown,) = blocks("text")
    form = re.escape(shown.strip())
    for word in ("OPSET", "SIZE", "ROWS", "DIFFERENCE"):
        form = form.replace(word, r"[\w.+-]+(?: [KM]?B|bytes)?")
    assert re.fullmatch(form, str(page[2][0]))


def test_the_table_of_the_page_is_what_was_measured(page):
    done = page[0]["done"]
    operators = [node.op_type for node in onnx.load(page[1] / "model.onnx").graph.node]
    rows = [
        ("tolerance", f"{TOLERANCE:g}"),
        ("inputs", f"`{done.inputs}`"),
        ("outputs", f"`{done.outputs}`"),
        (
            "operators of a linear layer, a ReLU and a head with `clip \\| temperature`",
            f"`{' '.join(operators)}`",
        ),
    ]
    table = "\n".join(["| | |", "|---|---|", *(f"| {left} | {right} |" for left, right in rows)])
    assert PAGE.read_text().split(START)[1].split(END)[0].strip() == table
    assert done.parity.tolerance == TOLERANCE
    assert isinstance(done, export.OnnxExport)


def test_the_triton_configuration_names_what_the_file_has(page):
    done = page[0]["done"]
    (config,) = blocks("protobuf")
    for kind, ports in (("input", done.inputs), ("output", done.outputs)):
        ((name, shape),) = ports.items()
        size = shape.removeprefix("float32[batch, ").removesuffix("]")
        assert f'{kind} [{{ name: "{name}", data_type: TYPE_FP32, dims: [ {size} ] }}]' in config
