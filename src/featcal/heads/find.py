"""Where a classifier's last layer is: told, known by convention, or proved on a batch.

Below the search: how a model is called whose inputs and outputs have any form, how its layers are
watched meanwhile, and when the output of a model counts as what one of its layers gave.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

from featcal.core.checks import InputError
from featcal.core.fit import undisturbed
from featcal.heads.head import INERT, CalibratedHead, is_linear

Call = tuple[str, Any, Any]  # a layer's path, its one argument (else None), what it gave
Links = dict[str, Callable[[Tensor], Tensor]]

# Where networks keep their last layer by convention: Hugging Face, torchvision, many others.
USUAL = ("classifier", "score", "classification_head", "fc", "head")
# Classes around a model, and where they keep it; "" for those that change the model itself.
DATA_PARALLEL = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel")
WRAPPERS = {
    **dict.fromkeys(DATA_PARALLEL, "module"),
    **{"OptimizedModule": "_orig_mod", "FSDPModule": "", "ScriptModule": ""},
}
OUTPUT = ""  # the path of a model itself: its output is the logits, whatever makes it
SHOWN = 8  # candidates in a message
PROOF_ROWS = 4  # of what a layer gives: enough to tell layers apart, and little to keep
# What may stand behind the last layer in a container and leaves its logits what they are.
HARMLESS = (*INERT, nn.Flatten, nn.LogSigmoid, nn.LogSoftmax, nn.Sigmoid, nn.Softmax)
# What a network may do to its logits before it returns them; a calibrated head stays before it.
AS_IT_IS = "identity"
LINKS_OF_ONE: Links = {"sigmoid": torch.sigmoid, "logsigmoid": nn.functional.logsigmoid}
LINKS: Links = {"softmax": lambda z: z.softmax(-1), "log_softmax": lambda z: z.log_softmax(-1)}
LINKS_OF_ANY = {**LINKS, **LINKS_OF_ONE}  # where a sample may have several labels


class NoHead(InputError):
    """No linear layer makes the model's output: there are logits, and no features."""


def head_or_output(
    model: nn.Module,
    head: str | None = None,
    *,
    inputs: Any,  # noqa: ANN401
    several: bool = False,
) -> str:
    """The path of the last layer; OUTPUT where no linear layer makes the model's output."""
    try:
        return find_head(model, head, inputs=inputs, several=several)
    except NoHead:
        return OUTPUT


def find_head(
    model: nn.Module,
    head: str | None = None,
    *,
    inputs: Any = None,  # noqa: ANN401
    several: bool = False,
) -> str:
    """The dotted path of the classifier's last layer.

    In this order: the path given; timm's `get_classifier`; the usual names (`classifier`, `score`,
    `fc`, ...); the last linear layer in registration order. Without `inputs` that is a guess; with
    them the model runs once, and the layer is one whose output is the model's output.

    Args:
        model: the trained classifier; wrap it for DDP, FSDP or `torch.compile` afterwards.
        head: the path, where it is known; "" for the model's output, whatever makes it.
        inputs: one batch of the model's inputs: a tensor, a tuple of arguments, or a mapping.
        several: whether a sample may have several labels, so that a sigmoid may follow the logits.

    Raises:
        InputError: when no layer will do; it lists the candidates.
    """
    check_bare(model)
    if head == OUTPUT:
        return OUTPUT
    if head is not None:
        submodule(model, head, "head")
    layers = _candidates(model)
    path, bare = _guess(model, layers) if head is None else (head, False)
    if inputs is not None:
        told = head is not None
        path = _proved(model, inputs, path, told=told, bare=bare, several=several)
    if path is None:
        what = "several classifiers" if layers else "no linear layer"
        output = "" if layers else ", or head='' where the recipe needs the model's output alone"
        raise InputError(f"the model has {what}: pass head=, the path of its last layer{output}")
    return _reached(model, path)


