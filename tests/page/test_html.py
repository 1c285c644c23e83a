"""The page: whole, self-contained, escaped, and with the numbers in it."""

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from featcal import InputError
from featcal.page import Content, markdown, render
from featcal.page.contest import contest
from featcal.page.html import check_packages, embedded
from featcal.page.tables import SHOWN, comparison_table

VOID = {"meta", "link", "input", "br", "hr", "img"}


class Reader(HTMLParser):
    """Reads a page strictly: every element that is opened is closed, in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.loads, self.ids = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        known = dict(attrs)
        self.tags.append((tag, known))
        self.loads += [known[key] for key in ("src", "href", "action", "data") if key in known]
        self.ids += [known["id"]] if "id" in known else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def read(page):
    return Reader(page)


def data_of(page):
    text = page.split('<script type="application/json" id="featcal-data">')[1]
    return json.loads(text.split("</script>")[0])


def test_it_is_well_formed_and_its_ids_are_its_own(read):
    assert len(read.ids) == len(set(read.ids))
    labelled = [known["aria-labelledby"] for _, known in read.tags if "aria-labelledby" in known]
    labels = [known["for"] for tag, known in read.tags if tag == "label" and "for" in known]
    assert set(labelled + labels) <= set(read.ids)


def test_it_loads_nothing(read, page):
    assert all(load.startswith("#") or load == "data:," for load in read.loads), read.loads
    assert "connect-src 'none'" in page
    assert "@import" not in page.split("</style>")[0]
    assert "url(" not in page.split("</style>")[0]


def test_the_numbers_are_in_it(page, content):
    body = data_of(page)
    shown = body.pop("shown")
    assert shown == content.pick
    assert body == content.as_json()


def test_a_class_that_is_called_like_html_is_text(page, read, evil):
    assert evil not in page
    assert "&lt;/script&gt;&lt;b&gt;bold" in page
    assert evil in data_of(page)["classes"]["before"]["groups"][1]["name"]
    assert ("b", {}) not in read.tags
    assert "made &lt;data&gt;" in page


def test_json_inside_a_script_never_ends_it():
    text = str(embedded({"x": "</script><!--&\u2028"}))
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {"x": "</script><!--&\u2028"}


def test_the_words_and_sections_are_there(page, content, read):
    assert content.summary.headline.replace(" %", "\u00a0%") in page
    for section in (
        "summary",
        "comparison",
        "reliability",
        "explorer",
        "confident",
        "changed",
        "classes",
        "about",
    ):
        assert section in read.ids
    heads = [known for tag, known in read.tags if tag == "th"]
    assert all(known.get("scope") in ("col", "row") for known in heads)
    assert all(known["aria-sort"] == "none" for known in heads if known["scope"] == "col")
    charts = [known for tag, known in read.tags if "chart" in known.get("class", "").split()]
    assert charts
    assert all(known["role"] == "img" and known["aria-label"] for known in charts)


def test_best_is_marked_only_where_the_intervals_say_so(content, page):
    table = page.split('id="table-comparison"')[1].split("</table>")[0]
    rows = comparison_table(content.comparison).rows
    assert table.count("★ best") == sum(cell.mark == "best" for row in rows for cell in row)
    for column, name in enumerate(SHOWN, start=1):
        found = contest(content.comparison, name)
        best = set(found.alike) if found is not None and found.clear else set()
        assert {place for place, row in enumerate(rows) if row[column].mark == "best"} == best


def test_live_adds_a_box_and_may_speak_to_its_own_server(content):
    page = render(content, live=True)
    assert "connect-src 'self'" in page
    assert {"recipe-form", "recipe", "recipe-go", "recipe-message"} <= set(Reader(page).ids)


def test_a_page_without_features_has_no_explorer(logits_pack):
    found = Content.of(logits_pack, resamples=100)
    read = Reader(render(found))
    assert "explorer" not in read.ids
    assert "chart-units" not in read.ids
    assert "logits alone" in render(found)


def test_a_page_of_the_network_alone(pack):
    found = Content.of(pack, ["none"], resamples=100)
    Reader(render(found))
    assert "### Mean softmax entropy" not in markdown(found)


@pytest.mark.parametrize("package", ["jinja2", "plotly"])
def test_a_missing_package_is_named(package, monkeypatch, content):
    from featcal.page import html

    html._plotly.cache_clear()
    monkeypatch.setitem(sys.modules, "plotly.offline" if package == "plotly" else package, None)
    for call in (check_packages, lambda: render(content)):
        with pytest.raises(InputError, match=rf"needs {package}.*pip install 'featcal\[report\]'"):
            call()


def test_markdown_for_a_pull_request(content):
    text = markdown(content)
    assert text.startswith(f"## {content.summary.headline}\n")
    assert f"```\n{content.summary.command}\n```" in text
    assert "| `clip \\| temperature` |" in text
    table = text.split("### Mean softmax entropy")[1]
    rows = re.findall(r"^\|.*\|$", table, flags=re.MULTILINE)
    assert len(rows) == 2 + 3
    assert len({row.replace("\\|", "").count("|") for row in rows}) == 1
    assert "The difference is" in table
    assert "<" not in text


def test_the_example_of_the_documents_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[2] / "docs" / "report.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    known = {}
    exec(block, known)
    Reader((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert known["numbers"]["summary"]["kind"] == "over"
