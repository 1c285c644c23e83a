"""Tables, pictures and bars of docs/research.md, from results/study.json alone.

    python experiments/study_docs.py

Writes the parts of the page between its markers and docs/images/research-*.svg, and prints which
bars are met. Packs are the unit: resplits of one pack share its rows and its network, so they make
the figure of a pack steadier and never count as further packs.
"""

import json
from pathlib import Path
from statistics import fmean, median

import numpy as np
from paper_docs import fill
from scipy import stats

from featcal.metrics.columns import COLUMNS
from featcal.report.diagram import BLUE, EDGE, GREY, METADATA, PURPLE, TEXT, VERMILLION, own_style
from featcal.report.tables import Table

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "results" / "study.json", ROOT / "docs" / "research.md"
IMAGES = ROOT / "docs" / "images"
RANKS, LINES = IMAGES / "research-ranks.svg", IMAGES / "research-sizes.svg"
START = "<!-- {}: made by experiments/study_docs.py -->"
GROUPS = {"shared": "shared packs", "held out": "held-out networks"}
BOTH = "all"
LEVEL = 0.05
BASE, OURS = "temperature", ("auto", "sample")
SHOWN = ("none", "parameterised", "clip | temperature", *OURS)  # of the table by pack
RIVALS = ("none", "temperature", "vector", "svs", "ensemble", "parameterised", "clip | temperature")
TOLD = (500, 2500)  # sizes of the tables, and those the bars are about
LOWER, WORSE = 0.01, 0.001  # what sample must gain over temperature, and may lose on a pack
TIMES, SECONDS = 3.0, 10.0  # sample beside temperature, and auto on the demo pack
NONE = "—"
GREEN = "#009E73"


# --- reading -------------------------------------------------------------------------------------


class Study:
    """The result file, by pack, size and recipe."""

    def __init__(self, results):
        self.setting, self.packs, self.speed = (results[k] for k in ("setting", "packs", "speed"))
        self.results = results["results"]
        found = [int(size) for of_pack in self.results.values() for size in of_pack]
        self.sizes = sorted(set(found))
        every = [
            recipe for of in self.results.values() for cells in of.values() for recipe in cells
        ]
        self.recipes = list(dict.fromkeys(every))

    def of_group(self, group, size):
        """The packs of a group, or all, that have results at a size."""
        return [
            pack
            for pack, of_pack in self.results.items()
            if str(size) in of_pack and group in (BOTH, self.packs[pack]["group"])
        ]

    def cell(self, pack, size, recipe):
        """What is kept of a recipe; nothing where it was not tried."""
        return self.results[pack].get(str(size), {}).get(recipe, {})

    def ran(self, pack, size, recipe):
        """Whether it was fitted there."""
        return "nll" in self.cell(pack, size, recipe)

    def mean(self, pack, size, recipe, metric):
        """A metric's mean over resplits."""
        found = self.cell(pack, size, recipe)[metric]
        return fmean(found) if isinstance(found, list) else found

    def test_rows(self, pack, size):
        """How many rows are scored."""
        return min(self.packs[pack]["rows"] - size, self.setting["test_rows_at_most"])


# --- ranks ---------------------------------------------------------------------------------------


def pack_ranks(study, pack, size, recipes, metric):
    """The mean over resplits of each recipe's rank among these, 1 the best; ties share theirs.

    That is 1 and, for every other recipe, the share of resplits in which it is the better one, with
    ties as halves. So counted, a pair of recipes needs no more than the resplits that both have.
    """
    lists = [study.cell(pack, size, recipe)[metric] for recipe in recipes]
    values = np.full((len(lists), max(map(len, lists))), np.nan)
    for row, found in zip(values, lists, strict=True):
        row[: len(found)] = found
    here, there = values[:, None], values[None]
    better = ((there < here) + 0.5 * (there == here)).sum(2)
    both = (~np.isnan(here + there)).sum(2)
    return 0.5 + (better / both).sum(1)  # a recipe ties with itself


def complete(study, packs, size):
    """The recipes that were fitted on every one of these packs."""
    return [r for r in study.recipes if packs and all(study.ran(p, size, r) for p in packs)]


