"""The picture, the tables and the measurements of docs/theory.md.

    python experiments/theory_figure.py

Writes docs/images/theory.svg and the parts of the page between markers. Where ../shared/packs is
there, it first measures what the theory assumes on real networks and writes results/theory.json;
elsewhere that file is shown as it is.
"""

import json
import math
import tempfile
from pathlib import Path

import torch
from paper_docs import fill

import featcal
from featcal import theory
from featcal.report import diagram
from featcal.theory import printed

ROOT = Path(__file__).resolve().parents[1]
DOCS, RESULTS = ROOT / "docs" / "theory.md", ROOT / "results" / "theory.json"
PICTURE = ROOT / "docs" / "images" / "theory.svg"
PACKS = ROOT.parent / "shared" / "packs"
START = "<!-- {}: made by experiments/theory_figure.py -->"
PAPER_CLIP = 0.23  # the paper's threshold, ResNet-50 on CIFAR-10
CONFIDENCE = 0.8  # as for the paper's table of entropies
RECTIFIED = ("cifar10-resnet50", "cifar10-wrn16x4", "cifar100-wrn16x4")  # clip changes these
THRESHOLDS = (0.05, 0.2, PAPER_CLIP, 0.5, 1.0, 2.0, 5.0)
PLACES = ((PAPER_CLIP, 0.15), (PAPER_CLIP, 0.3), (PAPER_CLIP, 0.6), (1.0, 0.5), (1.0, 1.0))
WORDS = ("network",)  # columns of words, the others are of numbers
GROUPS = {"hce": "wrong", "lce": "right"}
SPAN, POINTS = (0.1, 3.0), 291  # of s in the picture, in thresholds; steps of a hundredth
ROOM = 0.12  # of the height of the curves, above and below them
CORRECT = {"color": diagram.BLUE, "linewidth": 2.2, "linestyle": "-"}
PRINTED = {"color": diagram.VERMILLION, "linewidth": 1.6, "linestyle": (0, (5, 2))}
OF_PRINTED = {"color": diagram.PURPLE, "linewidth": 1.8, "linestyle": (0, (1, 1.2))}


# --- formulas ------------------------------------------------------------------------------------


def slopes():
    """The derivative as plotted, as it follows from what is printed, and as it is."""
    heads = ("c", "s", "Eq. (12), plotted", "of Eq. (9)", "of Eq. (11)", "correct")
    functions = (
        printed.plotted_slope,
        printed.entropy_gain_slope,
        printed.appendix_entropy_gain_slope,
        theory.entropy_gain_slope,
    )
    rows = [[f"{c:g}", f"{s:g}", *(f"{f(c, s):.3f}" for f in functions)] for c, s in PLACES]
    return table(heads, rows)


def turns():
    """s* and its share of the threshold."""
    found = [(c, theory.turning_point(c)) for c in THRESHOLDS]
    return table(
        ("c", "s\\*", "s\\* / c"), [[f"{c:g}", f"{s:.4f}", f"{s / c:.3f}"] for c, s in found]
    )


