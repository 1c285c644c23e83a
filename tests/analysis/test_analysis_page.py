"""Every snippet of docs/analysis.md runs, in the order of the page."""

import re
from pathlib import Path

import torch
from torch import nn

from featcal import analysis

PAGE = Path(__file__).parents[2] / "docs" / "analysis.md"


class Small(nn.Module):
    """A network with the layer the page names."""

    def __init__(self):
        super().__init__()
        self.layer3 = nn.Sequential(nn.Linear(6, 12), nn.ReLU())
        self.pool = nn.Sequential(nn.Linear(12, 8), nn.ReLU())
        self.fc = nn.Linear(8, 3)

    def forward(self, x):
        return self.fc(self.pool(self.layer3(x)))


def test_every_snippet_runs(capsys):
    torch.manual_seed(0)
    model = Small()
    x, y = 2 * torch.randn(200, 6), torch.randint(0, 3, (200,))
    names = {
        "model": model,
        "val_loader": [(x[:100], y[:100])],
        "test_loader": [(x[100:], y[100:])],
    }
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    for block in blocks:
        exec(block, names)
    assert len(blocks) == 12
    assert capsys.readouterr().out
    found = {name for name in analysis.__all__ if f"analysis.{name}." in "".join(blocks)}
    assert found == set(analysis.__all__) - {"Analysis", "BandedDiagram", "LayerRow"}


def test_the_page_types_no_results():
    """Levels and sizes that are defaults are no results; decimals of four digits would be."""
    assert not re.search(r"\d\.\d{3,}|\d+\.\d+ %", PAGE.read_text())
