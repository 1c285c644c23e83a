"""The page on data sets: its code runs, and what it names is there."""

import re
from pathlib import Path

import made
import torch

PAGE = Path(__file__).parents[2] / "docs" / "datasets.md"


def test_every_snippet_of_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    made.write_binary(tmp_path / "data", train=6000)
    made.write_folders(tmp_path / "pets", size=(40, 50), end="jpg")
    names = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(blocks) == 4
    for block in blocks:
        exec(block, names)
    assert names["x"].is_contiguous(memory_format=torch.channels_last)
    assert (len(names["splits"].train), len(names["splits"].held_out)) == (4900, 500)
    said = capsys.readouterr().out
    assert "val: 20 of 200 training images" in said
    assert "seed 1; held out: 500 of the 5400 that are left" in said
    assert names["pets"].train.pixels.shape == (24, 32, 32, 3)
