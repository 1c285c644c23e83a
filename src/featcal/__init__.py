"""Feature-based calibration for deep classifiers."""

from featcal import metrics
from featcal.api import calibrate
from featcal.core.attach import attach, detach, find_head
from featcal.core.batch import Batch
from featcal.core.calibrator import (
    METHODS,
    CalibratedHead,
    Calibrator,
    FeatureMap,
    LogitMap,
    Pipeline,
)
from featcal.core.errors import CalibrationWarning, InputError
from featcal.core.fitting import FitReport, StepReport
from featcal.core.loss import Loss
from featcal.core.spec import parse
from featcal.data import Pack, import_npz, write_pack
from featcal.data.collect import collect
from featcal.data.demo import demo_pack
from featcal.io import load, save
from featcal.methods import FeatureClip, Temperature
from featcal.report import ReliabilityDiagram, compare, evaluate
from featcal.version import __version__ as __version__

__all__ = [
    "METHODS",
    "Batch",
    "CalibratedHead",
    "CalibrationWarning",
    "Calibrator",
    "FeatureClip",
    "FeatureMap",
    "FitReport",
    "InputError",
    "LogitMap",
    "Loss",
    "Pack",
    "Pipeline",
    "ReliabilityDiagram",
    "StepReport",
    "Temperature",
    "attach",
    "calibrate",
    "collect",
    "compare",
    "demo_pack",
    "detach",
    "evaluate",
    "find_head",
    "import_npz",
    "load",
    "metrics",
    "parse",
    "save",
    "write_pack",
]
