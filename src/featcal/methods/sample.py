"""A temperature for each sample from a handful of numbers: featcal's own method.

    z' = z / T(x) + b e_top,    log 1/T(x) = t + sum_i a_i phi_i(x) + c_top

The phi are logarithms of simple statistics of a row's logits and features, centred on the fit
split; `top` is the predicted class. Long feature vectors, say, may come with too much confidence,
and one weight tells how much. c is one offset per predicted class, held close to 0; b moves the
predicted class alone, so that its probability and the shape of the others are fitted apart.

Fitted by NLL with a ridge on a, b and c, by Newton's method: one pass a step, and the second
derivatives of c are diagonal, so that many classes cost no more than the pass. The ridge pulls a
and b to where they lie for most networks: T grows with the size of logits and features, and the
predicted class gives way. With few rows that is most of what is known, with many it no longer
matters. How strong the ridge is, and how far to go from one T for all rows towards the fit, is
decided by leave-one-out, which one Newton step back from the fit gives for every row at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor

from featcal.core import dist
from featcal.core.batch import (
    Batch,
    Head,
    blocks,
    features_of,
    predicted,
    stored_logits,
    unchecked,
)
from featcal.core.calibrator import Calibrator, keep_prediction
from featcal.core.checks import InputError
from featcal.core.fit import Problem, StepReport, nll, settle
from featcal.core.progress import calm, spread
from featcal.core.sample import fold_of
from featcal.core.scalar import LN2, temper
from featcal.heads.head import head_logits

RIDGE = {"a": 10.0, "b": 20.0, "c": 200.0}  # in nats over all rows, for a value of sqrt 2
# Where a and b are expected: half of their medians over the networks of results/published.json. The
# a of statistics that measure size share theirs; at -1 in all, size would tell nothing of a row.
SIZE, TOP = -0.5, -0.2
SIZES = ("energy", "spread", "norm")
STRENGTHS = (16.0, 4.0, 1.0)  # the ridge is tried as many times as strong, the strongest first
ERRORS = 200  # with fewer wrong rows than these the ridge grows: they carry what is to be learned
REACH = 3.0  # standard deviations at which a term is cut off
FOLDS = 5  # of samples, where these have several rows
SAMPLE = 2**12  # rows, about, on which the strength is chosen
LOGITS = 2**21  # of theirs, at most
NUMBERS = 2**20  # of a block: with fewer, threads wait for each other between short operations
PIECES = 4  # of a chunk, for the threads: a piece's sums are as large as those of all rows
HASHED = 64  # logits of a row, by which it is chosen
STEPS = 30  # of Newton's method; the last is one that promises less nats per row than
ENOUGH, ROUGHLY = 1e-6, 1e-4  # and what is left is about the square of it
HIGHEST = 20.0  # of 1/T over the common one, and its inverse: nothing that was fitted comes near

WORDS = {
    "gap": ("with a clear winner", "with a close runner-up"),
    "energy": ("with large logits", "with small logits"),
    "spread": ("with widely spread logits", "with logits close together"),
    "norm": ("with long feature vectors", "with short feature vectors"),
    "sparsity": ("with many active features", "with few active features"),
}
OF_LOGITS, OF_FEATURES = ("gap", "energy", "spread"), ("norm", "sparsity")


@final
class SampleTemperature(Calibrator):
    """z / T(x), with T from a few statistics of each row; the prediction stays.

    Args:
        terms: the statistics, by name and separated by commas: gap (of the two largest logits),
            energy and spread (of the logits), norm and sparsity (of the features). All of them by
            default; those of logits where there are no features.
    """

    name = "sample"
    title = "sample temperature scaling"
    symbols: ClassVar[dict[str, str]] = {"temperature": "T"}
    keeps_accuracy = True
    takes_features = True
    quick = "temperature"
    temperature: Tensor
    weights: Tensor
    centre: Tensor
    reach: Tensor
    boost: Tensor
    offsets: Tensor

    def __init__(self, *, terms: str | None = None) -> None:
        super().__init__()
        self.terms = terms
        if terms is not None:
            names = [name.strip() for name in str(terms).split(",")]
            if not set(names) <= set(WORDS) or len(set(names)) < len(names):
                raise InputError(f"sample: terms is {terms!r}: choose among {', '.join(WORDS)}")
        self.register_buffer("temperature", torch.ones(()))
        self.register_buffer("boost", torch.zeros(()))
        for key in ("weights", "centre", "reach", "offsets"):
            self.register_buffer(key, torch.zeros(0))

    @property
    def needs_features(self) -> bool:  # type: ignore[override]
        """Whether a term in use is one of features."""
        return any(name in OF_FEATURES for name in self.names(with_features=False))

    def names(self, *, with_features: bool) -> tuple[str, ...]:
        """The terms asked for; otherwise all, or those of logits alone, as fitted or as can be."""
        if self.terms is not None:
            return tuple(name.strip() for name in self.terms.split(","))
        every = OF_LOGITS + OF_FEATURES
        return every if with_features or len(self.weights) == len(every) else OF_LOGITS

    def forward(self, features: Tensor, head: Head) -> Tensor:
        """Divides each row by its own temperature and moves the predicted class."""
        logits = head_logits(features, head)
        if self.weights.numel() == 0:
            return logits / self.temperature.to(logits.dtype)
        names, dtype = self.names(with_features=False), logits.dtype
        centre, reach, weights = (v.to(dtype) for v in (self.centre, self.reach, self.weights))
        top = logits.argmax(1, keepdim=True)
        moved = (terms_of(names, features, logits, top) - centre).clamp(-reach, reach) @ weights
        return self.scaled(logits, top, moved + self.offsets.to(dtype)[top[:, 0]])

    def scaled(self, logits: Tensor, top: Tensor, moved: Tensor) -> Tensor:
        """Each row over its own temperature, by how far log 1/T is moved, with the top lifted."""
        dtype = logits.dtype
        factor = moved.to(dtype).exp().clamp(1 / HIGHEST, HIGHEST) / self.temperature.to(dtype)
        scaled = logits * factor[:, None]
        lifted = scaled.scatter(1, top, scaled.gather(1, top) + self.boost.to(dtype))
        return keep_prediction(lifted, logits, top)

    def learn(self, problem: Problem) -> list[StepReport]:
        """Newton's method on all rows, at the strength that leave-one-out finds best."""
        self.reset()
        if problem.loss.base is not nll:
            raise InputError(f"sample is fitted by nll alone, not by {problem.loss.name}")
        details: dict[str, Any] = {"strength": None, "loo": None, "loo_temperature": None}
        with calm(problem.facts.rows * problem.facts.classes):
            fit = _Fit(self, problem)
            best, share = fit.chosen(details)
            if share == 0:
                return [self.one_for_all(problem, details)]
            at, loss, settled = fit.whole(best, share)
        size = len(fit.names)
        self.assign(
            temperature=1 / (fit.inverse * float(at[0].exp())),
            weights=at[1 : size + 1],
            centre=fit.centre,
            reach=fit.reach,
            boost=at[size + 1],
            offsets=at[size + 2 :],
        )
        values = {"temperature": float(self.temperature), "boost": float(self.boost)}
        values |= dict(zip(fit.names, self.weights.tolist(), strict=True))
        effect = self.weights.cpu() * fit.reach
        strongest = int(effect.abs().argmax())
        more, less = WORDS[fit.names[strongest]]
        message = (
            f"T = {float(self.temperature):.4g} on average; rows "
            f"{more if effect[strongest] < 0 else less} were the most overconfident"
        )
        ended = (settled, "", details)
        return [settle(self, problem, values, message, *ended, loss_after=loss)]

    def one_for_all(self, problem: Problem, details: dict[str, Any]) -> StepReport:
        """One temperature, where rows do no better with their own."""
        common = temper(problem.data, problem.loss)
        if common is None:
            return settle(self, problem, {}, "")
        self.assign(temperature=common.temperature)
        values, capped = {"temperature": common.temperature}, bool(common.capped.any())
        why = "left out of the fit, rows do no better with their own"
        message = f"T = {common.temperature:.4g} for all rows: "
        message += "it stopped at its cap" if capped else why
        return settle(self, problem, values, message, not capped, message * capped, details)


