"""The tables of docs/training-results.md, and those of training in docs/benchmarks.md.

They come from results/training.json and results/bench-train.json alone; a page whose file is not
there is left as it is.

    python experiments/training_docs.py
"""

import json
from statistics import mean, median, stdev

from reproduction_docs import ROOT, fill
from training_chance import chance, differences

from featcal.report.paper import Grid, TrainingRuns, facts_text, paper_table, seeds

RESULTS = ROOT / "results"
DOCS = ROOT / "docs" / "training-results.md"
BENCH, BENCH_DOCS = RESULTS / "bench-train.json", ROOT / "docs" / "benchmarks.md"
START = "<!-- {}: made by experiments/training_docs.py -->"
NOTHING = "(nothing yet: filled by `python experiments/training_docs.py` from the result file)"
OURS = "featcal"


def sections(ours):
    """The generated parts of the page by name."""
    train_time, accuracy, layers = map(paper_table, ("train-time", "accuracy", "layers"))
    grids = {
        "losses": ours.losses(train_time),
        "accuracy": ours.losses(accuracy),
        "temperatures": ours.temperatures(),
        "layers": ours.layers(layers),
        "runs": [runs(ours)],
    }
    return {
        name: "\n\n".join(grid.document() for grid in found) or NOTHING
        for name, found in grids.items()
    }


def runs(ours):
    """What was trained; how long an epoch takes is measured by bench/train.py on an idle device."""
    rows = []
    for setting in ours.settings:
        numbers = (setting.runs[0].epochs, len(setting.variants), len(setting.runs))
        rows.append((setting.network, *map(str, numbers), seeds(setting.runs)))
    return Grid(
        f"{len(ours.runs)} networks:", ("", "epochs", "losses", "networks", "seeds"), tuple(rows)
    )


def bench_sections(results):
    """The tables of docs/benchmarks.md by name."""
    return {
        "training": speed(results).document(),
        "loss curves": curves(results).document(),
        "chance": chance(results).document(),
    }


def speed(results):
    """Seconds an epoch in our loop and in plain ones, of one run on one machine."""
    loops = list(dict.fromkeys(loop for row in results["rows"] for loop in row["seconds"]))
    alike, rows = f"plain {results['hardware']['precision']}", []
    for row in results["rows"]:
        seconds = {loop: median(taken) for loop, taken in row["seconds"].items()}
        fastest = min(seconds[loop] for loop in seconds if loop != OURS)
        ratios = (f"{plain / seconds[OURS]:.1f}" for plain in (seconds[alike], fastest))
        first = row["first_epoch"]
        told = f"{first['seconds']:.0f}, {first['kernels']}"
        rows.append((row["network"], *(timed(row, loop) for loop in loops), *ratios, told))
    made = "; ".join(facts_text(results[part]) for part in ("hardware", "versions"))
    made += f"; compiler {facts_text(results['compiler'])}"
    title = f"Seconds an epoch, batch {results['batch']} ({made}):"
    faster = (f"times faster than {alike}", "times faster than the fastest plain loop")
    return Grid(title, ("network", *loops, *faster, f"first epoch of {OURS}"), tuple(rows))


def timed(row, loop):
    """The median, and the range where there are several."""
    taken = row["seconds"].get(loop)
    if not taken:
        return "-"
    spread = f" ({min(taken):.2f} to {max(taken):.2f})" if len(taken) > 1 else ""
    return f"{median(taken):.2f}{spread}"


def curves(results):
    """The loss of each loop after every epoch, and what lies between ours and one of its kind."""
    found = [row for row in results["rows"] if row.get("curves")]
    alike = f"plain {results['hardware']['precision']}"
    loops = list(dict.fromkeys(loop for row in found for loop in row["curves"]))
    rows = []
    for row in found:
        for epoch in range(len(row["curves"][OURS]["losses"][0])):
            shown = (after(row["curves"].get(loop), epoch) for loop in loops)
            between = apart(row["curves"], alike, epoch)
            rows.append((f"{row['network']}, epoch {epoch + 1}", *shown, between))
        learned = accuracies(row["curves"], loops, alike)
        rows.append((f"{row['network']}, val accuracy, %", *learned))
    seeds = "; ".join(f"{row['network']} {span(row['curves'][OURS]['seeds'])}" for row in found)
    title = f"Training loss, mean and standard deviation over the seeds ({seeds}):"
    headings = ("network", *loops, f"{OURS} minus {alike}, seed by seed")
    return Grid(title, headings, tuple(rows), tuple(other_makes(results, found)))


def span(seeds):
    """1 to 16 for many in a row."""
    whole = len(seeds) > 2 and seeds == list(range(seeds[0], seeds[-1] + 1))
    return f"{seeds[0]} to {seeds[-1]}" if whole else ", ".join(map(str, seeds))


def other_makes(results, rows):
    """A note on every network whose curves were made by other means than the seconds."""
    for row in rows:
        for key, theirs in row.get("made", {}).get("curves", {}).items():
            ours = results[key]
            if theirs != ours:
                told, above = (facts_text(facts) or "defaults" for facts in (theirs, ours))
                yield row["network"], f"{key}: {told}; of the seconds above: {above}."


def after(curve, epoch):
    if not curve:
        return "-"
    losses = [seed[epoch] for seed in curve["losses"]]
    return f"{mean(losses):.3f} ± {stdev(losses):.3f}"


def apart(curves, alike, epoch):
    """The mean difference of runs with the same seed, and its standard error."""
    _, between = differences(curves[OURS], curves[alike])
    return with_error(between[:, epoch].tolist(), 3)


def with_error(between, digits):
    error = stdev(between) / len(between) ** 0.5
    return f"{mean(between):+.{digits}f} ± {error:.{digits}f}"


def accuracies(curves, loops, alike):
    """After the last epoch: of every loop, and what lies between ours and one of its kind."""
    percent = {
        loop: {
            seed: 100 * accuracy
            for seed, accuracy in zip(found["seeds"], found["accuracies"], strict=True)
        }
        for loop, found in curves.items()
    }
    for loop in loops:
        found = list(percent.get(loop, {}).values())
        yield f"{mean(found):.1f} ± {stdev(found):.1f}" if found else "-"
    shared = sorted(percent[OURS].keys() & percent[alike].keys())
    yield with_error([percent[OURS][seed] - percent[alike][seed] for seed in shared], 1)


def write(page, parts):
    page.write_text(fill(page.read_text(), parts, START))
    print(f"Wrote the tables of {page}")


def main():
    if (RESULTS / TrainingRuns.file).is_file():
        write(DOCS, sections(TrainingRuns.read(RESULTS)))
    if BENCH.is_file():
        write(BENCH_DOCS, bench_sections(json.loads(BENCH.read_text())))


if __name__ == "__main__":
    main()
