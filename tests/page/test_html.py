"""The page: whole, self-contained, escaped, with the numbers in it; and the Markdown report."""

import base64
import gzip
import json
import re
import sys
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from plotly.offline import get_plotlyjs

from featcal import Batch, InputError, write_pack
from featcal.page import Content, html, markdown, render, wording
from featcal.page.html import (
    SHOWN,
    check_packages,
    comparison_table,
    embedded,
    page_tables,
    page_words,
)
from featcal.page.verdict import contest

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


def test_it_is_well_formed_and_whole(read):
    assert len(read.ids) == len(set(read.ids))
    labelled = [known["aria-labelledby"] for _, known in read.tags if "aria-labelledby" in known]
    labels = [known["for"] for tag, known in read.tags if tag == "label" and "for" in known]
    assert set(labelled + labels) <= set(read.ids)
    sections = "summary comparison reliability explorer confident changed classes about"
    assert set(sections.split()) <= set(read.ids)
    heads = [known for tag, known in read.tags if tag == "th"]
    assert all(known.get("scope") in ("col", "row") for known in heads)
    assert all(known["aria-sort"] == "none" for known in heads if known["scope"] == "col")
    charts = [known for tag, known in read.tags if "chart" in known.get("class", "").split()]
    assert len(charts) == 12
    assert all(known["role"] == "img" and known["aria-label"] for known in charts)


def test_it_loads_nothing(read, page):
    assert all(load.startswith("#") or load == "data:," for load in read.loads), read.loads
    assert "connect-src 'none'" in page
    assert "@import" not in page.split("</style>")[0]
    assert "url(" not in page.split("</style>")[0]


def test_every_number_and_every_sentence_is_in_it(page, content):
    body = data_of(page)
    shown, sentences = body.pop("shown"), body.pop("sentences")
    assert shown == content.pick
    assert body == content.as_json()
    assert sentences == page_words(content)
    visible = unescape(re.sub("<[^>]*>", "", page.split("<script")[0])).replace("\u00a0", " ")
    sections = {"entropy", "counts", "changed", "classes", "units", "values", "sweeps"}
    assert set(sentences) == sections
    assert all(sentence in visible for some in sentences.values() for sentence in some)
    summary = content.summary
    told = (summary.headline, summary.trust, *(point.answer for point in summary.points))
    assert all(sentence in visible for sentence in told)
    (bold,) = re.findall('<strong class="finding">(.*?)</strong>', page)
    assert bold.endswith("as the paper claims.")
    for name in ("expected calibration error", "negative log-likelihood", "Brier score"):
        assert name in visible.split("All recipes side by side")[0]


def test_a_page_is_small_and_holds_plotly_whole(page):
    assert len(page.encode()) < 4e6
    (packed,) = re.findall(r'id="plotly">([^<]*)<', page)
    assert gzip.decompress(base64.b64decode(packed)).decode() == get_plotlyjs()


def test_samples_with_several_labels_are_told_as_such(tmp_path):
    draw = torch.Generator().manual_seed(0)
    logits = 1.5 * torch.randn(900, 3, generator=draw)
    truth = (torch.rand(900, 3, generator=draw) < logits.sigmoid()).long()
    parts = {"val": slice(400), "test": slice(400, 900)}
    rows = {name: Batch(2 * logits[part], truth[part]) for name, part in parts.items()}
    pack = write_pack(tmp_path / "pack", rows, class_names=["cat", "dog", "é"])
    content = Content.of(pack, ["temperature", "vector"], resamples=100)
    text = unescape(re.sub("<[^>]*>", "", render(content).split("<script")[0]))
    for part in (
        "500 samples have 1,500 rows, and a confidence is that of the likelier answer.",
        "Fitted on 400 samples of val, scored on 500 other samples (test).",
        "right of 1,500 rows of test",
        "100 resamples of the scored samples",
        "Any label",
    ):
        assert part in text, part
    table = page_tables(content).get("examples")
    assert table is not None
    sample, label = table.rows[0][0].text.split(", ")
    assert 0 <= int(sample) < 500
    assert label in ("cat", "dog", "é")


def test_names_are_text_whatever_they_are(page, read, evil):
    assert evil not in page
    assert "&lt;/script&gt;&lt;b&gt;bold" in page
    assert evil in data_of(page)["classes"]["before"]["groups"][1]["name"]
    assert ("b", {}) not in read.tags
    assert "made &lt;data&gt;" in page
    text = str(embedded({"x": "</script><!--&\u2028"}))
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {"x": "</script><!--&\u2028"}


def test_names_are_neither_html_nor_orders_to_a_terminal_in_markdown(content, evil):
    settings = {**content.comparison.settings, "pack": f"{evil}\x1b[31m<img src=x>"}
    text = markdown(replace(content, comparison=replace(content.comparison, settings=settings)))
    assert not re.search(r"[<\x1b]", text)
    assert "\\x1b[31m&lt;img src=x>: fitted" in text


def test_half_a_character_does_not_stop_a_page(content):
    """As the bytes of a path give it that are no text."""
    about = {**content.about, "pack": {**content.about["pack"], "path": "/packs/\udcff<x>"}}
    page = render(replace(content, about=about))
    page.encode("utf-8")
    assert data_of(page)["about"]["pack"]["path"] == "/packs/\udcff<x>"
    assert "/packs/\\udcff&lt;x&gt;" in page


