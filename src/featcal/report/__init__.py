"""Scores, comparisons and diagrams."""

from featcal.report.comparison import compare
from featcal.report.diagram import ReliabilityDiagram, save_comparison
from featcal.report.rows import Comparison, Row
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
