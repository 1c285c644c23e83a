"""Feature clipping: head(clamp(x, -c, c)), c by validation NLL (Tao, Dong and Xu, AAAI 2025).

The file reads from the outside in: the method and what it reports, logits at a threshold, what a
threshold is worth, the search for the best one, and the look at a sample that guides the search.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, product
from typing import ClassVar, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from featcal.core import dist, memory
from featcal.core.batch import (
    Batch,
    Data,
    Head,
    Through,
    blocks,
    by_blocks,
    features_of,
    joined,
    stored_logits,
    unchecked,
    wide,
)
from featcal.core.calibrator import FeatureMap
from featcal.core.checks import InputError, check_choice, check_flags
from featcal.core.fit import (
    CRITERIA,
    Counted,
    Loss,
    Problem,
    StepReport,
    accuracy,
    applied,
    confidence,
    kept_everywhere,
    measure,
    measuring,
    refitted,
    refitting,
    rows_asked,
)
from featcal.core.progress import FEW_LARGE, calm, spread, tell, track
from featcal.core.sample import CELLS, hashed_sample, row_hash, size_counts, size_quantile
from featcal.core.scalar import Point, Shape, Walk, best_of, fitted_shape, flat, refine, vertex
from featcal.heads.head import head_logits, linear_view

PASSES = 10  # of the head over all rows, part passes counted in
GAIN = 1e-7  # a smaller gain over c = inf is rounding, not clipping
PUBLISHED_SHARE = 0.99  # the accuracy guard of the published code
MOSTLY = 0.7  # the share of touched rows from which on picking them costs more than it saves

# Small data with a linear head: every threshold is looked at.
SMALL = 2**24  # n d k at most,
ENOUGH = 2048  # and fewer rows than this: from here on samples can be trusted;
CHEAP = 2**22  # or n d k so small that looking everywhere costs less than thinking
JOINT = 64  # thresholds where later steps are refitted for each

# All other data: a scan of a sample, a walk on all rows, a window around its end.
MANY = 2**24  # logits beyond which NLL(c) is so smooth that a walk needs no window after it
SHARE, MOST = 0.16, 3072  # of the rows in the sample; more rows tell a scan nothing new
POINTS = 8  # of the scan across all thresholds
OFFSETS = np.linspace(-0.45, 0.45, 5)  # of the closer look, in log c
MOST_TRIALS = POINTS + 2 * len(OFFSETS)  # when the closer look has to move
ROUGH, FINE = 2e-5, 5e-8  # nats a walk may leave on the table: to the window, and for good
CLOSELY = 25  # thresholds of a window
SWEPT, SWEPT_POINTS = 0.08, 6  # log thresholds on either side of smooth data, and looks
WINDOW, WIDE_WINDOW = 0.02, 0.045  # log thresholds looked at beside a walk that settled or not

# With a linear head all of the far end is looked at, where few activations are clipped.
FAR = 0.1  # of those that are not 0, at most
APART, MOST_FAR = 0.06, 40  # log thresholds between those of its scan, and how many at most
SCANNED = 2**22  # logits; where there are more a sample is scanned
NARROWED, NARROW = (4, 3, 1, 1, 1), 0.005  # valleys looked at ever closer, down to such steps
CLOSE = 0.01  # nats: a valley that lies no more above the best may turn out deeper


@final
class FeatureClip(FeatureMap):
    """x.clamp(-c, c) before the head, with one c for the whole network.

    For features after a ReLU the lower bound never acts. c = inf is the identity; it is always a
    candidate, and a fit that ends there is reported as a no-op. Clipping is not accuracy
    preserving: `min_accuracy` keeps it from costing too much.

    Args:
        threshold: c itself, applied as given; None to have it fitted.
        criterion: what c is chosen by: "nll", "brier" or "ece".
        min_accuracy: the share of the unclipped accuracy that must remain, such as 0.99; None for
            no guard.
        reference: the published search instead: c = 0.01, 0.02, ..., 20.00, the accuracy above
            0.99 of the unclipped one, the smallest c among equals.
    """

    name = "clip"
    title = "feature clipping"
    symbols: ClassVar[dict[str, str]] = {"threshold": "c"}
    threshold: Tensor

    def __init__(
        self,
        *,
        threshold: float | None = None,
        criterion: str = "nll",
        min_accuracy: float | None = None,
        reference: bool = False,
    ) -> None:
        super().__init__()
        check_choice(self.name, "criterion", criterion, CRITERIA)
        check_flags(self.name, reference=reference)
        if min_accuracy is not None:
            number = isinstance(min_accuracy, (int, float)) and not isinstance(min_accuracy, bool)
            if not number or not 0 < min_accuracy <= 1:
                raise InputError(
                    f"clip: min_accuracy is {min_accuracy!r}: give a share of the unclipped "
                    "accuracy, above 0 and at most 1, such as 0.99"
                )
            # The recipe shows numpy's floats as Python's.
            min_accuracy = min_accuracy if isinstance(min_accuracy, int) else float(min_accuracy)
        self.criterion, self.min_accuracy, self.reference = criterion, min_accuracy, reference
        self.register_number("threshold", math.inf, threshold)

    def map_features(self, features: Tensor) -> Tensor:
        """clamp(x, -c, c)."""
        bound = self.threshold.to(features.dtype)
        return torch.clamp(features, -bound, bound)

    def learn(self, problem: Problem) -> list[StepReport]:
        """Searches c and measures what it does to the rows."""
        if self.fixed:
            return applied(self, problem)
        criterion = problem.criterion(self.criterion)
        problem = refitting(problem)
        if self.reference:
            share = self.min_accuracy or PUBLISHED_SHARE
            best, before, settled = published_search(problem, criterion, share)
        else:
            best, before, settled = Search(problem, criterion, self.min_accuracy or 0.0).run()
        c, noop = best.threshold, math.isinf(best.threshold)
        self.assign(threshold=c)
        clipped, touched = (0.0, 0.0) if noop else clipped_share(problem.source, c)
        refitted = None if problem.then is None else repr(problem.then)
        message = f"c = {c:.4g} clips {clipped:.2%} of the activations; "
        message += f"accuracy {before.accuracy:.4f} -> {best.accuracy:.4f}"
        if noop:
            message = self._why_noop(problem)
        elif refitted:
            message += f", with {refitted} refitted for every threshold"
        values, losses = {"threshold": c}, (before.loss, best.loss)
        details = {
            "criterion": self.criterion,
            "criterion_before": before.score,
            "criterion_after": best.score,
            "accuracy_before": before.accuracy,
            "accuracy_after": best.accuracy,
            "clipped_share": clipped,
            "rows_touched": touched,
            "fitted_with": refitted,
        }
        return [StepReport(self.name, values, noop, *losses, settled, message, details=details)]

    def _why_noop(self, problem: Problem) -> str:
        if problem.then is not None:
            return (
                f"no-op: no threshold helps once {problem.then!r} is refitted: nothing is clipped"
            )
        sure, right = measure(problem.data, confidence, accuracy)
        if sure < right:
            return (
                "no-op: no threshold helps; on the whole clipping lowers confidence, and this "
                "network is underconfident on the fit split "
                f"(mean confidence {sure:.3f}, accuracy {right:.3f})"
            )
        guard = f" and keeps {self.min_accuracy} of the accuracy" if self.min_accuracy else ""
        return f"no-op: no threshold improves {self.criterion}{guard}, so nothing is clipped"


def clipped_share(data: Data, threshold: float) -> tuple[float, float]:
    """The share of activations beyond the threshold, and of rows with at least one."""

    def beyond(features: Tensor) -> Tensor:
        size = features.abs()
        whole = torch.tensor([size.numel(), len(size)], device=size.device)
        parts = (size > threshold).count_nonzero(), (size.amax(1) > threshold).sum()
        return torch.cat([torch.stack(parts), whole])

    found = (part for batch in data for part in by_blocks(beyond, features_of(batch)))
    clipped, touched, activations, rows = dist.summed(found, 4).tolist()
    return clipped / activations, touched / rows


# Logits at a threshold: by the head, which is asked only about rows that the threshold touches; or,
# where the head is linear, along their exact path from threshold to threshold.


def clipped_logits(
    features: Tensor, own: Tensor | None, peaks: Tensor, head: Head, threshold: float
) -> Tensor:
    """The logits (n, k) of features clipped at a threshold, by any head.

    Args:
        features: (n, d).
        own: (n, k), the logits of the features as they are, which untouched rows keep; None where
            they are not at hand, so that every row goes through the head.
        peaks: (n,), the largest absolute feature of each row, on the CPU, where nobody waits for
            how many rows are touched.
        head: features -> logits.
        threshold: c.
    """
    touched = peaks > threshold
    share = 1.0 if own is None else float(touched.sum()) / max(len(features), 1)
    if own is None or share > MOSTLY:
        return head_logits(features.clamp(-threshold, threshold), head)
    if share == 0:
        return own
    touched, logits = touched.to(own.device), own.clone()
    clipped = features[touched].clamp_(-threshold, threshold)  # a copy already
    logits[touched] = head_logits(clipped, head).to(logits.dtype)
    return logits


class LinearPath:
    """The exact logits of a linear head at any threshold, given those at one threshold c0.

    W clamp(x, -c, c) + b is piecewise linear in c, with kinks at the |x_j|. From c0 to c the units
    beyond both move the logits together, along a slope W sign(x), and only the few units between
    the two need a correction: no further product of the head's size.

    Args:
        features: (n, d).
        logits: (n, k), at c0.
        directions: (d, k), the weights of the head by unit.
        centre: c0.
        reach: how far from it thresholds will lie at most, in log thresholds.
    """

    def __init__(
        self, features: Tensor, logits: Tensor, directions: Tensor, centre: float, reach: float
    ) -> None:
        self.logits, self.centre, self.directions = logits, centre, directions
        beyond = (features - features.clamp(-centre, centre)).sign_()
        self.slope = beyond @ directions if bool(beyond.any()) else torch.zeros_like(logits)
        size, ends = features.abs(), [centre * math.exp(side * reach) for side in (-1, 1)]
        self.row, self.unit = ((size > ends[0]) & (size < ends[1])).nonzero(as_tuple=True)
        self.size = size[self.row, self.unit]
        self.sign = features[self.row, self.unit].sign()
        self.sorted, self.order = self.size.sort()

    def at(self, threshold: float) -> Tensor:
        """The logits at a threshold, which costs as much as there are units between it and c0."""
        return self._towards(threshold)[0]

    def move(self, threshold: float) -> Tensor:
        """The logits at a threshold, which becomes c0: for many thresholds one after another."""
        logits, passed, sign = self._towards(threshold)
        self.slope = self._plus(self.slope, passed, sign)
        self.logits, self.centre = logits, threshold
        return logits

    def _towards(self, threshold: float) -> tuple[Tensor, Tensor, Tensor]:
        """The logits there, the units passed on the way, and what each adds to the slope."""
        ends = torch.tensor(sorted((threshold, self.centre)), dtype=self.sorted.dtype)
        ends = ends.to(self.sorted.device, non_blocking=True)
        first, last = torch.searchsorted(self.sorted, ends, right=True).tolist()
        passed = self.order[first:last].sort().values  # row by row, as sparse products need it
        sign = self.sign[passed] if threshold < self.centre else -self.sign[passed]
        logits = torch.add(self.logits, self.slope, alpha=threshold - self.centre)
        return self._plus(logits, passed, sign * (threshold - self.size[passed])), passed, sign

    def _plus(self, values: Tensor, units: Tensor, amounts: Tensor) -> Tensor:
        """Logits or slopes with some units changed by some amounts."""
        if not len(units):
            return values
        row, unit, shape = self.row[units], self.unit[units], (len(values), len(self.directions))
        # Sorted and in range by construction: nonzero() gave the indices.
        with torch.sparse.check_sparse_tensor_invariants(enable=False):  # type: ignore[no-untyped-call]
            if values.is_cuda:  # a product of the other kind would turn all values round and back
                first = torch.searchsorted(row, torch.arange(len(values) + 1, device=row.device))
                with warnings.catch_warnings():  # torch calls this kind a beta, once
                    warnings.simplefilter("ignore", UserWarning)
                    few = torch.sparse_csr_tensor(first, unit, amounts, shape)
                return torch.addmm(values, few, self.directions)
            where = torch.stack([row, unit])
            few = torch.sparse_coo_tensor(where, amounts, shape, is_coalesced=True)
        changed: Tensor = torch.sparse.addmm(values, few, self.directions)
        return changed


@dataclass(frozen=True, eq=False)
class Along:
    """The rows of some paths at a threshold, one chunk at a time."""

    paths: list[LinearPath]
    labels: list[Tensor]
    threshold: float

    def __iter__(self) -> Iterator[Batch]:
        for path, labels in zip(self.paths, self.labels, strict=True):
            yield Batch(path.at(self.threshold), labels)


# What a threshold is worth: by the criterion, with the later steps refitted where fitting is joint.


@dataclass(frozen=True)
class Trial:
    """One threshold: the criterion, the fit's loss and the accuracy it gives."""

    threshold: float
    score: float
    loss: float
    accuracy: float


