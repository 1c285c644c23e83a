"""AdaFocal (Ghosh et al., NeurIPS 2022): a focal gamma for each bin, steered by held-out rows.

Where the network is too sure gamma grows, where it is not sure enough gamma shrinks and turns
negative, which stands for the inverse focal loss -(1 + p)^|gamma| log p.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import final

import torch
from torch import Tensor

from featcal.core.arguments import check_whole
from featcal.core.errors import InputError
from featcal.losses.base import RowLoss
from featcal.losses.probabilities import label_logs, log_rest, top_label, widened


def _unset() -> Tensor:
    return torch.empty(0)


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class AdaFocal(RowLoss):
    """-(1 - p)^g log p for g >= 0 and -(1 + p)^|g| log p below, g that of the bin of p.

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

    bins: int = 15
    rate: float = 1.0
    start: float = 1.0
    switch: float = 0.2
    smallest: float = -2.0
    largest: float = 20.0
    edges: Tensor = field(default_factory=_unset, compare=False)
    gammas: Tensor = field(default_factory=_unset, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole(self.name, 1, bins=self.bins)
        self._number("rate", lambda v: v > 0, "above 0")
        self._number("switch", lambda v: v > 0, "above 0")
        self._number("smallest", lambda v: v <= -self.switch, f"up to {-self.switch:g} (-switch)")
        self._number("largest", lambda v: v >= self.switch, f"from {self.switch:g} (switch) up")
        between = f"from {self.switch:g} to {self.largest:g} (switch to largest)"
        self._number("start", lambda v: self.switch <= v <= self.largest, between)
        self._keep("edges", torch.linspace(0, 1, self.bins + 1)[1:-1])
        self._keep("gammas", torch.full((self.bins,), self.start))

    def _keep(self, key: str, fresh: Tensor) -> None:
        """The state as given, or as it is before the first update."""
        given = getattr(self, key)
        if isinstance(given, Tensor) and given.numel() == 0:
            object.__setattr__(self, key, fresh)
        elif not isinstance(given, Tensor) or given.shape != fresh.shape:
            what = f"a tensor of shape {tuple(given.shape)}" if isinstance(given, Tensor) else given
            raise InputError(
                f"{self.name}: {key} is {what}: {self.bins} bins need a tensor of shape "
                f"{tuple(fresh.shape)}, as state() of such a loss gives it"
            )

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
            raise InputError(
                f"{self.name}: labels hold {int(labels.min())} to {int(labels.max())}: give class "
                f"numbers from 0 to {logits.shape[1] - 1}"
            )
        confidence, right = top_label(widened(logits), labels)
        if not bool(confidence.isfinite().all()):
            raise InputError(f"{self.name}: logits hold NaN or infinity: has training diverged?")
        moved = replace(self, edges=equal_mass_edges(confidence, self.bins).to(self.edges))
        gap = (confidence - right).double()
        count = torch.zeros(self.bins, dtype=torch.float64, device=gap.device)
        index = moved._bin(confidence)
        sums = count.index_add(0, index, gap)
        count = count.index_add(0, index, torch.ones_like(gap))
        return replace(moved, gammas=self._stepped(sums / count.clamp_min(1)))

    def _stepped(self, gap: Tensor) -> Tensor:
        old = self.gammas.to(gap)
        sign = old.sign()
        new = old * (sign * self.rate * gap).exp()
        switch = torch.full_like(self.gammas, self.switch).to(gap)  # as float32 holds it
        new = torch.where(new.abs() < switch, -sign * switch, new)
        return new.clamp(self.smallest, self.largest).to(self.gammas)

    def state(self) -> dict[str, Tensor]:
        """`edges` and `gammas`, the tensors themselves.

        A captured CUDA graph reads these very tensors: copy those of the updated loss into them.
        """
        return {"edges": self.edges, "gammas": self.gammas}

    def restored(self, state: Mapping[str, Tensor]) -> AdaFocal:
        """This loss with the edges and gammas of a checkpoint."""
        if set(state) != {"edges", "gammas"}:
            raise InputError(
                f"{self.name}: state holds {', '.join(state) or 'nothing'}: give edges and gammas"
            )
        return replace(self, edges=state["edges"], gammas=state["gammas"])

    def to(self, device: torch.device | str) -> AdaFocal:
        """This loss with its edges and gammas on a device."""
        return replace(self, edges=self.edges.to(device), gammas=self.gammas.to(device))


def equal_mass_edges(values: Tensor, bins: int) -> Tensor:
    """The m - 1 inner edges of bins with nearly equal numbers of values, halfway between two.

    >>> equal_mass_edges(torch.tensor([0.1, 0.9, 0.3, 0.5]), 2).tolist()
    [0.4000000059604645]
    """
    ordered = values.sort().values
    cut = torch.arange(1, bins, device=values.device) * len(values) // bins
    left = ordered[(cut - 1).clamp_min(0)]
    return (left + ordered[cut]) / 2
