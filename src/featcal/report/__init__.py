"""Scores, comparisons and diagrams."""

from featcal.report.compare import Comparison, Row, compare
from featcal.report.diagram import ReliabilityDiagram, save_comparison
from featcal.report.scores import Scores, evaluate

__all__ = [
    "Comparison",
    "ReliabilityDiagram",
    "Row",
    "Scores",
    "compare",
    "evaluate",
    "save_comparison",
]