View = Callable[[float], Data]  # a threshold -> the data with its logits
Found = tuple[Trial, Trial, bool]  # the best trial, the one without a clip, and whether it settled


class Clipped:
    """The problem's data with features clipped at c."""

    def __init__(self, problem: Problem, peaks: list[Tensor], threshold: float) -> None:
        self.problem, self.peaks, self.threshold = problem, peaks, threshold

    def __iter__(self) -> Iterator[Batch]:
        head, kept = self.problem.head, self.problem.data.kept
        assert head is not None
        # Own logits that do not fit into memory would cost a pass: then one pass does for all.
        batches = self.problem.data if kept else self.problem.source
        for peaks, batch in zip(self.peaks, batches, strict=True):
            own = stored_logits(batch) if kept else None
            if own is None or math.isfinite(self.threshold):
                own = clipped_logits(features_of(batch), own, peaks, head, self.threshold)
            yield unchecked(own, batch.labels, None, batch.groups)


def largest(features: Tensor) -> Tensor:
    """The largest absolute feature of each row."""
    size: Tensor = torch.linalg.vector_norm(features, math.inf, 1)
    return size


class Trials:
    """Tries thresholds and remembers them.

    Args:
        problem: what is fitted, with the later steps to refit for every threshold, if any.
        criterion: what thresholds are scored by.
        view: where the logits of a threshold come from; the head unless given.
        accuracy: whether trials have one; an argmax costs as much as the loss itself.
    """

    def __init__(
        self, problem: Problem, criterion: Loss, view: View | None = None, *, accuracy: bool
    ) -> None:
        self.problem, self.criterion, self.accuracy = problem, criterion, accuracy
        self.keep = 0 if problem.then is None else None  # read once unless later steps are refitted
        if view is None:
            peaks = [torch.cat(by_blocks(largest, features_of(b))).cpu() for b in problem.source]
            self.peaks = torch.cat([*peaks, torch.zeros(1)]).double()
            view = partial(Clipped, problem, peaks)
        self.view = view
        self.seen: list[Trial] = []

    def at(self, threshold: float) -> Trial:
        """Tries one threshold, rounded to float32 as the fitted buffer will hold it."""
        return self.begun(threshold)()

    def begun(self, threshold: float) -> Callable[[], Trial]:
        """Begins a trial, and returns what waits for it: a GPU goes on to the next threshold."""
        threshold = float(np.float32(threshold))
        losses = dict.fromkeys([self.criterion, self.problem.loss])
        if self.accuracy:
            losses[accuracy] = None
        data, known = refitted(self.problem, self.data(threshold))
        told = known is not None and [*losses] == [self.problem.loss]
        measured = partial(list, [known]) if told else measuring(data, *losses)

        def trial() -> Trial:
            values = dict(zip(losses, measured(), strict=True))
            score, loss = values[self.criterion], values[self.problem.loss]
            self.seen.append(Trial(threshold, score, loss, values.get(accuracy, math.nan)))
            return self.seen[-1]

        return trial

    def point(self, log_threshold: float) -> Point:
        """The criterion at a threshold, both as the walk wants them."""
        return Point(log_threshold, self.at(math.exp(log_threshold)).score)

    def complete(self, trial: Trial) -> Trial:
        """The same trial with its accuracy."""
        if not math.isnan(trial.accuracy):
            return trial
        data, _ = refitted(self.problem, self.data(trial.threshold))
        return replace(trial, accuracy=measure(data, accuracy)[0])

    def data(self, threshold: float) -> Through:
        """The data with the logits of a threshold, kept where they are read again and fit."""
        return Through(self.view(threshold), stored_logits, features=False, keep=self.keep)


