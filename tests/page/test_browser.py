"""The page in a real browser: no request, no error, and everything a hand can reach works."""

import pytest

from featcal import Batch, write_pack
from featcal.page import Content, render

pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
from browsing import MARKS, bars_of, column_of, look, open_page, requests, settled, text_of
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

pytestmark = MARKS


@pytest.fixture(scope="module")
def loaded(browser, served):
    """The page as wide as a desk, opened once for all tests that use it."""
    look(browser, width=1200, scheme="light")
    open_page(browser, served.address)
    return browser


@pytest.fixture
def opened(loaded):
    """The page, which must have logged nothing after a test."""
    yield loaded
    assert loaded.get_log("browser") == []


def test_a_file_opens_without_a_request_and_without_an_error(browser, page, tmp_path):
    path = tmp_path / "report.html"
    path.write_text(page, encoding="utf-8")
    look(browser, width=1200, scheme="light")
    open_page(browser, path.as_uri())
    assert [url for url in requests(browser) if not url.startswith("data:")] == [path.as_uri()]
    drawn = "return document.querySelectorAll('.chart .main-svg:first-of-type').length"
    assert browser.execute_script(drawn) == 12
    assert browser.get_log("browser") == []


def test_a_network_that_is_never_wrong_has_a_page_too(browser, made, tmp_path):
    """No confident wrong rows, a clip that does nothing, few rows: nulls wherever one can be."""
    known = made(140)
    labels, parts = known.logits.argmax(1), {"val": slice(60), "test": slice(60, 140)}
    splits = {name: Batch(None, labels[part], known.features[part]) for name, part in parts.items()}
    pack = write_pack(tmp_path / "pack", splits, head=known.head)
    path = tmp_path / "page.html"
    path.write_text(render(Content.of(pack, ["clip"], resamples=100)), encoding="utf-8")
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
    assert not browser.find_elements(By.CSS_SELECTOR, "#explorer .legend .wrong")
    assert browser.get_log("browser") == []


def test_the_slider_moves_the_diagram_and_the_numbers(opened, content):
    slider, sweep = opened.find_element(By.ID, "threshold"), content.sweeps[0]
    before = bars_of(opened, "chart-sweep"), text_of(opened, "explorer-text")
    place = int(slider.get_attribute("value"))
    assert place == sweep.best
    # A screen reader hears the slider at every key, and the whole sentence only afterwards.
    opened.execute_script(
        "window.heard = []; new MutationObserver(() => heard.push("
        "document.getElementById('explorer-said').textContent))"
        ".observe(document.getElementById('explorer-said'), {childList: true})"
    )
    for _ in range(2):
        slider.send_keys(Keys.ARROW_LEFT)
    assert opened.execute_script("return heard") == []
    WebDriverWait(opened, 5).until(lambda driver: driver.execute_script("return heard[0]"))
    assert opened.execute_script("return heard") == [text_of(opened, "explorer-text")]
    after = bars_of(opened, "chart-sweep"), text_of(opened, "explorer-text")
    assert before[0] != after[0]
    accuracy = sweep.test.bins(place - 2).accuracy.tolist()
    assert after[0][0] == pytest.approx([None if v != v else v for v in accuracy])
    assert f"ECE {100 * float(sweep.test.ece[place - 2]):.1f} %" in after[1]
    assert f"NLL {float(sweep.test.nll[place - 2]):.4f}" in after[1]
    assert f"{float(sweep.thresholds[place - 2]):.4g}"[:4] in slider.get_attribute("aria-valuetext")
    opened.find_elements(By.CSS_SELECTOR, "#methods input")[1].click()
    settled(opened)
    assert "T = " in text_of(opened, "explorer-text")
    opened.find_element(By.CSS_SELECTOR, "[data-jump=last]").click()
    settled(opened)
    assert text_of(opened, "explorer-text").startswith("Without clipping")
    assert "off" in text_of(opened, "threshold-value")
    opened.find_element(By.CSS_SELECTOR, "[data-jump=fitted]").click()
    settled(opened)
    assert "This is what a fit chose." in text_of(opened, "explorer-text")


