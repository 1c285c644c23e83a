"""Images to train on: CIFAR from its binary archives or sheets, image folders, published splits."""

from featcal.datasets.images import (
    ImageData,
    Images,
    Normalisation,
    Splits,
    imagenet_split,
    normalisations,
    published_split,
    split,
)
from featcal.datasets.load import load_images

__all__ = [
    "ImageData",
    "Images",
    "Normalisation",
    "Splits",
    "imagenet_split",
    "load_images",
    "normalisations",
    "published_split",
    "split",
]
