"""Claims about the paper that no printed value shows: an equation, a theorem, broken ties."""

import numpy as np
import pytest

from featcal.report.paper import all_marks, paper_table


@pytest.mark.shared
def test_equation_1_is_constant_as_printed(shared_file):
    text = shared_file("paper", "feature-clipping.tex").read_text()
    assert r"\tilde{x} = \min(\max(x, c), -c)" in text
    x, c = np.linspace(-3, 3, 61), 0.7
    assert set(np.minimum(np.maximum(x, c), -c)) == {-c}


def quadrature(y, x):
    return float(((y[1:] + y[:-1]) / 2 * np.diff(x)).sum())


def spread(scale, high):
    """Entropy and mass of the density of N(0, scale^2) between 0 and `high`."""
    x = np.linspace(0, high, 20_000)
    density = np.exp(-((x / scale) ** 2) / 2) / (scale * np.sqrt(2 * np.pi))
    logs = -((x / scale) ** 2) / 2 - np.log(scale * np.sqrt(2 * np.pi))
    return quadrature(-density * logs, x), quadrature(density, x)


def entropy_gain(scale, c):
    """H(min(X, c)) - H(X) of a rectified normal X; the mass at 0 is the same before and after."""
    whole, _ = spread(scale, 12 * scale)
    kept, mass = spread(scale, c)
    clipped = 0.5 - mass
    return kept - clipped * np.log(clipped) - whole


@pytest.mark.parametrize(("c", "top"), [(0.23, 0.252), (0.5, 0.400), (1.0, 0.588)])
def test_theorem_the_entropy_gain_rises_and_then_falls_with_the_scale(c, top):
    scales = np.linspace(0.5 * top, 4 * top, 141)
    gains = np.array([entropy_gain(scale, c) for scale in scales])
    highest = int(gains.argmax())
    assert scales[highest] == pytest.approx(top, rel=0.03)
    assert (np.diff(gains[: highest + 1]) > 0).all()
    assert (np.diff(gains[highest:]) < 0).all()


def top_ece(confidence, correct):
    bins = np.clip(np.ceil(confidence * 15), 1, 15)
    gaps = (abs((confidence - correct)[bins == b].sum()) for b in range(1, 16))
    return 100 * sum(gaps) / len(confidence)


@pytest.mark.shared
def test_ties_of_clipped_logits_decide_the_printed_ece(shared_file):
    """At the printed threshold: the first index wins, and the unclipped prediction is kept."""
    with np.load(shared_file("anchors", "resnet50-cifar10-ce.npz")) as file:
        logits, labels = file["test_logits"], file["test_labels"]
    clipped = logits.clip(-4.98, 4.98)
    probs = np.exp(clipped.astype(float))
    probs /= probs.sum(1, keepdims=True)
    (mark,) = [m for m in all_marks() if m.id == "logit-clip-ties"]
    tied = ((clipped == clipped.max(1, keepdims=True)).sum(1) > 1).sum()
    assert f"in {tied} test rows" in mark.sentence
    printed = paper_table("layers").cell
    found = {}
    for rule, predicted in (("first", clipped.argmax(1)), ("kept", logits.argmax(1))):
        correct = predicted == labels
        confidence = probs[np.arange(len(labels)), predicted]
        found[rule] = (100 * correct.mean(), top_ece(confidence, correct))
    accuracy = printed("Last Layer (logits)", "Accuracy").value
    ece = printed("Last Layer (logits)", "ECE (c)").value
    assert found["first"][0] == pytest.approx(accuracy, abs=1e-6)
    assert found["first"][1] < ece - 0.3
    assert found["kept"][0] == pytest.approx(95.05, abs=1e-6)
    assert found["kept"][1] == pytest.approx(ece, abs=0.03)
