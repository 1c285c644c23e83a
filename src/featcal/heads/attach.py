"""Head surgery: a model of the same class, sharing every weight, with its head calibrated.

No hooks: the modules on the way to the head are copied shallowly, the head is replaced, and the
original model stays as it was. Feature maps can also act at an inner layer, the rest of the network
recomputed, which is the layer ablation of the paper.
"""

from __future__ import annotations

import copy
import warnings
from functools import partial, reduce
from operator import or_
from types import MethodType
from typing import Any, final

import torch
from torch import Tensor, nn

from featcal.core.batch import device_of
from featcal.core.calibrator import Calibrator, FeatureMap
from featcal.core.checks import CalibrationWarning, InputError
from featcal.heads import find
from featcal.heads.head import CalibratedHead, Wrapper, calibrated, linear_view, logit_rows

IDENTITY = nn.Identity()


def attach(
    model: nn.Module, calibrator: Calibrator, *, head: str | None = None, layer: str | None = None
) -> nn.Module:
    """A new model of the same class that shares every weight and gives calibrated logits.

    Its `state_dict` has the names of the original, and the calibrator's beside them; it loads the
    original's too. Attach before DDP, FSDP or `torch.compile`. Every tensor of a layer is that of
    both models, so that `.to()` and training reach both: deepcopy first when they must part.

    Args:
        model: the trained classifier; left untouched.
        calibrator: a fitted calibrator or pipeline; where the layer is on another device, a copy of
            it there is attached.
        head: dotted path of the last layer; without it, it must be clear which one that is. "" for
            the output of the model, whatever makes it: the result is then the model in a wrapper
            that calibrates what it gives, and the calibrator must need the logits alone.
        layer: dotted path of another layer, whose output the feature steps are to act on (the layer
            ablation: `collect(..., layer=...)`); the other steps act on the logits as ever.
    """
    check_uncalibrated(model)
    if not isinstance(calibrator, Calibrator):
        raise InputError(
            f"calibrator is a {type(calibrator).__name__}: give a fitted one, as "
            "featcal.parse(recipe).fit(...) makes; featcal.load(file, onto=model) attaches a file, "
            "and featcal.calibrate(model, loader, recipe) fits and attaches"
        )
    calibrator = calibrator.outcome()
    if calibrator.fresh:
        told = f"{calibrator!r} was never fitted and changes nothing: fit it, or load its values"
        warnings.warn(told, CalibrationWarning, stacklevel=2)

    def misfit(last: nn.Module) -> str:
        """In what a layer differs from the one the calibrator was fitted to, where known."""
        report, linear = calibrator.report, linear_view(last)
        if report is not None and linear is not None:
            if report.classes not in (0, linear.out_features):
                return f"{report.classes} classes and {{}} has {linear.out_features}"
            whole = calibrator.needs_features and layer is None
            if whole and report.features not in (0, linear.in_features):
                return f"{report.features} features and {{}} has {linear.in_features}"
        return ""

    if head == find.OUTPUT:
        if calibrator.needs_features or layer is not None:
            raise InputError(
                f"{calibrator!r} acts on features, and head='' names the model's output: name the "
                "last layer, or fit a recipe that needs the logits alone, such as temperature"
            )
        find.check_bare(model)
        return CalibratedOutput(model, _placed(calibrator, model))
    if head is None:
        path = find.fitting_head(model, lambda one: not misfit(one))
    else:
        path = find.find_head(model, head)
    last = model.get_submodule(path)
    if wrong := misfit(last):
        raise InputError(
            f"the calibrator was fitted to {wrong.format(repr(path))}: attach it to the network it "
            "was fitted to, or name the last layer with head="
        )
    calibrator = _placed(calibrator, last)
    if layer is None:
        return _replaced(model, last, CalibratedHead(last, calibrator))
    early, late = divided(calibrator, layer)
    inner = find.submodule(model, layer, "layer")
    if inner is last:
        raise InputError(f"layer {layer!r} is the last layer: leave it out, or name an earlier one")
    made = _replaced(model, inner, MappedLayer(inner, _placed(early, inner)))
    return made if late is None else _replaced(made, last, CalibratedHead(last, late))


