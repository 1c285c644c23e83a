"""What of the paper holds: its premises and claims one by one, judged on our networks.

Reads results/published.json and the paper's own cells; experiments/paper_docs.py puts the table
into docs/reproduction.md. A network counts for or against a claim where a 95 % interval, paired
where recipes are compared, excludes the contrary; test images are normalised as the paper's were.
"""

from dataclasses import dataclass

from paper_tables import (
    CE,
    MATCHED,
    NEAREST,
    RECIPES,
    find,
    networks,
    paper_tables,
)

from featcal.report.tables import Table

POINTS = 100
CALM = ("LS-0.05", "Focal Loss")  # the losses that the paper says leave little to do on CIFAR-10


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
        for sign, word in ((1, "reproduced"), (-1, "reversed")):
            if 2 * self.signs.count(sign) > len(self.signs):
                return word
        return "not reproduced"


@dataclass(frozen=True)
class Case:
    """One trained network, and what was found on test images normalised as the paper's."""

    network: object
    result: dict

    def row(self, recipe):
        """The scores of a recipe."""
        return find(self.result["rows"], *RECIPES[recipe])

    def value(self, recipe, metric):
        """A metric in percent."""
        return POINTS * self.row(recipe)["metrics"][metric]


def cases(published):
    """Every run of every network."""
    return [Case(one, result) for one in networks(published) for result in one.results()]


def span(values, digits=2, sign="+"):
    """The lowest and the highest.

    >>> span([0.5, -0.25]), span([1.0], sign="")
    ('-0.25 to +0.50', '1.00')
    """
    rounded = (round(end, digits) + 0.0 for end in (min(values), max(values)))  # no -0.00
    ends = dict.fromkeys(f"{end:{sign}.{digits}f}" for end in rounded)
    return " to ".join(ends)


def verdict(difference):
    return {"better": 1, "worse": -1}.get(difference["verdict"], 0)


def side(interval):
    """1 for an interval above 0, -1 for one below."""
    low, high = interval
    return (low > 0) - (high < 0)


def printed(name, *columns):
    """The paper's values in columns of a table, network by network, CIFAR alone."""
    rows = ({c["column"]: c for c in cells} for cells in paper_tables()[name].cells)
    kept = [row for row in rows if next(iter(row.values()))["row"].startswith("CIFAR")]
    return [tuple(row[column]["value"] for column in columns) for row in kept]


def change(pairs):
    return f"{span([after - before for before, after in pairs])} points"


def clip_after(losses, dataset=""):
    """The paper's ECE before and after a clip, with these losses."""
    table = paper_tables()["train-time"]
    of = {(cell["row"], cell["column"]): cell["value"] for cell in table}
    return [
        (value, of[row, f"{loss} +ours"])
        for (row, column), value in of.items()
        for loss in losses
        if column == f"{loss} base" and row.startswith(dataset)
    ]


def compared(text, paper, some, recipe, metric="ece", pairs=False):
    """A claim about one recipe beside another."""
    found = [
        (case.result["pairs"][recipe] if pairs else case.row(recipe)["differences"])[metric]
        for case in some
    ]
    scale, unit = (1, "") if metric == "nll" else (POINTS, " points")
    ours = span([scale * one["delta"] for one in found], 4 if metric == "nll" else 2)
    return Claim(text, paper, f"{metric_name(metric)} {ours}{unit}", tuple(map(verdict, found)))


def metric_name(metric):
    return {"ece": "ECE", "nll": "NLL", "accuracy": "accuracy"}[metric]


def as_printed(every, recipe):
    """Whether the paper's cell lies in our interval, for the networks that are its own."""
    own = [case for case in every if not case.network.name.endswith(tuple(NEAREST))]
    pairs = [
        (case.network.printed(recipe, "ece")["value"], case.row(recipe)["intervals"]["ece"], case)
        for case in own
    ]
    signs = tuple(int(POINTS * low <= cell <= POINTS * high) for cell, (low, high), _ in pairs)
    paper = span([cell for cell, *_ in pairs], sign="")
    ours = span([case.value(recipe, "ece") for *_, case in pairs], sign="")
    return f"ECE {paper}", f"ECE {ours}", signs


def better_than_ce(every):
    """The ECE of each other loss beside that of cross-entropy, by intervals that do not meet."""
    deltas, signs = [], []
    for case in every:
        base = [c for c in every if (c.network.name, c.network.loss) == (case.network.name, CE)]
        if case.network.loss == CE or not base:
            continue
        low, high = case.row("none")["intervals"]["ece"]
        ends = [one.row("none")["intervals"]["ece"] for one in base]
        signs.append(all(high < e[0] for e in ends) - all(low > e[1] for e in ends))
        mean = sum(one.value("none", "ece") for one in base) / len(base)
        deltas.append(case.value("none", "ece") - mean)
    table = paper_tables()["train-time"]
    others = [column[0] for column in table.columns[2::2]]
    pairs = [pair for loss in others for pair in printed_pair(loss)]
    return Claim(
        "Every other loss has a lower ECE than cross-entropy",
        f"ECE {change(pairs)}",
        f"ECE {span(deltas)} points",
        tuple(signs),
    )


def printed_pair(loss):
    return printed("train-time", f"{CE} base", f"{loss} base")


