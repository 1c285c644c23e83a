"""The recipe is text: `clip(min_accuracy=0.99) | temperature`, read with `ast`, never evaluated."""

import ast
import inspect
from difflib import get_close_matches

from featcal.core.calibrator import METHODS, Calibrator
from featcal.core.errors import InputError

LONGEST = 2000  # characters; no honest recipe comes near, and the parser is kept from deep nesting


def parse(text: str) -> Calibrator:
    """The fresh calibrator a recipe describes; `repr` of a calibrator gives the recipe back.

    The grammar is Python's: names, calls with literal keyword arguments, and `|`.

    Raises:
        InputError: naming what cannot be read.
    """
    if not isinstance(text, str):
        raise InputError(
            f"recipe is a {type(text).__name__}: pass text, as in 'clip | temperature'"
        )
    if len(text) > LONGEST:
        raise InputError(f"recipe is {len(text)} characters long: the limit is {LONGEST}")
    if not text.strip():
        raise InputError("recipe is empty: write for example 'clip | temperature'")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        return _build(tree, text)
    except InputError:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(
            f"recipe {shown(text)} does not parse: write steps joined by '|', "
            "for example 'clip(min_accuracy=0.99) | temperature'"
        ) from error


def shown(text: str) -> str:
    """The text in quotes, its middle left out when it is long."""
    return repr(text if len(text) <= 80 else f"{text[:50]} ... {text[-20:]}")


def _build(node: ast.expr, text: str) -> Calibrator:
    match node:
        case ast.BinOp(left, ast.BitOr(), right):
            return _build(left, text) | _build(right, text)
        case ast.Call(ast.Name(name), [], keywords):
            return _make(name, keywords, text)
        case ast.Call(ast.Name(name), [_, *_], _):
            raise InputError(
                f"recipe {shown(text)}: {name} takes arguments by name only, "
                f"{_signature(name, text)}"
            )
        case ast.Name(name):
            return _make(name, [], text)
    raise InputError(
        f"recipe {shown(text)}: cannot read {shown(ast.unparse(node))}; use method names, literal "
        "keyword arguments and '|'"
    )


def _make(name: str, keywords: list[ast.keyword], text: str) -> Calibrator:
    method = _method(name, text)
    known = inspect.signature(method).parameters
    arguments = {}
    for keyword in keywords:
        if keyword.arg in arguments:
            raise InputError(f"recipe {shown(text)}: {name} is given {keyword.arg} twice")
        if keyword.arg is None or keyword.arg not in known:
            raise InputError(
                f"recipe {shown(text)}: {name} has no argument {keyword.arg or '**'!r}, "
                f"{_signature(name, text)}"
            )
        arguments[keyword.arg] = _literal(keyword, text)
    return method(**arguments)


def _literal(keyword: ast.keyword, text: str) -> object:
    try:
        return ast.literal_eval(keyword.value)
    except (ValueError, TypeError, RecursionError, MemoryError) as error:
        value = shown(ast.unparse(keyword.value))[1:-1]
        raise InputError(
            f"recipe {shown(text)}: {keyword.arg}={value} is not a literal; write a number, "
            "a string, True, False or None"
        ) from error


def _method(name: str, text: str) -> type[Calibrator]:
    if name not in METHODS:
        near = get_close_matches(name, METHODS, n=1)
        meant = f"did you mean {near[0]}? There are" if near else "there are"
        raise InputError(
            f"recipe {shown(text)}: no method is called {name!r}; {meant} "
            f"{', '.join(sorted(METHODS))}"
        )
    return METHODS[name]


def _signature(name: str, text: str) -> str:
    arguments = inspect.signature(_method(name, text)).parameters.values()
    shown = ", ".join(f"{a.name}={a.default!r}" for a in arguments)
    return f"as in {name}({shown})" if shown else f"and {name} has none"
