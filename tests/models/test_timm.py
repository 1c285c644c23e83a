"""timm's models, which say by themselves where their classifier is, through the whole path."""

import pytest
import torch
from model_packages import package
from torch import nn
from whole_path import ROWS, batches_of, logits_of, trained, whole_path

from featcal import InputError, Temperature, attach, calibrate, find_head

timm = package("timm")

K = 6
VIT = {"img_size": 32, "patch_size": 8, "depth": 1}

# name of the model, what makes it small, and the path of its head; timm has a few small ones for
# tests itself
CASES = {
    "test_resnet": ({}, "fc"),
    "vit_tiny_patch16_224": (VIT, "head"),
    "convnext_atto": ({"depths": (1, 1, 1, 1), "dims": (8, 16, 24, 32)}, "head.fc"),
    "test_efficientnet": ({}, "classifier"),
    "resnetv2_50": ({"layers": (1, 1), "channels": (16, 32), "stem_chs": 16}, "head.fc"),
}
DISTILLED = "deit_tiny_distilled_patch16_224"


def made(name, **changes):
    torch.manual_seed(0)
    return timm.create_model(name, num_classes=K, **changes)


@pytest.mark.no_cover  # see whole_path
@pytest.mark.parametrize("name", CASES)
def test_from_a_trained_model_to_onnx_runtime(name, images, tmp_path):
    changes, head = CASES[name]
    model = trained(made(name, **changes), images)
    assert find_head(model) == find_head(model, inputs=images[:4]) == head
    assert model.get_submodule(head) is model.get_classifier()
    exports = name == "resnetv2_50"  # it stands for the others
    calibrated = whole_path(model, batches_of(model, images), tmp_path, exports=exports)
    assert calibrated.get_classifier() is calibrated.get_submodule(head)


def test_two_classifiers_of_which_the_mean_is_given_are_refused_with_the_candidates(images):
    model = made(DISTILLED, **VIT)
    labels = torch.zeros(ROWS, dtype=torch.long)
    with pytest.raises(InputError, match=r"no linear layer makes .*head \(6,\), head_dist \(6,\)"):
        calibrate(model, [(images, labels)], "clip | temperature")
    with pytest.raises(InputError, match="several classifiers: pass head="):
        attach(model, Temperature())


def test_the_mean_of_two_classifiers_is_calibrated_behind_them(images):
    model = trained(nn.Sequential(made(DISTILLED, **VIT), nn.Identity()), images, head="0.head")
    batches = batches_of(model, images, head="1")
    calibrated = calibrate(model, batches, "temperature", head="1")
    raw, temperature = logits_of(model, images), calibrated[1].calibrator.temperature
    torch.testing.assert_close(logits_of(calibrated, images), raw / temperature)
