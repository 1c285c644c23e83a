"""Files of a version, which every later one must read with the same numbers: tests/fixtures/.

    python tests/kept_files.py     writes those of this version, unless they are there

Calibrators with their reports, a pack, a run that was stopped and one that is finished;
expected.json holds what was read from them.
"""

import json
import warnings
from pathlib import Path

import torch
from torch import nn

import featcal
from featcal import Batch, evaluate, parse
from featcal.core.files import new_folder
from featcal.core.progress import listen
from featcal.data import Pack
from featcal.data.pack import write_pack
from featcal.datasets import Images, Normalisation, Splits
from featcal.losses import AdaFocal
from featcal.train import History, Recipe, train
from featcal.train.loop import write_run

FIXTURES = Path(__file__).parent / "fixtures"
RECIPES = (
    *("clip | temperature", "sample", "ensemble", "parameterised(restarts=1)", "classwise"),
    *("group(partitions=2, min_rows=5)", "proximity", "density", "histogram(bins=4)", "isotonic"),
    *("spline", "bbq", "vector", "matrix", "dirichlet", "svs", "sms", "logit_clip", "norm_clip"),
)
HALF = Normalisation((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))


def made_rows(rows=90, width=4, classes=3):
    """Rows of an overconfident head, from sines: no generator of any version is asked."""
    count = torch.arange(rows * width, dtype=torch.float64)
    features = (3 * torch.sin(count**1.3) + torch.sin(count * 0.7)).reshape(rows, width)
    weight = 2 * torch.sin(torch.arange(classes * width) * 1.7 + 1).reshape(classes, width)
    head = nn.Linear(width, classes)
    head.weight, head.bias = nn.Parameter(weight), nn.Parameter(torch.zeros(classes))
    with torch.no_grad():
        logits = head(features.float())
    noise = 4 * torch.sin(torch.arange(rows * classes) * 2.3).reshape(rows, classes)
    return Batch(None, (logits + noise).argmax(1), features.float()), head


def going_on(folder):
    """The run of the fixtures, from wherever the folder has it to its end."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 3))
    with torch.no_grad():
        for values in model.parameters():
            values.copy_(0.1 * torch.sin(torch.arange(values.numel())).reshape(values.shape))

    def images(rows):
        pixels = (torch.arange(rows * 48) * 37 % 256).to(torch.uint8).reshape(rows, 4, 4, 3)
        return Images(pixels, torch.arange(rows) % 3)

    parts = {"train": images(12), "val": images(6), "test": images(6), "held_out": images(6)}
    whole = {"name": "made", "class_names": ("a", "b", "c"), "val_index": None}
    splits = Splits(**whole, **parts, train_index=torch.arange(12))
    recipe = Recipe(epochs=3, batch=6, seed=1)
    options = {"normalise": HALF, "folder": folder, "checkpoint_every": 0.0}
    return model, train(model, splits, AdaFocal(bins=3), recipe, **options)


class Stopped(BaseException):
    """A kill, as the loop sees it."""


def write(folder):
    """Writes the files of this version, and what is read from them."""

    def stop(label, done, of):
        if label == "training" and done == of - 2:
            raise Stopped

    batch, head = made_rows()
    splits = {"val": batch.rows(slice(0, 60)), "test": batch.rows(slice(60, None))}
    names = {"dataset": "made", "model": "sines", "class_names": ["a", "b", "c"]}
    write_pack(folder / "pack", splits, head=head, meta={"n": [1, 2]}, shard_rows=40, **names)
    (folder / "calibrators").mkdir()
    for number, recipe in enumerate(RECIPES):
        with warnings.catch_warnings(action="ignore"):
            fitted = parse(recipe).fit(splits["val"], head, train=splits["val"], mode="sequential")
        name = f"{number:02d}-{recipe.partition('(')[0].replace(' | ', '-')}.safetensors"
        featcal.save(fitted, folder / "calibrators" / name)
    for name in ("stopped", "finished"):
        (folder / name).mkdir()
    try:
        with listen(stop):
            going_on(folder / "stopped")
    except Stopped:
        pass
    facts = {"loss": "adafocal(bins=3)", "recipe": {"epochs": 3}}
    model, history = going_on(folder / "finished")
    write_run(folder / "finished", model, history, facts)
    (folder / "expected.json").write_text(json.dumps(found_in(folder), indent=1) + "\n")


@torch.no_grad()
def found_in(folder):
    """What is read from the files, as JSON."""
    pack = Pack.open(folder / "pack")
    pack.verify()
    rows = Batch(None, *(torch.cat(parts) for parts in _columns(pack.split("test"))))
    calibrators = {}
    for file in sorted((folder / "calibrators").iterdir()):
        calibrator = featcal.load(file)
        calibrators[file.name] = {
            "report": calibrator.report.as_json(),
            "logits": calibrator(rows.features[:4], pack.head).tolist(),
            "nll": evaluate(rows, calibrator, pack.head).metrics["nll"],
        }
    runs = {name: History.read(folder / name).as_json() for name in ("stopped", "finished")}
    for run in runs.values():
        del run["run"]
    return {
        "pack": {**pack.summary(), "features": float(rows.features.double().sum())},
        "labels": rows.labels.tolist(),
        "calibrators": calibrators,
        "runs": runs,
    }


def _columns(split):
    return zip(*((batch.labels, batch.features) for batch in split), strict=True)


if __name__ == "__main__":
    with new_folder(FIXTURES / featcal.__version__) as made:
        write(made)
