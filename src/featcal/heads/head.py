"""The last layer as a calibrator sees it: rows of features in, rows of two or more logits out.

Networks differ in what that layer takes and gives: (n, d), a row per token (n, t, d), an image of
1 x 1 pixels (n, d, 1, 1), one logit for two classes. This is the one file that knows. A layer put
into a model keeps its own shapes and its own names in the `state_dict`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self, final

import torch
from torch import Tensor, nn

from featcal.core.batch import Head, one_logit, two_classes, wide
from featcal.core.checks import InputError

if TYPE_CHECKING:
    from featcal.core.calibrator import Calibrator

TABLES = ("_parameters", "_buffers", "_non_persistent_buffers_set")
CONV = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
# Nothing in eval mode, where fits run; a subclass may drop units there too, and is none of these.
INERT = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)


class Wrapper(nn.Module):
    """Stands in for a layer of a model, with a calibrator beside it.

    The layer itself is no child of the wrapper. Both have the same tables of parameters and
    buffers, and the layer's children are the wrapper's, so that `fc.weight` is called so wherever
    torch asks for a name: in a `state_dict`, in `named_parameters`, in a checkpoint, in
    `functional_call`. Attributes the wrapper lacks are the layer's: `model.fc.in_features` answers.
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
        if self._is_replica:  # its tensors were put into the wrapper's copy alone
            own = {name: self._modules[name] for name in self._layer._modules}
            vars(self._layer).update(self._former_parameters, _buffers=self._buffers, _modules=own)
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
        self.calibrator.train(mode)
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

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._layer._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if recurse:
            self.calibrator._apply(fn)
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


@final
class CalibratedHead(Wrapper):
    """features -> calibrated logits; takes the place of a classifier's last layer.

    It takes and gives what the layer does: (n, d) to (n, k), or a row per token, or a 1 x 1 image;
    a layer with one logit gives one calibrated logit.
    """

    def __init__(self, head: nn.Module | None, calibrator: Calibrator) -> None:
        if head is None and calibrator.needs_features:
            raise InputError(
                f"{calibrator!r} works on features: pass the classifier's last layer to wrap()"
            )
        super().__init__(nn.Identity() if head is None else head, calibrator)

    def forward(self, features: Tensor) -> Tensor:
        """Calibrated logits of what enters the layer, in the shape in which it gives its own."""
        return calibrated(self.calibrator, self.uncalibrated, features)


def calibrated(calibrator: Calibrator, layer: nn.Module, features: Tensor) -> Tensor:
    """Calibrated logits of what enters a layer, in the shape in which it gives its own."""
    kind = features.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return _calibrated(calibrator, layer, features, layer)
    dtype = torch.get_autocast_dtype(kind)

    def call(rows: Tensor) -> Tensor:
        with torch.autocast(kind, dtype):
            return layer(rows)  # type: ignore[no-any-return]

    # Mixed precision is for the network: a calibrator's few sums need all their digits.
    with torch.autocast(kind, enabled=False):
        return _calibrated(calibrator, layer, features, call)


def _calibrated(calibrator: Calibrator, layer: nn.Module, features: Tensor, call: Head) -> Tensor:
    """The same, where `call` runs the layer."""
    if type(layer) is nn.Linear and features.ndim == 2 and layer.out_features > 1:
        return calibrator(features, call)  # type: ignore[no-any-return]
    sample = sample_shape(layer, features)
    given: list[torch.Size] = []

    def head(rows: Tensor) -> Tensor:
        own = call(rows if sample is None else rows.reshape(-1, *sample))
        given.append(own.shape[1:])
        return logit_rows(own)

    logits = calibrator(rows_of(layer, features), head)
    if given[-1].numel() == 1:
        logits = one_logit(logits)
    axis = channels(layer, features)
    if axis is None:
        return logits.reshape(-1, *given[-1])  # type: ignore[no-any-return]
    positions = features.movedim(axis, -1).shape[:-1]
    return logits.reshape(*positions, logits.shape[1]).movedim(-1, axis)  # type: ignore[no-any-return]


def head_logits(features: Tensor, head: Head) -> Tensor:
    """What a head makes of rows, in float32 or wider, and with two columns at least."""
    return two_classes(wide(head(features)))


def as_head(layer: Head | None, sample: torch.Size | None = None) -> Head | None:
    """A head of rows, (n, d) -> (n, k) with k of at least 2, made of any last layer.

    Args:
        layer: the layer, or any function of features; None stays None.
        sample: the shape of one sample's features where the layer takes more than (n, d).
    """
    if layer is None or isinstance(layer, RowHead):
        return layer
    linear = linear_view(layer)
    return RowHead(layer, sample) if linear is None else linear


