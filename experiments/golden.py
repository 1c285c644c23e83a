"""Golden files: what featcal computes, written down so that two checkouts can be compared.

A change that should change nothing is proved so, with BEFORE and AFTER two checkouts:

    PYTHONPATH=BEFORE/src python AFTER/experiments/golden.py write /tmp/before
    PYTHONPATH=AFTER/src python AFTER/experiments/golden.py write /tmp/after
    python AFTER/experiments/golden.py compare /tmp/before /tmp/after

`write DIR` makes one file a case, `write DIR --only 'cli-*'` some of them again, `list` names them.
`compare A B` (or `compare B --against A`) runs nothing, shows the first lines that differ of every
case, and leaves with 1 if any do; `--only` narrows it too. One process, one thread, CPU only.

Only the command line and the public packages are used. Left out of the files are seconds, versions,
addresses in memory and absolute paths. An exception is recorded as its type and message: look for
"raised" in new files. Nothing here is collected by pytest.
"""

import argparse
import contextlib
import csv
import dataclasses
import difflib
import fnmatch
import hashlib
import importlib
import inspect
import io
import json
import os
import re
import sys
import tempfile
import time
import traceback
import warnings
from functools import cache, partial
from pathlib import Path
from unittest import mock

for setting in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[setting] = "1"
os.environ |= {"CUDA_VISIBLE_DEVICES": "", "COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
os.environ |= {"MPLBACKEND": "agg", "WANDB_MODE": "disabled", "TZ": "UTC", "LC_ALL": "C.UTF-8"}

SLOW = 2.0  # seconds of a case worth telling
SHOWN = 12  # differing lines shown of a case
WHOLE = 48  # values of a tensor written in full
PUBLIC = (
    *("featcal", "featcal.metrics", "featcal.methods", "featcal.losses", "featcal.analysis"),
    *("featcal.report", "featcal.data", "featcal.datasets", "featcal.models", "featcal.train"),
    *("featcal.theory", "featcal.theory.printed", "featcal.export", "featcal.page", "featcal.cli"),
    *("featcal.arrays", "featcal.api", "featcal.io", "featcal.bridges", "featcal.bridges.sklearn"),
    *("featcal.bridges.torchmetrics", "featcal.bridges.lightning", "featcal.bridges.loggers"),
)
NETWORK = """
import os
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Stops(nn.Module):
    "Hands on what it gets; where GOLDEN_STOP is set, presses Ctrl-C after so many steps."
    left = None

    def forward(self, images):
        if self.training and "GOLDEN_STOP" in os.environ:
            Stops.left = int(os.environ["GOLDEN_STOP"]) if Stops.left is None else Stops.left - 1
            if Stops.left == 0:
                Stops.left = None
                raise KeyboardInterrupt
        return images

def tiny(classes, width=6):
    body = nn.Conv2d(3, width, 3, stride=2), nn.BatchNorm2d(width), nn.ReLU()
    pool = nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(Stops(), *body, *pool, nn.Linear(width, classes))

def build():
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4))
    inputs, labels = torch.randn(160, 6), torch.randint(0, 4, (160,))
    rows = [TensorDataset(inputs[part], labels[part]) for part in (slice(96), slice(96, None))]
    return model.eval(), dict(zip(("val", "test"), (DataLoader(r, 32) for r in rows)))

def more():
    model, loaders = build()
    names = ["ant", "bee", "cow", "dog"]
    return {"model": model, "loaders": loaders, "class_names": names, "dataset": "made"}
"""


# --- what is written: plain values, without what differs from run to run ---


def digest(data):
    """The first 32 digits of the sha256 of bytes."""
    return hashlib.sha256(data).hexdigest()[:32]


def tensor_text(values):
    """A tensor in full where it is short, else its hash and its first values."""
    import torch

    values = values.detach().cpu().contiguous()
    found = {"dtype": str(values.dtype), "shape": list(values.shape)}
    flat = values.reshape(-1)
    raw = flat.view(torch.uint8) if flat.numel() else flat
    if flat.numel() <= WHOLE:
        return {**found, "values": flat.tolist()}
    return {**found, "first": flat[:4].tolist(), "sha256": digest(raw.numpy().tobytes())}


def plain(value):
    """A value as JSON can hold it."""
    import numpy as np
    import torch

    if value is None or isinstance(value, (bool, int, float, str)):
        return float(value) if isinstance(value, np.floating) else value
    if isinstance(value, torch.Tensor):
        return tensor_text(value)
    if isinstance(value, np.ndarray):
        if value.dtype.kind in "biuf":
            return tensor_text(torch.from_numpy(np.ascontiguousarray(value)))
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(one) for one in (sorted(value) if isinstance(value, set) else value)]
    if hasattr(value, "as_json"):
        return plain(value.as_json())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in dataclasses.fields(value) if field.name != "axes")
        return {name: plain(getattr(value, name)) for name in names}
    return repr(value)


def roots():
    """Absolute paths that may appear in words, and what stands for them."""
    import featcal

    package = Path(featcal.__file__).resolve().parent
    named = {Path.cwd(): "<work>", package: "<featcal>", package.parents[1]: "<checkout>"}
    named |= {Path(tempfile.gettempdir()): "<tmp>", Path(sys.prefix): "<python>"}
    return {str(path): name for path, name in named.items()}


def masked(table):
    """A table drawn with boxes, the column of seconds hidden."""
    lines, column = table.split("\n"), None
    for i, line in enumerate(lines):
        if "┃" in line:
            heads = [cell.strip() for cell in line.split("┃")]
            column = heads.index("seconds") if "seconds" in heads else None
        elif "│" in line and column is not None:
            cells = line.split("│")
            if len(cells) > column:
                cells[column] = re.sub(r"[\d.e+-]", "#", cells[column])
                lines[i] = "│".join(cells)
    return "\n".join(lines)


def steady(text):
    """Text without seconds, versions, addresses and absolute paths."""
    import featcal

    for path, name in sorted(roots().items(), key=lambda pair: -len(pair[0])):
        text = text.replace(path, name)
    text = re.sub(r'("seconds": ?)[\d.eE+-]+', r"\1null", text)
    text = re.sub(r"\b\d+(\.\d+)? (seconds|s\b|min\b|ms\b)(?! at)", r"# \2", text)
    text = re.sub(r"0x[0-9a-f]{6,}", "0x", text)
    text = re.sub(r"\bfeatcal\.(?:\w+\.)+(?=[A-Z])", "featcal.", text)  # classes may move
    text = re.sub(r"\b(featcal|torch|numpy|python|Python|plotly)( |==|/)v?\d[\w.+]*", r"\1 #", text)
    version = getattr(featcal, "__version__", None)
    return masked(text if version is None else text.replace(version, "#"))


def cleaned(value, key=""):
    """A plain value without what differs from run to run."""
    if key in ("seconds", "versions", "rows_per_second", "generator", "created"):
        return "<left out>"
    if isinstance(value, dict):
        return {name: cleaned(one, name) for name, one in value.items()}
    if isinstance(value, list):
        return [cleaned(one) for one in value]
    return steady(value) if isinstance(value, str) else value


