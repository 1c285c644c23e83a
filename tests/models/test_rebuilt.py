"""Networks that end as torchvision's classes do, through the whole path, without torchvision."""

import pytest
import rebuilt_models
import torch
import torch.nn.functional as F
from rebuilt_models import SqueezeNet
from whole_path import ROWS, batches_of, logits_of, trained, whole_path

from featcal import Batch, InputError, collect, find_head, parse

HEADS = {
    "ResNet": "fc",
    "DenseNet": "classifier",
    "SqueezeNet": "classifier",
    "ConvHead": "fc",
    "Inception": "fc",
    "DictInception": "fc",
    "OneLogitFlat": "fc",
}


@pytest.fixture
def made(images):
    """A model of a class, seeded, whose logits are spread as a trained one's."""

    def make(name):
        torch.manual_seed(0)
        return trained(getattr(rebuilt_models, name)(), images)

    return make


@pytest.mark.no_cover  # see whole_path
@pytest.mark.parametrize("name", HEADS)
def test_from_a_trained_model_to_onnx_runtime(name, made, images, tmp_path):
    model = made(name)
    assert find_head(model) == find_head(model, inputs=images[:4]) == HEADS[name]
    exports = name in ("ConvHead", "Inception")  # they stand for the others
    calibrated = whole_path(model, batches_of(model, images), tmp_path, exports=exports)
    assert type(calibrated(images[:2])) is type(model(images[:2]))


@pytest.mark.no_cover
def test_a_network_that_gives_log_probabilities(made, images, tmp_path):
    model = made("LogSoftmax")
    batches = batches_of(model, images)
    calibrated = whole_path(model, batches, tmp_path, link=lambda z: F.log_softmax(z, 1))
    torch.testing.assert_close(logits_of(calibrated, images).exp().sum(1), torch.ones(ROWS))


@pytest.fixture
def dense(made, images):
    """A DenseNet, its batches, and its pooled features with and without the ReLU."""
    model = made("DenseNet")
    batches = batches_of(model, images)
    with torch.no_grad():
        maps = model.eval().features(images)
    pooled = [F.adaptive_avg_pool2d(part, 1).flatten(1) for part in (F.relu(maps), maps)]
    return model, batches, *pooled


def test_features_of_a_densenet_come_after_its_relu(dense):
    model, batches, right, wrong = dense
    data = collect(model, batches)
    found = torch.cat([batch.features for batch in data])
    torch.testing.assert_close(found, right)
    assert bool((found >= 0).all())
    assert bool((wrong < 0).any())  # or the test would prove nothing


def test_features_taken_before_the_relu_are_refused_before_any_fit(dense, images):
    model, batches, right, wrong = dense
    logits, labels = logits_of(model, images), torch.cat([y for _, y in batches])
    calibrator = parse("temperature")
    before = {key: value.clone() for key, value in calibrator.state_dict().items()}
    with pytest.raises(InputError, match=r"head\(features\) differs .*a missing ReLU"):
        calibrator.fit(Batch(logits, labels, wrong), model.classifier)
    assert calibrator.report is None
    assert all(torch.equal(value, before[key]) for key, value in calibrator.state_dict().items())
    calibrator.fit(Batch(logits, labels, right), model.classifier)
    assert calibrator.report is not None


def test_a_squeezenet_has_its_whole_classifier_for_a_head(made, images):
    model = made("SqueezeNet")
    data = collect(model, batches_of(model, images))
    assert type(data.head.layer) is type(SqueezeNet().classifier)
    assert data[0].features.shape[1] == 8 * 8 * 8  # every pixel of its maps
    with torch.no_grad():
        torch.testing.assert_close(data.head(data[0].features), data[0].logits)
