"""Trains networks as published, 350 epochs each, and judges what calibration does to them.

    python experiments/train_published.py --data FOLDER --work FOLDER [--only NAME ...]
    python experiments/train_published.py --merge FOLDER ... [--output FILE]

What `featcal train DATASET NETWORK --published` does: steps of the rate, summed losses, gradients
clipped to 2. --work holds a folder for each run: its checkpoint, from which a stopped run goes on,
then `run.json`, once it is judged, and small files for later recipes; with --keep-weights also
`weights.safetensors`, the network as `experiments/shift.py` reads it. Several processes may work on
one list side by side, best under CUDA MPS, each on the next run that nobody has; where there is no
MPS, `--together` trains all in one process, each on a stream of its own. Everything is fitted on
val, never on test. `--merge` puts the finished runs into the result file, beside those that are
there; a run that was judged without `sample` gets it from the logits and the lengths of the
features that it left.
"""

import argparse
import copy
import fcntl
import json
import math
import re
import threading
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from train_grid import ABLATED, LAYERS, MMCE, WITH_INTERVALS, loss_text

import featcal
from featcal.analysis import EntropyGrowth, FeatureValues, Groups, LayerAblation
from featcal.core.batch import Batch
from featcal.datasets import load_images, normalisations, split
from featcal.losses import parse_loss
from featcal.models import build
from featcal.report.compare import Comparison, compare, versions
from featcal.train import Engine, Recipe, published_loss
from featcal.train.engine import known_options
from featcal.train.history import Batches
from featcal.train.loop import Trainer, full_precision
from featcal.train.recipe import EPOCHS, steps_of
from featcal.train.run_folder import KEY

RESULTS = Path(__file__).resolve().parents[1] / "results" / "published.json"
# The recipes, each beside what it adds to; one is fitted jointly as well.
AGAINST = {
    **{"none": None, "temperature": "none", "clip": "none", "clip | temperature": "temperature"},
    **{"sample": "temperature", "clip | sample": "sample"},
}
JOINT, BESIDE_JOINT = "clip | temperature", "temperature"
PAIRS = {"clip": "temperature", "sample": "clip | temperature"}  # and these beside each other
HOW = {"bins": 15, "resamples": 1000, "seed": 0}
CONFIDENT = (0.9, 0.95)
WATCH_EVERY = 10
LARGEST = 16 * 2**20  # bytes of a file worth keeping
WEIGHTS = "weights.safetensors"
NORMS = {"cifar10": ("matched",), "cifar100": ("matched", "reference")}
LONG = ("resnet110", "densenet121", "wrn26x10")
LOSSES = ("focal", "label_smoothing", "brier", MMCE[0], "flsd", "dual_focal")


@dataclass(frozen=True)
class Run:
    """One network to train."""

    dataset: str
    network: str
    loss: str = "ce"
    seed: int = 1

    @property
    def text(self):
        """The loss with the gamma published for this network."""
        return loss_text(self.dataset, self.network, self.loss)

    @property
    def name(self):
        """What it is, as a folder is called."""
        loss = re.sub(r"\W.*", "", self.loss)
        return f"{self.dataset}-{self.network}-{loss}-{self.seed}"


def grid():
    """Every run, the most wanted first."""
    both = ("cifar100", "cifar10")
    small = [Run(dataset, "wrn16x4", seed=seed) for seed in (1, 2) for dataset in both]
    large = [Run(dataset, "resnet50") for dataset in both]
    losses = [Run(dataset, "wrn16x4", loss) for loss in LOSSES for dataset in both]
    others = [Run(d, network) for network in LONG for d in both]
    more = [Run("cifar10", "resnet50", loss) for loss in LOSSES]
    return [*small, *large, *losses, *others, *more]


# --- training ------------------------------------------------------------------------------------


