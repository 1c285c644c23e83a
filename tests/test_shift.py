"""Damaged images are damaged as said, scores under shift are featcal's own, the page shows them."""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import featcal
from featcal import Batch
from featcal.datasets import Images, Splits
from featcal.report.bootstrap import Resamples
from featcal.train.run_folder import Checkpoint, Position

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "experiments"))  # the scripts import each other

corruptions = importlib.import_module("corruptions")
published = importlib.import_module("train_published")
shift = importlib.import_module("shift")


def photos(count=40):
    """Images with large and small things on them, as bytes."""
    draw = torch.Generator().manual_seed(0)
    parts = [torch.rand(count, 3, size, size, generator=draw) for size in (5, 13)]
    smooth = sum(functional.interpolate(p, (32, 32), mode="bicubic") for p in parts) / 2
    return smooth.clamp(0, 1).mul(255).byte().permute(0, 2, 3, 1).contiguous()


# --- damage --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", corruptions.KINDS)
def test_damage_grows_with_its_strength_and_comes_out_the_same_again(kind):
    pixels = photos()
    made = [corruptions.corrupted(pixels, kind, s) for s in corruptions.STRENGTHS]
    assert all(one.dtype == torch.uint8 and one.shape == pixels.shape for one in made)
    away = [float((one.float() - pixels).square().mean()) for one in made]
    assert away[0] > 0
    assert away == sorted(away)
    assert torch.equal(corruptions.corrupted(pixels, kind, 3), made[2])


def test_noise_has_the_spread_it_says():
    grey = torch.full((50, 32, 32, 3), 128, dtype=torch.uint8)
    noisy, shot, hit = (
        corruptions.corrupted(grey, kind, 5).float() / 255
        for kind in ("gaussian noise", "shot noise", "impulse noise")
    )
    assert noisy.std() == pytest.approx(0.10, rel=0.02)
    assert shot.mean() == pytest.approx(128 / 255, rel=0.01)
    assert shot.std() == pytest.approx((128 / 255 / 50) ** 0.5, rel=0.02)
    for end in (0.0, 1.0):
        assert (hit == end).float().mean() == pytest.approx(0.035, rel=0.1)


def test_blurs_are_those_of_scipy_and_of_a_plain_loop():
    from scipy import ndimage

    pixels = photos(6)
    blurred = corruptions.corrupted(pixels, "gaussian blur", 4)
    sigma = corruptions.KINDS["gaussian blur"][1][3]
    sigmas = (0, sigma, sigma, 0)
    expected = ndimage.gaussian_filter(pixels.numpy() / 255.0, sigmas, truncate=3, mode="mirror")
    assert np.abs(blurred.numpy() - 255 * expected).max() <= 0.501
    moved = corruptions.corrupted(pixels, "motion blur", 4).numpy()  # five pixels
    wide = np.pad(pixels.numpy().astype(float), ((0, 0), (2, 2), (2, 2), (0, 0)), mode="edge")
    for image, around in zip(moved, wide, strict=True):
        lines = [
            sum(
                around[2 + down * s : 34 + down * s, 2 + right * s : 34 + right * s]
                for s in range(-2, 3)
            )
            / 5
            for down, right in corruptions.DIRECTIONS
        ]
        assert min(np.abs(image - line).max() for line in lines) <= 0.501


def test_contrast_and_brightness_move_what_they_say():
    pixels = photos(6)
    pale = corruptions.corrupted(pixels, "contrast", 2).float()
    spread = [one.flatten(1, 2).std(1) for one in (pale, pixels.float())]
    assert torch.allclose(spread[0], 0.5 * spread[1], rtol=0.02)
    light = corruptions.corrupted(pixels, "brightness", 1).float()
    below = pixels < 240
    assert ((light - pixels)[below] - 0.05 * 255).abs().max() <= 0.501


# --- scores --------------------------------------------------------------------------------------


def test_scores_and_resamples_are_featcals():
    draw = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(300, 5, generator=draw)
    labels = torch.randint(5, (300,), generator=draw)
    found = shift.scored(logits, labels, shift.resampled(300))
    names = ("nll", "ece", "accuracy", "brier", "confidence")
    counts = Resamples.draw(300, shift.RESAMPLES, shift.SEED).counts
    for place, rows in enumerate(
        [torch.arange(300), torch.arange(300).repeat_interleave(counts[:, 1].int())]
    ):
        whole = featcal.evaluate(Batch(logits[rows], labels[rows]), bins=shift.BINS)
        for name in names:
            assert found[name][place] == pytest.approx(whole.metrics[name], rel=1e-6)


class Small(nn.Module):
    def __init__(self, _="wrn16x4", classes=3):
        super().__init__()
        self.body, self.head = nn.Linear(3 * 32 * 32, 8), nn.Linear(8, classes)

    def forward(self, images):
        return self.head(self.body(images.flatten(1)).relu())


