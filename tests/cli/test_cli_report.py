"""featcal report and explore: the files they write, and what they say."""

import json

import pytest
from cli_cases import done, logits_alone, packed, refused

from featcal.page import html
from featcal.page.serve import Explorer

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
    assert any("Only 80 rows" in caution for caution in body["summary"]["cautions"])
    assert [row["recipe"] for row in body["recipes"]] == ["none", "auto", "temperature"]
    assert "logits alone" in body["notes"][0]
    places = [text.index(" ".join(part.split())) for part in parts]
    assert places == sorted(places)


def test_the_page_is_that_of_the_report_with_the_same_options(pack, cal, tmp_path, monkeypatch):
    """Recipes, files and bins; what it was made with can be typed again."""
    served = []
    monkeypatch.setattr(Explorer, "serve_forever", lambda explorer: served.append(explorer.page))
    options = ("--recipe", "vector", "--bins", "9", "--test-split", "val", "--fit-split", "test")
    done("explore", pack, cal, *options, "--no-browser")
    done("report", pack, cal, *options, "-o", tmp_path / "r.html")
    (tmp_path / "served.html").write_bytes(served[0])
    mine, theirs = (data(tmp_path / name) for name in ("served.html", "r.html"))
    told = "--recipe vector --fit-split test --test-split val --bins 9"
    assert mine["about"].pop("command") == f"featcal explore {pack} {cal} {told}"
    theirs["about"].pop("command")
    for body in (mine, theirs):
        for row in body["recipes"]:
            row.pop("seconds")
            row.pop("fit")
    assert mine == theirs
    assert [row["recipe"] for row in mine["recipes"]][1] == "vector"
    assert mine["recipes"][2]["file"] == str(cal)
