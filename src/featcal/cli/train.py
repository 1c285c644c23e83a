"""featcal train and history: a network from images to a pack in one command, and how it learned."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from featcal.cli import app
from featcal.core.checks import InputError
from featcal.core.files import check_free
from featcal.core.listed import LOSSES
from featcal.core.progress import listen
from featcal.core.table import Table

if TYPE_CHECKING:
    from featcal.train import History

FOLDER = "folder"
PATIENCE = 5.0  # seconds; torchrun looks at its processes ten times in one
ABOVE_ZERO = click.FloatRange(0, min_open=True)
SHOWN = ("accuracy", "ece", "nll")


@click.command()
@click.argument("dataset", metavar="DATASET", type=click.Choice(["cifar10", "cifar100", FOLDER]))
@click.argument("network", metavar="NETWORK")
@app.output_option("The folder to make.")
@click.option(
    "--data",
    required=True,
    type=app.PATH,
    help="The folder of the images: CIFAR's binary archive, or train/CLASS/ and test/CLASS/.",
)
@click.option(
    *("--loss", "loss_text"),
    default="ce",
    help=f'{", ".join(sorted(LOSSES))}; with arguments as in "focal(gamma=3)".',
)
@click.option(
    "--budget",
    type=click.FloatRange(0, 1, min_open=True),
    help="A part of the epochs, such as 0.1.  [default: 1]",
)
@click.option("--epochs", type=app.COUNT, help="How many, instead of the published.")
@click.option(
    "--published", is_flag=True, help="Summed losses, gradients clipped to 2, no warm-up."
)
@click.option("--lr", type=ABOVE_ZERO, help="The highest learning rate.  [default: the network's]")
@click.option("--batch", type=app.COUNT, help="Rows of a step.  [default: 128]")
@click.option(
    "--clip-norm", type=ABOVE_ZERO, help="The longest gradient.  [default: any; --published: 2]"
)
@click.option(
    "--schedule", type=click.Choice(["steps", "cosine"]), help="How the learning rate falls."
)
@click.option(
    "--seed",
    default=1,
    type=app.FROM_ZERO,
    help="Of the weights, the order of the images and their shifts.",
)
@click.option("--mixup", type=click.FloatRange(0), help="Mix images by Beta(A, A).  [default: 0]")
@click.option(
    "--smoothing",
    type=click.FloatRange(0, 1, max_open=True),
    help="The part of a label spread over all classes.",
)
@click.option(
    "--val",
    type=app.COUNT,
    help="Training images kept for calibration.  [default: a tenth, at most 5000]",
)
@click.option(
    "--held-out",
    type=app.FROM_ZERO,
    help="More of them for a loss that adapts.  [default: for adafocal as many as in val, at "
    "most a tenth; else 0]",
)
@click.option(
    "--test-norm",
    default="matched",
    type=click.Choice(["matched", "reference"]),
    help="How test images are normalised; reference is the published mismatch.",
)
@click.option("--image-size", type=app.COUNT, help="Of a folder's images, in pixels.")
@click.option("--download", is_flag=True, help="Get CIFAR where the data is not there.")
@click.option(
    *("--network-option", "given_options"),
    multiple=True,
    metavar="NAME=VALUE",
    help="An option of the network, such as width=2; repeat for more.",
)
@app.HEAD
@click.option("--device", help="cpu, cuda, ...  [default: a GPU where there is one]")
@click.option(
    "--precision",
    type=click.Choice(["float32", "bfloat16"]),
    help="Of the forward pass.  [default: bfloat16 on a GPU]",
)
@click.option("--compile/--no-compile", "compiled", default=None, help="By torch.compile.")
@click.option("--graph/--no-graph", default=None, help="Steps as one CUDA graph.")
@click.option("--no-pack", is_flag=True, help="Write the weights alone, no features.")
@click.option(
    "--watch-every", default=1, type=app.COUNT, help="Epochs between two looks at val, each a line."
)
@click.option(
    "--checkpoint-every",
    default=60.0,
    type=click.FloatRange(0),
    metavar="SECONDS",
    help="What a kill costs at most; 0 for every step.",
)
@app.JSON
def train(**options: Any) -> None:  # noqa: ANN401 - Run has them by their names
    """Train NETWORK on DATASET with a loss that aims at calibration, and make a pack of it.

    DATASET is cifar10, cifar100 or folder. NETWORK is resnet50, resnet110, densenet121, wrn26x10,
    wrn16x4 or vit, or package.module:function, called with the number of classes. 350 epochs as
    published, unless --budget or --epochs says otherwise. A run that was killed goes on where it
    was when the same command is given again; torchrun starts it on several GPUs.

    Example: featcal train cifar10 wrn16x4 -o run --data data --loss "focal(gamma=3)" --budget 0.1
    """
    from featcal.cli.run import Run
    from featcal.train import processes
    from featcal.train.run_folder import CHECKPOINT, made_folder

    run, first = Run(**options), app.is_first()
    with _as_one(run.output / CHECKPOINT, first), ExitStack() as stack:
        run.check()
        with processes(run.device):
            if first:
                stack.enter_context(made_folder(run.output))
            run.prepare()
            history = run.train(aloud=first and not run.as_json)
            facts = run.facts(history)
        # Outside of the group: the rest is for one process, and nothing may wait for the others.
        if first:
            run.finish(history, facts)
    if not first:
        # Without the end that Python makes: with torch 2.13 that aborted in one of forty runs
        # ("terminate called without an active exception"; a thread of torch, we think, that still
        # wanted Python), and ended the others, too.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


@contextmanager
def _as_one(kept: Path, first: bool) -> Iterator[None]:
    """Of several processes the first speaks; the others draw no bar, and go quietly."""
    if first:
        with app.going_on_later(kept):
            yield
        return
    try:
        with listen(lambda *_: None):
            yield
    except InputError:
        # The first refuses the same, and torchrun ends the others with it. Were one of them to
        # leave at once, torchrun would end the first, maybe before it has spoken; what one of them
        # alone refuses is said late.
        time.sleep(PATIENCE)
        raise
    except KeyboardInterrupt:
        raise click.exceptions.Exit(app.INTERRUPTED) from None


@click.command()
@click.argument("folders", metavar="RUN...", nargs=-1, required=True, type=app.PATH)
@app.output_option("Picture to write, .png or .svg, of up to 21 runs.", required=False)
@app.FORCE
@app.answered
def history(folders: tuple[Path, ...], output: Path | None, force: bool) -> app.Answer:
    """Show how each RUN has learned so far, and draw loss, accuracy, NLL and ECE by epoch.

    RUN is a folder that "featcal train" made or is at work in. Training losses of different kinds
    cannot be compared; scores on val can.

    Example: featcal history run-ce run-focal -o history.png
    """
    from featcal.metrics.columns import COLUMNS
    from featcal.train import History, save_history

    if output is not None:
        check_free(output, overwrite=force)
    runs = {str(folder): History.read(folder) for folder in folders}
    if output is not None:
        named = {f"{name}: {run.loss}": run.epochs for name, run in runs.items()}
        save_history(named, output, overwrite=force)
    rows = tuple((name, *_cells(run)) for name, run in runs.items())
    scores = (f"val {COLUMNS[key].heading}" for key in SHOWN)
    headings = ("run", "loss", "epochs", "training loss", *scores, "lowest val NLL")
    picture = None if output is None else str(output)
    return {"runs": [run.as_json() for run in runs.values()], "output": picture}, [
        Table("", headings, rows),
        f"Wrote {output}"
        if output
        else f"Draw it: featcal history {shlex.join(runs)} -o history.png",
    ]


def _cells(run: History) -> list[str]:
    """The loss of the last epoch, the scores when val was last looked at, and the lowest NLL."""
    from featcal.metrics.columns import COLUMNS
    from featcal.train.history import looks

    last, found = run.epochs[-1], looks(run.epochs)
    stale = found and found[-1][0] != last.epoch
    epochs = f"{last.epoch} of {run.planned}" + (f", val after {found[-1][0]}" if stale else "")
    scores = ["-"] * (len(SHOWN) + 1)
    if found:
        epoch, lowest = min(found, key=lambda pair: pair[1].nll)
        scores = [COLUMNS[key].text(getattr(found[-1][1], key)) for key in SHOWN]
        scores.append(f"{COLUMNS['nll'].text(lowest.nll)} (epoch {epoch})")
    return [run.loss, epochs, f"{last.loss:.4f}", *scores]
