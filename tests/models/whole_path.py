"""From a trained model to a file that is served, every step checked: the one path of all models."""

import copy
import math
import random
from collections.abc import Mapping

import numpy as np
import onnxruntime
import torch
from safetensors.torch import load_file, save_file
from torch.utils import _pytree as pytree

import featcal
import featcal.export
from featcal import collect, parse
from featcal.heads.find import outputs_in, run
from featcal.heads.head import Wrapper

RECIPE = "clip | temperature"
ROWS, BATCH, OTHER = 96, 16, 5  # rows in all, in a batch, and in a batch of another size
HEAT, KNEE = 3.0, 0.9  # how overconfident a model is made: T, and the share of features below c


# --- what must not change ----------------------------------------------------------------------

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def raw_bytes(tensor):
    """The tensor's bytes: NaN equals NaN, and 0 is not -0."""
    return tensor.detach().contiguous().flatten().view(torch.uint8).clone()


def tensors_of(model):
    """Parameters and buffers, whether or not they are in the state_dict."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


class Snapshot:
    """Everything about a model, and about the process, that calibration has to leave alone."""

    def __init__(self, model):
        self.model = model
        self.bytes = {name: raw_bytes(tensor) for name, tensor in tensors_of(model).items()}
        self.grads = {
            name: None if weight.grad is None else raw_bytes(weight.grad)
            for name, weight in model.named_parameters()
        }
        self.rest = self._rest()
        self.torch, self.python = torch.get_rng_state(), random.getstate()
        self.numpy = np.random.get_state()

    def _rest(self):
        model = self.model
        return {
            "tensors": {k: (id(t), t.dtype, t.device) for k, t in tensors_of(model).items()},
            "requires_grad": {k: t.requires_grad for k, t in tensors_of(model).items()},
            "keys": list(model.state_dict()),
            "modules": {name: id(part) for name, part in model.named_modules()},
            "training": {name: part.training for name, part in model.named_modules()},
            "hooks": {
                name: [len(getattr(part, kind)) for kind in HOOKS]
                for name, part in model.named_modules()
            },
        }

    def check(self):
        now = Snapshot(self.model)
        for what, before in self.rest.items():
            assert now.rest[what] == before, what
        for name, before in self.bytes.items():
            assert torch.equal(now.bytes[name], before), name
        for name, before in self.grads.items():
            grad = now.grads[name]
            assert (grad is None) == (before is None), name
            assert before is None or torch.equal(grad, before), name
        assert torch.equal(now.torch, self.torch)
        assert now.python == self.python
        assert all(np.array_equal(a, b) for a, b in zip(now.numpy, self.numpy, strict=True))


def unsettle(model):
    """In the middle of training: mixed flags, a frozen weight, and a gradient not yet used."""
    model.train()
    for part in list(model.modules())[1::3]:
        part.training = False
    weights = list(model.parameters())
    weights[0].requires_grad_(False)
    for weight in weights[1::2]:
        weight.grad = torch.full_like(weight, 0.25)


def pictures(size=32):
    """Noise of a colour and a contrast: pictures of noise alone are all alike to a network."""
    draw = torch.Generator().manual_seed(0)
    noise = torch.randn(ROWS, 3, size, size, generator=draw)
    colour, contrast = torch.randn(2, ROWS, 3, 1, 1, generator=draw)
    return noise * contrast.exp() + 2 * colour


def rows(inputs, index):
    """Some rows of every tensor of a model's inputs."""
    return pytree.tree_map(lambda tensor: tensor[index], inputs)


def count(inputs):
    return len(pytree.tree_leaves(inputs)[0])


def logits_of(model, inputs):
    with torch.no_grad():
        return outputs_in(run(model, inputs))[0]


def trained(model, inputs, *, head=None, spread=3.0, seed=0):
    """The model with the logits of a trained one: a random network's are flat, and one-sided."""
    first = rows(inputs, slice(0, BATCH))
    last = model.eval().get_submodule(head or featcal.find_head(model, inputs=first))
    layer = [part for part in last.modules() if getattr(part, "weight", None) is not None][-1]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        layer.weight.normal_(generator=generator)
        logits = logits_of(model, first).reshape(BATCH, -1)
        layer.weight.mul_(spread / logits.std(0).mean())
        if layer is last and layer.bias is not None:  # else more may come behind it, such as a ReLU
            layer.bias.sub_(logits_of(model, first).reshape(BATCH, -1).mean(0))
    return model


def batches_of(model, inputs, *, head=None, batch=BATCH, seed=0):
    """(inputs, labels) batches for which the model is overconfident in both ways.

    The labels follow the logits of clipped features, divided by a temperature: random labels would
    make every model a coin.
    """
    n = count(inputs)
    cut = [slice(start, start + batch) for start in range(0, n, batch)]
    plain = [(rows(inputs, part), torch.zeros(count(rows(inputs, part)))) for part in cut]
    plain = [(x, y.long()) for x, y in plain]
    data = collect(model, plain, head=head)
    features = torch.cat([part.features for part in data]).float()
    bound = features.abs().quantile(KNEE)
    with torch.no_grad():
        logits = data.head(features.clamp(-bound, bound)) / HEAT
    generator = torch.Generator().manual_seed(seed)
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    return [(x, labels[part]) for (x, _), part in zip(plain, cut, strict=True)]


