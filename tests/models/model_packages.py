"""torchvision and timm, where they can be imported: beside a CPU build of torch they need help."""

import importlib
import importlib.util
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
import torch

BOXES = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_kept = []  # a library whose object is collected takes its operators along


@cache
def declare_boxes():
    """Declares the operators without which torchvision cannot be imported, unless it has them.

    Its compiled part is built for one build of torch and does not load beside another; the Python
    part then asks for two operators of it by name. transformers and timm import torchvision too.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return
    for file in Path(spec.origin).parent.glob("_C*.so"):
        with suppress(OSError):
            torch.ops.load_library(file)
    if not hasattr(torch.ops.torchvision, "nms"):
        library = torch.library.Library("torchvision", "FRAGMENT")
        library.define(f"nms{BOXES}")
        library.define(f"qnms{BOXES}")
        _kept.append(library)


def package(name):
    """The package, or the test module is skipped and says why."""
    declare_boxes()
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError, OSError) as error:
        why = str(error).splitlines()[0]
        pytest.skip(f"{name} cannot be imported here: {why}", allow_module_level=True)
