"""The forms in which torchvision's classes end, each on a few channels: written here, not taken."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

K = 5


def conv_bn(inputs, outputs, stride=1):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1, self.conv2 = conv_bn(width, width), nn.Conv2d(width, width, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.relu(x + self.conv2(self.conv1(x)))


class ResNet(nn.Module):
    """pool -> flatten -> fc."""

    def __init__(self, classes=K):
        super().__init__()
        self.stem, self.layer1 = conv_bn(3, 12, 2), Residual(12)
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(12, classes)

    def body(self, x):
        return self.avgpool(self.layer1(self.stem(x))).flatten(1)

    def forward(self, x):
        return self.fc(self.body(x))


class DenseNet(nn.Module):
    """`features` ends in a BatchNorm; a ReLU that is no module stands before the classifier."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(conv_bn(3, 8, 2), nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16))
        self.classifier = nn.Linear(16, K)

    def forward(self, x):
        maps = F.relu(self.features(x), inplace=True)
        return self.classifier(F.adaptive_avg_pool2d(maps, 1).flatten(1))


class SqueezeNet(nn.Module):
    """A map a class by a 1x1 convolution, and then the mean of each."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(conv_bn(3, 8, 2), conv_bn(8, 8, 2))
        pool = nn.AdaptiveAvgPool2d((1, 1))
        self.classifier = nn.Sequential(nn.Dropout(0.5), nn.Conv2d(8, K, 1), nn.ReLU(), pool)

    def forward(self, x):
        return self.classifier(self.features(x)).flatten(1)


class ConvHead(ResNet):
    """pool -> 1x1 convolution -> flatten."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Conv2d(12, K, 1)

    def forward(self, x):
        return self.fc(self.avgpool(self.layer1(self.stem(x)))).flatten(1)


class Outputs(NamedTuple):
    logits: torch.Tensor
    aux_logits: torch.Tensor


class Inception(nn.Module):
    """Two classifiers, of which the second, halfway, is there for training."""

    def __init__(self):
        super().__init__()
        self.stem, self.aux = conv_bn(3, 12, 2), nn.Linear(12, K)
        self.layer1, self.fc = Residual(12), nn.Linear(12, K)

    def both(self, x):
        x = self.stem(x)
        return self.fc(self.layer1(x).mean((2, 3))), self.aux(x.mean((2, 3)))

    def forward(self, x):
        return Outputs(*self.both(x))


class DictInception(Inception):
    def forward(self, x):
        return dict(zip(("aux", "logits"), reversed(self.both(x)), strict=True))


class OneLogit(ResNet):
    """A sigmoid's network: (n, 1) of it."""

    def __init__(self):
        super().__init__(classes=1)


class OneLogitFlat(OneLogit):
    """(n,) of it."""

    def forward(self, x):
        return super().forward(x).squeeze(1)


class LogSoftmax(ResNet):
    """Gives log-probabilities, as for NLLLoss."""

    def forward(self, x):
        return F.log_softmax(super().forward(x), 1)
