"""The recipe is text: `clip(min_accuracy=0.99) | temperature`, read with `ast`, never evaluated."""

import ast

from featcal.core.calibrator import METHODS, Calibrator
from featcal.core.call_text import Reader

RECIPES: Reader[Calibrator] = Reader(
    text="recipe",
    item="method",
    known=METHODS,
    example="clip | temperature",
    grammar="steps joined by '|', for example 'clip(min_accuracy=0.99) | temperature'",
    pieces="method names, literal keyword arguments and '|'",
)


def parse(text: str) -> Calibrator:
    """The fresh calibrator a recipe describes; `repr` of a calibrator gives the recipe back.

    The grammar is Python's: names, calls with literal keyword arguments, and `|`.

    Raises:
        InputError: naming what cannot be read.
    """
    return RECIPES.read(text, _steps)


def _steps(node: ast.expr, text: str) -> Calibrator:
    match node:
        case ast.BinOp(left, ast.BitOr(), right):
            return _steps(left, text) | _steps(right, text)
    return RECIPES.one(node, text)