def statistics(features: Tensor | None, logits: Tensor, top: Tensor) -> dict[str, Tensor]:
    """The terms by name, (n,) in the logits' precision, and how far the next lies `below` the top.

    `top` is the predicted class, (n, 1). What is made of all logits is changed in its place.
    """
    tiny, classes = torch.finfo(logits.dtype).tiny, logits.shape[1]
    away = logits - logits.gather(1, top)  # from the top, and later from the mean
    mean = away.mean(1, keepdim=True)
    share = (away / LN2).exp2_().sum(1).log()
    found = {"energy": (share - mean[:, 0]).log()}
    found["below"] = away.scatter_(1, top, -torch.inf).amax(1)
    found["gap"] = torch.log1p(-found["below"])
    size = torch.linalg.vector_norm(away.scatter(1, top, 0.0).sub_(mean), dim=1)
    found["spread"] = size.clamp(min=tiny**0.5).log() - 0.5 * math.log(classes)
    if features is not None:
        rows = features.to(logits.dtype)
        largest = rows.abs().amax(1, keepdim=True).clamp(min=tiny)  # squares keep their range
        rows = rows / largest
        norm = rows.square().sum(1).clamp(min=tiny)
        found["norm"] = 0.5 * norm.log() + largest[:, 0].log()
        found["sparsity"] = rows.abs().sum(1).clamp(min=tiny).log() - 0.5 * norm.log()
    return found