def mean_ranks(study, group, size, metric):
    """Recipe -> its mean rank over packs and the number of packs, best first.

    Recipes that were fitted everywhere are ranked among themselves. Any other is ranked among them
    and itself, on those packs that it was fitted on.
    """
    packs = study.of_group(group, size)
    whole = complete(study, packs, size)
    if not whole:
        return {}
    table = np.stack([pack_ranks(study, pack, size, whole, metric) for pack in packs])
    found = {r: (float(v), len(packs)) for r, v in zip(whole, table.mean(0), strict=True)}
    for recipe in study.recipes:
        some = [pack for pack in packs if recipe not in whole and study.ran(pack, size, recipe)]
        if some:
            own = [pack_ranks(study, p, size, [*whole, recipe], metric)[-1] for p in some]
            found[recipe] = (float(np.mean(own)), len(some))
    return dict(sorted(found.items(), key=lambda item: item[1][0]))


def critical_difference(recipes, packs):
    """What two mean ranks must differ by: Nemenyi's test at 5 % (Demšar, 2006)."""
    q = stats.studentized_range.ppf(1 - LEVEL, recipes, np.inf) / np.sqrt(2)
    return float(q * np.sqrt(recipes * (recipes + 1) / (6 * packs)))


def cliques(ranks, difference):
    """The longest runs of sorted ranks that lie within the critical difference: (first, last)."""
    found = []
    for first, rank in enumerate(ranks):
        last = max(place for place, other in enumerate(ranks) if other - rank <= difference)
        if last > first and (not found or last > found[-1][1]):
            found.append((first, last))
    return found


def friedman(study, packs, size, recipes, metric):
    """The p-value of Friedman's test on the order that each pack's mean ranks give."""
    ranks = [pack_ranks(study, pack, size, recipes, metric) for pack in packs]
    return float(stats.friedmanchisquare(*np.transpose(ranks)).pvalue)


def holm(values):
    """p-values as Holm adjusts them for their number."""
    order = np.argsort(values)
    scaled = np.asarray(values)[order] * np.arange(len(values), 0, -1)
    adjusted = np.empty(len(values))
    adjusted[order] = np.minimum(np.maximum.accumulate(scaled), 1)
    return adjusted.tolist()


# --- paired differences --------------------------------------------------------------------------


def paired(study, pack, size, recipe, other, metric):
    """The mean difference of two recipes over resplits, and half its 95 % interval.

    Nadeau and Bengio's correction for resplits that share rows: the variance of the mean is
    (1/J + q / (1 - q)) times that of a difference, with q the share of the rows that is scored.
    Where all others are fitted on, this is the published n_test / n_fit.
    """
    lists = [study.cell(pack, size, r)[metric] for r in (recipe, other)]
    count = min(map(len, lists))
    apart = np.array(lists[0][:count]) - np.array(lists[1][:count])
    scored = study.test_rows(pack, size)
    factor = 1 / count + scored / (study.packs[pack]["rows"] - scored)
    t = stats.t.ppf(1 - LEVEL / 2, count - 1) if count > 1 else np.inf
    half = float(t * np.sqrt(factor) * apart.std(ddof=1)) if count > 1 else np.inf
    return float(apart.mean()), half


def relative(study, pack, size, recipe, other=BASE, metric="nll"):
    """The same as shares of the other recipe's mean."""
    level = study.mean(pack, size, other, metric)
    difference, half = paired(study, pack, size, recipe, other, metric)
    return difference / level, half / level


# --- bars ----------------------------------------------------------------------------------------


def bars(study, group):
    """(claim, whether it holds or None where it was not measured, figures) for a group of packs."""
    return [
        *(best_ranks(study, group, size) for size in TOLD),
        *(gain(study, group, size) for size in TOLD),
        ece_kept(study, group),
        none_beaten(study, group),
    ]


