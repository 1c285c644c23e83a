"""Batches for every test of a loss."""

import pytest
import torch


@pytest.fixture
def batch():
    """Makes float64 logits and labels; some rows are right and some wrong."""

    def make(n=12, k=5, *, scale=1.5, seed=0):
        draw = torch.Generator().manual_seed(seed)
        logits = torch.randn(n, k, generator=draw, dtype=torch.float64) * scale
        labels = torch.randint(0, k, (n,), generator=draw)
        labels[: n // 2] = logits[: n // 2].argmax(1)
        return logits, labels

    return make
