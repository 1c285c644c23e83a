"""What a run is refused for, by name and with what to give instead."""

from dataclasses import replace

import pytest
import torch
from tiny import CLASSES, HALF, RECIPE, made_images, made_splits, small, trained
from torch import nn

from featcal import InputError
from featcal.datasets import ImageData
from featcal.losses import CE, AdaFocal


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"loss": "ce"}, r"loss is 'ce': give parse_loss\('ce'\)$"),
        ({"loss": 3}, r"loss is 3: give a loss, such as CE\(\) or parse_loss\('ce'\)"),
        ({"loss": nn.CrossEntropyLoss()}, r"loss is CrossEntropyLoss: give a loss"),
        ({"loss": CE}, r"loss is the class CE: give a loss, such as CE\(\)"),
        ({"recipe": 3}, r"recipe is 3: give a recipe, such as Recipe\(epochs=35\)"),
        ({"engine": "cpu"}, r"engine is 'cpu': give an engine, such as Engine.best\('cpu'\)"),
        ({"checkpoint_every": "x"}, r"checkpoint_every is 'x': give seconds"),
    ],
)
def test_arguments_of_another_kind_are_named(given, says):
    with pytest.raises(InputError, match=says):
        trained(**given)


def test_images_that_are_not_split_are_named():
    images = made_images(8)
    data = ImageData(name="made", class_names=tuple("abcd"), train=images, test=images)
    with pytest.raises(InputError, match=r"splits is ImageData: give .* split\(load_images"):
        trained(splits=data)


def test_the_pair_of_normalisations_is_named():
    from featcal.train import train

    with pytest.raises(InputError, match=r"normalise is tuple: give one .*\('cifar10'\)\[0\]"):
        train(small(), made_splits(), CE(), RECIPE, normalise=(HALF, HALF))


def test_a_network_that_ends_in_a_softmax_is_refused():
    with pytest.raises(InputError, match=r"gives probabilities .* leave its softmax out"):
        trained(nn.Sequential(small(), nn.Softmax(1)))
    trained(nn.Sequential(small(), nn.LogSoftmax(1)))  # of itself the same again


class Cast(nn.Module):
    """Outputs of another precision, after another last step."""

    def __init__(self, dtype, last):
        super().__init__()
        self.inner, self.dtype, self.last = small(), dtype, last

    def forward(self, images):
        return self.last(self.inner(images)).to(self.dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_outputs_of_any_precision_are_told_from_probabilities(dtype):
    trained(Cast(dtype, torch.relu))  # no number negative, and no sum of 1
    trained(Cast(dtype, lambda z: z - z.mean(1, keepdim=True) + 1 / CLASSES))  # the reverse
    with pytest.raises(InputError, match="leave its softmax out"):
        trained(Cast(dtype, nn.Softmax(1)))


class Doomed(nn.Module):
    """Gives numbers while it learns, and none when it is looked at, as weights far out do."""

    def __init__(self):
        super().__init__()
        self.inner, self.looks = small(), 0

    def forward(self, images):
        self.looks += not self.training and len(images) > 2
        return self.inner(images) * (torch.nan if self.looks else 1.0)


@pytest.mark.parametrize("loss", [CE(), AdaFocal()])
def test_outputs_that_are_no_numbers_end_a_run_like_a_loss_that_is_none(loss, tmp_path):
    says = rf"outputs are NaN or infinite after epoch 1: lower lr \(0.1\), or .* remove {tmp_path}"
    with pytest.raises(InputError, match=says):
        trained(
            *(Doomed(), loss, replace(RECIPE, epochs=2), made_splits(held_out=20)),
            folder=tmp_path,
            checkpoint_every=0.0,
        )
