"""What a calibration does to rows that it was not fitted on: the evidence that comes with it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from featcal.core.batch import Batch, Data, Head, as_data
from featcal.core.calibrator import Calibrator
from featcal.core.checks import InputError
from featcal.core.fit import FitReport, Mode, evaluating, survey
from featcal.core.sample import mixed, row_hash
from featcal.core.table import html_text
from featcal.core.text import NONE
from featcal.metrics.columns import columns
from featcal.report.compare import Comparison, Row, compare, settings_of
from featcal.report.scores import evaluate
from featcal.report.tables import Block, comparison_block, fitted_text, html, markdown

FOLDS, RESAMPLES = 5, 400
LONG = 2**18  # numbers of a pass (`Facts.work`) from which on a fit is worth counting:
FEW_FOLDS = 2  # then half of the rows in two folds, which is half of the fit again
TURNED = 0.5  # of the gap it was to close: a smaller one on the other side is what chance leaves
SHOWN = ("accuracy", "overconfidence", "ece", "nll")


@final
@dataclass(frozen=True, eq=False, repr=False)
class Evidence:
    """Before and after, on rows left out of the fit; print it.

    Attributes:
        recipe: what was fitted.
        report: how.
        comparison: the network as it is and the recipe, with 95 % intervals; None where nothing was
            changed, or where there are too few rows to leave any out.
    """

    recipe: str
    report: FitReport
    comparison: Comparison | None = field(default=None)

    @classmethod
    def of(
        cls,
        calibrator: Calibrator,
        data: Sequence[Batch],
        head: Head | None,
        *,
        test: Data | None = None,
        mode: Mode = "joint",
        costly: bool = False,
    ) -> Evidence:
        """Scores a fitted calibrator on test rows; without any, its recipe by cross-fitting.

        Args:
            calibrator: as fitted to `data`.
            data: the rows it was fitted to.
            head: the classifier's last layer.
            test: rows that were not fitted on.
            mode: how it was fitted.
            costly: whether the head is so much work that few fits have to do.
        """
        report, made = calibrator.report, calibrator.outcome()
        assert report is not None
        if report.noop:  # a fit of the same recipe to fewer rows would be another one
            return cls(NONE, report)
        recipe = repr(made)
        if test is not None:
            rows = tuple(
                Row(name, one, evaluate(test, one, head, resamples=RESAMPLES), 0.0)
                for name, one in ((NONE, None), (recipe, made))
            )
            settings = settings_of(mode, resamples=RESAMPLES, baseline=NONE)
            with evaluating(head):
                facts = survey(as_data(test, head), head)
            settings["drawn"]["samples"] = facts.groups or (facts.rows if facts.several else None)
            found = Comparison(rows, (None, 0), settings)
            return cls(recipe, report, found)
        work, folds = report.rows * report.classes * max(report.features // 256, 1), FOLDS
        if costly or work > LONG:
            folds, data = FEW_FOLDS, list(_half(data))
        mode = "joint" if report.choice else mode  # as auto fits what it has chosen
        how: Any = {"mode": mode, "folds": folds, "resamples": RESAMPLES}
        try:
            found = compare(data, None, (NONE, recipe), head, **how)
        except InputError:  # a method may want more rows than a fold leaves
            return cls(recipe, report)
        return cls(recipe, report, found)

    @property
    def warnings(self) -> list[str]:
        """What a person should look at before using the result; one sentence each."""
        found = [*filter(None, [self.report.few_rows])]
        if self.comparison is None:
            return found
        before, after = (row.scores for row in self.comparison)
        gaps = [one.metrics["overconfidence"] for one in (before, after)]
        around = after.interval("overconfidence")
        turned = gaps[0] * gaps[1] < 0 and abs(gaps[1]) > TURNED * abs(gaps[0])
        if turned and not around.low <= 0 <= around.high:
            words = [f"{abs(gap):.1%} too {'high' if gap > 0 else 'low'}" for gap in gaps]
            found.append(
                f"{self.recipe} overshoots: on rows left out of the fit confidence goes from "
                f"{words[0]} to {words[1]}; see model.calibration, and try others with "
                "featcal.compare"
            )
        nll = self.comparison.difference(1, "nll")
        if nll is not None and nll.verdict == "worse":
            was, now = (one.metrics["nll"] for one in (before, after))
            found.append(
                f"{self.recipe} does not help: on rows left out of the fit the NLL rises from "
                f"{was:.4f} to {now:.4f}"
            )
        return found

    def __repr__(self) -> str:
        first, *rest = self._told()
        table = "" if self.comparison is None else markdown(self.comparison, self._blocks())
        return "\n\n".join(filter(None, [first, table.rstrip(), *rest]))

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        first, *rest = (f"<p>{html_text(text)}</p>" for text in self._told())
        table = "" if self.comparison is None else html(self.comparison, self._blocks())
        return "".join([first, table, *rest])

    def _blocks(self) -> list[Block]:
        assert self.comparison is not None
        return [comparison_block(self.comparison, columns(SHOWN))]

    def _told(self) -> list[str]:
        """What was fitted, and what to know of it."""
        told = fitted_text([self.report]).removeprefix(f"{self.recipe}; ")
        values = f" ({told})" if told else ""
        parts = [f"{self.recipe}{values}, fitted on {self.report.rows:,} rows"]
        if self.report.noop:
            parts.append("Nothing was changed: the model answers as before.")
        elif self.comparison is None:
            parts.append("Too few rows to leave any out: score it on others, featcal.evaluate.")
        elif self.report.choice and self.comparison.settings["folds"]:
            parts.append("The recipe was chosen by these rows too: expect a little less on others.")
        return [*parts, *(f"Warning: {text}" for text in self.warnings)]


def _half(data: Iterable[Batch]) -> Iterable[Batch]:
    """About half of the rows, by their content or their sample: the same however they are batched.

    By the last bit of a hash, since the first ones deal rows out to folds.
    """
    for batch in data:
        held = batch.logits if batch.features is None else batch.features
        assert held is not None
        by = row_hash(held.bfloat16()) if batch.groups is None else mixed(batch.groups)
        yield batch.rows(by % 2 == 0)
