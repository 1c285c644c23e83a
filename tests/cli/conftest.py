import pytest
from cli_cases import arrays, done, logits_alone, packed


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
