"""What two gloo processes do: calibrate one model on their own rows, wrap it, train a step."""

import copy
import datetime

import torch
import torch.distributed as dist
from rebuilt_models import ResNet
from torch.nn.parallel import DistributedDataParallel
from whole_path import batches_of, calibrator_of, logits_of, pictures, trained

from featcal import InputError, calibrate

PATIENCE = 120  # seconds


def case():
    """A model and its batches: the same in every process."""
    images = pictures()
    torch.manual_seed(0)
    model = trained(ResNet(), images)
    return model, batches_of(model, images)


def gap(found, expected):
    return float((found - expected).abs().max())


def refusal(model, batches):
    try:
        calibrate(model, batches, "clip | temperature")
    except InputError as error:
        return str(error)
    return "not refused"


def gradients(model, shards):
    """The mean over the shards of each weight's gradient, by one process."""
    model = copy.deepcopy(model)
    for images, _ in shards:
        (model(images).square().sum() / len(shards)).backward()
    return {name: weight.grad for name, weight in model.named_parameters()}


def replicated(model, calibrated, images, batches, rank):
    """DDP around the calibrated model: its logits, the gradients of a step, its names."""
    wrapped = DistributedDataParallel(copy.deepcopy(calibrated))
    wrapped(batches[rank][0]).square().sum().backward()
    expected = gradients(calibrated, batches[:2])
    found = dict(wrapped.module.named_parameters())
    return {
        "logits": gap(logits_of(wrapped, images), logits_of(calibrated, images)),
        "gradients": max(gap(found[key].grad, expected[key]) for key in expected),
        "largest": max(float(grad.abs().max()) for grad in expected.values()),
        "refused": refusal(DistributedDataParallel(copy.deepcopy(model)), batches),
    }


def emptied(model):
    model = copy.deepcopy(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    return model


def sharded(model, calibrated, images, batches, rank):
    """fully_shard (FSDP2) of the calibrated model, and its whole state back in a plain one."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        set_model_state_dict,
    )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    parts = copy.deepcopy(calibrated)
    fully_shard(parts.layer1, mesh=mesh)
    fully_shard(parts, mesh=mesh)
    names = list(parts.state_dict())
    logits = logits_of(parts, images)
    parts(batches[rank][0]).square().sum().backward()
    expected = gradients(calibrated, batches[:2])
    found = {name: weight.grad.full_tensor() for name, weight in parts.named_parameters()}
    plain, whole = emptied(calibrated), StateDictOptions(full_state_dict=True)
    plain.load_state_dict(get_model_state_dict(parts, options=whole))
    refilled = emptied(calibrated)
    fully_shard(refilled, mesh=mesh)
    set_model_state_dict(refilled, calibrated.state_dict(), options=whole)
    model = copy.deepcopy(model)
    fully_shard(model, mesh=mesh)
    return {
        "logits": gap(logits, logits_of(calibrated, images)),
        "gradients": max(gap(found[key], expected[key]) for key in expected),
        "names": names == list(calibrated.state_dict()),
        "restored": gap(logits_of(plain, images), logits_of(calibrated, images)),
        "refilled": gap(logits_of(refilled, images), logits_of(calibrated, images)),
        "refused": refusal(model, batches),
    }


def one_rank(folder, rank):
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=PATIENCE),
    )
    images, (model, batches) = pictures(), case()
    own = batches[: len(batches) // 3] if rank == 0 else batches[len(batches) // 3 :]
    calibrated = calibrate(model, own, "clip | temperature", mode="sequential")
    fitted = calibrator_of(calibrated).state_dict()
    seen = {"fitted": {key: value.tolist() for key, value in fitted.items()}}
    seen["ddp"] = replicated(model, calibrated, images, batches, rank)
    try:
        seen["fsdp"] = sharded(model, calibrated, images, batches, rank)
    except (ImportError, NotImplementedError) as error:  # torch before 2.6, or without this on CPU
        seen["fsdp"] = {"missing": str(error)}
    return seen
