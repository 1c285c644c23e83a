"""The generated tables and pictures of three pages, from the result files alone.

    python experiments/paper_docs.py

Writes the tables of docs/reproduction.md (from results/reproduction.json), those of
docs/training-results.md and its two pictures (from results/training.json), and the table of
training in docs/benchmarks.md (from results/bench-train.json).
"""

import json
from pathlib import Path
from statistics import fmean, median

from paper_tables import (
    PAPER_LOSSES,
    RESULTS,
    epochs,
    facts_text,
    layer_tables,
    loss_note,
    loss_tables,
    made_note,
    pack_table,
    packs_of,
    paper_tables,
    read_reproduction,
    read_training,
    replays,
    seeds,
    settings,
    training_notes,
)

from featcal.metrics.columns import COLUMNS
from featcal.report.diagram import BLUE, METADATA, TEXT, VERMILLION, own_style
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


def reproduction_parts(results):
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
    ece = tables["ece-posthoc"]
    return {
        "tables": Table("", headings, listing).markdown(),
        "replays": titled(table for t in tables.values() for table in replays(results, t)),
        "temperatures": Table(
            "",
            ("recipe", "least temperature", "greatest", "largest change besides"),
            temperatures,
        ).markdown(),
        "packs": titled(pack_table(pack, ece.metric) for pack in packs_of(results, ece)),
        "leaked": leaked(results).markdown(),
        "made": made(results),
    }


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


def training_parts(results):
    """The tables of the page by name; what holds for all of them is said once, under `made`."""
    tables, every = paper_tables(), settings(results)
    notes = [*training_notes(every), loss_note(every), made_note(results)]
    rows = []
    for setting in every:
        numbers = (setting.runs[0].epochs, len(setting.variants), len(setting.runs))
        rows.append((setting.network, *map(str, numbers), seeds(setting.runs)))
    runs = Table("", ("", "epochs", "losses", "networks", "seeds"), tuple(rows))
    return {
        "losses": titled(loss_tables(results, tables["train-time"])),
        "accuracy": titled(loss_tables(results, tables["accuracy"])[:1]),
        "temperatures": titled([temperatures(every)]),
        "layers": titled(layer_tables(results, tables["layers"])),
        "made": runs.markdown() + "\n" + "".join(f"\n- [{key}] {text}" for key, text in notes),
    }


def temperatures(every):
    """Clip beside a temperature: means over the seeds."""
    recipes = ("none", "clip", "temperature", "clip | temperature")
    rows = []
    for setting in every:
        for runs in setting.variants.values():
            cells = (
                COLUMNS[metric].number(fmean(run.row(recipe)["metrics"][metric] for run in runs))
                for metric in ("ece", "nll")
                for recipe in recipes
            )
            rows.append((f"{setting.network}, {setting.label(runs[0])}", *cells))
    headings = (f"{metric} {recipe}" for metric in ("ECE %", "NLL") for recipe in recipes)
    title = f"Clip beside a temperature ({epochs(every)}), means over the seeds"
    return Table(title, ("", *headings), tuple(rows))


PANELS = ("CIFAR-10 ResNet-50", "CIFAR-10 WRN-16-4", "CIFAR-100 WRN-16-4")  # with all losses
LEARNED, SEED = "CIFAR-100 WRN-16-4", 1
APART = 0.22  # between the marks of a loss, which are one line apart from those of the next
LOOKS = (  # recipe, name in the legend, mark and hue, from above
    ("none", "the network as it is", "o", "#707070"),
    ("clip", "after a clip", "D", BLUE),
    ("temperature", "after a temperature", "s", VERMILLION),
)


def of_paper(results, network):
    """The runs of a network with the paper's losses, each with the place and name of its loss."""
    (setting,) = (setting for setting in settings(results) if setting.network == network)
    for place, name in enumerate(PAPER_LOSSES):
        yield from ((place, name, run) for run in setting.paper[name])


def draw_losses(results, path):
    """ECE on test by loss, a mark for each seed: alone, clipped, and with a temperature."""
    from matplotlib.figure import Figure

    with own_style():
        figure = Figure(figsize=(8.4, 3.9), layout="constrained")
        panels = figure.subplots(1, len(PANELS), sharey=True)
        for ax, network in zip(panels, PANELS, strict=True):
            runs = list(of_paper(results, network))
            for shift, (recipe, label, mark, hue) in enumerate(LOOKS):
                x = [100 * run.row(recipe)["metrics"]["ece"] for _, _, run in runs]
                y = [place + (shift - 1) * APART for place, _, _ in runs]
                ax.plot(x, y, mark, color=hue, label=label, markersize=4.5, markeredgecolor="white")
            ax.set_xlim(left=0)
            ax.set_xlabel("ECE on test, %")
            ax.grid(visible=True, axis="x", linewidth=0.4, alpha=0.5)
            for line in range(1, len(PAPER_LOSSES)):
                ax.axhline(line - 0.5, color="#D0D0D0", linewidth=0.5)
            ax.spines[["top", "right"]].set_visible(False)
            ax.set_title(network, loc="left", size=TEXT + 1, weight="bold")
        panels[0].set_yticks(range(len(PAPER_LOSSES)), PAPER_LOSSES)
        panels[0].invert_yaxis()
        marks, words = panels[-1].get_legend_handles_labels()
        place = {"loc": "outside lower center", "ncols": len(LOOKS), "frameon": False}
        figure.legend(marks, words, **place)
        figure.savefig(path, metadata=METADATA["svg"])


def draw_epochs(results, path):
    """How the same network learned with each loss."""
    learned = {
        name: list(map(Epoch.of_json, run.content["curve"]))
        for _, name, run in of_paper(results, LEARNED)
        if run.seed == SEED
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
    return {
        DOCS / "reproduction.md": reproduction_parts(read_reproduction()),
        DOCS / "training-results.md": training_parts(read_training()),
        DOCS / "benchmarks.md": {"training": titled([speed(bench)])},
    }


def main():
    for page, parts in pages().items():
        page.write_text(fill(page.read_text(), parts))
        print(f"Wrote the tables of {page}")
    draw_losses(read_training(), IMAGES / "training-losses.svg")
    draw_epochs(read_training(), IMAGES / "training-epochs.svg")
    print(f"Wrote the pictures of training in {IMAGES}")


if __name__ == "__main__":
    main()