def test_a_network_is_judged_from_its_weights(tmp_path, monkeypatch):
    """Saved as a run keeps it, read, fitted on clean val alone, scored on both, merged by name."""
    monkeypatch.setattr(shift, "KINDS", {"contrast": corruptions.KINDS["contrast"]})
    monkeypatch.setattr(shift, "STRENGTHS", (1, 5))
    monkeypatch.setattr(shift, "RECIPES", ("none", "temperature", "sample", "no such recipe"))
    monkeypatch.setattr(shift, "build", Small)
    torch.manual_seed(0)
    model = Small().eval()
    settings = {"dataset": "cifar10", "network": "small", "loss": "ce()"}
    settings["recipe"] = {"epochs": 2, "seed": 7}
    trainer = SimpleNamespace(
        checkpoint=SimpleNamespace(settings=settings), position=SimpleNamespace(epoch=2)
    )
    folder = tmp_path / "cifar10-small-ce-7"
    folder.mkdir()
    published.keep_weights(SimpleNamespace(trainer=trainer, model=model, folder=folder))
    images = Images(photos(60), torch.arange(60) % 3)
    parts = {part: images for part in ("train", "val", "test")}
    splits = Splits(
        name="cifar10",
        class_names=("a", "b", "c"),
        train_index=torch.arange(60),
        val_index=None,
        **parts,
    )
    entry = shift.judged(folder, lambda name: splits, rows=40)
    assert list(entry["fitted"]) == ["none", "temperature", "sample"]
    assert (entry["epochs"], entry["train_seed"]) == ({"done": 2, "of": 2}, 7)
    assert entry["rows"] == {"val": 60, "test": 40, "of": 60}
    assert [(one["kind"], one["strength"]) for one in entry["sets"]] == [
        ("clean", 0),
        ("contrast", 1),
        ("contrast", 5),
    ]
    pixels = shift.normalisations("cifar10")[0]
    with torch.no_grad():
        for one in entry["sets"][::2]:
            seen = images.pixels[:40]
            if one["strength"]:
                seen = corruptions.corrupted(seen, "contrast", 5)
            own = featcal.evaluate(Batch(model(pixels(seen)), images.labels[:40])).metrics
            assert one["scores"]["none"]["nll"] == pytest.approx(own["nll"], rel=1e-4)
    for mean, one in zip(entry["means"], entry["sets"][1:], strict=True):  # of one kind
        assert mean["scores"] == one["scores"]
    output = tmp_path / "shift.json"
    for name in ("b", "a", "b"):
        shift.write(output, {name: entry})
    assert list(json.loads(output.read_text())["networks"]) == ["a", "b"]
    shift.write(output, {"c": {**entry, "dataset": "cifar100"}})
    results = json.loads(output.read_text())
    part = shift.page_part(results, shift.read()[1])
    several, alone = part.index("**CIFAR-10**, 2 networks"), part.index("**CIFAR-100**, small with")
    gain = shift.relative(entry["sets"][0]["scores"], "sample")
    lines = [line for line in part.splitlines() if line.startswith("| small with ce, seed 7 |")]
    assert len(lines) == 2  # of the networks that are two
    assert all(f"{gain:+.2f} %" in line for line in lines)
    assert "every network" in part[several:alone]
    assert "every network" not in part[alone:]
    shift.draw(results, tmp_path / "shift.svg")
    assert "strength of the damage" in (tmp_path / "shift.svg").read_text()


def test_a_run_under_way_is_read_from_its_checkpoint(tmp_path):
    model, images = Small(), Images(photos(6), torch.arange(6) % 3)
    splits = SimpleNamespace(train=images, val=images, held_out=None)
    kept = Checkpoint(tmp_path, {"network": "small"}, splits)
    kept.save(model, torch.optim.SGD(model.parameters()), {}, Position(epoch=1))
    about, tensors = shift.weights_of(tmp_path)
    assert (about["settings"]["network"], about["position"]["epoch"]) == ("small", 1)
    assert tensors.keys() == model.state_dict().keys()
    assert all(map(torch.equal, tensors.values(), (model.state_dict()[key] for key in tensors)))
    with pytest.raises(SystemExit, match="--keep-weights"):
        shift.weights_of(tmp_path / "empty")


# --- the page ------------------------------------------------------------------------------------


def test_the_page_shows_the_result_files():
    page = shift.PAGE.read_text()
    assert shift.filled(page, shift.page_part(*shift.read())) == page


def test_what_the_page_says_of_questions_out_of_scope_is_so():
    for case in shift.read()[1]["cases"]:
        if case["set"] != "clinc150":
            continue
        rows = {row["recipe"]: row for row in case["recipes"] if row["mode"] == "sequential"}
        one, ours = rows["temperature"], rows["sample"]
        assert ours["metrics"]["nll"] < one["metrics"]["nll"]
        assert ours["scope"]["auroc"] < one["scope"]["auroc"]
        sure = [row["scope"]["out_of_scope"]["above"]["0.9"] for row in (one, ours)]
        assert sure[0] < sure[1]