def best_ranks(study, group, size):
    """Against recipes fitted on all packs by mean rank; against another on its own packs alone."""
    claim = f"`auto` and `sample` have the two best mean ranks in NLL, {size:,} rows"
    packs = study.of_group(group, size)
    whole = complete(study, packs, size)
    if not set(OURS) <= set(whole):
        return claim, None, ""
    ranks = mean_ranks(study, group, size, "nll")
    rivals = [r for r in ranks if "sample" not in r and r != "auto"]  # the best first
    ahead = []
    for rival in rivals:
        some = [pack for pack in packs if study.ran(pack, size, rival)]
        recipes = [*(recipe for recipe in whole if recipe != rival), rival]
        means = np.mean([pack_ranks(study, p, size, recipes, "nll") for p in some], 0)
        if min(means[-1] - means[recipes.index(own)] for own in OURS) <= 0:
            ahead.append(f"{name(rival)} on {len(some)} of {len(packs)} packs")
    own = ", ".join(f"{name(r)} {ranks[r][0]:.2f}" for r in OURS)
    best = next(rival for rival in rivals if rival in whole)
    figures = f"{own}; next {name(best)} {ranks[best][0]:.2f}"
    if ahead:
        figures += f"; ahead of one of them: {', '.join(ahead)}"
    return claim, not ahead, figures


def gain(study, group, size):
    claim = (
        f"NLL of `sample` at least {100 * LOWER:g} % below temperature on average and on no pack "
        f"above it by more than {100 * WORSE:g} %, {size:,} rows"
    )
    packs = [p for p in study.of_group(group, size) if study.ran(p, size, "sample")]
    if not packs:
        return claim, None, ""
    found = {pack: relative(study, pack, size, "sample")[0] for pack in packs}
    worst = max(found, key=found.get)
    mean = fmean(found.values())
    met = mean <= -LOWER and found[worst] <= WORSE
    return claim, met, f"{percent(mean)} on average; worst {percent(found[worst])} ({worst})"


def ece_kept(study, group):
    claim = "ECE of `auto` above temperature's beyond the paired interval on no pack, any size"
    return never_worse(study, group, claim, study.sizes, BASE, "ece")


def none_beaten(study, group):
    claim = "NLL of `auto` never significantly above the network's own, 250 rows"
    return never_worse(study, group, claim, [250], "none", "nll")


def never_worse(study, group, claim, sizes, other, metric):
    found = {
        (pack, size): paired(study, pack, size, "auto", other, metric)
        for size in sizes
        for pack in study.of_group(group, size)
        if study.ran(pack, size, "auto")
    }
    if not found:
        return claim, None, ""
    beyond = [key for key, (mean, half) in found.items() if mean > half]
    higher = sum(mean > 0 for mean, _ in found.values())
    (pack, size), (most, half) = max(found.items(), key=lambda item: item[1][0])
    number = signed(metric, most, half)
    figures = (
        f"beyond it in {len(beyond)} of {len(found)} cases; above on average in {higher}, by at "
        f"most {number} ({pack}, {size:,} rows)"
    )
    return claim, not beyond, figures


def speed_bars(study):
    seconds = study.speed.get("seconds", {})
    size = "{rows:,} x {classes:,}".format(**study.speed) if seconds else "25,000 x 1,000"
    claims = (
        f"`sample` takes at most {TIMES:g} times as long as `temperature`, {size}",
        f"`auto` on the demo pack takes less than {SECONDS:g} s",
    )
    if not seconds:
        return [(claim, None, "") for claim in claims]
    ratio = seconds["sample"] / seconds["temperature"]
    found = [(claims[0], ratio <= TIMES, f"{ratio:.1f} times, {seconds['sample']:.2f} s")]
    auto = seconds.get("auto")
    threads = f"threads: {study.speed['threads']}"
    of_auto = (None, "") if auto is None else (auto < SECONDS, f"{auto:.1f} s, {threads}")
    return [*found, (claims[1], *of_auto)]


def verdict(met, figures):
    return "not measured" if met is None else f"{'met' if met else '**not met**'}: {figures}"


def bar_table(study):
    groups = {name: bars(study, name) for name in GROUPS}
    rows = [
        (claims[0][0], *(verdict(*claim[1:]) for claim in claims))
        for claims in zip(*groups.values(), strict=True)
    ]
    rows += [(claim, verdict(*found), "") for claim, *found in speed_bars(study)]
    return table(("", *GROUPS.values()), rows)


# --- text ----------------------------------------------------------------------------------------