def as_text(value):
    """What a file of a case holds; text lines in JSON are split so that a diff shows the line."""

    def split(found):
        if isinstance(found, dict):
            return {key: split(one) for key, one in found.items()}
        if isinstance(found, list):
            return [split(one) for one in found]
        return found.split("\n") if isinstance(found, str) and "\n" in found else found

    return json.dumps(split(cleaned(plain(value))), indent=1, ensure_ascii=False) + "\n"


def attempt(function, *args, **options):
    """What a call gives, or the exception as text."""
    try:
        return function(*args, **options)
    except Exception as error:
        return {"raised": type(error).__name__, "message": str(error)}


# --- the command line, in this process ---


def cli(*words):
    """Runs a command; its exit code, its output (JSON is read) and what it says on the side."""
    from featcal.cli import main

    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2)]
    code = 0
    with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
        try:
            main([str(word) for word in words])
        except SystemExit as stop:
            code = stop.code
    said = []
    for stream in streams:
        stream.flush()
        said.append(stream.buffer.getvalue().decode())
    with contextlib.suppress(json.JSONDecodeError):
        said[0] = json.loads(said[0])
    return {"exit": code, "out": said[0], "err": said[1]}


def contents(path):
    """Hashes of a file, or of every file below a folder; JSON is shown, safetensors by tensor."""
    path = Path(path)
    if path.is_dir():
        files = sorted(one for one in path.rglob("*") if one.is_file())
        return {one.relative_to(path).as_posix(): contents(one) for one in files}
    if not path.exists():
        return "no such file"
    if path.suffix in (".json", ".jsonl"):
        return (
            [json.loads(line) for line in path.read_text().splitlines()]
            if (path.suffix == ".jsonl")
            else json.loads(path.read_text())
        )
    if path.suffix == ".safetensors":
        return tensors(path)
    if path.suffix in (".txt", ".md", ".csv", ".tex"):
        return path.read_text()
    return digest(path.read_bytes())


def tensors(path):
    """The tensors of a safetensors file; its own hash too where no versions are in it."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        notes = {}
        for key, text in sorted((file.metadata() or {}).items()):
            notes[key] = attempt(json.loads, text) if text[:1] in "{[" else text
        found = {name: file.get_tensor(name) for name in sorted(file.keys())}
    whole = {} if "versions" in notes else {"file": digest(path.read_bytes())}
    return {**whole, "metadata": notes, "tensors": found}


# --- made data; every path is relative to a temporary folder ---


def made(rows, classes, size, seed, *, scale=1.0):
    """Rectified features, labels, and the head of a network that is too sure of itself."""
    import torch

    draw = torch.Generator().manual_seed(1000 + classes + size)
    weight = torch.randn(classes, size, generator=draw) * scale
    bias = torch.randn(classes, generator=draw) * 0.3
    draw = torch.Generator().manual_seed(seed)
    features = torch.randn(rows, size, generator=draw).relu()
    features = features * (1 + 2 * torch.rand(rows, 1, generator=draw))
    logits = features @ weight.T + bias
    labels = torch.multinomial((logits / 2).softmax(1), 1, generator=draw)[:, 0]
    return features, labels, weight, bias


PACKS = {  # rows of val and test, classes, features, spread of the weights
    "small": (240, 260, 10, 12, 0.7),
    "half": (200, 220, 10, 12, 0.7),
    "binary": (220, 240, 2, 6, 0.8),
    "logits": (240, 260, 5, 8, 0.8),
    "thousand": (60, 70, 1000, 16, 0.8),
}


@cache
def pack(name):
    """A folder with a pack of splits train, val and test."""
    from featcal import Batch, write_pack

    folder = Path("packs", name)
    folder.parent.mkdir(exist_ok=True)
    if name == "demo":
        return demo(folder)
    val, test, classes, size, scale = PACKS[name]
    splits, head = {}, None
    for seed, (split, rows) in enumerate({"train": 150, "val": val, "test": test}.items()):
        features, labels, *head = made(rows, classes, size, seed, scale=scale)
        if name == "logits":
            splits[split] = Batch(features @ head[0].T + head[1], labels)
        else:
            splits[split] = Batch(None, labels, features.half() if name == "half" else features)
    named = {"class_names": [f"kind {k}" for k in range(classes)]} if name == "small" else {}
    head = None if name == "logits" else tuple(head)
    write_pack(folder, splits, head=head, dataset="made", model=name, shard_rows=100, **named)
    return folder


def demo(folder):
    """Some rows of the pack that travels inside featcal."""
    import torch

    from featcal import Batch, demo_pack, write_pack

    found = demo_pack()
    rows = {}
    for split in ("val", "test"):
        parts = list(found.split(split))
        rows[split] = (
            torch.cat([part.features for part in parts]),
            torch.cat([part.labels for part in parts]),
        )
    cuts = {"train": ("val", 1000, 1300), "val": ("val", 0, 120), "test": ("test", 0, 120)}
    splits = {}
    for name, (split, first, last) in cuts.items():
        features, labels = (values[first:last] for values in rows[split])
        splits[name] = Batch(None, labels, features)
    write_pack(folder, splits, head=found.head, dataset="CIFAR-100", model="demo")
    return folder


def slug(text):
    """A recipe as part of a file's name."""
    return re.sub(r"[^A-Za-z0-9.-]+", "_", text).strip("_")


@cache
def fitted(name, recipe, mode="joint"):
    """Fits by the command line; what it said, and the file."""
    output = Path("fits", name, mode, slug(recipe) + ".safetensors")
    output.parent.mkdir(parents=True, exist_ok=True)
    train = ("--train-split", "train") if "density" in recipe else ()
    flag = ("--sequential",) if mode == "sequential" else ()
    said = cli("fit", pack(name), recipe, "-o", output, *train, *flag, "--json")
    return said, output


def fit_case(name, recipe, mode):
    """One recipe on one pack: the fit, its buffers, its scores, its probabilities."""
    said, output = fitted(name, recipe, mode)
    if said["exit"] != 0:
        return {"fit": said}
    probs = output.with_suffix(".npy")
    told = cli("predict", pack(name), output, "-o", probs)
    scores = cli("eval", pack(name), output, "--json")
    import numpy as np

    given = {"said": told, "probs": np.load(probs), "file": contents(probs)}
    return {"fit": said, "file": contents(output), "predict": given, "eval": scores}


def method_recipes():
    """Every method by its defaults, and as its published code has it."""
    import featcal

    for name, method in featcal.METHODS.items():
        yield name
        if "reference" in inspect.signature(method).parameters:
            yield f"{name}(reference=True)"


