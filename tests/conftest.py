"""Fixtures that every test may use."""

import gc
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from contract_cases import make_world
from model_packages import declare_boxes

from featcal import Batch, demo_pack

# Doctests are collected from every module, and three files called conftest are one module too many.
collect_ignore_glob = ["conftest.py", "*/conftest.py"]

declare_boxes()  # torchmetrics, transformers and others import torchvision wherever it is

SHARED = Path(__file__).parents[1].parent / "shared"


def pytest_configure(config):
    # pytest-cov's own marker, for runs without it: these tests repeat lines that others cover, and
    # tracing would double their time.
    config.addinivalue_line("markers", "no_cover: disable coverage for this test.")
    # What a script starts in the background ignores Ctrl-C, and so would every command started
    # here, those that tests interrupt among them.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item):
    """Under xdist pytest-cov begins twice, and its own no_cover ends only one of the two."""
    if not item.get_closest_marker("no_cover"):
        return (yield)
    tracer = sys.gettrace()
    sys.settrace(None)
    try:
        return (yield)
    finally:
        sys.settrace(tracer)


def pytest_collection_finish():
    """Torch and its like are a million objects that never go: the collector need not look again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    # A forked process must not end what it has inherited: a session of ONNX Runtime would wait for
    # its threads, which only the first process has.
    os.register_at_fork(after_in_child=gc.freeze)


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Tensors here are small: on a busy machine threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def shared_file():
    """The path of a file beside the project; the test is skipped where it is not there."""

    def find(*parts):
        path = SHARED.joinpath(*parts)
        if not path.is_file():
            pytest.skip(f"{path} is not here")
        return path

    return find


@pytest.fixture(scope="session")
def demo():
    """The shipped pack's val split in memory: batch, and its head."""
    pack = demo_pack()
    parts = list(pack.split("val"))
    batch = Batch(
        None, torch.cat([p.labels for p in parts]), torch.cat([p.features for p in parts])
    )
    return SimpleNamespace(batch=batch, head=pack.head, pack=pack)


@pytest.fixture(scope="module")
def few_choices():
    """`auto` chooses among a few recipes, where all the others are tested beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("featcal.methods.auto.OTHERS", ("temperature", "sample | svs"))
        yield


@pytest.fixture(scope="session")
def made():
    """Makes a linear classifier that is overconfident because some activations are too large."""
    return make_world
