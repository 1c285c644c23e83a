"""Where a classifier's last layer is: told, known by convention, or proved on a batch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from featcal.core.call import mapped, outputs_in, run, watched
from featcal.core.errors import InputError
from featcal.core.fitting import undisturbed
from featcal.core.head import INERT, CalibratedHead, is_linear
from featcal.core.proof import check_not_multilabel, few_rows, makes

# Where networks keep their last layer by convention: Hugging Face, torchvision, many others.
USUAL = ("classifier", "score", "classification_head", "fc", "head")
WRAPPERS = (
    "DataParallel",
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "OptimizedModule",
)
SHOWN = 8  # candidates in a message

# What may stand behind the last layer in a container and leaves its logits what they are.
HARMLESS = (*INERT, nn.Flatten, nn.LogSigmoid, nn.LogSoftmax, nn.Sigmoid, nn.Softmax)


def find_head(model: nn.Module, head: str | None = None, *, inputs: Any = None) -> str:  # noqa: ANN401
    """The dotted path of the classifier's last layer.

    In this order: the path given; timm's `get_classifier`; the usual names (`classifier`, `score`,
    `fc`, ...); the last linear layer in registration order. Without `inputs` that is a guess; with
    them the model runs once, and the layer is one whose output is the model's output.

    Args:
        model: the trained classifier; wrap it for DDP, FSDP or `torch.compile` afterwards.
        head: the path, where it is known.
        inputs: one batch of the model's inputs: a tensor, a tuple of arguments, or a mapping.

    Raises:
        InputError: when no layer will do; it lists the candidates.
    """
    check_named(model, head)
    layers = _candidates(model)
    guess, bare = _guess(model, layers) if head is None else (head, False)
    if inputs is not None:
        inputs = mapped(inputs, lambda tensor: tensor)  # arrays as tensors
        found = _proved(model, inputs, guess, told=head is not None, bare=bare)
        return _reached(model, found)
    if guess is None:
        what = "several classifiers" if layers else "no linear layer"
        raise InputError(f"the model has {what}: pass head=, the path of its last layer")
    return _reached(model, guess)


def fitting_head(model: nn.Module, fits: Callable[[nn.Module], bool]) -> str:
    """The path of the last layer as `find_head` guesses it, where no batch can prove it.

    Where nothing but its place speaks for that layer, it must be the only one that will do.

    Args:
        model: the trained classifier.
        fits: whether a layer has the sizes that are known.
    """
    path, layers = find_head(model), _candidates(model)
    if not _guess(model, layers)[1] or _in_sequence(model, path):
        return path
    fitting = [name for name, layer in layers.items() if fits(layer)]
    alike = [name for name in fitting if _outputs(layers[name]) == _outputs(layers[path])]
    others = fitting if path not in fitting else alike
    if len(others) > 1:
        raise InputError(
            f"which layer is the last one is not clear: {', '.join(others[-SHOWN:])} would all do; "
            "pass head=, the path of the one that makes the logits"
        )
    return _reached(model, others[0]) if others else path


def _outputs(layer: nn.Module) -> object:
    sizes = (getattr(layer, name, None) for name in ("out_features", "out_channels"))
    return next((size for size in sizes if size is not None), None)


def _in_sequence(model: nn.Module, path: str) -> bool:
    """Whether the layers on the way run in the order in which they are registered."""
    names = path.split(".")
    ways = (model.get_submodule(".".join(names[:depth])) for depth in range(len(names)))
    return all(type(part) is nn.Sequential for part in ways)


def check_named(model: nn.Module, head: str | None) -> None:
    """Refuses a path that is not in the model, and a model whose layers cannot be reached."""
    check_bare(model)
    if head is None:
        return
    try:
        model.get_submodule(head)  # by any of the names a layer may have
    except AttributeError as error:
        have = ", ".join(list(_candidates(model))[-5:]) or "none"
        raise InputError(
            f"head {head!r} is not a module of the model: its last linear layers are {have}"
        ) from error


def inner_layer(model: nn.Module, path: str) -> nn.Module:
    """The layer of this path, for what acts inside the network."""
    try:
        return model.get_submodule(path)
    except AttributeError as error:
        names = ", ".join(name for name, _ in model.named_children()) or "none"
        raise InputError(
            f"layer {path!r} is not a module of the model: its parts are {names}"
        ) from error


def check_bare(module: nn.Module, where: str = "model") -> None:
    """Refuses a module that something is wrapped around: its layers are not its own any more."""
    kinds = [base.__name__ for base in type(module).__mro__]
    if "FSDPModule" in kinds:
        raise InputError(
            f"{where} is sharded by fully_shard: calibrate the model first, and shard the "
            "calibrated one"
        )
    kind = next((kind for kind in kinds if kind in WRAPPERS), None)
    if kind is not None:
        inner = "_orig_mod" if kind == "OptimizedModule" else "module"
        raise InputError(
            f"{where} is wrapped in {kind}: take {where}.{inner} instead, and wrap the calibrated "
            "model again"
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise InputError(
            f"{where} is a TorchScript module, whose layers are fixed: take the original"
        )


def _reached(model: nn.Module, path: str) -> str:
    """The path, refused where it leads through a wrapped part of the model."""
    names = path.split(".")
    for depth in range(1, len(names) + 1):
        part = ".".join(names[:depth])
        check_bare(model.get_submodule(part), f"model.{part}")
    return path


def _candidates(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that may be the last one: linear ones, and a calibrated head as a whole."""
    heads = [module for module in model.modules() if isinstance(module, CalibratedHead)]
    inside = {id(part) for head in heads for part in head.modules()} - set(map(id, heads))
    layers = ((name, part) for name, part in model.named_modules() if id(part) not in inside)
    return {n: part for n, part in layers if is_linear(part) or isinstance(part, CalibratedHead)}