class Training:
    """A run under way, and what is to be said of it."""

    def __init__(self, run, splits, folder, epochs, every):
        self.run, self.splits, self.folder = run, splits, folder
        torch.manual_seed(run.seed)
        self.model = build(run.network, len(splits.class_names))
        recipe = Recipe.for_network(run.network, seed=run.seed).published()
        self.recipe = recipe if epochs == recipe.epochs else recipe.lasting(epochs)
        self.loss = published_loss(parse_loss(run.text))
        self.engine = Engine.best()
        self.pixels = normalisations(splits.name)[0]
        torch.manual_seed(run.seed)
        self.trainer = Trainer(self.model, splits, self.loss, self.recipe, self.engine, self.pixels)
        self.trainer.go_on_from(folder, every, {"network": run.network})
        self.started = time.perf_counter()

    def capture(self):
        """Compiles the network and records its graph, while nothing else is on the device."""
        trainer, epoch = self.trainer, self.trainer.position.epoch
        if not self.engine.graph or epoch >= self.recipe.epochs:
            return
        trainer.step.loss = trainer.loss.at(epoch / self.recipe.epochs)
        rows, *_ = steps_of(self.recipe, epoch, len(self.splits.train), self.engine.device)
        trainer.model.train()
        trainer.take._capture(rows)  # what the first step would do

    def go(self):
        """Trains what is left; the facts."""
        done = self.trainer.position.epoch
        self.history = self.trainer.run(WATCH_EVERY, self._say)
        engine = self.engine.as_json()
        return {
            **{key: getattr(self.run, key) for key in ("dataset", "network", "seed")},
            "loss": repr(self.loss),
            "recipe": {**self.recipe.as_json(), "reduction": self.loss.reduction},
            "falls": list(self.recipe.falls),
            **{key: engine[key] for key in ("precision", "device", "compiled", "graph")},
            "compiler": known_options() if self.engine.compiled else {},
            "rows": {part: len(getattr(self.splits, part)) for part in ("train", "val", "test")},
            "gone_on_after": done,
            "seconds": sum(epoch.seconds for epoch in self.history),
            "seconds_epoch": median(epoch.seconds for epoch in self.history),
            "versions": versions(),
            "features": self.model.feature_size,
            "classes": len(self.splits.class_names),
            "curve": [epoch.as_json() for epoch in self.history if epoch.watched is not None],
        }

    def _say(self, epoch):
        if epoch.watched is None:
            return
        spent = time.perf_counter() - self.started
        print(
            f"{self.run.name} {epoch.epoch}/{self.recipe.epochs} rate {epoch.rate:.4g} loss "
            f"{epoch.loss:.4f} accuracy {epoch.watched.accuracy:.4f} ece {epoch.watched.ece:.4f} "
            f"{epoch.seconds:.2f} s an epoch, {spent:.0f} s",
            flush=True,
        )


# --- judging -------------------------------------------------------------------------------------


def told(row):
    """A row with the intervals people ask for, and without what differs from run to run."""
    for key in ("intervals", "differences"):
        row[key] = {name: row[key][name] for name in WITH_INTERVALS} if row[key] else {}
    for part in filter(None, (row, row["fit"], *(row["fit"] or {"steps": []})["steps"])):
        part.pop("seconds", None)
    return row


def compared(val, test, head):
    """The recipes step by step, and one of them jointly: fitted on val, scored on test."""
    steps = compare(val, test, list(AGAINST), head, mode="sequential", **HOW)
    joint = compare(val, test, [JOINT], head, mode="joint", **HOW)
    return [*steps.rows, *joint.rows]


def judged_rows(rows, joint=None):
    """Every row beside what it adds to, and the pairs that are asked for besides."""
    place = {row.recipe: index for index, row in enumerate(rows) if row is not joint}

    def beside(others):
        against = (BESIDE_JOINT if row is joint else others.get(row.recipe) for row in rows)
        found = Comparison(tuple(rows), tuple(map(place.get, against)))
        return list(map(told, found.as_json()["rows"]))

    modes = ("joint" if row is joint else "sequential" for row in rows)
    told_rows = zip(modes, map(fitted_values, rows), beside(AGAINST), strict=True)
    pairs = beside(PAIRS)
    return {
        "rows": [{"mode": mode, "values": some, **row} for mode, some, row in told_rows],
        "pairs": {recipe: pairs[place[recipe]]["differences"] for recipe in PAIRS},
    }


def fitted_values(row):
    """Threshold and temperature, where it has them; None for a clip of nothing."""
    steps = [] if row.calibrator is None else row.calibrator.steps_in_order()
    keys = ("threshold", "temperature")
    return {key: finite(getattr(step, key)) for step in steps for key in keys if hasattr(step, key)}


def finite(value):
    return float(value) if math.isfinite(value) else None


def entropies(logits):
    p = logits.double().log_softmax(1)
    return -(p.exp() * p).sum(1)


def mean_entropies(before, after, labels):
    """Of all test rows, of wrong ones and of right ones, before and after the clip."""
    right = before.argmax(1) == labels
    groups = {"all": torch.ones_like(right), "wrong": ~right, "right": right}
    old, new = entropies(before), entropies(after)
    return {
        name: {"rows": int(m.sum()), "before": float(old[m].mean()), "after": float(new[m].mean())}
        for name, m in groups.items()
        if m.any()
    }


