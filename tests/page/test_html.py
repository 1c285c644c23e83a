"""The page: whole, self-contained, escaped, and with the numbers in it."""

import json
import re
import sys
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from featcal import Batch, InputError, write_pack
from featcal.page import Content, render
from featcal.page import html as markdown
from featcal.page.html import ASSETS, SHOWN, check_packages, comparison_table, embedded, page_words
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
    shown, sentences = body.pop("shown"), body.pop("sentences")
    assert shown == content.pick
    assert body == content.as_json()
    assert sentences == page_words(content)


def test_every_sentence_under_a_figure_is_among_the_numbers(page):
    visible = unescape(re.sub("<[^>]*>", "", page.split("<script")[0])).replace("\u00a0", " ")
    told = data_of(page)["sentences"]
    assert set(told) == {"entropy", "counts", "changed", "classes", "units", "values", "sweeps"}
    assert all(sentence in visible for some in told.values() for sentence in some)


def test_a_finding_begins_with_a_short_sentence_and_numbers_are_not_bold(page):
    (bold,) = re.findall('<strong class="finding">(.*?)</strong>', page)
    assert bold == (
        "Feature clipping takes more certainty from wrong answers than from right ones, as the "
        "paper claims."
    )
    assert "nats" in page.split(bold)[1].split("</p>")[0]


def test_where_all_predicted_classes_are_shown_none_is_said_to_be_left_out(tmp_path, made):
    """Five classes, of which the network predicts three."""
    known = made(900)
    with torch.no_grad():
        known.head.bias[3:] = -1e3
    fits = known.labels < 3
    features, labels = known.features[fits], known.labels[fits]
    parts = {"val": slice(200), "test": slice(200, None)}
    splits = {name: Batch(None, labels[part], features[part]) for name, part in parts.items()}
    content = Content.of(
        write_pack(tmp_path / "pack", splits, head=known.head), ["none"], resamples=100
    )
    page = render(content)
    assert "Predicted classes: 3." in page
    assert "that are off most" not in page


@pytest.mark.parametrize("signed", [False, True])
def test_where_features_are_cut_is_said(content, signed):
    page = render(replace(content, values=replace(content.values, signed=signed)))
    assert ("cuts every feature at a threshold c. Drag" in page) == (not signed)
    assert (
        "cuts every feature at \u2212c and at c, where c is a threshold. Drag" in page
    ) == signed


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


def test_a_gap_is_sorted_by_its_size(content):
    """Too modest by five points is no better than too sure by five."""
    column = SHOWN.index("overconfidence")
    scores = [replace(row.scores, metrics={**row.scores.metrics}) for row in content.comparison]
    scores[1].metrics["overconfidence"] = -0.05
    pairs = zip(content.comparison, scores, strict=True)
    rows = tuple(replace(row, scores=score) for row, score in pairs)
    cell = comparison_table(replace(content.comparison, rows=rows)).rows[1][1 + column]
    assert (cell.text, cell.value) == ("-5.00", 0.05)


def test_what_the_summary_calls_ece_and_nll_is_said_in_view(page):
    summary = page.split('<section id="summary"')[1].split("</section>")[0]
    for name in ("expected calibration error", "negative log-likelihood", "Brier score"):
        assert name in summary
    assert "recipes that score the same on all rows share it" in page


def test_the_level_of_the_figures_is_said(page):
    features = page.split("Are features too large")[1].split("</section>")[0]
    assert "above 80 % confidence" in features
    assert "its figure of the units at 95 %" in features


def _brightness(colour):
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one, other):
    low, high = sorted(map(_brightness, (one, other)))
    return (high + 0.05) / (low + 0.05)


def test_colours_can_be_told_from_their_ground():
    """WCAG: 4.5 for text, 3 for borders, lines and marks; in both themes."""
    css = (ASSETS / "page.css").read_text(encoding="utf-8")
    for block in re.findall(r":root[^{]*{([^}]*)}", css)[:3]:
        hue = dict(re.findall(r"--(\w+): (#\w{6})", block))
        for ground in (hue["ground"], hue["raised"]):
            for text in ("ink", "soft", "accent", "over", "good"):
                assert _contrast(hue[text], ground) >= 4.5, text
            for mark in ("grey", "blue", "vermillion", "purple"):
                assert _contrast(hue[mark], ground) >= 3, mark
    assert "opacity: .35" not in css


def test_half_a_character_does_not_stop_a_page(content):
    """As the bytes of a path give it that are no text."""
    about = {**content.about, "pack": {**content.about["pack"], "path": "/packs/\udcff<x>"}}
    page = render(replace(content, about=about))
    page.encode("utf-8")
    assert data_of(page)["about"]["pack"]["path"] == "/packs/\udcff<x>"
    assert "/packs/\\udcff&lt;x&gt;" in page


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
