"""featcal report: the files it writes, what it says, and what it refuses."""

import json

import pytest
from cli_cases import arrays, done, featcal, logits_alone, packed, refused

from featcal.page import html

RECIPES = ("--recipe", "none", "--recipe", "temperature")


@pytest.fixture
def out(tmp_path):
    return tmp_path / "report.html"


def data(path):
    text = path.read_text(encoding="utf-8").split('id="featcal-data">')[1]
    return json.loads(text.split("</script>")[0])


def test_the_page_and_the_summary_are_written(pack, out, tmp_path):
    ran = done("report", pack, "-o", out, "--md", tmp_path / "report.md")
    body = data(out)
    assert [row["recipe"] for row in body["recipes"]][-1] == "clip | temperature"
    assert body["summary"]["headline"] in ran.out.replace("\n", " ")
    assert f"Wrote {out}" in ran.out
    assert (tmp_path / "report.md").read_text().startswith(f"## {body['summary']['headline']}")
    assert body["about"]["command"] == f"featcal report {pack} -o {out} --md {tmp_path}/report.md"
    assert out.stat().st_size < 8e6


def test_json_is_what_compare_says(pack, out):
    found = done("report", pack, "-o", out, *RECIPES, "--bins", "10", "--json").json
    theirs = done(
        "compare", pack, "none", "temperature", "--bins", "10", "--sort", "given", "--json"
    ).json
    for mine, other in zip(found["rows"], theirs["rows"], strict=True):
        assert mine["metrics"] == other["metrics"]
        assert mine["differences"] == other["differences"]
    assert found["output"] == str(out)
    assert found["md"] is None
    assert found["bytes"] == out.stat().st_size
    assert "--bins 10" in data(out)["about"]["command"]


def test_calibrators_stand_beside_recipes(pack, cal, out):
    done("report", pack, cal, "-o", out, *RECIPES)
    rows = data(out)["recipes"]
    assert rows[-1]["recipe"] == f"clip | temperature from {cal}"
    assert rows[-1]["file"] == str(cal)


def test_logits_alone(logits_pack, out):
    done("report", logits_pack, "-o", out)
    body = data(out)
    assert [row["recipe"] for row in body["recipes"]] == ["none", "temperature"]
    assert "logits alone" in body["notes"][0]


def test_splits_can_be_chosen(pack, out):
    done("report", pack, "-o", out, *RECIPES, "--split", "val", "--fit-split", "test")
    about = data(out)["about"]
    assert (about["fitted_on"]["split"], about["scored_on"]["split"]) == ("test", "val")
    assert about["command"].endswith("--split val --fit-split test")


def test_an_existing_file_is_kept_unless_forced(pack, out):
    out.write_text("mine")
    assert "exists" in refused("report", pack, "-o", out)
    assert out.read_text() == "mine"
    done("report", pack, "-o", out, *RECIPES, "--force")
    assert out.read_text().startswith("<!doctype html>")


def test_refusals(pack, logits_pack, cal, out, tmp_path):
    assert "no method" in refused("report", pack, "-o", out, "--recipe", "nonsense")
    assert "works on features" in refused("report", logits_pack, "-o", out, "--recipe", "clip")
    assert "rows the network was trained on" in refused(
        "report", pack, "-o", out, "--recipe", "density"
    )
    assert "both 'val'" in refused("report", pack, "-o", out, "--split", "val")
    assert "no split 'dev'" in refused("report", pack, "-o", out, "--split", "dev")
    assert "each a file of its own" in refused("report", pack, "-o", out, "--md", out)
    assert "does not exist" in refused("report", pack, tmp_path / "no.safetensors", "-o", out)
    other = packed(tmp_path, arrays(k=3), "other")
    assert "fitted to 4 classes" in refused("report", other, cal, "-o", out)
    assert "not a feature pack" in refused("report", tmp_path / "nothing", "-o", out)
    assert "-o" in featcal("report", pack).err
    assert not out.exists()


def test_a_missing_package_is_said_before_the_work(pack, out, monkeypatch):
    import sys

    html._plotly.cache_clear()
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    assert "pip install 'featcal[report]'" in refused("report", pack, "-o", out)


def test_the_terminal_says_what_the_first_screen_says(tmp_path):
    """Whether to trust it, what to mind and what is missing, and only then what to type."""
    small = packed(tmp_path, logits_alone(val=60, test=80), "small")
    ran = done("report", small, "-o", tmp_path / "r.html")
    body = data(tmp_path / "r.html")
    text = " ".join(ran.out.split())
    parts = [
        body["summary"]["headline"],
        f"Should you trust its confidence? {body['summary']['trust']}",
        *(f"Mind: {caution}" for caution in body["summary"]["cautions"]),
        f"Left out: {body['notes'][0]}",
        f"What should I do? {body['summary']['points'][-1]['answer']}",
        body["summary"]["command"],
        "Wrote",
    ]
    assert len(parts) > 7
    places = [text.index(" ".join(part.split())) for part in parts]
    assert places == sorted(places)


def test_a_calibrator_that_was_fitted_on_the_scored_rows_is_not_recommended(pack, out, tmp_path):
    cheat = tmp_path / "cheat.safetensors"
    done("fit", pack, "temperature", "--split", "test", "-o", cheat)
    ran = done("report", pack, cheat, "-o", out, "--recipe", "none")
    text = " ".join(ran.out.split())
    assert "cheat.safetensors was fitted on the very rows that are scored here" in text
    assert "Yes" not in text
    assert "predict" not in text
    assert data(out)["summary"]["pick"] is None


def test_a_refusal_names_no_split_that_is_not_its_cause(pack, out):
    for given in (
        ("--recipe", "density"),
        ("--split", "val"),
        ("--split", "dev"),
    ):
        for command in (("report", pack, "-o", out), ("explore", pack)):
            assert ", split '" not in refused(*command, *given)


def test_few_rows_are_said(tmp_path):
    small = packed(tmp_path, logits_alone(val=60, test=80), "small")
    found = done("report", small, "-o", tmp_path / "r.html", "--json").json
    assert any("Only 80 rows" in caution for caution in found["summary"]["cautions"])