def fitting_head(model: nn.Module, fits: Callable[[nn.Module], bool]) -> str:
    """The path of the last layer as `find_head` guesses it, where no batch can prove it.

    Where nothing but its place speaks for that layer, it must be the only one that will do.

    Args:
        model: the trained classifier.
        fits: whether a layer has the sizes that are known.
    """
    path, layers = find_head(model), _candidates(model)
    names = path.split(".")
    ways = (model.get_submodule(".".join(names[:depth])) for depth in range(len(names)))
    in_sequence = all(type(part) is nn.Sequential for part in ways)  # they run as registered
    if not _guess(model, layers)[1] or in_sequence:
        return path

    def outputs(name: str) -> object:
        return getattr(layers[name], "out_features", getattr(layers[name], "out_channels", None))

    fitting = [name for name, layer in layers.items() if fits(layer)]
    alike = [name for name in fitting if outputs(name) == outputs(path)]
    others = fitting if path not in fitting else alike
    if len(others) > 1:
        raise InputError(
            f"which layer is the last one is not clear: {', '.join(others[-SHOWN:])} would all do; "
            "pass head=, the path of the one that makes the logits"
        )
    return _reached(model, others[0]) if others else path


def submodule(model: nn.Module, path: str, argument: str) -> nn.Module:
    """The layer of this path, by any of the names it may have; `argument` is where it came in."""
    try:
        return model.get_submodule(path)
    except AttributeError as error:
        parts = ", ".join(name for name, _ in model.named_children()) or "none"
        linear = ", ".join(list(_candidates(model))[-5:]) or "none"
        raise InputError(
            f"{argument} {path!r} is not a module of the model: its parts are {parts}, its last "
            f"linear layers are {linear}"
        ) from error


def check_bare(module: nn.Module, where: str = "model") -> None:
    """Refuses a module that something is wrapped around: its layers are not its own any more."""
    kinds = [base.__name__ for base in type(module).__mro__]
    for kind in WRAPPERS.keys() & kinds:
        inner = f"{where}.{WRAPPERS[kind]}" if WRAPPERS[kind] else "the model as it was before"
        raise InputError(f"{where} is wrapped in {kind}: take {inner} instead, and wrap the result")


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

    SqueezeNet convolves to a map per class, and then takes the mean of each.
    """
    if type(module) is not nn.Sequential:
        return False
    rest = [part for part in module if type(part) not in HARMLESS]
    last = rest[-1] if rest else None
    is_leaf = last is not None and not list(last.children())
    return _goes_on(last) or (is_leaf and not is_linear(last))


@torch.no_grad()
def _proved(
    model: nn.Module, inputs: object, guess: str | None, *, told: bool, bare: bool, several: bool
) -> str:
    """The layer whose output is the model's: the guess if it is one, else the last one called.

    Where nothing but its place speaks for the guess, and layers make outputs of their own, it is
    for the caller to say which of them the labels belong to.
    """
    inputs = mapped(inputs, lambda tensor: tensor)  # arrays as tensors
    paths = dict.fromkeys([*_candidates(model), *([] if guess is None else [guess])])
    with undisturbed(model), watched(model, paths, few_rows) as calls:
        output = outputs_in(run(model, inputs))
    found = {path: given for path, _, given in calls if isinstance(given, Tensor)}
    links = LINKS_OF_ANY if several else LINKS
    made = {
        path: [link_between(given, z, of_more=links) is not None for z in output]
        for path, given in found.items()
    }
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
    if makers and not told:
        return makers[-1]
    if makers:
        raise InputError(f"the output of {guess!r} is not the model's: that is {makers[-1]!r}")
    check_not_multilabel(found, output)
    shapes = ", ".join(str(tuple(part.shape)) for part in output) or "no tensor"
    shown = [f"{path} {tuple(given.shape[1:])}" for path, given in found.items()][-SHOWN:]
    what = f"{guess!r} does not make" if told else "no linear layer makes"
    refusal = InputError if told else NoHead
    raise refusal(
        f"{what} the model's output ({shapes}): pass head=, the path of the layer whose output is "
        "the logits, or take a recipe that needs the logits alone, such as temperature or auto; "
        f"the last layers called, with what they give per row: {', '.join(shown) or 'none'}"
    )


def run(model: nn.Module, inputs: Any) -> Any:  # noqa: ANN401
    """The model's output: of keyword arguments, of several arguments, or of one."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if _several(inputs) else model(inputs)


