"""What `sample` and `auto` were chosen from: other forms and other rules on the same resplits.

    python experiments/variants.py [--extra FOLDER] [--packs NAME ...] [--parts forms known rules]

A form is z s(x) + b(x) e_top with terms, a link from terms to s = 1/T, and a ridge of its own,
fitted as `sample` is: by Newton's method, the strength of the ridge by leave-one-out, one T for all
rows where that is as good. What is known to nobody, the numbers that suit the scored rows best,
tells how much there is to gain. A rule reads the table that `auto` makes of rows left out. Packs
and resplits are those of experiments/study.py; only packs with features are read. Puts the packs of
a run into results/variants.json, beside those there, and writes its part of docs/research.md.
"""

import argparse
import json
import re
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import torch
import torch.nn.functional as F
from study import PACKS, held_out, opened, resplit

import featcal
from featcal.core.scalar import temper
from featcal.methods.sample import (
    ENOUGH,
    ERRORS,
    RIDGE,
    SIZE,
    SIZES,
    STEPS,
    STRENGTHS,
    TOP,
    System,
    terms_of,
)
from featcal.report.compare import versions
from featcal.report.scores import calibrated_logits
from featcal.report.tables import Table

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "results" / "variants.json", ROOT / "docs" / "research.md"
START, END = "<!-- tried -->", "<!-- /tried -->"
FIT_ROWS, REPS, FEW = (500, 2500), 10, 5  # resplits, and those of recipes that take long
MANY = 1000  # classes, with which there are half as many
RULE_SIZES, RULE_REPS = (250, 500, 2500), 3
RULE_PACKS = (
    *("cifar100-wrn16x4", "cifar100-wrn16x4-ce-1"),
    *("cifar10-wrn16x4", "cifar10-wrn16x4-ce-1"),
)
BASE, OURS = "temperature", "sample"
FIVE = ("gap", "energy", "spread", "norm", "sparsity")
OFF = 1e9  # a ridge that leaves nothing
LEAST = 0.02  # of 1/T over the common one, where it is linear


# --- forms ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Form:
    """A way to make s(x) and b(x): that of `sample` unless said otherwise.

    Attributes:
        terms: of s.
        ridge: those of a, b and c that differ from `sample`'s.
        strengths: what leave-one-out chooses from.
        mixed: shares of the uniform distribution, chosen by leave-one-out too.
        boosted: whether b is linear in the terms as well; None where there is no b.
        linear: whether 1/T is linear in the terms, and not its logarithm.
        scaled: whether terms are divided by their standard deviation.
        reach: standard deviations at which they are cut off.
        products: whether squares and products of two terms are terms too.
        directions: principal directions of the features that are terms too, with ten times the
            ridge.
        errors: wrong rows below which the ridge grows.
        expected: whether the ridge pulls a and b to where most networks have them, not to 0.
        blended: whether leave-one-out says how far to go from one T towards the fit, and not only
            whether to go.
    """

    terms: tuple[str, ...] = FIVE
    ridge: dict[str, float] = field(default_factory=dict)
    strengths: tuple[float, ...] = STRENGTHS
    mixed: tuple[float, ...] = (0.0,)
    boosted: bool | None = False
    linear: bool = False
    scaled: bool = False
    reach: float = 3.0
    products: bool = False
    directions: int = 0
    errors: int = ERRORS
    expected: bool = True
    blended: bool = True

    def columns(self, found, fit):
        """The centred terms of all rows, how many times the ridge of a each has, and its unit."""
        parts = torch.stack([found[name] for name in self.terms], 1)
        parts = parts - parts[fit].mean(0)
        spread = parts[fit].std(0, correction=0)
        parts = parts.clamp(-self.reach * spread, self.reach * spread)
        if self.scaled:
            parts = parts / spread
        if self.products:
            pairs = torch.combinations(torch.arange(len(self.terms)), 2, with_replacement=True)
            more = (parts / spread)[:, pairs].prod(2) * spread[pairs].mean(1)
            parts = torch.cat([parts, more - more[fit].mean(0)], 1)
        own = torch.ones(parts.shape[1], dtype=torch.float64)
        if self.directions:
            more = found["directions"][:, : self.directions]
            parts, own = torch.cat([parts, more], 1), F.pad(own, (0, self.directions), value=10.0)
        return parts, own, spread if self.scaled else torch.ones_like(spread)


