"""The tables of docs/benchmarks.md and docs/scale.md, and a picture, from the result files alone.

Usage: python bench/tables.py

The one writer of what the other scripts of this folder measure, and keep in results/bench-*.json.
"""

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "images" / "benchmarks.svg"
START, END = "<!-- {}: made by bench/tables.py -->", "<!-- end of {} -->"


def results(name):
    """What a script has kept; None where it has not run."""
    path = ROOT / "results" / f"bench-{name}.json"
    return json.loads(path.read_text()) if path.is_file() else None


def lines(heads, rows):
    """A table; headings that begin with > are of numbers."""
    marks = "|".join("---:" if head.startswith(">") else "---" for head in heads)
    first, *rest = (
        f"| {' | '.join(row)} |" for row in ([head.lstrip(">") for head in heads], *rows)
    )
    return "\n".join([first, f"|{marks}|", *rest])


def seconds(value):
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def size_of(job):
    return f"{job['rows']:,} x {job['size']}"


def cpu(body):
    heads = ("job", "library", "input", "answer", ">seconds", ">times ours", ">units", ">memory")
    rows = []
    for job in body["jobs"]:
        what = f"{job['job']}, {size_of(job)}"
        ours = None
        for case in job["cases"]:
            name = f"{case['name']} {case['version']}".strip()
            if "error" in case:
                rows.append((what, name, case["input"], case["error"].partition(":")[0], *[""] * 4))
                continue
            ours = case if case["name"] == "featcal" else ours
            told = "value" in case and name != "published search"
            answer = f"{case['value']:.5g}" if told else ""
            if "excess" in case:
                answer += f" (NLL + {max(case['excess'], 0):.0e})"
            units = f"{case['units']:,.3g} {job['unit']}s".replace("e+03", "e3")
            if case["units"] >= 1000:
                units = f"{case['units']:,.0f} {job['unit']}s"
            times = f"{case['seconds'] / ours['seconds']:,.1f}"
            memory = f"{case['peak'] / 1e6:,.0f} MB"
            rows.append(
                (what, name, case["input"], answer, seconds(case["seconds"]), times, units, memory)
            )
    return lines(heads, rows)


def growth(body):
    slopes = (">slope by the clock", ">slope of core seconds", ">slope of seconds per pass")
    heads = ("job", "along", "from", ">passes", *slopes)
    rows = []
    for curve in body["growth"]["curves"]:
        start = curve["sizes"][0]
        kinds = ("rows", "features", "classes") if curve["job"] == "clip" else ("rows", "classes")
        first = " x ".join(f"{start[kind]:,}" for kind in kinds)
        passes = curve["passes"] if curve["job"] == "clip" else ()
        measured = ("seconds", "cpu_seconds", *(["seconds_per_pass"] if passes else []))
        slopes = [f"{curve[f'slope_{kind}']:.2f}" for kind in measured]
        walked = ", ".join(f"{mean:.1f}" for mean in passes)
        rows.append(
            (curve["job"], curve["axis"], first, walked, *slopes, *[""] * (3 - len(slopes)))
        )
    what = "Seconds against rows, features and classes on logarithmic axes"
    return f"![{what}](images/{PICTURE.name})\n\n{lines(heads, rows)}"


def vocabulary(body):
    found = body["vocabulary"]
    names = {recipe: recipe.replace("|", r"\|") for recipe in found["peaks"]}  # in a table's cell
    rows = [(f"`{names[one]}`", f"{peak / 1e6:,.0f} MB") for one, peak in found["peaks"].items()]
    return lines((f"recipe, {size_of(found)}", ">memory"), rows)


def gpu(body):
    fits = [
        key
        for key, value in body["problems"][0].items()
        if isinstance(value, dict) and "products" in value
    ]
    rows = []
    for one in body["problems"]:
        size = f"{one['rows']:,} x {one['features']} -> {one['classes']:,}"
        costs = (f"{one[f]['seconds'] * 1e3:,.0f} = {one[f]['products']:.1f}" for f in fits)
        ece = one.get("ece")
        found = f"{ece['seconds'] * 1e3:.1f} = {ece['reads']:.0f} reads" if ece else ""
        rows.append((size, f"{one['product'] * 1e3:.1f}", *costs, found))
    heads = ("problem", ">product, ms", *(f">{fit}" for fit in fits), ">ECE from logits")
    return f"{body['device']}; milliseconds = products of the head:\n\n{lines(heads, rows)}"


def report(body):
    kinds = {True: "signed", False: "ReLU"}
    rows = [
        (str(one["classes"]), kinds[one["signed"]], seconds(one["seconds"]), megabytes(one))
        for one in body["rows"]
    ]
    return lines((">classes", "features", ">seconds", ">page"), rows)


def megabytes(one):
    return f"{one['bytes'] / 1e6:.1f} MB"


