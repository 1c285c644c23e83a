"""Temperature scaling: softmax(z / T) (Guo et al., ICML 2017)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from featcal.core import dist
from featcal.core.batch import Data
from featcal.core.calibrator import LogitMap
from featcal.core.errors import InputError
from featcal.core.fitting import Problem, StepReport
from featcal.core.loss import Loss, measure, nll
from featcal.core.solve import Minimum, minimize_log
from featcal.core.threads import calm

CAP = 1e3  # T stays within this factor of the logits' own scale
STEPS = 60
PROBE = 12  # Newton from T = 1 has settled by then wherever there is a minimum


@final
class Temperature(LogitMap):
    """z / T with one T > 0 for all classes; the order of a row's logits never reverses.

    The NLL is convex in b = 1 / T, with slope mean(sum_k z_k p_k - z_y) and curvature
    mean(var_p(z)), p = softmax(b z): Newton's method inside a bracket finds the one minimum
    without a learning rate, a seed or a negative T.
    """

    name = "temperature"
    keeps_accuracy = True
    temperature: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("temperature", torch.ones(()))

    def map_logits(self, logits: Tensor) -> Tensor:
        """Divides by T."""
        return logits / self.temperature.to(logits.dtype)

    def check(self) -> None:
        """T is one finite number above 0."""
        if self.temperature.numel() != 1 or not 0 < float(self.temperature) < math.inf:
            raise InputError(
                f"temperature: T is {self.temperature.tolist()}: it must be finite and above 0"
            )

    def learn(self, problem: Problem) -> list[StepReport]:
        """Newton for the NLL; a scan and a zoom in log T for any other loss."""
        loss = problem.loss
        before, scale = measure(problem.data, loss, LOGIT_SCALE)
        self.assign(temperature=1.0)
        if scale == 0:
            return [_unchanged(before, "each row's logits are all equal: no temperature matters")]
        low, high = 1 / (CAP * scale), CAP / scale  # of b
        solve = _newton if loss is nll else _search
        with calm(problem.facts.rows * problem.facts.classes):
            found = solve(problem.data, loss, low, high)
        if not found.score < before:
            return [_unchanged(before, "T = 1 is already the best temperature")]
        temperature = 1 / found.at
        self.assign(temperature=temperature)
        message = f"T = {temperature:.4g}: " + (
            "the network was overconfident" if temperature > 1 else "the network was underconfident"
        )
        warning = ""
        if not low * (1 + 1e-9) < found.at < high * (1 - 1e-9):
            message = warning = _capped(temperature, at_top=found.at >= high * (1 - 1e-9))
        elif not found.converged:
            message = warning = (
                f"the search for T had not settled when it stopped at {temperature:.4g}"
            )
        return [
            StepReport(
                self.name,
                {"temperature": temperature},
                noop=False,
                loss_before=before,
                loss_after=found.score,
                converged=found.converged,
                message=message,
                warning=warning,
                details={"iterations": found.steps},
            )
        ]


def _scale_sums(logits: Tensor, _: object) -> Tensor:
    spread = (logits.amax(1) - logits.mean(1)).double()
    spread = spread[spread > 0]
    return torch.stack([spread.log().sum(), torch.tensor(float(len(spread))).to(spread)])


def _scale_value(sums: Tensor, _: float) -> float:
    return math.exp(float(sums[0] / sums[1])) if sums[1] else 0.0


# How far the top logit stands above the mean one, by the geometric mean so that no single row
# decides: the unit in which a temperature is large or small.
LOGIT_SCALE = Loss("logit scale", _scale_sums, _scale_value, size=2)


def _unchanged(loss: float, why: str) -> StepReport:
    return StepReport("temperature", {"temperature": 1.0}, True, loss, loss, True, why)


def _capped(temperature: float, *, at_top: bool) -> str:
    why = (
        "the logits separate the labels completely, so the likelihood keeps growing as T falls"
        if at_top
        else "the logits are no better than guessing, so the likelihood keeps growing with T"
    )
    return f"temperature stopped at its cap T = {temperature:.4g}: {why}"


@dataclass(frozen=True)
class _Curve:
    """Value, slope and curvature of the mean NLL at one b."""

    value: float
    slope: float
    bend: float


def _curve(data: Data, inverse: float) -> _Curve:
    """One pass over the logits, one reduction."""
    sums = torch.zeros(4, dtype=torch.float64)
    for batch in data:
        assert batch.logits is not None
        sums[:3] += _curve_sums(batch.logits, batch.labels, inverse).cpu()
        sums[3] += len(batch)
    value, slope, bend, rows = dist.total(sums).tolist()
    return _Curve(value / rows, slope / rows, bend / rows)


def _curve_sums(logits: Tensor, labels: Tensor, inverse: float) -> Tensor:
    shifted = logits - logits.amax(1, keepdim=True)  # (n, k), <= 0
    true = shifted.gather(1, labels[:, None])[:, 0]
    weight = (shifted * inverse).exp_()
    total = weight.sum(1)
    weight *= shifted
    first = weight.sum(1) / total  # mean of the shifted logits under p
    second = weight.mul_(shifted).sum(1) / total
    value = total.log() - inverse * true
    rows = torch.stack([value, first - true, second - first.square()])
    return rows.sum(1, dtype=torch.float64)


def _newton(data: Data, _: Loss, low: float, high: float) -> Minimum:
    """The root of the slope in b, kept inside a shrinking bracket."""
    caps = (low, high)
    inverse = min(max(1.0, low), high)
    for step in range(1, STEPS + 1):
        here = _curve(data, inverse)
        if inverse in caps and (here.slope > 0) == (inverse == caps[0]):
            return Minimum(inverse, here.value, step, converged=False)
        low, high = (low, inverse) if here.slope > 0 else (inverse, high)
        gain = here.slope**2 / (2 * here.bend) if here.bend > 0 else math.inf
        if gain < 1e-13:
            return Minimum(
                inverse - here.slope / here.bend, here.value - gain, step, converged=True
            )
        inverse = _step(inverse, here, low, high, probe=step == PROBE)
    return Minimum(inverse, here.value, STEPS, converged=False)


def _step(inverse: float, here: _Curve, low: float, high: float, *, probe: bool) -> float:
    """Newton's step, or a safe one when Newton leaves the bracket.

    Where the likelihood keeps growing, Newton creeps towards the cap by equal steps: one probe of
    the cap itself settles whether there is a minimum before it.
    """
    outward = high if here.slope < 0 else low
    if probe:
        return outward
    target = _newton_target(inverse, here)
    return target if low < target < high else math.sqrt(inverse * outward)


def _newton_target(inverse: float, here: _Curve) -> float:
    """Newton in b below the minimum, in log b above it.

    Above it the NLL grows like a straight line in b: nearly no curvature, and Newton in b would
    jump below zero; in log b the same line is convex and the step is sound.
    """
    if here.slope < 0:
        return inverse - here.slope / here.bend if here.bend > 0 else math.inf
    slope, bend = inverse * here.slope, inverse**2 * here.bend + inverse * here.slope
    return inverse * math.exp(-slope / bend)


def _search(data: Data, loss: Loss, low: float, high: float) -> Minimum:
    """Any other loss: no convexity is promised, so a scan in log b comes before the zoom."""

    def score(inverse: float) -> float:
        return measure(data, loss.after(lambda logits: logits * inverse))[0]

    return minimize_log(score, low, high)
