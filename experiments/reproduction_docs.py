"""The tables of docs/reproduction.md, from results/reproduction.json and the paper's tables alone.

Group calibration fitted on test is shown here and nowhere else.
"""

import json
from pathlib import Path

from featcal.report.paper import Grid, Reproduction, all_marks, paper_table, paper_tables

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results" / "reproduction.json"
DOCS = ROOT / "docs" / "reproduction.md"
START, END = "<!-- {}: made by experiments/reproduction.py -->", "<!-- end of {} -->"
SCORES = (
    ("ece", "ECE", 100),
    ("adaptive_ece_reference", "adaptive ECE, published variant", 100),
    ("nll", "NLL", 1),
    ("accuracy", "accuracy", 100),
)
NOTHING = "(nothing yet: the methods were not there when the results were made)"


def sections(results):
    """The generated parts of the page by name."""
    ours = Reproduction(results)
    ece, entropy = paper_table("ece-posthoc"), paper_table("entropy")
    return {
        "tables": listing().markdown(),
        "marks": marks().markdown(),
        "replays": "\n\n".join(titled(grid) for t in paper_tables() for grid in ours.replays(t)),
        "temperatures": shown(temperatures(results)),
        "methods": "\n\n".join(titled(methods(anchor)) for anchor in results["anchors"]),
        "leaked": shown(leaked(results)),
        "packs": "\n\n".join(titled(grid) for grid in ours.packs(ece)),
        "entropy": "\n\n".join(titled(grid) for grid in ours.small(entropy)),
        "made": made(results),
    }


def fill(text, parts, start_marker=START):
    """Puts each part between its markers."""
    for name, part in parts.items():
        start, end = start_marker.format(name), END.format(name)
        head, rest = text.split(start)
        text = f"{head}{start}\n{part}\n{end}{rest.split(end)[1]}"
    return text


def titled(grid):
    return f"{grid.title}:\n\n{grid.markdown()}"


def shown(grid):
    return grid.markdown() if grid.rows else NOTHING


def listing():
    """The tables of the paper."""
    rows = (
        (f"`{t.name}`", str(t.number), str(len(list(t))), str(t.faulty), t.summary)
        for t in paper_tables()
    )
    headings = ("name", "table", "cells", "with a defect or a misprint", "what it shows")
    return Grid("", headings, tuple(rows))


def marks():
    """Every mark, with the tables where it stands; the page says the same in its own text."""
    rows = []
    for mark in all_marks():
        names = (f"`{table.name}`" for table in paper_tables() if mark in table.marks)
        rows.append((f"`{mark.id}`", mark.kind, ", ".join(names), mark.evidence))
    headings = ("mark", "kind", "tables", "known from")
    return Grid("", headings, tuple(rows))


def temperatures(results):
    """What the columns called TS, ETS and PTS do to the paper's logits."""
    rows = tuple(
        (f"`{row['recipe']}`", f"{row['least']:.4f}", f"{row['most']:.4f}", f"{row['rest']:.1e}")
        for row in results.get("temperatures", ())
    )
    headings = ("recipe", "least temperature", "greatest", "largest change besides")
    return Grid("", headings, rows)


def methods(anchor):
    """Every method on one set of the paper's logits."""
    rows = []
    for row in anchor["results"]:
        if "error" in row:
            continue
        values = (
            f"{scale * row['metrics'][key]:.{2 if scale > 1 else 4}f}" for key, _, scale in SCORES
        )
        rows.append((f"`{row['recipe']}`", *values))
    return Grid(anchor["name"], ("recipe", *(heading for _, heading, _ in SCORES)), tuple(rows))


def leaked(results):
    """Group calibration after a clip: fitted as it should be, and on the rows that score it."""
    rows = tuple(
        (
            row["pack"],
            f"`{row['recipe']}`",
            *(f"{100 * row[where]['ece']:.2f}" for where in ("on_val", "on_test")),
        )
        for row in results["leaked"]
        if row["fitted_on_test"]
    )
    headings = (
        "pack",
        "after clip",
        "ECE, fitted on val",
        "ECE, fitted on the test rows themselves",
    )
    return Grid("", headings, rows)


def made(results):
    """How the results were made, in one paragraph."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    plan, hardware = results["protocol"], results["hardware"]
    files = (f"`{p['file']}` {p['sha256'][:12]}" for p in results["packs"] + results["anchors"])
    missing = results["methods_missing"]
    lacking = f" Not run, because not there: {', '.join(missing)}." if missing else ""
    return (
        f"Made with {versions} on {hardware['cpu']} (threads: {hardware['threads']}); fitted on "
        f"{plan['fit']}, scored on {plan['test']}, {plan['bins']} bins, intervals from "
        f"{plan['resamples']:,} resamples with seed {plan['seed']}.{lacking} Files and the "
        f"start of their sha256: {', '.join(files)}."
    )


if __name__ == "__main__":
    DOCS.write_text(fill(DOCS.read_text(), sections(json.loads(RESULTS.read_text()))))
