"""A small share of experiments/fuzz.py: every reader, a few inputs, nothing but two ends."""

import importlib
from pathlib import Path

import pytest

FEW = 20


@pytest.fixture(scope="module")
def fuzz():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[1] / "experiments")
        yield importlib.import_module("fuzz")


@pytest.mark.no_cover
def test_every_reader_loads_or_refuses(fuzz, tmp_path):
    readers = fuzz.Readers(tmp_path, ["clip | temperature", "histogram(bins=4)", "vector"])
    seen = set()
    for name in readers.names:
        ends, failures = fuzz.counted(readers, name, FEW, "test")
        assert failures == [], name
        assert ends.total() >= FEW // 2
        seen |= {*ends}
    readers.server.shutdown()
    readers.server.server_close()
    assert seen == {"loaded", "refused"}


def test_what_is_neither_is_a_failure(fuzz, monkeypatch):
    def lines(_):
        raise fuzz.InputError("two\nlines")

    def hog(_):
        found.append(bytearray(b"x" * 2**22))

    found = []
    assert fuzz.ended(lambda given: given, 1) == "loaded"
    assert "ZeroDivisionError" in fuzz.ended(lambda given: 1 / given, 0)
    assert "two" in fuzz.ended(lines, 0)
    monkeypatch.setattr(fuzz, "SECONDS", 0.05)
    assert "TooLong" in fuzz.ended(lambda _: [None for _ in iter(int, 1)], 0)
    monkeypatch.setattr(fuzz, "MEMORY", -1)
    assert "bytes of memory" in fuzz.ended(hog, 0)


def test_the_same_seed_makes_the_same_inputs(fuzz):
    files = {"a.json": b'{"rows": [1, {"x": 2}]}', "b.json": b"[]"}
    one, other = ([fuzz.mutated(fuzz.random.Random(3), files, ".json")] for _ in "12")
    assert one == other
    assert one != [files]