def attached(model: nn.Module) -> tuple[Calibrator, str | None, str | None]:
    """What `attach` was given: the calibrator in a model, and the paths of head and inner layer."""
    find.check_bare(model)
    named = [(path, part) for path, part in model.named_modules() if isinstance(part, Wrapper)]
    if not named:
        raise InputError("the model has no calibrated head: calibrate it, or attach a calibrator")
    paths = {type(part): path or None for path, part in named}
    parts = sorted((part for _, part in named), key=lambda part: isinstance(part, CalibratedHead))
    calibrator = reduce(or_, (part.calibrator for part in parts))
    head = find.OUTPUT if CalibratedOutput in paths else paths.get(CalibratedHead)
    return calibrator, head, paths.get(MappedLayer)


def detach(model: nn.Module) -> nn.Module:
    """The model without its calibrator: `attach` undone."""
    find.check_bare(model)
    if not _wrappers(model):
        raise InputError("the model has no calibrated head: there is nothing to detach")
    while found := _wrappers(model):
        model = _replaced(model, found[0], found[0].uncalibrated)
    vars(model).pop("calibration", None)  # what `calibrate` told of it
    return model


def is_calibrated(model: nn.Module) -> bool:
    """Whether a model has a calibrator."""
    return bool(_wrappers(model))


def check_uncalibrated(model: nn.Module) -> None:
    """Refuses a model that has a calibrator already, and what is no model."""
    if isinstance(model, Calibrator):
        raise InputError(f"model is the calibrator {model!r}: give the network first")
    if not isinstance(model, nn.Module):
        raise InputError(
            f"model is a {type(model).__name__}: give a network, a torch module; scores of other "
            "models go to featcal.arrays.Calibrated"
        )
    if is_calibrated(model):
        raise InputError("the model is calibrated already: detach(model) first")


def _wrappers(model: nn.Module) -> list[Wrapper]:
    return [module for module in model.modules() if isinstance(module, Wrapper)]


def _placed(calibrator: Calibrator, layer: nn.Module) -> Calibrator:
    """The calibrator on the device of a layer: itself where it is there, else a copy."""
    device = device_of(layer)
    if device is None or all(value.device == device for value in calibrator.buffers()):
        return calibrator
    return copy.deepcopy(calibrator).to(device)


def divided(calibrator: Calibrator, layer: str) -> tuple[Calibrator, Calibrator | None]:
    """The steps for the inner layer and those for the logits, None where there are none."""
    steps = calibrator.steps_in_order()
    early: list[Calibrator] = [step for step in steps if isinstance(step, FeatureMap)]
    late = [step for step in steps if not isinstance(step, FeatureMap)]
    wrong = [step for step in late if step.needs_features]
    if not early or wrong:
        what = repr(wrong[0] if wrong else calibrator)
        raise InputError(
            f"{what} cannot act at layer {layer!r}: give feature maps such as clip, and after them "
            "methods that need the logits alone"
        )
    return reduce(or_, early), reduce(or_, late) if late else None


def _replaced(model: nn.Module, old: nn.Module, new: nn.Module) -> nn.Module:
    """The model with one module changed for another, wherever it is registered.

    The modules that hold it are copied shallowly, and no other.
    """
    copies: dict[int, nn.Module] = {}
    names = {id(module): name for name, module in model.named_modules()}
    names |= {id(part.uncalibrated): names[id(part)] for part in _wrappers(model)}

    def copied(module: nn.Module) -> nn.Module:
        if module is old:
            return new
        if id(module) in copies:
            return copies[id(module)]
        if not any(part is old for part in module.modules()):
            return module
        if isinstance(module, Wrapper):
            return type(module)(copied(module.uncalibrated), module.calibrator)
        where = f"model.{names[id(module)]}".rstrip(".")
        find.check_bare(module, where)
        # A copy with tables of its own (hooks, buffers, children) and the same tensors in them.
        copies[id(module)] = clone = copy.copy(module)
        for name, value in vars(clone).items():
            mine = copy.copy(value) if isinstance(value, dict) else _rebound(value, module, clone)
            if name == "forward" and mine is value:
                raise InputError(
                    f"{where} has a forward of its own, which would run layers of the original: "
                    "set the last layer by hand, such as model.fc = calibrator.wrap(model.fc)"
                )
            clone.__dict__[name] = mine
        for name, child in module._modules.items():
            clone._modules[name] = None if child is None else copied(child)
        return clone

    return copied(model)


