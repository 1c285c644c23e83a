"""The pack inside featcal is whole, small, and the network it says it is."""

import subprocess
import sys
from pathlib import Path

import pytest

from featcal.data.pack import demo_pack

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pack():
    return demo_pack()


def test_sizes(pack):
    assert (pack.manifest.classes, pack.manifest.features) == (100, 256)
    assert {name: pack.split(name).rows for name in pack.splits} == {"val": 5000, "test": 10000}
    assert sum(file.stat().st_size for file in pack.path.iterdir()) <= 9_000_000
    assert pack.manifest.dtypes == {"features": "float16", "labels": "uint8"}


def test_accuracy(pack):
    head = pack.head
    right = sum(
        int((head(batch.features).argmax(1) == batch.labels).sum()) for batch in pack.split("test")
    )
    assert right == 7504


def test_every_byte(pack):
    pack.verify()


def test_class_names_and_origin(pack):
    names = pack.manifest.class_names
    assert len(set(names)) == 100
    assert list(names) == sorted(names)
    assert (names[0], names[-1]) == ("apple", "worm")
    assert pack.manifest.dataset == "cifar100"
    meta = pack.manifest.meta
    assert (meta["architecture"], meta["epochs"]) == ("Wide-ResNet-16-4", 90)
    assert meta["origin"] == "trained for this project"


@pytest.mark.shared
def test_the_script_makes_the_same_pack_again(pack, tmp_path):
    if not (ROOT.parent / "shared" / "packs").is_dir():
        pytest.skip("the packs in ../shared are not beside the project")
    script = ROOT / "experiments" / "make_demo_pack.py"
    command = [sys.executable, str(script), str(tmp_path / "demo")]
    subprocess.run(command, check=True, capture_output=True)
    for file in pack.path.iterdir():
        assert (tmp_path / "demo" / file.name).read_bytes() == file.read_bytes()
