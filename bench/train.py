"""featcal's training loop beside a plain PyTorch loop: the same networks, images and order.

Usage: python bench/train.py --data FOLDER [--networks resnet50 ...] [--part seconds|curves]

Seconds want an idle device; curves do not, and are added to the seconds of an earlier run.

FOLDER holds CIFAR-10 in any of the formats of docs/datasets.md. Needs a GPU. The plain loops are
what people write by hand, and get the images from the same place: on the GPU already, shifted and
mirrored there, so that what is compared is the loop and not a data loader. Of ours the last epoch
counts, for the first one compiles; of the plain loops the steps after the first ten.

The loss curves are of several seeds. Both loops start from the same weights and see the same rows
in the same order, so that what is left between them is rounding; how much rounding may do to a
curve, the spread over the seeds shows. In float32 the first steps are compared one by one, before
rounding has grown.
"""

import argparse
import gc
import json
import time
from pathlib import Path
from statistics import mean, stdev

import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.nn.functional import cross_entropy

from featcal.datasets import load_images, normalisations, split
from featcal.losses import CE
from featcal.models import MODELS, build
from featcal.report.rows import versions
from featcal.train import Engine, Recipe, train
from featcal.train.feed import Feed
from featcal.train.finish import full_precision
from featcal.train.plan import Plan
from featcal.train.run import Trainer
from featcal.train.step import set_rate

RESULTS = Path(__file__).resolve().parents[1] / "results" / "bench-train.json"
EPOCHS = 2  # of ours where no curve is wanted
CURVES = {"wrn16x4": (3, (1, 2, 3, 4)), "resnet50": (2, (1, 2, 3, 4))}  # their epochs and seeds
FIRST = 20  # steps that are compared one by one
WARM, TIMED = 10, 110  # steps of a plain loop where no curve is wanted
PLAIN = {"plain bfloat16": torch.bfloat16, "plain float32": torch.float32}


def recipe_of(network, epochs, seed):
    """A constant rate after the warm-up: a few epochs of a long run, for every loop the same."""
    return Recipe.for_network(
        network, epochs=epochs, seed=seed, drops=(), warmup=1, schedule="steps"
    )


def fresh(network, classes, seed):
    torch.manual_seed(seed)
    return build(network, classes)


def ours(network, splits, epochs, seed=1):
    """Seconds of the last epoch, seconds of the first, and the loss of each."""
    model = fresh(network, len(splits.class_names), seed)
    history = train(model, splits, CE(), recipe_of(network, epochs, seed), watch_every=epochs)
    return history[-1].seconds, history[0].seconds, [epoch.loss for epoch in history]


