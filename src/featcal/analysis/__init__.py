"""What features and predictions look like: who is wrong with high confidence, and what a clip does.

Every analysis is a frozen dataclass: `Thing.of(...)` computes the numbers, `as_json()` tells them,
`plot()` draws them. Data is a pack, or what `featcal.evaluate` takes: a Batch, a list of batches, a
split of a pack; it is read in chunks, in one process. Nothing is fitted on test. Not imported by
`import featcal`.
"""

from featcal.analysis.base import Analysis, Groups
from featcal.analysis.changes import ChangedPredictions, ConfidentCounts, EntropyGrowth
from featcal.analysis.features import FeatureValues, UnitMeans
from featcal.analysis.reliability import BandedDiagram, BeforeAfter, GroupCalibration
from featcal.analysis.sweep import ClipSweep, LayerAblation, LayerRow

__all__ = [
    "Analysis",
    "BandedDiagram",
    "BeforeAfter",
    "ChangedPredictions",
    "ClipSweep",
    "ConfidentCounts",
    "EntropyGrowth",
    "FeatureValues",
    "GroupCalibration",
    "Groups",
    "LayerAblation",
    "LayerRow",
    "UnitMeans",
]
