"""The page in a real browser: no request, no error, and everything a hand can reach works."""

import base64
import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from featcal import Batch, write_pack
from featcal.page import Content, render
from featcal.page.live import Live
from featcal.page.serve import Explorer
from featcal.page.tables import comparison_table

pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

KEPT = Path(__file__).parents[2] / ".cache" / "screenshots"
pytestmark = [
    pytest.mark.no_cover,
    # Selenium and the browser's pipes are closed when they please.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module")
def address(page, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(page, encoding="utf-8")
    return path.as_uri()


@pytest.fixture
def opened(browser, address):
    """The page, opened anew as wide as a desk; afterwards it must have logged nothing."""
    _look(browser, width=1200, scheme="light")
    _open(browser, address)
    yield browser
    assert browser.get_log("browser") == []


def _open(browser, address):
    browser.get_log("performance")
    browser.get_log("browser")
    browser.get(address)
    ready = "return document.documentElement.dataset.ready === 'yes'"
    WebDriverWait(browser, 20).until(lambda driver: driver.execute_script(ready))


def _look(browser, *, width, scheme):
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    # Without motion an element is where it will be when it is clicked.
    wishes = {"prefers-color-scheme": scheme, "prefers-reduced-motion": "reduce"}
    wanted = {"features": [{"name": name, "value": value} for name, value in wishes.items()]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", wanted)


def _requests(browser):
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [event for event in events if event["method"] == "Network.requestWillBeSent"]
    return [event["params"]["request"]["url"] for event in sent]


def _text(browser, name):
    return browser.find_element(By.ID, name).text


def _drawn(browser, name):
    """What a chart holds: the numbers of its first bars, and of its second."""
    return browser.execute_script(
        f"return document.getElementById('{name}').data.slice(0, 2).map(t => Array.from(t.y))"
    )


def _settled(browser):
    """Waits for the frame in which the charts follow."""
    browser.execute_async_script(
        "requestAnimationFrame(() => requestAnimationFrame(() => arguments[0]()))"
    )


def _kept(browser, name):
    KEPT.mkdir(parents=True, exist_ok=True)
    size = browser.execute_script(
        "return [document.documentElement.clientWidth, document.documentElement.scrollHeight]"
    )
    clip = {"x": 0, "y": 0, "width": size[0], "height": size[1], "scale": 1}
    asked = {"captureBeyondViewport": True, "clip": clip}
    taken = browser.execute_cdp_cmd("Page.captureScreenshot", asked)["data"]
    (KEPT / f"report-{name}.png").write_bytes(base64.b64decode(taken))


def test_it_opens_without_a_request_and_without_an_error(opened, address):
    asked = [url for url in _requests(opened) if not url.startswith("data:")]
    assert asked == [address]
    charts = opened.execute_script(
        "return [...document.querySelectorAll('.chart')].map(c => !!c.querySelector('.main-svg'))"
    )
    assert len(charts) == 10
    assert all(charts)


def test_the_slider_moves_the_diagram_and_the_numbers(opened, content):
    slider = opened.find_element(By.ID, "threshold")
    before = _drawn(opened, "chart-sweep"), _text(opened, "explorer-text")
    place = int(slider.get_attribute("value"))
    assert place == content.sweeps[0].best
    slider.send_keys(Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    _settled(opened)
    after = _drawn(opened, "chart-sweep"), _text(opened, "explorer-text")
    assert before[0] != after[0]
    assert before[1] != after[1]
    sweep = content.sweeps[0]
    bins = sweep.test.bins(place - 2)
    accuracy = [None if value != value else value for value in bins.accuracy.tolist()]
    assert after[0][0] == pytest.approx(accuracy)
    assert f"ECE {100 * float(sweep.test.ece[place - 2]):.1f} %" in after[1]
    assert f"NLL {float(sweep.test.nll[place - 2]):.4f}" in after[1]
    assert f"{float(sweep.thresholds[place - 2]):.4g}"[:4] in slider.get_attribute("aria-valuetext")


def test_the_method_can_be_switched(opened, content):
    radios = opened.find_elements(By.CSS_SELECTOR, "#methods input")
    radios[1].click()
    _settled(opened)
    text = _text(opened, "explorer-text")
    assert "T = " in text
    opened.find_element(By.CSS_SELECTOR, "[data-jump=last]").click()
    _settled(opened)
    assert _text(opened, "explorer-text").startswith("Without clipping")
    assert "off" in _text(opened, "threshold-value")
    opened.find_element(By.CSS_SELECTOR, "[data-jump=fitted]").click()
    _settled(opened)
    assert "This is what a fit chose." in _text(opened, "explorer-text")


def test_the_explorer_speaks_when_it_rests(opened):
    """A screen reader hears the slider at every key, and the whole sentence only afterwards."""
    slider, text = (opened.find_element(By.ID, name) for name in ("threshold", "explorer-text"))
    assert text.get_attribute("aria-live") is None
    said = "return document.getElementById('explorer-said').textContent"
    opened.execute_script(
        "window.heard = []; new MutationObserver(() => heard.push("
        "document.getElementById('explorer-said').textContent))"
        ".observe(document.getElementById('explorer-said'), {childList: true})"
    )
    for _ in range(6):
        slider.send_keys(Keys.ARROW_LEFT)
    assert opened.execute_script(said) == ""
    WebDriverWait(opened, 5).until(lambda driver: driver.execute_script(said))
    assert opened.execute_script("return heard") == [text.text]


def test_copying_is_said_and_the_button_keeps_its_name(opened, content):
    button = opened.find_element(By.ID, "copy")
    button.click()
    WebDriverWait(opened, 5).until(lambda driver: _text(driver, "copied") == "Copied")
    assert button.accessible_name == "Copy"
    assert opened.find_element(By.ID, "copied").get_attribute("role") == "status"
    assert opened.execute_script("return String(getSelection())") == content.summary.command


def test_the_columns_are_explained_without_a_mouse(opened):
    meanings = opened.find_element(By.CSS_SELECTOR, "#comparison .meanings")
    assert "true class" not in meanings.text
    meanings.find_element(By.TAG_NAME, "summary").send_keys(Keys.ENTER)
    assert "true class" in meanings.text
    assert "NLL" in meanings.text


def _column(browser, table, column):
    cells = browser.find_elements(By.CSS_SELECTOR, f"#{table} tbody tr > :nth-child({column})")
    return [cell.get_attribute("data-value") or cell.text for cell in cells]


def test_tables_sort_by_click_and_by_key(opened):
    head = opened.find_element(By.CSS_SELECTOR, "#table-comparison thead th:nth-child(6)")
    button = head.find_element(By.TAG_NAME, "button")
    button.click()
    rising = [float(value) for value in _column(opened, "table-comparison", 6)]
    assert rising == sorted(rising)
    assert head.get_attribute("aria-sort") == "ascending"
    button.send_keys(Keys.ENTER)
    falling = [float(value) for value in _column(opened, "table-comparison", 6)]
    assert falling == sorted(rising, reverse=True)
    assert head.get_attribute("aria-sort") == "descending"
    names = opened.find_element(By.CSS_SELECTOR, "#table-classes thead th button")
    for order in (["cat", 'dog "x"'], ['dog "x"', "cat"]):
        names.click()
        shown = _column(opened, "table-classes", 1)
        assert [name for name in shown if name in order] == order
    sorts = opened.find_elements(By.CSS_SELECTOR, "#table-comparison [aria-sort=descending]")
    assert len(sorts) == 1


def test_another_recipe_can_be_shown_after(opened, content):
    before = _drawn(opened, "chart-after")
    Select(opened.find_element(By.ID, "after")).select_by_visible_text("none")
    assert _drawn(opened, "chart-after") != before
    assert _drawn(opened, "chart-after") == _drawn(opened, "chart-before")
    assert "nothing is changed" in _text(opened, "after-name")


def test_the_theme_follows_the_system_and_the_button(opened, address):
    ground = "return getComputedStyle(document.body).backgroundColor"
    light = opened.execute_script(ground)
    ink = "return document.getElementById('chart-before').layout.font.color"
    light_ink = opened.execute_script(ink)
    opened.find_element(By.ID, "theme").click()
    assert opened.execute_script(ground) != light
    assert opened.execute_script(ink) != light_ink
    button = opened.find_element(By.ID, "theme")
    assert button.get_attribute("aria-pressed") == "true"
    assert button.accessible_name.strip() == "Dark"  # what is seen is what is said, pressed or not
    assert "Dark" in button.text
    dark = opened.execute_script(ground)
    _look(opened, width=1200, scheme="dark")
    _open(opened, address)
    assert opened.execute_script(ground) == dark
    _kept(opened, "dark")
    opened.find_element(By.ID, "theme").click()
    assert opened.execute_script(ground) == light
    _kept(opened, "light")


def test_nothing_is_wider_than_the_screen(opened):
    for width in (768, 360):
        _look(opened, width=width, scheme="light")
        _settled(opened)
        too_wide = "return document.documentElement.scrollWidth - innerWidth"
        assert opened.execute_script(too_wide) <= 0
        chart = opened.find_element(By.CSS_SELECTOR, "#chart-before .main-svg")
        assert chart.size["width"] <= width
        _kept(opened, f"{width}")


def test_it_prints_in_light_colours(opened):
    opened.find_element(By.ID, "theme").click()
    printed = opened.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"]
    KEPT.mkdir(parents=True, exist_ok=True)
    pdf = base64.b64decode(printed)
    assert pdf.startswith(b"%PDF")
    (KEPT / "report.pdf").write_bytes(pdf)
    opened.execute_script("dispatchEvent(new Event('beforeprint'))")
    assert opened.execute_script("return document.documentElement.dataset.theme") == "light"
    opened.execute_script("dispatchEvent(new Event('afterprint'))")
    assert opened.execute_script("return document.documentElement.dataset.theme") == "dark"


def test_everything_can_be_reached_by_keyboard(opened):
    """Every control takes the focus, and shows that it has it."""
    controls = opened.find_elements(By.CSS_SELECTOR, "button, select, input, a[href], summary")
    unreachable = [
        one.get_attribute("outerHTML") for one in controls if one.get_property("tabIndex") < 0
    ]
    assert unreachable == []
    unnamed = opened.execute_script(
        "return [...document.querySelectorAll('input, select, button')].filter("
        "c => !(c.labels?.length || c.getAttribute('aria-label') || c.textContent.trim()))"
        ".map(c => c.outerHTML)"
    )
    assert unnamed == []
    opened.find_element(By.TAG_NAME, "body").send_keys(Keys.TAB)
    outline = "return getComputedStyle(document.activeElement).outlineStyle"
    assert opened.execute_script(outline) == "solid"


def test_a_network_that_is_never_wrong_has_a_page_too(browser, made, tmp_path):
    """No confident wrong rows, a clip that does nothing, few rows: nulls wherever one can be."""
    known = made(140)
    labels = known.logits.argmax(1)
    parts = {"val": slice(60), "test": slice(60, 140)}
    splits = {name: Batch(None, labels[part], known.features[part]) for name, part in parts.items()}
    pack = write_pack(tmp_path / "pack", splits, head=known.head)
    path = tmp_path / "page.html"
    path.write_text(render(Content.of(pack, resamples=100)), encoding="utf-8")
    _look(browser, width=1200, scheme="light")
    _open(browser, path.as_uri())
    browser.find_element(By.ID, "threshold").send_keys(Keys.HOME)
    _settled(browser)
    assert "Entropy" not in _text(browser, "explorer-text")
    assert browser.get_log("browser") == []


@pytest.fixture
def served(content):
    server = Explorer(render(content, live=True), Live(content).answer)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def _tried(browser, recipe):
    box = browser.find_element(By.ID, "recipe")
    box.clear()
    box.send_keys(recipe, Keys.ENTER)
    WebDriverWait(browser, 20).until(
        lambda driver: (
            driver.find_element(By.ID, "recipe-go").is_enabled()
            and _text(driver, "recipe-message") not in ("", "Fitting …")
        )
    )
    return _text(browser, "recipe-message")


def test_the_box_of_explore_fits_recipes_and_refuses_nonsense(browser, served):
    _look(browser, width=1200, scheme="light")
    _open(browser, served.address)
    assert "nonsense" in _tried(browser, "nonsense")
    message = browser.find_element(By.ID, "recipe-message")
    assert "bad" in message.get_attribute("class")
    assert browser.find_element(By.ID, "recipe").get_attribute("aria-invalid") == "true"
    rows = len(_column(browser, "table-comparison", 1))
    assert _tried(browser, "clip(min_accuracy=0.9)").startswith("clip(min_accuracy=0.9), c = ")
    assert "bad" not in message.get_attribute("class")
    assert len(_column(browser, "table-comparison", 1)) == rows + 1
    assert (
        Select(browser.find_element(By.ID, "after")).first_selected_option.text
        == "clip(min_accuracy=0.9)"
    )
    hosts = {url.split("/")[2] for url in _requests(browser) if not url.startswith("data:")}
    assert hosts == {served.address.split("/")[2]}


def test_a_typed_clip_stands_everywhere_the_page_says(browser, served, content):
    _look(browser, width=1200, scheme="light")
    _open(browser, served.address)
    recipe = "clip(min_accuracy=0.99) | temperature"
    message = _tried(browser, recipe)
    assert "in the threshold explorer" in message
    assert "The summary above" in message
    for table in ("comparison", "counts", "entropy", "changed"):
        cells = browser.find_elements(By.CSS_SELECTOR, f"#table-{table} tbody th code")
        assert [cell.text for cell in cells].count(recipe) == 1
    chosen = browser.find_element(By.CSS_SELECTOR, "#methods input:checked + code")
    assert chosen.text == recipe
    assert "This is what a fit chose." in _text(browser, "explorer-text")
    assert _text(browser, "after-name") == recipe
    assert recipe in _text(browser, "fits")
    table = browser.find_element(By.CSS_SELECTOR, "#comparison .scroll")
    # A long name wraps, and hides no column.
    assert table.get_property("scrollWidth") <= table.get_property("clientWidth")
    # Typed once more it is found, not added.
    assert "already in the tables" in _tried(browser, recipe)
    assert len(browser.find_elements(By.CSS_SELECTOR, "#methods input")) == 3
    assert browser.get_log("browser") == []


def test_a_star_moves_when_another_recipe_is_better(browser, pack):
    found = Content.of(pack, ["vector"], resamples=100)
    live = Live(found)
    server = Explorer(render(found, live=True), live.answer)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        _open(browser, server.address)
        before = _stars(browser)
        for recipe in ("temperature", "clip | temperature"):
            _tried(browser, recipe)
        rows = [
            live.known[name] for name in ("none", "vector", "temperature", "clip | temperature")
        ]
        against = (None, 0, 0, 0)
        told = comparison_table(replace(found.comparison, rows=tuple(rows), against=against)).rows
        wanted = {row[0].text: sum(cell.mark == "best" for cell in row) for row in told}
        assert _stars(browser) == wanted
        assert {name: wanted[name] for name in before} != before
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _stars(browser):
    rows = browser.find_elements(By.CSS_SELECTOR, "#table-comparison tbody tr")
    return {row.find_element(By.TAG_NAME, "code").text: row.text.count("★ best") for row in rows}
