"""Log-odds, the score that binning methods sort by: log p - log(1 - p), exact where p rounds to 1.

The order is that of the confidences. Half precision keeps log-odds to a part in a thousand, where
it would round a confidence of 0.9998 to 1.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

FARTHEST = 2.0**14  # beyond it p is 0 or 1 in any precision; within it half precision is finite


def log_odds(logits: Tensor) -> Tensor:
    """The log-odds (n,) of each row's predicted class, from logits (n, k).

    >>> log_odds(torch.tensor([[0.0, 0.0], [1000.0, 0.0]]))
    tensor([   0., 1000.])
    """
    return _ahead(logits, logits.argmax(1, keepdim=True))[:, 0].clamp(-FARTHEST, FARTHEST)


def class_log_odds(logits: Tensor) -> Tensor:
    """The log-odds (n, k) of every class."""
    log_p = logits.log_softmax(1)
    top = logits.argmax(1, keepdim=True)
    # 1 - p cancels for the predicted class alone: no other class has more than half.
    odds = log_p - torch.log1p(-log_p.exp().clamp(max=0.5))
    return odds.scatter(1, top, _ahead(logits, top)).clamp(-FARTHEST, FARTHEST)


def _ahead(logits: Tensor, top: Tensor) -> Tensor:
    """How far the predicted class (n, 1) is ahead of all others together."""
    return logits.gather(1, top) - logits.scatter(1, top, -torch.inf).logsumexp(1, keepdim=True)


def odds_of(share: NDArray[np.float64]) -> NDArray[np.float64]:
    """The log-odds of probabilities; 0 and 1 end at the farthest values.

    >>> odds_of(np.array([0.0, 0.5, 1.0])).tolist()
    [-16384.0, 0.0, 16384.0]
    """
    with np.errstate(divide="ignore"):
        return np.asarray((np.log(share) - np.log1p(-share)).clip(-FARTHEST, FARTHEST))
