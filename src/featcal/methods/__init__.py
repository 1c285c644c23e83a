"""Post-hoc methods, one family per file; importing one registers it by name."""

from featcal.core import listed
from featcal.core.calibrator import METHODS as METHODS
from featcal.methods.affine import (
    DirichletCalibration,
    MatrixScaling,
    StructuredMatrixScaling,
    StructuredVectorScaling,
    VectorScaling,
)
from featcal.methods.auto import Auto
from featcal.methods.classwise import ClasswiseTemperature
from featcal.methods.clip import FeatureClip
from featcal.methods.ensemble import EnsembleTemperature
from featcal.methods.group import GroupCalibration
from featcal.methods.logit_clip import LogitClip
from featcal.methods.neighbours import DensityAware, ProximityCalibration
from featcal.methods.norm_clip import NormClip
from featcal.methods.parameterised import ParameterisedTemperature
from featcal.methods.sample import SampleTemperature
from featcal.methods.score_maps import BBQ, HistogramBinning, Isotonic, Spline
from featcal.methods.temperature import Temperature

__all__ = [
    "BBQ",
    "Auto",
    "ClasswiseTemperature",
    "DensityAware",
    "DirichletCalibration",
    "EnsembleTemperature",
    "FeatureClip",
    "GroupCalibration",
    "HistogramBinning",
    "Isotonic",
    "LogitClip",
    "MatrixScaling",
    "NormClip",
    "ParameterisedTemperature",
    "ProximityCalibration",
    "SampleTemperature",
    "Spline",
    "StructuredMatrixScaling",
    "StructuredVectorScaling",
    "Temperature",
    "VectorScaling",
]

for _name in (*listed.METHODS, *[name for name in METHODS if name not in listed.METHODS]):
    METHODS[_name] = METHODS.pop(_name)
