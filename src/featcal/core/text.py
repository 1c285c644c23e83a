"""The recipe is text: `clip(min_accuracy=0.99) | temperature`, read with `ast`, never evaluated."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Generic, TypeVar, final

from featcal.core.calibrator import METHODS, Calibrator
from featcal.core.checks import InputError

# --- Text that names things and their arguments, `clip(min_accuracy=0.99)`, read and never
# evaluated.
#
# Recipes of calibrators and training losses are both written this way. The grammar is Python's: a
# name, or a call with literal keyword arguments; `ast` reads it.

LONGEST = 2000  # characters; no honest text comes near, and the parser is kept from deep nesting

Made = TypeVar("Made")


def shown(text: str) -> str:
    """The text in quotes, its middle left out when it is long."""
    return repr(text if len(text) <= 80 else f"{text[:50]} ... {text[-20:]}")


def signature(maker: Callable[..., object]) -> dict[str, object]:
    """The arguments a class or function takes by name, with their defaults."""
    return {key: a.default for key, a in inspect.signature(maker).parameters.items()}


# What `ast.literal_eval` raises, and no more: "{[]: 1}" and ten thousand brackets among them.
NO_LITERAL = (ValueError, TypeError, SyntaxError, RecursionError, MemoryError)


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
        self._check(text)
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
        match node:
            case ast.Call(ast.Name(name), [], keywords):
                return self._make(name, keywords, text)
            case ast.Call(ast.Name(name), [_, *_], _):
                raise InputError(
                    f"{self.text} {shown(text)}: {name} takes arguments by name only, "
                    f"{self._as_in(name, text)}"
                )
            case ast.Name(name):
                return self._make(name, [], text)
        raise InputError(
            f"{self.text} {shown(text)}: cannot read {shown(ast.unparse(node))}; use {self.pieces}"
        )

    def _check(self, text: object) -> None:
        if not isinstance(text, str):
            raise InputError(
                f"{self.text} is a {type(text).__name__}: pass text, as in {self.example!r}"
            )
        if len(text) > LONGEST:
            raise InputError(f"{self.text} is {len(text)} characters long: the limit is {LONGEST}")
        if not text.strip():
            raise InputError(f"{self.text} is empty: write for example {self.example!r}")

    def _make(self, name: str, keywords: list[ast.keyword], text: str) -> Made:
        maker = self._find(name, text)
        known = self.arguments(maker)
        given: dict[str, object] = {}
        for keyword in keywords:
            if keyword.arg in given:
                raise InputError(f"{self.text} {shown(text)}: {name} is given {keyword.arg} twice")
            if keyword.arg is None or keyword.arg not in known:
                raise InputError(
                    f"{self.text} {shown(text)}: {name} has no argument {keyword.arg or '**'!r}: "
                    f"{_those_there_are(keyword.arg, known)}"
                )
            given[keyword.arg] = self._literal(keyword, text)
        return maker(**given)

    def _literal(self, keyword: ast.keyword, text: str) -> object:
        try:
            return ast.literal_eval(keyword.value)
        except NO_LITERAL as error:
            value = shown(ast.unparse(keyword.value))[1:-1]
            raise InputError(
                f"{self.text} {shown(text)}: {keyword.arg}={value} is not a literal; write a "
                "number, a string, True, False or None"
            ) from error

    def _find(self, name: str, text: str) -> Callable[..., Made]:
        if name not in self.known:
            near = [self.meant[name]] if name in self.meant else _nearest(name, self.known)
            meant = f"did you mean {near[0]}? There are" if near else "there are"
            raise InputError(
                f"{self.text} {shown(text)}: no {self.item} is called {name!r}; {meant} "
                f"{', '.join(sorted(self.known))}"
            )
        return self.known[name]

    def _as_in(self, name: str, text: str) -> str:
        listed = _listed(self.arguments(self._find(name, text)))
        return f"as in {name}({listed})" if listed else f"and {name} has none"


def _listed(arguments: Mapping[str, object]) -> str:
    return ", ".join(f"{key}={default!r}" for key, default in arguments.items())


def _nearest(given: str, known: Mapping[str, object]) -> list[str]:
    """The one known name that was meant, if any; "CLIP" is clip."""
    small = {name.lower(): name for name in known}
    return [small[name] for name in get_close_matches(given.lower(), small, n=1)]


def _those_there_are(given: str | None, known: Mapping[str, object]) -> str:
    """What to write instead of an argument that there is not."""
    if not known:
        return "it takes none"
    near = _nearest(given or "", known)
    return f"{f'did you mean {near[0]}? It' if near else 'it'} takes {_listed(known)}"


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
