"""The small network that reads a row's largest logits: its parameters are one flat vector."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import init

FURTHEST = 8.0  # standard deviations at which an input is cut off
REACH = math.log(10.0)  # T stays within this factor of the common temperature

MOST = 3.0  # how much more the last unit of a layer is held back than the first

Layers = list[tuple[Tensor, Tensor]]  # weight (o, i) and bias (o,) of each layer


def top_logits(logits: Tensor, top: int) -> Tensor:
    """The largest logits of each row, the largest first: (n, min(top, k))."""
    return logits.topk(min(top, logits.shape[1]), 1).values


def top_gaps(logits: Tensor, top: int) -> Tensor:
    """How far the top logit stands above each of the next: softmax knows nothing else."""
    values = top_logits(logits, top)
    return values[:, :1] - values[:, 1:]


def standardised(gaps: Tensor, mean: Tensor, spread: Tensor) -> Tensor:
    """Gaps in units of the fit split's, cut off where that split says nothing."""
    least = torch.finfo(gaps.dtype).tiny
    return ((gaps - mean) / spread.clamp(min=least)).clamp(-FURTHEST, FURTHEST)


def log_change(network: Tensor, inputs: Tensor, sizes: list[int]) -> Tensor:
    """Log of T over the common temperature, (n,): hidden layers of tanh, then a bound."""
    *hidden, (weight, bias) = layers_of(network, sizes)
    for matrix, offset in hidden:
        inputs = torch.tanh(inputs @ matrix.T + offset)
    return REACH * torch.tanh((inputs @ weight.T + bias)[:, 0] / REACH)


def raw_temperature(network: Tensor, inputs: Tensor, sizes: list[int]) -> Tensor:
    """T itself, (n,), as the published network gives it: hidden layers of ReLU, of any sign."""
    *hidden, (weight, bias) = layers_of(network, sizes)
    for matrix, offset in hidden:
        inputs = torch.relu(inputs @ matrix.T + offset)
    return (inputs @ weight.T + bias)[:, 0]


def length(sizes: list[int]) -> int:
    """The number of parameters."""
    return sum((wide + 1) * narrow for wide, narrow in pairwise(sizes))


def layers_of(network: Tensor, sizes: list[int]) -> Layers:
    """The flat vector cut into weights and biases, in order."""
    parts = torch.split(network, [n for i, o in pairwise(sizes) for n in (i * o, o)])
    shapes = list(pairwise(sizes))
    return [
        (weight.view(o, i), bias)
        for (i, o), weight, bias in zip(shapes, parts[::2], parts[1::2], strict=True)
    ]


def held_back(sizes: list[int]) -> Tensor:
    """How strongly the penalty holds each parameter, (p,) float64; the last bias is free.

    The units of a layer are held by different amounts. Where tanh is nearly linear, units held
    alike could be mixed at no cost, and the minimum would be a flat valley without a bottom.
    """
    hold = torch.ones(length(sizes), dtype=torch.float64)
    *hidden, (_, last) = layers_of(hold, sizes)
    for weight, bias in hidden:
        factors = torch.linspace(1, MOST, len(bias), dtype=torch.float64)
        weight *= factors[:, None]
        bias *= factors
    last.zero_()
    return hold


def silent_start(sizes: list[int], seed: int) -> Tensor:
    """Random hidden layers and an output of 0 for every row, (p,): temperature scaling exactly."""
    generator = torch.Generator().manual_seed(seed)
    network = torch.randn(length(sizes), generator=generator, dtype=torch.float64)
    *hidden, (weight, bias) = layers_of(network, sizes)
    for matrix, offset in hidden:
        matrix /= math.sqrt(matrix.shape[1])
        offset.zero_()
    weight.zero_()
    bias.zero_()
    return network


def default_start(sizes: list[int], seed: int) -> Tensor:
    """What torch gives fresh linear layers, in order, after `manual_seed`: (p,)."""
    generator = torch.Generator().manual_seed(seed)
    network = torch.empty(length(sizes))
    for weight, bias in layers_of(network, sizes):
        init.kaiming_uniform_(weight, a=math.sqrt(5), generator=generator)
        bound = 1 / math.sqrt(weight.shape[1])
        init.uniform_(bias, -bound, bound, generator=generator)
    return network
