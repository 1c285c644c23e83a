"""Made data and small readings that tests of several methods share."""

import numpy as np
import torch


def drawn(n=600, k=4, *, scale=3.0, heat=2.0, seed=0):
    draw = np.random.default_rng(seed)
    logits = (draw.normal(size=(n, k)) * scale).astype(np.float32)
    labels = (logits / heat + draw.gumbel(size=logits.shape)).argmax(1)
    return torch.tensor(logits), torch.tensor(labels)


def mapped(calibrator, logits):
    with torch.no_grad():
        return calibrator.wrap()(logits)


def floored(logits, wanted):
    """What keeping the prediction makes of a confidence: at least the runner-up's, hardly above."""
    p = np.sort(logits.double().softmax(1).numpy(), 1)
    share = p[:, -2] / p[:, :-1].sum(1)
    return np.maximum(wanted, share / (1 + share))


def drawn_affine(n=600, k=4, *, seed=0, dtype=torch.float64):
    """Logits whose labels follow another affine map of them, so that there is much to learn."""
    draw = np.random.default_rng(seed)
    logits = draw.normal(size=(n, k)) * 2.5
    weight = np.diag(draw.uniform(0.3, 0.9, k)) + draw.normal(size=(k, k)) * 0.12
    true = logits @ weight.T + draw.normal(size=k) * 0.5
    labels = (true + draw.gumbel(size=true.shape)).argmax(1)
    return torch.tensor(logits, dtype=dtype), torch.tensor(labels)


def log_probs(calibrator, logits):
    with torch.no_grad():
        return calibrator.wrap()(logits).log_softmax(1)
