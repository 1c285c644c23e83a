"""Scores, comparisons and diagrams; `featcal.report(model, val, test, path)` writes a page.

The page stands above this package, which must not import it: it is looked up when it is asked for.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

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


class _Report(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - see the function
        """Writes the page: see `featcal.page.write_report`."""
        return import_module("featcal.page.write").write_report(*args, **options)


sys.modules[__name__].__class__ = _Report