# The search.


class Search:
    """Finds the threshold with the lowest criterion among those that keep `guard` of the accuracy.

    NLL(c) is continuous and piecewise smooth but may have more than one minimum, so a global look
    comes before the local one; all of it takes at most ten passes of the head:

    1. A scan on a sample of the rows finds the valleys and the shape of the deepest one: about two
       passes' worth.
    2. The far end, where next to no activations are clipped, is where fits with later steps end, in
       valleys too shallow for a sample. With a linear head the exact path from c = inf, the
       identity, leads through all of it for a tenth of a pass. With any other head, thresholds
       that touch 1/8, 1/32, ... of the rows cost a sixth of a pass together.
    3. All rows are asked about each valley that lies deeper. A walk over log c on all rows corrects
       the sample's shape by a polynomial through the points it has seen: about four passes.
    4. With a linear head, dz/dc gives the exact logits all around the walk's end for two passes
       more. NLL(c) is rough on the scale of single units, so that no smooth model finds its lowest
       point: it is picked, not modelled.

    Small data with a linear head needs no walk: every threshold is looked at. Neither does large
    data, of which NLL(c) is smooth: on a CPU, without a guard, one such look across the sample's
    valley, for two passes, says where a polynomial through it is lowest.
    """

    def __init__(self, problem: Problem, criterion: Loss, guard: float) -> None:
        facts, head = problem.facts, problem.head
        self.problem, self.criterion, self.guard = problem, criterion, guard
        # What a sample is asked by: the ECE of few rows would be noise.
        self.rough = criterion if criterion.smooth else problem.loss
        self.layer = linear_view(head.head if isinstance(head, Counted) else head)
        # Paths hold two logits per row and class, 36 bytes for each activation on the way, about
        # one in twenty, and a copy of the head. With later steps there is more to find.
        each, copy = 8 * facts.classes + 2 * facts.width, 4 * facts.classes * facts.width
        fits = facts.rows * each + copy <= memory.keep_bytes()
        many = facts.rows * facts.classes > MANY and problem.then is None
        self.window = self.layer is not None and fits and not many
        # On a GPU the many small steps along a path cost more than a few products.
        smooth = many and criterion is problem.loss and not guard and facts.device.type == "cpu"
        self.sweeps = smooth and self.layer is not None and copy <= memory.keep_bytes()
        # Where a window will follow, only its best trial needs an accuracy, and gets it for free.
        self.trials = Trials(problem, criterion, accuracy=bool(guard) or not self.window)
        self.seen = self.trials.seen
        self.before = self.seen[0] = self.trials.complete(self.trials.at(math.inf))
        self.peak = float(dist.largest(self.trials.peaks.max()))

    def run(self) -> Found:
        """Looks everywhere or around, and takes the best."""
        if self.peak == 0:
            return self.before, self.before, True
        facts = self.problem.facts
        size = facts.rows * facts.width * facts.classes
        small = size <= CHEAP or (size <= SMALL and facts.rows < ENOUGH)
        look = self.look_everywhere if small and self.layer is not None else self.look_around
        trials, settled = look()
        return self.choose(trials), self.before, settled

    def allowed(self, trials: list[Trial]) -> list[Trial]:
        """The trials that keep enough accuracy; all of them if none does."""
        floor = self.guard * self.before.accuracy
        return [trial for trial in trials if not self.guard or trial.accuracy >= floor] or trials

    def choose(self, trials: list[Trial]) -> Trial:
        """The best allowed trial; the identity unless something truly beats it."""
        best = lowest(self.allowed(trials))
        return best if self.gains(best) else self.before

    def gains(self, found: Trial | Point) -> bool:
        """Whether a threshold truly beats the identity."""
        return found.score < self.before.score - GAIN

    def evaluations(self) -> int:
        """How many more thresholds may be tried, the passes of the window set aside."""
        used = rows_asked(self.problem.head) / self.problem.facts.rows + (2 if self.window else 0)
        return max(math.floor(PASSES - used), 0)

    def look_everywhere(self) -> tuple[list[Trial], bool]:
        """All thresholds on a fine log grid, then ever finer around the best three allowed."""
        problem = self.problem
        smallest = math.log(quantiles(activation_counts(problem.source), [0.8])[0])
        # The fewer the rows, the rougher NLL(c); every point of a joint fit is a fit of its own.
        points = 1200 if problem.facts.rows < 512 else 400
        points = points if problem.then is None else JOINT
        grid = np.linspace(smallest - math.log(64), math.log(self.peak), points)
        step = float(grid[1] - grid[0])
        path = self.along(math.exp(grid[0]))
        for log_c in track("clip: every threshold", grid.tolist()):
            path.point(log_c)
        if problem.then is not None:
            narrow(path)
        for _ in range(2 if problem.then is None else 0):
            starts = sorted(self.allowed(path.seen), key=lambda trial: trial.score)[:3]
            for trial, shift in product(starts, np.linspace(-step, step, 17)):
                path.point(math.log(trial.threshold) + shift)
            step /= 8
        # The best once more by the head itself: a long path rounds off.
        best = self.choose(path.seen)
        return [self.before, self.trials.complete(self.trials.at(best.threshold))], True

    def along(
        self,
        centre: float,
        there: Data | None = None,
        reach: float = math.inf,
        part: Problem | None = None,
    ) -> Trials:
        """Trials along the path of a linear head, for the price of one pass.

        From the far end, where nothing is clipped, the price is that of the units on the way.

        Args:
            centre: the threshold to start from.
            there: the data with the logits of that threshold; without them every threshold may be
                tried, in float64 since a long path rounds off.
            reach: how far from the centre thresholds will lie, in log thresholds.
            part: a sample to be asked instead of all rows.
        """
        layer, head = self.layer, self.problem.head
        assert layer is not None
        assert isinstance(head, Counted)
        weight = layer.weight.detach()
        weight = weight.double() if there is None else wide(weight)
        bias = None if layer.bias is None else layer.bias.detach().to(weight.dtype)
        problem, far, directions = part or self.problem, centre >= self.peak, weight.T.contiguous()
        paths: list[LinearPath] = []
        labels: list[Tensor] = []
        source = problem.source if there is None else there
        own = there is None or there is problem.data  # rows with the features beside the logits
        for batch, known in (
            ((b, b) for b in source) if own else zip(problem.source, source, strict=True)
        ):
            features = features_of(batch).to(weight.dtype)
            if there is None:
                logits = F.linear(features.clamp(-centre, centre), weight, bias)
            else:
                logits = stored_logits(known).to(weight.dtype)
            paths.append(LinearPath(features, logits, directions, centre, 1.2 * reach))
            labels.append(batch.labels)
            # Logits or slope are a product of the head's size, and so are as many units passed.
            head.rows += 2 * len(paths[-1].row) // features.shape[1] if far else len(batch)
            del batch, known, features  # one chunk at a time is alive

        def view(threshold: float) -> Data:
            if not far and there is not None:
                return Along(paths, labels, threshold)
            logits = [path.move(threshold) for path in paths]
            return list(map(Batch, (z.float() if there is None else z for z in logits), labels))

        if part is not None:
            return Trials(part, self.rough, view, accuracy=False)
        return Trials(problem, self.criterion, view, accuracy=bool(self.guard))

    def look_around(self) -> tuple[list[Trial], bool]:
        """The valleys of a sample and of the far end, a walk on all rows, a window at its end."""
        trials, top, facts = self.trials, math.log(self.peak), self.problem.facts
        part = sample(self.problem, min(SHARE, MOST / facts.rows))
        found = valley(self.problem, part, self.rough)
        low, far, path = self.look_far(part, found)
        ends = [Point(math.log(trial.threshold), trial.score) for trial in far]
        # What all rows say of the sample's valleys, and of the rest of its scan if none helps.
        starts: list[Point] = []
        valleys = [found.floor, *found.others]
        alone, settled = self.sweeps and not (found.others or ends), True
        if alone:  # nothing to be compared with
            settled = self.close_in(found.floor)
        for log_c in (*valleys, *found.rest):
            helps = self.gains(lowest(self.seen)) or any(map(self.gains, ends))
            if self.evaluations() < 2 or (helps and (alone or log_c not in valleys)):
                break
            if log_c < low and all(abs(log_c - start.at) > 0.2 for start in starts):
                starts.append(trials.point(min(log_c, top)))
        if starts and (math.isinf(low) or best_of(starts).score < best_of(ends).score + CLOSE):
            settled = self.walk(found, starts, ends)
        if path is not None and best_of(ends).score < lowest(self.seen).score + CLOSE:
            narrow(path)
        best = lowest([*self.seen, *far])
        if not self.gains(best):
            return self.seen, settled
        if best.accuracy < self.guard * self.before.accuracy:
            return self.towards_guard(far)
        if path is None and best in far and best not in self.seen:
            return [self.before, best], True
        if best not in self.seen:  # once more by the head itself: a path rounds off
            return [self.before, trials.complete(trials.at(best.threshold))], True
        if not self.window:
            return self.seen, settled
        del path  # its logits and slopes are as many as those of the window
        reach = WINDOW if settled else WIDE_WINDOW
        close, liked = self.look_closely(best.threshold, reach)
        return [self.before, close], abs(math.log(liked / best.threshold)) < 0.99 * reach

    def walk(self, found: Valley, starts: list[Point], ends: list[Point]) -> bool:
        """A walk on all rows from the best start; whether it settled."""
        if self.sweeps and self.evaluations() > 2:
            return self.close_in(best_of(starts).at)
        known, shape, top = starts[:1], found.shape, math.log(self.peak)
        if best_of([*starts, *ends]) is not starts[0]:  # the sample was wrong about the valley
            known, shape = sorted({*starts, *ends, Point(top, self.before.score)}), flat
        steps, best = self.evaluations(), lowest(self.seen)
        if self.gains(best) and best is not lowest(self.allowed(self.seen)):
            steps = min(steps, 2)  # the guard will bind: keep passes for finding where
        done = count(1)

        def score(log_threshold: float) -> float:
            tried = self.trials.point(log_threshold).score
            tell("clip: walk", next(done), steps)
            return tried

        rules = Walk(found.low, top, steps, ROUGH if self.window else FINE, shape)
        return refine(score, known, rules)[1]

    def close_in(self, at: float) -> bool:
        """The lowest point of a polynomial through a sweep; another sweep where it lies outside."""
        settled = False
        while not settled and self.evaluations() > 2:
            ends = math.exp(at - SWEPT), math.exp(at + SWEPT)
            swept = [Point(math.log(t.threshold), t.score) for t in self.sweep(*ends, SWEPT_POINTS)]
            shape = fitted_shape(swept, SWEPT_POINTS - 1)
            grid = np.linspace(at - SWEPT, at + SWEPT, 2001)
            lowest_at = float(grid[shape(grid).argmin()])
            settled, at = abs(lowest_at - at) < 0.9 * SWEPT, lowest_at
        self.trials.point(min(at, math.log(self.peak)))
        return settled

    def look_far(self, part: Problem, found: Valley) -> tuple[float, list[Trial], Trials | None]:
        """The valleys where next to nothing is clipped.

        Returns:
            The log threshold down to which there is nothing left to find, trials on all rows, and
            where later steps are refitted for each, those along the path of a linear head. Of any
            other head: infinity, and what it says of thresholds that touch few rows.
        """
        # Without the raw logits at hand every row would be recomputed.
        if not kept_everywhere(self.problem):
            return math.inf, [], None
        peaks = dist.total(size_counts(self.trials.peaks))
        shares = 0.5 ** np.arange(3, math.log2(self.problem.facts.rows) + 1, 2)
        few = [math.log(c) for c in quantiles(peaks, shares) if c < self.peak]
        if self.layer is None or not (self.window or self.sweeps):
            rough = Trials(part, self.rough, accuracy=False)
            begun = [rough.begun(math.exp(log_c)) for log_c in (math.inf, *sorted({*few}))]
            scores = [trial().score for trial in begun]
            if scores[0] - min(scores) < found.gain - CLOSE:
                return math.inf, [], None  # far from the depth of the sample's valley
            for log_c in track("clip: far end", sorted({*few})):
                self.trials.point(log_c)
            return math.inf, self.seen[1:], None
        (low,) = map(math.log, quantiles(activation_counts(part.source), [FAR]))
        top = math.log(self.peak)
        if not few or low >= few[0]:
            return math.inf, [], None
        scan = [*spaced(top, few[0], 3 * APART), *spaced(few[0], low, APART)]
        facts, reach = self.problem.facts, top - low
        share = SCANNED / (facts.rows * facts.classes)
        if self.problem.then is None:  # its valleys are not as shallow
            share /= 4
        if share < 1:
            part = sample(self.problem, share)
            rough = self.along(self.peak, part.data, reach, part)
            for log_c in track("clip: far end", scan):
                rough.point(log_c)
            deepest = lowest(rough.seen).score
            if rough.seen[0].score - deepest < found.gain - CLOSE:
                return math.inf, [], None
            if self.problem.then is None:
                ways = unknown_valleys(rough.seen, math.exp(found.floor))[:2]
                if not ways:
                    return math.inf, [], None
                points = [math.ceil(math.log(b / a) / NARROW) + 2 for a, b in ways]
                every = map(self.sweep, *zip(*ways, strict=True), points)
                return math.inf, [trial for trials in every for trial in trials], None
            near = {one.threshold for three in valleys(rough.seen)[:3] for one in three}
            scan = [math.log(c) for c in sorted(near, reverse=True)]
        path = self.along(self.peak, self.problem.data, reach)
        for log_c in track("clip: far end", scan):
            path.point(log_c)
        return low, path.seen, path

    def towards_guard(self, far: list[Trial]) -> tuple[list[Trial], bool]:
        """From the best threshold, which costs too much accuracy, to where the guard just holds.

        `far` are the trials along the path of the far end.

        Accuracy(c) is a ragged staircase: lines from one side to the other find its edge, and a
        window around the edge the step that is best.
        """
        floor, tried = self.guard * self.before.accuracy, [*self.seen, *far]
        low = lowest(tried)
        fine = [t for t in tried if t.accuracy >= floor and t.threshold > low.threshold]
        high = min(fine, key=lambda trial: trial.threshold)  # without a clip it always holds

        def between() -> float:
            """Where a straight line from low to high meets the guard."""
            ends = [math.log(min(trial.threshold, self.peak)) for trial in (low, high)]
            share = (floor - low.accuracy) / (high.accuracy - low.accuracy)
            return math.exp(ends[0] + min(max(share, 0.1), 0.9) * (ends[1] - ends[0]))

        while self.evaluations():
            trial = self.trials.at(between())
            low, high = (low, trial) if trial.accuracy >= floor else (trial, high)
        settled = min(high.threshold, self.peak) / low.threshold <= 1.001
        if not self.window:
            return self.seen, settled
        centre = between()
        close, liked = self.look_closely(centre, WIDE_WINDOW)
        if close is self.before:  # the guard holds nowhere near
            return [
                self.before,
                high if high in self.seen else self.trials.at(high.threshold),
            ], False
        return [*self.seen, close], abs(math.log(liked / centre)) < 0.99 * WIDE_WINDOW

    def look_closely(self, centre: float, reach: float) -> tuple[Trial, float]:
        """Exact trials across a window of thresholds.

        Args:
            centre: the threshold in the middle of the window.
            reach: how far to look on either side, in log thresholds.

        Returns:
            The best allowed trial and its threshold; the one without a clip and the centre where
            the window has none.
        """
        trials = self.trials
        if self.problem.then is None:
            close = self.sweep(centre * math.exp(-reach), centre * math.exp(reach), CLOSELY)
        else:  # later steps are refitted for each, which takes the logits of all rows at once
            trials = self.along(centre, trials.data(centre), reach)
            for shift in track("clip: window", np.linspace(-reach, reach, CLOSELY).tolist()):
                trials.at(centre * math.exp(shift))
            close = trials.seen
        if all(trial.accuracy < self.guard * self.before.accuracy for trial in close):
            return self.before, centre
        best = trials.complete(lowest(self.allowed(close)))
        return best, best.threshold

    def sweep(self, low: float, high: float, points: int) -> list[Trial]:
        """Exact trials of a linear head from one threshold to another, for the price of two passes.

        Rows go through all the thresholds block by block, while they are at hand: nothing is kept.
        """
        layer, head, problem = self.layer, self.problem.head, self.problem
        assert layer is not None
        assert isinstance(head, Counted)
        weight = wide(layer.weight.detach())
        bias = None if layer.bias is None else layer.bias.detach().to(weight.dtype)
        directions = weight.T.contiguous()
        thresholds = np.geomspace(high, low, points).astype(np.float32).tolist()
        losses = list(dict.fromkeys([self.criterion, problem.loss, accuracy]))
        sizes = [loss.size for loss in losses]

        def sums_of(rows: Batch) -> Tensor:
            features = features_of(rows).to(weight.dtype)
            start = F.linear(features.clamp(-thresholds[0], thresholds[0]), weight, bias)
            reach = math.log(thresholds[0] / thresholds[-1])
            path = LinearPath(features, start, directions, thresholds[0], reach)
            every = map(path.move, thresholds)
            count = [start.new_full((1,), rows.labels.numel(), dtype=torch.float64)]
            sums = ([loss(z, rows) for loss in losses] for z in every)
            return torch.stack([torch.cat(one + count) for one in sums])

        def found() -> Iterator[Tensor]:
            for batch in problem.source:
                head.rows += 2 * len(batch)
                yield from spread(sums_of, blocks(batch, classes=len(weight)))

        trials = []
        sums = dist.summed(found(), points, sum(sizes) + 1)
        for threshold, one in zip(thresholds, sums, strict=True):
            *parts, rows = one.split([*sizes, 1])
            pairs = zip(losses, parts, strict=True)
            values = {loss: loss.value(part, float(rows)) for loss, part in pairs}
            score, lost = values[self.criterion], values[problem.loss]
            trials.append(Trial(threshold, score, lost, values[accuracy]))
        return trials


