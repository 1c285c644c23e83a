"""Images to train on: CIFAR from its binary archives or sheets, image folders, published splits."""

from featcal.datasets.images import ImageData, Images, Splits
from featcal.datasets.load import load_images
from featcal.datasets.normalise import Normalisation, normalisations
from featcal.datasets.split import imagenet_split, published_split, split

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
