"""One binning for every number and every diagram: (lo, hi], the first bin closed at 0 as well."""

import torch
from torch import Tensor


def bin_edges(bins: int, dtype: torch.dtype) -> Tensor:
    """The m + 1 edges of m equal-width bins on [0, 1], in the precision they are compared in.

    A float32 confidence is compared with float32 edges: read as float64, float32(0.2) lies above
    0.2 and would change bins.
    """
    return torch.linspace(0, 1, bins + 1, dtype=dtype)


def bin_index(confidence: Tensor, bins: int) -> Tensor:
    """The bin of each confidence, 0 to m - 1: right-closed, 0 in the first bin, 1 in the last.

    >>> bin_index(torch.tensor([0.0, 0.2, 0.2000001, 1.0]), 5).tolist()
    [0, 0, 1, 4]
    """
    inner = bin_edges(bins, confidence.dtype)[1:-1].to(confidence.device)
    return torch.bucketize(confidence, inner)


def bin_sums(confidence: Tensor, correct: Tensor, bins: int) -> Tensor:
    """Per bin the count, the summed confidence and the summed correctness: (3, m) float64."""
    index = bin_index(confidence, bins)
    weights = torch.stack([torch.ones_like(confidence), confidence, correct.to(confidence.dtype)])
    sums = torch.zeros(3, bins, dtype=torch.float64, device=confidence.device)
    return sums.index_add_(1, index, weights.double())
