"""Products in fewer digits, as TF32 and bfloat16 have them: how far they move logits and fits.

Such hardware rounds both operands and sums up their products in float32. So the operands are
rounded here, and the same holds on any machine.
"""

import pytest
import torch
from torch import nn

from featcal import Batch, evaluate, parse

FRACTION = {"float32": 23, "tf32": 10, "bfloat16": 7}  # bits of it


def rounded(values, kind):
    dropped = 23 - FRACTION[kind]
    if not dropped:
        return values
    bits = values.detach().contiguous().view(torch.int32)
    return ((bits + (1 << (dropped - 1))) >> dropped << dropped).view(torch.float32)


def linear(weight, bias):
    head = nn.Linear(weight.shape[1], len(weight), dtype=weight.dtype).requires_grad_(False)
    head.weight[:], head.bias[:] = weight, bias
    return head


@pytest.mark.parametrize("kind", FRACTION)
def test_logits_are_within_the_bound_of_their_products(demo, kind):
    x, weight, bias = (v.double() for v in (demo.batch.features, demo.head.weight, demo.head.bias))
    exact, size = x @ weight.T + bias, x @ weight.abs().T
    unit = 2.0 ** -(FRACTION[kind] + 1)  # of an operand's rounding; every sum has float32's
    bound = size * (2 * unit + unit**2) + (size + bias.abs()) * 258 * 2.0**-24
    head = linear(rounded(demo.head.weight, kind), demo.head.bias)
    found = head(rounded(demo.batch.features, kind)).double()
    assert bool(((found - exact).abs() <= bound).all())


@pytest.mark.parametrize(("kind", "most"), [("float32", 1e-8), ("tf32", 1e-6), ("bfloat16", 1e-5)])
@pytest.mark.parametrize("recipe", ["temperature", "clip", "clip | temperature"])
def test_a_fit_by_them_loses_next_to_nothing_in_float64(demo, recipe, kind, most):
    features, labels = demo.batch.features, demo.batch.labels
    exact = linear(demo.head.weight.double(), demo.head.bias.double())
    wide = Batch(None, labels, features.double())
    few = Batch(None, labels, rounded(features, kind))
    fitted = parse(recipe).fit(few, linear(rounded(demo.head.weight, kind), demo.head.bias))
    best = parse(recipe).fit(wide, exact)
    found, known = (evaluate(wide, one, exact).metrics["nll"] for one in (fitted, best))
    assert found <= known + most