@final
class RowHead(nn.Module):
    """Any layer or function as a head of rows; as a module, its device and mode are known."""

    def __init__(self, layer: Head, sample: torch.Size | None = None) -> None:
        super().__init__()
        self.layer = layer
        self.sample = sample

    def forward(self, rows: Tensor) -> Tensor:
        """Logits (m, k) of rows (m, d)."""
        weights = self.parameters()  # features come in float32, a layer may want fewer digits
        dtype = next((weight.dtype for weight in weights if weight.is_floating_point()), rows.dtype)
        shape = rows.shape if self.sample is None else (-1, *self.sample)
        return logit_rows(self.layer(rows.to(dtype).reshape(shape)))


def linear_view(layer: object) -> nn.Linear | None:
    """The plain `nn.Linear` that does what this layer does; None when it is no linear layer.

    It has the layer's weights, in float32 or wider. Dropout before the last layer is common, and
    does nothing in eval mode. A layer with hooks, or of a class of its own, may compute anything.
    """
    if not isinstance(layer, nn.Module) or _altered(layer):
        return None
    if type(layer) is nn.Sequential:
        parts = [part for part in layer if type(part) not in INERT or _altered(part)]
        return linear_view(parts[0]) if len(parts) == 1 else None
    if not isinstance(layer, (nn.Linear, *CONV)) or type(layer) not in (nn.Linear, *CONV):
        return None
    if not is_linear(layer):
        return None
    if type(layer) is nn.Linear and layer.out_features > 1 and layer.weight.dtype.itemsize >= 4:
        return layer
    bias = None if layer.bias is None else wide(layer.bias)
    return linear_of(wide(layer.weight).flatten(1), bias)


def _altered(layer: nn.Module) -> bool:
    """Whether something of the layer's own comes between its class and what it computes."""
    return bool(layer._forward_hooks or layer._forward_pre_hooks) or "forward" in vars(layer)


def linear_of(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """An `nn.Linear` of these weights, with a row of zeros for class 0 where there is one row."""
    if len(weight) == 1:
        weight = torch.cat([torch.zeros_like(weight), weight])
        bias = None if bias is None else torch.cat([torch.zeros_like(bias), bias])
    # On the meta device no weights are drawn, so that the random state stays as it was.
    made = nn.Linear(weight.shape[1], len(weight), bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return made.eval()


def is_linear(layer: object) -> bool:
    """Whether a layer is a linear map: an `nn.Linear`, or of every pixel, a 1 x 1 convolution."""
    if not isinstance(layer, CONV) or layer.groups != 1:
        return isinstance(layer, nn.Linear)
    padded = not isinstance(layer.padding, str) and any(layer.padding)
    return set(layer.kernel_size) == set(layer.stride) == {1} and not padded


def channels(layer: object, features: Tensor) -> int | None:
    """The axis a layer works along, every other position for itself; None for whole samples.

    It is counted from the last one, because layers also take one sample without a batch axis.
    """
    if isinstance(layer, Wrapper):
        layer = layer.uncalibrated
    if type(layer) is nn.Sequential:
        axes = {channels(part, features) for part in layer if type(part) not in INERT}
        return axes.pop() if len(axes) == 1 else None
    if isinstance(layer, nn.Identity):
        return None if features.ndim == 1 else -1  # (n,) are the single logits of n samples
    if not is_linear(layer):
        return None
    return -1 - len(layer.kernel_size) if isinstance(layer, CONV) else -1


def rows_of(layer: object, features: Tensor) -> Tensor:
    """What enters or leaves a layer, as rows (m, d): a row per position, or a row per sample."""
    axis = channels(layer, features)
    if axis is None:
        return features.flatten(1) if features.ndim > 1 else features[:, None]
    return features.movedim(axis, -1).reshape(-1, features.shape[axis])


def sample_shape(layer: object, features: Tensor) -> torch.Size | None:
    """The shape a layer wants of each row; None when it takes rows as they are."""
    axis = channels(layer, features)
    if axis is None:
        return None if features.ndim == 2 else features.shape[1:]
    return None if axis == -1 else torch.Size((features.shape[axis], *[1] * (-1 - axis)))


def logit_rows(given: Tensor) -> Tensor:
    """What a layer gave for samples, as rows (n, k) with k of at least 2.

    More than one row per sample, such as (n, t, k), is refused: which of them are the classes?
    """
    sizes = tuple(given.shape[1:])
    if len(sizes) > 1 and sum(size != 1 for size in sizes) > 1:
        raise InputError(
            f"the last layer gives values of shape {sizes} for a sample: name a layer that gives "
            "one logit per class with head="
        )
    return two_classes(given if given.ndim < 3 else given.flatten(1))
