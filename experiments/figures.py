"""Everything the README and docs show: numbers under results/, pictures under docs/images/.

Usage: python experiments/figures.py

Runs on the demo pack shipped inside featcal, and writes `results/demo.json`, the picture, and the
table between the markers in README.md. Nothing shown there is typed by hand.
"""

import json
import platform
from pathlib import Path

import torch

import featcal
from featcal.report import save_comparison

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results" / "demo.json"
README = ROOT / "README.md"
START, END = "<!-- demo table: made by experiments/figures.py -->", "<!-- end of demo table -->"
COLUMNS = [
    ("accuracy", "accuracy", "{:.2%}"),
    ("ece", "ECE", "{:.2%}"),
    ("adaptive_ece", "adaptive ECE", "{:.2%}"),
    ("nll", "NLL", "{:.4f}"),
    ("brier", "Brier", "{:.4f}"),
]
RECIPES = {
    "joint": ["none", "auto", "temperature", "clip", "clip | temperature"],
    "sequential": ["clip | temperature"],
}


def run():
    pack = featcal.demo_pack()
    rows = []
    for mode, recipes in RECIPES.items():
        compared = featcal.compare(
            pack.split("val"), pack.split("test"), recipes, pack.head, mode=mode
        )
        rows += [{"mode": mode, **row.as_json()} for row in compared]
        if mode == "joint":
            diagrams = [featcal.ReliabilityDiagram(r.scores.bins, title=r.recipe) for r in compared]
            save_comparison(diagrams, ROOT / "docs" / "images" / "reliability", overwrite=True)
    machine = {"torch": torch.__version__.split("+")[0], "machine": platform.machine()}
    return {
        "pack": pack.summary(),
        "fit": "val",
        "test": "test",
        **machine,
        "rows": without_times(rows),
    }


def without_times(value):
    """Drops wall times: a result file should change only when a result does."""
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if key != "seconds"}
    return [without_times(item) for item in value] if isinstance(value, list) else value


def table(results):
    """The README's table, from the result file alone."""
    lines = ["| recipe | " + " | ".join(heading for _, heading, _ in COLUMNS) + " | fitted |"]
    lines.append("|---|" + "---:|" * len(COLUMNS) + "---|")
    for row in results["rows"]:
        cells = [form.format(row["metrics"][key]) for key, _, form in COLUMNS]
        stepwise = ", step by step" if row["mode"] == "sequential" else ""
        recipe = "`" + row["recipe"].replace("|", "\\|") + "`" + stepwise
        lines.append(f"| {recipe} | {' | '.join(cells)} | {fitted(row['fit'])} |")
    return "\n".join(lines)


def fitted(fit):
    if fit is None:
        return "the network as it is"
    names = {"threshold": "c", "temperature": "T"}
    parts = []
    for step in fit["steps"]:
        values = [f"{names[k]} = {step[k]:.3f}" for k in names if step.get(k) is not None]
        if "recipe" in step:
            values = ["`" + step["recipe"].replace("|", "\\|") + "`", *values]
        parts.append(f"{step['name']}: no-op" if step["noop"] else ", ".join(values))
    return ", ".join(parts)


def main():
    results = run()
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    text = README.read_text()
    head, rest = text.split(START)
    _, tail = rest.split(END)
    README.write_text(f"{head}{START}\n{table(results)}\n{END}{tail}")
    print(f"Wrote {RESULTS.relative_to(ROOT)}, docs/images/reliability.png and the README's table")


if __name__ == "__main__":
    main()
