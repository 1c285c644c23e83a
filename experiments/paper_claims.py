"""What of the paper holds: its premises and claims one by one, judged on our networks.

Reads results/published.json and the paper's own cells; experiments/paper_docs.py puts the table
into docs/reproduction.md. A network counts for or against a claim where a 95 % interval, paired
where recipes are compared, excludes the contrary; test images are normalised as the paper's were.
"""

from collections import Counter
from dataclasses import dataclass, replace
from statistics import fmean

from paper_tables import (
    AS_PUBLISHED,
    CE,
    MATCHED,
    METRICS,
    NEAREST,
    PAPER_LOSSES,
    RECIPES,
    Network,
    find,
    networks,
    paper_tables,
)

from featcal.report.tables import Table

CALM = ("LS-0.05", "Focal Loss")  # the losses that the paper says leave little to do on CIFAR-10
MARKS = {1: "reproduced", -1: "reversed", 0: "not reproduced"}


@dataclass(frozen=True)
class Claim:
    """What the paper says, its number and ours.

    Attributes:
        text: the claim.
        paper: its number, from its tables.
        ours: the same of our networks.
        signs: for each network 1 as claimed, -1 the contrary, 0 undecided.
    """

    text: str
    paper: str
    ours: str
    signs: tuple

    @property
    def mark(self):
        """By more than half of the networks.

        >>> Claim("", "", "", (1, 1, 0)).mark, Claim("", "", "", (1, -1, 0)).mark
        ('reproduced', 'not reproduced')
        """
        most = (sign for sign in (1, -1) if 2 * self.signs.count(sign) > len(self.signs))
        return MARKS[next(most, 0)]


@dataclass(frozen=True)
class Case:
    """One trained network, and what was found on its test images."""

    network: Network
    result: dict

    def row(self, recipe):
        """The scores of a recipe."""
        return find(self.result["rows"], *RECIPES[recipe])

    def base(self, metric="ece", recipe="none"):
        """A value and its interval in percent; the network as it is without a recipe."""
        row = self.row(recipe)
        return [100 * v for v in (row["metrics"][metric], *row["intervals"][metric])]


def cases(published, norm=AS_PUBLISHED):
    """Every run of every network."""
    return [Case(one, result) for one in networks(published) for result in one.results(norm)]


def span(values, digits=2, sign=""):
    """The lowest and the highest.

    >>> span([0.5, -0.25], sign="+"), span([1.0]), span([])
    ('-0.25 to +0.50', '1.00', '-')
    """
    if not values:
        return "-"
    rounded = (round(end, digits) + 0.0 for end in (min(values), max(values)))  # no -0.00
    return " to ".join(dict.fromkeys(f"{end:{sign}.{digits}f}" for end in rounded))


def points(metric, deltas):
    """Differences in percent points, or of the NLL as they are."""
    nll = metric == "nll"
    return f"{METRICS[metric]} {span(deltas, 4 if nll else 2, '+')}{'' if nll else ' points'}"


def printed(name, before, after, dataset="CIFAR"):
    """How the paper's value changes from a column to another, on each network of a data set."""
    of = {(cell["row"], cell["column"]): cell["value"] for cell in paper_tables()[name]}
    rows = dict.fromkeys(row for row, _ in of if row.startswith(dataset))
    return [of[row, after] - of[row, before] for row in rows]


def printed_clip(losses, dataset="CIFAR"):
    """The same from base to clip, with each of the losses."""
    each = (printed("train-time", f"{loss} base", f"{loss} +ours", dataset) for loss in losses)
    return points("ece", [value for values in each for value in values])


def side(interval):
    """1 for an interval above 0, -1 for one below."""
    low, high = interval
    return (low > 0) - (high < 0)


def verdicts(differences):
    return tuple({"better": 1, "worse": -1}.get(one["verdict"], 0) for one in differences)