def premises(test, clip, head):
    """What the paper shows of features and entropies, of confident wrong and right test rows."""
    found = {}
    for level in CONFIDENT:
        groups = Groups.of_data(test, head, level)
        entropy = EntropyGrowth.of(test, clip, head, groups=groups).as_json()
        found[f"entropy_{level:g}"] = entropy
    groups = Groups.of_data(test, head, CONFIDENT[0])
    found[f"values_{CONFIDENT[0]:g}"] = FeatureValues.of(test, head, groups=groups).as_json()
    return found


def whole(data, key):
    return torch.cat([getattr(batch, key) for batch in data])


def judged(training, facts):
    """The results of a run, and the arrays that later recipes need."""
    splits, model, device = training.splits, training.model, training.engine.device
    norms = NORMS[splits.name]
    with full_precision():
        val = featcal.collect(model, Batches(splits.val, training.pixels, device))
        tests = {
            norm: featcal.collect(
                model, Batches(splits.test, normalisations(splits.name, norm)[1], device)
            )
            for norm in norms
        }
    head = copy.deepcopy(model.head).cpu()
    parts = {"val": val, **{f"test_{norm}": test for norm, test in tests.items()}}
    results, clip = {}, None
    for norm, test in tests.items():
        rows = compared(val, test, head)
        clip = next(row.calibrator for row in rows if row.recipe == "clip")
        labels, logits = whole(test, "labels"), whole(test, "logits")
        with torch.no_grad():
            after = clip(whole(test, "features"), head)
        results[norm] = {
            **judged_rows(rows, joint=rows[-1]),
            "entropy": mean_entropies(logits, after, labels),
            **premises(test, clip, head),
        }
    arrays = {}
    kind = np.float32 if facts["classes"] <= 10 else np.float16
    with torch.no_grad():
        for part, data in parts.items():
            features = whole(data, "features").float()
            arrays |= {
                f"{part}_logits": whole(data, "logits").numpy().astype(kind),
                f"{part}_clipped": clip(features, head).numpy().astype(kind),
                f"{part}_labels": whole(data, "labels").numpy().astype(np.uint8),
                f"{part}_l2": features.norm(dim=1).numpy(),
                f"{part}_l1": features.abs().sum(1).numpy(),
            }
    pack = {
        **{f"{part}_features": whole(d, "features").half().numpy() for part, d in parts.items()},
        **{f"{part}_labels": arrays[f"{part}_labels"] for part in parts},
        "weight": head.weight.detach().numpy(),
        "bias": head.bias.detach().numpy(),
    }
    return results, arrays, pack


def ablated(training):
    """The clip at other places of the network, what comes behind it computed again."""
    splits, pixels, device = training.splits, training.pixels, training.engine.device
    parts = (Batches(part, pixels, device) for part in (splits.val, splits.test))
    with full_precision():
        return LayerAblation.of(training.model, *parts, LAYERS).as_json()["rows"]


def keep_weights(training):
    """The network alone, laid out as in a checkpoint: what it is, and its tensors."""
    trainer = training.trainer
    about = {"settings": trainer.checkpoint.settings, "position": {"epoch": trainer.position.epoch}}
    found = training.model.state_dict().items()
    tensors = {f"model.{key}": value.detach().cpu().contiguous() for key, value in found}
    save_file(tensors, training.folder / WEIGHTS, {KEY: json.dumps(about)})


def finish(training, facts, *, keep):
    """Judges a run and writes what it leaves, the record last."""
    began, folder = time.perf_counter(), training.folder
    if keep:
        keep_weights(training)
    results, arrays, pack = judged(training, facts)
    run = training.run
    if (run.dataset, run.network, run.loss) == ABLATED and run.seed == 1:
        facts = {**facts, "layers": ablated(training)}
    about = {key: facts[key] for key in ("dataset", "network", "loss", "seed", "recipe")}
    np.savez_compressed(folder / "logits.npz", **arrays, meta=json.dumps(about))
    if sum(array.nbytes for array in pack.values()) < LARGEST:
        np.savez_compressed(folder / "pack.npz", **pack, meta=json.dumps(about))
    facts = {**facts, "seconds_judging": time.perf_counter() - began, "results": results}
    temporary = folder / "run.json.part"
    temporary.write_text(json.dumps(facts, indent=1, allow_nan=False) + "\n")
    temporary.rename(folder / "run.json")
    for path in folder.glob("*checkpoint*"):
        path.unlink()
    first = results["matched"]["rows"]
    ece = {
        f"{row['recipe']} {row['mode'][:5]}": round(100 * row["metrics"]["ece"], 2) for row in first
    }
    print(
        f"{training.run.name}: done in {facts['seconds']:.0f} s, judged in "
        f"{facts['seconds_judging']:.0f} s; accuracy {first[0]['metrics']['accuracy']:.4f}, "
        f"c {first[2]['values']['threshold']}, ECE {ece}",
        flush=True,
    )