def _rebound(value: Any, module: nn.Module, clone: nn.Module) -> Any:  # noqa: ANN401
    """What a module keeps of its own methods, for its copy: else the copy would run the original.

    Such is a `forward` that was changed for this one model, by its user or by a library.
    """
    if isinstance(value, MethodType) and value.__self__ is module:
        return MethodType(value.__func__, clone)
    if not isinstance(value, partial):
        return value
    old = (value.func, *value.args)
    new = [clone if part is module else _rebound(part, module, clone) for part in old]
    if all(mine is part for mine, part in zip(new, old, strict=True)):
        return value
    made = partial(new[0], *new[1:], **value.keywords)
    made.__dict__.update(vars(value))  # such as the signature it shows
    return made


@final
class MappedLayer(Wrapper):
    """A layer whose output goes through feature maps, each sample as one row."""

    def forward(self, *inputs: Any, **named: Any) -> Any:  # noqa: ANN401 - whatever the layer takes
        """The layer's output, mapped."""
        output = self.uncalibrated(*inputs, **named)
        given = first_tensor(output)
        rows = given.flatten(1)
        for step in self.calibrator.steps_in_order():
            rows = step.map_features(rows)  # type: ignore[operator]  # all are feature maps
        return find.with_tensor(output, given, rows.reshape(given.shape).to(given.dtype))


@final
class CalibratedOutput(Wrapper):
    """A model whose logits go through a calibrator, at every position for itself."""

    def forward(self, *inputs: Any, **named: Any) -> Any:  # noqa: ANN401 - whatever the model takes
        """The model's output, with calibrated logits in it."""
        output = self.uncalibrated(*inputs, **named)
        logits = find.logits_in(output)
        axis = find.class_axis(logits)
        mapped = calibrated(self.calibrator, IDENTITY, logits.movedim(axis, -1))
        return find.with_tensor(output, logits, mapped.movedim(-1, axis))


@final
class Rest(nn.Module):
    """The network behind a layer, as a head: rows of what the layer gave in, logits out.

    The network runs on a stand-in input, and what the layer gives is changed for the rows.

    Attributes:
        layer: the path of the layer.
        head: the path of the network's last layer, whose output is the logits.
        sample: the shape of what the layer gives for one sample.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Any,  # noqa: ANN401
        layer: str,
        head: str,
        sample: torch.Size,
        *,
        repeat: bool = False,
    ) -> None:
        super().__init__()
        self.model, self.layer, self.head, self.sample = model, layer, head, sample
        # The first row of every tensor stands in for all of them.
        self._input = find.mapped(inputs, lambda tensor: tensor[:1] if tensor.ndim else tensor)
        self._repeat = repeat

    def forward(self, rows: Tensor) -> Tensor:
        """Logits (n, k) of rows (n, d)."""

        def swapped(_: nn.Module, __: Any, own: Any) -> Any:  # noqa: ANN401
            old = first_tensor(own)
            return find.with_tensor(own, old, rows.reshape(-1, *self.sample).to(old.dtype))

        def repeated(tensor: Tensor) -> Tensor:
            return tensor.expand(len(rows), *tensor.shape[1:]) if tensor.ndim else tensor

        inputs = find.mapped(self._input, repeated) if self._repeat else self._input
        layer = self.model.get_submodule(self.layer)
        with layer.register_forward_hook(swapped), find.watched(self.model, [self.head]) as calls:
            find.run(self.model, inputs)
        return logit_rows(calls[-1][2])


def first_tensor(output: Any) -> Tensor:  # noqa: ANN401
    """What a layer gave, or the first of several values."""
    first = output[0] if isinstance(output, (tuple, list)) else output
    if not isinstance(first, Tensor):
        raise InputError(f"the layer gives a {type(first).__name__}: name one that gives a tensor")
    return first
