"""Losses that train networks to be calibrated; `docs/losses.md` has the formulas.

A loss is a frozen record of hyperparameters that maps logits and labels to one number. Every loss
runs inside a captured CUDA graph: shapes do not depend on data, and nothing waits for the device.
Logits of 16 bits are computed in float32, and float64 stays float64.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from numbers import Real
from typing import ClassVar, Literal, TypeVar, cast, final

import torch
import torch.nn.functional as F
from torch import Tensor

from featcal.core import listed
from featcal.core.batch import wide
from featcal.core.checks import MOST, InputError
from featcal.core.text import Reader

__all__ = [
    "CE",
    "FLSD",
    "LOSSES",
    "MMCE",
    "AdaFocal",
    "Brier",
    "DualFocal",
    "FLSc",
    "Focal",
    "LabelSmoothing",
    "MaxEntropy",
    "RowLoss",
    "SoftECE",
    "TrainingLoss",
    "mixed",
    "parse_loss",
]

# torch leaves rows out whose label is `ignore_index`, -100 by default: here no label means that.
NO_LABEL = -(2**62)
STAGES = (100 / 350, 250 / 350)  # where the published FLSc changes gamma, of 350 epochs
STEPS = 6  # of Newton's method; four reach the last digit of float64 for every p in range
SMALLEST = 1e-30  # p below count as this; gamma, of the order of 1 / p, then still fits float32
WIDTH = 0.4  # of the kernel of MMCE
EMPTY = 1e-12  # rows; a soft bin with less adds less than that to the error
FLAT = 1e-12  # below this a square counts as 0: its root is the rounding of a float32 near 1

Value = TypeVar("Value")


def as_float(value: object) -> float:
    """The value as a float; NaN where it is no finite number."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        return math.nan
    return float(value)


def checked(default: Value, allowed: Callable[[Value], bool], words: str) -> Value:
    """A hyperparameter of the default's type that is refused with these words unless allowed."""
    return field(default=default, metadata={"allowed": allowed, "words": words})


def not_negative(default: float) -> float:
    """A hyperparameter from 0 up."""
    return checked(default, lambda value: value >= 0, "give a number from 0 up")


def above_0(default: float) -> float:
    """A hyperparameter above 0."""
    return checked(default, lambda value: value > 0, "give a number above 0")


def whole(default: int) -> int:
    """A hyperparameter that is a whole number from 1 to that of bins everywhere."""
    most = MOST["bins"]
    return checked(
        default, lambda value: 1 <= value <= most, f"give a whole number from 1 to {most}"
    )


def choice(default: Value, other: Value) -> Value:
    """A hyperparameter that is one of two values."""
    return checked(default, (default, other).__contains__, f"choose {default} or {other}")


LOSSES: dict[str, type[TrainingLoss]] = {}


