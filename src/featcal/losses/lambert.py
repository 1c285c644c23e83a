"""The gamma at which focal loss pulls as hard as cross-entropy, by the Lambert W function.

With q = 1 - p, the gradient of focal loss is that of cross-entropy times
g(p) = q^gamma - gamma p q^(gamma-1) log p. With a = -p log p / q, g = 1 reads
q^gamma (1 + a gamma) = 1. gamma = 0 solves it; the other solution, above 0 for p < 1/2, is found
with r = -log q / a in (0, 1):

    gamma = (w - r) / -log q,    w = -W_-1(-r exp(-r)),    that is w - log w = r - log r and w > 1.

Mukhoti et al. (NeurIPS 2020) state the same rule as a/b + W_-1(...) / log a.
"""

from __future__ import annotations

import torch
from torch import Tensor

STEPS = 6  # of Newton's method; four reach the last digit of float64 for every p in range
SMALLEST = 1e-30  # p below count as this; gamma, of the order of 1 / p, then still fits float32


def lower_branch(excess: Tensor) -> Tensor:
    """The w > 1 with w - log w = 1 + u, that is -W_-1(-exp(-1 - u)), for u >= 0 in float64.

    The number of steps is fixed, for CUDA graphs. The function is convex and the start,
    1 + sqrt(2 u) + u, lies above the root (Chatzigeorgiou 2013): every step stays above it.
    """
    w = 1 + (2 * excess).sqrt() + excess
    for _ in range(STEPS):
        miss = w - w.log() - 1 - excess
        w = w - miss * w / (w - 1).clamp_min(1e-12)  # at u = 0 both are 0
    return w


@torch.no_grad()
def balancing_gamma(probs: Tensor) -> Tensor:
    """The gamma > 0 with g(p, gamma) = 1 for p < 1/2, and 0 from there on: (n,) -> (n,).

    >>> balancing_gamma(torch.tensor([0.2, 0.25, 0.5])).mul(100).round().tolist()
    [485.0, 307.0, 0.0]
    """
    p = probs.double().clamp(SMALLEST, 0.5)
    log_p, log_q = p.log(), torch.log1p(-p)
    r = (1 - p) * log_q / (p * log_p)
    w = lower_branch((r - 1 - r.log()).clamp_min(0.0))
    return ((w - r) / -log_q).clamp_min(0.0).to(probs.dtype)
