"""The page in a real browser: no request, no error, and everything a hand can reach works."""

import base64

import pytest

from featcal import Batch, write_pack
from featcal.page import Content, render

pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
from browsing import (
    KEPT,
    MARKS,
    bars_of,
    column_of,
    keep,
    look,
    open_page,
    requests,
    settled,
    text_of,
)
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

pytestmark = MARKS


@pytest.fixture(scope="module")
def address(page, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(page, encoding="utf-8")
    return path.as_uri()


@pytest.fixture
def opened(browser, address):
    """The page, opened anew as wide as a desk; afterwards it must have logged nothing."""
    look(browser, width=1200, scheme="light")
    open_page(browser, address)
    yield browser
    assert browser.get_log("browser") == []


def test_it_opens_without_a_request_and_without_an_error(opened, address):
    asked = [url for url in requests(opened) if not url.startswith("data:")]
    assert asked == [address]
    charts = opened.execute_script(
        "return [...document.querySelectorAll('.chart')].map(c => !!c.querySelector('.main-svg'))"
    )
    assert len(charts) == 10
    assert all(charts)


def test_the_slider_moves_the_diagram_and_the_numbers(opened, content):
    slider = opened.find_element(By.ID, "threshold")
    before = bars_of(opened, "chart-sweep"), text_of(opened, "explorer-text")
    place = int(slider.get_attribute("value"))
    assert place == content.sweeps[0].best
    slider.send_keys(Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    settled(opened)
    after = bars_of(opened, "chart-sweep"), text_of(opened, "explorer-text")
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
    settled(opened)
    text = text_of(opened, "explorer-text")
    assert "T = " in text
    opened.find_element(By.CSS_SELECTOR, "[data-jump=last]").click()
    settled(opened)
    assert text_of(opened, "explorer-text").startswith("Without clipping")
    assert "off" in text_of(opened, "threshold-value")
    opened.find_element(By.CSS_SELECTOR, "[data-jump=fitted]").click()
    settled(opened)
    assert "This is what a fit chose." in text_of(opened, "explorer-text")


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
    WebDriverWait(opened, 5).until(lambda driver: text_of(driver, "copied") == "Copied")
    assert button.accessible_name == "Copy"
    assert opened.find_element(By.ID, "copied").get_attribute("role") == "status"
    assert opened.execute_script("return String(getSelection())") == content.summary.command


def test_the_columns_are_explained_without_a_mouse(opened):
    meanings = opened.find_element(By.CSS_SELECTOR, "#comparison .meanings")
    assert "true class" not in meanings.text
    meanings.find_element(By.TAG_NAME, "summary").send_keys(Keys.ENTER)
    assert "true class" in meanings.text
    assert "NLL" in meanings.text


def test_tables_sort_by_click_and_by_key(opened):
    head = opened.find_element(By.CSS_SELECTOR, "#table-comparison thead th:nth-child(6)")
    button = head.find_element(By.TAG_NAME, "button")
    button.click()
    rising = [float(value) for value in column_of(opened, "table-comparison", 6)]
    assert rising == sorted(rising)
    assert head.get_attribute("aria-sort") == "ascending"
    button.send_keys(Keys.ENTER)
    falling = [float(value) for value in column_of(opened, "table-comparison", 6)]
    assert falling == sorted(rising, reverse=True)
    assert head.get_attribute("aria-sort") == "descending"
    names = opened.find_element(By.CSS_SELECTOR, "#table-classes thead th button")
    for order in (["cat", 'dog "x"'], ['dog "x"', "cat"]):
        names.click()
        shown = column_of(opened, "table-classes", 1)
        assert [name for name in shown if name in order] == order
    sorts = opened.find_elements(By.CSS_SELECTOR, "#table-comparison [aria-sort=descending]")
    assert len(sorts) == 1


def test_another_recipe_can_be_shown_after(opened, content):
    before = bars_of(opened, "chart-after")
    Select(opened.find_element(By.ID, "after")).select_by_visible_text("none")
    assert bars_of(opened, "chart-after") != before
    assert bars_of(opened, "chart-after") == bars_of(opened, "chart-before")
    assert "nothing is changed" in text_of(opened, "after-name")


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
    look(opened, width=1200, scheme="dark")
    open_page(opened, address)
    assert opened.execute_script(ground) == dark
    keep(opened, "dark")
    opened.find_element(By.ID, "theme").click()
    assert opened.execute_script(ground) == light
    keep(opened, "light")


def test_nothing_is_wider_than_the_screen(opened):
    for width in (768, 360):
        look(opened, width=width, scheme="light")
        settled(opened)
        too_wide = "return document.documentElement.scrollWidth - innerWidth"
        assert opened.execute_script(too_wide) <= 0
        chart = opened.find_element(By.CSS_SELECTOR, "#chart-before .main-svg")
        assert chart.size["width"] <= width
        keep(opened, f"{width}")


def test_a_table_that_is_cut_off_says_that_it_scrolls(opened):
    hint = (
        "return getComputedStyle(document.querySelector('#comparison .scroll'), '::before').content"
    )
    assert opened.execute_script(hint) == "none"
    look(opened, width=360, scheme="light")
    WebDriverWait(opened, 5).until(lambda driver: "scroll sideways" in driver.execute_script(hint))
    box = opened.find_element(By.CSS_SELECTOR, "#comparison .scroll")
    assert box.get_property("scrollWidth") > box.get_property("clientWidth")


def test_what_was_learned_is_a_list(opened, content):
    fitted = [entry for entry in content.entries if entry.fitted]
    items = opened.find_elements(By.CSS_SELECTOR, "#fits li")
    assert [item.text for item in items] == [f"{one.recipe}: {one.fitted}" for one in fitted]


def test_paper_has_no_controls(opened):
    """A slider that cannot be moved is not printed; what it was set to is."""
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    for name in ("threshold", "after", "theme"):
        assert not opened.find_element(By.ID, name).is_displayed()
    assert opened.find_element(By.ID, "threshold-value").is_displayed()
    methods = opened.find_elements(By.CSS_SELECTOR, "#methods label")
    assert [one.is_displayed() for one in methods] == [True] + [False] * (len(methods) - 1)
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


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
    look(browser, width=1200, scheme="light")
    open_page(browser, path.as_uri())
    browser.find_element(By.ID, "threshold").send_keys(Keys.HOME)
    settled(browser)
    told = text_of(browser, "explorer-text")
    assert "Entropy of confident right answers" in told
    assert "wrong" not in told
    # What is not there has no name in a legend either.
    names = "return document.getElementById(arguments[0]).data.map((trace) => trace.name)"
    for chart in ("chart-units", "chart-all-units", "chart-values"):
        assert [name.split()[-1] for name in browser.execute_script(names, chart)] == ["right"]
        assert browser.find_elements(By.CSS_SELECTOR, f"#{chart} .legend .legendtext")
    assert not browser.find_elements(By.CSS_SELECTOR, "#explorer .legend .wrong")
    assert "Mean of all " in text_of(browser, "confident")
    assert browser.get_log("browser") == []
