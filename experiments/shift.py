"""Calibrated on clean images, asked about damaged ones: what each recipe is worth under shift.

    python experiments/shift.py --run FOLDER ... --data FOLDER [--rows N] [--output FILE]
    python experiments/shift.py --merge FILE ... [--output FILE]
    python experiments/shift.py --docs

A run is a folder of experiments/train_published.py, finished with --keep-weights or still under way
(then its last checkpoint counts), or a file of its weights. Recipes are fitted on the clean val
images and scored on test images, clean and with nine kinds of damage at five strengths, never
fitted there. Every network is one entry of results/shift.json; --merge takes in entries that were
made elsewhere. --docs writes the part of docs/research.md between its markers, with the questions
out of scope of results/example-text.json, and the picture.
"""

import argparse
import copy
import json
import time
from pathlib import Path
from statistics import fmean

import torch
from corruptions import KINDS, STRENGTHS, corrupted
from paper_tables import DATASETS, NETWORKS
from safetensors import safe_open
from train_published import WEIGHTS

import featcal
from featcal.core.batch import bin_index
from featcal.core.checks import InputError
from featcal.core.text import NONE
from featcal.datasets import Images, load_images, normalisations, split
from featcal.metrics import Predictions
from featcal.metrics.columns import COLUMNS
from featcal.models import build
from featcal.report.bootstrap import Interval, Resamples, interval, marks
from featcal.report.compare import Fits, parse_all, versions
from featcal.report.diagram import METADATA, TEXT, own_style
from featcal.report.scores import calibrated_logits
from featcal.report.tables import Table, fitted_text
from featcal.train.history import HUES, Batches
from featcal.train.loop import full_precision
from featcal.train.run_folder import CHECKPOINT, KEY

ROOT = Path(__file__).resolve().parents[1]
RESULTS, TEXT_RESULTS = (ROOT / "results" / f"{name}.json" for name in ("shift", "example-text"))
PAGE, PICTURE = ROOT / "docs" / "research.md", ROOT / "docs" / "images" / "shift.svg"
START, END = "<!-- shift -->", "<!-- /shift -->"
BASE, OURS = "temperature", "sample"
RECIPES = (
    *(NONE, BASE, "parameterised", "ensemble", "vector"),
    *("clip | temperature", "sample", "clip | sample", "auto"),
)
BINS, RESAMPLES, SEED = 15, 500, 0
AT_ONCE = {"cuda": 1000, "cpu": 100}  # images: what fills a GPU, what a core's cache holds
PAIRED = ("nll", "ece")  # with an interval of the difference from BASE
CLEAN = "clean"
INTRO = """\
A calibrator is a promise about rows like those it was fitted on. Here they are unlike, and nothing
is fitted on them. `make examples` asks questions that no class covers."""
DAMAGED = """\
Images that are noisy, blurred, pale or compressed: `make shift` judges networks that
`experiments/train_published.py` trained with `--keep-weights`; the damage is in
`experiments/corruptions.py`, in the manner of Hendrycks and Dietterich (ICLR 2019), with strengths
of our own."""
NO_IMAGES = "Damaged images, which `make shift` is for, have not been judged yet."


# --- one network ---------------------------------------------------------------------------------


def weights_of(path):
    """What is said of a run's network, and its tensors."""
    files = [path] if path.is_file() else [path / WEIGHTS, path / CHECKPOINT]
    file = next(filter(Path.is_file, files), None)
    if file is None:
        raise SystemExit(f"{path} has neither {WEIGHTS} nor {CHECKPOINT}: train --keep-weights")
    start = "model."
    with safe_open(file, "pt") as found:
        about = json.loads(found.metadata()[KEY])
        keys = [key for key in found.keys() if key.startswith(start)]  # noqa: SIM118
        return about, {key.removeprefix(start): found.get_tensor(key) for key in keys}


def readable(recipe):
    """Whether this featcal knows the recipe."""
    try:
        parse_all([recipe])
    except InputError:
        return False
    return True


