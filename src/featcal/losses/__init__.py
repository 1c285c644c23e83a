"""Losses that train networks to be calibrated; `docs/losses.md` has the formulas."""

from featcal.losses.base import LOSSES, RowLoss, TrainingLoss, mixed, parse_loss
from featcal.losses.calibration import MMCE, SoftECE
from featcal.losses.entropy import CE, Brier, LabelSmoothing, MaxEntropy
from featcal.losses.focal import FLSD, AdaFocal, DualFocal, FLSc, Focal

__all__ = [
    "CE",
    "FLSD",
    "LOSSES",
    "MMCE",
    "AdaFocal",
    "Brier",
    "DualFocal",
    "FLSc",
    "Focal",
    "LabelSmoothing",
    "MaxEntropy",
    "RowLoss",
    "SoftECE",
    "TrainingLoss",
    "mixed",
    "parse_loss",
]
