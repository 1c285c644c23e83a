"""The report for a pull request."""

from featcal.page import markdown


def test_numbers_are_explained_and_the_clip_has_its_control(content):
    text = markdown(content)
    assert text.startswith(f"## {content.summary.headline}")
    assert "ECE, expected calibration error: how far" in text
    assert "NLL, negative log-likelihood: how unlikely" in text
    (clip,) = (line for line in text.splitlines() if line.startswith("With feature clipping,"))
    growth = {entry.recipe: entry.entropy for entry in content.entries}
    assert f"{growth['clip'].gap:+.4f}" in clip
    assert f"{growth['temperature'].gap:+.4f}" in clip