def test_the_command_is_copied_and_columns_are_explained(opened, content):
    button = opened.find_element(By.ID, "copy")
    button.click()
    WebDriverWait(opened, 5).until(lambda driver: text_of(driver, "copied") == "Copied")
    assert button.accessible_name == "Copy"
    assert opened.execute_script("return String(getSelection())") == content.summary.command
    meanings = opened.find_element(By.CSS_SELECTOR, "#comparison .meanings")
    assert "true class" not in meanings.text
    meanings.find_element(By.TAG_NAME, "summary").send_keys(Keys.ENTER)
    assert "true class" in meanings.text
    fitted = [entry for entry in content.entries if entry.fitted]
    items = opened.find_elements(By.CSS_SELECTOR, "#fits li")
    assert [item.text for item in items] == [f"{one.recipe}: {one.fitted}" for one in fitted]


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


def test_every_class_has_its_diagram(opened, content):
    chosen, before = Select(opened.find_element(By.ID, "class")), content.classes[0]
    assert [one.text for one in chosen.options] == [before.names[one] for one in before.worst()]
    for place in (2, 4):
        chosen.select_by_value(str(place))
        accuracy = before.sums[place, 2] / before.sums[place, 0]
        wanted = [None if value != value else value for value in accuracy.tolist()]
        assert bars_of(opened, "chart-class-before")[0] == pytest.approx(wanted)
        told = text_of(opened, "class-text")
        assert told.startswith(
            f"{before.names[place]}, as it is: {int(before.count[place])} rows, "
        )
        assert f"gap of {100 * float(before.overconfidence[place]):+.1f} points" in told
    assert bars_of(opened, "chart-class-after") != bars_of(opened, "chart-class-before")


def test_another_recipe_can_be_shown_after(opened):
    before = bars_of(opened, "chart-after")
    Select(opened.find_element(By.ID, "after")).select_by_visible_text("none")
    assert bars_of(opened, "chart-after") != before
    assert bars_of(opened, "chart-after") == bars_of(opened, "chart-before")
    assert "nothing is changed" in text_of(opened, "after-name")


def test_everything_can_be_reached_by_keyboard(opened):
    """Every control takes the focus, and shows that it has it."""
    controls = opened.find_elements(By.CSS_SELECTOR, "button, select, input, a[href], summary")
    hidden = [one for one in controls if one.get_property("tabIndex") < 0]
    assert [one.get_attribute("outerHTML") for one in hidden] == []
    unnamed = opened.execute_script(
        "return [...document.querySelectorAll('input, select, button')].filter("
        "c => !(c.labels?.length || c.getAttribute('aria-label') || c.textContent.trim()))"
        ".map(c => c.outerHTML)"
    )
    assert unnamed == []
    opened.find_element(By.TAG_NAME, "body").send_keys(Keys.TAB)
    outline = "return getComputedStyle(document.activeElement).outlineStyle"
    assert opened.execute_script(outline) == "solid"


def test_nothing_is_wider_than_the_screen_and_cut_tables_say_so(opened):
    hint = (
        "return getComputedStyle(document.querySelector('#comparison .scroll'), '::before').content"
    )
    assert opened.execute_script(hint) == "none"
    for width in (768, 360):
        look(opened, width=width, scheme="light")
        settled(opened)
        too_wide = "return document.documentElement.scrollWidth - innerWidth"
        assert opened.execute_script(too_wide) <= 0
        chart = opened.find_element(By.CSS_SELECTOR, "#chart-before .main-svg")
        assert chart.size["width"] <= width
    WebDriverWait(opened, 5).until(lambda driver: "scroll sideways" in driver.execute_script(hint))
    look(opened, width=1200, scheme="light")