VARIANTS = (
    *("temperature(criterion='ece')", "temperature(grid=True)", "clip(criterion='ece')"),
    *("temperature(criterion='nll', grid=True)", "clip(min_accuracy=0.99)"),
    *("clip(min_accuracy=1.0)", "clip(min_accuracy=0.5, criterion='ece')"),
    *("classwise(reading='true')", "classwise(criterion='ece')", "classwise(grid=True)"),
    *("classwise(reading='every')", "classwise(reading='each')", "ensemble(criterion='mse')"),
    *("ensemble(criterion='ece')", "ensemble(criterion='brier')", "group(base='none')"),
    *("group(base='ensemble')", "group(partitions=3, groups=3, min_rows=20)", "group(seed=4)"),
    *("group(held_out=False)", "group(features='clipped')", "group(base='vector')"),
    *("density(neighbours=5)", "density(references=50)", "density(features='clipped')"),
    *("histogram(bins=5)", "histogram(edges='width')", "histogram(reading='classes')"),
    *("histogram(reading='classwise')", "histogram(reading='multiclass')"),
    *("histogram(smooth=False)", "isotonic(reading='top')", "isotonic(reading='classwise')"),
    *("isotonic(between='steps')", "isotonic(between='step')", "isotonic(reading='rows')"),
    *("logit_clip(criterion='ece')", "logit_clip(ties='break')", "logit_clip(ties='allow')"),
    *("parameterised(top=3, hidden=4)", "parameterised(layers=2)", "parameterised(restarts=1)"),
    *("parameterised(seed=3)", "proximity(how='bin_mean_shift')", "proximity(neighbours=3)"),
    *("proximity(mirror=False)", "proximity(how='bins')", "proximity(features='clipped')"),
    *("proximity(references=50)", "spline(knots=3)", "svs(penalty=0.1)", "sms(penalty=0.1)"),
    *("vector(ridge=0.1)", "matrix(off_diagonal=0.1, bias=0.1)", "matrix(ridge=0.01)"),
    *("dirichlet(off_diagonal=0.1, bias=0.1)", "dirichlet(ridge=0.01)"),
    *("clip | logit_clip | temperature", "clip | vector | isotonic", "temperature | histogram"),
    *("clip(min_accuracy=0.99) | temperature", "clip | temperature(criterion='ece')"),
)


def fit_cases():
    for name in ("demo", *PACKS):
        first = "logit_clip" if name == "logits" else "clip"
        for recipe in method_recipes():
            for mode, text in (
                *(("joint", recipe), ("joint", f"{first} | {recipe}")),
                *(("sequential", f"{first} | {recipe}"),),
            ):
                slow = mode == "joint" and text != recipe and "reference" in recipe
                if text == recipe or not (slow or name in ("half", "thousand")):
                    yield f"fit-{name}-{mode}-{slug(text)}", partial(fit_case, name, text, mode)
        yield (
            f"fit-{name}-sequential-temperature",
            partial(fit_case, name, "temperature", "sequential"),
        )
    for recipe in VARIANTS:
        for mode in ("joint", "sequential") if "|" in recipe else ("joint",):
            yield f"variant-{mode}-{slug(recipe)}", partial(fit_case, "small", recipe, mode)


# --- commands ---


def fit_text(name, recipe):
    output = Path("fits", f"text-{name}-{slug(recipe)}.safetensors")
    output.parent.mkdir(exist_ok=True)
    words = ("fit", pack(name), recipe, "-o", output)
    again = cli(*words), cli(*words), cli(*words, "--force", "--fit-split", "test", "--json")
    scores = cli("eval", pack(name), output), cli("eval", pack(name), "--bins", "7", "--json")
    return (
        again,
        scores,
        cli("eval", pack(name)),
        cli("eval", pack(name), output, "--test-split", "val"),
    )


FEW = ("none", "temperature", "clip", "clip | temperature")
QUICK = ("--resamples", "100")


def compare_cases():
    for name in ("demo", *PACKS):
        recipes = ("none", "temperature", "vector") if name == "logits" else FEW
        run = partial(cli_on, "compare", name, *recipes, *QUICK)
        for form in ("json", "csv", "markdown", "latex", "table"):
            yield f"compare-{name}-{form}", partial(run, "--format", form)
        yield f"compare-{name}-folds", partial(run, "--folds", "3", "--json")
    options = {
        "default": (),
        "stepwise": (*FEW, "--sequential", "--json", *QUICK),
        "paper": ("--paper", "--json", *QUICK),
        "paper-table": ("--paper", *QUICK),
        "paper-latex": ("--paper", "--format", "latex", *QUICK),
        "paper-markdown": ("--paper", "--format", "markdown", *QUICK),
        "baseline": (*FEW, "--baseline", "temperature", *QUICK),
        "baseline-json": (*FEW, "--baseline", "temperature", "--json", *QUICK),
        "no-baseline": ("clip", *QUICK),
        "metrics": (*FEW, "--metric", "nll", "--metric", "ece", *QUICK),
        "metrics-csv": (*FEW, "--metric", "nll", "--metric", "aurc", "--format", "csv", *QUICK),
        "sort": (*FEW, "--sort", "brier", *QUICK),
        "sort-given": (*FEW, "--sort", "given", "--format", "csv", *QUICK),
        "no-resamples": (*FEW, "--resamples", "0", "--json"),
        "no-resamples-table": (*FEW, "--resamples", "0"),
        "seed": (*FEW, *QUICK, "--seed", "5", "--json"),
        "bins": (*FEW, *QUICK, "--bins", "5", "--json"),
        "train-split": ("none", "density", "--train-split", "train", *QUICK, "--json"),
        "splits": (*FEW, "--fit-split", "test", "--test-split", "val", *QUICK, "--json"),
        "folds-stepwise": (*FEW, "--folds", "2", "--sequential", "--seed", "3", *QUICK, "--json"),
        "folds-table": (*FEW, "--folds", "4", *QUICK),
        "folds-csv": (*FEW, "--folds", "4", *QUICK, "--format", "csv"),
        "folds-markdown": (*FEW, "--folds", "4", *QUICK, "--format", "markdown"),
        "folds-latex": (*FEW, "--folds", "4", *QUICK, "--format", "latex"),
    }
    for key, words in options.items():
        yield f"compare-options-{key}", partial(cli_on, "compare", "small", *words)
    for suffix in ("csv", "md", "tex", "json", "txt"):
        yield f"compare-file-{suffix}", partial(compare_file, suffix)
    yield "compare-all-methods", partial(every_method, "small")
    yield "compare-all-methods-folds", partial(every_method, "small", "--folds", "2")


def cli_on(command, name, *words):
    return cli(command, pack(name), *words)


def every_method(name, *words):
    every = tuple(method_recipes())
    return cli("compare", pack(name), *every, *words, *QUICK, "--train-split", "train", "--json")


def compare_file(suffix):
    output = Path(f"comparison.{suffix}")
    said = cli("compare", pack("small"), *FEW, *QUICK, "-o", output)
    again = cli("compare", pack("small"), *FEW, *QUICK, "-o", output)
    return said, contents(output), again


def page(path):
    """A page: its text and numbers, and the hash of all of it."""
    text = steady(Path(path).read_text(encoding="utf-8"))
    scripts = re.findall(r"<script[^>]*>(.*?)</script>", text, re.S)
    data = [attempt(json.loads, script) for script in scripts if script.lstrip()[:1] == "{"]
    words = re.sub(r"<(script|style)[^>]*>.*?</\1>", "", text, flags=re.S)
    parts = [digest(script.encode()) for script in scripts]
    return {"sha256": digest(text.encode()), "scripts": parts, "data": data, "page": words}


