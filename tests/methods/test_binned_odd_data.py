"""Every reading of histogram, isotonic, spline and BBQ on odd data: a sound result."""

import pytest
import torch
from method_cases import drawn, mapped

from featcal import Batch, parse

RECIPES = [
    "histogram",
    "histogram(edges='width', smooth=False)",
    "histogram(reading='one_vs_rest')",
    "histogram(reading='one_vs_rest', edges='width', smooth=False)",
    "isotonic",
    "isotonic(between='step')",
    "isotonic(reference=True)",
    "isotonic(reading='one_vs_rest')",
    "isotonic(reading='one_vs_rest', between='step')",
    "isotonic(reading='top')",
    "spline",
    "spline(knots=2)",
    "spline(reference=True)",
    "bbq",
]


@pytest.fixture(scope="module")
def worlds():
    logits, labels = drawn(n=120, k=4)
    many = torch.randn(300, 150, generator=torch.Generator().manual_seed(0))
    return {
        "all right": (logits, logits.argmax(1)),
        "all wrong": (logits, logits.argmin(1)),
        "constant": (torch.zeros(40, 5), torch.arange(40) % 5),
        "constant and right": (torch.zeros(40, 5), torch.zeros(40, dtype=torch.int64)),
        "one class": (logits[:, :1], torch.zeros(120, dtype=torch.int64)),
        "one row": (logits[:1], labels[:1]),
        "one row, wrong": (logits[:1], logits[:1].argmin(1)),
        "two rows": (logits[:2], labels[:2]),
        "two classes": drawn(n=120, k=2),
        "two rows a class": (many, torch.arange(300) % 150),
        "duplicates": (logits[:5].repeat(20, 1), labels[:100]),
        "huge": (logits * 1e4, labels),
        "tiny": (logits * 1e-6, labels),
        "double": (logits.double(), labels),
        "absent classes": (torch.cat([logits, logits - 3], 1), labels),
    }


@pytest.mark.parametrize("recipe", RECIPES)
def test_odd_data_gives_a_sound_result(recipe, worlds):
    for world, (logits, labels) in worlds.items():
        calibrator = parse(recipe).fit(Batch(logits, labels))
        found = mapped(calibrator, logits)
        report = calibrator.report
        assert report.loss_after <= report.loss_before or "reference" in recipe, world
        assert report.noop == torch.equal(found, logits), world
        assert found.dtype == logits.dtype, world
        assert all(isinstance(v, (int, float)) for v in report.steps[0].values.values()), world
        calibrator.check()
        for inputs in (logits, logits * 0, -logits * 100):
            out = mapped(calibrator, inputs)
            assert out.log_softmax(1).isfinite().all(), world
            kept = torch.equal(out.argmax(1), inputs.argmax(1))
            assert kept or not calibrator.keeps_accuracy, world
