"""featcal train: a network from images to a pack that can be calibrated, in one command."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click

from featcal.cli.commands import (
    HEAD,
    INTERRUPTED,
    JSON,
    going_on_later,
    output_option,
    with_options,
)
from featcal.cli.train_job import Job
from featcal.cli.train_request import FOLDER, TrainRequest
from featcal.core import dist
from featcal.core.errors import InputError
from featcal.core.progress import listen
from featcal.losses import LOSSES
from featcal.train import processes
from featcal.train.checkpoint import FILE as CHECKPOINT
from featcal.train.engine import PRECISIONS, launched_rank
from featcal.train.folder import made_folder

PATIENCE = 5.0  # seconds; torchrun looks at its processes ten times in one
ABOVE_ZERO = click.FloatRange(0, min_open=True)
OPTIONS: tuple[Callable[[Any], Any], ...] = (
    output_option("The folder to make."),
    click.option(
        "--data",
        required=True,
        type=click.Path(path_type=Path),
        help="The folder of the images; docs/datasets.md says what may lie there.",
    ),
    click.option(
        "--loss",
        "loss_text",
        default="ce",
        show_default=True,
        help=f'{", ".join(sorted(LOSSES))}; with arguments as in "focal(gamma=3)".',
    ),
    click.option(
        "--budget",
        type=click.FloatRange(0, 1, min_open=True),
        help="A part of the epochs, such as 0.1.  [default: 1]",
    ),
    click.option("--epochs", type=click.IntRange(1), help="How many, instead of the published."),
    click.option(
        "--published", is_flag=True, help="Summed losses, gradients clipped to 2, no warm-up."
    ),
    click.option(
        "--lr", type=ABOVE_ZERO, help="The highest learning rate.  [default: the network's]"
    ),
    click.option("--batch", type=click.IntRange(1), help="Rows of a step.  [default: 128]"),
    click.option(
        "--clip-norm", type=ABOVE_ZERO, help="The longest gradient.  [default: any; --published: 2]"
    ),
    click.option(
        "--schedule", type=click.Choice(["steps", "cosine"]), help="How the learning rate falls."
    ),
    click.option(
        "--seed",
        default=1,
        show_default=True,
        type=click.IntRange(min=0),
        help="Of the weights, the order of the images and their shifts.",
    ),
    click.option(
        "--mixup", type=click.FloatRange(0), help="Mix images by Beta(A, A).  [default: 0]"
    ),
    click.option(
        "--smoothing",
        type=click.FloatRange(0, 1, max_open=True),
        help="The part of a label spread over all classes.",
    ),
    click.option(
        "--val",
        type=click.IntRange(1),
        help="Training images kept for calibration.  [default: a tenth, at most 5000]",
    ),
    click.option(
        "--held-out",
        type=click.IntRange(0),
        help="More of them for a loss that adapts.  [default: for adafocal as many as in val, at "
        "most a tenth; else 0]",
    ),
    click.option(
        "--test-norm",
        default="matched",
        show_default=True,
        type=click.Choice(["matched", "reference"]),
        help="How test images are normalised; reference is the published mismatch.",
    ),
    click.option("--image-size", type=click.IntRange(1), help="Of a folder's images, in pixels."),
    click.option("--download", is_flag=True, help="Get CIFAR where the data is not there."),
    click.option(
        "--network-option",
        "given_options",
        multiple=True,
        metavar="NAME=VALUE",
        help="An option of the network, such as width=2; repeat for more.",
    ),
    HEAD,
    click.option("--device", help="cpu, cuda, ...  [default: a GPU where there is one]"),
    click.option(
        "--precision",
        type=click.Choice(list(PRECISIONS)),
        help="Of the forward pass.  [default: bfloat16 on a GPU]",
    ),
    click.option("--compile/--no-compile", "compiled", default=None, help="By torch.compile."),
    click.option("--graph/--no-graph", default=None, help="Steps as one CUDA graph."),
    click.option("--no-pack", is_flag=True, help="Write the weights alone, no features."),
    click.option(
        "--watch-every",
        default=1,
        show_default=True,
        type=click.IntRange(1),
        help="Epochs between two looks at val, each a line.",
    ),
    click.option(
        "--checkpoint-every",
        default=60.0,
        show_default=True,
        type=click.FloatRange(0),
        metavar="SECONDS",
        help="What a kill costs at most; 0 for every step.",
    ),
    JSON,
)


@click.command()
@click.argument("dataset", metavar="DATASET", type=click.Choice(["cifar10", "cifar100", FOLDER]))
@click.argument("network", metavar="NETWORK")
@with_options(OPTIONS)
def train(**options: Any) -> None:  # noqa: ANN401 - TrainRequest names them and their types
    """Train NETWORK on DATASET with a loss that aims at calibration, and make a pack of it.

    DATASET is cifar10, cifar100 or folder. NETWORK is resnet50, resnet110, densenet121, wrn26x10,
    wrn16x4 or vit, or package.module:function, called with the number of classes. 350 epochs as
    published, unless --budget or --epochs says otherwise. A run that was killed goes on where it
    was when the same command is given again; torchrun starts it on several GPUs.

    Example: featcal train cifar10 wrn16x4 -o run --data data --loss "focal(gamma=3)" --budget 0.1
    """
    request = TrainRequest(**options)
    with _in_turn(), ExitStack() as stack:
        request.check()
        with processes(request.device):
            first = dist.rank() == 0
            stack.enter_context(_heard(request, first))
            if first:
                stack.enter_context(made_folder(request.output))
            job = Job.of(request, first and not request.as_json)
            history = job.trained()
            facts = job.facts(history)
        # Outside of the group: the rest is for one process, and nothing may wait for the others.
        if first:
            job.finish(history, facts)
    if not first:
        _leave()


def _leave() -> None:
    """Ends a process that has done its part, without the end that Python makes.

    With torch 2.13 that end aborted in one of forty runs ("terminate called without an active
    exception"; a thread of torch, we think, that still wanted Python), and ended the others, too.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@contextmanager
def _in_turn() -> Iterator[None]:
    """Of several processes that refuse the same, the first says so.

    The others wait for torchrun to end them with it. Were they to leave at once, torchrun would
    end the first, maybe before it has spoken; what one of them alone refuses is said late.
    """
    try:
        yield
    except InputError:
        if launched_rank() > 0:
            time.sleep(PATIENCE)
        raise


@contextmanager
def _heard(request: TrainRequest, first: bool) -> Iterator[None]:
    """Of several processes the first speaks; the others draw no bar, and go quietly."""
    if first:
        with going_on_later(request.output / CHECKPOINT):
            yield
        return
    try:
        with listen(lambda *_: None):
            yield
    except KeyboardInterrupt:
        raise click.exceptions.Exit(INTERRUPTED) from None
