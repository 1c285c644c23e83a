"""The printed entropy gain and its plotted derivative beside the correct ones, numbers first.

matplotlib is imported inside the functions alone, so that the numbers need none of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from featcal.core.errors import InputError
from featcal.theory import printed
from featcal.theory.elementwise import positive
from featcal.theory.entropy import entropy_gain, entropy_gain_slope
from featcal.theory.turning import turning_point

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SPAN, POINTS = (0.1, 3.0), 291  # of c; steps of a hundredth


@final
@dataclass(frozen=True, slots=True, eq=False)
class PrintedAgainstCorrect:
    """Delta-H and its derivative in s at one threshold, as printed and as they are.

    Attributes:
        c: the threshold.
        turning_point: s*(c), beyond which the correct Delta-H falls.
        sigmas: (n,) the deviations s, increasing.
        gain: (n,) the correct Delta-H.
        printed_gain: (n,) Delta-H of Eq. (9).
        slope: (n,) the derivative of `gain`.
        slope_of_printed: (n,) the derivative of `printed_gain`.
        plotted_slope: (n,) the derivative the paper plots, Eq. (12).
        axes: of Delta-H and of the derivatives, once drawn.
    """

    c: float
    turning_point: float
    sigmas: Tensor
    gain: Tensor
    printed_gain: Tensor
    slope: Tensor
    slope_of_printed: Tensor
    plotted_slope: Tensor
    axes: tuple[Axes, Axes] | None = field(default=None, repr=False, kw_only=True)

    @classmethod
    def of(
        cls, *, c: float = 1.0, sigmas: Tensor | Sequence[float] | None = None
    ) -> PrintedAgainstCorrect:
        """The numbers at a threshold c, for deviations from c/10 to 3c unless others are given.

        >>> shown = PrintedAgainstCorrect.of(c=1.0, sigmas=[1.0])
        >>> [round(float(x), 3) for x in (shown.plotted_slope, shown.slope_of_printed, shown.slope)]
        [1.25, 0.272, -0.298]
        """
        if not math.isfinite(c):
            raise InputError(f"PrintedAgainstCorrect: c is {c!r}: give a finite number above 0")
        threshold = positive("PrintedAgainstCorrect", "c", c)
        at = _deviations(c, sigmas)
        return cls(
            c=float(threshold),
            turning_point=turning_point(float(threshold)),
            sigmas=at,
            gain=entropy_gain(threshold, at),
            printed_gain=printed.entropy_gain(threshold, at),
            slope=entropy_gain_slope(threshold, at),
            slope_of_printed=printed.entropy_gain_slope(threshold, at),
            plotted_slope=printed.plotted_slope(threshold, at),
        )

    def as_json(self) -> dict[str, Any]:
        """Everything that is drawn, as JSON can hold it."""
        return {
            "c": self.c,
            "turning_point": self.turning_point,
            "sigmas": self.sigmas.tolist(),
            "gain": {"correct": self.gain.tolist(), "printed": self.printed_gain.tolist()},
            "slope": {
                "correct": self.slope.tolist(),
                "of_printed": self.slope_of_printed.tolist(),
                "plotted": self.plotted_slope.tolist(),
            },
        }

    def plot(self, ax: Sequence[Axes] | None = None) -> PrintedAgainstCorrect:
        """Draws both panels and returns the numbers, now holding their axes.

        Args:
            ax: a pair of axes, for Delta-H and for the derivatives; None makes a figure of its
                own, which pyplot does not know: `plot().axes[0].figure`.
        """
        from featcal.theory.drawing import draw, two_panels

        if ax is None:
            return replace(self, axes=two_panels(self))
        count = len(ax) if hasattr(ax, "__len__") else 1
        if count != 2:
            raise InputError(
                f"PrintedAgainstCorrect: ax has {count} axes: give a pair, for Delta-H and for the "
                "derivatives"
            )
        draw(self, ax[0], ax[1])
        return replace(self, axes=(ax[0], ax[1]))


def _deviations(c: float, sigmas: Tensor | Sequence[float] | None) -> Tensor:
    """The deviations in increasing order."""
    if sigmas is None:
        return c * torch.linspace(*SPAN, POINTS, dtype=torch.float64)
    given = torch.as_tensor(sigmas, dtype=torch.float64).flatten()
    if given.numel() == 0:
        raise InputError("PrintedAgainstCorrect: sigmas is empty: give at least one deviation")
    return positive("PrintedAgainstCorrect", "sigmas", given).sort().values
