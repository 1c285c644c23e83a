"""Scores of a calibrator on labelled data: every metric from one pass."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import isnan, nan
from operator import add
from typing import Any, final

import torch
from torch import Tensor

from featcal.core.batch import (
    Batch,
    Data,
    Head,
    answers,
    as_data,
    head_of,
    raw_logits,
    stored_logits,
    wide,
)
from featcal.core.calibrator import Calibrator
from featcal.core.checks import InputError
from featcal.core.fit import Facts, evaluating, plain, survey
from featcal.core.labels import Answers
from featcal.core.memory import Size, under_cap
from featcal.core.progress import calm
from featcal.core.sample import first_row
from featcal.core.table import html_table
from featcal.data.pack import Pack, rows_of
from featcal.heads.head import as_head
from featcal.metrics import Bins, ClassBins, Ordered, Predictions, ProperSums
from featcal.metrics.columns import COLUMNS, columns
from featcal.report.bootstrap import (
    FEW_WRONG,
    UNKNOWN,
    Bootstrap,
    Chance,
    Interval,
    Resamples,
    checked_resamples,
    metric_interval,
)

# The order of JSON and of `Scores.metrics`; tables have that of COLUMNS.
ORDER = (
    *("accuracy", "ece", "adaptive_ece", "classwise_ece", "mce", "nll", "brier", "rms_ce"),
    *("debiased_ce", "smooth_ece", "confidence", "overconfidence", "auroc", "aurc"),
)


@final
@dataclass(frozen=True, repr=False)
class Scores:
    """How good the probabilities are.

    Attributes:
        n: rows scored.
        metrics: name -> value, as fractions.
        bins: the sums behind ECE and the reliability diagram.
        replicates: name -> (1 + b,) the metric where `Resamples` are centred, then on each of them,
            as far away from there as so few rows or samples ask for; empty without resamples.
        chance: name -> what chance alone does to a binned error, see `Bootstrap.chance`.
        labels: of each label the metrics of its rows alone, where samples have several labels; n
            and the metrics are then those of all rows, one for each label of each sample.
    """

    n: int
    metrics: dict[str, float]
    bins: Bins
    replicates: dict[str, Tensor] = field(default_factory=dict)
    chance: dict[str, Chance] = field(default_factory=dict)
    labels: tuple[dict[str, float], ...] = ()

    def __repr__(self) -> str:
        shown = (f"{one.heading} {one.text(self.metrics[one.name])}" for one in columns())
        return f"Scores({self._about}: {', '.join(shown)})"

    @property
    def _about(self) -> str:
        if not self.labels:
            return f"{self.n:,} rows"
        return f"{self.n:,} answers about {len(self.labels)} labels of {self.samples:,} samples"

    @property
    def samples(self) -> int:
        """Samples scored, each of which has one row or as many as there are labels."""
        return self.n // max(len(self.labels), 1)

    @property
    def macro(self) -> dict[str, float]:
        """Name -> the mean over labels, of those where the metric is defined."""
        known = {k: [one[k] for one in self.labels if not isnan(one[k])] for k in self.metrics}
        return {k: sum(v) / len(v) if v else nan for k, v in known.items()} if self.labels else {}

    @property
    def few_wrong(self) -> bool:
        """Whether so few rows are wrong that intervals rest on those that were not seen."""
        return self.n * (1 - self.metrics["accuracy"]) < FEW_WRONG

    @property
    def intervals(self) -> dict[str, Interval]:
        """Name -> 95 % interval; empty without resamples."""
        return {name: self.interval(name) for name in self.metrics if name in self.replicates}

    def interval(self, name: str) -> Interval:
        """The 95 % interval of a metric, NaN at both ends without resamples."""
        if name not in self.replicates:
            return UNKNOWN
        chance = self.chance.get(name, (0.0, 0.0))
        return metric_interval(name, self.metrics[name], self.replicates[name], chance)

    def _repr_html_(self) -> str:
        """What a notebook shows: every metric, with its interval where there is one.

        Of several labels a sample those of all answers, and the mean over labels.
        """
        rows, macro = [], self.macro
        for name, column in COLUMNS.items():
            found = self.interval(name)
            ends = f"[{column.number(found.low)}, {column.number(found.high)}]"
            ends = ends if name in self.replicates else ""
            mean = [column.text(macro[name])] if macro else []
            rows.append((column.title, column.text(self.metrics[name]), ends, *mean))
        headings = ("", "all answers", "", "mean of labels") if macro else ()
        return html_table(headings, rows, above=self._about)

    def as_json(self) -> dict[str, Any]:
        """The public form, as `featcal eval --json` prints it."""
        found: dict[str, Any] = {"n": self.n, "metrics": self.metrics}
        if self.labels:
            found |= {"samples": self.samples, "macro": self.macro, "labels": list(self.labels)}
        return plain(found)  # type: ignore[no-any-return]


@under_cap
@torch.no_grad()
def evaluate(
    data: Batch | Data | Pack,
    calibrator: Calibrator | None = None,
    head: Head | None = None,
    *,
    bins: int = 15,
    resamples: int = 0,
    seed: int = 0,
    memory: Size = None,
) -> Scores:
    """Scores the calibrated logits, or the classifier's own without a calibrator.

    Args:
        data: labelled rows that were not used to fit: batches, what `collect` gave, a pack (its
            split test) or a split of it, or a pair of arrays (logits, labels).
        calibrator: what to apply; None scores the network as it is.
        head: the classifier's last layer, when the data holds features and does not bring it along.
        bins: equal-width bins of ECE and MCE, and equal-mass bins of adaptive and debiased ECE.
        resamples: how often the rows are drawn again for `Scores.intervals`; 0 for never.
        seed: of the resamples.
        memory: the most this process may hold, such as "2GB", mapped files aside.
    """
    calibrator = getattr(calibrator, "calibrator_", calibrator)  # of a `featcal.arrays.Calibrated`
    if not isinstance(calibrator, Calibrator | None):
        kind = type(calibrator).__name__
        raise InputError(
            f"calibrator is a {kind}: give a fitted one, such as featcal.load(file) gives; of two "
            "arrays pass the pair (logits, labels)"
        )
    data = rows_of(data, "test")
    head = as_head(head_of(data) if head is None else head)
    data = as_data(data, head)
    with evaluating(head):
        facts = survey(data, head)
        check_usable(calibrator, facts, head)
        bootstrap = None
        if checked_resamples(resamples):
            drawn = resampled(data, head, facts, resamples, seed)
            bootstrap = Bootstrap(drawn, first_row(answered(data, head, facts)), bins)
        parts = ((batch, calibrated_logits(batch, calibrator, head)) for batch in data)
        return score(parts, facts, bins, bootstrap)


def answered(data: Data, head: Head | None, facts: Facts) -> Data:
    """The rows that are scored: the answers about samples of several labels, else the data."""
    return Answers(data, head, first_row(data)) if facts.several else data


def resampled(data: Data, head: Head | None, facts: Facts, resamples: int, seed: int) -> Resamples:
    """The resamples of the scored rows; the answers about a sample are drawn together."""
    return Resamples.of(answered(data, head, facts), head, facts.judged, resamples, seed)


def check_usable(calibrator: Calibrator | None, facts: Facts, head: Head | None) -> None:
    """Refuses a calibrator of other labels, or that needs features where there are none."""
    if calibrator is not None and calibrator.several != facts.several:
        what = "several labels a sample, (n, k)" if facts.several else "one label a row"
        raise InputError(f"{calibrator!r} was not made for data with {what}: fit it to such data")
    ready = head is not None and facts.width > 0
    if calibrator is not None and calibrator.needs_features and not ready:
        raise InputError(f"{calibrator!r} works on features: pass data with features, and head=")


@dataclass(frozen=True)
class Doubling:
    """Rows in parts that shrink from first to last: each row is copied as often as they double.

    Joined chunk by chunk, many rows would be copied once for every chunk.
    """

    parts: list[Ordered]

    def __add__(self, other: Doubling) -> Doubling:
        parts = [*self.parts, *other.parts]
        while len(parts) > 1 and len(parts[-2]) <= len(parts[-1]):
            parts[-2:] = [parts[-2] + parts[-1]]
        return Doubling(parts)

    def joined(self) -> Ordered:
        """The rows of all parts, in order, which are one part then: no row is held twice."""
        while len(self.parts) > 1:
            self.parts[-2:] = [self.parts[-2] + self.parts[-1]]
        return self.parts[0]


def score(
    parts: Iterable[tuple[Batch, Tensor]], facts: Facts, bins: int, bootstrap: Bootstrap | None
) -> Scores:
    """Scores batches with their calibrated logits; every rank gets the scores of all rows."""

    def summaries(rows: Batch, bootstrap: Bootstrap | None = None) -> tuple[Any, ...]:
        logits = stored_logits(rows)
        seen = Predictions.of(logits=logits, labels=rows.labels)
        if bootstrap is not None:
            bootstrap.add(logits, seen)
        return (
            Bins.of_predictions(seen, bins=bins),
            ClassBins.of_predictions(seen, bins=bins),
            Doubling([Ordered.of_predictions(seen)]),
            ProperSums.of_predictions(seen),
        )

    # A rank without rows takes part in the sums, too.
    labels = facts.classes if facts.several else 0
    none = Batch(torch.zeros(0, 2 if labels else facts.classes), torch.zeros(0, dtype=torch.int64))
    found, each = summaries(none, bootstrap), [summaries(none) for _ in range(labels)]
    with calm(facts.work):
        for batch, logits in parts:
            rows = answers(batch, logits)
            found = tuple(map(add, found, summaries(rows, bootstrap)))
            for label, so_far in enumerate(each):
                mine = rows.rows(slice(label, None, labels))
                each[label] = tuple(map(add, so_far, summaries(mine)))

    def told(sums: tuple[Any, ...]) -> tuple[dict[type, Any], dict[str, float]]:
        whole = (one.joined() if isinstance(one, Doubling) else one for one in sums)
        known = {type(one): one.reduced() for one in whole}
        return known, {name: COLUMNS[name].of(known[COLUMNS[name].summary], bins) for name in ORDER}

    known, metrics = told(found)
    of_labels = tuple(told(one)[1] for one in each)
    scores = Scores(int(known[Bins].n), metrics, known[Bins], labels=of_labels)
    if bootstrap is None or bootstrap.drawn.size < 2:  # one says nothing of how others would vary
        return scores
    found_on = bootstrap.replicates(known[Ordered], metrics["smooth_ece"])
    few = bootstrap.drawn.few
    replicates = {name: one[0] + few * (one - one[0]) for name, one in found_on.items()}
    return replace(scores, replicates=replicates, chance=bootstrap.chance(known[Ordered], metrics))


def calibrated_logits(batch: Batch, calibrator: Calibrator | None, head: Head | None) -> Tensor:
    """The logits a calibrator makes of a batch; the classifier's own without one."""
    if calibrator is None:
        return wide(raw_logits(batch, head))
    if calibrator.needs_features and head is not None:
        return calibrator(batch.features, head)  # type: ignore[no-any-return]
    return calibrator(batch.features, lambda _: raw_logits(batch, head))  # type: ignore[no-any-return]
