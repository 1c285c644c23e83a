"""docs/losses.md: its code runs, and it shows every loss with every argument."""

import re
from pathlib import Path

import torch
from torch import nn

from featcal.losses import LOSSES, parse_loss

PAGE = Path(__file__).parents[2] / "docs" / "losses.md"


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


def test_every_snippet_runs():
    torch.manual_seed(0)
    model, x, y = nn.Linear(6, 3), torch.randn(30, 6), torch.randint(0, 3, (30,))
    names = {
        **{"torch": torch, "model": model, "x": x, "y": y, "train_loader": [(x, y)]},
        **{"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)},
        **{"held_out_images": x[:20], "held_out_labels": y[:20]},
    }
    known = set(LOSSES)
    try:
        for block in blocks("python"):
            exec(compile(block, str(PAGE), "exec"), names)
    finally:
        for name in set(LOSSES) - known:
            del LOSSES[name]
    assert len(blocks("python")) == 5
    assert names["loss"].state()["gammas"].unique().numel() > 1
    assert model.weight.grad.isfinite().all()


def test_every_loss_is_shown_with_every_argument():
    (listed,) = blocks("text")
    for name, loss in LOSSES.items():
        arguments = ", ".join(f"{key}={value!r}" for key, value in loss.arguments().items())
        assert f"{name}({arguments})\n" in listed
        assert f"\n| `{name}` |" in PAGE.read_text()
    for line in listed.splitlines():
        assert repr(parse_loss(line)) == line.partition("(")[0]


def test_texts_in_the_page_can_be_read():
    for text in re.findall(r"`([a-z_]+\([^`)]*=[^`)]*\))`", PAGE.read_text()):
        parse_loss(text)
