"""Post-hoc methods, one family a file; importing one registers it by name."""

from featcal.methods.affine import (
    DirichletCalibration,
    MatrixScaling,
    StructuredMatrixScaling,
    StructuredVectorScaling,
    VectorScaling,
)
from featcal.methods.classwise import ClasswiseTemperature
from featcal.methods.clip import FeatureClip
from featcal.methods.density import DensityAware
from featcal.methods.ensemble import EnsembleTemperature
from featcal.methods.group import GroupCalibration
from featcal.methods.histogram import BBQ, HistogramBinning
from featcal.methods.isotonic import Isotonic
from featcal.methods.logit_clip import LogitClip
from featcal.methods.parameterised import ParameterisedTemperature
from featcal.methods.proximity import ProximityCalibration
from featcal.methods.spline import Spline
from featcal.methods.temperature import Temperature

__all__ = [
    "BBQ",
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
    "ParameterisedTemperature",
    "ProximityCalibration",
    "Spline",
    "StructuredMatrixScaling",
    "StructuredVectorScaling",
    "Temperature",
    "VectorScaling",
]