def many(body):
    heads = (">rows in each split", "command", ">seconds", ">of all cores", ">memory")
    rows = []
    for one in body["rows"]:
        for name, cost in one.items():
            if name != "rows":
                took = (f"{cost[key]:.0f}" for key in ("seconds", "cpu_seconds"))
                memory = f"{cost['gigabytes']:.1f} GB"
                rows.append((f"{one['rows']:,}", f"`{name}`", *took, memory))
    return lines(heads, rows)


def memory(body):
    heads = (">pack", "held by", "command", ">seconds", ">of its own at most")
    rows = []
    for run in body["runs"]:
        by = f"`--memory {run['memory']}`" + (" and the system" if run["group"] else "")
        for name, cost in run.items():
            if isinstance(cost, dict):
                size, own = f"{run['pack_bytes'] / 1e9:.0f} GB", f"{cost['own_bytes'] / 1e6:.0f} MB"
                rows.append((size, by, f"`{name}`", seconds(cost["seconds"]), own))
    return lines(heads, rows)


def scale(body):
    """One row for each recipe and number of rows, one column for each number of processes."""
    numbers = sorted({case["processes"] for case in body["cases"]})
    by = {(c["recipe"], c["rows"], c["processes"]): c for c in body["cases"]}
    rows = []
    for recipe, count in dict.fromkeys(key[:2] for key in by):
        runs = [by[recipe, count, number] for number in numbers]
        cells = (f"{one['fit_seconds']:.2f} ({one['seconds']:.0f})" for one in runs)
        rows.append((f"`{recipe}`", f"{count:,}", *cells))
    heads = ("recipe", ">rows", *(f">{n} process{'es' if n > 1 else ''}" for n in numbers))
    machine, expected = body["machine"], body["expected"]
    words = (
        f"`featcal fit` on a made pack, {body['features']} features, {body['classes']} classes, "
        f"on {machine['cores']} cores, one thread per process: seconds of the fit, and of the "
        "whole command in brackets.\n\n"
    )
    after = "".join(
        f"- `{recipe}`: slope {found['slope']:.2f}, so {found['hours']:.1f} hours of one core\n"
        for recipe, found in expected.items()
        if found["slope"] is not None
    )
    if after:
        after = (
            f"\n\nAt {body['far']:,} rows of that size, computed from the seconds at the most rows "
            "and the slope of log seconds on log rows, of one process (a slope below 1 is taken as "
            "1), and measured by nobody; reading from a disk comes on top where the pack is larger "
            f"than memory:\n\n{after.rstrip()}"
        )
    return words + lines(heads, rows) + after


PARTS = {  # of each page: the name between the markers, the result file, how it is shown
    "benchmarks.md": {
        "cpu": ("cpu", cpu),
        "vocabulary": ("cpu", vocabulary),
        "growth": ("cpu", growth),
        "gpu": ("gpu", gpu),
        "report": ("report", report),
        "rows": ("rows", many),
        "memory": ("memory", memory),
    },
    "scale.md": {"scale": ("scale", scale)},
}


def parts(page):
    """The generated parts of a page by name, those whose numbers are there."""
    found = {name: (results(file), show) for name, (file, show) in PARTS[page].items()}
    return {name: show(body) for name, (body, show) in found.items() if body and body.get(name, 1)}


def draw(body):
    """Seconds against size, on logarithmic axes, of what grows."""
    from matplotlib.figure import Figure

    from featcal.report.diagram import BLUE, METADATA, PURPLE, TEXT, VERMILLION, own_style

    colours = {"clip": BLUE, "temperature": VERMILLION, "ECE": PURPLE}
    with own_style():
        figure = Figure(figsize=(7.2, 2.8), layout="constrained")
        for ax, axis in zip(
            figure.subplots(1, 3, sharey=True), ("rows", "features", "classes"), strict=True
        ):
            for curve in body["growth"]["curves"]:
                if curve["axis"] == axis:
                    at = [size[axis] for size in curve["sizes"]]
                    label = f"{curve['job']}, slope {curve['slope_seconds']:.2f}"
                    colour = colours[curve["job"]]
                    ax.plot(at, curve["seconds"], marker="o", label=label, color=colour)
            ax.set(xscale="log", yscale="log", xticks=at, xticklabels=[f"{n:,}" for n in at])
            ax.minorticks_off()
            ax.set_xlabel(axis, size=TEXT)
            ax.legend(fontsize=TEXT - 1, frameon=False)
        figure.axes[0].set_ylabel("seconds", size=TEXT)
        figure.savefig(PICTURE, metadata=METADATA["svg"])


def main():
    for page in PARTS:
        path = ROOT / "docs" / page
        text = path.read_text()
        for name, part in parts(page).items():
            start, end = START.format(name), END.format(name)
            before, rest = text.split(start)
            text = f"{before}{start}\n{part}\n{end}{rest.split(end)[1]}"
        path.write_text(text)
    if "growth" in parts("benchmarks.md"):
        draw(results("cpu"))


if __name__ == "__main__":
    main()