class Plain:
    """What a tutorial has: one kernel after the other."""

    def __init__(self, network, splits, recipe, precision):
        self.recipe, self.precision, self.rows = recipe, precision, len(splits.train)
        self.device = torch.device("cuda")
        self.feed = Feed(splits.train, normalisations(splits.name)[0], self.device)
        self.model = fresh(network, len(splits.class_names), recipe.seed).to(self.device).train()
        settings = {"lr": recipe.lr, "weight_decay": recipe.weight_decay}
        if recipe.optimizer == "adamw":
            self.optimizer = torch.optim.AdamW(self.model.parameters(), **settings)
        else:
            settings["momentum"] = recipe.momentum
            self.optimizer = torch.optim.SGD(self.model.parameters(), **settings)

    def step(self, rows, rate):
        """One update; the summed loss of its rows."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        images, labels = self.feed(rows)
        self.optimizer.zero_grad()
        with torch.autocast("cuda", self.precision, enabled=self.precision != torch.float32):
            logits = self.model(images)
        loss = cross_entropy(logits.float(), labels)
        loss.backward()
        self.optimizer.step()
        return loss.detach() * len(labels)

    def epoch(self, epoch, steps=None):
        """Seconds of a whole epoch by the steps after the first few, and the loss."""
        plan = Plan.of(self.recipe, epoch, self.rows).to(self.device)
        total, taken = torch.zeros((), device=self.device), len(plan) if steps is None else steps
        for step, rows in zip(range(taken), plan.steps(), strict=False):
            if step == WARM:
                torch.cuda.synchronize()
                started = time.perf_counter()
            total += self.step(rows, self.recipe.rate_at(epoch + step / len(plan)))
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - started) / (taken - WARM) * len(plan)
        return seconds, total.item() / self.rows


def curves_of(network, splits):
    """The losses of every epoch and seed, of our loop and of the plain ones."""
    epochs, seeds = CURVES[network]
    found = {"featcal": [ours(network, splits, epochs, seed)[2] for seed in seeds]}
    for name, precision in PLAIN.items():
        recipes = (recipe_of(network, epochs, seed) for seed in seeds)
        loops = (Plain(network, splits, recipe, precision) for recipe in recipes)
        found[name] = [[loop.epoch(e)[1] for e in range(epochs)] for loop in loops]
    print(network, found, flush=True)
    return {
        name: {
            "seeds": list(seeds),
            "losses": losses,
            "mean": [mean(epoch) for epoch in zip(*losses, strict=True)],
            "deviation": [stdev(epoch) for epoch in zip(*losses, strict=True)],
        }
        for name, losses in found.items()
    }


def first_steps(network, splits):
    """The loss of each of the first steps in float32, plain and ours with each of its tricks."""
    recipe = recipe_of(network, 1, 1)
    rows = list(Plan.of(recipe, 0, len(splits.train)).to(torch.device("cuda")).steps())[:FIRST]
    rates = [recipe.rate_at(step / 100) for step in range(FIRST)]
    with full_precision():
        plain = Plain(network, splits, recipe, torch.float32)
        taken = zip(rows, rates, strict=True)
        found = {"plain": [plain.step(*step).item() / recipe.batch for step in taken]}
        for name, tricks in {"graph": (False, True), "compiled, graph": (True, True)}.items():
            compiled, graph = tricks
            engine = Engine.best("cuda", precision="float32", compiled=compiled, graph=graph)
            model = fresh(network, len(splits.class_names), 1)
            pixels = normalisations(splits.name)[0]
            trainer = Trainer(model, splits, CE(), recipe, engine, pixels)
            trainer.model.train()
            found[name] = []
            for step, rate in zip(rows, rates, strict=True):
                set_rate(trainer.optimizer, rate)
                found[name].append(trainer.take(step).item())
    return found


def measured(network, splits):
    """Seconds an epoch of each loop, one after the other on an idle device."""
    second, first, _ = ours(network, splits, EPOCHS)
    row = {"network": network, "first_epoch": first, "seconds_epoch": {"featcal": second}}
    for name, precision in PLAIN.items():
        loop = Plain(network, splits, recipe_of(network, 1, 1), precision)
        row["seconds_epoch"][name] = loop.epoch(0, TIMED)[0]
        del loop
        gc.collect()
        torch.cuda.empty_cache()
    plain = min(value for key, value in row["seconds_epoch"].items() if key != "featcal")
    return {**row, "ratio": plain / second, "curves": {}}


def kernel_cache():
    """Whether torch.compile had compiled here before: a first epoch is much shorter then."""
    folder = Path(cache_dir())
    return "warm" if folder.is_dir() and any(folder.iterdir()) else "cold"


def seconds(options, splits):
    """Every network's seconds, written after each: a lease that ends leaves what is done."""
    about = {"hardware": Engine.best().as_json(), "versions": versions(), "batch": Recipe().batch}
    about["kernel_cache"] = kernel_cache()
    results = {"made_by": "bench/train.py", **about, "rows": []}
    for network in options.networks:
        results["rows"].append(measured(network, splits))
        print(json.dumps(results["rows"][-1]), flush=True)
        written(options.output, results)


def curves(options, splits):
    """The curves of the networks that have some, added to the file of their seconds."""
    for network in (name for name in options.networks if name in CURVES):
        found = {"first_steps": first_steps(network, splits)}
        print(json.dumps(found), flush=True)
        found["curves"] = curves_of(network, splits)
        results = json.loads(options.output.read_text())
        for row in results["rows"]:
            row.update(found if row["network"] == network else {})
        written(options.output, results)


PARTS = {"seconds": seconds, "curves": curves}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with CIFAR-10")
    parser.add_argument("--networks", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--part", choices=list(PARTS), help="only this one; both unless told")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench/train.py measures a GPU, and torch finds none here")
    torch.backends.cudnn.benchmark = True
    splits = split(load_images("cifar10", options.data))
    for part in [options.part] if options.part else PARTS:
        PARTS[part](options, splits)


def written(path, results):
    path.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()
