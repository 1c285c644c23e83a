"""Scores, comparisons and diagrams."""

from featcal.report.comparison import Row, compare
from featcal.report.diagram import ReliabilityDiagram, save_comparison
from featcal.report.scores import Scores, evaluate

__all__ = ["ReliabilityDiagram", "Row", "Scores", "compare", "evaluate", "save_comparison"]
