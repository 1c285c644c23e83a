"""What `featcal` offers under its own name: loaded whole when one of these is first asked for.

So every method is registered by then, and `import featcal` itself takes no time.
"""

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
    "find_head",
    "import_files",
    "load",
    "parse",
    "save",
    "write_pack",
]