def resampled(rows):
    """The rows as they are, then drawn again and again: weights (1 + b, rows) of a mean."""
    return Resamples.draw(rows, RESAMPLES, SEED).counts.T.double() / rows


def scored(logits, labels, weights):
    """Each metric on the rows as they are and on every resample, (1 + b,) float64."""
    seen = Predictions.of(logits=logits, labels=labels)
    sure, right = seen.confidence.double(), seen.correct.double()
    true = seen.probs.gather(1, labels[:, None])[:, 0].double()
    error = seen.probs.square().sum(1, dtype=torch.float64) + 1 - 2 * true
    gaps = torch.zeros(len(labels), BINS, dtype=torch.float64)
    gaps.scatter_(1, bin_index(seen.confidence, BINS)[:, None], (sure - right)[:, None])
    means = torch.stack([-seen.log_true.double(), error, right, sure], 1)
    found = weights @ torch.cat([means, gaps], 1)
    named = zip(("nll", "brier", "accuracy", "confidence"), found.T, strict=False)
    return {**dict(named), "ece": found[:, 4:].abs().sum(1)}


def told(scores):
    """The scores of every recipe as JSON, with differences from BASE.

    Of a difference its value and the end of its interval on the side of 0, which tells what it is.
    """
    entries = {}
    for recipe, found in scores.items():
        entry = {name: short(values[0]) for name, values in found.items()}
        if recipe != BASE:
            entry["difference"] = {}
            for name in PAIRED:
                pairs = found[name] - scores[BASE][name]
                around = interval(float(pairs[0]), pairs, COLUMNS[name].power)
                near = around.low if float(pairs[0]) > 0 else around.high
                entry["difference"][name] = [short(pairs[0]), short(near)]
        entries[recipe] = entry
    return entries


def short(value):
    return float(f"{float(value):.6g}")


def mean_scores(every):
    """The mean over kinds of what the same test rows gave, resample by resample."""
    return {
        recipe: {
            name: torch.stack([scores[recipe][name] for scores in every]).mean(0) for name in found
        }
        for recipe, found in every[0].items()
    }


@torch.no_grad()
def all_scored(data, fitted, head, weights):
    """The scores of every recipe on some rows."""
    labels = torch.cat([batch.labels for batch in data])
    return {
        recipe: scored(
            torch.cat([calibrated_logits(batch, calibrator, head) for batch in data]),
            labels,
            weights,
        )
        for recipe, calibrator in fitted.items()
    }


def judged(path, data, rows):
    """The entry of a network."""
    about, tensors = weights_of(path)
    settings, device = about["settings"], "cuda" if torch.cuda.is_available() else "cpu"
    splits = data(settings["dataset"])
    pixels, _ = normalisations(splits.name)
    model = build(settings["network"], len(splits.class_names))
    model.load_state_dict(tensors)
    model = model.eval().to(device, memory_format=torch.channels_last)

    def seen(images):
        with full_precision():
            batches = Batches(images, pixels, torch.device(device), AT_ONCE[device])
            return featcal.collect(model, batches)

    test = splits.test.rows(torch.arange(min(rows, len(splits.test))))
    val, clean, head = seen(splits.val), seen(test), copy.deepcopy(model.head).cpu()
    recipes = list(filter(readable, RECIPES))
    calibrators = parse_all(recipes)
    fits = Fits(val, head, "sequential", calibrators)
    fitted = {
        recipe: None if calibrator is None else fits.fit(calibrator)
        for recipe, calibrator in zip(recipes, calibrators, strict=True)
    }
    weights = resampled(len(test))
    plain = all_scored(clean, fitted, head, weights)
    sets, means = [{"kind": CLEAN, "strength": 0, "scores": told(plain)}], []
    for strength in STRENGTHS:
        every = []
        for kind in KINDS:
            began = time.perf_counter()
            damaged = Images(corrupted(test.pixels, kind, strength, SEED), test.labels)
            every.append(all_scored(seen(damaged), fitted, head, weights))
            sets.append({"kind": kind, "strength": strength, "scores": told(every[-1])})
            accuracy, spent = float(every[-1][NONE]["accuracy"][0]), time.perf_counter() - began
            print(f"{path.stem} {kind} {strength}: right {accuracy:.3f}, {spent:.1f} s", flush=True)
        means.append({"strength": strength, "scores": told(mean_scores(every))})
    return {
        **{key: settings[key] for key in ("dataset", "network", "loss")},
        "epochs": {"done": about["position"]["epoch"], "of": settings["recipe"]["epochs"]},
        "train_seed": settings["recipe"]["seed"],
        "rows": {"val": val.rows, "test": len(test), "of": len(splits.test)},
        **{"bins": BINS, "resamples": RESAMPLES, "seed": SEED, "versions": versions()},
        "kinds": {kind: list(found[1]) for kind, found in KINDS.items()},
        "fitted": {
            recipe: NONE if one is None else fitted_text([one.report])
            for recipe, one in fitted.items()
        },
        **{"sets": sets, "means": means},
    }