def lowest(trials: list[Trial]) -> Trial:
    """The trial with the lowest score; the smaller threshold among equals."""
    return min(trials, key=lambda trial: (trial.score, trial.threshold))


def spaced(start: float, end: float, apart: float) -> list[float]:
    """Log thresholds from one to another, so far apart or MOST_FAR of them."""
    points = min(math.ceil(abs(end - start) / apart) + 1, MOST_FAR)
    return [float(at) for at in np.linspace(start, end, points)]


def valleys(trials: list[Trial]) -> list[tuple[Trial, Trial, Trial]]:
    """Trials no higher than their neighbours, in the midst of these; the lowest first."""
    order = sorted(
        {trial.threshold: trial for trial in trials}.values(), key=lambda trial: trial.threshold
    )
    threes = zip([order[0], *order], order, [*order[1:], order[-1]], strict=False)
    found = [(a, b, c) for a, b, c in threes if b.score <= min(a.score, c.score)]
    return sorted(found, key=lambda three: three[1].score)


def unknown_valleys(trials: list[Trial], known: float) -> list[tuple[float, float]]:
    """From where to where the deep valleys of a scan from the top lie, other than a known one.

    Neither the slope down to one below the scan's lower end is such, nor the flat top, where next
    to nothing is clipped.
    """
    end, deepest = min(trial.threshold for trial in trials), lowest(trials).score
    limit = deepest + min(CLOSE, (trials[0].score - deepest) / 2)
    ways = [
        (left.threshold, right.threshold)
        for left, one, right in valleys(trials)
        if one.threshold > end and one.score < limit
    ]
    return [(left, right) for left, right in ways if not left < known < right]


