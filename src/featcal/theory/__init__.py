"""The theory of feature clipping for rectified normal features: what holds, and what does not.

Closed forms of c, the threshold, and s, the standard deviation before the ReLU; each takes floats
or tensors, computes in float64 and broadcasts. `featcal.theory.printed` has the paper's own
formulas, and `PrintedAgainstCorrect` draws the two side by side. docs/theory.md tells the story.
"""

from featcal.theory import printed
from featcal.theory.figure import PrintedAgainstCorrect
from featcal.theory.forms import (
    clipped_entropy,
    clipped_mass,
    clipped_mass_slope,
    energy_removed,
    energy_removed_slope,
    entropy_gain,
    entropy_gain_slope,
    log_clipped_mass,
    rectified_entropy,
    relative_energy_removed,
    relative_energy_removed_slope,
    rescaled_entropy_gain,
    tail_entropy,
    tipping_factor,
    turning_point,
)

__all__ = [
    "PrintedAgainstCorrect",
    "clipped_entropy",
    "clipped_mass",
    "clipped_mass_slope",
    "energy_removed",
    "energy_removed_slope",
    "entropy_gain",
    "entropy_gain_slope",
    "log_clipped_mass",
    "printed",
    "rectified_entropy",
    "relative_energy_removed",
    "relative_energy_removed_slope",
    "rescaled_entropy_gain",
    "tail_entropy",
    "tipping_factor",
    "turning_point",
]