def further(batch, head, fit):
    """Every term of all rows, by name; those that need facts of a split have them of `fit`."""
    z, x = batch.logits.double(), batch.features.double()
    found = dict(zip(FIVE, terms_of(FIVE, x, z, z.argmax(1, keepdim=True)).unbind(1), strict=True))
    top, away = z.argmax(1), z - z.mean(1, keepdim=True)
    probs = z.softmax(1)
    found["entropy"] = torch.special.entr(probs).sum(1).log1p()
    found["top"] = away.amax(1).log()
    found["largest"] = x.abs().amax(1).log()
    count = 1.0 + torch.bincount(batch.labels[fit], minlength=z.shape[1])  # and one mean row
    sums = x[fit].mean(0).repeat(len(count), 1).index_add_(0, batch.labels[fit], x[fit])
    inside = torch.zeros_like(found["top"])  # a row is not held against a mean that it is part of
    inside[fit] = (top[fit] == batch.labels[fit]).double()
    means = (sums[top] - inside[:, None] * x) / (count[top] - inside)[:, None]
    found["distance"] = (x - means).norm(dim=1).log()
    found["cosine"] = F.cosine_similarity(x, head.weight.detach().double()[top])
    seen = x[fit].abs().flatten()
    bound = seen.kthvalue(round(0.99 * len(seen))).values
    found["clipped"] = ((x.abs() > bound).double().mean(1) + 1 / x.shape[1]).log()
    unit = F.normalize(x)
    unit = unit - unit[fit].mean(0)
    torch.manual_seed(0)
    _, sizes, axes = torch.svd_lowrank(unit[fit], q=20, niter=4)
    found["directions"] = unit @ axes * (len(fit) ** 0.5 / sizes)
    return found


class Rows:
    """Rows as a fit reads them: logits below the largest, and which is the label."""

    def __init__(self, logits, labels):
        self.top, self.classes = logits.argmax(1), logits.shape[1]
        top = self.top[:, None]
        self.below = logits - logits.gather(1, top)
        self.true = self.below.gather(1, labels[:, None])[:, 0].double()
        self.others = self.below.scatter(1, top, -torch.inf)
        self.gap = -self.others.amax(1).double()
        self.wrong = (self.top != labels).double()

    def curves(self, s, b, mixed=0.0):
        """Each row's NLL at s and b: value, slopes s and b, second derivatives ss, sb and bb."""
        scaled = self.others * s.to(self.others)[:, None]  # as wide as there are classes: float32
        share = scaled.logsumexp(1)
        pulls = (scaled - share[:, None]).exp() * self.below
        mean, square = pulls.sum(1).double(), (pulls * self.below).sum(1).double()
        spread, share = square - mean.square(), share.double()
        odds = b - share
        p = odds.sigmoid()
        slope, bend = p - 1 + self.wrong, p * (1 - p)
        value = F.softplus(-odds) + self.wrong * (odds + share - s * self.true)
        in_s = self.wrong * (mean - self.true) - slope * mean
        ss = bend * mean.square() + (self.wrong - slope) * spread
        found = value, in_s, slope, ss, -bend * mean, bend
        if not mixed:
            return found
        right = (1 - mixed) * (-value).exp()
        whole = right + mixed / self.classes
        left, bent = right / whole, -(right / whole) * (1 - right / whole)
        second = ((ss, in_s, in_s), (-bend * mean, in_s, slope), (bend, slope, slope))
        return (
            -whole.log(),
            left * in_s,
            left * slope,
            *(left * two + bent * i * j for two, i, j in second),
        )