def compared(text, paper, some, recipe, metric="ece", pairs=False):
    """A claim that a recipe does better than what it stands beside."""
    found = [
        (case.result["pairs"][recipe] if pairs else case.row(recipe)["differences"])[metric]
        for case in some
    ]
    deltas = [one["delta"] * (1 if metric == "nll" else 100) for one in found]
    return Claim(text, paper, points(metric, deltas), verdicts(found))


def no_effect(claim):
    """The claim that nothing happens: undecided is as claimed, any change the contrary."""
    return replace(claim, signs=tuple(1 if sign == 0 else -1 for sign in claim.signs))


def as_printed(text, every, recipe):
    """Whether the paper's cell lies in our interval, for the networks that are its own."""
    own = [case for case in every if not case.network.name.endswith(tuple(NEAREST))]
    theirs = [case.network.printed(recipe, "ece")["value"] for case in own]
    ours = [case.base(recipe=recipe) for case in own]
    signs = (int(low <= cell <= high) for cell, (_, low, high) in zip(theirs, ours, strict=True))
    values = [value for value, *_ in ours]
    off = [value - cell for value, cell in zip(values, theirs, strict=True)]
    told = f"ECE {span(values)}, off by {span(off, sign='+')} points"
    return Claim(text, f"ECE {span(theirs)}", told, tuple(signs))


def better_than_ce(every):
    """The ECE of every other loss beside cross-entropy's, by intervals that do not meet."""
    deltas, signs = [], []
    for case in every:
        ce = [
            c.base() for c in every if (c.network.name, c.network.loss) == (case.network.name, CE)
        ]
        if case.network.loss != CE and ce:
            value, low, high = case.base()
            deltas.append(value - fmean(other for other, *_ in ce))
            signs.append(all(high < c[1] for c in ce) - all(low > c[2] for c in ce))
    each = (printed("train-time", f"{CE} base", f"{o} base") for o in PAPER_LOSSES if o != CE)
    paper = points("ece", [value for values in each for value in values])
    text = "Every other loss has a lower ECE than cross-entropy"
    return Claim(text, paper, points("ece", deltas), tuple(signs))


def best_layer(entry):
    """By the ECE alone: the rows of layers have no intervals."""
    ece = {row["label"]: 100 * row["metrics"]["ece"] for row in entry["rows"]}
    theirs = {cells[0]["row"]: cells[0]["value"] for cells in paper_tables()["layers"].cells}
    ours, best = ece.pop("penultimate"), theirs.pop("Penultimate Layer (ours)")
    return Claim(
        "The features before the last layer are the place to clip",
        f"ECE {best:.2f}, elsewhere {min(theirs.values()):.2f}",
        f"ECE {ours:.2f}, elsewhere {min(ece.values()):.2f} ({entry['recipe']['epochs']} epochs)",
        (1 if ours < min(ece.values()) else -1,),
    )


def premises(ce):
    """What the paper builds on, of networks trained with cross-entropy."""
    over = [100 * case.row("none")["metrics"]["overconfidence"] for case in ce]
    sure = (side(case.base()[1:]) for case in ce)
    means, widths, gained = (
        [case.result[key] for case in ce] for key in ("means_0.9", "values_0.9", "entropy_0.9")
    )
    base = [
        cell["value"] for cell in paper_tables()["train-time"] if cell["column"] == f"{CE} base"
    ]
    wrong, right = (cells[-1]["printed"] for cells in paper_tables()["entropy"].cells)
    ratios = [one["hce"] / one["lce"] for one in means]
    sigmas = [one["fits"]["hce"]["sigma"] / one["fits"]["lce"]["sigma"] for one in widths]
    growth = (span([one[group]["growth"] for one in gained]) for group in ("hce", "lce"))
    return [
        Claim(
            "Cross-entropy leaves networks overconfident",
            f"ECE {span(base)}",
            f"confidence less accuracy {span(over, sign='+')} points",
            tuple(one * (1 if gap > 0 else -1) for one, gap in zip(sure, over, strict=True)),
        ),
        Claim(
            "Confident wrong samples have the larger features on average",
            "a figure",
            f"{span(ratios)} times as large",
            tuple(side(one["interval"]) for one in means),
        ),
        Claim(
            "Confident wrong samples have the thicker tail of features, the larger sigma",
            "a figure",
            f"{span(sigmas)} times as large",
            tuple(side(one["interval"]) for one in widths),
        ),
        Claim(
            "A clip adds more entropy to confident wrong samples than to right ones",
            f"{wrong} and {right} nats",
            f"{' and '.join(growth)} nats",
            tuple(side(one["interval"]) for one in gained),
        ),
    ]


