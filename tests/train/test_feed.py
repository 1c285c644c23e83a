"""A batch made on the device equals what a transform would do image by image."""

import torch
from tiny import HALF, SIZE, made_images

from featcal.train import Recipe
from featcal.train.recipe import MARGIN, Plan
from featcal.train.step import Feed, mixed_images


def by_hand(images, rows):
    """Pad with zeros, crop, mirror, scale: one image and one pixel row at a time, as published."""
    made = []
    for image, (down, right), mirror in zip(
        rows.images.tolist(), rows.shift.tolist(), rows.mirror.tolist(), strict=True
    ):
        canvas = torch.zeros(SIZE + 2 * MARGIN, SIZE + 2 * MARGIN, 3)
        canvas[MARGIN : MARGIN + SIZE, MARGIN : MARGIN + SIZE] = images.pixels[image].float()
        cut = canvas[down : down + SIZE, right : right + SIZE]
        cut = torch.stack([row.flip(0) for row in cut]) if mirror else cut
        made.append((cut / 255 - 0.5) / 0.25)
    return torch.stack(made).permute(0, 3, 1, 2)


def test_a_batch_is_padded_cut_mirrored_and_normalised():
    images = made_images(30)
    rows = next(Plan.of(Recipe(batch=30), 0, 30).steps())
    found, labels = Feed(images, HALF, torch.device("cpu"))(rows)
    torch.testing.assert_close(found, by_hand(images, rows))
    assert torch.equal(labels, images.labels[rows.images])
    assert found.is_contiguous(memory_format=torch.channels_last)


def test_without_augmentation_a_batch_is_the_images_normalised():
    images = made_images(12)
    rows = next(Plan.of(Recipe(batch=12, augment=False), 0, 12).steps())
    found, _ = Feed(images, HALF, torch.device("cpu"))(rows)
    assert torch.equal(found, HALF(images.pixels[rows.images]))


def test_images_of_any_shape_are_fed():
    images = made_images(5, size=11)
    tall = type(images)(images.pixels[:, :, :7].contiguous(), images.labels)
    rows = next(Plan.of(Recipe(batch=5), 0, 5).steps())
    assert Feed(tall, HALF, torch.device("cpu"))(rows)[0].shape == (5, 3, 11, 7)


def test_mixing_takes_its_share_of_the_image_before():
    x = torch.arange(3.0).reshape(3, 1, 1, 1)
    mixed = mixed_images(x, torch.tensor(0.75)).flatten()
    torch.testing.assert_close(mixed, torch.tensor([0.5, 0.75, 1.75]))