class Fit:
    """A form fitted to the rows `fit` of a batch whose terms are found."""

    def __init__(self, form, batch, found, fit):
        self.form, self.rows = form, Rows(batch.logits[fit], batch.labels[fit])
        self.terms, own, unit = form.columns(found, fit)
        self.common = 1 / temper([batch.rows(fit)]).temperature
        ridge = {**RIDGE, **form.ridge}
        held = max(1.0, form.errors / max(float(self.rows.wrong.sum()), 1.0))
        in_s, in_b = self.designs(fit)
        self.size, self.dense = in_s.shape[1], in_s.shape[1] + in_b.shape[1]
        kinds = [torch.zeros(1), ridge["a"] * own, torch.full((in_b.shape[1],), ridge["b"])]
        kinds += [torch.full((self.rows.classes,), ridge["c"])]
        self.ridge = torch.cat(kinds).double() * held / len(fit)
        self.in_s, self.in_b = in_s, in_b
        self.expected = torch.zeros(len(self.ridge), dtype=torch.float64)
        sizes = [place for place, name in enumerate(form.terms, start=1) if name in SIZES]
        if form.expected:
            for place in sizes:
                self.expected[place] = SIZE / len(sizes) * unit[place - 1]
            self.expected[self.size : self.size + min(in_b.shape[1], 1)] = TOP
        start = torch.zeros_like(self.expected)
        curves = self.curves(-self.expected, 0.0)
        one = (1 / curves[3].sum()).expand(len(fit))
        plain = left_out(curves, one, 0 * one, 0 * one)
        found = []
        for mixed in form.mixed:
            at = start
            for strength in form.strengths:
                at, losses = self.newton(at, strength, mixed)
                found.append((float(losses.mean()), at, mixed, losses))
        _, at, self.mixed, losses = min(found, key=lambda one: one[0])
        fall = plain - losses
        gain, error = float(fall.mean()), float(fall.std(correction=0)) / len(fit) ** 0.5
        share = min(max((gain / error + 1) / 2, 0.0), 1.0)
        self.at = (share if form.blended else float(gain > 0)) * (at + self.expected)

    def designs(self, part):
        """What s and b are linear in."""
        ones = F.pad(self.terms[part], (1, 0), value=1.0)
        return ones, ones[:, : {None: 0, False: 1, True: ones.shape[1]}[self.form.boosted]]

    def link(self, eta):
        """What s is at the linear part, and its two derivatives."""
        if not self.form.linear:
            s = self.common * eta.exp()
            return s, s, s
        inside = (1 + eta > LEAST).double()
        return self.common * (1 + eta).clamp(min=LEAST), self.common * inside, 0 * inside

    def curves(self, at, mixed):
        """Each row's value and derivatives in the linear parts of s and b.

        Points are steps away from what is expected.
        """
        at = at + self.expected
        eta = self.in_s @ at[: self.size] + at[self.dense :][self.rows.top]
        s, once, twice = self.link(eta)
        value, in_s, in_b, ss, sb, bb = self.rows.curves(
            s, self.in_b @ at[self.size : self.dense], mixed
        )
        return value, in_s * once, in_b, ss * once.square() + in_s * twice, sb * once, bb

    def system(self, at, ridge, mixed):
        """Newton's system at a point and the curves there."""
        curves = value, in_s, in_b, ss, sb, bb = self.curves(at, mixed)
        both = torch.cat([self.in_s * ss[:, None], self.in_b * sb[:, None]], 1)
        lower = torch.cat([self.in_s * sb[:, None], self.in_b * bb[:, None]], 1)
        inner = torch.cat([self.in_s.T @ both, self.in_b.T @ lower])
        by_class = torch.zeros(self.rows.classes, self.dense + 2, dtype=torch.float64)
        by_class.index_add_(0, self.rows.top, torch.cat([in_s[:, None], both, ss[:, None]], 1))
        parts = [value.sum()] * 2 + [self.in_s.T @ in_s, self.in_b.T @ in_b, by_class[:, 0]]
        parts += [inner, by_class[:, 1:-1], by_class[:, -1]]
        flat = torch.cat([part.flatten() for part in parts]) / len(value)
        return System.of(flat, at, ridge, self.dense), curves

    def newton(self, at, strength, mixed):
        """The minimum from a start, and the loss of each row left out."""
        ridge = self.ridge * strength
        system, curves = self.system(at, ridge, mixed)
        for _ in range(STEPS):
            step = system.step()
            step = step / max(1.0, float(step.abs().max()))
            promised = -float(system.slope @ step)
            if promised < ENOUGH:
                break
            for length in (1.0, 0.5, 0.25, 0.1, 0.03, 0.01):
                there = at + length * step
                new, at_new = self.system(there, ridge, mixed)
                if new.value <= system.value - 1e-4 * length * promised:
                    break
            else:
                break
            at, system, curves = there, new, at_new
        border, own = system.border[self.rows.top], system.own[self.rows.top]
        seen = F.pad(self.in_s, (0, self.dense - self.size)) - border / own[:, None]
        other = F.pad(self.in_b, (self.size, 0))
        pulls = [
            (a @ system.inverse * b).sum(1)
            for a, b in ((seen, seen), (seen, other), (other, other))
        ]
        pulls[0] = pulls[0] + 1 / own
        return at, left_out(curves, *(pull / len(own) for pull in pulls))

    def loss(self, batch, part):
        """The mean NLL of other rows."""
        in_s, in_b = self.designs(part)
        rows = Rows(batch.logits[part], batch.labels[part])
        s = self.link(in_s @ self.at[: self.size] + self.at[self.dense :][rows.top])[0]
        b = torch.maximum(in_b @ self.at[self.size : self.dense], -s * rows.gap)
        return float(rows.curves(s, b, self.mixed)[0].mean())