def report(name, *words, calibrators=()):
    output, summary = Path(f"report-{name}.html"), Path(f"report-{name}.md")
    files = [fitted(name, recipe)[1] for recipe in calibrators]
    words = ("report", pack(name), *files, "-o", output, "--md", summary, "--force", *words)
    said = cli(*words, "--json")
    if said["exit"] == 0:
        said["out"].pop("bytes", None)
        return said, contents(summary), page(output), cli(*words)
    return said


def report_cases():
    for name in ("demo", *PACKS):
        yield f"report-{name}", partial(report, name)
    yield (
        "report-recipes",
        partial(
            report, "small", "--recipe", "isotonic", "--recipe", "clip | vector", "--bins", "8"
        ),
    )
    yield "report-splits", partial(report, "small", "--test-split", "val", "--fit-split", "test")
    yield "report-calibrators", partial(report, "small", calibrators=("temperature", "clip"))
    yield "report-python", report_python


def report_python():
    from featcal import Pack
    from featcal.page import Content, markdown, render

    content = Content.of(Pack.open(pack("small")))
    text = steady(render(content))
    return content, markdown(content), digest(text.encode()), digest(render(content).encode())


def paper_cases():
    listed = ("paper", "--json"), ("paper",), ("paper", "--all", "--json"), ("paper", "--all")
    forms = (
        *(("paper", "--all", "--format", "markdown"), ("paper", "--all", "--format", "csv")),
        *(("paper", "--format", "csv"), ("paper", "--format", "markdown"), ("paper", "absent")),
        ("paper", "--all", "--json", "--results", "nowhere"),
    )
    for words in (*listed, *forms):
        yield f"paper-{slug(' '.join(words[1:])) or 'list'}", partial(cli, *words)
    yield "paper-tables", paper_tables


def paper_tables():
    """Every table by its name."""
    found = cli("paper", "--json")["out"]
    listed = found["tables"] if isinstance(found, dict) else found
    names = [entry["name"] for entry in listed]
    return {name: (cli("paper", name, "--json"), cli("paper", name)) for name in names}


def pack_cases():
    for name in ("demo", *PACKS):
        yield f"pack-{name}", partial(pack_case, name)
    for kind in IMPORTS:
        yield f"import-{kind}", partial(import_case, kind)
    yield "pack-embedded", embedded
    yield "read-files", read_files


def pack_case(name):
    info = cli("pack", "info", pack(name), "--json"), cli("pack", "info", pack(name))
    return info, cli("pack", "info", pack(name), "--verify", "--json"), contents(pack(name))


def embedded():
    """The pack inside featcal at its full size."""
    from featcal import compare, demo_pack

    found = demo_pack()
    rows = compare(found.split("val"), found.split("test"), head=found.head, resamples=100)
    return found.splits, cli("pack", "info", found.path, "--json"), rows


def write_inputs():
    """The files that are imported, in every format."""
    import numpy as np
    import pyarrow
    import pyarrow.parquet
    from safetensors.numpy import save_file

    folder = Path("inputs")
    if folder.exists():
        return folder
    folder.mkdir()
    arrays, features = {}, {}
    for seed, split in enumerate(("val", "test")):
        rows, labels, weight, bias = (part.numpy() for part in made(40, 3, 5, seed))
        logits = rows @ weight.T + bias
        arrays |= {f"{split}_logits": logits, f"{split}_labels": labels}
        features |= {f"{split}_features": rows, f"{split}_labels": labels}
        features |= {"weight": weight, "bias": bias}
        probs = np.exp(logits.astype("f8"))
        probs /= probs.sum(1, keepdims=True)
        for kind, values in {"logit": logits, "prob": probs}.items():
            table = {"id": np.arange(len(labels)), "label": labels}
            table |= {f"{kind}_{name}": values[:, k] for k, name in enumerate("abc")}
            lines = list(zip(*(column.tolist() for column in table.values()), strict=True))
            for suffix, mark in {"csv": ",", "tsv": "\t"}.items():
                (folder / kind).mkdir(exist_ok=True)
                with (folder / kind / f"{split}.{suffix}").open("w", newline="") as file:
                    csv.writer(file, delimiter=mark).writerows([list(table), *lines])
            pyarrow.parquet.write_table(pyarrow.table(table), folder / kind / f"{split}.parquet")
        one = {"y": labels % 2, "score": logits[:, 0]}
        lines = list(zip(*(column.tolist() for column in one.values()), strict=True))
        with (folder / f"{split}-one.csv").open("w", newline="") as file:
            csv.writer(file).writerows([list(one), *lines])
        np.savez(folder / "probs.npz", val_probs=probs, val_labels=labels)
        for key in ("logits", "labels"):
            np.save(folder / f"{split}_{key}.npy", arrays[f"{split}_{key}"])
    np.savez(folder / "logits.npz", **arrays)
    np.savez(folder / "features.npz", **features)
    half = {key: v.astype("f2") if "features" in key else v for key, v in features.items()}
    np.savez(folder / "half.npz", **half)
    save_file(arrays, folder / "logits.safetensors")
    save_file(features, folder / "features.safetensors")
    return folder


IMPORTS = {
    "npz": ("logits.npz",),
    "npz-probs": ("probs.npz",),
    "npz-features": ("features.npz",),
    "npz-half": ("half.npz",),
    "safetensors": ("logits.safetensors",),
    "safetensors-features": ("features.safetensors",),
    "npy": ("val_logits.npy", "val_labels.npy", "test_logits.npy", "test_labels.npy"),
    "csv": ("logit/val.csv", "logit/test.csv", "--ignore", "id"),
    "csv-probs": ("prob/val.csv", "prob/test.csv", "--ignore", "id"),
    "csv-unnamed": ("logit/val.csv", "--ignore", "id", "--probs"),
    "csv-id-left": ("logit/val.csv",),
    "csv-one": ("val=inputs/val-one.csv", "test=inputs/test-one.csv", "--label", "y", "--logits"),
    "tsv": ("logit/val.tsv", "logit/test.tsv", "--ignore", "id", "--logits"),
    "parquet": ("logit/val.parquet", "logit/test.parquet", "--ignore", "id"),
    "parquet-probs": ("prob/val.parquet", "--ignore", "id"),
    "no-labels": ("val_logits.npy",),
    "absent": ("absent.npz",),
}


def import_case(kind):
    folder, output = write_inputs(), Path("imported", kind)
    output.parent.mkdir(exist_ok=True)
    words = [
        folder / word if "/" in word[:6] or word.endswith((".npz", ".npy", "rs")) else word
        for word in IMPORTS[kind]
    ]
    said = cli("pack", "import", *words, "-o", output, "--json")
    if said["exit"] != 0:
        return said
    return said, contents(output), cli("pack", "info", output), cli("compare", output, "--json")


def read_files():
    from featcal.data import import_files, read_files

    folder = write_inputs()
    table = read_files([folder / "logit" / "val.csv"], ignore=["id"])
    made = import_files(folder / "logits.npz", "imported-python")
    return table, read_files([folder / "features.npz"]), made.splits, made.manifest


# --- training ---


