"""Feature-based calibration for deep classifiers."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from featcal.version import __version__ as __version__

if TYPE_CHECKING:
    from featcal import export, metrics
    from featcal.names import *

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
LATER = (
    *("analysis", "arrays", "bridges", "data", "datasets", "export", "heads", "io", "losses"),
    *("methods", "metrics", "models", "report", "theory", "train"),
)


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever has the name
    if name in LATER:
        return import_module(f"featcal.{name}")
    if name in __all__:
        globals()[name] = found = getattr(import_module("featcal.names"), name)
        return found
    raise AttributeError(f"module 'featcal' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *LATER})
