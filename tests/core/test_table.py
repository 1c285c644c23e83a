"""One table for terminals, Markdown and pages."""

import pytest

from featcal.core.table import Table, spelled


def test_columns_of_numbers_stand_at_the_right_and_an_empty_table_has_its_headings():
    rows = (("a", "**1.2**", "-3", "n/a", "c = 2"), ("b", "0.5", "4", "inf", "no-op"))
    lines = Table("", ("", "x", "y", "z", "fit"), rows).markdown().splitlines()
    assert lines[1] == "|---|---:|---:|---:|---|"
    assert lines[2] == "| a | **1.2** | -3 | n/a | c = 2 |"
    assert Table("", ("one", "two"), ()).markdown() == "| one | two |\n|---|---:|"
    assert Table("", ("a|b", "c\nd"), ()).markdown(numeric=(True, False)) == (
        "| a\\|b | c d |\n|---:|---|"
    )


@pytest.mark.parametrize("code", [0, 8, 11, 27, 31, 127, 128, 155, 159])
def test_what_would_act_on_a_terminal_is_spelled_out(code):
    assert spelled(f"cat{chr(code)}s") == f"cat\\x{code:02x}s"


@pytest.mark.parametrize("text", ["cat\tand\ndog", "Käse ~ " + chr(160)])
def test_other_text_stays(text):
    assert spelled(text) == text
