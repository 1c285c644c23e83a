"""Reductions: the identity without processes, sums and gathers with them."""

import json
import os
import subprocess
import sys

import pytest
import torch

from featcal.core import dist

WORKER = """
import json, os, sys
import torch
torch.set_num_threads(1)
import torch.distributed as torch_dist
from featcal.core import dist

rank, folder = int(sys.argv[1]), sys.argv[2]
torch_dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
mine = torch.arange(float(3 * rank)).view(-1, 1)  # rank 0 holds nothing
values = torch.tensor([1.0 + rank, 5.0 - rank], dtype=torch.float64)
result = {
    "active": dist.active(),
    "world": dist.world(),
    "total": dist.total(values).tolist(),
    "largest": dist.largest(values).tolist(),
    "gather": dist.gather(mine).tolist(),
    "untouched": values.tolist(),
}
with open(f"{folder}/{rank}.json", "w") as file:
    json.dump(result, file)
torch_dist.destroy_process_group()
"""


def test_one_process_keeps_its_own_values():
    values = torch.tensor([1.0, 2.0])
    assert not dist.active()
    assert dist.world() == 1
    assert dist.total(values) is values
    assert dist.largest(values) is values
    assert dist.gather(values) is values


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    (folder / "worker.py").write_text(WORKER)
    command = [sys.executable, folder / "worker.py"]
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    processes = [subprocess.Popen([*command, str(rank), folder], env=env) for rank in range(2)]
    assert [process.wait(timeout=60) for process in processes] == [0, 0]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_two_processes_agree(ranks):
    for rank, found in enumerate(ranks):
        assert found["active"]
        assert found["world"] == 2
        assert found["total"] == [3.0, 9.0]
        assert found["largest"] == [2.0, 5.0]
        assert found["gather"] == [[0.0], [1.0], [2.0]]
        assert found["untouched"] == [1.0 + rank, 5.0 - rank]