def percent(share):
    return f"{100 * share:+.2f} %".replace("+0.00", "0.00").replace("-0.00", "0.00")


def signed(metric, mean, half):
    """A difference and half its interval, in percent points where the metric is in percent."""
    scale, unit = (100, " points") if COLUMNS[metric].percent else (1, "")
    digits = 2 if COLUMNS[metric].percent else 4
    return f"{scale * mean:+.{digits}f} ± {scale * half:.{digits}f}{unit}"


def table(heads, rows):
    return Table("", tuple(heads), tuple(map(tuple, rows))).markdown()


def name(recipe):
    return f"`{recipe}`" if recipe != "none" else "none"


def left_out(study):
    """What was refused or given up: a line for each reason; and how many resplits others have."""
    places, counts = {}, []  # recipe, reason -> packs
    for pack, of_pack in study.results.items():
        for cells in of_pack.values():
            for recipe, kept in cells.items():
                reason = why_not(recipe, kept)
                if reason:
                    places.setdefault((recipe, reason), set()).add(pack)
                else:
                    counts.append(len(kept["nll"]))
    lines = {}
    for (recipe, reason), packs in places.items():
        lines.setdefault((told(packs, study), reason), []).append(name(recipe))
    reasons = [f"- {', '.join(who)} on {where}: {why}" for (where, why), who in lines.items()]
    whole = sum(count == study.setting["resplits"] for count in counts) / len(counts)
    most = (
        f"- The others: {study.setting['resplits']} resplits in {100 * whole:.0f} % of the fits, "
        f"{min(counts)} at least (`{RESULTS.relative_to(ROOT)}`)"
    )
    return "\n".join([*reasons, most])


def why_not(recipe, kept):
    """Why a recipe was not fitted; None where it was."""
    if "refused" in kept:
        text = kept["refused"].removeprefix(recipe.partition(",")[0])
        return text.lstrip(": ").replace("\n", " ")
    return f"a fit takes more than {kept['expensive']:g} s" if "expensive" in kept else None


def told(packs, study):
    """Packs in words: all of a kind, or all but few, where it is so."""
    every = set(study.results)
    kinds = {
        "packs with features": {pack for pack in every if study.packs[pack]["features"]},
        "packs of logits alone": {pack for pack in every if not study.packs[pack]["features"]},
    }
    for words, all_of_them in kinds.items():
        if packs == all_of_them != every:
            return words
    if len(packs) > 0.8 * len(every):
        missing = ", ".join(sorted(every - packs))
        return f"every pack but {missing}" if missing else "every pack"
    return ", ".join(sorted(packs))


def tests(study):
    """Friedman's test and the critical difference by group and size, on complete recipes."""
    rows = []
    for group, words in (*GROUPS.items(), (BOTH, "all of them")):
        for size in TOLD:
            packs = study.of_group(group, size)
            recipes = complete(study, packs, size)
            if len(packs) > 1 and len(recipes) > 2:
                p = [friedman(study, packs, size, recipes, metric) for metric in ("nll", "ece")]
                difference = critical_difference(len(recipes), len(packs))
                numbers = (f"{size:,}", str(len(packs)), str(len(recipes)), *map(p_text, p))
                rows.append((words, *numbers, f"{difference:.1f}"))
    heads = ("", "fit rows", "packs", "recipes", "p, NLL", "p, ECE", "critical difference")
    return table(heads, rows)


def p_text(p):
    return "< 0.0001" if p < 1e-4 else f"{p:.4f}"


def duels(study, size):
    """Ours against others: packs won, and Wilcoxon's test over packs by Holm."""
    columns, recipes = {}, [r for r in RIVALS if r in study.recipes]
    for own in OURS:
        found = {}
        for recipe in recipes:
            packs = [
                pack
                for pack in study.of_group(BOTH, size)
                if study.ran(pack, size, own) and study.ran(pack, size, recipe)
            ]
            if len(packs) > 1:
                apart = [relative(study, pack, size, own, recipe)[0] for pack in packs]
                found[recipe] = (
                    sum(a < 0 for a in apart),
                    len(packs),
                    fmean(apart),
                    wilcoxon(apart),
                )
        adjusted = dict(zip(found, holm([f[-1] for f in found.values()]), strict=True))
        for recipe, (won, packs, mean, _) in found.items():
            cells = (f"{won} of {packs}", percent(mean), p_text(adjusted[recipe]))
            columns.setdefault(recipe, {})[own] = cells
    own = [o for o in OURS if any(o in of for of in columns.values())]
    heads = [f"`{o}`: {what}" for o in own for what in ("packs won", "NLL", "p")]
    rows = [
        (name(r), *(text for o in own for text in of.get(o, (NONE,) * 3)))
        for r, of in columns.items()
    ]
    return table(("against", *heads), rows)


