"""A file whose tensors were changed is refused in one sentence, or gives sound numbers."""

import math

import pytest
import torch

import featcal
from featcal import METHODS, Batch, InputError, parse

RECIPES = [
    *sorted(METHODS),
    "group(partitions=3, base='ensemble')",
    "histogram(reading='one_vs_rest')",
    "isotonic(between='step')",
    "parameterised(reference=True)",
    "proximity(how='bin_mean_shift')",
]

# Half of these is all of a calibrator for half the classes: only a head can tell.
ONE_A_CLASS = {("classwise", "temperatures")}

DAMAGES = {
    "empty": lambda value: value.new_zeros(0),
    "negated": lambda value: -value,
    "zeroed": torch.zeros_like,
    "transposed": lambda value: value.T if value.ndim == 2 else value.unsqueeze(-1),
    "another axis": lambda value: value.unsqueeze(0),
    "half": lambda value: value[: len(value) // 2] if value.ndim else value.new_zeros(2),
    "half of each row": lambda value: value[..., : value.shape[-1] // 2] if value.ndim else value,
    "NaN": lambda value: torch.full_like(value, math.nan),
    "infinite": lambda value: torch.full_like(value, math.inf),
}


@pytest.fixture(scope="module")
def world(made):
    return made(n=250, d=6, k=4, heat=1.6)


@pytest.mark.filterwarnings("ignore::featcal.CalibrationWarning", "ignore:The use of `x.T`")
@pytest.mark.parametrize("recipe", RECIPES)
def test_damaged_values_are_refused_or_sound(recipe, world, tmp_path):
    batch = Batch(world.logits, world.labels, world.features)
    fitted = parse(recipe)
    fitted.fit(batch, world.head, train=batch if fitted.needs_train else None)
    fitted = fitted.outcome()
    assert not fitted.report.noop
    featcal.load(featcal.save(fitted, tmp_path / "whole.safetensors"))
    found = [
        f"{key} {damage}: {fault}"
        for key, value in fitted.state_dict().items()
        for damage, changed in DAMAGES.items()
        if not (damage.startswith("half") and (recipe, key) in ONE_A_CLASS)
        and (fault := outcome(fitted, {key: changed(value)}, world, tmp_path / "d.safetensors"))
    ]
    assert not found, "\n".join(found)


def outcome(fitted, change, world, path):
    """What went wrong, if anything did."""
    damaged = parse(repr(fitted))
    damaged.load_state_dict(fitted.state_dict() | change)
    damaged.report = fitted.report
    featcal.save(damaged, path, overwrite=True)
    try:
        loaded = featcal.load(path)
    except InputError:
        return ""
    with torch.no_grad():
        try:
            logits = loaded(world.features, world.head)
        except (RuntimeError, IndexError, ValueError) as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    if logits.shape != world.logits.shape:
        return f"outputs of shape {tuple(logits.shape)}"
    return "" if bool(torch.isfinite(logits).all()) else "outputs that are not finite"
