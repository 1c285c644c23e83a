"""Trains the paper's losses in short runs, and clips other layers of one of the networks.

    python experiments/train_grid.py --data FOLDER [--only TEXT ...] [--share 1/3] [--output FILE]
    python experiments/train_grid.py --merge FILE ... [--output FILE]

FOLDER holds cifar10/ and cifar100/ in any of the formats of docs/datasets.md. Runs that are in the
output already are left out, so that a stopped grid goes on. A GPU is all but necessary. `--share`
takes a part of the runs, for several processes side by side; `--merge` puts their files together.
Thresholds and temperatures are fitted on val, never on test.
"""

import argparse
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch

import featcal
from featcal.analysis import LayerAblation
from featcal.datasets import load_images, normalisations, split
from featcal.losses import parse_loss
from featcal.models import build
from featcal.report.compare import versions
from featcal.train import Engine, Recipe, train
from featcal.train.engine import known_options
from featcal.train.history import Batches
from featcal.train.loop import full_precision

RESULTS = Path(__file__).resolve().parents[1] / "results" / "training.json"
# Dual focal's gamma is published for each data set and network; the small WRN has the big one's.
DUAL = {
    **{("cifar10", "resnet50"): 5.0, ("cifar10", "wrn16x4"): 2.6},
    **{("cifar100", "resnet50"): 5.0, ("cifar100", "wrn16x4"): 3.9},
}
# A sixth to a thirtieth of the published epochs; the rate falls smoothly, as short runs need it.
EPOCHS = {"wrn16x4": 60, "resnet50": 30, "resnet110": 12, "densenet121": 12, "wrn26x10": 12}
SCHEDULE = "cosine"
# The paper's MMCE is weighted and as published, defects included; its other forms stand beside it.
MMCE = ("mmce(variant='weighted', form='published')", "mmce", "mmce(variant='weighted')")
PAPERS = ("ce", "brier", MMCE[0], "label_smoothing", "focal", "flsd", "dual_focal")
LOSSES = (*PAPERS, *MMCE[1:])
TWICE = {"wrn16x4": PAPERS}  # with a second seed; of other networks cross-entropy alone
RECIPES = ("none", "clip", "temperature", "clip | temperature")
AGAINST = (None, 0, 0, 2)
WITH_INTERVALS = ("accuracy", "ece", "adaptive_ece", "nll", "brier")
BINS, RESAMPLES, SEED = 15, 1000, 0
# Where the paper's table clips, by the names it has for the places.
LAYERS = {"antepenultimate": "layer3", "pre-antepenultimate": "layer2"}
ABLATED = ("cifar10", "resnet50", "ce")


def loss_text(dataset, network, loss):
    """The loss as text, with the gamma published for this network."""
    return f"dual_focal(gamma={DUAL[dataset, network]})" if loss == "dual_focal" else loss


@dataclass(frozen=True)
class Run:
    """One network to train."""

    dataset: str
    network: str
    loss: str
    epochs: int
    seed: int = 1

    @property
    def text(self):
        """The loss with the gamma published for this network."""
        return loss_text(self.dataset, self.network, self.loss)

    @property
    def name(self):
        """What it is, in words."""
        return f"{self.dataset} {self.network} {self.text} seed {self.seed}"


def grid(epochs):
    """Every run, the most wanted first."""
    small = [
        Run(dataset, "wrn16x4", loss, epochs["wrn16x4"])
        for loss in LOSSES
        for dataset in ("cifar10", "cifar100")
    ]
    large = [Run("cifar10", "resnet50", loss, epochs["resnet50"]) for loss in LOSSES]
    others = [
        Run("cifar10", network, "ce", epochs[network])
        for network in ("resnet110", "densenet121", "wrn26x10")
    ]
    firsts = [*small, *large, *others]
    seconds = [
        replace(run, seed=2) for run in firsts if run.loss in TWICE.get(run.network, ("ce",))
    ]
    return [*firsts, *seconds]


# --- one run -------------------------------------------------------------------------------------


def trained(run, splits):
    """The network, and what is to be said of how it was made."""
    torch.manual_seed(run.seed)
    model = build(run.network, len(splits.class_names))
    recipe = Recipe.for_network(run.network, epochs=run.epochs, seed=run.seed, schedule=SCHEDULE)
    engine, loss = Engine.best(), parse_loss(run.text)
    started = time.perf_counter()
    history = train(model, splits, loss, recipe, engine=engine, watch_every=5)
    curve = [epoch.as_json() for epoch in history if epoch.watched is not None]
    facts = {
        **{key: getattr(run, key) for key in ("dataset", "network", "seed")},
        "loss": repr(loss),
        "recipe": {**recipe.as_json(), "reduction": loss.reduction},
        **{key: engine.as_json()[key] for key in ("precision", "device", "compiled", "graph")},
        "compiler": known_options() if engine.compiled else {},
        "test_norm": "matched",
        "rows": {part: len(getattr(splits, part)) for part in ("train", "val", "test")},
        "seconds": time.perf_counter() - started,
        "seconds_epoch": median(epoch.seconds for epoch in history),
        "versions": versions(),
        "features": model.feature_size,
        "classes": len(splits.class_names),
        "curve": curve,
    }
    return model, facts


def parts_of(splits, device):
    """Val and test as the network takes them."""
    pixels, test_pixels = normalisations(splits.name)
    return Batches(splits.val, pixels, device), Batches(splits.test, test_pixels, device)


