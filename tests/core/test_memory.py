"""A cap on memory: what it turns into, and that a fit of a larger pack keeps to it."""

import mmap
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from featcal import Batch, InputError, Temperature, write_pack
from featcal.core import memory
from featcal.core.batch import Chunked

CAPPED = """
import resource, sys, torch
from featcal import Pack, compare, evaluate, parse
torch.set_num_threads(1)
pack, recipes = Pack.open(sys.argv[1]), ["none", "clip | temperature"]
def everything(rows, others, **how):
    calibrator = parse(recipes[1]).fit(rows, pack.head, **how)
    evaluate(rows, calibrator, pack.head, **how)
    compare(rows, others, recipes, pack.head, resamples=100, **how)
few = next(iter(pack.split("val")))
everything(few.rows(slice(0, 64)), few.rows(slice(64, 128)))  # all that is loaded, is
del few
with open("/proc/self/status") as file:
    held = next(int(line.split()[1]) for line in file if line.startswith("VmSize")) * 1024
resource.setrlimit(resource.RLIMIT_AS, (held + 150 * 10**6,) * 2)
everything(pack.split("val"), pack.split("test"), memory=sys.argv[2])
"""


def capped(pack, memory):
    """What became of a process that may take 150 MB more, its maps of files among them."""
    words = [sys.executable, "-W", "ignore", "-c", CAPPED, str(pack), memory]
    return subprocess.run(words, capture_output=True, text=True, check=False)


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="Linux alone keeps to the cap")
def test_a_pack_larger_than_memory_is_fitted_scored_and_compared(tmp_path):
    """168 MB to fit on, and twice as much in float32; ulimit -v is the same cap.

    Few classes and many features: what a clip holds of these counts, too.
    """
    draw = torch.Generator().manual_seed(0)
    head = nn.Linear(1024, 4).requires_grad_(False)
    head.weight.normal_(0, 0.1, generator=draw)

    def rows(batches):
        for _ in range(batches):
            x = torch.randn(4096, 1024, generator=draw).relu_()
            labels = (4 * head(x)).softmax(1).multinomial(1, generator=draw)[:, 0]
            yield Batch(None, labels, x.half())

    write_pack(tmp_path / "pack", {"val": rows(20), "test": rows(5)}, head=head, shard_rows=2048)
    found = capped(tmp_path / "pack", "500MB")
    assert found.returncode == 0, found.stderr
    assert "llocate memory" in capped(tmp_path / "pack", "2GB").stderr  # which the cap is not


CLASSES = """
import torch
from torch import nn
from featcal import Batch, parse
def most():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1000
torch.set_num_threads(1)
head = nn.Linear(8, 128_000).requires_grad_(False)
head.weight *= 20
features = torch.randn(200, 8)
labels = head(features[:50]).argmax(1).repeat(4)
parse("temperature").fit(Batch(None, labels[:2], features[:2]), head)
before = most()
parse("temperature").fit(Batch(None, labels, features), head)
print(most() - before)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="asks Linux for its memory")
def test_many_classes_mean_few_rows_at_a_time():
    """102 MB of logits are kept: all rows at once would take as much for every step of a sum."""
    words = [sys.executable, "-W", "ignore", "-c", CLASSES]
    found = subprocess.run(words, capture_output=True, text=True, check=True)
    assert float(found.stdout) < 250


ROWS = """
import sys, torch
from featcal import Batch, evaluate
def most():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) * 1024
class Rows:
    def __init__(self, parts):
        self.parts = parts
    def __iter__(self):
        draw = torch.Generator().manual_seed(0)
        for first in range(0, 2**15 * self.parts, 2**15):
            logits = 2 * torch.randn(2**15, 4, generator=draw)
            labels = logits.softmax(1).multinomial(1, generator=draw)[:, 0]
            groups = (first + torch.arange(2**15)) // per_sample if per_sample else None
            yield Batch(logits, labels, groups=groups)