def _guess(model: nn.Module, layers: dict[str, nn.Module]) -> tuple[str | None, bool]:
    """The likely path: what the model says, a usual name, or the last linear layer.

    With it, whether its place is all that speaks for it.
    """
    said = None
    with suppress(Exception):  # a hint, no more: a model may mean something else by this name
        said = model.get_classifier()  # type: ignore[operator]
    if isinstance(said, (tuple, list, nn.ModuleList)):
        # Which of them makes the output, if any does alone, only a batch can tell.
        return None, False
    names: dict[int, str] = {id(part): name for name, part in model.named_modules()}
    found: list[object] = [said, *(getattr(model, name, None) for name in USUAL)]
    for module in found:
        inside = set(map(id, module.modules())) if isinstance(module, nn.Module) else set()
        named = [name for name, layer in layers.items() if id(layer) in inside]
        if named:
            path = names.get(id(module), named[-1]) if _goes_on(module) else named[-1]
            return path, False
    return next(reversed(layers), None), True


def _goes_on(module: object) -> bool:
    """Whether a container does more after its linear layers, so that it is the head as a whole.

    SqueezeNet convolves to a map a class, and then takes the mean of each.
    """
    if type(module) is not nn.Sequential:
        return False
    rest = [part for part in module if type(part) not in HARMLESS]
    last = rest[-1] if rest else None
    is_leaf = last is not None and not list(last.children())
    return _goes_on(last) or (is_leaf and not is_linear(last))


@torch.no_grad()
def _proved(
    model: nn.Module,
    inputs: Any,  # noqa: ANN401
    guess: str | None,
    *,
    told: bool,
    bare: bool,
) -> str:
    """The layer whose output is the model's: the guess if it is one, else the last one called.

    Where nothing but its place speaks for the guess, and layers make outputs of their own, it is
    for the caller to say which of them the labels belong to.
    """
    paths = dict.fromkeys([*_candidates(model), *([] if guess is None else [guess])])
    with undisturbed(model), watched(model, paths, few_rows) as calls:
        output = outputs_in(run(model, inputs))
    found = {path: given for path, _, given in calls if isinstance(given, Tensor)}
    made = {path: [makes(given, z) for z in output] for path, given in found.items()}
    makers = [path for path, outputs in made.items() if any(outputs)]
    if bare and len({tuple(made[path]) for path in makers}) > 1:
        raise InputError(
            f"the model gives outputs of several layers, {', '.join(makers[-SHOWN:])}: pass head=, "
            "the path of the one the labels belong to"
        )
    if guess in makers:
        return guess
    if output and not any(tensor.numel() for tensor in output):
        raise InputError("inputs have no rows, which proves nothing: pass a batch with some")
    if not makers:
        check_not_multilabel(found, output)
    if told or not makers:
        raise InputError(_none_makes(guess if told else None, output, found, makers))
    return makers[-1]


def _none_makes(
    head: str | None, output: list[Tensor], found: dict[str, Tensor], makers: list[str]
) -> str:
    shapes = ", ".join(str(tuple(part.shape)) for part in output) or "no tensor"
    if head is not None and makers:
        return f"the output of {head!r} is not the model's output: that is {makers[-1]!r}"
    shown = [f"{path} {tuple(given.shape[1:])}" for path, given in found.items()][-SHOWN:]
    what = "no linear layer makes" if head is None else f"{head!r} does not make"
    return (
        f"{what} the model's output ({shapes}): pass head=, the path of the layer whose output is "
        "the logits, or calibrate nn.Sequential(model, nn.Identity()) with head='1'; the last "
        f"layers called, with what they give a row: {', '.join(shown) or 'none'}"
    )
