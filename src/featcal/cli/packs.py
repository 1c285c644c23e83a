"""featcal pack and collect: packs of files, or of a network given as `package.module:function`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any

import click
import torch
from torch import nn

from featcal.cli import app
from featcal.core.checks import InputError, Kind
from featcal.core.files import REMOVE, check_free
from featcal.data import Pack, import_files
from featcal.data.resume import COLLECTED_ROWS, collect_pack, partial_of

DYNAMIC = "dynamic"  # axes of any size, for export alone
OPTIONS = ("class_names", "dataset", "name", "head", "layer", "unpack", "meta", DYNAMIC)
RETURNS = "return (model, {'val': loader, 'test': loader})"


@click.group()
def pack() -> None:
    """Make and look at feature packs."""


@pack.command("import")
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@app.output_option("The folder to make.")
@click.option("--logits", is_flag=True, help="The numbers of the tables are logits.")
@click.option("--probs", is_flag=True, help="The numbers of the tables are probabilities.")
@click.option("--label", default="label", help="The tables' column of labels.")
@click.option(
    "--ignore", multiple=True, metavar="COLUMN", help="A column that holds no scores; repeatable."
)
@app.JSON
def import_(
    files: tuple[str, ...],
    output: Path,
    logits: bool,
    probs: bool,
    label: str,
    ignore: tuple[str, ...],
    as_json: bool,
) -> None:
    """Make a pack of logits, probabilities or features in files.

    Arrays (.npz, .safetensors, or one .npy each) are told by their names: val_logits or val_probs
    (rows, classes), val_labels, and the same for test; or val_features with weight and bias of the
    last layer. Tables (.csv, .tsv, .parquet) hold a split each: a column "label" and a column for
    each class, called logit_cat or prob_cat, or cat with --logits or --probs. The file's name is
    the split's, unless NAME=PATH says another. A single column is that of class 1.

    \b
    Examples:
      featcal pack import arrays.npz -o my-pack
      featcal pack import arrays.safetensors -o my-pack
      featcal pack import val_logits.npy val_labels.npy test_logits.npy test_labels.npy -o my-pack
      featcal pack import val.csv test.csv --logits -o my-pack
      featcal pack import val=runs/7.parquet test=runs/8.parquet --label y --ignore id -o my-pack
    """  # noqa: D301 - click knows a block by the character itself
    if logits and probs:
        raise InputError("--logits and --probs contradict each other: give one")
    kind: Kind | None = "logits" if logits else "probs" if probs else None
    with app.progress_bar():
        made = import_files(files, output, label=label, kind=kind, ignore=ignore)
    if as_json:
        app.print_json({**made.summary(), "output": str(output)})
        return
    print_pack(made.summary())
    app.say(f"Wrote {output}")


@pack.command()
@app.PACK
@click.option("--verify", is_flag=True, help="Read every byte and check it against its sha256.")
@app.JSON
def info(pack_path: Path, verify: bool, as_json: bool) -> None:
    """Say what PACK holds."""
    opened = Pack.open(pack_path)
    if verify:
        with app.progress_bar():
            opened.verify()
    summary = opened.summary()
    if as_json:
        app.print_json({**summary, "verified": verify})
        return
    print_pack(summary)
    if verify:
        app.say("Every byte is as its sha256 says.")


def print_pack(summary: dict[str, Any]) -> None:
    """What a pack holds, for people."""
    origin = ", ".join(part for part in (summary["dataset"], summary["model"]) if part)
    app.say(f"{summary['name']}: {origin}" if origin else summary["name"])
    stored = ", ".join(f"{name} {dtype}" for name, dtype in summary["tensors"].items())
    width = f"{summary['features']} features" if summary["features"] else "logits alone"
    head = "with the head" if summary["head"] else "without a head"
    app.say(f"{width}, {summary['classes']} classes, {head}; stored as {stored}")
    rows = (
        (name, f"{split['rows']:,}", str(split["shards"]), f"{split['bytes'] / 1e6:.1f}")
        for name, split in summary["splits"].items()
    )
    app.console().print(app.table_of(("split", "rows", "shards", "MB"), rows))


@click.command()
@click.argument("target", metavar="PACKAGE.MODULE:FUNCTION")
@app.output_option("The folder to make.")
@app.HEAD
@click.option("--layer", help="Keep what this layer gives, not what enters the last one.")
@click.option("--device", help="Where to run, such as cuda; where the model is, if not.")
@click.option(
    "--autocast", type=click.Choice(["bfloat16", "float16"]), help="Run in mixed precision."
)
@click.option(
    "--shard-rows",
    default=COLLECTED_ROWS,
    type=app.COUNT,
    help="Rows a shard: what a kill costs at most.",
)
@app.JSON
def collect(
    target: str,
    output: Path,
    head: str | None,
    layer: str | None,
    device: str | None,
    autocast: str | None,
    shard_rows: int,
    as_json: bool,
) -> None:
    """Run a network over its data and write a pack of what enters its last layer.

    FUNCTION takes nothing and returns (model, {"val": loader, "test": loader}), or a mapping with
    model, loaders and, where you like, class_names, dataset, name, head, layer, unpack, meta, and
    for export dynamic. The loaders give (inputs, labels), or mappings with labels, in a fixed
    order. A run that was killed goes on where it was when the same command is given again.

    Example: featcal collect my_project.models:build -o my-pack
    """
    check_free(output, remedy=REMOVE)
    model, loaders, options = load_target(target)
    options.pop(DYNAMIC, None)
    if device is not None:
        try:
            model = model.to(torch.device(device))
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
            raise InputError(f"--device {device} cannot be used here: {reason}") from error
    precision: AbstractContextManager[object] = nullcontext()
    if autocast is not None:
        place = next((weight.device.type for weight in model.parameters()), "cpu")
        precision = torch.autocast(place, getattr(torch, autocast))
    options |= {key: name for key, name in (("head", head), ("layer", layer)) if name is not None}
    begun = partial_of(output).exists()
    started = perf_counter()
    with app.progress_bar(), precision, app.going_on_later(partial_of(output)):
        made = collect_pack(model, loaders, output, shard_rows=shard_rows, **options)
    seconds = perf_counter() - started
    if as_json:
        figures: dict[str, Any] = {"resumed": begun, "seconds": seconds}
        app.print_json({**made.summary(), "output": str(output), **figures})
        return
    print_pack(made.summary())
    rows = sum(map(made.manifest.rows, made.splits))
    went_on = ", some of them by an earlier run" if begun else ""
    app.say(f"Wrote {output}: {rows:,} rows in {seconds:.1f} s{went_on}")


def load_target(spec: str) -> tuple[nn.Module, Mapping[str, Iterable[Any]], dict[str, Any]]:
    """Calls the function: the model, a loader for every split by name, and what else it said."""
    made = named_function(spec)()
    options: dict[str, Any] = {}
    if isinstance(made, Mapping):
        options = {key: value for key, value in made.items() if key not in ("model", "loaders")}
        made = made.get("model"), made.get("loaders")
    if not isinstance(made, (tuple, list)) or len(made) != 2 or not isinstance(made[0], nn.Module):
        several = isinstance(made, (tuple, list))
        kinds = ", ".join(type(part).__name__ for part in made) if several else ""
        shape = f"({kinds})" if several else type(made).__name__
        raise InputError(f"{spec} returned {shape}: {RETURNS}")
    unknown = set(options) - set(OPTIONS)
    if unknown:
        raise InputError(f"{spec} returned {min(unknown)!r}: it may say {', '.join(OPTIONS)}")
    return made[0], made[1] if isinstance(made[1], Mapping) else {"val": made[1]}, options


def named_function(spec: str, returns: str = "the model and its loaders") -> Callable[..., Any]:
    """The function that `package.module:function` names, the current folder on the path.

    Args:
        spec: the text.
        returns: what the function gives, said where the text names none.
    """
    module_name, colon, name = spec.partition(":")
    if not (module_name and colon and name):
        raise InputError(
            f"{spec!r} is not package.module:function: name the function that returns "
            f"{returns}, such as my_project.models:build"
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name
        # What goes wrong inside the module is its own affair and keeps its traceback.
        if missing is None or not f"{module_name}.".startswith(f"{missing}."):
            raise
        file = module_name.endswith(".py")
        hint = f"; for a file write {Path(module_name).stem}:function" if file else ""
        raise InputError(
            f"there is no module {module_name!r} here or among the installed packages: run the "
            f"command in the folder that holds it{hint}"
        ) from error
    found = getattr(module, name, None)
    if not callable(found):
        have = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
        raise InputError(
            f"{module_name} has no function {name!r}: it has {', '.join(have) or 'none'}"
        )
    return found  # type: ignore[no-any-return]
