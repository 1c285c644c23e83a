"""torchvision's own classes, short or as they are, through the whole path."""

import pytest
import torch
from model_packages import package
from whole_path import batches_of, trained, whole_path

from featcal import find_head

models = package("torchvision").models

K = 6


def short_efficientnet():
    block = models.efficientnet.MBConvConfig
    blocks = [block(1, 3, 1, 32, 16, 1, 1.0, 1.0), block(4, 3, 2, 16, 24, 1, 1.0, 1.0)]
    return models.EfficientNet(blocks, dropout=0.2, num_classes=K)


def short_vit():
    size = {"image_size": 32, "patch_size": 8, "num_layers": 1, "num_heads": 2}
    return models.VisionTransformer(**size, hidden_dim=16, mlp_dim=32, num_classes=K)


# what makes the model, and the path of its head
CASES = {
    "resnet": (
        lambda: models.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=K),
        "fc",
    ),
    "densenet": (
        lambda: models.DenseNet(4, (2, 2), num_init_features=8, num_classes=K),
        "classifier",
    ),
    "mobilenet_v2": (
        lambda: models.MobileNetV2(K, 0.5, [[1, 16, 1, 1], [4, 24, 2, 2]]),
        "classifier.1",
    ),
    "vit": (short_vit, "heads.head"),
    "squeezenet1_1": (lambda: models.squeezenet1_1(num_classes=K), "classifier"),
    "efficientnet": (short_efficientnet, "classifier.1"),
}


def made(make, images, spread=3.0):
    torch.manual_seed(0)
    return trained(make(), images, spread=spread)


@pytest.mark.no_cover  # see whole_path
@pytest.mark.parametrize("name", CASES)
def test_from_a_trained_model_to_onnx_runtime(name, images, tmp_path):
    make, head = CASES[name]
    # Its ReLU behind the convolution cuts most of the spread off, and the weights make up for it.
    model = made(make, images, spread=1.0 if name == "squeezenet1_1" else 3.0)
    assert find_head(model) == find_head(model, inputs=images[:4]) == head
    exports = name == "densenet"  # it stands for the others
    whole_path(model, batches_of(model, images), tmp_path, exports=exports)
