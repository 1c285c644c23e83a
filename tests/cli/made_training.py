"""A small results/training.json, made up for tests: no network was ever trained for it.

Its digits are chosen to be recognised in tables. Folders of tests share it.
"""

import json

RECIPE = {
    **{"epochs": 40, "batch": 128, "optimizer": "sgd", "lr": 0.1, "momentum": 0.9},
    **{"schedule": "steps", "drops": [149 / 350, 249 / 350], "warmup": 1, "clip_norm": None},
    **{"augment": True, "mixup": 0.0, "smoothing": 0.0, "seed": 1, "reduction": "mean"},
}
LOSSES = {
    "ce": (0.0419, 0.245),
    "brier": (0.0211, 0.981),
    "mmce(variant='weighted', form='published')": (0.0456, 0.233),
    "label_smoothing": (0.0297, None),
    "focal(gamma=3.0)": (0.0148, 1.68),
    "flsd": (0.0155, 0.751),
    "dual_focal(gamma=5.0)": (0.0087, 0.803),
}


def row(recipe, ece, *, c=0.245, accuracy=0.9312, baseline=None, verdict="better", mode=None):
    """One recipe's scores; a baseline gives it a paired difference of `verdict`."""
    steps = [{"name": name} for name in recipe.split(" | ")]
    steps[0]["threshold"] = c
    sign = {"better": -1, "worse": 1}.get(verdict, -0.1)
    difference = {"baseline": baseline, "delta": sign * 0.01, "interval": [-0.02, 0.01]}
    found = {"ece": {**difference, "verdict": verdict}, "nll": {**difference, "verdict": verdict}}
    return {
        "mode": mode or "sequential",
        "recipe": recipe,
        "n": 10000,
        "metrics": {"accuracy": accuracy, "ece": ece, "nll": 5 * ece + 0.1},
        "intervals": {"ece": [ece - 0.002, ece + 0.003], "accuracy": [0.925, 0.935]},
        "differences": found if baseline else {},
        "fit": None if recipe == "none" else {"steps": steps},
    }


def results(ece, c, *, verdict="better", accuracy=0.9312):
    """The four recipes of a run; without a threshold the clip changes nothing."""
    clip = ece if c is None else ece / 3
    verdict = "undecided" if c is None else verdict
    return [
        row("none", ece, accuracy=accuracy),
        row("clip", clip, c=c, baseline="none", verdict=verdict, accuracy=accuracy - 0.0012),
        row("temperature", ece / 4, accuracy=accuracy),
        row("clip | temperature", ece / 5, c=c, baseline="temperature", verdict="undecided"),
    ]


def run(loss, ece, c, *, dataset="cifar10", network="wrn16x4", seed=1, verdict="better", **recipe):
    """One network."""
    return {
        **{"dataset": dataset, "network": network, "loss": loss, "seed": seed},
        "recipe": {**RECIPE, "seed": seed, **recipe},
        **{"precision": "bfloat16", "test_norm": "matched"},
        "rows": {"train": 45000, "val": 5000, "test": 10000},
        **{"seconds": 61.2, "seconds_epoch": 1.2, "features": 256, "classes": 10},
        "curve": [{"epoch": 1, "loss": 1.9, "accuracy": 0.31, "ece": 0.05, "nll": 1.8}],
        "results": results(ece, c, verdict=verdict),
    }


def layers():
    """Another layer clipped, as in the paper's table."""
    rows = [
        ("no clipping", None, None, 0.0434, 0.9505),
        ("last layer", "logits", 4.9, 0.0121, 0.9462),
        ("penultimate", "features", 0.231, 0.0111, 0.9493),
        ("antepenultimate", "layer3", 0.352, 0.0442, 0.9495),
        ("pre-antepenultimate", "layer2", None, 0.0434, 0.9505),
    ]
    keys = ("label", "layer", "threshold")
    made = [
        {**dict(zip(keys, r[:3], strict=True)), "metrics": {"ece": r[3], "accuracy": r[4]}}
        for r in rows
    ]
    where = {"dataset": "cifar10", "network": "resnet50", "loss": "ce", "seed": 1}
    return [{**where, "rows": made}]


def content():
    """Seven losses on one network, a second seed of one, a further loss, two other networks."""
    runs = [run(loss, ece, c) for loss, (ece, c) in LOSSES.items()]
    runs += [
        run("ce", 0.0439, 0.255, seed=2),
        run("adafocal", 0.0101, 1.91),
        run("ce", 0.0921, 2.26, dataset="cifar100", verdict="undecided"),
        run("ce", 0.0434, 0.231, network="resnet50", epochs=60),
    ]
    return {
        "made_by": "experiments/train_grid.py",
        "versions": {"featcal": "0.1.0", "torch": "2.13.0"},
        "hardware": {"device": "NVIDIA H200"},
        "runs": runs,
        "layers": layers(),
    }


def bench():
    """A small results/bench-train.json, as made up as the rest."""
    curves = {
        "featcal": {"seeds": [1, 2], "losses": [[1.8, 1.15], [2.0, 1.25]]},
        "plain bfloat16": {"seeds": [1, 2], "losses": [[1.81, 1.18], [2.01, 1.26]]},
    }
    curves["featcal"]["accuracies"] = [0.5, 0.6]
    curves["plain bfloat16"]["accuracies"] = [0.5, 0.62]
    plain = {"plain bfloat16": [7.3, 7.2, 7.0], "plain float32": [6]}
    first = {"network": "resnet50", "seconds": {"featcal": [2.5, 2.6, 2.4], **plain}}
    other = {"network": "vit", "seconds": {"featcal": [1.0], "plain bfloat16": [3.0]}}
    return {
        "made_by": "bench/train.py",
        "hardware": {"device": "NVIDIA H200", "precision": "bfloat16", "compiled": True},
        "versions": {"torch": "2.13.0"},
        "compiler": {"combo_kernels": True},
        "batch": 128,
        "rows": [
            {**first, "first_epoch": {"seconds": 61.0, "kernels": "new"}, "curves": curves},
            {**other, "first_epoch": {"seconds": 2.9, "kernels": "cached"}},
        ],
    }


def written(folder, made=None):
    """The folder with the file in it."""
    (folder / "training.json").write_text(json.dumps(made or content()))
    return folder
