"""featcal's training loop beside plain PyTorch loops: the same networks, images and order.

Usage: python bench/train.py --data FOLDER [--networks resnet50 ...] [--part seconds|curves]
       python bench/train.py --merge FILE [FILE ...]

FOLDER holds CIFAR-10 in any of the formats of docs/datasets.md. Needs a GPU; seconds want an idle
one, curves do not: they are added to the seconds of an earlier run, and kept by a later one. The
plain loops are what people write by hand, and get the images from the same place: on the GPU
already, shifted and mirrored there, so that what is compared is the loop and not a data loader.
Weights and images are channels-last in all of them.

Seconds are measured in turns: an epoch of ours, some steps of each plain loop, the next epoch of
ours. The first epoch of ours, which compiles, stands apart; the others are given some steps first.

The loss curves are of several seeds. All loops start from the same weights and see the same rows
in the same order, so that what is left between them is rounding. Ours is there a second time with
the compiler as it comes, to tell what its options change, and one network a third time, to tell
how far a loop comes from itself. In float32 the first steps are
compared one by one, before rounding has grown. Each curve is written when it is made, and one on
file by the same means is not made again: a lease that ends leaves what is done. Several processes
share a GPU with --seeds and an --output each; --merge adds their curves to those of --output.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch
from torch._dynamo.utils import counters
from torch.nn.functional import cross_entropy

from featcal.datasets import load_images, normalisations, split
from featcal.losses import CE
from featcal.models import MODELS, build
from featcal.report.compare import versions
from featcal.train import Engine, Recipe, train
from featcal.train.engine import COMPILER, Feed, known_options, set_rate
from featcal.train.history import Batches, Watched, outputs
from featcal.train.loop import Trainer, full_precision
from featcal.train.recipe import Plan

RESULTS = Path(__file__).resolve().parents[1] / "results" / "bench-train.json"
ROUNDS = 5  # times that each loop is timed
WARM, TIMED = 10, 100  # steps of a plain loop: before the clock starts, and under it
# Epochs and seeds. Four were planned and were too few; docs/benchmarks.md says what came of it.
CURVES = {"wrn16x4": (10, range(1, 17)), "resnet50": (3, range(1, 17))}
FIRST = 20  # steps that are compared one by one
OURS, AS_IT_COMES = "featcal", "featcal, compiler as it comes"
AGAIN = f"{AS_IT_COMES}, again"  # how far a loop comes from itself
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

    def epoch(self, epoch):
        """A whole epoch; its mean loss."""
        plan = Plan.of(self.recipe, epoch, self.rows).to(self.device)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for step, rows in enumerate(plan.steps()):
            total += self.step(rows, self.recipe.rate_at(epoch + step / len(plan)))
        return total.item() / self.rows

    def seconds(self, epoch):
        """Of an epoch, by some of its steps."""
        plan = Plan.of(self.recipe, epoch, self.rows).to(self.device)
        for step, rows in zip(range(WARM + TIMED), plan.steps(), strict=False):
            if step == WARM:
                torch.cuda.synchronize()
                started = time.perf_counter()
            self.step(rows, self.recipe.rate_at(epoch + step / len(plan)))
        torch.cuda.synchronize()
        return (time.perf_counter() - started) / TIMED * len(plan)


# --- seconds -------------------------------------------------------------------------------------


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


# --- curves --------------------------------------------------------------------------------------


def our_curve(network, splits, seed):
    """The loss of every epoch, and the accuracy on val at the end."""
    epochs, _ = CURVES[network]
    model = fresh(network, len(splits.class_names), seed)
    history = train(model, splits, CE(), recipe_of(network, epochs, seed), watch_every=epochs)
    return [epoch.loss for epoch in history], history[-1].watched.accuracy


def plain_curve(network, splits, seed, precision):
    epochs, _ = CURVES[network]
    loop = Plain(network, splits, recipe_of(network, epochs, seed), precision)
    losses = [loop.epoch(epoch) for epoch in range(epochs)]
    val = Batches(splits.val, normalisations(splits.name)[0], loop.device)
    return losses, Watched.of(*outputs(loop.model, val, precision)).accuracy


def curve_of(loop, network, splits, seed):
    if loop == OURS:
        return our_curve(network, splits, seed)
    if loop in (AS_IT_COMES, AGAIN):
        with patch.dict(COMPILER, clear=True):
            return our_curve(network, splits, seed)
    return plain_curve(network, splits, seed, PLAIN[loop])


def loops_of(network):
    """The small network is cheap enough for one loop to be made twice."""
    return (OURS, *PLAIN, AS_IT_COMES, *([AGAIN] if network == "wrn16x4" else []))


def with_seed(curves, loop, seed, curve):
    """The curves by loop and one more, in the order of the seeds."""
    known = {**by_seed(curves.get(loop)), seed: curve}
    seeds = sorted(known)
    losses, accuracies = zip(*(known[seed] for seed in seeds), strict=True)
    columns = {"seeds": seeds, "losses": losses, "accuracies": accuracies}
    if loop in (AS_IT_COMES, AGAIN):
        columns["compiler"] = {}  # not what the curves beside it were made with
    return {**curves, loop: columns}


def by_seed(columns):
    """Losses and accuracy of each seed that a loop has on file."""
    if not columns:
        return {}
    pairs = zip(columns["losses"], columns["accuracies"], strict=True)
    return dict(zip(columns["seeds"], pairs, strict=True))


def first_steps(network, splits):
    """The loss of each of the first steps in float32, plain and ours with each of its tricks."""
    recipe = recipe_of(network, 1)
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


# --- the file ------------------------------------------------------------------------------------


MEANS = ("hardware", "compiler", "versions")


def about():
    """What the numbers depend on besides the loops."""
    found = (Engine.best().as_json(), known_options(), versions())
    return dict(zip(MEANS, found, strict=True))


def seconds(options, splits):
    """Every network's seconds, written after each: a lease that ends leaves what is done."""
    learned = learned_before(options.output)
    results = {"made_by": "bench/train.py", **about(), "batch": Recipe().batch, "rows": []}
    for network in options.networks:
        results["rows"].append({**measured(network, splits), **learned.get(network, {})})
        print(json.dumps(results["rows"][-1]), flush=True)
        written(options.output, results)


