"""The public surface: what there is, documented, and no more."""

import inspect
import subprocess
import sys

import pytest

import featcal

PUBLIC = [(name, getattr(featcal, name)) for name in featcal.__all__ if hasattr(featcal, name)]
DOCUMENTED = [(n, v) for n, v in PUBLIC if inspect.isclass(v) or inspect.isroutine(v)]


def by_kind(name):
    """Constants, then classes, then functions, each by name: ruff's order of `__all__`."""
    return (not name.isupper(), not name[0].isupper(), name)


def test_all_is_sorted_and_every_name_exists():
    assert sorted(featcal.__all__, key=by_kind) == featcal.__all__
    assert len(set(featcal.__all__)) == len(featcal.__all__)
    missing = [name for name in featcal.__all__ if not hasattr(featcal, name)]
    assert missing == []
    assert len(featcal.__all__) <= 30


def test_a_star_import_gives_exactly_these_names():
    names = {}
    exec("from featcal import *", names)
    names.pop("__builtins__")
    assert sorted(names) == sorted(featcal.__all__)


@pytest.mark.parametrize(("name", "value"), DOCUMENTED, ids=[n for n, _ in DOCUMENTED])
def test_everything_public_is_documented(name, value):
    assert value.__module__.startswith("featcal")
    own = value.__dict__.get("__doc__") if inspect.isclass(value) else value.__doc__
    assert own, f"{name} has no docstring"
    assert not own.startswith(f"{name}("), f"{name} has only a generated docstring"
    if not inspect.isclass(value):
        return
    for method, function in vars(value).items():
        if method.startswith("_"):
            continue
        target = getattr(function, "__func__", getattr(function, "fget", function))
        if inspect.isfunction(target):
            assert inspect.getdoc(getattr(value, method)), f"{name}.{method} has no docstring"


def test_every_method_is_public_documented_and_named_as_its_id():
    for name, method in featcal.METHODS.items():
        assert name.isidentifier()
        assert name == name.lower()
        assert method.name == name
        assert method.__doc__
        parameters = list(inspect.signature(method).parameters.values())
        assert all(p.kind is p.KEYWORD_ONLY for p in parameters)


def test_rooms_are_found_as_attributes_and_loaded_when_asked_for():
    code = """
import sys, featcal
from featcal.core.text import parse
assert repr(parse("clip | temperature")) == "clip | temperature"  # whatever was loaded before
assert "featcal.losses" not in sys.modules
assert featcal.losses.Focal().gamma == 3.0
assert all(getattr(featcal, name).__name__ == f"featcal.{name}" for name in featcal.LATER)
try:
    featcal.nothing
except AttributeError as error:
    assert str(error) == "module 'featcal' has no attribute 'nothing'"
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_part_is_there_right_after_the_import():
    """In a process of its own: here other tests have imported them by name."""
    parts = "report", "data", "metrics", "analysis", "export", "train"
    code = f"import featcal; [getattr(featcal, name) for name in {parts}]; featcal.report.__call__"
    subprocess.run([sys.executable, "-c", code], check=True)
