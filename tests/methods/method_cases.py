"""Made data and small readings that tests of several methods share."""

import numpy as np
import torch


def drawn(n=600, k=4, *, scale=3.0, heat=2.0, seed=0):
    draw = np.random.default_rng(seed)
    logits = (draw.normal(size=(n, k)) * scale).astype(np.float32)
    labels = (logits / heat + draw.gumbel(size=logits.shape)).argmax(1)
    return torch.tensor(logits), torch.tensor(labels)


def paper(shared_file, loss="ce"):
    """The paper's own logits: a ResNet-50 on CIFAR-10."""
    with np.load(shared_file("anchors", f"resnet50-cifar10-{loss}.npz")) as file:
        return {key: torch.from_numpy(file[key]) for key in file.files}


def nll64(logits, labels):
    logits, labels = torch.as_tensor(logits).detach().double(), torch.as_tensor(labels)
    return float(torch.nn.functional.cross_entropy(logits, labels))


def score64(name, logits, labels):
    """NLL, Brier score or ECE of 15 bins by plain float64 formulas, independent of the package."""
    logits = np.asarray(logits, dtype=np.float64)
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    labels = np.asarray(labels)
    if name == "nll":
        return float(-np.log(p[np.arange(len(p)), labels].clip(1e-300)).mean())
    if name == "brier":
        return float(((p - np.eye(p.shape[1])[labels]) ** 2).sum(1).mean())
    confidence, right = p.max(1), p.argmax(1) == labels
    index = np.clip(np.ceil(confidence * 15) - 1, 0, 14).astype(int)
    return float(np.abs(np.bincount(index, confidence - right, minlength=15)).sum()) / len(p)


def torchs_lbfgs(change, start, labels):
    """Where torch's L-BFGS of the published settings ends, from start (p,)."""
    parameter = torch.nn.Parameter(start)
    optimizer = torch.optim.LBFGS([parameter], lr=0.02, max_iter=1000)

    def closure():
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(change(parameter), labels)
        loss.backward()
        return loss

    optimizer.step(closure)
    return parameter.detach()


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
