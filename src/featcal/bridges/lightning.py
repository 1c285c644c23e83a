"""A callback that calibrates a network when Lightning has trained it.

Lightning is published as `lightning.pytorch` and as `pytorch_lightning`, and the trainers of each
take callbacks of their own class alone. A `Calibrate` is one of those that are loaded when it is
made, so importing this module imports neither.
"""

from __future__ import annotations

import copy
import importlib
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, TypeAlias, final

import torch
from torch import nn

from featcal.bridges import loggers
from featcal.core import dist
from featcal.core.batch import device_of
from featcal.core.calibrator import Calibrator
from featcal.core.checks import InputError, check_choice, check_flags, check_whole
from featcal.core.fit import MODES, Mode, undisturbed
from featcal.core.text import NONE, parse
from featcal.data.collect import Collected, Unpack, collect
from featcal.heads.attach import attach
from featcal.heads.find import find_head
from featcal.io import save
from featcal.report.compare import Comparison, compare

Trainer: TypeAlias = Any  # of the Lightning that is loaded
Weights = Literal["last", "best"]

NAME = "Calibrate"
PACKAGES = ("lightning.pytorch", "pytorch_lightning")
SHARDED = ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy")


@final
class Calibrate:
    """Fits a recipe on validation data at the end of `trainer.fit`.

    The module's forward is to give logits. When training has ended and averaged weights, if any,
    are in place, the callback runs the module once more over the data, as validation would see
    them, fits, and scores the fit by cross-fitting: every row by a fit that has not seen it. The
    module itself stays as it is.

    Args:
        recipe: what to fit, as text or as a calibrator, which is then fitted in place.
        loader: labelled batches the network was not trained on; None for the trainer's one
            validation loader. Several processes share its batches out: do not shuffle it.
        head: dotted path of the last layer, when it is not found by itself.
        mode: "joint" or "sequential"; see `Calibrator.fit`.
        weights: "last", those in place when training ends, or "best", those of the checkpoint that
            the trainer's ModelCheckpoint calls best.
        folds: of the cross-fitting; None for no scores, which saves as many fits.
        path: where to save the calibrator, if anywhere.
        overwrite: whether a file there may be replaced.
        log: whether the trainer's loggers get the report and the scores.
        unpack: makes (inputs, labels) of a batch in a form `collect` does not know.

    Attributes:
        calibrator: what is fitted; the identity before.
        comparison: the scores without and with the recipe; None before, and without folds.
    """

    def __new__(cls, *_: object, **__: object) -> Calibrate:
        """One that the trainers of whichever Lightning is loaded take for a callback of theirs."""
        return object.__new__(_as_callback(_callback_classes()))

    def __init__(
        self,
        recipe: str | Calibrator = "auto",
        *,
        loader: Iterable[Any] | None = None,
        head: str | None = None,
        mode: Mode = "joint",
        weights: Weights = "last",
        folds: int | None = 5,
        path: Path | str | None = None,
        overwrite: bool = False,
        log: bool = True,
        unpack: Unpack | None = None,
    ) -> None:
        check_choice(NAME, "mode", mode, MODES)
        check_choice(NAME, "weights", weights, ("last", "best"))
        check_flags(NAME, overwrite=overwrite, log=log)
        if folds is not None:
            check_whole(NAME, 2, folds=folds)
        self.calibrator = parse(recipe) if isinstance(recipe, str) else recipe
        if self.calibrator.needs_train:
            raise InputError(f"{NAME}: {self.calibrator!r} needs training rows: fit it by hand")
        self.loader, self.head, self.mode, self.weights = loader, head, mode, weights
        self.folds, self.path, self.overwrite, self.unpack = folds, path, overwrite, unpack
        self.logs = log  # Lightning puts a method of its own at `log`
        self.comparison: Comparison | None = None
        self._network: nn.Module | None = None
        self._head_path = ""

    @property
    def model(self) -> nn.Module:
        """The calibrated module: of the same class, sharing every weight with the one calibrated.

        That is the module the trainer trained, or with `weights="best"` a copy of it.
        """
        if self._network is None:
            raise InputError(f"{NAME}: nothing is fitted yet: run trainer.fit first")
        self.calibrator.to(device_of(self._network))
        return attach(self._network, self.calibrator, head=self._head_path)

    def on_fit_start(self, trainer: Trainer, pl_module: nn.Module) -> None:
        """Refuses before the training what would fail after it."""
        find_head(pl_module, self.head)
        if self.loader is None and not trainer.enable_validation:
            raise InputError(f"{NAME}: the trainer runs no validation: pass loader=")
        if self.weights == "best" and trainer.checkpoint_callback is None:
            raise InputError(f"{NAME}: weights is 'best': add a ModelCheckpoint to the callbacks")
        kinds = [base.__name__ for base in type(trainer.strategy).__mro__]
        if any(kind in SHARDED for kind in kinds):
            raise InputError(
                f"{NAME}: {kinds[0]} leaves a process only a part of the weights: load the "
                "checkpoint after training and call featcal.calibrate"
            )
        if self.path is not None and Path(self.path).exists() and not self.overwrite:
            raise InputError(f"{NAME}: {self.path} exists: choose another path, or overwrite=True")

    def on_train_start(self, trainer: Trainer, pl_module: nn.Module) -> None:
        """Refuses several validation loaders, which are known from here on."""
        if self.loader is None and trainer.val_dataloaders is not None:
            _one_loader(trainer.val_dataloaders)

    def on_fit_end(self, trainer: Trainer, pl_module: nn.Module) -> None:
        """Collects, fits, scores, logs and saves."""
        network = pl_module if self.weights == "last" else _best(trainer, pl_module)
        # The trainer has moved the module to main memory by now; the work is done on its device.
        home = device_of(network)
        network.to(trainer.strategy.root_device)
        try:
            data = self._collected(trainer, network)
            report = self.calibrator.fit(data, data.head, mode=self.mode).report
            assert report is not None
            folds, recipes = min(self.folds or 0, report.rows), [NONE, repr(self.calibrator)]
            self.comparison = None
            if folds >= 2:
                how: dict[str, Any] = {"mode": self.mode, "folds": folds, "resamples": 0}
                self.comparison = compare(data, None, recipes, data.head, **how)
        finally:
            network.to(home)
        self._network, self._head_path = network, data.path
        self.calibrator.to(home)
        if not trainer.is_global_zero:
            return
        step = trainer.global_step
        for logger in trainer.loggers if self.logs else ():
            loggers.log(logger, report, step=step)
            for word, row in zip(("before", "after"), self.comparison or (), strict=False):
                loggers.log(logger, row, step=step, prefix=f"calibration/{word}")
        if self.path is not None:
            save(self.calibrator, self.path, overwrite=self.overwrite)

    def _collected(self, trainer: Trainer, network: nn.Module) -> Collected:
        stage = trainer.state.stage
        # Hooks that prepare batches are to see validation, where they must not augment.
        trainer.validating = True
        try:
            # A loader draws random numbers too: they are put back with the modes of the network.
            with undisturbed(network), trainer.precision_plugin.forward_context():
                batches = self._batches(trainer, first=dist.rank(), every=dist.world())
                one = next(batches, None)
                if one is not None:
                    mine = chain([one], batches)
                    return collect(network, mine, head=self.head, unpack=self.unpack)
                # More processes than batches: this one learns where the head is, without rows.
                any_one = islice(self._batches(trainer, first=0, every=1), 1)
                data = collect(network, list(any_one), head=self.head, unpack=self.unpack)
                return Collected([data[0].rows(slice(0, 0))], data.head, data.path)
        finally:
            trainer.state.stage = stage

    def _batches(self, trainer: Trainer, *, first: int, every: int) -> Iterator[Any]:
        """This process's batches as a validation step would get them."""
        if self.loader is None:  # the trainer has shared it out already
            mine = iter(_one_loader(trainer.val_dataloaders))
        else:
            mine = islice(self.loader, first, None, every)
        for batch in mine:
            ready = trainer.precision_plugin.convert_input(batch)
            ready = trainer.lightning_module._on_before_batch_transfer(ready)
            yield trainer.strategy.batch_to_device(ready)

    def __reduce__(self) -> tuple[Callable[..., Calibrate], tuple[type], dict[str, Any]]:
        """Pickles by what it holds: the class was made for the Lightning of this process."""
        return Calibrate.__new__, (Calibrate,), self.__dict__