def mapped(
    inputs: object, change: Callable[[Tensor], Any], other: Callable[[Any], Any] = lambda one: one
) -> Any:  # noqa: ANN401
    """The same structure with every tensor in it changed; arrays of numpy become tensors first.

    Args:
        inputs: what a model is called with.
        change: what becomes of a tensor.
        other: what becomes of an object that is none of these, such as a packed sequence.
    """
    if isinstance(inputs, np.ndarray) and inputs.dtype.kind in "biuf":
        inputs = torch.as_tensor(inputs)
    if isinstance(inputs, Tensor):
        return change(inputs)
    if isinstance(inputs, Mapping):
        return {key: mapped(value, change, other) for key, value in inputs.items()}
    if _several(inputs):
        return tuple(mapped(value, change, other) for value in inputs)
    if isinstance(inputs, tuple) and not hasattr(inputs, "to"):
        return type(inputs)(*(mapped(value, change, other) for value in inputs))
    return other(inputs)


def _several(inputs: object) -> TypeGuard[Sequence[Any]]:
    """Whether these are several inputs; a tuple with named fields is one object."""
    return isinstance(inputs, (tuple, list)) and not hasattr(inputs, "_fields")


def outputs_in(output: Any) -> list[Tensor]:  # noqa: ANN401
    """The tensors of an output that may be its logits: those called so, else all, in order."""
    if isinstance(output, Tensor):
        return [output]
    for name in ("logits", "out"):  # as Hugging Face and torchvision's segmentation call them
        named = output.get(name) if isinstance(output, Mapping) else None
        named = getattr(output, name, None) if named is None else named
        if isinstance(named, Tensor):
            return [named]
    parts: Iterable[Any] = output if isinstance(output, (tuple, list)) else ()
    if isinstance(output, Mapping):
        parts = output.values()
    elif is_dataclass(output) and not isinstance(output, type):
        parts = [getattr(output, field.name) for field in fields(output)]
    return [tensor for part in parts for tensor in outputs_in(part)]


def logits_in(output: Any) -> Tensor:  # noqa: ANN401
    """The logits in the output of a model that no linear layer makes."""
    parts = output if isinstance(output, (tuple, list)) else [output]
    if any(isinstance(part, Mapping) and "boxes" in part for part in parts):
        raise InputError(
            "the model gives boxes, as detection does, and only class numbers are supported: give "
            "the class logits of matched boxes as Batch(logits, labels)"
        )
    found = [one for one in outputs_in(output) if one.is_floating_point() and one.ndim > 0]
    if len(found) != 1:
        shapes = ", ".join(str(tuple(one.shape)) for one in found) or "none"
        raise InputError(
            f"the model gives tensors of shapes {shapes}, and one alone can be its logits: let it "
            "give them alone, or under the name logits"
        )
    return found[0]


def class_axis(logits: Tensor) -> int:
    """The axis of the classes in a model's output, counted from the last one.

    (n, k), (n, t, k) for tokens, (n, k, h, w) and (n, k, h, w, d) for pixels, as loss functions
    and libraries have them.
    """
    return -1 if logits.ndim < 4 else 1 - logits.ndim


def with_tensor(output: Any, old: Tensor, new: Tensor) -> Any:  # noqa: ANN401
    """The same output with one of its tensors changed for another."""
    if output is old:
        return new
    if isinstance(output, Mapping):
        made = copy.copy(output)
        for key, part in output.items():
            made[key] = with_tensor(part, old, new)  # type: ignore[index]
        return made
    if isinstance(output, (tuple, list)):
        parts = [with_tensor(part, old, new) for part in output]
        return type(output)(*parts) if hasattr(output, "_fields") else type(output)(parts)
    if is_dataclass(output) and not isinstance(output, type):
        every = {field.name: getattr(output, field.name) for field in fields(output)}
        return replace(output, **{key: with_tensor(part, old, new) for key, part in every.items()})
    return output


