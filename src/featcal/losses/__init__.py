"""Losses that train networks to be calibrated; `docs/losses.md` has the formulas."""

from featcal.losses.adafocal import AdaFocal
from featcal.losses.base import LOSSES, RowLoss, TrainingLoss, mixed
from featcal.losses.dual import DualFocal
from featcal.losses.focal import FLSD, FLSc, Focal
from featcal.losses.kernel import MMCE
from featcal.losses.plain import CE, Brier, MaxEntropy
from featcal.losses.smoothing import LabelSmoothing
from featcal.losses.soft_ece import SoftECE
from featcal.losses.spec import parse_loss

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
