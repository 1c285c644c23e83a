"""Hyperparameters checked in one way: the method, the argument, the value and the remedy."""

from __future__ import annotations

from collections.abc import Iterable

from featcal.core.errors import InputError


def check_flags(method: str, **given: object) -> None:
    """Refuses anything but True and False.

    >>> check_flags("group", reference=1)
    Traceback (most recent call last):
    featcal.core.errors.InputError: group: reference is 1: give True or False
    """
    for key, value in given.items():
        if not isinstance(value, bool):
            raise InputError(f"{method}: {key} is {value!r}: give True or False")


def check_choice(method: str, key: str, value: object, known: Iterable[str]) -> None:
    """Refuses anything but one of the known words.

    >>> check_choice("group", "base", "temp", ("temperature", "ensemble"))
    Traceback (most recent call last):
    featcal.core.errors.InputError: group: base is 'temp': choose temperature or ensemble
    """
    words = list(known)
    if not isinstance(value, str) or value not in words:
        *first, last = words
        listed = f"{', '.join(first)} or {last}" if first else last
        raise InputError(f"{method}: {key} is {value!r}: choose {listed}")


def check_whole(method: str, least: int, **given: object) -> None:
    """Refuses anything but whole numbers from `least` up.

    >>> check_whole("histogram", 1, bins=0)
    Traceback (most recent call last):
    featcal.core.errors.InputError: histogram: bins is 0: give a whole number from 1 up
    """
    for key, value in given.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise InputError(f"{method}: {key} is {value!r}: give a whole number from {least} up")
