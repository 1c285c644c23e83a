"""Where and how fast a run goes; what comes out of it is the recipe's affair."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as torch_dist
from torch import nn

from featcal.core import dist
from featcal.core.checks import InputError
from featcal.train.step import Network

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Of the compiler on a GPU, measured on ResNet-50: small kernels that do not wait for each other in
# one launch, and several tile sizes tried. Random numbers are drawn outside of those kernels, which
# cannot hold them (pytorch issue 168124).
COMPILER: dict[str, str | int | bool | Callable[..., Any]] = {
    "combo_kernels": True,
    "max_autotune_pointwise": True,
    "fallback_random": True,
}


@final
@dataclass(frozen=True, kw_only=True)
class Engine:
    """The device and its tricks.

    Attributes:
        device: where the network and all images are.
        precision: of the forward pass; weights and losses are float32 in any case.
        compiled: whether `torch.compile` fuses the network's kernels.
        graph: whether a step is replayed as one CUDA graph.
    """

    device: torch.device
    precision: torch.dtype
    compiled: bool
    graph: bool

    @classmethod
    def best(
        cls,
        device: str | torch.device | None = None,
        *,
        precision: str | None = None,
        compiled: bool | None = None,
        graph: bool | None = None,
    ) -> Engine:
        """The fastest there is; whatever is given is taken.

        A GPU runs in bfloat16, compiled, as a graph; several of them without the graph.
        """
        place = _device(device)
        gpu = place.type == "cuda"
        if graph and (not gpu or dist.world() > 1):
            raise InputError("graph is True, and needs one process on a GPU: leave it out")
        name = ("bfloat16" if gpu else "float32") if precision is None else precision
        if name not in PRECISIONS:
            known = " or ".join(PRECISIONS)
            raise InputError(f"precision is {precision!r}: choose {known}")
        return cls(
            device=place,
            precision=PRECISIONS[name],
            compiled=gpu if compiled is None else compiled,
            graph=(gpu and dist.world() == 1) if graph is None else graph,
        )

    def network(self, model: nn.Module) -> Network:
        """The model in its fastest form."""
        if not self.compiled:
            return model
        # No two networks share what was compiled: the cache of programs is small and would be full
        # after a few of them, and everything after that would run as it is. What the caller had
        # compiled is compiled again when it is called next.
        torch.compiler.reset()
        options = known_options() if self.device.type == "cuda" else None
        return torch.compile(model, dynamic=False, options=options)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """This device is the current one, and cuDNN tries its ways on the first batch."""
        before, cudnn = torch.backends.cudnn.benchmark, torch.backends.cudnn
        cudnn.benchmark = not cudnn.deterministic
        try:
            # Streams, graphs and random states are those of the current device, whichever it is.
            with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
                yield
        finally:
            cudnn.benchmark = before

    def as_json(self) -> dict[str, Any]:
        """The public form."""
        return {
            "device": hardware_name(self.device),
            "precision": str(self.precision).removeprefix("torch."),
            "compiled": self.compiled,
            "graph": self.graph,
            "processes": dist.world(),
        }


def known_options() -> dict[str, str | int | bool | Callable[..., Any]]:
    """Those of the compiler's options that this torch has; it would refuse another."""
    from torch._inductor import list_options  # slow to import, and rarely needed

    known = set(list_options())
    return {key: value for key, value in COMPILER.items() if key in known}


def hardware_name(device: torch.device) -> str:
    """What the device calls itself."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise InputError(f"device is {device!r}: give one such as cpu or cuda") from error
    _check_device(found)
    if found == torch.device("cuda"):  # which of them torchrun says
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    return found


def _check_device(device: torch.device) -> None:
    """Refuses a device that holds no numbers here."""
    if device.type == "cuda":
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not found:
            raise InputError(f"device is '{device}', and torch finds no GPU here: give cpu")
        if (device.index or 0) >= found:
            raise InputError(
                f"device is '{device}', and torch finds {found} here: give cuda:0 or one up to "
                f"cuda:{found - 1}"
            )
        return
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        raise InputError(
            f"device is '{device}', which cannot be computed on here: give one such as cpu or cuda"
        ) from error


def _launched() -> bool:
    """Whether torchrun started this process and others."""
    return int(os.environ.get("WORLD_SIZE", 1)) > 1


def launched_rank() -> int:
    """Which of torchrun's processes this is, known before they have joined; 0 without them."""
    return int(os.environ.get("RANK", 0)) if _launched() else 0


@contextmanager
def processes(device: str | None = None) -> Iterator[None]:
    """Joins the other processes that torchrun started, if it did."""
    if not _launched() or dist.active():
        yield
        return
    gpu = device != "cpu" and torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    torch_dist.init_process_group("nccl" if gpu else "gloo")
    try:
        yield
    finally:
        torch_dist.destroy_process_group()
