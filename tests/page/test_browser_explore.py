"""The box of `featcal explore` in a real browser."""

from dataclasses import replace

import pytest

from featcal.page import Content, render
from featcal.page.html import comparison_table
from featcal.page.serve import Explorer, Live

pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
from browsing import MARKS, column_of, look, open_page, requests, text_of
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait
from serving import serving

pytestmark = MARKS


@pytest.fixture
def served(content):
    live = Live(content)
    server = Explorer(render(content, live=True), live.answer, check=live.checked)
    with serving(server):
        yield server


def _tried(browser, recipe):
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


def test_the_box_of_explore_fits_recipes_and_refuses_nonsense(browser, served):
    look(browser, width=1200, scheme="light")
    open_page(browser, served.address)
    assert "nonsense" in _tried(browser, "nonsense")
    assert browser.get_log("browser") == []  # a mistyped recipe is no error of the page
    message = browser.find_element(By.ID, "recipe-message")
    assert "bad" in message.get_attribute("class")
    assert browser.find_element(By.ID, "recipe").get_attribute("aria-invalid") == "true"
    rows = len(column_of(browser, "table-comparison", 1))
    assert _tried(browser, "clip(min_accuracy=0.9)").startswith("clip(min_accuracy=0.9), c = ")
    assert "bad" not in message.get_attribute("class")
    assert len(column_of(browser, "table-comparison", 1)) == rows + 1
    assert (
        Select(browser.find_element(By.ID, "after")).first_selected_option.text
        == "clip(min_accuracy=0.9)"
    )
    hosts = {url.split("/")[2] for url in requests(browser) if not url.startswith("data:")}
    assert hosts == {served.address.split("/")[2]}


def test_a_typed_clip_stands_everywhere_the_page_says(browser, served, content):
    look(browser, width=1200, scheme="light")
    open_page(browser, served.address)
    recipe = "clip(min_accuracy=0.99) | temperature"
    message = _tried(browser, recipe)
    assert "in the threshold explorer" in message
    assert "The summary above" in message
    for table in ("comparison", "counts", "entropy", "changed"):
        cells = browser.find_elements(By.CSS_SELECTOR, f"#table-{table} tbody th code")
        assert [cell.text for cell in cells].count(recipe) == 1
    chosen = browser.find_element(By.CSS_SELECTOR, "#methods input:checked + code")
    assert chosen.text == recipe
    assert "This is what a fit chose." in text_of(browser, "explorer-text")
    assert text_of(browser, "after-name") == recipe
    learned = browser.find_elements(By.CSS_SELECTOR, "#fits li")
    assert learned[-1].text.startswith(f"{recipe}: c = ")
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
    with serving(Explorer(render(found, live=True), live.answer)) as server:
        open_page(browser, server.address)
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


def _stars(browser):
    rows = browser.find_elements(By.CSS_SELECTOR, "#table-comparison tbody tr")
    return {row.find_element(By.TAG_NAME, "code").text: row.text.count("★ best") for row in rows}