def narrow(path: Trials) -> None:
    """Halves the way to the neighbours of the lowest valleys, of fewer valleys each time.

    One that would have to fall further than it rises is left alone. Where no later step is
    refitted, trials are cheap and what is left is looked at closely.
    """
    for most in NARROWED:
        best = lowest(path.seen).score
        for left, one, right in valleys(path.seen)[:most]:
            rise = max(left.score, right.score) - one.score
            for end in (left, right):
                apart = abs(math.log(end.threshold / one.threshold))
                if rise > max(GAIN, one.score - best) and apart > 1.5 * NARROW:
                    path.at(math.sqrt(end.threshold * one.threshold))
    if path.problem.then is None:
        centre = math.log(lowest(path.seen).threshold)
        for shift in np.linspace(-NARROW, NARROW, 17).tolist():
            path.point(centre + shift)


def published_search(problem: Problem, criterion: Loss, guard: float) -> Found:
    """2,000 absolute steps of 0.01, strict comparisons, smallest c first."""
    trials = Trials(problem, criterion, accuracy=True)
    before = trials.at(math.inf)
    best, least = before, math.inf
    for step in track("clip: published grid", range(1, 2001)):
        trial = trials.at(step / 100)
        if trial.score < least and trial.accuracy > guard * before.accuracy:
            best, least = trial, trial.score
    return best, before, True


