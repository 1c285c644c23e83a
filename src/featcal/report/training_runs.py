"""One trained network of results/training.json, and what every table must say of its training.

Runs are put beside each other only where all of their training but loss and seed is the same: a
network trained for 40 epochs and one trained for 350 never share a row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, final

from featcal.core.errors import InputError
from featcal.report.result_rows import Row, find

PUBLISHED_EPOCHS = 350
# The losses of the paper by their headings, and the texts of ours that are meant by them. The
# published gamma of dual focal loss differs from network to network.
PAPER_LOSSES = {
    "Cross Entropy": r"ce",
    "Brier Loss": r"brier",
    "MMCE": r"mmce\(variant='weighted', form='published'\)",
    "LS-0.05": r"label_smoothing(\(\w+=0\.05\))?",
    "Focal Loss": r"focal(\(gamma=3(\.0)?\))?",
    "FLSD-53": r"flsd",
    "Dual Focal Loss": r"dual_focal(\(gamma=[\d.]+\))?",
}
REDUCTION = re.compile(r"reduction=['\"](\w+)['\"](?:, )?")
DATASETS = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}
NETWORKS = {
    "resnet50": "ResNet-50",
    "resnet110": "ResNet-110",
    "densenet121": "DenseNet-121",
    "wrn26x10": "Wide-Resnet-26",
    "wrn16x4": "WRN-16-4",
    "vit": "ViT",
}
# Words for what a recipe calls otherwise; what is not here is said by its own name.
WORDS = {
    **{"lr": "learning rate", "schedule": "rate by", "augment": "images shifted and mirrored"},
    "clip_norm": "gradient norm at most",
}
NORMALISED = {
    "matched": "test images normalised as in training",
    "reference": "test images normalised as published, unlike those of CIFAR-100's training",
}
APART = ("epochs", "seed", "reduction")  # said elsewhere


@final
@dataclass(frozen=True)
class Run:
    """One network, trained with one loss and one seed."""

    content: dict[str, Any]

    @cached_property
    def network(self) -> str:
        """Data and network under the paper's names: CIFAR-10 ResNet-50."""
        return named(self.content)

    @property
    def seed(self) -> int:
        """Of weights, order and augmentation."""
        seed: int = self.content["seed"]
        return seed

    @property
    def epochs(self) -> int:
        """How long it was trained."""
        epochs: int = self.content["recipe"]["epochs"]
        return epochs

    @cached_property
    def reduction(self) -> str:
        """Whether the loss is the "mean" over a batch or its "sum"."""
        found = REDUCTION.search(self.content["loss"])
        told: str = found[1] if found else self.content["recipe"].get("reduction", "mean")
        return told

    @cached_property
    def loss(self) -> str:
        """The text of the loss without its reduction.

        >>> Run({"loss": "focal(gamma=2.0, reduction='sum')"}).loss, Run({"loss": "ce"}).loss
        ('focal(gamma=2.0)', 'ce')
        """
        text = REDUCTION.sub("", self.content["loss"])
        return text.replace(", )", ")").removesuffix("()")

    @property
    def variant(self) -> tuple[str, str]:
        """What runs of several seeds must share."""
        return self.loss, self.reduction

    @property
    def source(self) -> str:
        """Where a value comes from, for programs."""
        return source(self.content, f", {self.epochs} epochs")

    @cached_property
    def training(self) -> str:
        """Everything about the training but loss and seed, in words."""
        recipe, rows = self.content["recipe"], self.content["rows"]
        instead = (
            "" if self.epochs == PUBLISHED_EPOCHS else f", the paper's have {PUBLISHED_EPOCHS}"
        )
        apart = APART if recipe["schedule"] == "steps" else (*APART, "drops")
        told = (_told(key, value) for key, value in recipe.items() if key not in apart)
        return (
            f"{self.epochs} epochs{instead}; {', '.join(filter(None, told))}; "
            f"{self.content['precision']}; {NORMALISED[self.content['test_norm']]}; "
            f"trained on {rows['train']:,} rows, fitted on {rows['val']:,} of val, scored on "
            f"{rows['test']:,} of test"
        )

    def row(self, recipe: str, mode: str = "sequential") -> Row | None:
        """The scores of a recipe."""
        return find(self.content["results"], recipe, mode)


