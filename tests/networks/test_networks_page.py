"""docs/networks.md: its table is made here from the code, and its snippets run.

`python tests/networks/test_networks_page.py` writes the table.
"""

import re
from pathlib import Path

import torch

import featcal
from featcal.models import MODELS, build, network_options

PAGE = Path(__file__).parents[2] / "docs" / "networks.md"
START, END = "<!-- networks:begin -->", "<!-- networks:end -->"
COLUMNS = (
    *("name", "family", "options", "parts", "last output", "features"),
    *("parameters, 10 classes", "100 classes"),
)


def table():
    rows = [row(name) for name in MODELS]
    lines = [COLUMNS, ["---"] * 5 + ["---:"] * 3, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def row(name):
    """What `COLUMNS` say of a network, worked out without memory for its weights."""
    with torch.device("meta"):
        model, wider = build(name, 10), build(name, 100)
        *parts, _ = (part for part, _ in model.named_children())
        shapes = last_shapes(model, torch.empty(1, 3, 32, 32))
    options = ", ".join(f"{key}={value!r}" for key, value in network_options(name).items())
    return [
        f"`{name}`",
        model.family,
        f"`{options}`",
        f"`{' '.join(parts)}`",
        shapes,
        f"{model.feature_size}, {'signed' if model.signed else '≥ 0'}",
        f"{parameters(model):,}",
        f"{parameters(wider):,}",
    ]


def last_shapes(model, images):
    """Maps or tokens, of which the features are made."""
    found = {}
    for name, part in model.named_children():
        part.register_forward_hook(lambda _, __, out, name=name: found.update({name: out.shape}))
    model(images)
    *_, last = (shape for name, shape in found.items() if name not in ("norm", "head"))
    kind = "maps" if len(last) == 4 else "tokens"
    return f"{' x '.join(str(size) for size in last[1:])} {kind}"


def parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


def shown():
    return PAGE.read_text().split(START)[1].split(END)[0].strip()


def test_the_table_is_that_of_the_code():
    assert shown() == table()


def test_every_snippet_runs(monkeypatch):
    torch.manual_seed(0)
    x, y = torch.randn(60, 3, 16, 16), torch.randint(0, 4, (60,))
    names = {"val_loader": [(x, y)]}
    monkeypatch.setitem(MODELS, "two", None)  # taken out again after the test
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    assert names["features"].shape == (8, 256)
    assert names["logits"].shape == (8, 10)
    assert float(names["threshold"]) > 0
    assert names["mine"](x).shape == (60, 4)
    assert featcal.find_head(names["mine"], inputs=x) == "head"


def test_every_part_the_page_names_is_there():
    resnet, vit = build("resnet50", 2, width=2), build("vit", 2, width=6)
    for model, path in ((resnet, "layer3.0"), (vit, "blocks.4")):
        assert f'layer="{path}"' in PAGE.read_text()
        model.get_submodule(path)


if __name__ == "__main__":
    before, rest = PAGE.read_text().split(START)
    PAGE.write_text(f"{before}{START}\n{table()}\n{END}{rest.split(END)[1]}")