@cache
def images():
    """Folders of images of three colours, and CIFAR-10 as its binary archive has it."""
    import numpy as np
    from PIL import Image

    draw = np.random.default_rng(0)
    for part, each in {"train": 20, "test": 8}.items():
        for k, name in enumerate(("blue", "green", "red")):
            place = Path("images", part, name)
            place.mkdir(parents=True)
            for i in range(each):
                pixels = draw.integers(0, 90, (12, 12, 3))
                pixels[..., 2 - k] += 70
                Image.fromarray(pixels.astype(np.uint8)).save(place / f"{i:02d}.png")
    place = Path("cifar", "cifar-10-batches-bin")
    place.mkdir(parents=True)
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        rows = draw.integers(0, 256, (12, 3073), dtype=np.uint8)
        rows[:, 0] = np.arange(12) % 10
        (place / f"{name}.bin").write_bytes(rows.tobytes())
    names = [
        *("airplane", "automobile", "bird", "cat", "deer"),
        *("dog", "frog", "horse", "ship", "truck"),
    ]
    (place / "batches.meta.txt").write_text("\n".join(names) + "\n\n")
    return Path("images")


@cache
def network():
    Path("golden_nets.py").write_text(NETWORK)
    return "golden_nets"


def train_words(output, *more, epochs=1, data="images"):
    kind = ("folder", "--image-size", "8") if data == "images" else ("cifar10",)
    net = f"{network()}:tiny"
    given = ("train", kind[0], net, "-o", output, "--data", data, *kind[1:], "--batch", "16")
    return (*given, "--epochs", epochs, "--device", "cpu", "--val", "12", *more)


@cache
def trained(name, *more, epochs=1, data="images"):
    images()
    return cli(*train_words(Path("runs", name), *more, epochs=epochs, data=data))


def run_case(name, *more, **options):
    """One run: what it said, and every file it left."""
    Path("runs").mkdir(exist_ok=True)
    return trained(name, *more, **options), run_files(Path("runs", name))


def run_files(folder):
    return contents(folder)


def resumed():
    """A run that is stopped and goes on, beside one that is not."""
    Path("runs").mkdir(exist_ok=True)
    images()
    words = train_words(Path("runs", "stopped"), "--checkpoint-every", "0", epochs=3)
    with mock.patch.dict(os.environ, GOLDEN_STOP="5"):
        stopped = cli(*words)
    history = cli("history", Path("runs", "stopped"), "--json")
    on = cli(*words), run_files(Path("runs", "stopped"))
    return stopped, history, on, run_case("straight", epochs=3)


def train_cases():
    runs = {
        "json": ("--json",),
        "text": (),
        "focal": ("--loss", "focal(gamma=2)", "--schedule", "cosine", "--json"),
        "adafocal": ("--loss", "adafocal", "--held-out", "6", "--json"),
        "published": ("--loss", "brier", "--published", "--json"),
        "mixup": ("--mixup", "0.3", "--smoothing", "0.1", "--lr", "0.05", "--json"),
        "no-pack": ("--no-pack", "--seed", "3", "--clip-norm", "1", "--json"),
        "option": ("--network-option", "width=4", "--watch-every", "2", "--json"),
        "bfloat16": ("--precision", "bfloat16", "--json"),
    }
    for name, words in runs.items():
        yield f"train-{name}", partial(run_case, name, *words)
    yield "train-cifar10", partial(run_case, "cifar10", "--json", data="cifar")
    yield (
        "train-cifar10-reference",
        partial(run_case, "cifar10-reference", "--test-norm", "reference", "--json", data="cifar"),
    )
    yield "train-resumed", resumed
    yield "train-history", histories
    yield "train-python", train_python
    yield "train-losses", train_losses
    yield "train-recipes", recipes


def histories():
    run_case("json", "--json")
    run_case("straight", epochs=3)
    folders = Path("runs", "json"), Path("runs", "straight")
    said = cli("history", *folders, "--json", "-o", "history.svg")
    return said, cli("history", *folders), cli("history", "nowhere"), contents("history.svg")


def splits():
    from featcal.datasets import load_images, split

    images()
    return split(load_images("folder", "images", image_size=8), val=12, held_out=6)


def weights(model):
    return {name: tensor_text(value) for name, value in model.state_dict().items()}


def train_losses():
    """One epoch of every loss from the same weights."""
    import torch

    from featcal.losses import LOSSES, parse_loss
    from featcal.train import Engine, Recipe, published_loss, train

    network()
    build = importlib.import_module("golden_nets").tiny
    found = {}
    for name in LOSSES:
        for loss in (parse_loss(name), published_loss(parse_loss(name))):
            torch.manual_seed(0)
            model = build(3)
            recipe = Recipe(epochs=1, batch=16)
            engine = Engine.best("cpu", compiled=False)
            epochs = attempt(train, model, splits(), loss, recipe, engine=engine)
            found[repr(loss)] = epochs, digest(json.dumps(weights(model)).encode())
    return found


def train_python():
    """One epoch of every kind of network at its smallest."""
    import torch

    from featcal import losses, models
    from featcal.train import Engine, Recipe, train

    sizes = {
        "resnet50": {"blocks": (1, 1, 1, 1), "width": 4},
        "resnet110": {"blocks": (1, 1, 1, 1), "width": 2},
        "densenet121": {"blocks": (1, 1, 1, 1), "growth": 4},
        "wrn26x10": {"depth": 8, "width": 1},
        "wrn16x4": {"depth": 10, "width": 1},
        "vit": {"image_size": 8, "width": 12, "depth": 1, "heads": 2},
    }
    found = {}
    for name, options in sizes.items():
        torch.manual_seed(0)
        model = models.build(name, 3, **options)
        fresh = digest(json.dumps(weights(model)).encode())
        recipe = Recipe.for_network(name, epochs=1, batch=16)
        engine = Engine.best("cpu", compiled=False)
        epochs = attempt(train, model, splits(), losses.CE(), recipe, engine=engine)
        model.eval()
        with torch.no_grad():
            logits = model(torch.ones(2, 3, 8, 8))
            features = model.features(torch.ones(2, 3, 8, 8))
        end = {"logits": logits, "features": features, "weights": weights(model)}
        found[name] = {"fresh": fresh, "epochs": epochs, **end}
    return found


def recipes():
    from featcal.models import MODELS
    from featcal.train import Recipe

    base = {"default": Recipe(), "tenth": Recipe().scaled(0.1), "seven": Recipe().lasting(7)}
    base["published"] = Recipe().published()
    return base | {name: Recipe.for_network(name) for name in MODELS}


def collect_cases():
    for name in ("build", "more"):
        yield f"collect-{name}", partial(collected, name)
    yield "collect-layer", partial(collected, "build", "--layer", "1")
    yield "collect-shards", partial(collected, "build", "--shard-rows", "20")
    yield "collect-absent", partial(collected, "absent")
    yield "export-onnx", exported
    yield "python-attach", attached


@cache
def collected(name, *words):
    output = Path("collected", slug(" ".join((name, *words))))
    output.parent.mkdir(exist_ok=True)
    said = cli("collect", f"{network()}:{name}", "-o", output, *words, "--json")
    return said, contents(output), cli("pack", "info", output, "--json")


