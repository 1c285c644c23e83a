"""Networks that end as torchvision's classes do, through the whole path, without torchvision."""

import pytest
import rebuilt_models
import torch
import torch.nn.functional as F
from rebuilt_models import DenseNet, Inception, MobileNetV2, SqueezeNet, TwoHeads
from torch import nn
from whole_path import ROWS, Snapshot, batches_of, logits_of, trained, unsettle, whole_path

from featcal import Batch, InputError, Temperature, attach, calibrate, collect, find_head, parse

HEADS = {
    "ResNet": "fc",
    "DenseNet": "classifier",
    "MobileNetV2": "classifier.1",
    "MobileNetV3": "classifier.3",
    "ViT": "heads.head",
    "SqueezeNet": "classifier",
    "ConvHead": "fc",
    "Inception": "fc",
    "TupleInception": "fc",
    "DictInception": "fc",
    "OneLogit": "fc",
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
    exports = name not in ("TupleInception", "DictInception")  # Inception stands for them
    calibrated = whole_path(model, batches_of(model, images), tmp_path, exports=exports)
    assert type(calibrated(images[:2])) is type(model(images[:2]))


@pytest.mark.no_cover
def test_a_network_that_gives_log_probabilities(made, images, tmp_path):
    model = made("LogSoftmax")
    batches = batches_of(model, images)
    calibrated = whole_path(model, batches, tmp_path, link=lambda z: F.log_softmax(z, 1))
    torch.testing.assert_close(logits_of(calibrated, images).exp().sum(1), torch.ones(ROWS))


def test_labels_as_a_binary_loss_takes_them_give_the_same_model(made, images):
    model = made("OneLogit")
    batches = batches_of(model, images)
    as_float = [(x, y.float()[:, None]) for x, y in batches]
    expected, found = (calibrate(model, data) for data in (batches, as_float))
    assert torch.equal(logits_of(found, images), logits_of(expected, images))
    assert logits_of(found, images).shape == (ROWS, 1)


# --- the defect behind one of the paper's rows: DenseNet's ReLU is no module ------------------


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


@pytest.mark.parametrize("recipe", ["clip", "clip | temperature", "temperature"])
def test_features_taken_before_the_relu_are_refused_before_any_fit(recipe, dense, images):
    model, batches, right, wrong = dense
    logits, labels = logits_of(model, images), torch.cat([y for _, y in batches])
    calibrator = parse(recipe)
    before = {key: value.clone() for key, value in calibrator.state_dict().items()}
    with pytest.raises(InputError, match=r"head\(features\) differs .*a missing ReLU"):
        calibrator.fit(Batch(logits, labels, wrong), model.classifier)
    assert calibrator.report is None
    assert all(torch.equal(value, before[key]) for key, value in calibrator.state_dict().items())
    calibrator.fit(Batch(logits, labels, right), model.classifier)
    assert calibrator.report is not None


def test_the_layer_before_the_relu_can_be_clipped_as_an_inner_layer(dense, images):
    model, batches, *_ = dense
    calibrated = calibrate(model, batches, "clip | temperature", layer="features")
    raw, found = logits_of(model, images), logits_of(calibrated, images)
    assert calibrated.features.uncalibrated is model.features
    assert float((found - raw).abs().max()) > 1e-3
    assert calibrated.state_dict().keys() > model.state_dict().keys()


# --- what is refused, and what is not ---------------------------------------------------------


def test_two_heads_of_which_none_makes_the_output_are_refused_with_the_candidates(images):
    model = TwoHeads()
    labels = torch.zeros(ROWS, dtype=torch.long)
    unsettle(model)
    before = Snapshot(model)
    with pytest.raises(InputError, match=r"no linear layer makes .* fc \(5,\), fc_dist \(5,\)"):
        calibrate(model, [(images, labels)])
    with pytest.raises(InputError, match="'fc' does not make the model's output"):
        calibrate(model, [(images, labels)], head="fc")
    with pytest.raises(InputError, match="several classifiers: pass head="):
        attach(model, Temperature())
    before.check()


def test_the_remedy_for_two_heads_works(images):
    pair = trained(nn.Sequential(TwoHeads(), nn.Identity()), images, head="0.fc")
    batches = batches_of(pair, images, head="1")
    calibrated = calibrate(pair, batches, "temperature", head="1")
    found, raw = logits_of(calibrated, images), logits_of(pair, images)
    temperature = calibrated[1].calibrator.temperature
    assert float(temperature) != 1
    torch.testing.assert_close(found, raw / temperature)


def test_a_head_that_is_not_the_last_layer_is_named(images):
    labels = torch.zeros(ROWS, dtype=torch.long)
    model = MobileNetV2()
    with pytest.raises(InputError, match=r"'features.1' is not the model's .*: that is 'class"):
        calibrate(model, [(images, labels)], head="features.1")
    assert find_head(model, "classifier", inputs=images) == "classifier"  # Dropout is no matter


def test_the_second_output_of_an_inception_can_be_calibrated_instead(images):
    model = Inception()
    with pytest.raises(InputError, match="'aux' is not the model's output: that is 'fc'"):
        find_head(model, "aux", inputs=images)
    assert find_head(rebuilt_models.TupleInception(), "aux", inputs=images) == "aux"


def test_a_squeezenet_has_its_whole_classifier_for_a_head(made, images):
    model = made("SqueezeNet")
    data = collect(model, batches_of(model, images))
    assert type(data.head.layer) is type(SqueezeNet().classifier)
    assert data[0].features.shape[1] == 8 * 8 * 8  # every pixel of its maps
    with torch.no_grad():
        torch.testing.assert_close(data.head(data[0].features), data[0].logits)


def test_a_densenet_without_its_relu_is_what_the_wrong_features_would_have_fitted(dense, images):
    """The gap the check sees is no matter of rounding."""
    model, _, _, wrong = dense
    with torch.no_grad():
        gap = float((model.classifier(wrong) - model(images)).abs().max())
    assert gap > 0.1
    assert isinstance(model, DenseNet)