def wilcoxon(apart):
    return float(stats.wilcoxon(apart).pvalue) if any(apart) else 1.0


def by_pack(study, size):
    """Each shown recipe on each pack: NLL relative to temperature."""
    recipes = [r for r in SHOWN if r in study.recipes]
    rows = []
    for pack in study.of_group(BOTH, size):
        cells = [COLUMNS["nll"].number(study.mean(pack, size, BASE, "nll"))]
        for recipe in recipes:
            if not study.ran(pack, size, recipe):
                cells.append(NONE)
                continue
            mean, half = (100 * v for v in relative(study, pack, size, recipe))
            text = f"{mean:+.2f} ± {half:.2f}"
            cells.append(f"**{text}**" if mean < -half else text)
        told = study.packs[pack]
        held = ", held out" if told["group"] == "held out" else ""
        rows.append((f"{pack} ({told['classes']} classes{held})", *cells))
    return table(("", "temperature, NLL", *map(name, recipes)), rows)


def scores(study, size):
    """Every recipe, means over the packs that it was fitted on."""
    rows = []
    for recipe in study.recipes:
        packs = [p for p in study.of_group(BOTH, size) if study.ran(p, size, recipe)]
        if not packs:
            continue
        nll = fmean(relative(study, pack, size, recipe)[0] for pack in packs)
        ece = fmean(paired(study, pack, size, recipe, BASE, "ece")[0] for pack in packs)
        moved = fmean(
            study.mean(p, size, recipe, "accuracy") - study.mean(p, size, BASE, "accuracy")
            for p in packs
        )
        texts = (f"{100 * value:+.2f}" for value in (nll, ece, moved))
        seconds = median(study.mean(pack, size, recipe, "seconds") for pack in packs)
        rows.append((name(recipe), str(len(packs)), *texts, f"{seconds:.2f}"))
    return table(("", "packs", "NLL, %", "ECE", "accuracy", "seconds"), rows)


def sections(study):
    """The generated parts of the page by name."""
    size = TOLD[-1]
    return {
        "bars": bar_table(study),
        "left out": left_out(study),
        "tests": tests(study),
        "duels": duels(study, size),
        "differences": by_pack(study, size),
        "scores": scores(study, size),
    }


# --- pictures ------------------------------------------------------------------------------------


def draw_ranks(study, path):
    """Critical-difference diagrams of NLL on all packs: recipes on one bar are not told apart."""
    from matplotlib.figure import Figure

    sizes = [size for size in TOLD if len(study.of_group(BOTH, size)) > 1]
    with own_style():
        figure = Figure(figsize=(8.4, 3.6 * len(sizes)), layout="constrained")
        for ax, size in zip(np.atleast_1d(figure.subplots(len(sizes), 1)), sizes, strict=True):
            draw_difference(ax, study, size)
        figure.savefig(path, metadata=METADATA["svg"])


