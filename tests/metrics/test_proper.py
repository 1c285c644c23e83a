import numpy as np
import pytest
import torch
from metric_cases import labelled_logits, top
from sklearn.metrics import accuracy_score, log_loss

from featcal.metrics import accuracy, brier, nll


def test_against_sklearn():
    logits, labels = labelled_logits(9, 300, 5)
    _, _, probs = top(logits, labels)
    given_logits = {"logits": logits, "labels": labels}
    assert nll(**given_logits) == pytest.approx(log_loss(labels, probs, labels=range(5)))
    assert accuracy(**given_logits) == accuracy_score(labels, probs.argmax(1))
    one_hot = np.eye(5)[labels.numpy()]
    assert brier(**given_logits) == pytest.approx(((probs - one_hot) ** 2).sum(1).mean())


def test_a_certain_mistake():
    probs, labels = torch.tensor([[1.0, 0.0]], dtype=torch.float64), torch.tensor([1])
    assert nll(probs, labels) == pytest.approx(-np.log(1e-12))
    assert (brier(probs, labels), accuracy(probs, labels)) == (2, 0)
    assert nll(logits=torch.tensor([[900.0, 0.0]]), labels=labels) == 900
