"""The pictures of docs/training-results.md, from results/training.json alone.

    python experiments/training_figures.py

Writes docs/images/training-losses.svg and docs/images/training-epochs.svg.
"""

import re

from reproduction_docs import ROOT

from featcal.report.diagram import BLUE, METADATA, TEXT, VERMILLION, own_style
from featcal.report.paper import PAPER_LOSSES, TrainingRuns
from featcal.train import Epoch, save_history

RESULTS, IMAGES = ROOT / "results", ROOT / "docs" / "images"
LOSSES, EPOCHS = IMAGES / "training-losses.svg", IMAGES / "training-epochs.svg"
PANELS = ("CIFAR-10 ResNet-50", "CIFAR-10 WRN-16-4", "CIFAR-100 WRN-16-4")  # with all losses
LEARNED, SEED = "CIFAR-100 WRN-16-4", 1
NAMES = list(PAPER_LOSSES)
APART = 0.22  # between the marks of a loss, which are one line apart from those of the next
LOOKS = (  # recipe, name in the legend, mark and hue, from above
    ("none", "the network as it is", "o", "#707070"),
    ("clip", "after a clip", "D", BLUE),
    ("temperature", "after a temperature", "s", VERMILLION),
)


def of_paper(ours, network):
    """The runs of a network with the paper's losses, by the name of the loss."""
    for name, text in PAPER_LOSSES.items():
        for run in ours.runs:
            if run.network == network and re.fullmatch(text, run.loss):
                yield name, run


def losses(ours):
    """ECE on test by loss, a mark for each seed: alone, clipped, and with a temperature."""
    from matplotlib.figure import Figure

    with own_style():
        figure = Figure(figsize=(8.4, 3.9), layout="constrained")
        panels = figure.subplots(1, len(PANELS), sharey=True)
        for ax, network in zip(panels, PANELS, strict=True):
            draw_panel(ax, list(of_paper(ours, network)))
            ax.set_title(network, loc="left", size=TEXT + 1, weight="bold")
        panels[0].set_yticks(range(len(NAMES)), NAMES)
        panels[0].invert_yaxis()
        marks, words = panels[-1].get_legend_handles_labels()
        place = {"loc": "outside lower center", "ncols": len(LOOKS), "frameon": False}
        figure.legend(marks, words, **place)
        figure.savefig(LOSSES, metadata=METADATA["svg"])


def draw_panel(ax, runs):
    for place, (recipe, label, mark, hue) in enumerate(LOOKS):
        x = [100 * run.row(recipe)["metrics"]["ece"] for _, run in runs]
        y = [NAMES.index(name) + (place - 1) * APART for name, _ in runs]
        ax.plot(x, y, mark, color=hue, label=label, markersize=4.5, markeredgecolor="white")
    ax.set_xlim(left=0)
    ax.set_xlabel("ECE on test, %")
    ax.grid(visible=True, axis="x", linewidth=0.4, alpha=0.5)
    for line in range(1, len(NAMES)):
        ax.axhline(line - 0.5, color="#D0D0D0", linewidth=0.5)
    ax.spines[["top", "right"]].set_visible(False)


def epochs(ours):
    """How the same network learned with each loss."""
    learned = {
        name: list(map(Epoch.of_json, run.content["curve"]))
        for name, run in of_paper(ours, LEARNED)
        if run.seed == SEED
    }
    save_history(learned, EPOCHS, overwrite=True)


def main():
    ours = TrainingRuns.read(RESULTS)
    losses(ours)
    epochs(ours)
    print(f"Wrote {LOSSES} and {EPOCHS}")


if __name__ == "__main__":
    main()
