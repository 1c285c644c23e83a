"""What importing torchmetrics needs here, and the examples of docs/bridges.md."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch

LIBRARY = torch.library.Library("torchvision", "FRAGMENT")


def _declare_operators(torchvision):
    """Lets torchmetrics and Lightning import torchvision where its build does not load.

    It asks for the schemas of two of its operators, which that build would bring.
    """
    for build in Path(torchvision.origin).parent.glob("_C.*"):
        try:
            torch.ops.load_library(build)
        except OSError:
            continue
    if not hasattr(torch.ops.torchvision, "nms"):
        for name in ("nms", "qnms"):
            LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


if (found := importlib.util.find_spec("torchvision")) is not None:
    _declare_operators(found)


@pytest.fixture(scope="session")
def shown():
    """The Python examples of a section of docs/bridges.md."""

    def blocks(section):
        text = (Path(__file__).parents[2] / "docs" / "bridges.md").read_text()
        (part,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
        return re.findall(r"```python\n(.*?)```", part, flags=re.DOTALL)

    return blocks
