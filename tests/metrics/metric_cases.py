"""Small labelled predictions for the metric tests, and what the tests agree on."""

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st

quick = settings(max_examples=20, deadline=None, derandomize=True)


def labelled_logits(seed, n, k, *, step=None, dtype=np.float64):
    """Logits (n, k) and labels; a step rounds them so that ties and equal rows are common.

    One column is the logit of a sigmoid, and its labels are of two classes. Labels are drawn from
    the softmax of the logits, so that gaps have either sign and do not add up whatever the bins.
    """
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 2, (n, k))
    noisy = (logits if k > 1 else np.pad(logits, ((0, 0), (1, 0)))) + rng.gumbel(
        size=(n, max(k, 2))
    )
    if step is not None:
        logits = np.round(logits / step) * step
    return torch.tensor(logits.astype(dtype)), torch.tensor(noisy.argmax(1))


@st.composite
def cases(draw, *, min_rows=0):
    """(logits, labels): 0 to 30 rows, 1 to 5 columns, with and without ties."""
    n, k = draw(st.integers(min_rows, 30)), draw(st.integers(1, 5))
    step = draw(st.sampled_from([None, 1.0, 3.0]))
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    return labelled_logits(draw(st.integers(0, 10**6)), n, k, step=step, dtype=dtype)


@st.composite
def split_cases(draw):
    """(logits, labels, i, j) with 0 <= i <= j <= n, where to cut."""
    logits, labels = draw(cases())
    i = draw(st.integers(0, len(labels)))
    return logits, labels, i, draw(st.integers(i, len(labels)))


def columns(logits):
    """Logits with a column a class: one logit z is met as the two logits (0, z)."""
    zero = torch.zeros_like(logits[:, :1])
    return torch.cat([zero, logits], 1) if logits.shape[1] == 1 else logits


def binary(confidence, correct, dtype=torch.float64):
    """Two-class probabilities whose first column, at least one half, is the confidence."""
    c = torch.tensor(confidence, dtype=dtype)
    return torch.stack([c, 1 - c], 1), torch.tensor([0 if right else 1 for right in correct])


def top(logits, labels):
    """Confidence (float64) and correctness, by numpy."""
    z = columns(logits).numpy().astype(np.float64)
    e = np.exp(z - z.max(1, keepdims=True))
    p = e / e.sum(1, keepdims=True)
    return p.max(1), z.argmax(1) == labels.numpy(), p
