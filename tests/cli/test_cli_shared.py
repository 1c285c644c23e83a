"""The commands on the packs and anchors beside the project."""

import pytest
from cli_cases import done
from pytest import approx  # noqa: PT013 - short enough for tables of figures

PACKS = [
    "cifar100-wrn16x4",
    "cifar10-wrn16x4",
    "cifar10-resnet50",
    "cifar10-vit",
    "imagenet5k-efficientnet_lite0",
]
DIGITS = 5e-6 + 5e-6  # half a unit of the last digit in METHODS 0.2, and as much of our own


@pytest.fixture(scope="module")
def imported(shared_file, tmp_path_factory):
    """Imports a file once."""
    made = {}

    def get(folder, name):
        if name not in made:
            out = tmp_path_factory.mktemp("shared") / name
            done("pack", "import", shared_file(folder, f"{name}.npz"), "-o", out)
            made[name] = out
        return made[name]

    return get


@pytest.mark.shared
@pytest.mark.parametrize("name", PACKS)
def test_compare_on_every_pack(imported, name):
    rows = done("compare", imported("packs", name), "--json").json["rows"]
    by_name = {row["recipe"]: row for row in rows}
    assert list(by_name) == ["none", "temperature", "clip", "clip | temperature"]
    for row in rows[1:]:
        fit = row["fit"]
        assert sum(step["head_passes"] for step in fit["steps"][:1]) <= 10
        assert fit["loss_after"] <= fit["loss_before"]
    clip = by_name["clip"]["fit"]["steps"][0]
    if clip["noop"]:
        assert clip["threshold"] is None
        assert by_name["clip"]["metrics"] == by_name["none"]["metrics"]
        assert "no-op" in clip["message"]
    else:
        assert clip["loss_after"] < clip["loss_before"] - 1e-3
        assert by_name["clip"]["metrics"]["ece"] < by_name["none"]["metrics"]["ece"]
    assert by_name["temperature"]["metrics"]["accuracy"] == by_name["none"]["metrics"]["accuracy"]


@pytest.mark.shared
def test_an_underconfident_network_hears_why(imported):
    pack = imported("packs", "imagenet5k-efficientnet_lite0")
    clip = done("compare", pack, "clip", "--json").json["rows"][0]["fit"]["steps"][0]
    assert clip["noop"]
    assert "underconfident" in clip["message"]
    assert "on the whole clipping lowers confidence" in clip["message"]
    assert "underconfident" in done("compare", pack, "clip").out


def scores(*args):
    return done("eval", *args, "--json").json["metrics"]


@pytest.mark.shared
def test_anchors_of_the_paper_network(imported, tmp_path):
    pack, cal = imported("anchors", "resnet50-cifar10-ce"), tmp_path / "cal.safetensors"
    step = done("fit", pack, "temperature", "-o", cal, "--json").json["steps"][0]
    assert step["temperature"] == approx(2.497520, abs=1e-5)
    # RMS and debiased errors depend on ties: tests/metrics/test_anchors.py says how.
    vanilla = {
        "ece": 0.04354,
        "classwise_ece": 0.009080,
        "mce": 0.39426,
        "smooth_ece": 0.04338,
        "brier": 0.092177,
        "accuracy": 0.9505,
    }
    found = scores(pack)
    assert {key: found[key] for key in vanilla} == approx(vanilla, abs=DIGITS)
    assert found["nll"] == approx(0.4121, abs=6e-5)
    found = scores(pack, cal)
    scaled = {"ece": 0.01373, "classwise_ece": 0.004540, "accuracy": 0.9505}
    assert {key: found[key] for key in scaled} == approx(scaled, abs=DIGITS)
    assert found["nll"] == approx(0.2038, abs=6e-5)
    found = scores(pack, "--split", "val")
    assert found["ece"] == approx(0.04010, abs=DIGITS)
    assert found["accuracy"] == approx(0.9536, abs=1e-9)
    assert found["nll"] == approx(0.3506, abs=6e-5)


@pytest.mark.shared
def test_anchors_of_the_focal_network(imported, tmp_path):
    pack, cal = imported("anchors", "resnet50-cifar10-flsd53"), tmp_path / "cal.safetensors"
    step = done("fit", pack, "temperature", "-o", cal, "--json").json["steps"][0]
    assert step["temperature"] == approx(1.062623, abs=1e-5)
    found = scores(pack)
    assert found["ece"] == approx(0.01551, abs=DIGITS)
    assert found["accuracy"] == approx(0.9502, abs=1e-9)
    assert scores(pack, cal)["ece"] == approx(0.00971, abs=DIGITS)
