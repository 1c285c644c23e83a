"""featcal's training loop beside a plain PyTorch loop: the same networks, images and order.

Usage: python bench/train.py --data FOLDER [--networks resnet50 ...] [--output FILE]

FOLDER holds CIFAR-10 in any of the formats of docs/datasets.md. Needs a GPU. The plain loops are what
people write by hand, and get the images from the same place: on the GPU already, shifted and mirrored
there, so that what is compared is the loop and not a data loader. All loops start from the same weights
and see the same rows in the same order; what is left of a difference in the loss is rounding. Of ours
the last epoch counts, for the first one compiles; of the plain loops the steps after the first ten.
"""

import argparse
import gc
import json
import time
from pathlib import Path

import torch
from featcal.losses import CE
from torch.nn.functional import cross_entropy

from featcal.datasets import load_images, normalisations, split
from featcal.models import MODELS, build
from featcal.report.rows import versions
from featcal.train import Engine, Recipe, train
from featcal.train.feed import Feed
from featcal.train.plan import Plan

RESULTS = Path(__file__).resolve().parents[1] / "results" / "bench-train.json"
WATCHED = "resnet50"  # the network whose loss curves are compared
EPOCHS = {WATCHED: 3}
OTHERS = 2
WARM, TIMED = 10, 110  # steps of a plain loop where no curve is wanted
SEED = 1
PLAIN = {"plain bfloat16": torch.bfloat16, "plain float32": torch.float32}


def recipe_of(network, epochs):
    """A constant rate after the warm-up: a few epochs of a long run, for every loop the same."""
    return Recipe.for_network(
        network, epochs=epochs, drops=(), seed=SEED, warmup=1, schedule="steps"
    )


def fresh(network, classes):
    torch.manual_seed(SEED)
    return build(network, classes)


def ours(network, splits, epochs):
    """Seconds of the last epoch, seconds of the first, and the loss of each."""
    model = fresh(network, len(splits.class_names))
    history = train(model, splits, CE(), recipe_of(network, epochs), watch_every=epochs)
    return history[-1].seconds, history[0].seconds, [epoch.loss for epoch in history]


def plain(network, splits, epochs, precision, steps=None):
    """What a tutorial has: one kernel after the other. Seconds an epoch, and the loss of each."""
    device, recipe = torch.device("cuda"), recipe_of(network, epochs)
    feed = Feed(splits.train, normalisations(splits.name)[0], device)
    model = fresh(network, len(splits.class_names)).to(device).train()
    adam = recipe.optimizer == "adamw"
    optimizer = (torch.optim.AdamW if adam else torch.optim.SGD)(
        model.parameters(),
        lr=recipe.lr,
        weight_decay=recipe.weight_decay,
        **({} if adam else {"momentum": recipe.momentum}),
    )
    seconds, losses, first = [], [], 0
    for epoch in range(epochs):
        plan = Plan.of(recipe, epoch, len(splits.train)).to(device)
        total = torch.zeros((), device=device)
        torch.cuda.synchronize()
        started = time.perf_counter()
        for step, rows in enumerate(plan.steps()):
            if step == WARM:
                torch.cuda.synchronize()
                started, first = time.perf_counter(), WARM
            if step == steps:
                break
            for group in optimizer.param_groups:
                group["lr"] = recipe.rate_at(epoch + step / len(plan))
            images, labels = feed(rows)
            optimizer.zero_grad()
            with torch.autocast("cuda", precision, enabled=precision != torch.float32):
                logits = model(images)
            loss = cross_entropy(logits.float(), labels)
            loss.backward()
            optimizer.step()
            total += loss.detach() * len(labels)
        torch.cuda.synchronize()
        taken = (len(plan) if steps is None else steps) - first
        seconds.append((time.perf_counter() - started) / taken * len(plan))
        losses.append(total.item() / len(splits.train))
    return seconds[-1], losses


def measured(network, splits):
    epochs = EPOCHS.get(network, OTHERS)
    second, first, curve = ours(network, splits, epochs)
    row = {"network": network, "seconds_epoch": {"featcal": second}, "first_epoch": first}
    curves = {"featcal": curve}
    for name, precision in PLAIN.items():
        if network == WATCHED:
            row["seconds_epoch"][name], curves[name] = plain(network, splits, epochs, precision)
        elif precision == torch.bfloat16:
            row["seconds_epoch"][name], _ = plain(network, splits, 1, precision, TIMED)
        gc.collect()
    fastest = min(value for key, value in row["seconds_epoch"].items() if key != "featcal")
    row |= {"ratio": fastest / second, "curves": curves if network == WATCHED else {}}
    print(json.dumps(row), flush=True)
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with CIFAR-10")
    parser.add_argument("--networks", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench/train.py measures a GPU, and torch finds none here")
    torch.backends.cudnn.benchmark = True
    splits = split(load_images("cifar10", options.data))
    rows = [measured(network, splits) for network in options.networks]
    results = {
        "made_by": "bench/train.py",
        "hardware": Engine.best().as_json(),
        "versions": versions(),
        "batch": Recipe().batch,
        "rows": rows,
    }
    options.output.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n")
    print(f"Wrote {options.output}")


if __name__ == "__main__":
    main()
