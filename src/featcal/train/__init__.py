"""Training networks to be calibrated, fast enough to try every loss.

splits = split(load_images("cifar10", "data"))
model = models.build("wrn16x4", 10)
train(model, splits, losses.Focal(gamma=3.0), Recipe().scaled(0.1))
"""

from featcal.train.engine import Engine, processes
from featcal.train.history import Epoch, History, save_history
from featcal.train.loop import train
from featcal.train.recipe import Recipe, published_loss

__all__ = [
    "Engine",
    "Epoch",
    "History",
    "Recipe",
    "processes",
    "published_loss",
    "save_history",
    "train",
]
