"""The generated tables and pictures of three pages, from the result files alone.

    python experiments/paper_docs.py

Writes the tables of docs/reproduction.md (from results/reproduction.json and
results/published.json), those of docs/training-results.md, three pictures (from
results/published.json), and the table of training in docs/benchmarks.md (from
results/bench-train.json).
"""

import json
from pathlib import Path
from statistics import fmean, median

from paper_claims import beyond, claims_text
from paper_tables import (
    CE,
    MATCHED,
    PAPER_LOSSES,
    RECIPES,
    RESULTS,
    facts_text,
    layer_table,
    listed,
    networks,
    paper_tables,
    read,
    read_layers,
    read_published,
    read_reproduction,
    side_by_side,
    training_notes,
)

from featcal.metrics.columns import COLUMNS
from featcal.report.diagram import BLUE, METADATA, PURPLE, TEXT, VERMILLION, own_style
from featcal.report.tables import Table
from featcal.train import Epoch, save_history

DOCS = Path(__file__).resolve().parents[1] / "docs"
IMAGES = DOCS / "images"
START, END = "<!-- {}: made by experiments/paper_docs.py -->", "<!-- end of {} -->"
OURS = "featcal"


def fill(text, parts, start_marker=START):
    """Puts each part between its markers."""
    for name, part in parts.items():
        start, end = start_marker.format(name), END.format(name)
        head, rest = text.split(start)
        text = f"{head}{start}\n{part}\n{end}{rest.split(end)[1]}"
    return text


def titled(tables):
    return "\n\n".join(f"{table.title}:\n\n{table.markdown()}" for table in tables)


# --- docs/reproduction.md ------------------------------------------------------------------------


def reproduction_parts(results, published, layers):
    """The tables of the page by name. Group calibration fitted on test is shown nowhere else."""
    tables = paper_tables()
    listing = tuple(
        (f"`{t.name}`", str(t.number), str(len(list(t))), str(t.faulty), t.summary)
        for t in tables.values()
    )
    headings = ("name", "table", "cells", "with a defect or a misprint", "what it shows")
    temperatures = tuple(
        (f"`{row['recipe']}`", f"{row['least']:.4f}", f"{row['most']:.4f}", f"{row['rest']:.1e}")
        for row in results["temperatures"]
    )
    side = side_by_side(networks(published), "ece")
    return {
        "claims": claims_text(published, layers),
        "beyond": beyond(published),
        "networks": side.markdown() + notes_of(side),
        "tables": Table("", headings, listing).markdown(),
        "temperatures": Table(
            "",
            ("recipe", "least temperature", "greatest", "largest change besides"),
            temperatures,
        ).markdown(),
        "leaked": leaked(results).markdown(),
        "made": made(results),
    }


def notes_of(table):
    return "\n" + "".join(f"\n- [{key}] {text}" for key, text in table.notes)


def leaked(results):
    """Group calibration after a clip: fitted as it should be, and on the rows that score it."""
    rows = tuple(
        (
            row["pack"],
            f"`{row['recipe']}`",
            *(f"{100 * row[where]['ece']:.2f}" for where in ("on_val", "on_test")),
        )
        for row in results["leaked"]
    )
    fitted = ("ECE, fitted on val", "ECE, fitted on the test rows themselves")
    return Table("", ("pack", "after clip", *fitted), rows)


def made(results):
    """How the results were made, in one paragraph."""
    plan, hardware = results["protocol"], results["hardware"]
    files = (f"`{p['file']}` {p['sha256'][:12]}" for p in results["packs"] + results["anchors"])
    return (
        f"Made with {facts_text(results['versions'])} on {hardware['cpu']} (threads: "
        f"{hardware['threads']}); fitted on {plan['fit']}, scored on {plan['test']}, "
        f"{plan['bins']} bins, intervals from {plan['resamples']:,} resamples with seed "
        f"{plan['seed']}. Files and the start of their sha256: {', '.join(files)}."
    )


# --- docs/training-results.md --------------------------------------------------------------------