# A look at the valleys of NLL(c) on a sample of the rows, before all rows are asked.


@dataclass(frozen=True)
class Valley:
    """What a sample says, in logarithms of the threshold.

    Attributes:
        gain: how much lower than unclipped the lowest threshold tried is.
        floor: where the deepest valley has its floor.
        shape: what it looks like there.
        others: where further valleys lie, the deepest two.
        rest: every other threshold of the scan, the most promising first.
        low: the lowest threshold to consider.
    """

    gain: float
    floor: float
    shape: Shape
    others: list[float]
    rest: list[float]
    low: float


def valley(problem: Problem, part: Problem, loss: Loss) -> Valley:
    """A scan across all thresholds by a loss, and a closer look where it is lowest."""
    trials = Trials(part, loss, accuracy=False)

    def points(label: str, logs: list[float]) -> list[Point]:
        begun = [(log_c, trials.begun(math.exp(log_c))) for log_c in track(label, logs)]
        return [Point(log_c, trial().score) for log_c, trial in begun]

    scan = [math.log(c) for c in scan_thresholds(part)]
    sampled = int(dist.total(torch.tensor(sum(map(len, part.source)))))
    if sampled * MOST_TRIALS > 4 * problem.facts.rows:  # a handful of rows: ask all at once
        return Valley(0.0, scan[len(scan) // 2], flat, [], scan[::-1], scan[0] - math.log(64))
    with calm(SHARE * problem.facts.work, FEW_LARGE):
        coarse = points("clip: scan", scan)
        around: list[Point] = []
        centre = vertex(coarse)
        for _ in range(2):  # a second time where the first look missed the floor
            new = [u for u in centre + OFFSETS if all(abs(u - p.at) > 0.1 for p in around)]
            around += points("clip: valley", new)
            centre = best_of(around).at
            if min(around).at < centre < max(around).at:
                break
    near = sorted(point for point in around if abs(point.at - centre) <= 0.7)
    shape = fitted_shape(near)
    grid = np.linspace(near[0].at, near[-1].at, 501)
    floor = float(grid[shape(grid).argmin()])
    by_score = sorted(coarse, key=lambda point: point.score)
    lower = {
        b
        for a, b, c in zip(coarse, coarse[1:], coarse[2:], strict=False)
        if b.score < min(a.score, c.score)
    }
    others = [p.at for p in by_score if p in lower and abs(p.at - floor) > 0.6][:2]
    rest = [p.at for p in by_score if p.at not in others]
    gain = trials.at(math.inf).score - best_of([*coarse, *around]).score
    return Valley(gain, floor, shape, others, rest, min(coarse).at - math.log(64))


def sample(problem: Problem, share: float) -> Problem:
    """The problem on a share of the rows, held in memory.

    Rows are picked by their content, so that neither the order of the rows nor their split into
    batches or ranks changes the sample. Where that picks none or far too many, as among copies of
    a few rows, those with the lowest hashes are taken: the cost of a scan must stay bounded. Rows
    of nothing but zeros are copies that no threshold changes, and are left out.
    """
    data, facts = problem.data if problem.data.kept else problem.source, problem.facts
    still = row_hash(torch.zeros(1, facts.width, device=facts.device))

    def active(batch: Batch, limit: float = math.inf) -> Batch:
        hashes = row_hash(features_of(batch))
        return batch.rows((hashes < limit) & (hashes != still))

    parts = [active(batch, share * 2**32) for batch in data]
    if len(parts) > 1:  # one from each chunk: a product of many rows is cheaper than many of a few
        parts = [joined(parts)]
    found = int(dist.total(torch.tensor(sum(map(len, parts)))))
    if not 0 < found <= 1.3 * share * facts.rows + 10:
        most, others = math.ceil(share * facts.rows), map(active, data)
        rows = hashed_sample(others, most, width=facts.width, device=facts.device)
        parts = [rows.rows(slice(dist.rank(), None, dist.world()))]  # all processes have all
    return replace(problem, source=parts, data=Through(parts, problem.data.logits_of))


def scan_thresholds(problem: Problem) -> list[float]:
    """Thresholds from those that clip 4/5 of the activations to where the far end takes over."""
    shares = np.geomspace(0.8, 0.25 / problem.facts.width, POINTS // 2)
    upper = quantiles(activation_counts(problem.source), shares)
    # Steps of equal share where the activations lie, and of equal ratio across any gap in them.
    even = np.geomspace(upper[0], upper[-1], POINTS - len(upper))[1:-1].tolist()
    return sorted({c for c in [upper[0] / 16, upper[0] / 4, *upper, *even] if c > 0})


def activation_counts(data: Data) -> Tensor:
    """The sizes of all activations, counted: (2^15,) int64."""
    counts = torch.zeros(CELLS, dtype=torch.int64)
    for batch in data:
        counts += size_counts(features_of(batch))
    return dist.total(counts)


def quantiles(counts: Tensor, tail: Iterable[float]) -> list[float]:
    """The sizes that these shares of all that are not 0 exceed."""
    found = [size_quantile(counts, 1 - share, zeros=False) for share in tail]
    # Silent rows have no scale: any will do, since the far end knows the truth.
    return [1.0 if math.isnan(size) else size for size in found]