@contextmanager
def watched(
    model: nn.Module, paths: Iterable[str], keep: Callable[[Any], Any] = lambda value: value
) -> Iterator[list[Call]]:
    """Records, in order, what enters and leaves some layers while the block runs."""
    calls: list[Call] = []

    def remember(path: str) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: tuple[Any, ...], named: Any, output: Any) -> None:  # noqa: ANN401
            only = inputs[0] if len(inputs) == 1 and not named else None
            calls.append((path, keep(only), keep(output)))

        return hook

    with ExitStack() as hooks:
        for path in paths:
            layer = model.get_submodule(path)
            hooks.enter_context(layer.register_forward_hook(remember(path), with_kwargs=True))
        yield calls


def few_rows(value: Any) -> Tensor | None:  # noqa: ANN401 - whatever enters or leaves a layer
    """The first rows of a tensor, copied: what comes after may write into them."""
    few = isinstance(value, Tensor) and value.ndim > 0
    return value[:PROOF_ROWS].detach().clone() if few else None


def link_between(
    given: Tensor, output: Tensor, of_one: Links = LINKS_OF_ONE, of_more: Links = LINKS
) -> str | None:
    """The name of what stands between a layer's output and the model's; None if that is no link.

    The model may return what the layer gave as it is, through a softmax, or its logarithm; of a
    single logit also through a sigmoid.
    """
    if not output.numel() or not output.is_floating_point():
        return None  # such as a prediction beside the logits
    pixels = given.ndim > 3 and given.shape[2:].numel() > 1
    if output.numel() == given.numel() and (len(given) == 1 or pixels):
        output = output.reshape(given.shape)  # a model may drop the axis of a single row or class
    if output.ndim == 0:
        return None  # such as a loss
    digits = torch.finfo(output.dtype).eps
    cast = given.to(output.dtype).double()  # a model may return its logits in another type
    output, given = output[: len(given)].double(), given.double()
    if given.numel() != output.numel():
        return None if positions(cast, output) is None else AS_IT_IS
    if pixels:
        cast, given, output = (part.movedim(1, -1) for part in (cast, given, output))
    shape = output.shape
    if shape[2:].numel() == 1:  # classes last, where a softmax acts
        shape = torch.Size((shape[0], shape[1:].numel()))
    cast, given, output = (part.reshape(shape) for part in (cast, given, output))
    gaps: dict[str, float] = {}  # small logits are close to more than one link
    links = of_more if shape[-1] > 1 else of_one
    tried = {AS_IT_IS: cast, **{name: link(given) for name, link in links.items()}}
    for name, values in tried.items():
        rtol = max(1e-5, 0.0 if name == AS_IT_IS else digits)
        # NaN is as good as NaN: what it means for a fit is for `survey` to say, row by row.
        if torch.allclose(values, output, rtol=rtol, atol=1e-6, equal_nan=True):
            gaps[name] = float((values - output).nan_to_num().abs().max())
    return min(gaps, key=lambda name: gaps[name], default=None)


def positions(given: Tensor, output: Tensor) -> Tensor | None:
    """Which of the positions (n, t, k) a layer worked at the model kept as its output (n, k).

    Language models score every token and return the scores of one; None when they do not.
    """
    if output.ndim == 1:
        output = output[:, None]  # one logit per row
    if given.ndim != 3 or output.ndim != 2 or given.shape[::2] != output.shape:
        return None
    same = (given == output[:, None].to(given.dtype)).all(2)  # (n, t)
    return same.int().argmax(1) if bool(same.any(1).all()) else None


def check_not_multilabel(found: dict[str, Tensor], output: list[Tensor]) -> None:
    """Refuses a sigmoid per class, for what it means: such classes do not exclude one another."""
    for path, given in reversed(found.items()):
        if any(link_between(given, tensor, {}, LINKS_OF_ONE) for tensor in output):
            raise InputError(
                f"the model's output is a sigmoid of each of the logits of {path!r}, so that a "
                "sample may be of several classes, and a softmax over them means nothing: give "
                "labels (n, k) of 0 and 1, which say of each class whether the sample is of it"
            )