def training_parts(published, layers, short):
    """The tables of the page by name; what holds for all of them is said once, under `made`."""
    found = networks(published)
    accuracy = side_by_side(found, "accuracy")
    return {
        "recipes": recipes(found).markdown(),
        "beyond": beyond(published),
        "accuracy": accuracy.markdown(),
        "layers": titled(map(layer_table, layers)),
        "made": made_of(published, found, short),
    }


def recipes(found):
    """Every recipe on every network: ECE and NLL, means over the seeds."""
    shown = [heading for heading in RECIPES if all(one.rows(heading, MATCHED) for one in found)]
    rows = []
    for one in found:
        cells = []
        for metric in ("ece", "nll"):
            values = [
                fmean(row["metrics"][metric] for row in one.rows(recipe, MATCHED))
                for recipe in shown
            ]
            told = [COLUMNS[metric].number(value) for value in values]
            best = told[values.index(min(values))]
            cells += [f"**{text}**" if text == best else text for text in told]
        rows.append((str(one), *cells))
    headings = (f"{metric} {recipe}" for metric in ("ECE %", "NLL") for recipe in shown)
    return Table("", ("", *headings), tuple(rows))


def made_of(published, found, short):
    """How the networks came about; the short runs in a sentence."""
    runs = published["runs"]
    hours = sum(run["seconds"] for run in runs) / 3600
    seeds = dict.fromkeys(run["seed"] for run in runs)
    few = sorted({run["recipe"]["epochs"] for run in short["runs"]})
    return (
        f"{len(runs)} networks, seeds {listed(seeds)}, {hours:.1f} hours of training in all.\n"
        + "".join(f"\n- [{key}] {text}" for key, text in training_notes(found))
        + f"\n\n{len(short['runs'])} networks of {few[0]} to {few[-1]} epochs, with two more forms "
        "of MMCE among them, are in [results/training.json](../results/training.json), made by "
        "`make grid`."
    )


LEARNED, SEED = "CIFAR-100 WRN-16-4", 1
APART = 0.18  # between the marks of a loss, which are one line apart from those of the next
LOOKS = (  # recipe, name in the legend, mark and hue, from above
    ("none", "the network as it is", "o", "#707070"),
    ("clip", "after a clip", "D", BLUE),
    ("temperature", "after a temperature", "s", VERMILLION),
    ("sample", "after sample", "^", PURPLE),
)


def draw_losses(found, path):
    """ECE on test by loss, a mark for each seed: alone, and after each of three recipes."""
    from matplotlib.figure import Figure

    names = [one.name for one in found]
    names = [name for name in dict.fromkeys(names) if names.count(name) > 1] or names
    losses = [loss for loss in PAPER_LOSSES if any(one.loss == loss for one in found)]
    with own_style():
        figure = Figure(figsize=(8.4, 1.1 + 0.4 * len(losses)), layout="constrained")
        panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
        for ax, name in zip(panels, names, strict=True):
            for shift, (recipe, label, mark, hue) in enumerate(LOOKS):
                marks = [
                    (100 * row["metrics"]["ece"], losses.index(one.loss) + (shift - 1.5) * APART)
                    for one in found
                    if one.name == name
                    for row in one.rows(recipe, MATCHED)
                ]
                x, y = zip(*marks, strict=True)
                ax.plot(x, y, mark, color=hue, label=label, markersize=5, markeredgecolor="white")
            ax.set_xlim(left=0)
            ax.set_xlabel("ECE on test, %")
            ax.grid(visible=True, axis="x", linewidth=0.4, alpha=0.5)
            for line in range(1, len(losses)):
                ax.axhline(line - 0.5, color="#D0D0D0", linewidth=0.5)
            ax.spines[["top", "right"]].set_visible(False)
            ax.set_title(name, loc="left", size=TEXT + 1, weight="bold")
        panels[0].set_yticks(range(len(losses)), losses)
        panels[0].invert_yaxis()
        marks, words = panels[-1].get_legend_handles_labels()
        place = {"loc": "outside lower center", "ncols": len(LOOKS), "frameon": False}
        figure.legend(marks, words, **place)
        figure.savefig(path, metadata=METADATA["svg"])