def test_it_prints_without_controls_and_in_light_colours(opened):
    """A slider that cannot be moved is not printed; what it was set to is."""
    opened.find_element(By.ID, "theme").click()
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    for name in ("threshold", "after", "theme"):
        assert not opened.find_element(By.ID, name).is_displayed()
    assert opened.find_element(By.ID, "threshold-value").is_displayed()
    methods = opened.find_elements(By.CSS_SELECTOR, "#methods label")
    assert [one.is_displayed() for one in methods].count(True) == 1
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    theme = "return document.documentElement.dataset.theme"
    opened.execute_script("dispatchEvent(new Event('beforeprint'))")
    assert opened.execute_script(theme) == "light"
    opened.execute_script("dispatchEvent(new Event('afterprint'))")
    assert opened.execute_script(theme) == "dark"
    opened.find_element(By.ID, "theme").click()


def tried(browser, recipe):
    """Types a recipe into the box of `featcal explore`; what the page says then."""
    box = browser.find_element(By.ID, "recipe")
    box.clear()
    box.send_keys(recipe, Keys.ENTER)
    WebDriverWait(browser, 20).until(
        lambda driver: (
            driver.find_element(By.ID, "recipe-go").is_enabled()
            and text_of(driver, "recipe-message") not in ("", "Fitting …")
        )
    )
    return text_of(browser, "recipe-message")


def test_the_box_fits_recipes_and_shows_them_everywhere(opened, served):
    assert "nonsense" in tried(opened, "nonsense")
    assert opened.get_log("browser") == []  # a mistyped recipe is no error of the page
    message = opened.find_element(By.ID, "recipe-message")
    assert "bad" in message.get_attribute("class")
    assert opened.find_element(By.ID, "recipe").get_attribute("aria-invalid") == "true"
    recipe, table = "clip(min_accuracy=0.99) | temperature", "#table-comparison"
    opened.execute_script(f"document.querySelectorAll('{table} .mark').forEach((m) => m.remove())")
    told = tried(opened, recipe)
    marked = opened.find_elements(By.CSS_SELECTOR, f"{table} tbody tr:has(.mark) th code")
    assert "temperature" in [cell.text for cell in marked]  # all rows are judged anew
    assert told.startswith(f"{recipe}, c = ")
    assert "in the threshold explorer" in told
    assert "bad" not in message.get_attribute("class")
    for table in ("comparison", "counts", "entropy", "changed"):
        cells = opened.find_elements(By.CSS_SELECTOR, f"#table-{table} tbody th code")
        assert [cell.text for cell in cells].count(recipe) == 1
    chosen = opened.find_element(By.CSS_SELECTOR, "#methods input:checked + code")
    assert chosen.text == text_of(opened, "after-name") == recipe
    assert "This is what a fit chose." in text_of(opened, "explorer-text")
    learned = opened.find_elements(By.CSS_SELECTOR, "#fits li")
    assert learned[-1].text.startswith(f"{recipe}: c = ")
    table = opened.find_element(By.CSS_SELECTOR, "#comparison .scroll")
    # A long name wraps, and hides no column.
    assert table.get_property("scrollWidth") <= table.get_property("clientWidth")
    # Typed once more it is found, not added.
    assert "already in the tables" in tried(opened, recipe)
    assert len(opened.find_elements(By.CSS_SELECTOR, "#methods input")) == 3
    hosts = {url.split("/")[2] for url in requests(opened) if not url.startswith("data:")}
    assert hosts == {served.address.split("/")[2]}


def test_the_theme_follows_the_system_and_the_button(opened, served):
    look(opened, width=1200, scheme="light")
    open_page(opened, served.address)
    ground = "return getComputedStyle(document.body).backgroundColor"
    ink = "return document.getElementById('chart-before').layout.font.color"
    light, light_ink = opened.execute_script(ground), opened.execute_script(ink)
    button = opened.find_element(By.ID, "theme")
    button.click()
    dark = opened.execute_script(ground)
    assert dark != light
    assert opened.execute_script(ink) != light_ink
    assert button.get_attribute("aria-pressed") == "true"
    assert button.accessible_name.strip() == "Dark"  # what is seen is what is said, pressed or not
    look(opened, width=1200, scheme="dark")
    open_page(opened, served.address)
    assert opened.execute_script(ground) == dark
    opened.find_element(By.ID, "theme").click()
    assert opened.execute_script(ground) == light