def judged(model, splits, device):
    """The recipes, fitted on val and scored on test; in float32 throughout."""
    with full_precision():
        val, test = (featcal.collect(model, part) for part in parts_of(splits, device))
    head = model.head.cpu()
    found = featcal.compare(
        val, test, list(RECIPES), head, mode="sequential", bins=BINS, resamples=RESAMPLES, seed=SEED
    )
    model.head.to(device)
    # Each beside what it adds to: clip | temperature beside temperature alone.
    found = replace(found, against=AGAINST)
    return [{"mode": "sequential", **told(row)} for row in found.as_json()["rows"]]


def told(row):
    """A row with the intervals people ask for, and without what differs from run to run."""
    for key in ("intervals", "differences"):
        row[key] = {name: row[key][name] for name in WITH_INTERVALS} if row[key] else {}
    row.pop("seconds", None)
    return row


# --- the layer ablation --------------------------------------------------------------------------


def ablated(model, splits, device):
    """The clip at other places of the network, what comes behind it computed again."""
    with full_precision():
        return LayerAblation.of(model, *parts_of(splits, device), LAYERS).as_json()["rows"]


# --- the file ------------------------------------------------------------------------------------


def opened(path):
    """What is there already, or an empty file's worth."""
    if path.is_file():
        return json.loads(path.read_text())
    made = {"made_by": "experiments/train_grid.py", "versions": versions()}
    return {
        **made,
        "hardware": {"device": Engine.best().as_json()["device"]},
        "runs": [],
        "layers": [],
    }


def written(path, results):
    order = {canonical(run): place for place, run in enumerate(grid(EPOCHS))}
    results["runs"].sort(key=lambda run: (order.get(name_of(run), len(order)), name_of(run)))
    path.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n")


def name_of(run):
    epochs = run.get("recipe", {}).get("epochs", "?")
    return f"{run['dataset']} {run['network']} {run['loss']} seed {run['seed']}, {epochs} epochs"


def merged(paths):
    """Several files as one; of a run that is in two, the later file's."""
    parts = [json.loads(path.read_text()) for path in paths]
    runs = {name_of(run): run for part in parts for run in part["runs"]}
    layers = {name_of(entry): entry for part in parts for entry in part["layers"]}
    return {**parts[-1], "runs": list(runs.values()), "layers": list(layers.values())}


def added(results, run, splits):
    """Trains a run and judges it."""
    device = Engine.best().device
    print(f"{run.name}: {run.epochs} epochs ...", flush=True)
    model, facts = trained(run, splits)
    results["runs"].append({**facts, "results": judged(model, splits, device)})
    last = results["runs"][-1]
    ece = {row["recipe"]: round(100 * row["metrics"]["ece"], 2) for row in last["results"]}
    accuracy = last["results"][0]["metrics"]["accuracy"]
    print(f"{run.name}: {last['seconds']:.0f} s, accuracy {accuracy:.4f}, ECE {ece}", flush=True)
    if (run.dataset, run.network, run.loss) == ABLATED and run.seed == 1:
        place = {key: facts[key] for key in ("dataset", "network", "loss", "seed", "recipe")}
        results["layers"].append({**place, "rows": ablated(model, splits, device)})


def wanted(options, results):
    """The runs to make, and of those the share of this process."""
    runs = grid({network: max(1, round(n * options.scale)) for network, n in EPOCHS.items()})
    if options.seeds:
        firsts = [run for run in runs if run.seed == 1]
        runs = [replace(run, seed=seed) for seed in options.seeds for run in firsts]
    runs = [run for run in runs if all(part in f" {run.name} " for part in options.only)]
    if not runs:
        raise SystemExit(f"--only {' '.join(options.only)}: no run of the grid has these words")
    part, of = map(int, options.share.split("/"))
    done = {name_of(run) for run in results["runs"]}
    return [run for run in runs[part - 1 :: of] if canonical(run) not in done]


def canonical(run):
    """A run's name with its loss as a result file has it."""
    loss = parse_loss(run.text)
    return f"{run.dataset} {run.network} {loss!r} seed {run.seed}, {run.epochs} epochs"


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, help="folder with cifar10/ and cifar100/")
    parser.add_argument(
        "--only",
        nargs="+",
        type=lambda text: f" {text} ",
        default=[],
        metavar="TEXT",
        help="runs with these words, such as cifar10 resnet50 ce",
    )
    parser.add_argument("--seeds", nargs="+", type=int, help="all runs with these instead")
    parser.add_argument("--scale", type=float, default=1.0, help="part of the epochs, for a trial")
    parser.add_argument("--share", default="1/1", help="such as 2/3: the second of three parts")
    parser.add_argument(
        "--until", type=float, default=1e9, help="seconds after which no run begins"
    )
    parser.add_argument("--merge", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.merge:
        written(options.output, merged(options.merge))
        return
    if options.data is None:
        parser.error("--data is missing: the folder with cifar10/ and cifar100/")
    started, results, splits = time.monotonic(), opened(options.output), {}
    for run in wanted(options, results):
        if time.monotonic() - started > options.until:
            print(f"{run.name}: no time left")
            continue
        if run.dataset not in splits:
            splits[run.dataset] = split(load_images(run.dataset, options.data / run.dataset))
        added(results, run, splits[run.dataset])
        written(options.output, results)


if __name__ == "__main__":
    main()
