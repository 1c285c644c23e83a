"""What the page says of the scored rows: what is known of them, and no more."""

from featcal import parse
from featcal.page import Content, render


def test_nothing_is_claimed_of_files(pack, page):
    assert "No recipe was fitted on them for this page. They decide what is recommended" in page
    assert "calibrator from a file was" not in page
    with_file = {"a.safetensors": parse("temperature").fit(pack.split("test"), pack.head)}
    other = render(Content.of(pack, ["temperature"], with_file, resamples=100))
    assert "; whether a calibrator from a file was, this page cannot know. They decide" in other


def test_whiskers_are_intervals_of_the_share(page):
    assert "Whiskers: the 95\xa0% interval of that share." in page.replace("95 %", "95\xa0%")