def _callback_classes() -> tuple[type, ...]:
    """The base classes of callbacks of every Lightning loaded, or else of every one there is."""
    found = [sys.modules[name] for name in PACKAGES if sys.modules.get(name) is not None]
    for name in () if found else PACKAGES:
        with suppress(ImportError):
            found.append(importlib.import_module(name))
    if not found:
        raise InputError(f"{NAME} needs Lightning: pip install 'featcal[lightning]'")
    return tuple(module.Callback for module in found)


@cache
def _as_callback(bases: tuple[type, ...]) -> type[Calibrate]:
    return type(NAME, (Calibrate, *bases), {"__module__": __name__, "__doc__": Calibrate.__doc__})


def _one_loader(loaders: Any) -> Iterable[Any]:  # noqa: ANN401 - one, or a list or dict of them
    """The only validation loader."""
    if isinstance(loaders, Mapping):
        loaders = list(loaders.values())
    parts = loaders if isinstance(loaders, Sequence) else [loaders]
    if loaders is None or len(parts) != 1:
        found = "none" if loaders is None else len(parts)
        raise InputError(
            f"{NAME} needs one validation loader and the trainer has {found}: pass loader="
        )
    return parts[0]  # type: ignore[no-any-return]


def _best(trainer: Trainer, pl_module: nn.Module) -> nn.Module:
    """A copy of the module with the weights of the best checkpoint."""
    path = getattr(trainer.checkpoint_callback, "best_model_path", "")
    if not path:
        raise InputError(f"{NAME}: weights is 'best' and no checkpoint was saved: use 'last'")
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{NAME}: {path} holds more than tensors and plain values, and is not read: load it by "
            "hand, and pass the module to featcal.calibrate"
        ) from error
    best = copy.deepcopy(pl_module)
    best.load_state_dict(saved["state_dict"])
    return best