def write(output, networks):
    """Adds networks to a result file, in place of those of the same name."""
    known = json.loads(output.read_text())["networks"] if output.exists() else {}
    every = dict(sorted({**known, **networks}.items()))
    content = {"made_by": "experiments/shift.py", "networks": every}
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")


# --- the page ------------------------------------------------------------------------------------


def found_as(scores, recipe, metric):
    """What the interval of a difference from BASE says: better, worse or undecided."""
    if recipe == BASE:
        return None
    delta, near = scores[recipe]["difference"][metric]
    return marks(metric, [(delta, Interval(*sorted((near, 2 * delta - near))))])[0]


def strengths_of(network):
    """The scores on clean images, then the means over kinds of each strength."""
    return [network["sets"][0]["scores"], *(mean["scores"] for mean in network["means"])]


def relative(scores, recipe):
    """NLL against BASE's, in percent."""
    return 100 * (scores[recipe]["nll"] / scores[BASE]["nll"] - 1)


def marked(text, every, recipe, metric):
    """Bold where each of the scores finds it better than BASE, with a star where each worse."""
    words = {found_as(scores, recipe, metric) for scores in every}
    if words == {"better"}:
        return f"**{text}**"
    return f"{text} *" if words == {"worse"} else text


def recipes_of(networks):
    """Those that every network has, in our order."""
    return [recipe for recipe in RECIPES if all(recipe in n["fitted"] for n in networks)]


def by_strength(networks):
    """NLL of every recipe by strength: means over kinds and networks."""
    rows = []
    for recipe in recipes_of(networks):
        cells = []
        for every in zip(*map(strengths_of, networks), strict=True):
            if recipe == BASE:
                text = f"{fmean(scores[recipe]['nll'] for scores in every):.4f}"
            else:
                text = f"{fmean(relative(scores, recipe) for scores in every):+.2f} %"
            cells.append(marked(text, every, recipe, "nll"))
        rows.append((f"`{recipe}`", *cells))
    title = f"NLL of `{BASE}`, and of the others against it"
    return grid((title, CLEAN, *map(str, STRENGTHS)), rows)


def grid(headings, rows):
    """A table whose first column is words and the others numbers."""
    numeric = [place > 0 for place in range(len(headings))]
    return Table("", tuple(headings), tuple(rows)).markdown(numeric=numeric)


def by_network(networks):
    """NLL of OURS against BASE's by strength, a row for each of several networks."""
    rows = []
    for network in networks:
        cells = (
            marked(f"{relative(scores, OURS):+.2f} %", [scores], OURS, "nll")
            for scores in strengths_of(network)
        )
        rows.append((title(network), *cells))
    return grid((f"`{OURS}` against `{BASE}`", CLEAN, *map(str, STRENGTHS)), rows)


