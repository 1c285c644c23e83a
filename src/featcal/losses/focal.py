"""Focal losses, -(1 - p)^gamma log p: less weight on rows that are sure already.

Lin et al. (ICCV 2017) for detection; Mukhoti et al. (NeurIPS 2020) for calibration, with a gamma
that depends on the row (FLSD) or on the epoch (FLSc); Tao, Dong and Xu (ICML 2023) with an eye on
the next class (DualFocal); Ghosh et al. (NeurIPS 2022) with a gamma for each bin, steered by
held-out rows (AdaFocal). The gradient flows through (1 - p) as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor

from featcal.core.checks import InputError
from featcal.losses import base

STAGES = (100 / 350, 250 / 350)  # where the published FLSc changes gamma, of 350 epochs
STEPS = 6  # of Newton's method; four reach the last digit of float64 for every p in range
SMALLEST = 1e-30  # p below count as this; gamma, of the order of 1 / p, then still fits float32


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class Focal(base.RowLoss):
    """-(1 - p)^gamma log p.

    Args:
        gamma: at least 0; 0 is cross-entropy.
        reduction: "mean" or "sum".
    """

    name = "focal"
    title = "Focal Loss"

    gamma: float = base.not_negative(3.0)

    def rows(self, logits: Tensor, labels: Tensor) -> Tensor:
        """-(1 - p)^gamma log p."""
        return focal_rows(base.label_logs(logits, labels), self.gamma)


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class FLSD(base.RowLoss):
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

    low: float = base.not_negative(5.0)
    high: float = base.not_negative(3.0)
    threshold: float = base.checked(0.2, lambda value: 0 <= value <= 1, "give a number from 0 to 1")
    closed_form: bool = base.choice(False, True)

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
        log_p = base.label_logs(logits, labels)
        return focal_rows(log_p, self.gammas(log_p.exp()))


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class FLSc(base.RowLoss):
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
        gammas = tuple(map(base.as_float, given)) if isinstance(given, (tuple, list)) else ()
        if len(gammas) != len(STAGES) + 1 or not all(gamma >= 0 for gamma in gammas):
            raise InputError(f"{self.name}: gammas is {given!r}: give three numbers from 0 up")
        object.__setattr__(self, "gammas", gammas)

    def at(self, progress: float) -> Focal:
        """The focal loss at this share of training, from 0 to 1."""
        if not 0 <= base.as_float(progress) <= 1:
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
class DualFocal(base.RowLoss):
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

    gamma: float = base.not_negative(5.0)

    def rows(self, logits: Tensor, labels: Tensor) -> Tensor:
        """-(1 - p + p_j)^gamma log p."""
        logs = logits.log_softmax(1)
        log_p = -F.nll_loss(logs, labels, reduction="none", ignore_index=base.NO_LABEL)
        own = logits.detach().gather(1, labels[:, None])
        below = torch.where(logits.detach() < own, logs.exp(), 0.0).amax(1)
        # 1 - p + p_j is 0 when p rounds to 1: a power below 1 has an infinite slope there.
        rest = (below - torch.expm1(log_p)).clamp_min(torch.finfo(logs.dtype).tiny)
        return -rest.pow(self.gamma) * log_p


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class AdaFocal(base.RowLoss):
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

    bins: int = base.whole(15)
    rate: float = base.above_0(1.0)
    start: float = base.above_0(1.0)
    switch: float = base.above_0(0.2)
    smallest: float = base.checked(-2.0, lambda value: value < 0, "give a number below 0")
    largest: float = base.above_0(20.0)
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
        log_p = base.label_logs(logits, labels)
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
        confidence, right = base.top_label(base.widened(logits), labels)
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