def draw_features(found, path):
    """Histograms of the features of confident wrong and right rows, a panel for each network."""
    from matplotlib.figure import Figure

    some = [
        (one, run) for one in found for run in one.runs if (one.loss, run["seed"]) == (CE, SEED)
    ]
    columns = min(len(some), 3)
    lines = -(-len(some) // columns)
    with own_style():
        figure = Figure(figsize=(8.4, 0.5 + 1.9 * lines), layout="constrained")
        panels = figure.subplots(lines, columns, squeeze=False).flat
        for (one, run), ax in zip(some, panels, strict=False):
            values = one.results()[one.runs.index(run)]["values_0.9"]
            for group, label, hue in (("hce", "wrong", VERMILLION), ("lce", "right", BLUE)):
                edges, count = values["edges"], values["values"][group]
                density = [n / count / (edges[1] - edges[0]) for n in values["counts"][group]]
                sigma = values["fits"][group]["sigma"]
                told = f"{label}, sigma {sigma:.2f}"
                ax.stairs(density, edges, color=hue, label=told, linewidth=1.1)
            ax.set_yscale("log")
            ax.set_xlabel("feature")
            ax.legend(frameon=False, fontsize=TEXT)
            ax.spines[["top", "right"]].set_visible(False)
            ax.set_title(one.name, loc="left", size=TEXT + 1, weight="bold")
        for ax in panels:  # those left over
            ax.remove()
        figure.savefig(path, metadata=METADATA["svg"])


def draw_epochs(found, path):
    """How the same network learned with each loss."""
    learned = {
        one.loss: list(map(Epoch.of_json, run["curve"]))
        for one in found
        for run in one.runs
        if (one.name, run["seed"]) == (LEARNED, SEED)
    }
    save_history(learned, path, overwrite=True)


# --- docs/benchmarks.md --------------------------------------------------------------------------


def speed(results):
    """Seconds per epoch in our loop and in plain ones, of one run on one machine."""
    loops = list(dict.fromkeys(loop for row in results["rows"] for loop in row["seconds"]))
    alike, rows = f"plain {results['hardware']['precision']}", []
    for row in results["rows"]:
        seconds = {loop: median(taken) for loop, taken in row["seconds"].items()}
        fastest = min(seconds[loop] for loop in seconds if loop != OURS)
        ratios = (f"{plain / seconds[OURS]:.1f}" for plain in (seconds[alike], fastest))
        told = f"{row['first_epoch']['seconds']:.0f}, {row['first_epoch']['kernels']}"
        rows.append((row["network"], *(timed(row, loop) for loop in loops), *ratios, told))
    facts = "; ".join(facts_text(results[part]) for part in ("hardware", "versions"))
    facts += f"; compiler {facts_text(results['compiler'])}"
    title = f"Seconds per epoch, batch {results['batch']} ({facts})"
    faster = (f"times faster than {alike}", "times faster than the fastest plain loop")
    return Table(title, ("network", *loops, *faster, f"first epoch of {OURS}"), tuple(rows))


def timed(row, loop):
    """The median, and the range where there are several."""
    taken = row["seconds"].get(loop)
    if not taken:
        return "-"
    spread = f" ({min(taken):.2f} to {max(taken):.2f})" if len(taken) > 1 else ""
    return f"{median(taken):.2f}{spread}"


def pages():
    """Every page with its tables by name."""
    bench = json.loads((RESULTS / "bench-train.json").read_text())
    published, layers = read_published(), read_layers()
    short = read(RESULTS, "training.json", "runs")
    return {
        DOCS / "reproduction.md": reproduction_parts(read_reproduction(), published, layers),
        DOCS / "training-results.md": training_parts(published, layers, short),
        DOCS / "benchmarks.md": {"training": titled([speed(bench)])},
    }


def main():
    for page, parts in pages().items():
        page.write_text(fill(page.read_text(), parts))
        print(f"Wrote the tables of {page}")
    found = networks(read_published())
    draw_losses(found, IMAGES / "training-losses.svg")
    draw_features(found, IMAGES / "published-features.svg")
    draw_epochs(found, IMAGES / "training-epochs.svg")
    print(f"Wrote the pictures of training in {IMAGES}")


if __name__ == "__main__":
    main()
