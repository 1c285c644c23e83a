"""The examples of docs/bridges.md."""

import re
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shown():
    """The Python examples of a section of docs/bridges.md."""

    def blocks(section):
        text = (Path(__file__).parents[2] / "docs" / "bridges.md").read_text()
        (part,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
        return re.findall(r"```python\n(.*?)```", part, flags=re.DOTALL)

    return blocks