def title(network):
    """What a network is, in words."""
    loss = network["loss"].partition("(")[0]
    name = NETWORKS.get(network["network"], network["network"])
    return f"{name} with {loss}, seed {network['train_seed']}"


def accuracy_line(networks):
    """How often the networks are right, by strength."""
    levels = zip(*map(strengths_of, networks), strict=True)
    means = [100 * fmean(scores[NONE]["accuracy"] for scores in every) for every in levels]
    first, *rest = (f"{mean:.1f}" for mean in means)
    return f"right on {first} % of them, and on {', '.join(rest)} % from strength 1 to 5"


def image_part(dataset, networks):
    """Tables of the networks of one data set."""
    found = list(networks.values())
    several, first = len(found) > 1, found[0]
    which = f"{len(found)} networks trained here" if several else f"{title(first)}, trained here"
    rows = first["rows"]
    assert all(n["rows"] == rows for n in found), f"{dataset}: networks were scored on other rows"
    unfinished = [
        f" `{name}` had {n['epochs']['done']} of {n['epochs']['of']} epochs."
        for name, n in networks.items()
        if n["epochs"]["done"] < n["epochs"]["of"]
    ]
    part = f"the first {rows['test']:,} of " if rows["test"] < rows["of"] else ""
    over, where = (" and networks", " on every network") if several else ("", "")
    return "\n\n".join(
        [
            f"**{DATASETS[dataset]}**, {which}: fitted on {rows['val']:,} clean val images, scored "
            f"on {part}{rows['of']:,} test images, {accuracy_line(found)}; means over {len(KINDS)} "
            f"kinds of damage{over}.{''.join(unfinished)}",
            by_strength(found),
            f"Bold: better than `{BASE}` by the paired interval (95 %, {first['resamples']} "
            f"resamples of the images){where}; with a star: worse{where}.",
            *([by_network(found)] if several else []),
        ]
    )


def scope_part(results):
    """Questions out of scope: how sure each recipe is of them, means over the seeds of a head."""
    stories, cases = [], [c for c in results["cases"] if "scope" in c["recipes"][0]]
    for kind, title in (("mlp", "one hidden layer"), ("linear", "linear")):
        same = [case["recipes"] for case in cases if case["head"] == kind]
        for recipe in (BASE, OURS):
            rows = [
                row
                for recipes in same
                for row in recipes
                if (row["recipe"], row["mode"]) == (recipe, "sequential")
            ]
            sure = 100 * fmean(row["scope"]["out_of_scope"]["above"]["0.9"] for row in rows)
            order = fmean(row["scope"]["auroc"] for row in rows)
            stories.append((title, fmean(row["metrics"]["nll"] for row in rows), order, sure))
    compared = "; ".join(
        f"{was[0]}: NLL in scope {was[1]:.4f} and {now[1]:.4f}, AUROC {was[2]:.4f} and "
        f"{now[2]:.4f}, out of scope above 0.9 {was[3]:.1f} % and {now[3]:.1f} %"
        for was, now in zip(stories[::2], stories[1::2], strict=True)
    )
    seeds, sizes = len({case["seed"] for case in cases}), results["sets"]["clinc150"]
    return (
        f"**clinc150**, heads on a frozen sentence encoder ([example](text.md)), fitted on "
        f"{sizes['rows']['val']:,} questions in scope and asked {sizes['rows']['test']:,} others "
        f"in scope and {sizes['out_of_scope']:,} that no intent covers; means over {seeds} seeds. "
        f"AUROC is how well confidence tells the two kinds apart. What fits questions in scope "
        f"best is surer of the others too: `{BASE}` and `{OURS}`, {compared}. Calibration in scope "
        "is no guard against what lies outside."
    )


