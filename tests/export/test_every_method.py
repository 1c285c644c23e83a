"""Every method in ONNX Runtime: the same logits as the calibrator's own, at any batch size."""

import pytest
import torch
from torch import nn

from featcal import METHODS, Batch, export, parse

# Tracing doubles the time of an export, and every line these reach is reached elsewhere.
pytestmark = pytest.mark.no_cover

# Forms whose forward pass is another one than that of the method's default.
FORMS = {
    "classwise": ["classwise(reading='logit')"],
    "density": ["clip | density(features='clipped')"],
    "ensemble": ["ensemble(reference=True)"],
    "group": [
        "clip | group(partitions=3, features='clipped')",
        "group(partitions=2, base='ensemble')",
    ],
    "histogram": ["histogram(reading='one_vs_rest')"],
    "isotonic": ["isotonic(reading='one_vs_rest', between='step')", "clip | isotonic"],
    "logit_clip": ["logit_clip(ties='first')"],
    "parameterised": ["parameterised(reference=True)"],
    "proximity": ["proximity(how='bin_mean_shift')"],
    "temperature": ["clip | temperature"],
}
SMALLER = {"group": "group(partitions=4)"}  # every partition is the same few operators again
JUMPS = {"bbq", "histogram", "isotonic", "proximity"}  # each for itself: rows at edges are left out
SMOOTH = sorted(METHODS.keys() - JUMPS)
FAMILIES = [SMOOTH[::2], SMOOTH[1::2], *([name] for name in sorted(JUMPS))]
SIZES = (1, 7)
NEAR = 5e-7  # of a row's largest feature: how far rounding moves what a map is asked for


class Several(nn.Module):
    """Calibrated heads on the same features, their logits side by side: one export for all."""

    def __init__(self, heads):
        super().__init__()
        self.heads = nn.ModuleList(heads)

    def forward(self, features):
        return torch.cat([head(features) for head in self.heads], 1)


@pytest.fixture(scope="module")
def world(made):
    return made(n=500, d=8, k=4, heat=1.6)


@pytest.fixture(scope="module")
def unseen(made):
    """Rows no calibrator has seen: rows of the fit split lie on the very edges of some maps."""
    return made(n=400, d=8, k=4, heat=1.6, seed=7).features[:150]


def fitted(recipe, world):
    batch = Batch(world.logits, world.labels, world.features)
    calibrator = parse(recipe)
    train = batch if calibrator.needs_train else None
    return calibrator.fit(batch, world.head, mode="sequential", train=train)


def at_an_edge(model, features, allowed):
    """Rows whose logits change by more than is allowed when features move by less than rounding.

    The calibrator's own answer is then a matter of the last digit, and there is no right one.
    """
    found = torch.zeros(len(features), dtype=torch.bool)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        own = model(features)
        for _ in range(8):
            signs = torch.randint(2, features.shape, generator=generator) * 2 - 1
            moved = features + NEAR * features.abs().amax(1, keepdim=True) * signs
            found |= ((model(moved) - own).abs() > allowed).any(1)
    return found


@pytest.mark.filterwarnings("ignore::featcal.CalibrationWarning")
@pytest.mark.parametrize("methods", FAMILIES, ids=" ".join)
def test_onnx_runtime_gives_the_logits_of_every_method(methods, world, unseen, runtime, tmp_path):
    recipes = [
        recipe for name in methods for recipe in (SMALLER.get(name, name), *FORMS.get(name, []))
    ]
    found = [fitted(recipe, world) for recipe in recipes]
    assert not any(calibrator.report.noop for calibrator in found)
    model = Several([calibrator.wrap(world.head) for calibrator in found])
    path = tmp_path / "head.onnx"
    done = export.onnx(model, path, unseen[:3], rows=unseen)
    assert done.inputs == {"features": "float32[batch, 8]"}
    with torch.no_grad():
        own = model(unseen)
    allowed = 1e-5 * own.abs().max()
    apart = [runtime(path, features=unseen[:n])["logits"] - own[:n] for n in (*SIZES, len(unseen))]
    far = (apart[-1].abs() > allowed).any(1)
    if any(step.jumps for calibrator in found for step in calibrator.steps_in_order()):
        edges = at_an_edge(model, unseen, allowed)
        assert edges.double().mean() < 0.05
        far &= ~edges
        apart = [rows[~edges[: len(rows)]] for rows in apart]
    assert not far.any()
    for rows in apart:
        assert rows.numel() == 0 or float(rows.abs().max()) <= allowed


def test_rows_on_the_edges_of_a_map_are_counted_apart(world, tmp_path):
    """The published spline jumps at every confidence of the fit split, where its rows lie."""
    model = fitted("spline(reference=True)", world).wrap(world.head)
    parity = export.onnx(model, tmp_path / "s.onnx", world.features[:3], rows=world.features).parity
    assert parity.holds
    assert 0 < parity.rows_at_edges < len(world.features)
    assert f"; {parity.rows_at_edges} rows at an edge left out" in str(parity)