def exported():
    """ONNX files: what is said of them; the files hold traces of source lines, so no hashes."""
    found = {}
    for recipe in ("temperature", "clip | temperature"):
        file = fitted("small", recipe)[1]
        words = (pack("small"), file, "-o", f"{slug(recipe)}.onnx", "--probabilities", "--json")
        found[recipe] = cli("export", *words)
        if isinstance(found[recipe]["out"], dict):
            found[recipe]["out"].pop("bytes", None)
    return found


def attached():
    """calibrate, collect, attach, detach, save and load by Python."""
    import torch

    import featcal

    network()
    model, loaders = importlib.import_module("golden_nets").build()
    head, loader = featcal.find_head(model), loaders["val"]
    calibrated = featcal.calibrate(model, loader, "clip | temperature")
    inputs = torch.ones(3, 6)
    found = {"head": head, "raw": model(inputs), "calibrated": calibrated(inputs)}
    batches, last = featcal.collect(model, loader), None
    if isinstance(batches, tuple):
        batches, last = batches
    recipe = featcal.parse("vector").fit(batches, last)
    featcal.save(recipe, "vector.safetensors")
    again = featcal.load("vector.safetensors")
    found |= {"report": recipe.report, "again": repr(again), "file": contents("vector.safetensors")}
    on = attempt(featcal.attach, model, again)
    found["attached"] = on(inputs) if callable(on) else on
    off = attempt(featcal.detach, on)
    found["detached"] = off(inputs) if callable(off) else off
    return found


# --- the library's own numbers ---


def library_cases():
    yield "metrics", metric_values
    yield "losses", loss_values
    yield "theory", theory_values
    yield "datasets", dataset_values
    yield "arrays", array_values
    yield "diagrams", diagrams
    for name in ("demo", *PACKS):
        yield f"analysis-{name}", partial(analyses, name)
    yield "analysis-layers", layers
    yield "recipes-read", recipe_texts


def metric_values():
    """Every metric on several kinds of made predictions."""
    import torch

    from featcal import metrics

    found = {}
    for classes, rows in ((2, 80), (7, 300), (100, 150)):
        features, labels, weight, bias = made(rows, classes, 6, 3)
        logits = features @ weight.T + bias
        ties = logits.round()
        for kind, values in {"made": logits, "ties": ties, "half": logits.half()}.items():
            mine = found[f"{kind} {classes}"] = {}
            for name in metrics.__all__:
                function = getattr(metrics, name)
                if inspect.isclass(function):
                    of = getattr(function, "of", None)
                    mine[name] = None if of is None else attempt(of, logits=values, labels=labels)
                elif not name.endswith("_of"):
                    mine[name] = attempt(function, logits=values, labels=labels)
                    probs = values.double().softmax(1)
                    mine[f"{name}, probs"] = attempt(function, probs, labels)
                    if "bins" in inspect.signature(function).parameters:
                        mine[f"{name}, 4 bins"] = attempt(function, probs, labels, bins=4)
                    if "reference" in inspect.signature(function).parameters:
                        mine[f"{name}, reference"] = attempt(
                            function, probs, labels, reference=True
                        )
                else:
                    ordered = metrics.Ordered.of(logits=values, labels=labels)
                    mine[name] = attempt(function, ordered)
    bad = torch.tensor([[0.2, 0.9], [0.5, 0.5]]), torch.tensor([0, 1])
    found["refused"] = {
        "sum": attempt(metrics.ece, *bad),
        "label": attempt(metrics.ece, logits=bad[0], labels=torch.tensor([0, 2])),
        "rows": attempt(metrics.nll, logits=bad[0], labels=torch.tensor([0])),
        "nan": attempt(metrics.brier, logits=bad[0] * float("nan"), labels=bad[1]),
    }
    return found


def loss_values():
    """Every loss and its gradient; hard and soft labels, mean and sum."""
    import torch

    from featcal.losses import LOSSES, parse_loss

    features, labels, weight, bias = made(50, 6, 5, 4)
    soft = torch.eye(6)[labels] * 0.9 + 0.1 / 6
    found = {}
    for name in LOSSES:
        for text in (name, f"{name}(reduction='sum')"):
            for kind, target in {"hard": labels, "soft": soft}.items():
                logits = (features @ weight.T + bias).requires_grad_()

                def both(text=text, logits=logits, target=target):
                    value = parse_loss(text)(logits, target)
                    value.backward()
                    return value, logits.grad

                found[f"{text}, {kind}"] = attempt(both)
        found[f"{name}, text"] = repr(parse_loss(name)), type(parse_loss(name)).arguments()
    return found


def theory_values():
    """Every formula on a grid."""
    import torch

    from featcal import theory
    from featcal.theory import printed

    grid = torch.tensor([0.05, 0.3, 0.9, 1.0, 1.7, 4.0])
    given = {
        "c": grid[:, None],
        "s": grid[None, :],
        "factor": 2.5,
        "s_low": 0.5,
        "s_high": grid[3:],
    }
    found = {}
    for module in (theory, printed):
        names = getattr(module, "__all__", sorted(vars(module)))
        for name in names:
            formula = getattr(module, name)
            if name.startswith("_") or inspect.isclass(formula) or not callable(formula):
                continue
            wanted = inspect.signature(formula).parameters
            if set(wanted) <= set(given):
                key = f"{module.__name__}.{name}"
                found[key] = attempt(formula, **{k: given[k] for k in wanted})
                found[f"{key}, floats"] = attempt(formula, **dict.fromkeys(wanted, 1.3))
    return found


def dataset_values():
    from featcal import datasets

    images()
    found = {"folder": datasets.load_images("folder", "images", image_size=8)}
    found["resized"] = datasets.load_images("folder", "images", image_size=8, resize=10)
    found["cifar10"] = attempt(datasets.load_images, "cifar10", "cifar")
    found["split"] = datasets.split(found["folder"], val=10, held_out=5)
    found["published"] = datasets.published_split(), datasets.published_split(60, 10)
    found["imagenet"] = datasets.imagenet_split()
    for name in ("cifar10", "cifar100"):
        for norm in ("matched", "reference"):
            found[f"{name} {norm}"] = datasets.normalisations(name, norm)
    found["measured"] = datasets.normalisations("folder", measure=found["folder"].train)
    found["absent"] = attempt(datasets.load_images, "cifar100", "nowhere")
    return found


def array_values():
    """The estimator of arrays, and that of the scikit-learn bridge."""
    import numpy as np

    from featcal.arrays import Calibrated

    features, labels, weight, bias = (part.numpy() for part in made(120, 4, 6, 5))
    logits = features @ weight.T + bias
    probs = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    names = np.array(["a", "b", "c", "d"])[labels]
    inputs = {
        "logits": (Calibrated("temperature"), logits, labels),
        "probs": (Calibrated("isotonic", kind="probs"), probs, labels),
        "names": (Calibrated("vector", classes=["a", "b", "c", "d"]), logits, names),
        "head": (Calibrated("clip | temperature", head=(weight, bias)), features, labels),
        "features": (
            Calibrated("clip", head=(weight, bias), mode="sequential"),
            *(features, labels),
        ),
    }

    def told(estimator, rows, wanted):
        estimator.fit(rows, wanted)
        asked = ("predict_proba", "predict_log_proba", "decision_function", "predict")
        found = {name: getattr(estimator, name)(rows) for name in asked}
        found |= {"repr": repr(estimator), "score": estimator.score(rows, wanted)}
        return found | {"params": sorted(estimator.get_params())}

    return {name: attempt(told, *given) for name, given in inputs.items()}


