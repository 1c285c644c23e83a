"""A tiny data set, a tiny network, and the words of a command that trains one on the other."""

import textwrap

import made

NETWORK = """
from torch import nn

def tiny(classes, width=4):
    body = nn.Conv2d(3, width, 3, stride=4), nn.BatchNorm2d(width), nn.ReLU()
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))

def twice(classes):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = tiny(classes), tiny(classes)

        def forward(self, images):
            return self.one(images) + self.two(images)

    return Twice()

def bare(classes):
    return nn.Sequential(nn.Conv2d(3, classes, 3, stride=4), nn.AdaptiveAvgPool2d(1), nn.Flatten())

def lists(classes):
    return [nn.Linear(3, classes)]

def nothing():
    return tiny(10)
"""


def write_network(folder):
    (folder / "train_nets.py").write_text(textwrap.dedent(NETWORK))


def words(output, *more, network="train_nets:tiny", epochs=2):
    """A command over the binary archive in data/, 80 images."""
    given = ("train", "cifar10", network, "-o", output, "--data", "data", "--batch", "16")
    return (*given, "--epochs", epochs, *more)


def write_data(folder):
    return made.write_binary(folder / "data", train=80)