def draw_difference(ax, study, size):
    packs = study.of_group(BOTH, size)
    recipes = complete(study, packs, size)
    found = mean_ranks(study, BOTH, size, "nll")
    ranks = [(recipe, found[recipe][0]) for recipe in found if recipe in recipes]
    difference = critical_difference(len(ranks), len(packs))
    ink, most, half = ax.xaxis.label.get_color(), len(ranks), (len(ranks) + 1) // 2
    groups = cliques([rank for _, rank in ranks], difference)
    room = 0.35 * len(groups) + 0.6
    for place, (recipe, rank) in enumerate(ranks):
        left = place < half
        depth = room + (place if left else most - 1 - place)
        end = 0.4 if left else most + 0.6
        hue = BLUE if recipe in OURS else ink
        ax.plot([rank, rank, end], [0, depth, depth], color=hue, linewidth=EDGE, zorder=1)
        look = {"ha": "right" if left else "left", "va": "center", "size": TEXT, "color": hue}
        ax.text(end + (-0.1 if left else 0.1), depth, f"{recipe}  {rank:.1f}", **look)
    for place, (first, last) in enumerate(groups):
        span = [ranks[first][1] - 0.06, ranks[last][1] + 0.06]
        ax.plot(span, [0.4 + 0.35 * place] * 2, color=VERMILLION, linewidth=2.2, zorder=2)
    ax.plot([1, 1 + difference], [-1.6] * 2, color=ink, linewidth=1.2, marker="|")
    ax.text(
        1 + difference + 0.15, -1.6, f"critical difference {difference:.1f}", size=TEXT, va="center"
    )
    ax.set(xlim=(-2.6, most + 3.6), ylim=(room + half, -2.2), yticks=[])
    ax.xaxis.set_ticks_position("top")
    ax.set_xticks(range(1, most + 1), range(1, most + 1), size=TEXT)
    ax.spines[["left", "right", "bottom"]].set_visible(False)
    ax.spines["top"].set_position(("data", 0))
    ax.spines["top"].set_bounds(1, most)
    title = f"mean rank in NLL, {size:,} fit rows, {len(packs)} packs"
    ax.set_title(title, loc="left", size=TEXT + 1, weight="bold")


LOOKS = {  # hue and mark of a line
    "vector": (GREY, "o"),
    "svs": (PURPLE, "^"),
    "parameterised": (VERMILLION, "s"),
    "sample": (BLUE, "D"),
    "auto": (GREEN, "v"),
}


def draw_sizes(study, path):
    """NLL relative to temperature by fit rows, means over those packs that have every size."""
    from matplotlib.figure import Figure

    groups = {g: study.of_group(g, study.sizes[-1]) for g in GROUPS}
    groups = {group: packs for group, packs in groups.items() if packs}
    with own_style():
        figure = Figure(figsize=(3.8 * len(groups), 3.5), layout="constrained")
        panels = np.atleast_1d(figure.subplots(1, len(groups), sharey=True))
        for ax, (group, packs) in zip(panels, groups.items(), strict=True):
            for recipe, (hue, mark) in LOOKS.items():
                if all(study.ran(pack, size, recipe) for pack in packs for size in study.sizes):
                    means = [
                        100 * fmean(relative(study, pack, size, recipe)[0] for pack in packs)
                        for size in study.sizes
                    ]
                    look = {"color": hue, "marker": mark, "markersize": 4.5, "label": recipe}
                    ax.plot(study.sizes, means, linewidth=1.4, markeredgecolor="white", **look)
            ax.axhline(0, color=ax.xaxis.label.get_color(), linewidth=EDGE, zorder=1)
            ax.set_xscale("log")
            ax.set_xticks(study.sizes, [f"{size:,}" for size in study.sizes], size=TEXT)
            ax.minorticks_off()
            ax.set_xlabel("fit rows")
            ax.spines[["top", "right"]].set_visible(False)
            title = f"{len(packs)} {GROUPS[group]}"
            ax.set_title(title, loc="left", size=TEXT + 1, weight="bold")
        panels[0].set_ylabel("NLL relative to temperature, %")
        marks, labels = panels[0].get_legend_handles_labels()
        figure.legend(marks, labels, loc="outside lower center", ncols=len(LOOKS), frameon=False)
        figure.savefig(path, metadata=METADATA["svg"])


def main():
    study = Study(json.loads(RESULTS.read_text()))
    PAGE.write_text(fill(PAGE.read_text(), sections(study), START))
    draw_ranks(study, RANKS)
    draw_sizes(study, LINES)
    for group, words in GROUPS.items():
        for claim, met, figures in bars(study, group):
            print(f"{words}: {claim}: {verdict(met, figures)}")
    for claim, met, figures in speed_bars(study):
        print(f"{claim}: {verdict(met, figures)}")
    print(f"Wrote the tables of {PAGE.relative_to(ROOT)} and its pictures")


if __name__ == "__main__":
    main()
