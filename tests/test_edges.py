"""Odd data, on every method: a sound result or one clear sentence, never NaN."""

import warnings

import pytest
import torch
from torch import nn

from featcal import METHODS, Batch, CalibrationWarning, InputError, load, parse, save
from featcal.heads.head import as_head

# Other rows for known lines.
pytestmark = [pytest.mark.no_cover, pytest.mark.usefixtures("few_choices")]
RECIPES = [*sorted(METHODS), "clip | temperature"]
VARIANTS = [
    "density(reference=True)",
    "group(partitions=3, base='ensemble')",
    "group(partitions=2, reference=True)",
    "histogram(edges='width', smooth=False)",
    "histogram(reading='one_vs_rest')",
    "histogram(reading='one_vs_rest', edges='width', smooth=False)",
    "isotonic(between='step')",
    "isotonic(reading='one_vs_rest', between='step')",
    "isotonic(reading='top')",
    "isotonic(reference=True)",
    "logit_clip(ties='first')",
    "proximity(how='bin_mean_shift')",
    "proximity(reference=True)",
    "spline(knots=2)",
    "spline(reference=True)",
    "vector(ridge=0)",
]


def scene(features, labels, classes, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    head = nn.Linear(features.shape[1], classes, device="meta")
    weight = torch.randn(classes, features.shape[1], generator=generator) * scale
    head.weight = nn.Parameter(weight)
    head.bias = nn.Parameter(torch.zeros(classes))
    return features, labels, head


def drawn(rows, width=12, seed=1):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).relu()


def all_right():
    features, _, head = scene(drawn(90), torch.zeros(90), 5)
    return features, head(features).argmax(1), head


def all_wrong():
    features, _, head = scene(drawn(90), torch.zeros(90), 5)
    return features, head(features).argmin(1), head


def one_logit():
    features, _, head = scene(drawn(160), torch.zeros(160), 1)
    uniform = torch.rand(160, generator=torch.Generator().manual_seed(2))
    return features, uniform < (head(features)[:, 0] / 2).sigmoid(), head


CASES = {
    "two rows per class": lambda: scene(drawn(620), torch.arange(620) % 310, 310),
    "absent classes": lambda: scene(drawn(150), torch.arange(150) % 3, 10),
    "all right": all_right,
    "all wrong": all_wrong,
    "constant logits": lambda: scene(drawn(80), torch.arange(80) % 4, 4, scale=0.0),
    "one label": lambda: scene(drawn(80), torch.zeros(80, dtype=torch.int64), 6),
    "one logit": one_logit,
    "one logit of 0": lambda: scene(drawn(80), torch.arange(80) % 2 == 0, 1, scale=0.0),
    "one row": lambda: scene(drawn(1), torch.tensor([1]), 3),
    "the same row": lambda: scene(drawn(1).repeat(60, 1), torch.arange(60) % 3, 3),
    "huge logits": lambda: scene(drawn(90), torch.arange(90) % 4, 4, scale=3e3),
    "tiny logits": lambda: scene(drawn(90), torch.arange(90) % 4, 4, scale=1e-6),
    "silent features": lambda: scene(torch.zeros(60, 7), torch.arange(60) % 3, 3),
    # All rows on one side of every direction: the other group of each partition is empty.
    "one group alone": lambda: scene(1 + drawn(80) * 1e-3, torch.arange(80) % 3, 3),
}


# A matrix of so many values is refused, by name and with the remedy; nothing else is.
REFUSED = [("matrix", "two rows per class"), ("dirichlet", "two rows per class")]


@pytest.fixture(scope="module")
def worlds():
    with torch.no_grad():
        made = {name: make() for name, make in CASES.items()}
        return {name: (Batch(head(x), y, x), head) for name, (x, y, head) in made.items()}


def fitted(recipe, batch, head):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)
        return parse(recipe).fit(batch, head, train=batch, mode="sequential")


@pytest.mark.parametrize("recipe", [*sorted(METHODS), *VARIANTS])
def test_odd_data_gives_a_sound_result_or_one_sentence(recipe, worlds, tmp_path):
    for name, (batch, head) in worlds.items():
        if (recipe, name) in REFUSED:
            with pytest.raises(InputError, match=r"310 classes .* use sms or svs"):
                fitted(recipe, batch, head)
            continue
        calibrator = fitted(recipe, batch, head)
        with torch.no_grad():
            found = calibrator(batch.features, as_head(head))
            shipped = calibrator.wrap(head)(batch.features)
        assert torch.isfinite(found).all(), name
        assert torch.isfinite(shipped).all(), name
        torch.testing.assert_close(found.softmax(1).sum(1), torch.ones(len(batch)))
        if "reference" not in recipe:  # published forms may lose, and may jump between rows
            report = calibrator.report
            assert report.loss_after <= report.loss_before + 1e-9, name
            direct = float(nn.functional.cross_entropy(found.double(), batch.labels))
            assert report.loss_after == pytest.approx(direct, rel=1e-5, abs=1e-6), name
        kept = torch.equal(found.argmax(1), batch.logits.argmax(1))
        assert kept or not calibrator.keeps_accuracy, name
        load(save(calibrator, tmp_path / "c.safetensors", overwrite=True))  # no file is refused


@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_unlike_any_fitted_ones_stay_sound(recipe):
    features, labels, head = CASES["absent classes"]()
    with torch.no_grad():
        batch = Batch(head(features), labels, features)
        calibrator = fitted(recipe, batch, head)
        odd = torch.stack(
            [torch.zeros(12), torch.full((12,), 1e4), torch.full((12,), -1e4), -features[0]]
        )
        found = calibrator(odd, head)
        assert torch.isfinite(found).all()
        if calibrator.keeps_accuracy:
            assert torch.equal(found.argmax(1), head(odd).argmax(1))