def close(found, expected):
    """Equal to 1e-5."""
    assert found.shape == expected.shape
    assert float((found.double() - expected.double()).abs().max()) <= 1e-5


def whole_path(model, batches, folder, *, head=None, link=None, exports=True):
    """calibrate -> save -> load -> attach -> state_dict -> torch.export -> ONNX Runtime.

    Tests that call it are marked `no_cover`: coverage would double the time of the exports, and the
    lines they reach are reached by tests of each part.

    Args:
        model: a classifier.
        batches: (inputs, labels), or mappings with labels.
        folder: where to write files.
        head: its path, where it is not found.
        link: what the model does to its logits before it returns them.
        exports: whether to go on to torch.export and ONNX Runtime, which costs two seconds.
    """
    inputs = inputs_of(batches[0])
    unsettle(model)
    before = Snapshot(model)
    quick = {"mode": "sequential", "evidence": False}
    calibrated = featcal.calibrate(model, batches, RECIPE, head=head, **quick)
    before.check()
    calibrator = calibrator_of(calibrated)
    check_class(model, calibrated)
    model.eval()
    calibrated.eval()
    raw, expected = logits_of(model, inputs), logits_of(calibrated, inputs)
    check_acts(calibrator, raw, expected)
    data = collect(model, batches[:1], head=head)
    with torch.no_grad():
        by_hand = calibrator(data[0].features, data.head)
    close(two_logits(expected), by_hand if link is None else link(by_hand))
    again = check_file(model, calibrator, folder, head)
    assert torch.equal(logits_of(again, inputs), expected)
    check_state(model, again, inputs, expected, folder, data.path)
    if exports:
        before = Snapshot(calibrated)
        check_exports(calibrated, inputs, folder)
        before.check()
    return calibrated


def inputs_of(batch):
    if isinstance(batch, Mapping):
        return {key: value for key, value in batch.items() if key != "labels"}
    return batch[0]


def two_logits(logits):
    logits = logits.reshape(len(logits), -1)
    return logits if logits.shape[1] > 1 else torch.cat([torch.zeros_like(logits), logits], 1)


def calibrator_of(model):
    (wrapper,) = [part for part in model.modules() if isinstance(part, Wrapper)]
    return wrapper.calibrator


def check_class(model, calibrated):
    assert type(calibrated) is type(model)
    assert calibrated is not model
    ours, theirs = dict(calibrated.named_parameters()), dict(model.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(ours[name] is weight for name, weight in theirs.items())


def check_acts(calibrator, raw, expected):
    assert not any(step.noop for step in calibrator.report.steps), calibrator.report
    assert raw.shape == expected.shape
    assert float((raw - expected).abs().max()) > 1e-3
    assert expected.dtype.itemsize >= 4
    assert bool(expected.isfinite().all())


def check_file(model, calibrator, folder, head):
    """The calibrator through a file, on the original model again."""
    path = featcal.save(calibrator, folder / "calibrator.safetensors")
    return featcal.attach(model, featcal.load(path), head=head)


def check_state(model, attached, inputs, expected, folder, head):
    own, added = model.state_dict(), attached.state_dict()
    assert [key for key in added if ".calibrator." not in f".{key}"] == list(own)
    assert all(raw_bytes(added[key]).equal(raw_bytes(own[key])) for key in own)
    save_file({k: v.clone().contiguous() for k, v in added.items()}, folder / "model.safetensors")
    stored = load_file(folder / "model.safetensors")
    fresh = copy.deepcopy(model)
    with torch.no_grad():
        for tensor in tensors_of(fresh).values():
            if tensor.is_floating_point():
                tensor.fill_(math.pi)
    for name, buffer in model.named_buffers():  # those that no state_dict holds
        fresh.get_buffer(name).copy_(buffer)
    fresh = featcal.attach(fresh, parse(RECIPE), head=head)
    fresh.load_state_dict(stored, strict=True)
    assert torch.equal(logits_of(fresh, inputs), expected)
    attached.load_state_dict(own, strict=True)  # the original's: the calibrator stays
    assert torch.equal(logits_of(attached, inputs), expected)
    left = copy.deepcopy(model).load_state_dict(stored, strict=False)
    assert not left.missing_keys
    assert sorted(left.unexpected_keys) == sorted(added.keys() - own.keys())


def check_exports(calibrated, inputs, folder):
    """Both exports, on fewer rows than they were made with."""
    few = rows(inputs, slice(0, OTHER))
    expected = logits_of(calibrated, few)
    program = featcal.export.program(calibrated, inputs)
    args, kwargs = ((), few) if isinstance(few, Mapping) else (few, {})
    args = args if isinstance(args, tuple) else (args,)
    with torch.no_grad():
        close(program.module()(*args, **kwargs), expected)
    path = folder / "model.onnx"
    featcal.export.onnx(calibrated, path, inputs)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [port.name for port in session.get_inputs()]
    arrays = [tensor.numpy() for tensor in pytree.tree_leaves(few)]
    (logits,) = session.run(["logits"], dict(zip(names, arrays, strict=True)))
    close(torch.from_numpy(logits), expected)