def left_out(curves, own, cross, other):
    """The NLL of each row under the fit without it, by one Newton step back."""
    value, in_s, in_b, ss, sb, bb = curves
    m11, m12 = 1 - own * ss - cross * sb, -own * sb - cross * bb
    m21, m22 = -cross * ss - other * sb, 1 - cross * sb - other * bb
    pull_s, pull_b = own * in_s + cross * in_b, cross * in_s + other * in_b
    whole = (m11 * m22 - m12 * m21).clamp(min=0.05)
    move_s = (m22 * pull_s - m12 * pull_b) / whole
    move_b = (m11 * pull_b - m21 * pull_s) / whole
    bent = ss * move_s.square() + 2 * sb * move_s * move_b + bb * move_b.square()
    return value + in_s * move_s + in_b * move_b + bent / 2


BARE = {"ridge": {"c": OFF}, "boosted": None}
FORMS = {  # by their words
    "as it is, by the fit of this command": Form(),
    "norm, neither offsets nor b": Form(("norm",), **BARE),
    "gap, neither offsets nor b": Form(("gap",), **BARE),
    "norm and energy, neither offsets nor b": Form(("norm", "energy"), **BARE),
    "all five terms, neither offsets nor b": Form(**BARE),
    "no offset of the predicted class": Form(ridge={"c": OFF}),
    "no b": Form(boosted=None),
    "1/T linear in the terms": Form(linear=True),
    "terms divided by their standard deviation": Form(scaled=True),
    "the same, ten times the ridge": Form(scaled=True, ridge={"a": 10 * RIDGE["a"]}),
    "terms not cut off": Form(reach=1e9),
    "and the entropy": Form((*FIVE, "entropy")),
    "and the largest logit": Form((*FIVE, "top")),
    "and the largest activation": Form((*FIVE, "largest")),
    "and the distance to the predicted class's mean": Form((*FIVE, "distance")),
    "and the cosine to the predicted class's weights": Form((*FIVE, "cosine")),
    "and the share of activations that a clip would cut": Form((*FIVE, "clipped")),
    "and squares and products of the terms": Form(products=True),
    "and ten principal directions of the features": Form(directions=10),
    "b linear in the terms": Form(boosted=True),
    "mixed with the uniform distribution": Form(mixed=(0.0, 0.001, 0.01)),
    "ridge fixed at its weakest": Form(strengths=(1.0,)),
    "ridge fixed at four times that": Form(strengths=(4.0,)),
    "ridge no stronger where few rows are wrong": Form(errors=0),
    "nothing expected of a and b": Form(expected=False),
    "one T or the fit, nothing between": Form(blended=False),
    "nothing expected, one T or the fit": Form(expected=False, blended=False),
}
BIASED = "and a bias for each class, fitted after it"
TERMS = ("norm", "gap", "norm, energy", "gap, energy, spread")
RECIPES = {f"terms: {each}": f'sample(terms="{each}")' for each in TERMS}
PLAIN = "no offset of the predicted class"
BASE_KNOWN, KNOWN = f"{BASE}, fitted to the scored rows", f"{PLAIN}, fitted to the scored rows"
CHAINS = ("clip | sample", "sample | svs", "norm_clip | temperature", "parameterised")