@final
@dataclass(frozen=True)
class Setting:
    """The runs of one network that differ in loss and seed alone."""

    network: str
    training: str
    runs: tuple[Run, ...]

    @cached_property
    def variants(self) -> dict[tuple[str, str], list[Run]]:
        """The runs by loss, each with all of its seeds, the paper's losses first."""
        found: dict[tuple[str, str], list[Run]] = {}
        for run in self.runs:
            found.setdefault(run.variant, []).append(run)
        return {key: found[key] for key in sorted(found, key=_loss_order)}

    @cached_property
    def paper(self) -> dict[str, list[Run]]:
        """The runs of each loss of the paper; of two forms of one loss the shorter text's."""
        return {
            heading: self.variants[min(forms, key=lambda form: (len(form[0]), form[1]))]
            for heading in PAPER_LOSSES
            if (forms := [form for form in self.variants if heading_of(form[0]) == heading])
        }

    @property
    def further(self) -> Iterator[list[Run]]:
        """The runs of every other loss."""
        taken = [runs[0].variant for runs in self.paper.values()]
        return (runs for variant, runs in self.variants.items() if variant not in taken)

    def only(self, runs: Iterable[Run]) -> Setting:
        """The same with some of its runs alone."""
        return replace(self, runs=tuple(runs))

    def label(self, run: Run) -> str:
        """The loss of a run as the label of a row: its heading in the paper, else its text."""
        heading = heading_of(run.loss)
        if heading and self.paper[heading][0].variant == run.variant:
            return heading
        return run.loss + (", sum" if run.reduction == "sum" else "")


def settings(runs: Iterable[Run]) -> list[Setting]:
    """The runs by network and training, networks in the order of the paper.

    Raises:
        InputError: for two runs that differ in nothing.
    """
    found: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        alike = found.setdefault((run.network, run.training), [])
        if any((other.variant, other.seed) == (run.variant, run.seed) for other in alike):
            # Two of them would pass for two seeds.
            raise InputError(f"{run.source}, {run.loss} is in the file twice: keep one of them")
        alike.append(run)
    in_order = sorted(found, key=lambda key: _order(found[key][0].content))
    return [Setting(*key, tuple(found[key])) for key in in_order]


def heading_of(loss: str) -> str:
    """The paper's heading for the text of a loss, "" for a loss of ours.

    >>> heading_of("focal(gamma=3.0)"), heading_of("focal(gamma=2.0)")
    ('Focal Loss', '')
    """
    headings = (heading for heading, text in PAPER_LOSSES.items() if re.fullmatch(text, loss))
    return next(headings, "")


def named(entry: dict[str, Any]) -> str:
    """Data and network of an entry under the paper's names."""
    dataset, network = entry["dataset"], entry["network"]
    return f"{DATASETS.get(dataset, dataset)} {NETWORKS.get(network, network)}"


def source(entry: dict[str, Any], more: str = "") -> str:
    """Where a value comes from: our cifar10 wrn16x4, seed 1."""
    return f"our {entry['dataset']} {entry['network']}{more}, seed {entry['seed']}"


def listed(values: Iterable[object]) -> str:
    """Values in words.

    >>> listed([1, 2, 3])
    '1, 2 and 3'
    """
    *most, last = map(str, values)
    return f"{', '.join(most)} and {last}" if most else last


def _order(entry: dict[str, Any]) -> tuple[int, int]:
    return _place(entry["dataset"], tuple(DATASETS)), _place(entry["network"], tuple(NETWORKS))


def _loss_order(variant: tuple[str, str]) -> int:
    return _place(heading_of(variant[0]), tuple(PAPER_LOSSES))


def _place(name: str, names: Sequence[str]) -> int:
    return names.index(name) if name in names else len(names)


def _told(key: str, value: object) -> str:
    """One setting of a recipe; nothing for what was not used."""
    if key == "clip_norm" and value is None:
        return "gradients not clipped"
    if value is None or value is False or value == 0:
        return ""
    word = WORDS.get(key, key.replace("_", " "))
    if value is True:
        return word
    if isinstance(value, (list, tuple)):
        return f"{word} {listed(_short(part) for part in value)}" if value else ""
    return f"{word} {_short(value)}"


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
