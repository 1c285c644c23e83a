"""Text that names things and their arguments, `clip(min_accuracy=0.99)`, read and never evaluated.

Recipes of calibrators and training losses are both written this way. The grammar is Python's: a
name, or a call with literal keyword arguments, which `ast` reads; recipes join steps by `|`.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import import_module
from typing import Generic, TypeVar, final

from featcal.core.calibrator import METHODS, Calibrator
from featcal.core.checks import InputError
from featcal.core.labels import LABELS, followed

Made = TypeVar("Made")

NONE = "none"  # the recipe that leaves the network as it is
# Characters: the longest recipe of MOST_STEPS steps is below, and the parser is kept from deep
# nesting.
LONGEST = 4000
# What `ast.literal_eval` raises, and no more: "{[]: 1}" and ten thousand brackets among them.
NO_LITERAL = (ValueError, TypeError, SyntaxError, RecursionError, MemoryError)


def parse(text: str) -> Calibrator:
    """The fresh calibrator a recipe describes; `repr` of a calibrator gives the recipe back.

    The grammar is Python's: names, calls with literal keyword arguments, and `|`; `all_labels` and
    `per_label` take a recipe.

    Raises:
        InputError: naming what cannot be read.
    """
    import_module("featcal.methods")  # by name, since they stand above the core: each registers

    def steps(node: ast.expr, text: str) -> Calibrator:
        match node:
            case ast.BinOp(left, ast.BitOr(), right):
                return followed(steps(left, text), steps(right, text))
            case ast.Call(ast.Name(name), [inner], []) if name in LABELS:
                return LABELS[name](steps(inner, text))
        return RECIPES.one(node, text)

    return RECIPES.read(text, steps)


def shown(text: str) -> str:
    """The text in quotes, its middle left out when it is long."""
    return repr(text if len(text) <= 80 else f"{text[:50]} ... {text[-20:]}")


def signature(maker: Callable[..., object]) -> dict[str, object]:
    """The arguments a class or function takes by name, with their defaults."""
    return {key: a.default for key, a in inspect.signature(maker).parameters.items()}


@final
@dataclass(frozen=True)
class Reader(Generic[Made]):
    """Reads one kind of text; its words are those of the error messages.

    Attributes:
        text: what the text is called, such as "recipe".
        item: what its names stand for, such as "method".
        known: what may be named.
        example: a short text that can be read.
        grammar: what to write, said where a text does not parse.
        pieces: what a text may consist of, said where a piece is none of these.
        arguments: what a known thing may be given, with defaults.
        meant: what people write who mean a known name that looks otherwise.
    """

    text: str
    item: str
    known: Mapping[str, Callable[..., Made]]
    example: str
    grammar: str
    pieces: str
    arguments: Callable[[Callable[..., Made]], Mapping[str, object]] = signature
    meant: Mapping[str, str] = field(default_factory=dict)

    def read(self, text: str, build: Callable[[ast.expr, str], Made] | None = None) -> Made:
        """What the text describes.

        Args:
            text: one call, or an expression of several that `build` puts together.
            build: makes the result of the syntax tree and the text; `one` by default.

        Raises:
            InputError: naming what cannot be read.
        """
        given: object = text
        if not isinstance(given, str):
            kind = type(given).__name__
            raise InputError(f"{self.text} is a {kind}: pass text, as in {self.example!r}")
        if len(text) > LONGEST:
            raise InputError(f"{self.text} is {len(text)} characters long: the limit is {LONGEST}")
        if not text.strip():
            raise InputError(f"{self.text} is empty: write for example {self.example!r}")
        try:
            tree = ast.parse(text.strip(), mode="eval").body
            return (build or self.one)(tree, text)
        except InputError:
            raise
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise InputError(
                f"{self.text} {shown(text)} does not parse: write {self.grammar}"
            ) from error

    def one(self, node: ast.expr, text: str) -> Made:
        """What a single name or call stands for."""
        where = f"{self.text} {shown(text)}"
        match node:
            case ast.Call(ast.Name(name), positional, keywords):
                pass
            case ast.Name(name):
                positional, keywords = [], []
            case _:
                piece = shown(ast.unparse(node))
                raise InputError(f"{where}: cannot read {piece}; use {self.pieces}")
        if name not in self.known:
            near = [self.meant[name]] if name in self.meant else _nearest(name, self.known)
            meant = f"did you mean {near[0]}? There are" if near else "there are"
            raise InputError(
                f"{where}: no {self.item} is called {name!r}; {meant} "
                f"{', '.join(sorted(self.known))}"
            )
        known = self.arguments(self.known[name])
        listed = ", ".join(f"{key}={default!r}" for key, default in known.items())
        if positional:
            example = f"as in {name}({listed})" if listed else f"and {name} has none"
            raise InputError(f"{where}: {name} takes arguments by name only, {example}")
        values: dict[str, object] = {}
        for keyword in keywords:
            if keyword.arg in values:
                raise InputError(f"{where}: {name} is given {keyword.arg} twice")
            if keyword.arg is None or keyword.arg not in known:
                symbols = getattr(self.known[name], "symbols", {})  # as tables call the values
                near = [key for key in known if symbols.get(key) == keyword.arg]
                near = near or _nearest(keyword.arg or "", known)
                meant = f"did you mean {near[0]}? It" if near else "it"
                takes = f"{meant} takes {listed}" if known else "it takes none"
                raise InputError(
                    f"{where}: {name} has no argument {keyword.arg or '**'!r}: {takes}"
                )
            try:
                values[keyword.arg] = ast.literal_eval(keyword.value)
            except NO_LITERAL as error:
                value = shown(ast.unparse(keyword.value))[1:-1]
                raise InputError(
                    f"{where}: {keyword.arg}={value} is not a literal; write a number, a string, "
                    "True, False or None"
                ) from error
        return self.known[name](**values)


def _nearest(given: str, known: Mapping[str, object]) -> list[str]:
    """The one known name that was meant, if any; "CLIP" is clip."""
    small = {name.lower(): name for name in known}
    return [small[name] for name in get_close_matches(given.lower(), small, n=1)]


RECIPES: Reader[Calibrator] = Reader(
    text="recipe",
    item="method",
    known=METHODS,
    example="clip | temperature",
    grammar="steps joined by '|', for example 'clip(min_accuracy=0.99) | temperature'",
    pieces="method names, literal keyword arguments and '|'",
)