# --- runs ----------------------------------------------------------------------------------------


def split_of(pack, path, size, rep):
    """The rows of a resplit, those to fit on first; both parts; the head."""
    batch, head = opened(path)
    fit, test = resplit(pack, rep, len(batch), size)
    every = torch.arange(len(fit) + len(test))
    return batch.rows(torch.cat([fit, test])), every[: len(fit)], every[len(fit) :], head


def fitted(recipe, batch, head):
    """A recipe of featcal's fitted to rows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", featcal.CalibrationWarning)
        return featcal.parse(recipe).fit(batch, head)


@torch.no_grad()
def outcome(calibrator, batch, head):
    """Mean NLL; that of the network as it is without a calibrator."""
    logits = calibrated_logits(batch, calibrator, head)
    return float(F.cross_entropy(logits.double(), batch.labels))


def biased(calibrator, rows, others, head):
    """NLL of other rows after a bias for each class, with a ridge of 30, on top of a calibrator."""
    with torch.no_grad():
        seen, unseen = (calibrated_logits(b, calibrator, head).double() for b in (rows, others))
    bias = torch.zeros(seen.shape[1], dtype=torch.float64, requires_grad=True)
    search = torch.optim.LBFGS([bias], max_iter=100, line_search_fn="strong_wolfe")

    def loss():
        search.zero_grad()
        found = F.cross_entropy(seen + bias, rows.labels) + 15 / len(rows) * bias.square().sum()
        found.backward()
        return found

    search.step(loss)
    return float(F.cross_entropy(unseen + bias.detach(), others.labels))


def forms_on(pack, path, size):
    """Form -> NLL of each resplit."""
    found = {}
    many = opened(path)[0].logits.shape[1] >= MANY
    for rep in range(REPS // 2 if many else REPS):
        batch, fit, test, head = split_of(pack, path, size, rep)
        rows, others = batch.rows(fit), batch.rows(test)
        ours = fitted(OURS, rows, head)
        now = {OURS: outcome(ours, others, head), BIASED: biased(ours, rows, others, head)}
        for recipe in (BASE, *RECIPES, *(CHAINS if rep < (FEW // 2 if many else FEW) else ())):
            now[recipe] = outcome(fitted(RECIPES.get(recipe, recipe), rows, head), others, head)
        with torch.no_grad():
            terms = further(batch, head, fit)
            for words, form in FORMS.items():
                now[words] = Fit(form, batch, terms, fit).loss(batch, test)
        for words, loss in now.items():
            found.setdefault(words, []).append(round(loss, 6))
    return found


def known_on(pack, path, size):
    """NLL of each resplit by T and by `sample` without offsets, both fitted to the scored rows."""
    found = {BASE: [], BASE_KNOWN: [], KNOWN: []}
    for rep in range(REPS):
        batch, fit, test, head = split_of(pack, path, size, rep)
        others = batch.rows(test)
        found[BASE].append(outcome(fitted(BASE, batch.rows(fit), head), others, head))
        found[BASE_KNOWN].append(outcome(fitted(BASE, others, head), others, head))
        with torch.no_grad():
            form = Fit(FORMS[PLAIN], batch, further(batch, head, test), test)
        found[KNOWN].append(form.loss(batch, test))
    return {words: [round(loss, 6) for loss in losses] for words, losses in found.items()}


def lowest(table):
    return min(table, key=lambda row: row["value"])


def fewest(table):
    """The first of those no more than a standard error above the best, fewest numbers first."""
    best, order = lowest(table), list(NUMBERS)
    near = [
        row for row in table if row["value"] - best["value"] <= max(row["error"], best["error"])
    ]
    return min(near, key=lambda row: order.index(row["recipe"]))


def unless(errors):
    """`sample`, unless another is better by so many standard errors, or nothing is better."""

    def rule(table):
        raw, first, *_ = table
        better = [row for row in table if row["difference"] < -errors * row["error"]]
        use = lowest(better) if better else first
        return use if use["value"] < raw["value"] else raw

    return rule


NUMBERS = (  # from fewest numbers to most
    *("none", "temperature", "ensemble", "sample", "clip | sample"),
    *("spline", "isotonic", "svs", "sample | svs"),
)
RULES = {
    "always `sample`": lambda table: table[1],
    "lowest loss on rows left out": lowest,
    "fewest numbers within a standard error of the lowest": fewest,
    "`sample`, unless another is better by 1 standard error": unless(1.0),
    "`sample`, unless another is better by 2 standard errors: `auto`": unless(2.0),
}
HINDSIGHT = "the best on the scored rows, known to nobody"


def rules_on(pack, path, size):
    """Rule -> NLL of each resplit."""
    found = {}
    for rep in range(RULE_REPS):
        batch, fit, test, head = split_of(pack, path, size, rep)
        rows, others = batch.rows(fit), batch.rows(test)
        table = fitted("auto", rows, head).report.steps[0].details["choice"]
        losses = {
            row["recipe"]: outcome(
                None if row["recipe"] == "none" else fitted(row["recipe"], rows, head), others, head
            )
            for row in table
        }
        now = {rule: losses[choose(table)["recipe"]] for rule, choose in RULES.items()}
        now |= {HINDSIGHT: min(losses.values()), BASE: losses[BASE]}
        for rule, loss in now.items():
            found.setdefault(rule, []).append(round(loss, 6))
    return found


PARTS = {
    **{"forms": (forms_on, FIT_ROWS), "known": (known_on, FIT_ROWS[:1])},
    "rules": (rules_on, RULE_SIZES),
}
TOLD = {  # what the page says of them in words
    "pair": "terms: norm, energy",
    "bare": "all five terms, neither offsets nor b",
    "blank": "nothing expected of a and b",
    "either": "one T or the fit, nothing between",
    "scaled": "the same, ten times the ridge",
    "bold": "ridge no stronger where few rows are wrong",
    "svs": "sample | svs",
}
FURTHER = [words for words in (*FORMS, BIASED) if words.startswith(("and ", "b linear", "mixed "))]


# --- the page ------------------------------------------------------------------------------------


def over(cell, words, base):
    """Mean relative difference in NLL over the resplits that both have, in percent."""
    pairs = zip(cell[words], cell[base], strict=False)
    return 100 * fmean(mine / its - 1 for mine, its in pairs)


def by_packs(part, size, words, base):
    """The same on each pack that has it."""
    cells = [of_pack[str(size)] for of_pack in part.values() if str(size) in of_pack]
    return [over(cell, words, base) for cell in cells if words in cell]


def rule_rows(part):
    """A row for each rule, of all sizes."""
    return [
        (rule, *(f"{fmean(by_packs(part, size, rule, BASE)):+.2f}" for size in RULE_SIZES))
        for rule in (*RULES, HINDSIGHT)
    ]


def grid(headings, rows):
    return Table("", headings, tuple(rows)).markdown(numeric=[False] + [True] * (len(headings) - 1))


INTRO = """\
`sample` is z / T(x) + b e_top: five terms and an offset for each predicted class make T(x). Here
are other forms, fitted the same way on the same resplits, {reps} of each of the {packs} packs with
features; NLL in percent over that of `sample`, means over packs, with {few} and {many} fit rows.
`results/variants.json` has more.

