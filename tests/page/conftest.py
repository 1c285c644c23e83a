import os
import shutil

import pytest
from serving import serving

from featcal import Batch, write_pack
from featcal.page import Content, render
from featcal.page.serve import Explorer, Live

SHOWN = ("none", "temperature", "clip", "clip | temperature")  # auto has a page of its own
EVIL = "</script><b>bold</b>"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--hide-scrollbars", "--window-size=1200,900"),
)


def made_pack(folder, made, *, features=True):
    """An overconfident network on disk, with a class that is called like HTML."""
    known, fit = made(1500), 600

    def part(chosen):
        own = known.features[chosen] if features else None
        return Batch(None if features else known.logits[chosen], known.labels[chosen], own)

    return write_pack(
        folder / "pack",
        {"val": part(slice(fit)), "test": part(slice(fit, None))},
        head=known.head if features else None,
        dataset="made <data>",
        model="net",
        class_names=["cat", EVIL, 'dog "x"', "d&d", "é"],
    )


@pytest.fixture(autouse=True)
def few_thresholds(monkeypatch):
    """Short sweeps: a page makes the same of twelve thresholds as of sixty."""
    monkeypatch.setattr("featcal.page.content.POINTS", 12)


@pytest.fixture(scope="session")
def evil():
    """The name of a class that would end a script."""
    return EVIL


@pytest.fixture(scope="session")
def pack(tmp_path_factory, made):
    return made_pack(tmp_path_factory.mktemp("page"), made)


@pytest.fixture(scope="session")
def bare(tmp_path_factory, made):
    """The content of a pack of logits alone."""
    pack = made_pack(tmp_path_factory.mktemp("logits"), made, features=False)
    return Content.of(pack, resamples=100)


@pytest.fixture(scope="session")
def content(pack):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("featcal.page.content.POINTS", 12)
        return Content.of(pack, SHOWN, resamples=200)


@pytest.fixture(scope="session")
def page(content):
    return render(content)


@pytest.fixture(scope="session")
def browser():
    """A headless Chromium that logs what it says and what it asks for."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    chromium = next(filter(None, map(shutil.which, BROWSERS)), None)
    driver = shutil.which("chromedriver")
    if chromium is None or driver is None:
        missing = "chromium or chromedriver is missing: apt install chromium chromium-driver"
        # CI skips none of these; whoever has no browser may.
        (pytest.fail if os.environ.get("FEATCAL_NEEDS_BROWSER") else pytest.skip)(missing)
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield found
    found.quit()


@pytest.fixture(scope="session")
def served(content):
    """The page as `featcal explore` serves it."""
    live = Live(content)
    with serving(Explorer(render(content, live=True), live)) as server:
        yield server
