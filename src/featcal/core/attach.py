"""Head surgery: a model of the same class, sharing every weight, with its head calibrated.

No hooks: the modules on the path to the head are copied shallowly, the head is replaced, and the
original model stays as it was.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

from torch import nn

from featcal.core.calibrator import CalibratedHead, Calibrator
from featcal.core.errors import InputError


def find_head(model: nn.Module, head: str | None = None) -> str:
    """The dotted path of the classifier's last layer.

    In this order: the path given; timm's `get_classifier`; the last `nn.Linear` in registration
    order, a guess that `collect` proves on the first batch.
    """
    names: dict[str, nn.Module] = dict(model.named_modules())
    linear = [name for name, module in names.items() if isinstance(module, nn.Linear)]
    if head is not None:
        if head not in names:
            have = ", ".join(linear[-5:]) or "none"
            raise InputError(
                f"head {head!r} is not a module of the model: its last linear layers are {have}"
            )
        return head
    classifier = getattr(model, "get_classifier", None)
    found = classifier() if callable(classifier) else None
    named = [name for name, module in names.items() if module is found]
    if named and isinstance(found, nn.Linear):
        return named[0]
    if not linear:
        raise InputError("the model has no nn.Linear layer: pass head=, the path of its last layer")
    return linear[-1]


def head_of(model: nn.Module, head: str | None = None) -> nn.Module:
    """The classifier's last layer itself."""
    return model.get_submodule(find_head(model, head))


def attach(model: nn.Module, calibrator: Calibrator, *, head: str | None = None) -> nn.Module:
    """A new model of the same class that shares every weight and gives calibrated logits.

    Attach before DDP, FSDP or `torch.compile`. Sharing is total: `.to()` and `.train()` reach the
    shared parts of both models, so deepcopy first when they must part.

    Args:
        model: the trained classifier; left untouched.
        calibrator: a fitted calibrator or pipeline.
        head: dotted path of the last layer, when it is not found by itself.
    """
    path = find_head(model, head)
    layer = model.get_submodule(path)
    if isinstance(layer, CalibratedHead) or ".".join(path.split(".")[:-1]) in _calibrated(model):
        raise InputError("the model is calibrated already: detach(model) first")
    return _replaced(model, path.split("."), lambda layer: CalibratedHead(layer, calibrator))


def detach(model: nn.Module) -> nn.Module:
    """The model without its calibrator: `attach` undone."""
    found = _calibrated(model)
    if not found:
        raise InputError("the model has no calibrated head: there is nothing to detach")
    return _replaced(model, found[0].split("."), lambda layer: layer.get_submodule("head"))


def _calibrated(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, CalibratedHead)]


def _replaced(
    module: nn.Module, path: list[str], make: Callable[[nn.Module], nn.Module]
) -> nn.Module:
    """A shallow copy of the modules along the path, with the last one made anew."""
    if path == [""] or not path:
        return make(module)
    clone = copy.copy(module)
    for name, value in vars(module).items():
        if isinstance(value, dict):  # hooks, buffers and children of its own; the tensors shared
            clone.__dict__[name] = copy.copy(value)
    child = module._modules[path[0]]
    assert child is not None
    clone._modules[path[0]] = _replaced(child, path[1:], make)
    return clone
