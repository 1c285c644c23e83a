"""featcal's metrics as torchmetrics: the fields of a summary are the states of a metric.

What a metric keeps of the data adds up over batches and processes already, so torchmetrics has
nothing to do but to add it up. Sums stay float64 whatever type the model around them is cast to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from featcal.core.checks import InputError, Kind, check_choice, check_whole
from featcal.metrics import Bins, ClassBins, Ordered, ProperSums, e_aurc_of, ks_error_of
from featcal.metrics.columns import COLUMNS
from featcal.report.diagram import ReliabilityDiagram

try:
    from torchmetrics import Metric
except ImportError as missing:
    raise ImportError(
        "featcal.bridges.torchmetrics needs torchmetrics, which is not installed: "
        "pip install 'featcal[torchmetrics]'"
    ) from missing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

Summary = Bins | ClassBins | Ordered | ProperSums
Answer = Callable[[Any, int], float]  # of a summary and a number of bins

NAME = "CalibrationMetric"
ROW_TYPES = {"confidence": torch.float64, "correct": torch.uint8}  # types every backend gathers
# The metrics of tables, and two that no table shows.
METRICS: dict[str, tuple[type[Summary], Answer]] = {
    **{name: (column.summary, column.of) for name, column in COLUMNS.items()},
    "ks_error": (Ordered, lambda rows, _: ks_error_of(rows)),
    "e_aurc": (Ordered, lambda rows, _: e_aurc_of(rows)),
}


@final
class CalibrationMetric(Metric):
    """A metric of `featcal.metrics` with torchmetrics' interface: `update`, `compute`, `reset`.

    What `preds` are is said, never guessed from their range: probabilities, (n, k) or (n,) for
    class 1, unless `kind` is "logits". Logits taken for probabilities are refused;
    probabilities taken for logits could not be told apart from logits, hence this default.

    Metrics of bins and of plain means keep a few sums. Those that rank rows (adaptive_ece,
    debiased_ce, smooth_ece, ks_error, auroc, aurc, e_aurc) keep every confidence, 9 bytes a row.

    Args:
        metric: its name: ece, mce, rms_ce, overconfidence, confidence, nll, brier, accuracy,
            classwise_ece, or one of those that rank rows.
        kind: what `preds` are, "probs" or "logits".
        bins: of the binned metrics; ECE of other libraries often has 10 or 15.
        num_classes: of classwise_ece, which keeps bins for each class; the others need none.
        kwargs: torchmetrics' own, such as `sync_on_compute`.

    >>> metric = CalibrationMetric("ece")
    >>> metric.update(torch.tensor([[0.75, 0.25]]), torch.tensor([0]))
    >>> metric.update(torch.tensor([[0.75, 0.25]]), torch.tensor([1]))
    >>> metric.compute()
    tensor(0.2500, dtype=torch.float64)
    """

    is_differentiable = False
    full_state_update = False

    def __init__(
        self,
        metric: str = "ece",
        *,
        kind: Kind = "probs",
        bins: int = 15,
        num_classes: int | None = None,
        **kwargs: Any,  # noqa: ANN401 - torchmetrics' own
    ) -> None:
        super().__init__(**kwargs)
        check_choice(NAME, "metric", metric, METRICS)
        check_choice(NAME, "kind", kind, ("probs", "logits"))
        check_whole(NAME, 1, bins=bins)
        self.metric, self.kind, self.bins, self.num_classes = metric, kind, bins, num_classes
        shape: tuple[int, ...] = () if self._summary_type is ProperSums else (bins,)
        if self._summary_type is ClassBins:  # which are kept for each class
            check_whole(NAME, 2, num_classes=num_classes)
            shape = (num_classes or 0, bins)
        for name in self._fields:
            if self._summary_type is Ordered:
                self.add_state(name, [], dist_reduce_fx="cat")
            else:
                self.add_state(name, torch.zeros(shape, dtype=torch.float64), dist_reduce_fx="sum")

    @property
    def higher_is_better(self) -> bool | None:  # type: ignore[override]
        """Which way is better; None for confidence and overconfidence, where neither is."""
        better = COLUMNS[self.metric].better if self.metric in COLUMNS else -1
        return {1: True, -1: False}.get(better)

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Takes in n predictions and their labels, as `featcal.metrics` takes them."""
        part = self._part(preds, target)
        for name in self._fields:
            value, state = getattr(part, name), getattr(self, name)
            if isinstance(state, list):
                state.append(value.to(self.device, ROW_TYPES[name]))
            else:
                setattr(self, name, state + torch.as_tensor(value, dtype=torch.float64).to(state))

    def compute(self) -> Tensor:
        """The metric over all rows of all processes, a float64 scalar."""
        value = METRICS[self.metric][1](self._summary(), self.bins)
        return torch.tensor(value, dtype=torch.float64, device=self.device)

    def diagram(self, title: str = "") -> ReliabilityDiagram:
        """The reliability diagram of all rows of all processes, for a metric that keeps bins."""
        if self._summary_type is not Bins:
            raise InputError(f"{NAME}: {self.metric} keeps no bins: take the diagram of 'ece'")
        with self.sync_context(dist_sync_fn=self.dist_sync_fn, should_sync=self.sync_on_compute):
            bins = self._summary()
        assert isinstance(bins, Bins)
        return ReliabilityDiagram(bins, title)

    def plot(
        self, val: Tensor | list[Tensor] | None = None, ax: Axes | None = None
    ) -> tuple[Figure | SubFigure, Axes]:
        """The reliability diagram where the metric keeps bins and no values are given.

        Args:
            val: values of `compute` or `forward`, drawn as torchmetrics draws them.
            ax: where to draw; None makes a figure.
        """
        if val is not None or self._summary_type is not Bins:
            return self._plot(val, ax)  # type: ignore[return-value]
        axes = self.diagram().plot(ax).axes
        assert axes is not None
        return axes[0].figure, axes[0]

    def sync(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - torchmetrics' own
        """Brings the states of all processes together; one without rows takes part."""
        for name in self._fields:
            state = getattr(self, name)
            # torchmetrics would send an empty tensor of its own type, and ranks would not match.
            if isinstance(state, list) and not state:
                state.append(torch.empty(0, dtype=ROW_TYPES[name], device=self.device))
        super().sync(*args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any) -> CalibrationMetric:  # noqa: ANN401
        """Follows a model to its device, not to its type: `model.to(torch.bfloat16)` keeps sums."""

        def moved(values: Tensor) -> Tensor:
            there = fn(values)
            return there if there.dtype == values.dtype else values.to(there.device)

        super()._apply(moved, *args)
        return self

    @property
    def _summary_type(self) -> type[Summary]:
        return METRICS[self.metric][0]

    @property
    def _fields(self) -> list[str]:
        return [field.name for field in fields(self._summary_type)]

    def _part(self, preds: Tensor, target: Tensor) -> Summary:
        """The summary of one batch."""
        given: dict[str, Any] = {self.kind: preds, "labels": target}
        if self._summary_type in (Bins, ClassBins):
            given["bins"] = self.bins
        try:
            part = self._summary_type.of(**given)
        except InputError as error:
            said = str(error).replace("pass logits=...", f"make the {NAME} with kind='logits'")
            raise InputError(said) from error
        if isinstance(part, ClassBins) and len(part.count) != self.num_classes:
            raise InputError(
                f"{NAME}: preds has {len(part.count)} classes and num_classes is "
                f"{self.num_classes}: make them equal"
            )
        return part

    def _summary(self) -> Summary:
        """The summary of all rows so far."""
        states = [getattr(self, name) for name in self._fields]
        if self._summary_type is ProperSums:
            return ProperSums(*(float(state) for state in states))
        if self._summary_type is not Ordered:
            return self._summary_type(*(state.cpu() for state in states))
        confidence, correct = map(_joined, states)
        return Ordered(confidence, correct.bool())


def _joined(parts: Tensor | list[Tensor]) -> Tensor:
    """The rows of all batches; one tensor already once processes were brought together."""
    if isinstance(parts, Tensor):
        return parts.cpu()
    return torch.cat([part.cpu() for part in parts]) if parts else torch.empty(0)
