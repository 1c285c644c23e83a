import sys

import pytest
from cli_cases import arrays, done, logits_alone, packed
from train_cases import write_data, write_network


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    """A pack of features with a head; tests read it and never write into it."""
    return packed(tmp_path_factory.mktemp("pack"), arrays())


@pytest.fixture(scope="module")
def logits_pack(tmp_path_factory):
    """A pack of logits alone."""
    return packed(tmp_path_factory.mktemp("logits"), logits_alone())


@pytest.fixture(scope="module")
def cal(pack, tmp_path_factory):
    """A calibrator fitted on the pack: clip | temperature."""
    path = tmp_path_factory.mktemp("cal") / "cal.safetensors"
    done("fit", pack, "clip | temperature", "-o", path)
    return path


@pytest.fixture(scope="module")
def train_project(tmp_path_factory):
    """The current folder, with data/ to train on and a module of networks."""
    folder = tmp_path_factory.mktemp("project")
    write_data(folder)
    write_network(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", list(sys.path))
        yield folder
    sys.modules.pop("train_nets", None)
