"""What tests of exported files share: small networks, and a way to run a file."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from featcal import Batch, attach, parse


@pytest.fixture(scope="session")
def runtime():
    """Runs a file in ONNX Runtime: its outputs, by name, for inputs by name."""
    import onnxruntime

    sessions = {}

    def run(path, **inputs):
        if path not in sessions:
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = 1
            sessions[path] = onnxruntime.InferenceSession(
                path, options, providers=["CPUExecutionProvider"]
            )
        session = sessions[path]
        found = session.run(None, {key: value.numpy() for key, value in inputs.items()})
        names = [port.name for port in session.get_outputs()]
        return {key: torch.from_numpy(value) for key, value in zip(names, found, strict=True)}

    return run


class Net(nn.Module):
    """An image classifier in small: batch norm, dropout and a linear head."""

    def __init__(self, classes=3):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.5)
        self.fc = nn.Linear(8, classes)

    def forward(self, x):
        return self.fc(self.drop(self.norm(self.conv(x)).relu().mean((2, 3))))


@pytest.fixture(scope="session")
def fitted_net():
    """A calibrated network, the one it was made of, and images for it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, images = Net(), torch.randn(40, 3, 8, 8)
        model(images)  # batch norm's statistics
        model.eval()
        with torch.no_grad():
            features = model.norm(model.conv(images)).relu().mean((2, 3))
            logits = model.fc(features)
            labels = (logits * 3 + torch.randn_like(logits)).argmax(1)
    calibrator = parse("clip | temperature").fit(Batch(logits, labels, features), model.fc)
    return SimpleNamespace(model=attach(model, calibrator, head="fc"), images=images)


@pytest.fixture
def net(fitted_net):
    """A copy of its own for every test, in train mode."""
    return SimpleNamespace(model=copy.deepcopy(fitted_net.model).train(), images=fitted_net.images)
