"""featcal's training loop beside plain PyTorch loops: the same networks, images and order.

Usage: python bench/train.py --data FOLDER [--networks resnet50 ...]

FOLDER holds CIFAR-10 in any of the formats of docs/datasets.md. Needs an idle GPU. The plain loops
are what people write by hand, and get the images from the same place: on the GPU already, shifted
and mirrored there, so that what is compared is the loop and not a data loader. Weights and images
are channels-last in all of them.

Seconds are measured in turns: an epoch of ours, some steps of each plain loop, the next epoch of
ours. The first epoch of ours, which compiles, stands apart; the others are given some steps first.
Loss curves of several seeds that the file holds besides stay in it.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import median

import torch
from torch._dynamo.utils import counters
from torch.nn.functional import cross_entropy

from featcal.datasets import load_images, normalisations, split
from featcal.losses import CE
from featcal.models import MODELS, build
from featcal.report.compare import versions
from featcal.train import Engine, Recipe, train
from featcal.train.engine import Feed, known_options
from featcal.train.recipe import steps_of

RESULTS = Path(__file__).resolve().parents[1] / "results" / "bench-train.json"
ROUNDS = 5  # times that each loop is timed
WARM, TIMED = 10, 100  # steps of a plain loop: before the clock starts, and under it
KEPT = ("first_steps", "curves", "made")  # of an earlier run, by network
OURS = "featcal"
PLAIN = {"plain bfloat16": torch.bfloat16, "plain float32": torch.float32}


def recipe_of(network, epochs, seed=1):
    """A constant rate after the warm-up: a few epochs of a long run, for every loop the same."""
    return Recipe.for_network(
        network, epochs=epochs, seed=seed, drops=(), warmup=1, schedule="steps"
    )


def fresh(network, classes, seed):
    torch.manual_seed(seed)
    return build(network, classes)


class Plain:
    """What a tutorial has: one kernel after the other."""

    def __init__(self, network, splits, recipe, precision):
        self.recipe, self.precision, self.rows = recipe, precision, len(splits.train)
        self.device = torch.device("cuda")
        self.feed = Feed(splits.train, normalisations(splits.name)[0], self.device)
        model = fresh(network, len(splits.class_names), recipe.seed)
        self.model = model.to(self.device, memory_format=torch.channels_last).train()
        settings = {"lr": recipe.lr, "weight_decay": recipe.weight_decay}
        if recipe.optimizer == "adamw":
            self.optimizer = torch.optim.AdamW(self.model.parameters(), **settings)
        else:
            settings["momentum"] = recipe.momentum
            self.optimizer = torch.optim.SGD(self.model.parameters(), **settings)

    def step(self, rows, rate):
        """One update."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        images, labels = self.feed(rows)
        self.optimizer.zero_grad()
        with torch.autocast("cuda", self.precision, enabled=self.precision != torch.float32):
            logits = self.model(images)
        loss = cross_entropy(logits.float(), labels)
        loss.backward()
        self.optimizer.step()

    def seconds(self, epoch):
        """Of an epoch, by some of its steps."""
        steps = steps_of(self.recipe, epoch, self.rows, self.device)
        for step, rows in enumerate(steps[: WARM + TIMED]):
            if step == WARM:
                torch.cuda.synchronize()
                started = time.perf_counter()
            self.step(rows, self.recipe.rate_at(epoch + step / len(steps)))
        torch.cuda.synchronize()
        return (time.perf_counter() - started) / TIMED * len(steps)


def measured(network, splits):
    """Seconds an epoch of each loop, taken in turns on an idle device."""
    recipe = recipe_of(network, ROUNDS + 1)
    loops = {name: Plain(network, splits, recipe, kind) for name, kind in PLAIN.items()}
    found = {name: [] for name in (OURS, *loops)}

    def in_turns(done):
        found[OURS].append(done.seconds)
        if done.epoch <= ROUNDS:
            for name, loop in loops.items():
                found[name].append(loop.seconds(done.epoch))

    counters.clear()
    model = fresh(network, len(splits.class_names), 1)
    train(model, splits, CE(), recipe, watch_every=recipe.epochs, report=in_turns)
    first = found[OURS].pop(0)
    return {
        "network": network,
        "first_epoch": {"seconds": first, "kernels": kernels()},
        "seconds": found,
        "seconds_epoch": {name: median(values) for name, values in found.items()},
    }


def kernels():
    """Whether the kernels were compiled in this run, or came from the cache of an earlier one."""
    return "new" if counters["inductor"]["fxgraph_cache_miss"] else "cached"


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
    rows = json.loads(options.output.read_text())["rows"] if options.output.is_file() else []
    kept = {row["network"]: {key: row[key] for key in KEPT if key in row} for row in rows}
    results = {
        **{"made_by": "bench/train.py", "hardware": Engine.best().as_json()},
        **{"versions": versions(), "compiler": known_options()},
        **{"batch": Recipe().batch, "rows": []},
    }
    for network in options.networks:
        results["rows"].append({**measured(network, splits), **kept.get(network, {})})
        print(json.dumps(results["rows"][-1]), flush=True)
        # After each network: a lease that ends leaves what is done.
        options.output.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()