def table(heads, rows):
    sides = ["---" if head in WORDS else "---:" for head in heads]
    lines = [heads, sides, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def percent(share):
    return f"{100 * share:.1f} %"


# --- what the theory assumes, on real networks ---------------------------------------------------


def measured(name):
    """HCE and LCE rows of the test split of a pack, with c fitted on val."""
    with tempfile.TemporaryDirectory() as folder:
        pack = featcal.import_files([PACKS / f"{name}.npz"], Path(folder) / name)
        c = float(featcal.parse("clip").fit(pack.split("val"), pack.head).threshold)
        parts = list(pack.split("test"))
        features = torch.cat([part.features for part in parts]).double()
        labels, head = torch.cat([part.labels for part in parts]), pack.head.double()
        with torch.no_grad():
            before, after = (head(x).log_softmax(1) for x in (features, features.clamp(max=c)))
    confidence, predicted = before.exp().max(1)
    sure, right = confidence > CONFIDENCE, predicted == labels
    rows = {"hce": sure & ~right, "lce": sure & right}
    groups = {key: group(features[at], before[at], after[at], c) for key, at in rows.items()}
    return {"pack": name, "c": c, "turning_point": theory.turning_point(c), **groups}


def group(features, before, after, c):
    """Numbers of the rows of a group; sigma is the likeliest with the mean held at 0."""
    squares, above = features.square().sum(1), (features > 0).double().sum(1)
    variance = float(squares.sum() / above.sum())
    # Of a ratio of two sums over rows.
    error = float((squares - variance * above).square().sum().sqrt() / above.sum())
    excess = (features - c).clamp(min=0)
    entropies = [float(-(p.exp() * p).sum(1).mean()) for p in (before, after)]
    return {
        "rows": len(features),
        "zeros": float((features == 0).double().mean()),
        "sigma": math.sqrt(variance),
        "sigma_error": error / (2 * math.sqrt(variance)),
        "clipped": float((excess > 0).double().mean()),
        "energy_removed": float(excess.square().sum() / features.square().sum()),
        "entropy_before": entropies[0],
        "entropy_after": entropies[1],
    }


def premises(results):
    """A row for each group of each network."""
    heads = ("network", "c", "rows", "zeros", "sigma", "clipped", "energy removed", "entropy")
    rows = []
    for found in results["packs"]:
        for key, word in GROUPS.items():
            g = found[key]
            cells = (
                f"{found['pack']}, {word}",
                f"{found['c']:.3f}",
                f"{g['rows']}",
                percent(g["zeros"]),
                f"{g['sigma']:.4f} ± {g['sigma_error']:.4f}",
                percent(g["clipped"]),
                percent(g["energy_removed"]),
                f"{g['entropy_before']:.3f} → {g['entropy_after']:.3f}",
            )
            rows.append(cells)
    return table(heads, rows)


def verdict(results):
    """What the rows above say, counted."""
    packs = results["packs"]
    larger = sum(p["hce"]["sigma"] > p["lce"]["sigma"] for p in packs)
    energy = sum(p["hce"]["energy_removed"] > p["lce"]["energy_removed"] for p in packs)
    grown = sum(growth(p["hce"]) > growth(p["lce"]) for p in packs)
    most = max(g["zeros"] for p in packs for g in (p["hce"], p["lce"]))
    return (
        f"- Confident wrong rows have the larger sigma in {larger} of {len(packs)} networks.\n"
        f"- Clipping removes the larger share of their energy in {energy} of {len(packs)}.\n"
        f"- Their softmax entropy grows more in {grown} of {len(packs)}.\n"
        f"- At most {percent(most)} of the values are 0; of a rectified normal of mean 0, half are."
    )


def growth(numbers):
    return numbers["entropy_after"] - numbers["entropy_before"]


# --- the page ------------------------------------------------------------------------------------


def sections(results):
    """The generated parts of the page by name."""
    return {
        "slopes": slopes(),
        "turning points": turns(),
        "premises": premises(results),
        "verdict": verdict(results),
    }


def draw():
    """The entropy gain and its derivative in s, as printed and as they are."""
    from matplotlib.figure import Figure

    s = PAPER_CLIP * torch.linspace(*SPAN, POINTS, dtype=torch.float64)
    panels = {
        "entropy gain ΔH": {
            "correct": (theory.entropy_gain, CORRECT),
            "as printed, Eq. (9)": (printed.entropy_gain, PRINTED),
        },
        "derivative of ΔH in s": {
            "correct": (theory.entropy_gain_slope, CORRECT),
            "of Eq. (9), taken correctly": (printed.entropy_gain_slope, OF_PRINTED),
            "as plotted, Eq. (12)": (printed.plotted_slope, PRINTED),
        },
    }
    with diagram.own_style():
        figure = Figure(figsize=(7.2, 3.5), layout="constrained")
        for ax, (what, curves) in zip(figure.subplots(1, 2), panels.items(), strict=True):
            panel(ax, what, s, curves)
        figure.savefig(PICTURE, metadata=diagram.METADATA["svg"])


def panel(ax, what, s, curves):
    ink, turn = ax.xaxis.label.get_color(), theory.turning_point(PAPER_CLIP)
    ax.axhline(0, color=ink, linewidth=diagram.EDGE, zorder=1)
    ax.axvline(turn, color=ink, linewidth=1, linestyle=":", zorder=1)
    for label, (formula, look) in curves.items():
        ax.plot(s.tolist(), formula(PAPER_CLIP, s).tolist(), label=label, **look)
    # Room for 0 and for every curve from s*/2 on; the printed ones run to infinity below.
    far = s[s >= 0.5 * turn]
    seen = torch.stack([formula(PAPER_CLIP, far) for formula, _ in curves.values()])
    low, high = min(0.0, seen.min().item()), max(0.0, seen.max().item())
    room = ROOM * (high - low)
    ax.set(xlim=(0, s[-1].item()), ylim=(low - room, high + room))
    place = ((turn, 0), (3, 3), ("data", "axes fraction"), "offset points")
    ax.annotate(f"s* = {turn:.3g}", *place, size=diagram.TEXT, color=ink, annotation_clip=True)
    title = f"{what}, c = {PAPER_CLIP:g}"
    ax.set_title(title, loc="left", size=diagram.TEXT + 1, weight="bold")
    ax.set_xlabel("standard deviation s before the ReLU", size=diagram.TEXT)
    ax.legend(loc="best", fontsize=diagram.TEXT, frameon=False, labelcolor=ink, handlelength=3)


def main():
    draw()
    if PACKS.is_dir():
        results = {
            "made_by": "experiments/theory_figure.py",
            "fit": "val",
            "measured": "test",
            "confidence": CONFIDENCE,
            "packs": [measured(name) for name in RECTIFIED],
        }
        RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    results = json.loads(RESULTS.read_text())
    DOCS.write_text(fill(DOCS.read_text(), sections(results), START))
    print(f"Wrote {PICTURE.relative_to(ROOT)} and the tables of {DOCS.relative_to(ROOT)}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