def test_best_is_marked_only_where_the_intervals_say_so(content, page):
    table = page.split('id="table-comparison"')[1].split("</table>")[0]
    rows = comparison_table(content.comparison).rows
    assert table.count("★ best") == sum(cell.mark == "best" for row in rows for cell in row)
    two = replace(content.comparison, rows=content.comparison.rows[:2], against=(None, 0))
    assert any(cell.mark == "best" for row in comparison_table(two).rows for cell in row)
    for column, name in enumerate(SHOWN, start=1):
        alike, tied = contest(content.comparison, name, range(len(rows)))
        best = set(alike) if alike == tied else set()
        assert {place for place, row in enumerate(rows) if row[column].mark == "best"} == best
    twin = replace(content.comparison, rows=(content.comparison[0],) * len(rows))
    assert not any(cell.mark == "best" for row in comparison_table(twin).rows for cell in row)


def _brightness(colour):
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_colours_can_be_told_from_their_ground():
    """WCAG: 4.5 for text, 3 for borders, lines and marks; in both themes."""
    css = (wording.ASSETS / "page.css").read_text(encoding="utf-8")
    needed = dict.fromkeys(("ink", "soft", "accent", "over", "good"), 4.5)
    needed |= dict.fromkeys(("grey", "blue", "vermillion", "purple"), 3)
    for block in re.findall(r":root[^{]*{([^}]*)}", css)[:3]:
        hue = dict(re.findall(r"--(\w+): (#\w{6})", block))
        for ground in (hue["ground"], hue["raised"]):
            for name, contrast in needed.items():
                low, high = sorted(map(_brightness, (hue[name], ground)))
                assert (high + 0.05) / (low + 0.05) >= contrast, name


def test_live_adds_a_box_and_may_speak_to_its_own_server(content):
    page = render(content, live=True)
    assert "connect-src 'self'" in page
    assert {"recipe-form", "recipe", "recipe-go", "recipe-message"} <= set(Reader(page).ids)


def test_a_page_without_features_and_one_of_the_network_alone(bare, pack):
    page = render(bare)
    assert not {"explorer", "chart-units"} & set(Reader(page).ids)
    assert "logits alone" in page
    assert "> This pack holds logits alone" in markdown(bare)
    alone = Content.of(pack, ["none"], resamples=100)
    assert "No recipe was fitted." in render(alone)
    assert "### Mean softmax entropy" not in markdown(alone)


@pytest.mark.parametrize("package", ["jinja2", "plotly"])
def test_a_missing_package_is_named(package, monkeypatch, content):
    for cached in (html._plotly, wording.environment):
        cached.cache_clear()
    monkeypatch.setitem(sys.modules, "plotly.offline" if package == "plotly" else package, None)
    for call in (check_packages, lambda: render(content)):
        with pytest.raises(InputError, match=rf"needs {package}.*pip install 'featcal\[report\]'"):
            call()


def test_markdown_for_a_pull_request(content):
    text = markdown(content)
    assert text.startswith(f"## {content.summary.headline}\n")
    assert f"\n\n```\n{content.summary.command}\n```\n\n" in text
    assert "ECE, expected calibration error: how far" in text
    assert "| `clip \\| temperature` |" in text
    assert "- What was learned: `temperature` T = " in text
    compared, entropies = text.split("### Mean softmax entropy")
    cells = [cell for row in comparison_table(content.comparison).rows for cell in row]
    best = [cell.text for cell in cells if cell.mark == "best"]
    table = compared.split("| recipe | accuracy % | gap % |")[1].split("\n\n")[0]
    assert re.findall(r"\*\*(.*?)\*\*", table) == best
    assert table.count(" better |") == sum(cell.finding == "better" for cell in cells)
    assert ("‡" in table) == ("- ‡ " in text)
    assert all(cell.finding for cell in cells if cell.mark in ("better", "worse"))
    rows = re.findall(r"^\|.*\|$", entropies, flags=re.MULTILINE)
    assert len(rows) == 2 + 3
    assert len({row.replace("\\|", "").count("|") for row in rows}) == 1
    assert "**Feature clipping takes more certainty" in entropies
    assert "<" not in text
    assert "\n\n\n" not in text


def test_the_example_of_the_documents_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[2] / "docs" / "report.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    known = {}
    exec(block, known)
    Reader((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert known["numbers"]["summary"]["kind"] == "over"


def test_the_automatic_choice_has_a_table_and_is_recommended(bare):
    chosen = bare.comparison[1].reports[0].choice
    page, text = render(bare), markdown(bare)
    (table,) = (one for name, one in page_tables(bare).items() if name == "choice")
    assert [row[0].text for row in table.rows] == [
        one["recipe"] for one in chosen.details["choice"]
    ]
    assert [row[0].small.endswith("chosen") for row in table.rows].count(True) == 1
    assert 'id="table-choice"' in page
    assert "### The candidates" in text
    assert bare.summary.pick == 1
    assert bare.summary.command == f"featcal fit {bare.scene.pack.path} auto -o cal.safetensors"
