"""A network given as `package.module:function`, which returns the model and its loaders."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from featcal.core.errors import InputError

OPTIONS = ("class_names", "dataset", "name", "head", "layer", "unpack", "meta")
DYNAMIC = "dynamic"  # axes of any size, for export alone
RETURNS = "return (model, {'val': loader, 'test': loader})"


@final
@dataclass(frozen=True)
class Target:
    """What such a function returned.

    Attributes:
        model: the classifier.
        loaders: a loader for every split, by name.
        options: of `collect_pack`, where the function returned a mapping that says more.
        dynamic: the axes of any size of an exported file; None for the rows alone.
    """

    model: nn.Module
    loaders: Mapping[str, Iterable[Any]]
    options: dict[str, Any] = field(default_factory=dict)
    dynamic: Any = None


def load_target(spec: str) -> Target:
    """Imports the function, with the current folder on the path, and calls it."""
    made = named_function(spec)()
    options: dict[str, Any] = {}
    if isinstance(made, Mapping):
        options = {key: value for key, value in made.items() if key not in ("model", "loaders")}
        made = made.get("model"), made.get("loaders")
    if not isinstance(made, (tuple, list)) or len(made) != 2 or not isinstance(made[0], nn.Module):
        raise InputError(f"{spec} returned {_shape(made)}: {RETURNS}")
    dynamic = options.pop(DYNAMIC, None)
    unknown = set(options) - set(OPTIONS)
    if unknown:
        known = ", ".join((*OPTIONS, DYNAMIC))
        raise InputError(f"{spec} returned {min(unknown)!r}: it may say {known}")
    loaders = made[1] if isinstance(made[1], Mapping) else {"val": made[1]}
    return Target(made[0], loaders, options, dynamic)


def named_function(spec: str, returns: str = "the model and its loaders") -> Callable[..., Any]:
    """The function that `package.module:function` names, the current folder on the path.

    Args:
        spec: the text.
        returns: what the function gives, said where the text names none.
    """
    module_name, colon, name = spec.partition(":")
    if not (module_name and colon and name):
        raise InputError(
            f"{spec!r} is not package.module:function: name the function that returns "
            f"{returns}, such as my_project.models:build"
        )
    module = _module(module_name)
    found = getattr(module, name, None)
    if not callable(found):
        have = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
        raise InputError(
            f"{module_name} has no function {name!r}: it has {', '.join(have) or 'none'}"
        )
    return found  # type: ignore[no-any-return]


def _module(name: str) -> Any:  # noqa: ANN401
    """The module; what goes wrong inside it is its own affair and keeps its traceback."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise
        hint = f"; for a file write {Path(name).stem}:function" if name.endswith(".py") else ""
        raise InputError(
            f"there is no module {name!r} here or among the installed packages: run the command "
            f"in the folder that holds it{hint}"
        ) from error


def _shape(value: object) -> str:
    if isinstance(value, (tuple, list)):
        return f"({', '.join(type(part).__name__ for part in value)})"
    return type(value).__name__


def placed_on(model: nn.Module, device: str | None) -> nn.Module:
    """The model on a device, where one is named."""
    if device is None:
        return model
    try:
        return model.to(torch.device(device))
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"--device {device} cannot be used here: {reason}") from error