torch.set_num_threads(1)
per_sample = int(sys.argv[1])
evaluate(Rows(2), resamples=100, memory="500MB")
before = most()
evaluate(Rows(10), resamples=100, memory="500MB")
print((most() - before) / (8 * 2**15))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="asks Linux for its memory")
@pytest.mark.parametrize("per_sample", [0, 4])
def test_many_rows_take_few_bytes_each(per_sample):
    """A quarter of a million rows more take 25 bytes each at most; it was 150."""
    words = [sys.executable, "-W", "ignore", "-c", ROWS, str(per_sample)]
    found = subprocess.run(words, capture_output=True, text=True, check=True)
    assert float(found.stdout) < 60


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("500000KB", 5e8),
        ("600mb", 6e8),
        ("0.5 GB", 5e8),
        ("2GB", 2e9),
        ("1TB", 1e12),
        (5 * 10**8, 5e8),
    ],
)
def test_sizes_are_read_in_decimal_units(text, size):
    assert memory.parsed(text) == size


def test_a_cap_bounds_chunks_and_what_is_kept():
    free = memory.keep_bytes(), memory.chunk_values()
    data = Batch(torch.zeros(6000, 2), torch.arange(6000) % 2, torch.zeros(6000, 1000))
    assert len(list(Chunked([data]))) == 1
    with memory.limited("500MB"):
        assert memory.keep_bytes() < free[0] / 100
        assert sum(map(len, parts := list(Chunked([data])))) == 6000
        assert max(map(len, parts)) * 1000 <= memory.chunk_values() < 2**20
    assert (memory.keep_bytes(), memory.chunk_values()) == free
    for size in ("2 gb", 2 * 10**9, "2000MB"):
        assert memory.parsed(size) == 2 * 10**9
    for size in ("2GX", "-1GB", "100MB", "499999KB", 7):
        with pytest.raises(InputError, match="such as 2GB"):
            Temperature().fit(data, memory=size)


@pytest.mark.parametrize("cap", ["500MB", "1GB", "4GB", "20GB", "1TB"])
def test_what_is_kept_and_what_is_at_work_fit_under_the_cap(cap):
    """A joint fit holds 6 views of the logits at least, and 8 copies of a chunk in float64."""
    free = memory.keep_bytes(), memory.chunk_values(), memory.held_bytes()
    with memory.limited(cap):
        kept, values = memory.keep_bytes(), memory.chunk_values()
        assert 6 * kept + 8 * 8 * values + memory.OWN <= memory.parsed(cap)
        assert 0 < 4 * memory.held_bytes() <= kept <= free[0]
        assert 2**18 < values <= free[1]
        assert (kept == free[0], values == free[1]) == ((cap in ("20GB", "1TB"),) * 2)
        with memory.limited(None):
            assert memory.keep_bytes() == kept
    assert (memory.keep_bytes(), memory.chunk_values(), memory.held_bytes()) == free


def test_the_cap_of_a_fit_ends_with_it_whatever_happens():
    seen = []

    @memory.under_cap
    def fails(memory_at_work, memory=None):
        seen.append(memory_at_work())
        raise RuntimeError("stop")

    for size in ("500MB", None):
        with pytest.raises(RuntimeError, match="stop"):
            fails(memory.keep_bytes, memory=size)
    assert seen[0] < seen[1] == memory.keep_bytes()


def test_under_a_cap_the_c_library_maps_small_blocks(monkeypatch):
    asked = []

    class Library:
        def mallopt(self, *words):
            asked.append(words)

    monkeypatch.setattr(memory.ctypes, "CDLL", lambda _: Library())
    memory.steady()
    with memory.limited("1GB"):
        pass
    mapped, kept = -3, -1  # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of malloc.h
    assert [words[0] for words in asked] == [mapped, kept] * 2
    assert 16 * mmap.PAGESIZE <= asked[2][1] < asked[0][1]  # of a page nothing less is mapped
    assert all(asked[i][1] < asked[i + 1][1] for i in (0, 2))
    with memory.limited(None):
        assert asked[4:] == asked[:2]  # without a cap as at the start
    with memory.limited("1GB"), memory.limited(None):
        assert asked[6:] == asked[2:4]  # a call inside asks for no more
    for other in (AttributeError, OSError, TypeError):  # of systems whose heap is another

        def missing(_, other=other):
            raise other

        monkeypatch.setattr(memory.ctypes, "CDLL", missing)
        memory.steady()
