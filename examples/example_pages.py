"""What the examples share around their work: where files lie, result files, tables, the page."""

import argparse
import json
import os
import platform
import re
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from featcal.metrics.columns import COLUMNS
from featcal.report.compare import versions
from featcal.report.tables import Table

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"
CACHE = ROOT / ".cache" / "examples"  # ignored by git: whatever is slow to make again
IMAGES = ROOT / "docs" / "images"
PAGES = {"imagenet": ROOT / "docs" / "vision.md", "text": ROOT / "docs" / "text.md"}
START, END = "<!-- {}: made by make examples -->", "<!-- end of {} -->"
SCORES, RANGED = ("accuracy", "ece", "nll", "brier"), ("ece", "nll")
STARTED = time.perf_counter()


def shared_file(*parts):
    """A file beside the project; where it is missing the example ends with one sentence."""
    path = SHARED.joinpath(*parts)
    if not path.is_file():
        raise SystemExit(
            f"{path} is not here: the examples read the data sets that lie beside the project, "
            "in ../shared"
        )
    return path


def check_packages(names):
    """Ends with one sentence where a package of the extra is missing."""
    for name in names:
        try:
            version(name)
        except PackageNotFoundError:
            raise SystemExit(
                f"{name} is not installed: `make examples` installs it, and so does "
                "pip install '.[examples]'"
            ) from None


def say(text):
    """One line for whoever watches, with the seconds since the start."""
    print(f"[{time.perf_counter() - STARTED:5.0f} s] {text}", flush=True)


def made(script, packages, protocol):
    """Who made a result file, with what and on what."""
    return {
        "made_by": f"examples/{script}",
        "protocol": protocol,
        "versions": versions() | {name: version(name) for name in packages},
        "hardware": {"cpu": _cpu(), "cores": os.cpu_count(), "threads": torch.get_num_threads()},
    }


def _cpu():
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def made_text(results):
    """The same in one paragraph."""
    told = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    plan, hardware = results["protocol"], results["hardware"]
    return (
        f"Fitted on {plan['fit']}, chosen by the {plan['choice']} ({plan['folds']} folds), scored "
        f"on {plan['score']} with {plan['bins']} bins. In brackets: 95 % intervals from "
        f"{plan['resamples']:,} resamples of the test rows, seed {plan['seed']}. Made by "
        f"`{results['made_by']}` with {told} on {hardware['cpu']}, threads: {hardware['threads']}."
    )


def result_file(name):
    """The path of an example's results."""
    return ROOT / "results" / f"example-{name}.json"


def read_results(name):
    """The results of an example, as they were written."""
    return json.loads(result_file(name).read_text())


def write_results(name, results):
    """Writes the result file, without times and last digits: it changes when a result does."""
    text = json.dumps(shortened(results), indent=1, allow_nan=False) + "\n"
    result_file(name).write_text(text)
    say(f"wrote {result_file(name).relative_to(ROOT)}")


def shortened(value):
    """The same, with ten digits of every float: the others depend on the number of threads."""
    if isinstance(value, dict):
        return {key: shortened(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [shortened(item) for item in value]
    return float(f"{value:.10g}") if isinstance(value, float) else value


def recipe_grid(rows, best, title=""):
    """The recipes of one network: the choice by val in the first column, test scores after it."""
    headings = ["recipe", "val NLL", *(COLUMNS[name].unit for name in SCORES), "fitted"]
    lines = [_recipe_line(row, place == best) for place, row in enumerate(rows)]
    return Table(title, tuple(headings), tuple(lines))


def _recipe_line(row, best):
    name = named(row)
    number = f"{row['val_nll']:.4f}"
    first = (f"**{name}**", f"**{number}**") if best else (name, number)
    cells = (scored(metric, row) for metric in SCORES)
    return (*first, *cells, row["fitted"] or "the network as it is")


def named(row):
    """A recipe as tables call it."""
    return f"`{row['recipe']}`" + (", jointly" if row["mode"] == "joint" else "")


def scored(name, row):
    """A metric, with its interval where one is shown: 2.92 [2.10, 4.05]."""
    number = COLUMNS[name].number
    value, ranges = number(row["metrics"][name]), row["intervals"]
    if name not in RANGED or ranges is None:
        return value
    low, high = map(number, ranges[name])
    return f"{value} [{low}, {high}]"


def aligned(grid):
    """A table for a terminal, its columns padded to line up; the choice of val between stars."""
    lines = [
        [cell.replace("**", "*").replace("`", "") for cell in line]
        for line in (grid.headings, *grid.rows)
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = ("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in lines)
    return "\n".join([grid.title, *(text.rstrip() for text in texts), ""])


def fill(text, parts):
    """Puts each part between its markers, which stand on the page once."""
    for name, part in parts.items():
        start, end = re.escape(START.format(name)), re.escape(END.format(name))
        old = re.compile(f"(?<={start}\n).*?(?={end})", re.DOTALL)
        text, found = old.subn(lambda _, new=part: f"{new}\n", text)
        if found != 1:
            raise ValueError(f"the page has {found} places for {name!r}, not one")
    return text


def main_of(name, run, draw, parts):
    """The command of an example: runs it, unless --docs asks for page and pictures alone.

    Args:
        name: of the result file.
        run: makes the results.
        draw: draws the pictures from them.
        parts: makes the generated parts of the page from them.
    """
    parser = argparse.ArgumentParser(description=f"Runs the worked example {name!r}.")
    parser.add_argument("--docs", action="store_true", help="only page and pictures, from results")
    if not parser.parse_args().docs:
        # Work this small gains little from a second thread, loses much on a busy machine, and with
        # one thread the digits do not depend on how many there are.
        torch.set_num_threads(1)
        write_results(name, run())
    results = read_results(name)
    draw(results)
    page = PAGES[name]
    page.write_text(fill(page.read_text(), parts(results)))
    say(f"wrote the tables of {page.relative_to(ROOT)}")
