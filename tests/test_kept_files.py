"""Files of earlier versions: read by this one, with the same numbers."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from kept_files import FIXTURES, found_in, going_on


def check_same(kept, found, place=""):
    """Everything that was kept is there, to the rounding of another machine; more may be."""
    if isinstance(kept, dict):
        assert kept.keys() <= found.keys(), place
        for key, value in kept.items():
            check_same(value, found[key], f"{place}.{key}")
    elif isinstance(kept, list):
        assert len(kept) == len(found), place
        for number, (one, other) in enumerate(zip(kept, found, strict=True)):
            check_same(one, other, f"{place}[{number}]")
    elif isinstance(kept, float):
        assert found == pytest.approx(kept, rel=1e-5, abs=1e-6), place
    else:
        assert found == kept, place


@pytest.mark.parametrize("version", sorted(path.name for path in FIXTURES.iterdir()))
def test_what_a_version_wrote_is_read_with_the_same_numbers(version, tmp_path):
    folder = FIXTURES / version
    check_same(json.loads((folder / "expected.json").read_text()), found_in(folder))
    shutil.copytree(folder / "stopped", tmp_path / "run")  # goes on, and ends as the finished one
    model, _ = going_on(tmp_path / "run")
    wanted = load_file(folder / "finished" / "model.safetensors")
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, wanted[key], rtol=1e-4, atol=1e-5)