def page_part(results, text_results):
    """All between the markers."""
    parts = []
    for dataset, networks in by_dataset(results).items():
        parts.append(image_part(dataset, networks))
    if parts:
        words = "lines over strengths of damage from clean to 5, one for each recipe"
        parts.insert(0, f"![ECE and NLL under shift: {words}](images/{PICTURE.name})")
    images = [DAMAGED, *parts] if parts else [NO_IMAGES]
    return "\n\n".join([INTRO, *images, scope_part(text_results)])


def by_dataset(results):
    """The networks of each data set by name."""
    found = {}
    for name, network in results["networks"].items():
        found.setdefault(network["dataset"], {})[name] = network
    return found


def filled(text, part):
    """The page with this part between its markers."""
    head, rest = text.split(START)
    return f"{head}{START}\n{part}\n{END}{rest.split(END)[1]}"


def draw(results, path):
    """ECE, and NLL against BASE, by strength; a line for each recipe, a row for each data set."""
    from matplotlib.figure import Figure

    groups = by_dataset(results)
    with own_style():
        figure = Figure(figsize=(8.4, 0.6 + 3.0 * len(groups)), layout="constrained")
        panels = figure.subplots(len(groups), 2, squeeze=False)
        for (left, right), (dataset, networks) in zip(panels, groups.items(), strict=True):
            levels = list(zip(*map(strengths_of, networks.values()), strict=True))
            for place, recipe in enumerate(recipes_of(list(networks.values()))):
                look = {"color": HUES[place % len(HUES)], "marker": ".", "label": recipe}
                look["linestyle"] = "--" if place >= len(HUES) else "-"
                x = range(len(levels))
                ece = [100 * fmean(scores[recipe]["ece"] for scores in every) for every in levels]
                nll = [fmean(relative(scores, recipe) for scores in every) for every in levels]
                left.plot(x, ece, **look)
                if recipe != NONE:  # far above all others
                    right.plot(x, nll, **look)
            words = ("ECE on test, %", f"NLL against {BASE}, %")
            for ax, what in zip((left, right), words, strict=True):
                ax.set_xticks(range(len(levels)), (CLEAN, *map(str, STRENGTHS)))
                ax.set_xlabel("strength of the damage, means over kinds")
                ax.set_ylabel(what)
                ax.grid(visible=True, axis="y", linewidth=0.4, alpha=0.5)
                ax.spines[["top", "right"]].set_visible(False)
                ax.set_title(DATASETS[dataset], loc="left", size=TEXT + 1, weight="bold")
            left.set_ylim(bottom=0)
        lines, words = panels[0][0].get_legend_handles_labels()
        figure.legend(lines, words, loc="outside lower center", ncols=5, frameon=False)
        figure.savefig(path, metadata=METADATA["svg"])


def read():
    """Both result files; no network where none was judged yet."""
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"networks": {}}
    return found, json.loads(TEXT_RESULTS.read_text())


# --- all of it -----------------------------------------------------------------------------------


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--run", nargs="+", type=Path, default=[], help="folders or weights")
    parser.add_argument("--data", type=Path, help="folder with cifar10/ and cifar100/")
    parser.add_argument("--rows", type=int, default=10_000, help="the first so many test images")
    parser.add_argument("--merge", nargs="+", type=Path, default=[], metavar="FILE")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--docs", action="store_true", help="write the page from the results")
    options = parser.parse_args()
    if options.run and options.data is None:
        parser.error("--data is missing: the folder with cifar10/ and cifar100/")
    known = {}

    def data(dataset):
        if dataset not in known:
            known[dataset] = split(load_images(dataset, options.data / dataset))
        return known[dataset]

    for path in options.run:
        write(options.output, {path.stem: judged(path, data, options.rows)})
        print(f"Wrote {path.stem} into {options.output}", flush=True)
    for path in options.merge:
        write(options.output, json.loads(path.read_text())["networks"])
    if options.docs:
        results, text_results = read()
        PAGE.write_text(filled(PAGE.read_text(), page_part(results, text_results)))
        if results["networks"]:
            draw(results, PICTURE)
        print(f"Wrote its part of {PAGE}")


if __name__ == "__main__":
    main()
