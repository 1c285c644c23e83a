"""The pictures of the examples, drawn from their result files alone."""

from pathlib import Path

import torch
from example_pages import IMAGES, ROOT, say

from featcal import ReliabilityDiagram
from featcal.core.files import new_file
from featcal.metrics import Bins
from featcal.report import save_comparison
from featcal.report.diagram import BLUE, DPI, GREY, METADATA, TEXT, VERMILLION, own_style

BEFORE, AFTER = {"color": GREY, "hatch": "/////"}, {"color": BLUE}
BAR = 0.36  # of the distance between two classes
SURE = 0.9  # confidence from which a query is called sure


def save(figure, name):
    """Writes a picture; the same numbers give the same bytes."""
    path = IMAGES / f"{name}.png"
    with new_file(path, overwrite=True) as draft:
        figure.savefig(draft, format="png", dpi=DPI, metadata=METADATA["png"])
    say(f"drew {path.relative_to(ROOT)}")


def reliability(name, panels):
    """Reliability diagrams side by side, from titles and the sums of their bins."""
    diagrams = [ReliabilityDiagram(bins_of(sums), title=title) for title, sums in panels]
    for path in save_comparison(diagrams, IMAGES / name, formats=["png"], overwrite=True):
        say(f"drew {Path(path).relative_to(ROOT)}")


def bins_of(sums):
    """The bins of a result file."""
    names = ("count", "confidence", "correct")
    return Bins(*(torch.tensor(sums[name], dtype=torch.float64) for name in names))


# --- ImageNet -------------------------------------------------------------------------------------


def imagenet_pictures(results, images):
    """Reliability before and after, and the network's view of two photographs."""
    recipe = results["recipes"][results["chosen"]]["recipe"]
    bins = results["bins"]
    reliability(
        "example-imagenet-reliability",
        [("the network as it is", bins["before"]), (f"after {recipe}", bins["after"])],
    )
    with own_style():
        save(photo_figure(results["photos"], images), "example-imagenet-photos")


def photo_figure(photos, images):
    """What the network sees of each photograph, beside its likeliest classes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 2.1 * len(photos)), layout="constrained")
    grid = figure.subplots(len(photos), 2, width_ratios=[1, 2], squeeze=False)
    for (picture, bars), photo in zip(grid, photos, strict=True):
        picture.imshow(images[photo["photo"]])
        picture.set_axis_off()
        draw_chances(bars, photo)
    grid[0][1].legend(loc="lower right", frameon=False)
    grid[-1][1].set_xlabel("probability")
    return figure


def draw_chances(ax, photo):
    """Two bars a class, the first class on top."""
    places = range(len(photo["classes"]))
    for shift, when, look in ((-BAR / 2, "before", BEFORE), (BAR / 2, "after", AFTER)):
        drawn = ax.barh(
            [place + shift for place in places],
            photo[when],
            BAR,
            label=when,
            edgecolor="white",
            linewidth=0,
            **look,
        )
        ax.bar_label(drawn, [f"{value:.0%}" for value in photo[when]], padding=2, fontsize=TEXT)
    ax.set_yticks(list(places), [its["name"] for its in photo["classes"]])
    ax.invert_yaxis()
    ax.set_xlim(0, 1)
    ax.spines[["top", "right"]].set_visible(False)


# --- text -----------------------------------------------------------------------------------------


def text_pictures(results):
    """Reliability of the wide heads before and after, and confidence in and out of scope."""
    wide = [case for case in results["cases"] if case["head"] == "mlp" and "bins" in case]
    panels = []
    for case in wide:
        recipe = case["recipes"][case["chosen"]]["recipe"]
        panels.append((f"{case['set']} as it is", case["bins"]["before"]))
        panels.append((f"{case['set']} after {recipe}", case["bins"]["after"]))
    reliability("example-text-reliability", panels)
    (scoped,) = (case for case in wide if "scope" in case["recipes"][0])
    with own_style():
        save(scope_figure(scoped), "example-text-scope")


def scope_figure(case):
    """Histograms of confidence: in scope above, out of scope below, before and after."""
    from matplotlib.figure import Figure

    rows = case["recipes"][0], case["recipes"][case["chosen"]]
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    grid = figure.subplots(2, 2, sharex=True, sharey="row")
    titles = ("the network as it is", f"after {rows[1]['recipe']}")
    for column, (row, title) in enumerate(zip(rows, titles, strict=True)):
        scope = row["scope"]
        grid[0][column].set_title(
            f"{title}\nAUROC {scope['auroc']:.3f}", loc="left", weight="bold", size=TEXT + 1
        )
        draw_shares(grid[0][column], scope["in_scope"], BLUE, None)
        draw_shares(grid[1][column], scope["out_of_scope"], VERMILLION, "/////")
        grid[1][column].set_xlabel("confidence")
    grid[0][0].set_ylabel("share of questions\nin scope")
    grid[1][0].set_ylabel("share of questions\nout of scope")
    return figure


def draw_shares(ax, told, color, hatch):
    """A histogram, and the share above the level from which we call a question sure."""
    counts = torch.tensor(told["histogram"], dtype=torch.float64)
    edges = torch.linspace(0, 1, len(counts) + 1)
    look = {"facecolor": color, "edgecolor": "white", "hatch": hatch, "linewidth": 0.6}
    ax.bar(edges[:-1], counts / counts.sum(), 1 / len(counts), align="edge", **look)
    ax.axvline(SURE, color="black", linewidth=1, linestyle=(0, (4, 2)))
    text = f"{told['above'][str(SURE)]:.1%} above {SURE}"
    ax.annotate(
        text,
        (SURE, 0.94),
        (-4, 0),
        ("data", "axes fraction"),
        "offset points",
        ha="right",
        va="top",
    )
    ax.set_xlim(0, 1)
    ax.spines[["top", "right"]].set_visible(False)