# --- many runs -----------------------------------------------------------------------------------


def claimed(folder):
    """The open lock of a run that nobody else works on, or None; given back when we end."""
    if (folder / "run.json").exists():
        return None
    folder.mkdir(parents=True, exist_ok=True)
    lock = (folder / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        return None
    return None if (folder / "run.json").exists() else lock


def images(options, known, dataset):
    if dataset not in known:
        splits = split(load_images(dataset, options.data / dataset))
        if options.rows:
            some = torch.arange(options.rows)
            parts = {p: getattr(splits, p).rows(some) for p in ("train", "val", "test")}
            splits = replace(splits, **parts)
        known[dataset] = splits
    return known[dataset]


def one_by_one(runs, options):
    known, began = {}, time.monotonic()
    for run in runs:
        if time.monotonic() - began > options.until:
            print(f"{run.name}: no time left", flush=True)
            continue
        folder = options.work / run.name
        lock = claimed(folder)
        if lock is None:
            continue
        splits = images(options, known, run.dataset)
        training = Training(run, splits, folder, options.epochs, options.every)
        with training.engine.at_work():
            finish(training, training.go(), keep=options.keep_weights)
        lock.close()


def together(runs, options):
    """All at once in this process, a stream and a thread for each; what is compiled comes first."""
    known, trainings, judging = {}, [], threading.Lock()
    torch.backends.cudnn.benchmark = True
    for run in runs:
        lock = claimed(options.work / run.name)
        if lock is None:
            continue
        splits = images(options, known, run.dataset)
        began = time.perf_counter()
        training = Training(run, splits, options.work / run.name, options.epochs, options.every)
        training.capture()
        training.lock = lock
        trainings.append(training)
        print(f"{run.name}: ready after {time.perf_counter() - began:.0f} s", flush=True)

    def work(training):
        try:
            device = training.engine.device
            if device.type == "cuda":
                torch.cuda.set_device(device)
                with torch.cuda.stream(torch.cuda.Stream()):
                    facts = training.go()
                    torch.cuda.current_stream().synchronize()
            else:
                facts = training.go()
            with judging:
                finish(training, facts, keep=options.keep_weights)
        except Exception:
            traceback.print_exc()

    threads = [threading.Thread(target=work, args=(training,)) for training in trainings]
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# --- what a run judged without `sample` left -----------------------------------------------------

TINY = 2.0**-12  # of logits among features


def kept(arrays, part, key):
    return torch.from_numpy(arrays[f"{part}_{key}"]).double()


def rows_of(arrays, part, key):
    """Rows with the logits or the features that were kept."""
    labels, values = kept(arrays, part, "labels").long(), kept(arrays, part, key).float()
    return Batch(None, labels, values) if key == "features" else Batch(values, labels)


def stand_in(arrays, part, width):
    """Rows with the logits that were kept, and with features of the lengths that were.

    `sample` reads of features the sums of their absolute values and of their squares. These have
    the logits in front, made tiny; one larger value and `width` equal ones bring both sums to those
    of the network's own.
    """
    small = TINY * kept(arrays, part, "logits")
    total = kept(arrays, part, "l1") - small.abs().sum(1)
    square = kept(arrays, part, "l2").square() - small.square().sum(1)
    mean = total / (width + 1)
    spread = (square - total * mean).clamp(min=0).sqrt()
    large = mean + spread * math.sqrt(width / (width + 1))
    rest = mean - spread / math.sqrt(width * (width + 1))
    features = torch.cat([small, large[:, None], rest[:, None].expand(-1, width)], 1).float()
    return Batch(None, kept(arrays, part, "labels").long(), features)


def head_of(weight, bias):
    head = nn.Linear(*weight.shape[::-1])
    head.load_state_dict({"weight": weight, "bias": bias})
    return head


def stand_in_head(classes, width):
    """Reads the logits in front."""
    weight = torch.eye(classes, classes + width + 1) / TINY
    return head_of(weight, torch.zeros(classes))


def mean_features(arrays, part, width):
    """The mean |feature| of confident wrong and right rows, and its difference's 95 % interval."""
    logits, labels = kept(arrays, part, "logits"), kept(arrays, part, "labels")
    mean = kept(arrays, part, "l1") / width
    sure, right = logits.softmax(1).amax(1) > CONFIDENT[0], logits.argmax(1) == labels
    groups = mean[sure & ~right], mean[sure & right]
    error = math.sqrt(sum(float(group.var()) / len(group) for group in groups))
    hce, lce = (float(group.mean()) for group in groups)
    ends = [hce - lce - 1.96 * error, hce - lce + 1.96 * error]
    return {"hce": hce, "lce": lce, "interval": ends}


def completed(run, folder):
    """A run with what it was judged without: mean features, recipes of features, and pairs.

    The recipes from its features where it left them; else `sample` alone, from logits and lengths.
    """
    arrays, path = np.load(folder / "logits.npz"), folder / "pack.npz"
    means = {n: mean_features(arrays, f"test_{n}", run["features"]) for n in run["results"]}
    key = f"means_{CONFIDENT[0]:g}"
    run = {**run, "results": {n: {**run["results"][n], key: means[n]} for n in means}}
    if all("pairs" in result for result in run["results"].values()):
        return run
    parts = ("val", *(f"test_{norm}" for norm in run["results"]))
    if path.exists():
        pack, recipes = np.load(path), ("sample", "clip | sample")
        head = head_of(*(torch.from_numpy(pack[key]) for key in ("weight", "bias")))
        data = {part: rows_of(pack, part, "features") for part in parts}
    else:
        recipes, width = ("sample",), run["features"]
        head = stand_in_head(run["classes"], width)
        data = {part: stand_in(arrays, part, width) for part in parts}
    clipped = {part: rows_of(arrays, part, "clipped") for part in parts}
    results = {}
    for norm, result in run["results"].items():
        test = f"test_{norm}"
        rows = list(compare(data["val"], data[test], ["temperature", *recipes], head, **HOW))
        twice = compare(clipped["val"], clipped[test], ["none", "temperature"], **HOW)
        names = ("clip", "clip | temperature")
        rows += [replace(row, recipe=name) for row, name in zip(twice, names, strict=True)]
        found = judged_rows(rows)
        new = [row for row in found["rows"] if row["recipe"] in recipes]
        results[norm] = {**result, "rows": [*result["rows"], *new], "pairs": found["pairs"]}
    return {**run, "results": results}


def merged(folders, known=()):
    """A file's worth of the known runs and the finished ones of some folders, in our order."""
    paths = sorted(path for folder in folders for path in folder.glob("*/run.json"))
    found = {run["name"]: run for run in known}
    for path in paths:
        run, name = json.loads(path.read_text()), path.parent.name
        if run["recipe"]["epochs"] != EPOCHS:
            raise SystemExit(f"{name} has {run['recipe']['epochs']} epochs, a trial")
        found[name] = {"name": name, **completed(run, path.parent)}
    order = {run.name: place for place, run in enumerate(grid())}
    runs = sorted(found.values(), key=lambda run: (order.get(run["name"], len(order)), run["name"]))
    return {"made_by": "experiments/train_published.py", "versions": versions(), "runs": runs}


def wanted(options):
    runs = grid()
    if not options.only:
        return runs
    known = {run.name: run for run in runs}
    unknown = [name for name in options.only if name not in known]
    if unknown:
        raise SystemExit(f"--only {' '.join(unknown)}: not in the list; --list shows it")
    return [known[name] for name in options.only]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, help="folder with cifar10/ and cifar100/")
    parser.add_argument("--work", type=Path, help="folder with a folder for each run")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these runs, in this order")
    parser.add_argument("--list", action="store_true", help="show the names of the runs")
    parser.add_argument("--together", action="store_true", help="all at once in one process")
    parser.add_argument("--every", type=float, default=60.0, help="seconds between checkpoints")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="fewer, for a trial")
    parser.add_argument("--rows", type=int, help="of train, val and test each, for a trial")
    parser.add_argument(
        "--until", type=float, default=1e9, help="seconds after which no run begins"
    )
    parser.add_argument("--keep-weights", action="store_true", help="of every finished run")
    parser.add_argument("--merge", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.list:
        print("\n".join(run.name for run in wanted(options)))
    elif options.merge:
        known = json.loads(options.output.read_text())["runs"] if options.output.exists() else ()
        text = json.dumps(merged(options.merge, known), indent=1, allow_nan=False)
        options.output.write_text(text + "\n")
    elif options.data is None or options.work is None:
        parser.error("--data and --work are missing: images, and a folder to work in")
    else:
        (together if options.together else one_by_one)(wanted(options), options)


if __name__ == "__main__":
    main()
