"""Small things to train on: images of four colours, a network of a thousand weights."""

import pytest
import torch
from torch import nn

from featcal.core.progress import listen
from featcal.datasets import Images, Normalisation, Splits
from featcal.losses import CE
from featcal.train import Recipe, train

HALF = Normalisation((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
CLASSES = 4
SIZE = 8
RECIPE = Recipe(epochs=3, batch=16, seed=7)


def made_images(rows, seed=0, size=SIZE):
    """Bytes whose colour tells the class, in noise."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (rows,), generator=g)
    colours = torch.tensor([[200, 60, 60], [60, 200, 60], [60, 60, 200], [130, 130, 130]])
    noise = torch.randint(-40, 41, (rows, size, size, 3), generator=g)
    return Images((colours[labels][:, None, None] + noise).to(torch.uint8), labels)


def made_splits(train=100, val=40, test=40, held_out=None, name="made"):
    return Splits(
        name=name,
        class_names=("red", "green", "blue", "grey"),
        train=made_images(train, 1),
        val=made_images(val, 2),
        test=made_images(test, 3),
        train_index=torch.arange(train),
        val_index=None,
        held_out=None if held_out is None else made_images(held_out, 4),
    )


class Small(nn.Module):
    """A convolution, batch statistics, dropout if asked for, a head."""

    def __init__(self, dropout=0.0, norm=True):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8) if norm else nn.GroupNorm(2, 8)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, images):
        maps = self.norm(self.conv(images)).relu()
        return self.head(self.dropout(maps.mean((2, 3))))


def small(seed=0, **options):
    torch.manual_seed(seed)
    return Small(**options)


def weights_of(model):
    return {key: value.clone() for key, value in model.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def trained(model=None, loss=None, recipe=RECIPE, splits=None, **options):
    model = small() if model is None else model
    splits = made_splits() if splits is None else splits
    loss = CE() if loss is None else loss
    return model, train(model, splits, loss, recipe, normalise=HALF, **options)


class Killed(BaseException):
    """What a kill is to the loop: it ends between two lines."""


def killed_after(steps):
    """A listener that ends the run when so many steps are done."""

    def tell(label, done, of):
        if label == "training" and done == steps:
            raise Killed

    return tell


def run_until_killed(folder, steps, **options):
    with pytest.raises(Killed), listen(killed_after(steps)):
        trained(folder=folder, checkpoint_every=0.0, **options)