def claims(published, layers):
    """The premises and claims, in the order of the paper but for the printed values themselves."""
    every = cases(published)
    ce = [case for case in every if case.network.loss == CE]
    rest = [case for case in every if case.network.loss != CE]
    losses = dict.fromkeys(case.network.loss for case in rest)
    calm = [case for case in rest if case.network.loss in CALM]
    small, large = (
        [case for case in calm if case.network.name.startswith(name)]
        for name in ("CIFAR-10 ", "CIFAR-100 ")
    )
    beside = points("ece", printed("ece-posthoc", "TS base", "Original Feature +ours(c)"))
    after = points("ece", printed("ece-posthoc", "TS base", "TS +ours"))
    accuracy = points("accuracy", printed("accuracy", "Baseline", "FC (ours)"))
    found = [
        as_printed("The networks as they are have the printed ECE", every, "none"),
        as_printed("After a clip they have the printed ECE", every, "clip"),
        *premises(ce),
        compared("A clip lowers the ECE after cross-entropy", printed_clip([CE]), ce, "clip"),
        compared(
            "A clip does better than a temperature in most cases, by ECE",
            beside,
            ce,
            "clip",
            pairs=True,
        ),
        compared("The same by NLL, to which both are fitted", "-", ce, "clip", "nll", pairs=True),
        compared(
            "A clip before a temperature lowers its ECE further", after, ce, "clip | temperature"
        ),
        better_than_ce(every),
        compared(
            "A clip lowers the ECE after every other loss as well",
            printed_clip(losses),
            rest,
            "clip",
        ),
        no_effect(
            compared(
                "On CIFAR-10 a clip has little to do after focal loss and label smoothing",
                printed_clip(CALM, "CIFAR-10 "),
                small,
                "clip",
            )
        ),
        compared(
            "On CIFAR-100 it does lower theirs", printed_clip(CALM, "CIFAR-100 "), large, "clip"
        ),
        no_effect(compared("A clip does not affect accuracy", accuracy, ce, "clip", "accuracy")),
        *map(best_layer, layers),
    ]
    return [claim for claim in found if claim.signs]


def claims_text(published, layers):
    """The table for people, and the sum of it."""
    found = claims(published, layers)
    rows = tuple(
        (
            claim.text,
            claim.paper,
            claim.ours,
            f"{claim.signs.count(1)} of {len(claim.signs)}",
            str(claim.signs.count(-1)),
            f"**{claim.mark}**",
        )
        for claim in found
    )
    headings = ("the paper says", "the paper", "our networks", "as claimed", "contrary", "")
    count = Counter(claim.mark for claim in found)
    total = ", ".join(f"{count[mark]} {mark}" for mark in MARKS.values())
    return f"{Table('', headings, rows).markdown()}\n\nOf {len(found)}: {total}."


def beyond(published):
    """What `sample` gives beside the paper's recipes, test images normalised as in training."""
    every = cases(published, MATCHED)

    def told(differences):
        for metric in ("nll", "ece"):
            signs = verdicts(one[metric] for one in differences)
            yield f"{METRICS[metric]} lower on {signs.count(1)}, higher on {signs.count(-1)}"

    alone = ", ".join(told([case.row("sample")["differences"] for case in every]))
    after = ", ".join(told([case.result["pairs"]["sample"] for case in every]))
    return (
        f"Of {len(every)} networks, test images normalised as in training: beside `temperature` "
        f"{alone}; beside `clip | temperature` {after}."
    )
