"""A calibrated model inside DDP, FSDP and torch.compile, in other precisions, and in training."""

import copy
import importlib

import pytest
import torch
import torch.nn.functional as F
import two_ranks
from whole_path import BATCH, Snapshot, calibrator_of, logits_of, unsettle

from featcal import attach, parse
from forked import ended, started

FITTED = {"threshold": 0.3, "temperature": 2.0}


def set_recipe(threshold=FITTED["threshold"], temperature=FITTED["temperature"]):
    recipe = parse("clip | temperature")
    recipe.steps[0].assign(threshold=threshold)
    recipe.steps[1].assign(temperature=temperature)
    return recipe


def by_hand(model, images):
    """What the calibrated model gives, in plain functions."""
    return model.fc(model.body(images).clamp(-0.3, 0.3)) / 2


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What two gloo processes saw."""
    folder = tmp_path_factory.mktemp("ranks")
    importlib.import_module("torch._dynamo")  # DDP asks for it: once, before the processes part

    def work(rank):
        torch.save(two_ranks.one_rank(folder, rank), folder / f"{rank}.pt")

    told = ended(started(2, work, folder), folder, longest=two_ranks.PATIENCE)
    assert [code for code, _ in told] == [0, 0], told
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def test_two_ranks_calibrate_to_the_model_of_one(ranks, model, fitted):
    assert ranks[0]["fitted"] == ranks[1]["fitted"]
    one = calibrator_of(fitted(model)).state_dict()
    assert ranks[0]["fitted"] == pytest.approx({k: v.item() for k, v in one.items()}, rel=1e-4)


def test_ddp_around_a_calibrated_model(ranks):
    for seen in ranks:
        assert seen["ddp"]["logits"] == 0
        assert seen["ddp"]["gradients"] <= 1e-5 * seen["ddp"]["largest"]
        assert seen["ddp"]["largest"] > 0


def test_fully_shard_of_a_calibrated_model(ranks):
    for seen in ranks:
        if "missing" in seen["fsdp"]:
            pytest.skip(f"fully_shard does not run here: {seen['fsdp']['missing']}")
        assert seen["fsdp"]["logits"] == 0
        assert seen["fsdp"]["gradients"] <= 1e-5 * seen["ddp"]["largest"]
        assert seen["fsdp"]["names"]  # those of the model that is not sharded
        assert seen["fsdp"]["restored"] == seen["fsdp"]["refilled"] == 0


def test_a_model_that_is_spread_already_is_refused_with_the_remedy(ranks):
    wrapped = "model is wrapped in DistributedDataParallel: take model.module instead, and wrap "
    for seen in ranks:
        assert seen["ddp"]["refused"].startswith(wrapped)
        if "missing" not in seen["fsdp"]:
            assert (
                "wrapped in FSDPModule: take the model as it was before" in seen["fsdp"]["refused"]
            )


# The inductor's own warnings, on machines it does not know well, are not the matter here.


@pytest.mark.no_cover
def test_a_model_compiled_in_place_is_calibrated_like_any_other(model, images, fitted):
    expected = logits_of(fitted(model), images)
    model.compile(backend="eager")
    raw = logits_of(model, images)
    calibrated = fitted(model)
    assert torch.equal(logits_of(calibrated, images), expected)
    assert torch.equal(logits_of(model, images), raw)
    torch._dynamo.reset()


def test_a_model_in_half_precision(model, images, fitted):
    expected, dtype = fitted(model), torch.bfloat16
    half = copy.deepcopy(model).to(dtype)
    unsettle(half)
    before = Snapshot(half)
    calibrated = fitted(half)  # float32 images: they go in as the model wants them
    before.check()
    found = logits_of(calibrated.eval(), images.to(dtype))
    assert found.dtype == torch.float32  # the digits of a confidence near 1 need them
    assert all(value.dtype == torch.float32 for value in calibrator_of(calibrated).buffers())
    torch.testing.assert_close(found, logits_of(expected, images), rtol=0, atol=0.15)
    values, others = (list(calibrator_of(one).buffers()) for one in (calibrated, expected))
    torch.testing.assert_close(values, others, rtol=0.05, atol=0)


def test_gradients_reach_the_shared_weights(model, images):
    calibrated = attach(model, set_recipe()).train()
    other = copy.deepcopy(model).train()
    labels = torch.zeros(BATCH, dtype=torch.long)
    F.cross_entropy(calibrated(images[:BATCH]), labels).backward()
    F.cross_entropy(by_hand(other, images[:BATCH]), labels).backward()
    for (name, weight), same in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(weight.grad, same.grad, msg=name)
    assert float(model.fc.weight.grad.abs().max()) > 0
    assert float(model.stem[0].weight.grad.abs().max()) > 0
    torch.testing.assert_close(model.stem[1].running_mean, other.stem[1].running_mean)


def test_a_step_of_the_optimiser_changes_both_and_not_the_calibrator(model, images):
    calibrated = attach(model, set_recipe())
    assert not any("calibrator" in name for name, _ in calibrated.named_parameters())
    optimiser = torch.optim.SGD(calibrated.parameters(), lr=0.1)
    calibrated(images).square().mean().backward()
    optimiser.step()
    with torch.no_grad():
        assert torch.equal(calibrated(images), by_hand(model, images))
    assert calibrator_of(calibrated).steps[1].temperature.item() == 2