def claims(published, layers):
    """The premises and claims in the order of the paper."""
    every = cases(published)
    ce = [case for case in every if case.network.loss == CE]
    rest = [case for case in every if case.network.loss != CE]
    over = [POINTS * case.row("none")["metrics"]["overconfidence"] for case in ce]
    means, widths, gained = (
        [case.result[key] for case in ce] for key in ("means_0.9", "values_0.9", "entropy_0.9")
    )
    sigmas = [one["fits"]["hce"]["sigma"] / one["fits"]["lce"]["sigma"] for one in widths]
    wrong, right = (cells[-1]["printed"] for cells in paper_tables()["entropy"].cells)
    found = [
        Claim("The networks as they are have the printed ECE", *as_printed(every, "none")),
        Claim("After a clip they have the printed ECE", *as_printed(every, "clip")),
        Claim(
            "Cross-entropy leaves networks overconfident",
            f"ECE {span([base for base, _ in clip_after([CE])], sign='')}",
            f"confidence less accuracy {span(over)} points",
            tuple(
                side(case.row("none")["intervals"]["ece"]) * (1 if gap > 0 else -1)
                for case, gap in zip(ce, over, strict=True)
            ),
        ),
        Claim(
            "Confident wrong samples have the larger features on average",
            "a figure",
            f"{span([one['hce'] / one['lce'] for one in means], sign='')} times as large",
            tuple(side(one["interval"]) for one in means),
        ),
        Claim(
            "Confident wrong samples have the thicker tail of features, the larger sigma",
            "a figure",
            f"{span(sigmas, sign='')} times as large",
            tuple(side(one["interval"]) for one in widths),
        ),
        Claim(
            "A clip adds more entropy to confident wrong samples than to right ones",
            f"{wrong} and {right} nats",
            f"{span([one['hce']['growth'] for one in gained], sign='')} and "
            f"{span([one['lce']['growth'] for one in gained], sign='')} nats",
            tuple(side(one["interval"]) for one in gained),
        ),
        compared(
            "A clip lowers the ECE after cross-entropy",
            f"ECE {change(clip_after([CE]))}",
            ce,
            "clip",
        ),
        compared(
            "A clip does better than a temperature in most cases, by ECE",
            f"ECE {change(printed('ece-posthoc', 'TS base', 'Original Feature +ours(c)'))}",
            ce,
            "clip",
            pairs=True,
        ),
        compared("The same by NLL, to which both are fitted", "-", ce, "clip", "nll", pairs=True),
        compared(
            "A clip before a temperature lowers its ECE further",
            f"ECE {change(printed('ece-posthoc', 'TS base', 'TS +ours'))}",
            ce,
            "clip | temperature",
        ),
        better_than_ce(every),
        compared(
            "A clip lowers the ECE after every other loss as well",
            f"ECE {change(clip_after(sorted({c.network.loss for c in rest})))}",
            rest,
            "clip",
        ),
        little_room([case for case in rest if case.network.loss in CALM]),
        compared(
            "On CIFAR-100 it does lower theirs",
            f"ECE {change(clip_after(CALM, 'CIFAR-100'))}",
            [c for c in rest if c.network.loss in CALM and "100" in c.network.name],
            "clip",
        ),
        accuracy_kept(ce),
        *(best_layer(entry) for entry in layers),
    ]
    return found


def little_room(some):
    """Undecided is as claimed."""
    some = [case for case in some if "100" not in case.network.name]
    text = "On CIFAR-10 a clip has little to do after focal loss and label smoothing"
    claim = compared(text, f"ECE {change(clip_after(CALM, 'CIFAR-10 '))}", some, "clip")
    signs = tuple(1 if sign == 0 else -1 for sign in claim.signs)
    return Claim(text, claim.paper, claim.ours, signs)


def accuracy_kept(ce):
    """Undecided is as claimed, a change the contrary."""
    text, paper = "A clip does not affect accuracy", printed("accuracy", "Baseline", "FC (ours)")
    claim = compared(text, f"accuracy {change(paper)}", ce, "clip", "accuracy")
    signs = tuple(1 if sign == 0 else -1 for sign in claim.signs)
    return Claim(text, claim.paper, claim.ours, signs)


def best_layer(entry):
    """By the ECE alone: the rows of layers have no intervals."""
    ece = {row["label"]: POINTS * row["metrics"]["ece"] for row in entry["rows"]}
    ours = ece.pop("penultimate")
    theirs = {c[0]["row"]: c[0]["value"] for c in paper_tables()["layers"].cells}
    best = theirs.pop("Penultimate Layer (ours)")
    return Claim(
        "The features before the last layer are the place to clip",
        f"ECE {best:.2f}, elsewhere {min(theirs.values()):.2f}",
        f"ECE {ours:.2f}, elsewhere {min(ece.values()):.2f} ({entry['recipe']['epochs']} epochs)",
        (1 if ours < min(ece.values()) else -1,),
    )


def claims_table(published, layers):
    """The table for people."""
    rows = tuple(
        (
            claim.text,
            claim.paper,
            claim.ours,
            f"{claim.signs.count(1)} of {len(claim.signs)}",
            str(claim.signs.count(-1)),
            f"**{claim.mark}**",
        )
        for claim in claims(published, layers)
        if claim.signs
    )
    headings = ("the paper says", "the paper", "our networks", "as claimed", "contrary", "")
    return Table("", headings, rows)


def beyond(published):
    """What `sample` gives beside the paper's recipes, test images normalised as in training."""
    found = networks(published)
    every = [Case(one, result) for one in found for result in one.results(MATCHED)]

    def told(differences):
        counts = []
        for metric in ("nll", "ece"):
            signs = [verdict(one[metric]) for one in differences]
            up = f"lower on {signs.count(1)} and higher on {signs.count(-1)}"
            counts.append(f"its {metric_name(metric)} is {up}")
        return ", ".join(counts)

    return (
        f"Of {len(every)} networks, test images normalised as in training: beside `temperature` "
        f"{told([case.row('sample')['differences'] for case in every])}; beside "
        f"`clip | temperature` {told([case.result['pairs']['sample'] for case in every])}."
    )