def diagrams():
    """Pictures: their hashes, and the numbers behind them."""
    from featcal import Pack
    from featcal.analysis import BeforeAfter, UnitMeans
    from featcal.report import ReliabilityDiagram, save_comparison

    features, labels, weight, bias = made(200, 4, 6, 6)
    logits = features @ weight.T + bias
    one = ReliabilityDiagram.of(logits=logits, labels=labels, title="one")
    two = ReliabilityDiagram.of(logits=logits / 2, labels=labels, title="two")
    files = save_comparison([one, two], "diagrams")
    found = {str(path): contents(path) for path in files}
    opened = Pack.open(pack("small"))
    for analysis in (BeforeAfter.of(opened, None, resamples=100), UnitMeans.of(opened)):
        drawn = io.BytesIO()
        figure = analysis.plot().axes
        while not hasattr(figure, "figure"):
            figure = figure[0]
        figure.figure.savefig(drawn, format="png")
        found[type(analysis).__name__] = digest(drawn.getvalue())
    return found, one.bins, two.bins


def analyses(name):
    """Every analysis of a pack, with the calibrator that its recipe gives."""
    from featcal import Pack, analysis, load

    opened, found = Pack.open(pack(name)), {}
    recipe = "vector" if name == "logits" else "clip | vector"
    calibrator = load(fitted(name, recipe, "sequential")[1])
    plain_ones = ("Groups", "UnitMeans", "FeatureValues", "ConfidentCounts", "GroupCalibration")
    for key in plain_ones:
        found[key] = attempt(getattr(analysis, key).of, opened)
    for key in ("ChangedPredictions", "ConfidentCounts", "EntropyGrowth", "GroupCalibration"):
        found[f"{key} after"] = attempt(getattr(analysis, key).of, opened, calibrator)
    found["BeforeAfter"] = attempt(analysis.BeforeAfter.of, opened, calibrator, resamples=100)
    found["BandedDiagram"] = attempt(analysis.BandedDiagram.of, opened, resamples=100, bins=6)
    found["one class"] = attempt(analysis.BandedDiagram.of, opened, of_class=1, resamples=100)
    found["Groups at 0.7"] = attempt(analysis.Groups.of_data, opened, confidence=0.7)
    found["UnitMeans reference"] = attempt(analysis.UnitMeans.of, opened, units=5, reference=True)
    found["FeatureValues signed"] = attempt(analysis.FeatureValues.of, opened, signed=True)
    found["ClipSweep"] = attempt(analysis.ClipSweep.of, opened, points=7)
    found["ClipSweep ece"] = attempt(analysis.ClipSweep.of, opened, points=5, criterion="ece")
    found["ClipSweep several"] = attempt(analysis.ClipSweep.several, opened, points=5)
    return found


def layers():
    from featcal.analysis import LayerAblation

    network()
    model, loaders = importlib.import_module("golden_nets").build()
    return LayerAblation.of(model, loaders["val"], loaders["test"], ["1", "3"])


def recipe_texts():
    """What recipes and losses are read as, or refused for."""
    import featcal
    from featcal.losses import parse_loss

    texts = (
        *("clip | temperature", "clip(min_accuracy=0.99)", "temprature", "clip()", "", "clip |"),
        *("clip(0.5)", "clip(threshold=1)", "clip(min_accuracy=2)", "clip(min_accuracy='a')"),
        *("temperature(criterion='x')", "histogram(bins=0)", "__import__('os')", "clip + vector"),
        *("group(base='x')", "proximity(how='x')", "isotonic(reading='x')", "none", "clip | clip"),
        *("parameterised(top=0)", "density(neighbours=0)", "spline(knots=1)", "svs(penalty=-1)"),
    )
    losses = ("ce", "focal(gamma=2)", "focal(gamma=-1)", "focle", "mmce(form='x')", "flsc(1)")
    found = {text: repr(attempt(featcal.parse, text)) for text in texts}
    every = {name: repr(attempt(featcal.parse, name)) for name in method_recipes()}
    return found, every, {text: repr(attempt(parse_loss, text)) for text in losses}


# --- the public surface ---


def surface_cases():
    for name in PUBLIC:
        yield f"surface-{name}", partial(surface, name)
    yield "surface-commands", commands
    yield "surface-help", helps


def parameters(function):
    """A signature without its annotations, which may be spelled another way."""
    found = inspect.signature(function)
    bare = [one.replace(annotation=one.empty) for one in found.parameters.values()]
    text = str(found.replace(parameters=bare, return_annotation=found.empty))
    return re.sub(r"featcal\.(\w+\.)*", "", text)


def described(thing):
    """A function's signature; a class with its public members; the type of anything else."""
    if inspect.ismodule(thing):
        return "module"
    if not callable(thing):
        if isinstance(thing, dict):
            return {key: getattr(value, "__name__", "partial") for key, value in thing.items()}
        return type(thing).__name__
    if not inspect.isclass(thing):
        return attempt(parameters, thing)
    members = {}
    for owner in reversed(thing.__mro__):
        if not owner.__module__.startswith("featcal"):
            continue
        for name, member in vars(owner).items():
            if name.startswith("_"):
                continue
            if callable(getattr(thing, name, None)):
                members[name] = attempt(parameters, getattr(thing, name))
            elif isinstance(member, property) or type(member).__name__ == "cached_property":
                members[name] = "property"
            elif type(member).__name__ != "member_descriptor":
                members[name] = re.sub(r"featcal\.(\w+\.)*", "", repr(member))
    return {"call": attempt(parameters, thing), "members": dict(sorted(members.items()))}


