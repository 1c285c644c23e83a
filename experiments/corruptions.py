"""Images made worse on purpose: nine kinds of damage, five strengths each.

In the manner of Hendrycks and Dietterich, "Benchmarking Neural Network Robustness to Common
Corruptions and Perturbations", ICLR 2019; code and strengths are our own. Bytes in, bytes out, as
a camera or a file would have it; what is random depends on kind, strength and seed alone.
"""

import io

import numpy as np
import torch
from PIL import Image
from torch.nn import functional

DIRECTIONS = ((0, 1), (1, 0), (1, 1), (1, -1))  # of motion: rows and columns a step


def gaussian_noise(x, spread, draw):
    return x + spread * torch.randn(x.shape, generator=draw)


def shot_noise(x, photons, draw):
    """What is left of an image of so many photons a pixel and colour, where it is white."""
    return torch.poisson(x * photons, generator=draw) / photons


def impulse_noise(x, share, draw):
    """Some values are lost: half of them become 0, half 1."""
    fate = torch.rand(x.shape, generator=draw)
    return torch.where(fate < share, (fate < share / 2).to(x), x)


def gaussian_blur(x, sigma, _):
    reach = int(3 * sigma + 0.5)
    weights = torch.exp(-torch.arange(-reach, reach + 1).square() / (2 * sigma**2))
    weights = (weights / weights.sum()).expand(3, 1, 1, -1)
    wide = functional.pad(x, (reach,) * 4, "reflect")
    return functional.conv2d(functional.conv2d(wide, weights, groups=3), weights.mT, groups=3)


def motion_blur(x, length, draw):
    """The mean along a line of so many pixels, in one of four directions for each image."""
    size, reach = x.shape[-1], length // 2
    wide = functional.pad(x, (reach,) * 4, "replicate")
    blurred = []
    for down, right in DIRECTIONS:
        line = torch.zeros_like(x)
        for step in range(-reach, reach + 1):
            top, left = reach + down * step, reach + right * step
            weight = min(1.0, (length + 1) / 2 - abs(step))  # half a pixel at each end, if even
            line += weight / length * wide[..., top : top + size, left : left + size]
        blurred.append(line)
    way = torch.randint(len(DIRECTIONS), (len(x),), generator=draw)
    return torch.stack(blurred)[way, torch.arange(len(x))]


def contrast(x, kept, _):
    mean = x.mean((2, 3), keepdim=True)
    return mean + kept * (x - mean)


def brightness(x, more, _):
    return x + more


def pixelation(x, size, _):
    small = functional.interpolate(x, (size, size), mode="bilinear", antialias=True)
    return functional.interpolate(small, x.shape[-2:], mode="nearest-exact")


def jpeg(x, quality, _):
    return torch.stack([compressed(image, quality) for image in x])


def compressed(image, quality):
    file = io.BytesIO()
    pixels = image.mul(255).round().byte().permute(1, 2, 0).contiguous()
    Image.fromarray(pixels.numpy()).save(file, "JPEG", quality=quality)
    return torch.from_numpy(np.array(Image.open(file))).permute(2, 0, 1) / 255


KINDS = {  # how, and the setting of each strength
    "gaussian noise": (gaussian_noise, (0.02, 0.04, 0.06, 0.08, 0.10)),
    "shot noise": (shot_noise, (500, 250, 120, 80, 50)),
    "impulse noise": (impulse_noise, (0.01, 0.02, 0.03, 0.05, 0.07)),
    "gaussian blur": (gaussian_blur, (0.4, 0.6, 0.8, 1.0, 1.3)),
    "motion blur": (motion_blur, (2, 3, 4, 5, 7)),
    "contrast": (contrast, (0.75, 0.5, 0.4, 0.3, 0.15)),
    "brightness": (brightness, (0.05, 0.1, 0.15, 0.2, 0.3)),
    "pixelation": (pixelation, (28, 24, 20, 16, 12)),
    "jpeg": (jpeg, (80, 65, 50, 35, 20)),
}
STRENGTHS = (1, 2, 3, 4, 5)


def corrupted(pixels, kind, strength, seed=0):
    """Images (n, h, w, 3) of bytes, damaged.

    Args:
        pixels: the images as they are.
        kind: a key of KINDS.
        strength: 1 to 5.
        seed: of what is random.
    """
    how, settings = KINDS[kind]
    places = (seed, list(KINDS).index(kind), strength)
    draw = torch.Generator().manual_seed(
        int(np.random.SeedSequence(places).generate_state(1, np.uint64)[0])
    )
    x = how(pixels.permute(0, 3, 1, 2) / 255, settings[strength - 1], draw)
    return x.clamp(0, 1).mul(255).round().byte().permute(0, 2, 3, 1).contiguous()
