"""Forms and rules beside `sample` and `auto`: the fit, its terms, the rules, and the page."""

import json
from dataclasses import asdict
from statistics import fmean

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import featcal
from featcal import Batch
from featcal.methods.auto import Judged, to_use
from featcal.report.scores import calibrated_logits


@pytest.fixture(scope="module")
def variants(imported):
    return imported("variants")


@pytest.fixture(scope="module")
def world():
    """Rows whose confidence is too high where features are long; the head."""
    draw = torch.Generator().manual_seed(3)
    torch.manual_seed(3)
    head = nn.Linear(12, 6)
    features = torch.randn(3000, 12, generator=draw).relu()
    features = features * torch.rand(3000, 1, generator=draw) * 12
    with torch.no_grad():
        logits = head(features)
        honest = logits / (0.5 + features.norm(dim=1, keepdim=True) / 8)
    labels = torch.multinomial(honest.softmax(1), 1, generator=draw)[:, 0]
    return Batch(logits, labels, features), head


@pytest.fixture(scope="module")
def parts():
    return torch.arange(1000), torch.arange(1000, 3000)


@pytest.fixture(scope="module")
def terms(variants, world, parts):
    return variants.further(*world, parts[0])


def test_the_fit_of_the_form_of_sample_is_that_of_sample(variants, world, parts, terms):
    batch, head = world
    fit, test = (batch.rows(part) for part in parts)
    ours = featcal.parse("sample").fit(fit, head)
    own = variants.Fit(variants.Form(), batch, terms, parts[0])
    assert own.at[1:6] == pytest.approx(ours.weights.double(), abs=1e-3)
    assert float(own.at[6]) == pytest.approx(float(ours.boost), abs=1e-3)
    assert own.at[7:] == pytest.approx(ours.offsets.double(), abs=1e-3)
    with torch.no_grad():
        expected = F.cross_entropy(calibrated_logits(test, ours, head), test.labels)
    one = variants.outcome(featcal.parse("temperature").fit(fit, head), test, head)
    found = own.loss(batch, parts[1])
    assert found == pytest.approx(float(expected), abs=1e-5)
    assert found < one - 0.002


def test_every_form_fits_and_none_is_far_from_one_temperature(variants, world, parts, terms):
    batch, head = world
    one = variants.outcome(
        featcal.parse("temperature").fit(batch.rows(parts[0]), head), batch.rows(parts[1]), head
    )
    for words, form in variants.FORMS.items():
        assert variants.Fit(form, batch, terms, parts[0]).loss(batch, parts[1]) < one + 1e-3, words


@pytest.mark.parametrize("mixed", [0.0, 0.05])
def test_curves_are_the_derivatives_of_the_loss(variants, world, mixed):
    batch = world[0].rows(torch.arange(50))
    logits = batch.logits.double()
    rows = variants.Rows(logits, batch.labels)
    s = torch.linspace(0.5, 1.5, 50, dtype=torch.float64, requires_grad=True)
    b = torch.linspace(-0.3, 0.3, 50, dtype=torch.float64, requires_grad=True)
    probs = (logits * s[:, None] + b[:, None] * F.one_hot(logits.argmax(1), 6)).softmax(1)
    probs = (1 - mixed) * probs + mixed / 6
    value = -probs.gather(1, batch.labels[:, None])[:, 0].log()
    in_s, in_b = torch.autograd.grad(value.sum(), (s, b), create_graph=True)
    ss, sb = torch.autograd.grad(in_s.sum(), (s, b), retain_graph=True)
    (bb,) = torch.autograd.grad(in_b.sum(), b)
    found = rows.curves(s.detach(), b.detach(), mixed)
    for mine, exact in zip(found, (value, in_s, in_b, ss, sb, bb), strict=True):
        assert mine == pytest.approx(exact.detach(), abs=1e-9)


def test_a_row_is_not_held_against_a_mean_it_is_part_of(variants, world, parts, terms):
    batch, fit = world[0], parts[0]
    x, top = batch.features.double(), batch.logits.argmax(1)
    right = int(torch.nonzero(top[fit] == batch.labels[fit])[0, 0])
    for row in (right, 1500):
        peers = [i for i in fit.tolist() if batch.labels[i] == top[row] and i != row]
        mean = (x[peers].sum(0) + x[fit].mean(0)) / (len(peers) + 1)
        expected = (x[row] - mean).norm().log()
        assert float(terms["distance"][row]) == pytest.approx(float(expected), abs=1e-9)


def test_rules_by_hand(variants):
    def row(recipe, value, error):
        return {"recipe": recipe, "value": value, "difference": value - 0.9, "error": error}

    table = [row("none", 1.0, 0.01), row("sample", 0.9, 0.0)]
    table += [row("temperature", 0.91, 0.03), row("svs", 0.885, 0.01)]
    chosen = {words: rule(table)["recipe"] for words, rule in variants.RULES.items()}
    assert list(chosen.values()) == ["sample", "svs", "temperature", "svs", "sample"]
    table[0] = row("none", 0.88, 0.01)
    assert variants.unless(2.0)(table)["recipe"] == "none"
    assert variants.fewest([table[0], table[1]])["recipe"] == "none"


def test_the_last_rule_is_that_of_auto(variants):
    draw = torch.Generator().manual_seed(0)
    *_, rule = variants.RULES.values()
    for _ in range(50):
        values, errors = torch.rand(2, len(variants.NUMBERS), generator=draw).tolist()
        table = [
            Judged(name, value, value - values[1], error / 5, 0.9)
            for name, value, error in zip(variants.NUMBERS, values, errors, strict=True)
        ]
        assert rule([asdict(row) for row in table]) == asdict(to_use(table))


def test_the_page_shows_the_result_file(variants):
    page, results = variants.PAGE.read_text(), json.loads(variants.RESULTS.read_text())
    assert variants.filled(page, variants.page_part(results)) == page


def test_what_the_page_says_in_words_is_so(variants):
    forms = json.loads(variants.RESULTS.read_text())["forms"]

    def over(words):
        rows = variants.FIT_ROWS
        return [fmean(variants.by_packs(forms, n, words, variants.OURS)) for n in rows]

    for key in ("pair", "bare"):
        assert min(over(variants.TOLD[key])) > 0
    few, many = over(variants.TOLD["bare"])
    assert few < many  # offsets and b pay where rows are many
    few, many = over(variants.TOLD["blank"])
    assert few > 0.1 > many  # what is expected helps where rows are few
    assert all(each > -0.1 for words in variants.FURTHER for each in over(words))
    for key in ("either", "scaled", "bold"):
        assert all(abs(each) < 0.05 for each in over(variants.TOLD[key]))
    few, many = over(variants.TOLD["svs"])
    assert many < 0 < few


def test_what_is_known_to_nobody_bounds_what_is_fitted(variants):
    results = json.loads(variants.RESULTS.read_text())
    for pack, cell in results["known"].items():
        few = cell[str(variants.FIT_ROWS[0])]
        gain = variants.over(few, variants.KNOWN, variants.BASE)
        assert gain < variants.over(few, variants.BASE_KNOWN, variants.BASE) < 0
        fitted = variants.over(
            results["forms"][pack][str(variants.FIT_ROWS[0])], variants.OURS, variants.BASE
        )
        assert gain < fitted
