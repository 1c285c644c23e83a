"""What a hand does in a browser, and what an eye sees there: for the tests of the page."""

import json

import pytest

pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

# Selenium and the browser's pipes are closed when they please.
MARKS = [
    pytest.mark.no_cover,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning"),
]


def open_page(browser, address):
    browser.get_log("performance")
    browser.get_log("browser")
    browser.get(address)
    ready = "return document.documentElement.dataset.ready === 'yes'"
    WebDriverWait(browser, 20).until(lambda driver: driver.execute_script(ready))


def look(browser, *, width, scheme):
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    # Without motion an element is where it will be when it is clicked.
    wishes = {"prefers-color-scheme": scheme, "prefers-reduced-motion": "reduce"}
    wanted = {"features": [{"name": name, "value": value} for name, value in wishes.items()]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", wanted)


def requests(browser):
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [event for event in events if event["method"] == "Network.requestWillBeSent"]
    return [event["params"]["request"]["url"] for event in sent]


def text_of(browser, name):
    return browser.find_element(By.ID, name).text


def bars_of(browser, name):
    """What a chart holds: the numbers of its first bars, and of its second."""
    return browser.execute_script(
        f"return document.getElementById('{name}').data.slice(0, 2).map(t => Array.from(t.y))"
    )


def settled(browser):
    """Waits for the frame in which the charts follow."""
    browser.execute_async_script(
        "requestAnimationFrame(() => requestAnimationFrame(() => arguments[0]()))"
    )


def column_of(browser, table, column):
    cells = browser.find_elements(By.CSS_SELECTOR, f"#{table} tbody tr > :nth-child({column})")
    return [cell.get_attribute("data-value") or cell.text for cell in cells]