def learned_before(path):
    """What was learned in an earlier run by network, with what it was made by."""
    rows = json.loads(path.read_text())["rows"] if path.is_file() else []
    parts = ("first_steps", "curves", "made")
    return {row["network"]: {key: row[key] for key in parts if key in row} for row in rows}


def curves(options, splits):
    """First steps and curves of the networks that have some, added to the file of their seconds."""
    for network in (name for name in options.networks if name in CURVES):
        results = opened(options.output)
        row = row_of(results, network)
        if not standing(row, "first_steps", about()):
            note(row, "first_steps", first_steps(network, splits), about())
            written(options.output, results)
        for seed in options.seeds or CURVES[network][1]:
            for loop in loops_of(network):
                add_curve(row, loop, seed, splits)
                written(options.output, results)


def add_curve(row, loop, seed, splits):
    """A curve in the row of its network, unless it is there by the same means."""
    found = standing(row, "curves", about())
    if seed in by_seed(found.get(loop)):
        return
    curve = curve_of(loop, row["network"], splits, seed)
    print(row["network"], loop, f"seed {seed}:", *(f"{loss:.3f}" for loss in curve[0]), flush=True)
    note(row, "curves", with_seed(found, loop, seed, curve), about())


def merge(options):
    """The curves of other files, made by the same means as the seconds of this one, added."""
    results = opened(options.output)
    means = {key: results[key] for key in MEANS}
    for path in options.merge:
        learned = learned_before(path)
        if not any(standing(row, "curves", means) for row in learned.values()):
            raise SystemExit(f"{path} has no curves made as the seconds of {options.output} were")
        for network, theirs in learned.items():
            take_over(row_of(results, network), theirs, means)
    written(options.output, results)


def take_over(ours, theirs, means):
    """What another row has by these means, added to our own."""
    if steps := standing(theirs, "first_steps", means):
        note(ours, "first_steps", steps, means)
    for loop, columns in standing(theirs, "curves", means).items():
        for seed, curve in by_seed(columns).items():
            found = standing(ours, "curves", means)
            note(ours, "curves", with_seed(found, loop, seed, curve), means)


def opened(path):
    if not path.is_file():
        raise SystemExit(f"no {path} to add curves to: begin with --part seconds")
    return json.loads(path.read_text())


def row_of(results, network):
    for row in results["rows"]:
        if row["network"] == network:
            return row
    raise SystemExit(f"no seconds of {network} to add curves to: begin with --part seconds")


def standing(row, part, means):
    """What a row has of a part, if it was made by these means."""
    return row[part] if row.get("made", {}).get(part) == means else {}


def note(row, part, found, means):
    row[part] = found
    row["made"] = {**row.get("made", {}), part: means}


def written(path, results):
    path.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n")


PARTS = {"seconds": seconds, "curves": curves}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, help="folder with CIFAR-10")
    parser.add_argument("--networks", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--part", choices=list(PARTS), help="only this one; both unless told")
    parser.add_argument("--seeds", nargs="+", type=int, help="curves of these alone")
    parser.add_argument("--merge", nargs="+", type=Path, metavar="FILE", help="add their curves")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.merge:
        merge(options)
        return
    if options.data is None:
        parser.error("--data is missing: the folder with CIFAR-10")
    if not torch.cuda.is_available():
        raise SystemExit("bench/train.py measures a GPU, and torch finds none here")
    torch.backends.cudnn.benchmark = True
    splits = split(load_images("cifar10", options.data))
    for part in [options.part] if options.part else PARTS:
        PARTS[part](options, splits)


if __name__ == "__main__":
    main()