- All five terms; norm and energy alone: {pair} %.
- Offsets and b, which pay once there are rows to learn them from; neither: {bare} %.
- A ridge that pulls to where most networks lie, and not to 0; to 0: {blank} %. The values are half
  of the medians over the networks of `results/published.json`.
- As far from one T towards the fit as rows left out call for; all or nothing: {either} %.
- Left out: further terms, squares, directions of the features, a b that depends on the row, a
  mixture with the uniform distribution, a bias for each class; the best of them {further} %.
- Terms as they are; divided by their standard deviation, with a stronger ridge: {scaled} %.
- A ridge that grows where few rows are wrong; one that does not: {bold} %.
- `sample | svs`: {svs} %, which is why `auto` tries it where rows are many.

How much there is to gain: over a `temperature` fitted to {few} rows, `sample` without offsets has
{known} % if its seven numbers are fitted to the scored rows themselves, and one T fitted to them
{base_known} %. Of that `sample` gets {gained} % with {few} and {many} fit rows."""

RULES_INTRO = """\
`auto` chooses by rows left out of the fit, and there are several rules to do so. NLL over
`temperature` in percent, means over {reps} resplits each of {packs}:"""


def page_part(results):
    """All between the markers."""
    forms, rules, setting = results["forms"], results["rules"], results["setting"]

    def told(words):
        return " and ".join(
            f"{fmean(by_packs(forms, size, words, OURS)):+.2f}" for size in FIT_ROWS
        )

    rule_sizes = [f"{size:,} rows" for size in RULE_SIZES]
    said = {key: told(words) for key, words in TOLD.items()}
    best = (
        min(fmean(by_packs(forms, size, words, OURS)) for words in FURTHER) for size in FIT_ROWS
    )
    said["further"] = " and ".join(f"{one:+.2f}" for one in best)
    for key, words in (("known", KNOWN), ("base_known", BASE_KNOWN)):
        said[key] = f"{fmean(by_packs(results['known'], FIT_ROWS[0], words, BASE)):+.2f}"
    said["gained"] = " and ".join(
        f"{fmean(by_packs(forms, size, OURS, BASE)):+.2f}" for size in FIT_ROWS
    )
    sizes = {"few": f"{FIT_ROWS[0]:,}", "many": f"{FIT_ROWS[1]:,}", "packs": len(forms)}
    return "\n\n".join(
        [
            INTRO.format(reps=setting["resplits"], **sizes, **said),
            RULES_INTRO.format(reps=setting["rule_resplits"], packs=", ".join(sorted(rules))),
            grid(("rule", *rule_sizes), rule_rows(rules)),
        ]
    )


def filled(text, part):
    """The page with this part between its markers."""
    head, rest = text.split(START)
    return f"{head}{START}\n{part}\n{END}{rest.split(END)[1]}"


# --- all of it -----------------------------------------------------------------------------------


def write(path, results):
    """JSON with a line for each form or rule."""
    text = json.dumps(results, indent=1)
    path.write_text(
        re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", text) + "\n"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--packs", nargs="+", metavar="NAME", help="these alone")
    parser.add_argument("--extra", type=Path, metavar="FOLDER", help="networks that are held out")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    paths = {path.stem: path for path in sorted(PACKS.glob("*.npz"))}
    extra = held_out(options.extra) if options.extra else {}
    paths |= {name: path for name, path in extra.items() if name not in paths}
    results = json.loads(options.output.read_text()) if options.output.exists() else {}
    results |= {"made_by": "experiments/variants.py", "versions": versions()}
    results["setting"] = {"resplits": REPS, "recipe_resplits": FEW, "rule_resplits": RULE_REPS}
    for part in options.parts:
        on, sizes = PARTS[part]
        for pack in options.packs or (RULE_PACKS if part == "rules" else paths):
            if pack in paths and opened(paths[pack])[1] is not None:
                found = {str(size): on(pack, paths[pack], size) for size in sizes}
                results.setdefault(part, {})[pack] = found
                write(options.output, results)
                print(f"{part}: {pack}", flush=True)
    PAGE.write_text(filled(PAGE.read_text(), page_part(results)))
    print(f"Wrote its part of {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
