"""The engine: which devices it takes, and what it asks of the compiler."""

import shutil

import pytest
import torch
from tiny import made_splits, small, trained, weights_of

from featcal import InputError
from featcal.core import dist
from featcal.train import Engine
from featcal.train import engine as engines

# torch's compiler warns of parts of its own that it imports.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")


@pytest.mark.parametrize("device", ["meta", "toaster"])
def test_a_device_that_cannot_compute_is_refused(device):
    with pytest.raises(InputError, match=rf"device is '{device}'.*such as cpu or cuda"):
        Engine.best(device)


@pytest.mark.parametrize(("processes", "graph"), [(1, True), (2, False)])
def test_a_gpu_is_used_in_full_and_several_without_a_graph(processes, graph, monkeypatch):
    monkeypatch.setattr(engines, "_device", lambda _: torch.device("cuda", 0))
    monkeypatch.setattr(dist, "world", lambda: processes)
    found = Engine.best()
    assert (found.precision, found.compiled, found.graph) == (torch.bfloat16, True, graph)
    if not graph:
        with pytest.raises(InputError, match="needs one process on a GPU: leave it out"):
            Engine.best(graph=True)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("before", [True, False])
def test_cudnn_tries_its_ways_unless_it_must_repeat_itself(deterministic, before, monkeypatch):
    cudnn = torch.backends.cudnn
    monkeypatch.setattr(cudnn, "deterministic", deterministic)
    monkeypatch.setattr(cudnn, "benchmark", before)
    with Engine.best("cpu").at_work():
        assert cudnn.benchmark is not deterministic
    assert cudnn.benchmark is before


def test_this_torch_has_every_option_that_is_asked_for():
    assert engines.known_options() == engines.COMPILER


def test_an_option_that_this_torch_lacks_is_left_out(monkeypatch):
    monkeypatch.setitem(engines.COMPILER, "of_another_torch", True)
    known = engines.known_options()
    assert "of_another_torch" not in known
    torch.compile(torch.nn.Linear(2, 2), options=known)  # which refuses what it does not know


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_forward_pass_is_in_the_precision_asked_for(precision):
    model, seen = small(), set()
    model.conv.register_forward_hook(lambda _, __, out: seen.add((model.training, out.dtype)))
    trained(model, engine=Engine.best("cpu", precision=precision))
    assert {dtype for training, dtype in seen if training} == {getattr(torch, precision)}
    assert all(weight.dtype == torch.float32 for weight in model.parameters())


@pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++"))), reason="torch.compile needs a C++ compiler"
)
def test_a_compiled_network_trains_on_a_cpu_as_the_plain_one_does():
    found = {}
    for compiled in (False, True):
        engine = Engine.best("cpu", compiled=compiled)
        model, history = trained(small(), splits=made_splits(train=64), engine=engine)
        found[compiled] = weights_of(model), [epoch.loss for epoch in history]
    assert found[True][1] == pytest.approx(found[False][1], rel=1e-4)
    for key, value in found[False][0].items():
        torch.testing.assert_close(found[True][0][key], value, rtol=1e-3, atol=1e-4)
