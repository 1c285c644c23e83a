"""How scores are gathered, chunk by chunk."""

from functools import reduce
from operator import add

import torch

from featcal.metrics import Ordered
from featcal.report.scores import Doubling


def test_rows_of_many_chunks_are_copied_as_often_as_they_double(monkeypatch):
    sizes, copied, plain = [0, *[8] * 99, 3, 0, 8], [], Ordered.__add__
    monkeypatch.setattr(
        Ordered, "__add__", lambda a, b: (copied.append(len(a) + len(b)), plain(a, b))[1]
    )
    chunks = [Ordered(torch.rand(size), torch.rand(size) < 0.5) for size in sizes]
    whole = reduce(add, [Doubling([chunk]) for chunk in chunks])
    found = whole.joined()
    for name in ("confidence", "correct"):
        together = torch.cat([getattr(chunk, name) for chunk in chunks])
        assert torch.equal(getattr(found, name), together)
    # One by one it would be all that came before, for every chunk; 100 chunks double 7 times.
    assert sum(copied) <= 8 * sum(sizes)
    assert len(whole.parts) <= 8
