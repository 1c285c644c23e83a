"""featcal pack, collect and export: packs of files and of networks, and networks as files to serve.

A network is given as `package.module:function`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click

from featcal.cli import app
from featcal.cli.fit import load_for
from featcal.core.checks import InputError
from featcal.core.files import REMOVE, check_free
from featcal.core.listed import COLLECTED_ROWS, TOLERANCE
from featcal.core.table import Table

if TYPE_CHECKING:
    from torch import Tensor, nn

    from featcal.data import Pack

DYNAMIC = "dynamic"  # axes of any size, for export alone
DRAWN = ("ignore_index", "positions", "seed")  # of pixels and tokens, for collect alone
OPTIONS = ("class_names", "dataset", "name", "head", "layer", "unpack", *DRAWN, "meta", DYNAMIC)
EXAMPLE_ROWS = 4
RETURNS = "return (model, {'val': loader, 'test': loader})"


@click.group()
def pack() -> None:
    """Make and look at feature packs."""


@pack.command("import")
@click.argument("given", metavar="FILE...", nargs=-1, required=True)
@app.output_option("The folder to make.")
@app.LOGITS
@app.PROBS
@app.LABEL
@app.IGNORE
@app.answered
def import_(
    given: tuple[str, ...],
    output: Path,
    logits: bool,
    probs: bool,
    label: str,
    ignore: tuple[str, ...],
) -> app.Answer:
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
    from featcal.data import import_files
    from featcal.data.files import doubt

    kind = app.kind_of(logits, probs)
    with app.progress_bar():
        made = import_files(given, output, label=label, kind=kind, ignore=ignore)
    told = {**made.summary(), "output": str(output)}
    return told, [
        *_about(told),
        *(f"Warning: {text}" for text in [doubt(made)] if text),
        f"Wrote {output}",
    ]


@pack.command()
@app.PACK
@click.option("--verify", is_flag=True, help="Read every byte and check it against its sha256.")
@app.answered
def info(pack_path: Path, verify: bool) -> app.Answer:
    """Say what PACK holds."""
    from featcal.data import Pack

    opened = Pack.open(pack_path)
    if verify:
        with app.progress_bar():
            opened.verify()
    told = {**opened.summary(), "verified": verify}
    return told, [*_about(told), *["Every byte is as its sha256 says."] * verify]


def _about(summary: dict[str, Any]) -> list[app.Line]:
    """What a pack holds, for people."""
    origin = ", ".join(part for part in (summary["dataset"], summary["model"]) if part)
    stored = ", ".join(f"{name} {dtype}" for name, dtype in summary["tensors"].items())
    width = f"{summary['features']} features" if summary["features"] else "logits alone"
    head = "with the head" if summary["head"] else "without a head"
    grouped, drawn = "groups" in summary["tensors"], summary["meta"].get("drawn")
    columns = ("rows", "samples", "shards") if grouped else ("rows", "shards")
    rows = (
        (name, *(f"{split[key]:,}" for key in columns), f"{split['bytes'] / 1e6:.1f}")
        for name, split in summary["splits"].items()
    )
    return [
        f"{summary['name']}: {origin}" if origin else summary["name"],
        f"{width}, {summary['classes']} classes, {head}; stored as {stored}",
        *(
            [f"drawn of each sample: {', '.join(f'{key} {value}' for key, value in drawn.items())}"]
            if isinstance(drawn, dict)
            else []
        ),
        Table("", ("split", *columns, "MB"), tuple(rows)),
    ]


@click.command()
@app.shared
@click.argument("target", metavar="PACKAGE.MODULE:FUNCTION")
@app.output_option("The folder to make.")
@app.HEAD
@click.option("--layer", help="Keep what this layer gives, not what enters the last one.")
@click.option("--positions", type=app.COUNT, help="Pixels or tokens to keep of a sample at most.")
@click.option("--ignore-index", type=int, help="The label of those that do not count; -100.")
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
@app.answered
def collect(
    target: str,
    output: Path,
    head: str | None,
    layer: str | None,
    positions: int | None,
    ignore_index: int | None,
    device: str | None,
    autocast: str | None,
    shard_rows: int,
) -> app.Answer:
    """Run a network over its data and write a pack of what enters its last layer.

    FUNCTION takes nothing and returns (model, {"val": loader, "test": loader}), or a mapping with
    model, loaders and, where you like, class_names, dataset, name, head, layer, unpack, meta, for
    labels of pixels and tokens ignore_index, positions and seed, and for export dynamic. The
    loaders give (inputs, labels), or mappings with labels, in a fixed order. A run that was killed
    goes on where it was when the same command is given again.

    Example: featcal collect my_project.models:build -o my-pack
    """
    import torch

    from featcal.core import dist
    from featcal.data.resume import collect_pack, partial_of
    from featcal.data.share import collect_shared, parts_of

    if app.is_first():
        check_free(output, remedy=REMOVE)
    model, loaders, options = load_target(target)
    options.pop(DYNAMIC, None)
    if device is not None:
        model = model.to(app.device_of(device))
    precision: AbstractContextManager[object] = nullcontext()
    if autocast is not None:
        place = next((weight.device.type for weight in model.parameters()), "cpu")
        precision = torch.autocast(place, getattr(torch, autocast))
    given = {"head": head, "layer": layer, "positions": positions, "ignore_index": ignore_index}
    options |= {key: value for key, value in given.items() if value is not None}
    collected: Callable[..., Pack | None] = collect_pack if dist.world() == 1 else collect_shared
    kept = partial_of(output) if dist.world() == 1 else parts_of(output)
    begun, started = kept.exists(), perf_counter()
    with app.progress_bar(), precision, app.going_on_later(kept):
        made = collected(model, loaders, output, shard_rows=shard_rows, **options)
    if made is None:  # not the first of several processes
        return {}, []
    seconds = perf_counter() - started
    told = {**made.summary(), "output": str(output), "resumed": begun, "seconds": seconds}
    rows = sum(map(made.manifest.rows, made.splits))
    went_on = ", some of them by an earlier run" if begun else ""
    return told, [*_about(told), f"Wrote {output}: {rows:,} rows in {seconds:.1f} s{went_on}"]


def load_target(spec: str) -> tuple[nn.Module, Mapping[str, Iterable[Any]], dict[str, Any]]:
    """Calls the function: the model, a loader for every split by name, and what else it said."""
    from torch import nn

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


@click.command()
@click.argument("source", metavar="PACK|PACKAGE.MODULE:FUNCTION|CALIBRATOR")
@click.argument("calibrator_path", metavar="[CALIBRATOR]", required=False, type=app.PATH)
@app.output_option("The .onnx file to write.")
@app.HEAD
@click.option("--test-split", help="Rows to compare on; the last split, if it is not named.")
@click.option("--rows", default=256, type=app.COUNT, help="How many to compare on.")
@click.option("--probabilities", is_flag=True, help="Give them as a second output.")
@click.option(
    "--tolerance", default=TOLERANCE, type=click.FloatRange(0), help="Largest difference allowed."
)
@click.option("--opset", type=click.IntRange(7), help="Version of ONNX's operators.")
@app.FORCE
@app.answered
def export(
    source: str,
    calibrator_path: Path | None,
    output: Path,
    head: str | None,
    test_split: str | None,
    rows: int,
    probabilities: bool,
    tolerance: float,
    opset: int | None,
    force: bool,
) -> app.Answer:
    """Write a calibrated network as an ONNX file and compare it in ONNX Runtime.

    With FUNCTION, as in "featcal collect", the file is the whole network: inputs to calibrated
    logits. With PACK it is the calibrated last layer alone: features to calibrated logits, or
    logits to calibrated logits where the calibrator needs no more. A CALIBRATOR alone becomes a
    file of logits to calibrated logits and probabilities, compared on made rows.

    \b
    Examples:
      featcal export my_project.models:build cal.safetensors -o model.onnx
      featcal export my-pack cal.safetensors -o head.onnx
      featcal export cal.safetensors -o cal.onnx
    """  # noqa: D301 - click knows a block by the character itself
    from featcal.export import onnx

    if output.suffix.lower() != ".onnx":
        raise InputError(f"output {output} is of no known format: end it in .onnx")
    check_free(output, overwrite=force)
    if calibrator_path is None:
        if head is not None or test_split is not None:
            raise InputError("--head and --test-split are of a network or a pack: leave them out")
        model, inputs = _alone(source, rows)
        dynamic, probabilities = None, True
    else:
        model, inputs, dynamic = _source(source, calibrator_path, head, test_split, rows)
    with app.progress_bar():
        made = onnx(
            model,
            output,
            _first(inputs, EXAMPLE_ROWS),  # enough to follow the model
            rows=inputs,
            dynamic=dynamic,
            opset=opset,
            probabilities=probabilities,
            tolerance=tolerance,
            overwrite=force,
        )
    ports = {"in": made.inputs, "out": made.outputs}
    return made.as_json(), [
        *(f"{way}: {', '.join(map(' '.join, kinds.items()))}" for way, kinds in ports.items()),
        str(made),
    ]


def _alone(source: str, rows: int) -> tuple[nn.Module, Tensor]:
    """A calibrator of logits as a module of its own, and made logits to compare it on."""
    import torch

    from featcal import io

    if not Path(source).is_file() and Path(source).suffix != ".safetensors":
        raise InputError(f"{source} is given alone and is no file: name the calibrator behind it")
    calibrator = io.load(source)
    if calibrator.needs_features or calibrator.report is None:
        raise InputError(
            f"{calibrator!r} in {source} cannot be exported alone, without the network's last "
            f"layer: give the pack, featcal export PACK {source}"
        )
    draw = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-1, 1, rows)[:, None]
    return calibrator.wrap(), sizes * torch.randn(rows, calibrator.report.classes, generator=draw)


def _source(
    source: str, path: Path, head: str | None, split: str | None, rows: int
) -> tuple[nn.Module, Any, Any]:
    """What becomes a file, real rows of what enters it, and its axes of any size.

    Of a pack that is the calibrated last layer; of a function the network with the calibrator in
    it. Axes are None for the rows alone.
    """
    from featcal import io
    from featcal.data import Pack
    from featcal.data.collect import placed, unpacked
    from featcal.heads.attach import attach
    from featcal.heads.find import find_head, head_or_output

    if Path(source).is_dir():
        if head is not None:
            raise InputError(
                "--head names a layer of a network, and a pack has only one: leave it out"
            )
        pack = Pack.open(source)
        calibrator = load_for(path, pack)
        batches = pack.split(split or pack.splits[-1])
        entered = (b.logits if pack.head is None else b.features for b in batches)
        return calibrator.wrap(pack.head), _joined(entered, rows), None
    if ":" not in source:
        raise InputError(
            f"{source} is neither a folder nor package.module:function: give a pack or the "
            "function that returns the model and its loaders"
        )
    calibrator = io.load(path)
    network, loaders, options = load_target(source)
    name = split or list(loaders)[-1]
    if name not in loaders:
        raise InputError(f"{source} has no loader {name!r}: choose one of {', '.join(loaders)}")
    given = (inputs for inputs, _ in unpacked(network, loaders[name], options.get("unpack")))
    inputs = _joined((placed(batch, network) for batch in given), rows)
    if inputs is None:
        raise InputError(f"the loader {name!r} of {source} is empty: give it rows to compare on")
    told = head or options.get("head")
    few = _first(inputs, EXAMPLE_ROWS)
    find_path = find_head if calibrator.needs_features else head_or_output
    place = find_path(network, told, inputs=few, several=calibrator.several)
    # Where a pack keeps an inner layer, a calibrator of logits alone acts behind the last one.
    layer = options.get("layer") if calibrator.needs_features else None
    return attach(network, calibrator, head=place, layer=layer), inputs, options.get(DYNAMIC)


def _joined(batches: Iterable[Any], most: int) -> Any:  # noqa: ANN401
    """The first rows of the batches as one; those before a batch of other sizes, None of none."""
    import torch

    from featcal.heads.find import mapped

    parts: list[Any] = []
    sizes: list[object] = []
    rows = 0
    for batch in batches:
        # What must be alike in two batches to be joined; no two scalars are alike.
        before = sizes
        sizes = [(t.dtype, t.shape[1:]) if t.ndim else object() for t in _tensors(batch)]
        if parts and sizes != before:
            break  # such as text of another length
        parts.append(batch)
        rows += next((len(tensor) for tensor in _tensors(batch) if tensor.ndim), most)
        if rows >= most:
            break
    if len(parts) < 2:
        return _first(parts[0], most) if parts else None
    columns = zip(*map(_tensors, parts), strict=True)
    whole = (torch.cat(column) for column in columns)
    return _first(mapped(parts[0], lambda _: next(whole)), most)


def _first(inputs: Any, rows: int) -> Any:  # noqa: ANN401
    from featcal.heads.find import mapped

    return mapped(inputs, lambda tensor: tensor[:rows] if tensor.ndim else tensor)


def _tensors(inputs: Any) -> list[Tensor]:  # noqa: ANN401
    from featcal.heads.find import mapped

    found: list[Tensor] = []
    mapped(inputs, found.append)
    return found
