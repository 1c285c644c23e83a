"""Feature-based calibration for deep classifiers."""

from importlib import import_module
from types import ModuleType

from featcal import export, metrics
from featcal.api import calibrate, compare, evaluate
from featcal.core.batch import Batch
from featcal.core.calibrator import METHODS, Calibrator, FeatureMap, LogitMap, Pipeline
from featcal.core.checks import CalibrationWarning, InputError
from featcal.core.fit import Loss
from featcal.core.text import parse
from featcal.data import Pack, import_files, write_pack
from featcal.data.collect import collect
from featcal.data.pack import demo_pack
from featcal.data.resume import collect_pack
from featcal.heads.attach import attach, detach
from featcal.heads.find import find_head
from featcal.heads.head import CalibratedHead
from featcal.io import load, save
from featcal.methods import FeatureClip, Temperature
from featcal.report import ReliabilityDiagram
from featcal.version import __version__ as __version__

__all__ = [
    "METHODS",
    "Batch",
    "CalibratedHead",
    "CalibrationWarning",
    "Calibrator",
    "FeatureClip",
    "FeatureMap",
    "InputError",
    "LogitMap",
    "Loss",
    "Pack",
    "Pipeline",
    "ReliabilityDiagram",
    "Temperature",
    "attach",
    "calibrate",
    "collect",
    "collect_pack",
    "compare",
    "demo_pack",
    "detach",
    "evaluate",
    "export",
    "find_head",
    "import_files",
    "load",
    "metrics",
    "parse",
    "save",
    "write_pack",
]

# Found as attributes like the rest, and loaded when somebody asks: import featcal stays quick.
LATER = ("analysis", "arrays", "bridges", "datasets", "losses", "models", "theory", "train")


def __getattr__(name: str) -> ModuleType:
    if name in LATER:
        return import_module(f"featcal.{name}")
    raise AttributeError(f"module 'featcal' has no attribute {name!r}")
