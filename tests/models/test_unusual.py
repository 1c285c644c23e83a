"""Models that keep their last layer a second time, hook it, or give it a class of its own."""

import pytest
import torch
import torch.nn.functional as F
from rebuilt_models import ResNet
from whole_path import Snapshot, calibrator_of, logits_of, unsettle

from featcal import InputError


class Kept(ResNet):
    """Keeps its last layer a second time, where PyTorch does not see it."""

    def __init__(self):
        super().__init__()
        self.order = [self.fc]

    def forward(self, x):
        return self.order[-1](self.body(x))


class OwnMethod(ResNet):
    """Calls a method of its own that it has kept."""

    def __init__(self):
        super().__init__()
        self.classify = self.top

    def top(self, x):
        return self.fc(self.body(x))

    def forward(self, x):
        return self.classify(x)


def of_class(kind, model):
    made = kind()
    made.load_state_dict(model.state_dict())
    return made.eval()


def test_a_second_way_to_the_head_leads_to_the_calibrated_one(model, images, fitted):
    expected = logits_of(fitted(model), images)
    found = fitted(of_class(OwnMethod, model))
    assert torch.equal(logits_of(found, images), expected)


def test_a_reference_that_cannot_be_followed_is_refused(model, fitted):
    with pytest.raises(InputError, match=r"keeps another reference to that layer"):
        fitted(of_class(Kept, model))


def test_a_hook_of_the_users_own_on_the_head_is_part_of_the_head(model, images, fitted):
    model.fc.register_forward_hook(lambda layer, inputs, output: 2 * output)
    unsettle(model)
    before = Snapshot(model)
    calibrated = fitted(model)
    before.check()
    clip, temperature = calibrator_of(calibrated.eval()).steps
    with torch.no_grad():
        features = clip.map_features(model.body(images))
        expected = 2 * F.linear(features, model.fc.weight, model.fc.bias) / temperature.temperature
    torch.testing.assert_close(logits_of(calibrated, images), expected)
    assert not any(step.noop for step in calibrator_of(calibrated).report.steps)
