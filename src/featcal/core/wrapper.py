"""Stands in for a layer of a model, under the names the layer's tensors have by themselves.

The layer itself is no child of the wrapper. Both have the same tables of parameters and buffers,
and the layer's children are the wrapper's, so that `fc.weight` is called so wherever torch asks for
a name: in a `state_dict`, in `named_parameters`, in a checkpoint, in `functional_call`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor, nn

from featcal.core.errors import InputError

if TYPE_CHECKING:
    from featcal.core.calibrator import Calibrator

TABLES = ("_parameters", "_buffers", "_non_persistent_buffers_set")


class Wrapper(nn.Module):
    """A layer with a calibrator beside it.

    Attributes the wrapper lacks are the layer's, so that `model.fc.in_features` still answers.
    """

    _layer: nn.Module
    _is_replica = False  # what nn.DataParallel sets in the copies it makes

    def __init__(self, layer: nn.Module, calibrator: Calibrator) -> None:
        super().__init__()
        if "calibrator" in layer._modules:
            raise InputError("the layer has a part called calibrator already: rename it")
        self.__dict__["_layer"] = layer  # as an attribute it would become a child
        for table in TABLES:
            self.__dict__[table] = layer.__dict__[table]
        self._modules.update(layer._modules)
        self.calibrator = calibrator

    @property
    def uncalibrated(self) -> nn.Module:
        """The layer itself, as it was before."""
        if self._is_replica:
            self._complete_replica()
        return self._layer

    @property
    def training(self) -> bool:
        """The layer's own flag, whoever sets it, and through whom."""
        layer = self.__dict__.get("_layer")
        return True if layer is None else layer.training

    @training.setter
    def training(self, mode: bool) -> None:
        layer = self.__dict__.get("_layer")
        if layer is not None:  # torch sets a flag before there is a layer
            layer.training = mode

    def train(self, mode: bool = True) -> Self:
        """Sets the mode of the layer, as the layer does it, and of the calibrator."""
        self._layer.train(mode)
        for part in self._added():
            part.train(mode)
        return self

    def extra_repr(self) -> str:
        """The layer; its parts are shown among the wrapper's own."""
        return f"{type(self._layer).__name__}({self._layer.extra_repr()})"

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the layer has
        try:
            return super().__getattr__(name)
        except AttributeError:
            layer = self.__dict__.get("_layer")
            if layer is None or name.startswith("__"):
                raise
            return getattr(layer, name)

    def _added(self) -> Iterator[nn.Module]:
        """The children that are not the layer's."""
        own = set(map(id, self._layer._modules.values()))
        return (part for part in self.children() if id(part) not in own)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._layer._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for part in self._added() if recurse else ():
            part._apply(fn)  # type: ignore[no-untyped-call]
        return self

    def _save_to_state_dict(self, *args: Any) -> None:  # noqa: ANN401
        self._layer._save_to_state_dict(*args)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        *args: Any,  # noqa: ANN401
    ) -> None:
        """Also takes the state of the model without a calibrator, and then keeps its own."""
        for hook in self._load_state_dict_pre_hooks.values():
            hook(state_dict, prefix, *args)
        place = f"{prefix}calibrator."
        beside = {key: state_dict.pop(key) for key in [*state_dict] if key.startswith(place)}
        self._layer._load_from_state_dict(state_dict, prefix, *args)
        kept = {place + key: value for key, value in self.calibrator.state_dict().items()}
        state_dict.update(beside or kept)

    def _replicate_for_data_parallel(self) -> Self:
        replica = super()._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        replica.__dict__["_layer"] = self._layer._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        return replica  # type: ignore[no-any-return]

    def _complete_replica(self) -> None:
        """Gives the layer of a copy the tensors that nn.DataParallel put into the copy alone."""
        vars(self._layer).update(self._former_parameters)
        own = {name: self._modules[name] for name in self._layer._modules}
        vars(self._layer).update(_buffers=self._buffers, _modules=own)