@dataclass(frozen=True, kw_only=True, repr=False)
class TrainingLoss(ABC):
    """What a network is trained to make small.

    A subclass that sets `name` is registered under it. Losses are equal when their hyperparameters
    are, and `repr` is the text that `parse_loss` reads.

    Attributes:
        name: the id in text, such as "focal".
        title: the heading of its column in tables, as the literature has it.
        soft_targets: whether labels may be rows of class probabilities (n, k).
        needs_held_out: whether `updated` wants outputs on rows kept out of training.
        reduction: "mean" over the batch, or "sum": n times the mean, whatever the loss.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    soft_targets: ClassVar[bool] = False
    needs_held_out: ClassVar[bool] = False

    reduction: Literal["mean", "sum"] = choice("mean", "sum")

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" in cls.__dict__ and LOSSES.setdefault(cls.name, cls) is not cls:
            taken = LOSSES[cls.name].__qualname__
            raise TypeError(f"loss name {cls.name!r} is taken by {taken}")

    def __post_init__(self) -> None:
        for one in fields(self):
            if one.metadata:
                given, kind = getattr(self, one.name), type(one.default)
                # A number is kept as a float, so that 3 and 3.0 are one loss.
                value = as_float(given) if kind is float else given
                if type(value) is not kind or not one.metadata["allowed"](value):
                    words = one.metadata["words"]
                    raise InputError(f"{self.name}: {one.name} is {given!r}: {words}")
                object.__setattr__(self, one.name, value)

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of a batch, a 0-d tensor, float32 or wider.

        Args:
            logits: (n, k) floating point, k at least 2.
            labels: (n,) int64, or (n, k) class probabilities where `soft_targets`.

        Raises:
            InputError: for shapes and dtypes that cannot be used. Values are not looked at: that
                would wait for the device.
        """
        self.check(logits, labels)
        value = self.mean(wide(logits), labels)
        return value if self.reduction == "mean" else value * len(logits)

    @abstractmethod
    def mean(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss under reduction "mean", of checked logits that are float32 or wider."""

    def rows(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of each row (n,), of checked logits that are float32 or wider."""
        raise InputError(f"{self.name}: it is no mean over rows: call the loss on the batch")

    def at(self, progress: float) -> TrainingLoss:
        """The loss for a point of training, from 0 at the start to 1 at the end."""
        return self

    def updated(self, logits: Tensor, labels: Tensor) -> TrainingLoss:
        """The loss of the next epoch, given outputs on held-out rows; itself unless it adapts."""
        return self

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint must hold besides the text: the tensors `updated` has set."""
        return {}

    def restored(self, state: Mapping[str, Tensor]) -> TrainingLoss:
        """This loss with the state of a checkpoint."""
        if state:
            raise InputError(f"{self.name}: state holds {', '.join(state)}: this loss has no state")
        return self

    def to(self, device: torch.device | str) -> TrainingLoss:
        """This loss with its state on a device."""
        return self

    @property
    def heading(self) -> str:
        """`title`, or the text of the loss where its hyperparameters are not the default ones."""
        changed = self.changed().keys() - {"reduction"}
        return repr(self) if changed else self.title

    @classmethod
    def arguments(cls) -> dict[str, object]:
        """The hyperparameters with their defaults; state is none of them."""
        own = sorted(fields(cls), key=lambda field: field.name == "reduction")
        return {field.name: field.default for field in own if field.compare}

    def changed(self) -> dict[str, object]:
        """The hyperparameters that differ from their defaults."""
        given = {key: getattr(self, key) for key in self.arguments()}
        return {key: value for key, value in given.items() if value != self.arguments()[key]}

    def __repr__(self) -> str:
        arguments = ", ".join(f"{key}={value!r}" for key, value in self.changed().items())
        return f"{self.name}({arguments})" if arguments else self.name

    def check(self, logits: Tensor, labels: Tensor) -> None:
        """Refuses what is no batch, by shape and dtype alone."""
        shape = tuple(logits.shape)
        if not logits.is_floating_point() or len(shape) != 2 or shape[0] < 1 or shape[1] < 2:
            raise InputError(
                f"{self.name}: logits are {logits.dtype} of shape {shape}: give floating point "
                "(n, k), at least one row and two classes; of a single logit z make the two "
                "columns 0 and z"
            )
        soft = labels.is_floating_point() and labels.ndim == 2
        if soft and not self.soft_targets:
            raise InputError(
                f"{self.name}: labels are rows of probabilities: this loss needs class numbers; "
                "for mixup use featcal.losses.mixed with both labels of a row"
            )
        kind, wanted = ("probabilities", shape) if soft else ("int64 class numbers", shape[:1])
        if tuple(labels.shape) != wanted or not (soft or labels.dtype == torch.int64):
            raise InputError(
                f"{self.name}: labels are {labels.dtype} of shape {tuple(labels.shape)}: give "
                f"{kind} of shape {wanted} for logits of shape {shape}"
            )


class RowLoss(TrainingLoss):
    """A loss that is a mean over rows, each computed by itself: `rows` is all it has to say."""

    @abstractmethod
    def rows(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of each row (n,), of checked logits that are float32 or wider."""

    def mean(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The mean over the rows."""
        return self.rows(logits, labels).mean()


def mixed(
    loss: TrainingLoss, logits: Tensor, labels: Tensor, partners: Tensor, weight: Tensor | float
) -> Tensor:
    """The loss of mixed inputs in the two-term form: w L(labels) + (1 - w) L(partners).

    Zhang et al., mixup (ICLR 2018). It serves every loss, with or without soft targets.

    Args:
        loss: any training loss.
        logits: (n, k) outputs for w x + (1 - w) x'.
        labels: those of x.
        partners: those of x'.
        weight: w, a float or a 0-d tensor; a captured graph reads a tensor anew at each replay.
    """
    if isinstance(weight, Tensor) and weight.ndim != 0:
        raise InputError(f"mixed: weight has shape {tuple(weight.shape)}: give one for the batch")
    return weight * loss(logits, labels) + (1 - weight) * loss(logits, partners)


def label_logs(logits: Tensor, labels: Tensor) -> Tensor:
    """The log p of each row's own class: (n, k), (n,) -> (n,), at most 0."""
    return -F.cross_entropy(logits, labels, reduction="none", ignore_index=NO_LABEL)


def top_label(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The confidence of each row, and 1 where its prediction is right, else 0: (n,) each.

    Only the confidence has a gradient: being right is constant but for jumps.
    """
    confidence = logits.softmax(1).amax(1)
    return confidence, (logits.detach().argmax(1) == labels).to(logits.dtype)


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class CE(RowLoss):
    """Cross-entropy: -log p of the label's class, or -sum_k t_k log q_k of soft targets."""

    name = "ce"
    title = "Cross Entropy"
    soft_targets = True

    def rows(self, logits: Tensor, labels: Tensor) -> Tensor:
        """-log p."""
        return -target_logs(logits, labels)


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class Brier(RowLoss):
    """The Brier score, sum_k (q_k - t_k)^2, from 0 to 2.

    The published recipe sums the other losses over a batch but averages this one: reduction "mean"
    is its published form.
    """

    name = "brier"
    title = "Brier Loss"
    soft_targets = True

    def rows(self, logits: Tensor, labels: Tensor) -> Tensor:
        """sum_k (q_k - t_k)^2."""
        probs = logits.softmax(1)
        if labels.is_floating_point():
            targets = labels.to(probs.dtype)
        else:
            targets = torch.zeros_like(probs).scatter(1, labels[:, None], 1.0)
        return (probs - targets).square().sum(1)


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class MaxEntropy(RowLoss):
    """Cross-entropy less beta times the entropy of the prediction, -sum_k q_k log q_k.

    The confidence penalty of Pereyra et al. (2017).

    Args:
        beta: the weight of the entropy, at least 0; 0 is cross-entropy.
        reduction: "mean" or "sum".
    """

    name = "max_entropy"
    title = "Entropy Penalty"
    soft_targets = True

    beta: float = not_negative(0.1)

    def rows(self, logits: Tensor, labels: Tensor) -> Tensor:
        """-log p - beta H(q)."""
        logs = logits.log_softmax(1)
        entropy = -(logs.exp() * logs).sum(1)
        return -target_logs(logits, labels) - self.beta * entropy


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class LabelSmoothing(RowLoss):
    """Cross-entropy with smoothed targets (Szegedy et al., CVPR 2016).

    spread "others": 1 - alpha on the label, alpha / (k - 1) on each other class, as published.
    spread "all": alpha / k on every class and 1 - alpha more on the label, as in torch. The first
    with alpha is the second with alpha k / (k - 1). Soft targets are smoothed by the same linear
    map of their mass.

    Args:
        alpha: the mass taken from the label, from 0 to below 1; 0 is cross-entropy.
        spread: which classes share it.
        reduction: "mean" or "sum".
    """

    name = "label_smoothing"
    title = "LS-0.05"
    soft_targets = True

    alpha: float = checked(0.05, lambda value: 0 <= value < 1, "give a number from 0 to below 1")
    spread: Literal["others", "all"] = choice("others", "all")

    def rows(self, logits: Tensor, labels: Tensor) -> Tensor:
        """-sum_k t_k log q_k of the smoothed targets t."""
        classes = logits.shape[1]
        alpha = self.alpha * (classes / (classes - 1) if self.spread == "others" else 1.0)
        uniform = logits.log_softmax(1).mean(1)
        return -(1 - alpha) * target_logs(logits, labels) - alpha * uniform


def target_logs(logits: Tensor, labels: Tensor) -> Tensor:
    """sum_k t_k log q_k of each row: (n,); log p where labels are class numbers."""
    if not labels.is_floating_point():
        return label_logs(logits, labels)
    return (labels.to(logits.dtype) * logits.log_softmax(1)).sum(1)


# Focal losses, -(1 - p)^gamma log p: less weight on rows that are sure already. Lin et al. (ICCV
# 2017) for detection; Mukhoti et al. (NeurIPS 2020) for calibration, with a gamma that depends on
# the row (FLSD) or on the epoch (FLSc); Tao, Dong and Xu (ICML 2023) with an eye on the next class
# (DualFocal); Ghosh et al. (NeurIPS 2022) with a gamma for each bin, steered by held-out rows
# (AdaFocal). The gradient flows through (1 - p) as well.


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class Focal(RowLoss):
    """-(1 - p)^gamma log p.

    Args:
        gamma: at least 0; 0 is cross-entropy.
        reduction: "mean" or "sum".
    """

    name = "focal"
    title = "Focal Loss"

    gamma: float = not_negative(3.0)

    def rows(self, logits: Tensor, labels: Tensor) -> Tensor:
        """-(1 - p)^gamma log p."""
        return focal_rows(label_logs(logits, labels), self.gamma)


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class FLSD(RowLoss):
    """Focal loss with a gamma for each row, chosen by p without gradient.

    gamma is `low` where p is below the threshold and `high` elsewhere; the defaults are FLSD-53.
    In the closed form, rows below the threshold have the gamma at which focal loss pulls exactly
    as hard as cross-entropy (`balancing_gamma`, the Lambert W rule) instead of `low`.

    Args:
        low: gamma where p is low.
        high: gamma where p is high.
        threshold: the p from which on it is high, from 0 to 1; to 0.5 in the closed form, which
            has no gamma above 0 beyond.
        closed_form: a gamma of its own for each row below the threshold.
        reduction: "mean" or "sum".
    """

    name = "flsd"
    title = "FLSD-53"

    low: float = not_negative(5.0)
    high: float = not_negative(3.0)
    threshold: float = checked(0.2, lambda value: 0 <= value <= 1, "give a number from 0 to 1")
    closed_form: bool = choice(False, True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.closed_form and self.threshold > 0.5:
            raise InputError(f"{self!r}: the closed form needs a threshold from 0 to 0.5")

    def gammas(self, probs: Tensor) -> Tensor:
        """The gamma of each row, given p of its label's class: (n,) -> (n,), without gradient."""
        probs = probs.detach()
        low = balancing_gamma(probs) if self.closed_form else torch.full_like(probs, self.low)
        return torch.where(probs < self.threshold, low, self.high)

    def rows(self, logits: Tensor, labels: Tensor) -> Tensor:
        """-(1 - p)^gamma(p) log p."""
        log_p = label_logs(logits, labels)
        return focal_rows(log_p, self.gammas(log_p.exp()))


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class FLSc(RowLoss):
    """Focal loss whose gamma falls in three stages of training; the defaults are FLSc-531.

    The stages change at 100/350 and 250/350 of training, as published. `at` gives the focal loss
    of a stage; called by itself the loss is that of the first stage.

    Args:
        gammas: one for each stage, at least 0.
        reduction: "mean" or "sum".
    """

    name = "flsc"
    title = "FLSc-531"

    gammas: tuple[float, float, float] = (5.0, 3.0, 1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        given: object = self.gammas
        gammas = tuple(map(as_float, given)) if isinstance(given, (tuple, list)) else ()
        if len(gammas) != len(STAGES) + 1 or not all(gamma >= 0 for gamma in gammas):
            raise InputError(f"{self.name}: gammas is {given!r}: give three numbers from 0 up")
        object.__setattr__(self, "gammas", gammas)

    def at(self, progress: float) -> Focal:
        """The focal loss at this share of training, from 0 to 1."""
        if not 0 <= as_float(progress) <= 1:
            raise InputError(f"{self.name}: progress is {progress!r}: give a number from 0 to 1")
        stage = sum(progress >= change for change in STAGES)
        return _focal(self.gammas[stage], self.reduction)

    def rows(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Those of the first stage."""
        return self.at(0.0).rows(logits, labels)


@lru_cache
def _focal(gamma: float, reduction: Literal["mean", "sum"]) -> Focal:
    """One object for a whole stage, so that a captured graph lasts as long."""
    return Focal(gamma=gamma, reduction=reduction)


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class DualFocal(RowLoss):
    """-(1 - p + p_j)^gamma log p, p_j the largest probability strictly below p, or 0 if none is.

    Classes tied with the label's are passed over, as published. Ties are told by the logits, which
    differ where probabilities have been rounded to one number. The gradient flows through p and
    p_j.

    Args:
        gamma: at least 0; 0 is cross-entropy. The authors choose it for each network.
        reduction: "mean" or "sum".
    """

    name = "dual_focal"
    title = "Dual Focal Loss"

    gamma: float = not_negative(5.0)

    def rows(self, logits: Tensor, labels: Tensor) -> Tensor:
        """-(1 - p + p_j)^gamma log p."""
        logs = logits.log_softmax(1)
        log_p = -F.nll_loss(logs, labels, reduction="none", ignore_index=NO_LABEL)
        own = logits.detach().gather(1, labels[:, None])
        below = torch.where(logits.detach() < own, logs.exp(), 0.0).amax(1)
        # 1 - p + p_j is 0 when p rounds to 1: a power below 1 has an infinite slope there.
        rest = (below - torch.expm1(log_p)).clamp_min(torch.finfo(logs.dtype).tiny)
        return -rest.pow(self.gamma) * log_p


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class AdaFocal(RowLoss):
    """-(1 - p)^g log p for g >= 0 and -(1 + p)^|g| log p below, g that of the bin of p.

    Where the network is too sure g grows; where it is not sure enough g shrinks and turns negative,
    which stands for the inverse focal loss.

    `updated`, called after an epoch, cuts the confidences of held-out rows into bins of equal mass
    and moves each g by its bin's gap, mean confidence less accuracy: g exp(rate gap) for g > 0,
    g exp(-rate gap) for g < 0. A g that comes closer to 0 than `switch` crosses to the other sign,
    at `switch`; the result is clipped to [smallest, largest]. A bin without rows keeps its g.

    The held-out rows steer the training, so they are no longer unseen: keep a split for them apart
    from the one that calibrators are fitted on afterwards.

    Args:
        bins: how many bins, at least 1.
        rate: how fast gamma follows the gap, above 0.
        start: gamma before the first update, from `switch` to `largest`.
        switch: the size at which gamma changes sign, above 0.
        smallest: the lowest gamma, at most -switch.
        largest: the highest gamma, at least `switch`.
        edges: state, (bins - 1,) float32, ascending; p on an edge is in the lower bin. Left out by
            users.
        gammas: state, (bins,) float32.
        reduction: "mean" or "sum".
    """

    name = "adafocal"
    title = "AdaFocal"
    needs_held_out = True

    bins: int = whole(15)
    rate: float = above_0(1.0)
    start: float = above_0(1.0)
    switch: float = above_0(0.2)
    smallest: float = checked(-2.0, lambda value: value < 0, "give a number below 0")
    largest: float = above_0(20.0)
    edges: Tensor = field(default_factory=lambda: torch.empty(0), compare=False)
    gammas: Tensor = field(default_factory=lambda: torch.empty(0), compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.smallest <= -self.switch < self.switch <= self.start <= self.largest:
            raise InputError(f"{self!r}: give smallest <= -switch and switch <= start <= largest")
        edges = torch.linspace(0, 1, self.bins + 1)[1:-1]
        gammas = torch.full((self.bins,), self.start)
        for key, fresh in (("edges", edges), ("gammas", gammas)):
            given = getattr(self, key)
            if given.numel() == 0:
                object.__setattr__(self, key, fresh)
            elif given.shape != fresh.shape:
                shapes = f"shape {tuple(given.shape)}: {self.bins} bins need {tuple(fresh.shape)}"
                raise InputError(f"{self.name}: {key} has {shapes}")

    def rows(self, logits: Tensor, labels: Tensor) -> Tensor:
        """-(1 - p)^g log p, or -(1 + p)^|g| log p."""
        log_p = label_logs(logits, labels)
        p = log_p.exp()
        gamma = self.gammas.to(p)[self._bin(p.detach())]
        log_base = torch.where(gamma >= 0, log_rest(log_p), torch.log1p(p))
        return -(gamma.abs() * log_base).exp() * log_p

    def _bin(self, probs: Tensor) -> Tensor:
        return (probs[:, None] > self.edges.to(probs)).sum(1)

    @torch.no_grad()
    def updated(self, logits: Tensor, labels: Tensor) -> AdaFocal:
        """The loss of the next epoch; this one stays as it is.

        Args:
            logits: (n, k) of all held-out rows, the same on every process.
            labels: (n,) int64.
        """
        self.check(logits, labels)
        if not bool(((labels >= 0) & (labels < logits.shape[1])).all()):
            known = f"class numbers from 0 to {logits.shape[1] - 1}"
            raise InputError(f"{self.name}: labels hold others than {known}")
        confidence, right = top_label(wide(logits), labels)
        if not bool(confidence.isfinite().all()):
            raise InputError(f"{self.name}: logits hold NaN or infinity: has training diverged?")
        moved = replace(self, edges=equal_mass_edges(confidence, self.bins).to(self.edges))
        index = moved._bin(confidence)
        gaps = (confidence - right).double()
        none = torch.zeros(self.bins, dtype=torch.float64, device=gaps.device)
        count = none.index_add(0, index, torch.ones_like(gaps))
        gap = none.index_add(0, index, gaps) / count.clamp_min(1)
        old = self.gammas.to(gap)
        new = old * (old.sign() * self.rate * gap).exp()
        switch = torch.full_like(self.gammas, self.switch).to(gap)  # as float32 holds it
        new = torch.where(new.abs() < switch, -old.sign() * switch, new)
        return replace(moved, gammas=new.clamp(self.smallest, self.largest).to(self.gammas))

    def state(self) -> dict[str, Tensor]:
        """`edges` and `gammas`, the tensors themselves.

        A captured CUDA graph reads these very tensors: copy those of the updated loss into them.
        """
        return {"edges": self.edges, "gammas": self.gammas}

    def restored(self, state: Mapping[str, Tensor]) -> AdaFocal:
        """This loss with the edges and gammas of a checkpoint."""
        if set(state) != {"edges", "gammas"}:
            raise InputError(f"{self.name}: state holds {list(state)}: give edges and gammas")
        return replace(self, edges=state["edges"], gammas=state["gammas"])

    def to(self, device: torch.device | str) -> AdaFocal:
        """This loss with its edges and gammas on a device."""
        return replace(self, edges=self.edges.to(device), gammas=self.gammas.to(device))


def focal_rows(log_p: Tensor, gamma: Tensor | float) -> Tensor:
    """-(1 - p)^gamma log p of each row, gamma one number or one per row."""
    return -(gamma * log_rest(log_p)).exp() * log_p


def log_rest(log_p: Tensor) -> Tensor:
    """log(1 - p) without cancellation: log1p(-p) for small p, log(-expm1(log p)) for large.

    At p = 1 the slope of log(1 - p) is infinite and would meet a factor of 0: NaN. The smallest
    normal number stands in for 1 - p there, and no gradient flows.
    """
    half = -math.log(2)
    small = torch.log1p(-log_p.clamp(max=half).exp())
    large = (-torch.expm1(log_p)).clamp_min(torch.finfo(log_p.dtype).tiny).log()
    return torch.where(log_p < half, small, large)


@torch.no_grad()
def balancing_gamma(probs: Tensor) -> Tensor:
    """The gamma > 0 with g(p, gamma) = 1 for p < 1/2, and 0 from there on: (n,) -> (n,).

    At this gamma focal loss pulls as hard as cross-entropy: with q = 1 - p, its gradient is that of
    cross-entropy times g(p, gamma) = q^gamma - gamma p q^(gamma-1) log p. With a = -p log p / q,
    g = 1 reads q^gamma (1 + a gamma) = 1. gamma = 0 solves it; the other solution, above 0 for
    p < 1/2, is found by the Lambert W function, with r = -log q / a in (0, 1):

        gamma = (w - r) / -log q,    w = -W_-1(-r exp(-r)),    w - log w = r - log r and w > 1.

    Mukhoti et al. (NeurIPS 2020) state the same rule as a/b + W_-1(...) / log a.

    >>> balancing_gamma(torch.tensor([0.2, 0.25, 0.5])).mul(100).round().tolist()
    [485.0, 307.0, 0.0]
    """
    p = probs.double().clamp(SMALLEST, 0.5)
    log_p, log_q = p.log(), torch.log1p(-p)
    r = (1 - p) * log_q / (p * log_p)
    w = lower_branch((r - 1 - r.log()).clamp_min(0.0))
    return ((w - r) / -log_q).clamp_min(0.0).to(probs.dtype)


def lower_branch(excess: Tensor) -> Tensor:
    """The w > 1 with w - log w = 1 + u, that is -W_-1(-exp(-1 - u)), for u >= 0 in float64.

    The number of steps is fixed, for CUDA graphs. The function is convex and the start,
    1 + sqrt(2 u) + u, lies above the root (Chatzigeorgiou 2013): every step stays above it.
    """
    w = 1 + (2 * excess).sqrt() + excess
    for _ in range(STEPS):
        miss = w - w.log() - 1 - excess
        w = w - miss * w / (w - 1).clamp_min(1e-12)  # at u = 0 both are 0
    return w


def equal_mass_edges(values: Tensor, bins: int) -> Tensor:
    """The m - 1 inner edges of bins with nearly equal numbers of values, halfway between two.

    >>> equal_mass_edges(torch.tensor([0.1, 0.9, 0.3, 0.5]), 2).tolist()
    [0.4000000059604645]
    """
    ordered = values.sort().values
    cut = torch.arange(1, bins, device=values.device) * len(values) // bins
    left = ordered[(cut - 1).clamp_min(0)]
    return (left + ordered[cut]) / 2


# Cross-entropy plus a calibration error of the batch: of a kernel (MMCE), or of soft bins.


@dataclass(frozen=True, kw_only=True, repr=False)
class Penalised(TrainingLoss):
    """Cross-entropy plus weight times a penalty on the batch as a whole."""

    weight: float = not_negative(1.0)

    def mean(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy + weight penalty."""
        return self.weight * self.penalty(logits, labels) - label_logs(logits, labels).mean()

    @abstractmethod
    def penalty(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The calibration error of the batch alone."""


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class MMCE(Penalised):
    """Cross-entropy plus weight times MMCE, the maximum mean calibration error of the batch.

    Kumar et al. (ICML 2018). With r the confidence, c = 1 where the prediction is right and 0
    elsewhere, v a weight for each row and the kernel k(r, r') = exp(-|r - r'| / 0.4),
    MMCE = sqrt(sum_ij v_i v_j (c_i - r_i)(c_j - r_j) k(r_i, r_j)), a norm:

    - variant "plain": v = 1/n. It vanishes where confidence is right on average.
    - variant "weighted": v = 1/m on the m right rows and 1/n' on the n' wrong ones, so that few
      wrong rows count as much as many right ones. In a batch all right or all wrong it is the
      plain one. It does not vanish at calibration, and pulls the confidence below the accuracy.

    form "published" is what the published training code computes. Plain: the square, no root.
    Weighted: the three means over pairs are divided by m^2, n'^2 and m n' once more, which leaves
    little but the wrong rows' term, and the penalty is 0 in a batch all right or all wrong. There
    the argument of the root may fall below 0, which gave NaN: here it stops at 0.

    Args:
        weight: of MMCE, at least 0.
        variant: which rows count how much; the paper's tables have the weighted one.
        form: as intended, or as published.
        reduction: "mean" or "sum"; the published sum is n times the whole, as here.
    """

    name = "mmce"
    title = "MMCE"

    weight: float = not_negative(2.0)
    variant: Literal["plain", "weighted"] = choice("plain", "weighted")
    form: Literal["intended", "published"] = choice("intended", "published")

    def penalty(self, logits: Tensor, labels: Tensor) -> Tensor:
        """MMCE of the batch alone."""
        confidence, right = top_label(logits, labels)
        rights = right.sum()
        wrongs = len(right) - rights
        if self.form == "published" and self.variant == "weighted":
            kernel = _kernel(confidence)

            def mean_again(one: Tensor, other: Tensor, count: Tensor) -> Tensor:
                mean = (one[:, None] * other * kernel).sum() / count.clamp_min(1)
                return mean / (count + 1e-5)

            sure, unsure = (1 - right) * confidence, right * (1 - confidence)
            square = mean_again(unsure, unsure, rights * rights)
            square = square + mean_again(sure, sure, wrongs * wrongs)
            square = square - 2 * mean_again(unsure, sure, rights * wrongs)
            some_of_each = rights * wrongs > 0
            return torch.where(some_of_each, (square.clamp_min(0.0) + 1e-10).sqrt(), 0.0)
        share: Tensor | float = 1 / len(right)
        if self.variant == "weighted":
            share = torch.where(right > 0, 1 / rights.clamp_min(1), 1 / wrongs.clamp_min(1))
        residual = share * (right - confidence)
        # No matrix product: autocast would take it to 16 bits.
        square = (residual[:, None] * residual * _kernel(confidence)).sum()
        return square if self.form == "published" else root(square)


def _kernel(confidence: Tensor) -> Tensor:
    return (-(confidence[:, None] - confidence).abs() / WIDTH).exp()  # (n, n)


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class SoftECE(Penalised):
    """Cross-entropy plus weight times a soft-binned calibration error of the batch.

    Soft bins give the error a gradient (Karandikar et al., NeurIPS 2021). A row of confidence r
    belongs to the bin of centre x_b by the share softmax_b(-(r - x_b)^2 / temperature). With s_b
    the sum of these shares over the rows and gap_b the mean of r - c in the bin, c = 1 where the
    prediction is right, the error is (sum_b s_b/n |gap_b|^norm)^(1/norm).

    Args:
        weight: of the error, at least 0.
        bins: of equal width, at least 1.
        temperature: above 0; the smaller, the harder the bins. 0.01 lets 15 bins overlap.
        norm: 2, as in the paper, or 1 as in ECE.
        reduction: "mean" or "sum", n times the whole.
    """

    name = "soft_ece"
    title = "Soft ECE"

    bins: int = whole(15)
    temperature: float = above_0(0.01)
    norm: int = choice(2, 1)

    def penalty(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The soft-binned error of the batch alone."""
        confidence, right = top_label(logits, labels)
        shares = self.shares(confidence)
        gaps = (shares * (confidence - right)[:, None]).sum(0) / len(right)  # (m,), s_b/n gap_b
        if self.norm == 1:
            return gaps.abs().sum()
        mass = shares.sum(0).clamp_min(EMPTY) / len(right)
        return root((gaps.square() / mass).sum())

    def shares(self, confidence: Tensor) -> Tensor:
        """How much of each row belongs to each bin: (n,) -> (n, m), rows sum to 1."""
        centres = torch.arange(self.bins, dtype=confidence.dtype, device=confidence.device)
        distance = confidence[:, None] - (centres + 0.5) / self.bins
        return (-distance.square() / self.temperature).softmax(1)


def root(square: Tensor) -> Tensor:
    """The square root where it has a finite slope, and 0 with no slope from `FLAT` down.

    The squares here are squared norms of residuals. At 0 a norm has a kink, where 0 is a
    subgradient; the chain rule through sqrt would give 0 / 0 instead.
    """
    return torch.where(square > FLAT, square.clamp_min(FLAT).sqrt(), 0.0)


READER: Reader[TrainingLoss] = Reader(
    text="loss",
    item="loss",
    known=LOSSES,
    example="focal(gamma=3)",
    grammar="one loss, for example 'focal(gamma=3)'",
    pieces="the name of one loss and literal keyword arguments",
    arguments=lambda loss: cast(type[TrainingLoss], loss).arguments(),
    meant=dict.fromkeys(("cross_entropy", "crossentropy", "CrossEntropyLoss", "nll"), "ce"),
)


def parse_loss(text: str) -> TrainingLoss:
    """The loss a text describes.

    >>> parse_loss("focal(gamma=2)")
    focal(gamma=2.0)

    Raises:
        InputError: naming what cannot be read.
    """
    return READER.read(text)


for _name in listed.LOSSES:
    LOSSES[_name] = LOSSES.pop(_name)
