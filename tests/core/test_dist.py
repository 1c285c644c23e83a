"""Reductions without processes; tests/metrics/test_summaries.py and others have two."""

import torch

from featcal.core import dist


def test_one_process_keeps_its_own_values():
    values = torch.tensor([1.0, 2.0])
    assert not dist.active()
    assert dist.world() == 1
    assert dist.total(values) is values
    assert dist.largest(values) is values
    assert dist.gather(values) is values