def declare_boxes():
    """What torchvision asks of its compiled part, which does not load beside every torch."""
    import torch

    with contextlib.suppress(Exception):
        LIBRARY.append(torch.library.Library("torchvision", "FRAGMENT"))
        for name in ("nms", "qnms"):
            LIBRARY[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


LIBRARY = []  # kept: what is declared lives as long as it


def surface(name):
    if name.startswith("featcal.bridges.") and not LIBRARY:
        declare_boxes()
    module = importlib.import_module(name)
    listed = getattr(module, "__all__", None)
    if listed is None:
        here = (
            key
            for key, value in vars(module).items()
            if inspect.isclass(value) or inspect.isfunction(value)
        )
        listed = sorted(
            key for key in here if not key.startswith("_") and vars(module)[key].__module__ == name
        )
        return {key: described(getattr(module, key)) for key in listed}
    return {"__all__": list(listed), **{key: described(getattr(module, key)) for key in listed}}


def the_group():
    """The click group behind `featcal.cli.main`, caught as it is run."""
    import click

    caught = []

    def catch(self, *args, **options):
        caught.append(self)
        return 0

    with (
        mock.patch.object(click.Command, "main", catch),
        mock.patch.object(click.Group, "main", catch, create=True),
    ):
        cli("--help")
    return caught[0]


def commands():
    """Every command with its arguments and options, as click knows them."""
    import click

    group = the_group()
    return click.Context(group, info_name="featcal").to_info_dict()


def helps():
    import click

    group = the_group()
    found = {"": cli("--help")}
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        found[name] = cli(name, "--help")
        for below in getattr(command, "commands", {}):
            found[f"{name} {below}"] = cli(name, below, "--help")
    return found


# --- what is refused, and in which words ---


REFUSED = """
fit SMALL clip
fit nowhere clip -o x
fit SMALL
fit SMALL clop -o x
fit LOGITS clip -o x
fit SMALL density -o x
fit SMALL clip -o x --fit-split a
fit SMALL density -o x --train-split val
eval SMALL nowhere
eval LOGITS CAL
eval SMALL --bins 0
eval BINARY CAL
eval SMALL --test-split dev
eval CAL
predict SMALL CAL
predict LOGITS CAL -o p.npy
compare SMALL clop
compare SMALL --folds 1
compare nowhere
compare SMALL --folds 1000
compare LOGITS clip
compare SMALL --metric x
compare SMALL --sort x
compare SMALL --baseline vector
compare SMALL clip clip
compare SMALL density
compare SMALL --paper clip
compare SMALL --json --format csv
compare SMALL -o a.docx
compare SMALL --resamples -1
compare SMALL --resamples 1
compare SMALL --test-split val
compare SMALL --test-split dev
report SMALL
report SMALL -o r.pdf
report LOGITS -o CAL
report SMALL -o r.html --recipe clop
report SMALL -o r.html --test-split val
report SMALL -o r.html --recipe density
paper ece-posthoc --all
paper --json --format csv
history
history nowhere
history nowhere -o a.pdf
pack
pack info nowhere
pack info CAL
pack import
train
train mnist vit
train folder vit -o o
train folder vit -o o --data images
train cifar10 vot -o o --data cifar
train cifar10 vit -o o --data nowhere
train cifar10 vit -o o --data c --budget 1 --epochs 1
train cifar10 vit -o o --data c --loss focle
train cifar10 vit -o o --data c --network-option a
train cifar10 vit -o o --data c --network-option a=1
train cifar10 vit -o o --data c --image-size 8
train cifar10 a.b:c -o o --data c
train cifar10 vit -o o --data c --smoothing 0.1 --loss mmce
collect x -o o
collect x:y -o o
collect os:getcwd
export SMALL CAL
export nowhere CAL -o a.onnx
explore nowhere
explore SMALL --recipe clop --no-browser
export SMALL CAL -o a.txt
demo --what
nothing
NOTHING
"""


def refusal_cases():
    for line in REFUSED.split("\n")[1:-1]:
        yield f"refused-{slug(line)}", partial(refusal, line.split())


def refusal(words):
    names = {"SMALL": "small", "LOGITS": "logits", "BINARY": "binary"}
    given = [pack(names[word]) if word in names else word for word in words if word != "NOTHING"]
    return cli(*(fitted("small", "clip")[1] if word == "CAL" else word for word in given))


def other_cases():
    for name, recipe in (("small", "clip | temperature"), ("logits", "vector"), ("binary", "bbq")):
        yield f"text-{name}", partial(fit_text, name, recipe)
    yield "demo", demo_case


def demo_case():
    said = cli("demo", "-o", "shown", "--json")
    text = cli("demo", "-o", "shown")
    pictures = {one.name: contents(one) for one in sorted(Path("shown").glob("*.*g"))}
    return said, text, pictures, page(Path("shown", "report.html"))


GROUPS = (
    *(surface_cases, library_cases, pack_cases, compare_cases, report_cases, paper_cases),
    *(train_cases, collect_cases, refusal_cases, other_cases, fit_cases),
)


# --- write and compare ---


def run(function):
    """What a case gives, with the warnings that it raises; an exception as its text."""
    import torch

    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = {"result": function()}
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1].name
            found = {"raised": type(error).__name__, "message": str(error), "in": place}
    said = [
        f"{one.category.__name__}: {one.message}"
        for one in caught
        if "featcal" in str(one.category.__module__)
    ]
    return {**found, "warnings": said} if said else found


def write(folder, only):
    import torch

    torch.set_num_threads(1)
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    listed = [case for group in GROUPS for case in group()]
    cases = dict(listed)
    assert len(cases) == len(listed), "two cases have one name"
    chosen = {n: f for n, f in cases.items() if fnmatch.fnmatch(n, only)}
    if only == "*":
        for stale in folder.glob("*.json"):
            stale.unlink()
    begun, slow, failed, home = time.monotonic(), [], [], Path.cwd()
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        sys.path.insert(0, place)
        try:
            for name, function in chosen.items():
                start = time.monotonic()
                found = run(function)
                if os.environ.get("GOLDEN_TIMES"):
                    print(f"{time.monotonic() - start:6.2f} s  {name}", flush=True)
                (folder / f"{name}.json").write_text(as_text(found), encoding="utf-8")
                slow.append((time.monotonic() - start, name))
                if "raised" in found:
                    failed.append(f"{name}: {found['raised']}: {found['message'][:120]}")
        finally:
            os.chdir(home)
    for seconds, name in sorted(slow, reverse=True):
        if seconds > SLOW:
            print(f"{seconds:6.1f} s  {name}")
    for line in failed:
        print(f"raised  {line}")
    print(f"{len(chosen)} cases in {time.monotonic() - begun:.0f} s -> {folder}")
    return 0


def compare(before, after, only):
    files = {path.name for folder in (before, after) for path in folder.glob("*.json")}
    files = sorted(name for name in files if fnmatch.fnmatch(name.removesuffix(".json"), only))
    different = 0
    for name in files:
        texts = [
            (place / name).read_text(encoding="utf-8").splitlines()
            if (place / name).exists()
            else None
            for place in (before, after)
        ]
        if texts[0] == texts[1]:
            continue
        different += 1
        print(f"== {name}")
        if None in texts:
            print(f"   only in {after if texts[0] is None else before}")
            continue
        lines = [line for line in difflib.unified_diff(*texts, n=0, lineterm="")][2:]
        for line in lines[:SHOWN]:
            print(f"   {line[:200]}")
        if len(lines) > SHOWN:
            print(f"   ... {len(lines) - SHOWN} more")
    print(f"{different} of {len(files)} cases differ")
    return 1 if different or not files else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    tasks = parser.add_subparsers(dest="task", required=True)
    writing = tasks.add_parser("write")
    writing.add_argument("folder", type=Path)
    comparing = tasks.add_parser("compare")
    comparing.add_argument("folders", type=Path, nargs="+")
    comparing.add_argument("--against", type=Path)
    listing = tasks.add_parser("list")
    for task in (writing, comparing, listing):
        task.add_argument("--only", default="*", metavar="GLOB")
    given = parser.parse_args()
    if given.task == "write":
        return write(given.folder, given.only)
    if given.task == "list":
        names = [name for group in GROUPS for name, _ in group()]
        print("\n".join(name for name in names if fnmatch.fnmatch(name, given.only)))
        return 0
    folders = [*([given.against] if given.against else []), *given.folders]
    if len(folders) != 2:
        parser.error("compare needs two folders")
    return compare(*folders, given.only)


if __name__ == "__main__":
    sys.exit(main())