def terms_of(names: Sequence[str], features: Tensor | None, logits: Tensor, top: Tensor) -> Tensor:
    """The terms of some names, (n, t)."""
    found = statistics(features, logits, top)
    return torch.stack([found[name] for name in names], 1)


@dataclass(frozen=True)
class Rows:
    """Some rows as the fit reads them.

    Attributes:
        logits: (n, k), not yet divided by any temperature.
        labels: (n,).
        top: the predicted class, (n,).
        below: how far the largest of the other logits lies below the top one, (n,) <= 0.
        terms: ones, then the centred terms, (n, 1 + t) float64.
        group: the row's sample, (n,), where samples have several rows; else the row itself.
        fold: of the row's sample, (n,), where samples have several rows; else 0.
    """

    logits: Tensor
    labels: Tensor
    top: Tensor
    below: Tensor
    terms: Tensor
    group: Tensor
    fold: Tensor

    def some(self, which: slice | Tensor) -> Rows:
        """The chosen rows."""
        return Rows(*(values[which] for values in vars(self).values()))

    def cut(self, most: int | None = None) -> list[Rows]:
        """Blocks that go through a sum at once; larger ones where there may be but so many."""
        count, step = len(self.labels), max(NUMBERS // self.logits.shape[1], 1)
        step = step if most is None else max(step, math.ceil(count / most))
        if count <= step or self.logits.is_cuda:
            return [self]
        return [self.some(slice(start, start + step)) for start in range(0, count, step)]


def curves(rows: Rows, inverse: Tensor, boost: Tensor, smoothing: float = 0.0) -> Tensor:
    """Each row's NLL in u = log 1/T and in b: value, slopes and second derivatives, (7, n) float64.

    With A the log-sum-exp of the other logits over T, the predicted class has log odds
    d = z_top / T + b - A. The NLL is that of "the prediction is right" by d; where it is wrong,
    that of the label among the others comes to it. The order is value, u, b, uu, ub, bb; then the
    NLL with the prediction kept, whatever b. A share of the labels may be spread over all classes.
    """
    first, nearest = rows.logits.gather(1, rows.top[:, None]), rows.below.double()
    true = (rows.logits.gather(1, rows.labels[:, None]) - first)[:, 0].double()
    wrong = (rows.top != rows.labels).double()
    if smoothing:  # `true` becomes the mean over labels that are not the top, `wrong` their share
        classes = rows.logits.shape[1]
        below, each = (rows.logits - first).double().sum(1), smoothing / classes
        both = (1 - smoothing) * wrong + each * (classes - 1)
        true = ((1 - smoothing) * wrong * true + each * below) / both
        wrong = both
    total, one, two = others(rows, inverse.to(rows.logits.dtype)).double()
    unit = LN2 / inverse
    mean = one / total * unit + nearest  # below the top, as `true` is
    variance = (two / total - (one / total).square()).clamp(min=0) * unit.square()
    share = total.log() + inverse * nearest  # A
    odds = boost - share
    sure = odds.sigmoid()
    slope = sure - 1 + wrong  # in d
    bend = sure * (1 - sure)
    ahead = torch.maximum(boost, inverse * nearest) - share
    value, kept = (F.softplus(-d) + wrong * (d + share - inverse * true) for d in (odds, ahead))
    first = wrong * (mean - true) - slope * mean  # in 1/T; d falls by the mean
    second = bend * mean.square() + (wrong - slope) * variance
    return torch.stack(
        [
            value,
            inverse * first,
            slope,
            inverse.square() * second + inverse * first,
            -inverse * bend * mean,
            bend,
            kept,
        ]
    )


def others(rows: Rows, inverse: Tensor) -> Tensor:
    """Sums over all classes but the top of 2^s, 2^s s and 2^s s^2, (3, n).

    s is how far a logit over T lies below the next one to the top, by ln 2.
    """
    parts = rows.cut()
    if len(parts) > 1:
        split = torch.split(inverse, [len(part.labels) for part in parts])
        return torch.cat([others(*both) for both in zip(parts, split, strict=True)], 1)
    top = rows.top[:, None]
    scaled = rows.logits - (rows.logits.gather(1, top) + rows.below[:, None])
    scaled.mul_(inverse[:, None] / LN2).scatter_(1, top, 0.0)
    weight = scaled.exp2().scatter_(1, top, 0.0)
    return torch.stack([weight.sum(1), *(weight.mul_(scaled).sum(1) for _ in range(2))])


@dataclass(frozen=True)
class System:
    """Newton's linear system at a point: (t, a, b) dense, c diagonal.

    Attributes:
        value: the mean NLL with the ridge.
        kept: the mean NLL alone, with every prediction kept.
        at: the point, (2 + t + k,).
        slope: there.
        border: what couples c with the rest, (k, 2 + t).
        own: the second derivatives of c, (k,).
        inverse: of the rest once c is eliminated, (2 + t, 2 + t).
    """

    value: float
    kept: float
    at: Tensor
    slope: Tensor
    border: Tensor
    own: Tensor
    inverse: Tensor

    @classmethod
    def of(cls, sums: Tensor, at: Tensor, ridge: Tensor, dense: int) -> System:
        """The system of sums over all rows, as `_Fit.sums` lays them out, per row."""
        classes = len(at) - dense
        sizes = [1, 1, len(at), dense * dense, classes * dense, classes]
        value, kept, slope, inner, border, own = torch.split(sums, sizes)
        border, own = border.view(classes, dense), own + ridge[dense:]
        own = own.clamp(min=0.5 * float(ridge[-1]))
        rest = inner.view(dense, dense) + torch.diag(ridge[:dense])
        size, axes = torch.linalg.eigh(rest - border.T @ (border / own[:, None]))
        size = size.abs().clamp(min=1e-6 * float(size.abs().max()))  # down is walked down too
        inverse = axes @ (axes / size).T
        held = float(value) + penalty(ridge, at)
        return cls(held, float(kept), at, slope + ridge * at, border, own, inverse)

    def step(self) -> Tensor:
        """Where Newton's method goes from here."""
        dense = len(self.inverse)
        first, last = self.slope[:dense], self.slope[dense:]
        head = self.inverse @ (first - self.border.T @ (last / self.own))
        return -torch.cat([head, (last - self.border @ head) / self.own])

    def spread(self, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
        """How u and b of a row answer to a pull on them: uu, ub, bb, each (n,) or ()."""
        border, own = self.border.to(rows.terms)[rows.top], self.own.to(rows.terms)[rows.top]
        inverse = self.inverse.to(rows.terms)
        seen = F.pad(rows.terms, (0, 1)) - border / own[:, None]
        pulled = seen @ inverse
        return (pulled * seen).sum(1) + 1 / own, pulled[:, -1], inverse[-1, -1]


def penalty(ridge: Tensor, at: Tensor) -> float:
    """What a ridge takes for a point."""
    return float((ridge * at.square()).sum()) / 2


class _Fit:
    """The rows of a problem, and what was fitted to them."""

    def __init__(self, wanted: SampleTemperature, problem: Problem) -> None:
        self.problem, facts = problem, problem.facts
        self.names = wanted.names(with_features=problem.head is not None and facts.width > 0)
        self.terms: list[Tensor] = []
        self.tops: list[Tensor] = []
        self.below: list[Tensor] = []
        size = len(self.names)
        sums = dist.summed(map(self.read, problem.data), 2 * size + 1) / facts.rows
        mean, square, wrong = torch.split(sums, [size, size, 1])
        self.centre = mean
        self.reach = REACH * (square - mean.square()).clamp(min=0).sqrt()
        for place, terms in enumerate(self.terms):
            reach, centre = self.reach.to(terms), self.centre.to(terms)
            self.terms[place] = F.pad((terms - centre).clamp(-reach, reach), (1, 0), value=1.0)
        held = max(1.0, ERRORS / max(float(wrong) * facts.rows, 1.0))
        self.dense, self.size = len(self.names) + 2, len(self.names) + 2 + facts.classes
        parts = ((len(self.names), "a"), (1, "b"), (facts.classes, "c"))
        ridge = [torch.full((count,), RIDGE[key]) for count, key in parts]
        self.ridge = torch.cat([torch.zeros(1), *ridge]).double() * held
        # Every point of the search is a step away from here, which is what the ridge holds small.
        self.expected = torch.zeros(self.size, dtype=torch.float64)
        sizes = [place for place, name in enumerate(self.names, start=1) if name in SIZES]
        self.expected[sizes] = SIZE / max(len(sizes), 1)
        self.expected[self.dense - 1] = TOP
        self.kept = list(self.rows(sampled=True))
        asked = [unchecked(rows.logits, rows.labels) for rows in self.kept]
        common = temper(asked, problem.loss)  # of all rows it is not needed
        self.capped = common is None or bool(common.capped.any())
        self.inverse = 1.0 if common is None else float(common.inverse[0])

    def read(self, batch: Batch) -> Tensor:
        """Takes in the terms of a chunk: their sums, those of their squares, and the wrong rows."""
        reads = bool(set(self.names) & set(OF_FEATURES))

        def of(rows: Batch) -> tuple[Tensor, Tensor, Tensor]:
            logits, features = stored_logits(rows), features_of(rows) if reads else None
            top = predicted(logits)
            found = statistics(features, logits, top[:, None])
            return torch.stack([found[name] for name in self.names], 1), top, found["below"]

        seen = batch if reads else unchecked(batch.logits, batch.labels)
        terms, top, below = map(torch.cat, zip(*spread(of, blocks(seen, NUMBERS)), strict=True))
        terms = terms.double()
        self.terms.append(terms)
        self.tops.append(top)
        self.below.append(below)
        wrong = (top != batch.labels).sum(dtype=torch.float64)[None]
        return torch.cat([terms.sum(0), terms.square().sum(0), wrong])

    def rows(self, *, sampled: bool) -> Iterable[Rows]:
        """All rows of this process, or about SAMPLE of all processes', chosen by content."""
        facts = self.problem.facts
        groups = max(1, round(facts.rows / min(SAMPLE, LOGITS // facts.classes)))
        known = zip(self.problem.data, self.tops, self.below, self.terms, strict=True)
        for batch, top, below, terms in known:
            own, none = torch.arange(len(top), device=top.device), torch.zeros_like(batch.labels)
            group, fold = (
                (own, none) if batch.groups is None else (batch.groups, fold_of(batch, FOLDS))
            )
            rows = Rows(stored_logits(batch), batch.labels, top, below, terms, group, fold)
            if sampled and groups > 1:
                some = unchecked(rows.logits[:, :HASHED], batch.labels)
                chosen = fold_of(some, groups) == 0
                rows = rows.some(chosen)
            if len(rows.labels):
                yield rows

    def chosen(self, details: dict[str, Any]) -> tuple[float, float]:
        """The strength that is best for rows left out, and how far to go towards its fit, 0 to 1.

        All the way from one T for all rows where the fit does better on rows left out by a standard
        error, not at all where it does worse by one: a choice of one or the other would follow
        chance where little tells them apart.
        """
        kept = self.kept
        count = int(dist.total(torch.tensor(sum(len(rows.labels) for rows in kept))))
        if count < 2 or self.capped:
            return STRENGTHS[0], 0.0

        def mean(losses: list[Tensor]) -> float:
            return float(dist.summed(one.sum() for one in losses)) / count

        plain = self.left_out(kept, -self.expected, None, count)
        start = torch.zeros(self.size, dtype=torch.float64)
        self.starts: dict[float, Tensor] = {}
        found: dict[float, list[Tensor]] = {}
        for strength in STRENGTHS:
            start, system, _ = self.newton(lambda: kept, count, strength, start, ROUGHLY)
            self.starts[strength] = start
            found[strength] = (
                self.samples_left_out(kept, start, strength, count)
                if self.problem.facts.groups
                else self.left_out(kept, start, system, count)
            )
        losses = {strength: mean(each) for strength, each in found.items()}
        best = min(losses, key=lambda strength: losses[strength])
        gain, error = paired(kept, plain, found[best])
        share = min(max((gain / error + 1) / 2, 0.0), 1.0) if error > 0 else float(gain > 0)
        details |= {"loo": losses[best], "loo_temperature": mean(plain), "share": share}
        details["strength"] = best if share else None
        return best, share

    def whole(self, strength: float, share: float) -> tuple[Tensor, float, bool]:
        """So far from one T towards the fit to all rows, the loss there, and whether it settled."""
        every, rows = partial(self.rows, sampled=False), self.problem.facts.rows
        at, system, settled = self.newton(every, rows, strength, self.starts[strength])
        if share == 1:
            # The last step, which nothing was measured after, gives what the quadratic says.
            ridge, last = self.ridge * strength / rows, at - system.at
            rise = float(system.slope @ last) / 2 + penalty(ridge, system.at) - penalty(ridge, at)
            return at + self.expected, system.kept + rise, settled
        there = share * (at + self.expected)
        return there, float(self.sums(every(), there - self.expected, rows)[1]), settled

    def at(self, rows: Rows, at: Tensor) -> Tensor:
        """The curves of rows at a point, (7, n)."""
        here = (at + self.expected).to(rows.terms)
        log = rows.terms @ here[: self.dense - 1] + here[self.dense :][rows.top]
        boost, smoothing = here[self.dense - 1].expand_as(log), self.problem.loss.smoothing
        return curves(rows, self.inverse * log.exp(), boost, smoothing)

    def sums(self, data: Iterable[Rows], at: Tensor, rows: int) -> Tensor:
        """Value, slope and second derivatives per row: the parts of a `System`, flat."""
        classes, dense = self.size - self.dense, self.dense

        def of(part: Rows) -> Tensor:
            value, in_u, in_b, uu, ub, bb, kept = self.at(part, at)
            mixed = torch.cat([part.terms * uu[:, None], ub[:, None]], 1)  # of u with (t, a, b)
            inner = torch.zeros(dense, dense).to(part.terms)
            inner[:-1] = part.terms.T @ mixed
            inner[-1, :-1], inner[-1, -1] = inner[:-1, -1], bb.sum()
            by_class = torch.zeros(classes, dense + 2).to(part.terms)
            by_class.index_add_(0, part.top, torch.cat([in_u[:, None], mixed, uu[:, None]], 1))
            flat = [value.sum(), kept.sum(), part.terms.T @ in_u, in_b.sum(), by_class[:, 0]]
            flat += [inner, by_class[:, 1:-1], by_class[:, -1]]
            return torch.cat([one.flatten() for one in flat])

        size = 2 + self.size + dense * dense + classes * (dense + 1)
        parts = (torch.stack(spread(of, part.cut(PIECES))).sum(0) for part in data)
        return dist.summed(parts, size) / rows

    def newton(
        self,
        data: Callable[[], Iterable[Rows]],
        rows: int,
        strength: float,
        at: Tensor,
        enough: float = ENOUGH,
    ) -> tuple[Tensor, System, bool]:
        """The minimum from a start, the system there, and whether the search settled.

        Points are steps away from what is expected.
        """
        ridge = self.ridge * strength / rows
        system = System.of(self.sums(data(), at, rows), at, ridge, self.dense)
        for _ in range(STEPS):
            step = system.step()
            step = step / max(1.0, float(step.abs().max()))  # the quadratic holds no further
            promised = -float(system.slope @ step)
            if promised < enough:
                return at + step, system, True
            for length in (1.0, 0.5, 0.25, 0.1, 0.03, 0.01):
                there = at + length * step
                new = System.of(self.sums(data(), there, rows), there, ridge, self.dense)
                if new.value <= system.value - 1e-4 * length * promised:
                    break
            else:
                return at, system, False
            at, system = there, new
        return at, system, False

    def samples_left_out(
        self, data: list[Rows], at: Tensor, strength: float, rows: int
    ) -> list[Tensor]:
        """The NLL of each row under a fit without its sample, a fold of samples at a time."""
        found = [torch.zeros_like(part.terms[:, 0]) for part in data]
        for fold in range(FOLDS):
            seen = [part.some(part.fold != fold) for part in data]
            count = int(dist.total(torch.tensor(sum(len(part.labels) for part in seen))))
            if count < rows:  # else no row is in this fold
                there, *_ = self.newton(lambda seen=seen: seen, max(count, 1), strength, at)  # type: ignore[misc]
                for part, losses in zip(data, found, strict=True):
                    held = part.fold == fold
                    losses[held] = self.at(part, there)[0][held]
        return found

    def left_out(
        self, data: list[Rows], at: Tensor, system: System | None, rows: int
    ) -> list[Tensor]:
        """The NLL of each row under the fit without it, by one Newton step back.

        Without a system: of one T for all rows.
        """
        at_once = partial(self.at, at=at)
        found = []
        seen = [torch.cat(spread(at_once, part.cut(PIECES)), 1) for part in data]
        bend = dist.summed(curves[3].sum() for curves in seen)
        for part, (value, in_u, in_b, uu, ub, bb, _) in zip(data, seen, strict=True):
            if system is None:
                own = torch.full_like(uu, 1 / float(bend))
                cross = other = torch.zeros_like(uu)
            else:
                own, cross, other = (one / rows for one in system.spread(part))
            # (I - M H) move = M g with M the answer to a pull and H the row's own curvature.
            m11, m12 = 1 - own * uu - cross * ub, -own * ub - cross * bb
            m21, m22 = -cross * uu - other * ub, 1 - cross * ub - other * bb
            pull_u, pull_b = own * in_u + cross * in_b, cross * in_u + other * in_b
            whole = (m11 * m22 - m12 * m21).clamp(min=0.05)  # one row does not decide alone
            move_u = (m22 * pull_u - m12 * pull_b) / whole
            move_b = (m11 * pull_b - m21 * pull_u) / whole
            rise = in_u * move_u + in_b * move_b
            bent = uu * move_u.square() + 2 * ub * move_u * move_b + bb * move_b.square()
            found.append(value + rise + bent / 2)
        return found


def paired(data: list[Rows], before: list[Tensor], now: list[Tensor]) -> tuple[float, float]:
    """By how much losses per row fall on average, and its standard error over samples."""

    def sums_of(part: Rows, old: Tensor, new: Tensor) -> Tensor:
        _, sample, size = torch.unique(part.group, return_inverse=True, return_counts=True)
        fall = torch.zeros(len(size)).to(old).index_add_(0, sample, old - new)
        size = size.to(fall)
        each = (fall, size, fall * fall, fall * size, size * size)
        return torch.stack([one.sum() for one in each])

    sums = dist.summed(map(sums_of, data, before, now), 5)
    fall, rows, fall_fall, fall_rows, rows_rows = sums.tolist()
    gain = fall / rows
    spread = fall_fall - 2 * gain * fall_rows + gain * gain * rows_rows
    return gain, max(spread, 0.0) ** 0.5 / rows
