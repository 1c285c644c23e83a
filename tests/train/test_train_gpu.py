"""On a GPU: the graph does what the plain step does, and goes on after a kill."""

from dataclasses import replace

import pytest
import torch
from tiny import HALF, Killed, killed_after, made_images, made_splits, small, weights_of
from torch import nn

from featcal.core.progress import listen
from featcal.losses import CE, AdaFocal, parse_loss
from featcal.models import build
from featcal.train import Engine, Recipe, train
from featcal.train.loop import Trainer, full_precision
from featcal.train.recipe import steps_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
RECIPE = Recipe(epochs=3, batch=16, seed=7)


def engine(*, graph, compiled=False):
    return Engine.best("cuda", precision="float32", compiled=compiled, graph=graph)


def trained(model, loss, recipe=RECIPE, splits=None, **options):
    splits = made_splits(held_out=32) if splits is None else splits
    with full_precision():
        history = train(model, splits, loss, recipe, normalise=HALF, **options)
    return {key: value.cpu() for key, value in weights_of(model).items()}, history


@pytest.mark.parametrize("text", ["ce", "mmce", "adafocal", "flsc"])
def test_a_graph_is_the_step(text):
    eager, told = trained(small(), parse_loss(text), engine=engine(graph=False))
    replayed, again = trained(small(), parse_loss(text), engine=engine(graph=True))
    for key, value in eager.items():
        torch.testing.assert_close(replayed[key], value, rtol=1e-3, atol=1e-4)
    assert [e.loss for e in again] == pytest.approx([e.loss for e in told], rel=1e-3)


@pytest.mark.parametrize(
    ("recipe", "near"),
    [
        # AdamW makes a step of a gradient that is rounding and nothing else: weights 1e-7 apart end
        # 5e-3 apart. A rate that stands still moves them by seven times the tolerance.
        (replace(RECIPE, optimizer="adamw", lr=1e-3), 1e-2),
        (replace(RECIPE, mixup=0.3, schedule="cosine"), 2e-4),
        (RECIPE.published(), 2e-4),
    ],
    ids=["adamw", "mixup", "published"],
)
def test_a_graph_reads_the_rate_and_the_mixing_weight_of_its_step(recipe, near):
    eager, _ = trained(small(), CE(), recipe, engine=engine(graph=False))
    replayed, _ = trained(small(), CE(), recipe, engine=engine(graph=True))
    for key, value in eager.items():
        torch.testing.assert_close(replayed[key], value, rtol=1e-3, atol=near)


def test_a_compiled_graph_is_the_step_too():
    def network():
        torch.manual_seed(0)
        return build("wrn16x4", 4, width=1)

    recipe = replace(RECIPE, epochs=1, warmup=0, lr=0.01, smoothing=0.1)
    eager, told = trained(network(), CE(), recipe, engine=engine(graph=False))
    whole, again = trained(network(), CE(), recipe, engine=engine(graph=True, compiled=True))
    assert [e.loss for e in again] == pytest.approx([e.loss for e in told], rel=1e-3)
    for key, value in eager.items():
        torch.testing.assert_close(whole[key], value, rtol=1e-2, atol=1e-3)


class Forgetful(nn.Module):
    """Two dropouts that do not wait for each other, in a network."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(192, 64), nn.Linear(192, 64)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(64, 4)

    def forward(self, images):
        pixels = images.flatten(1)
        branches = (self.dropout(part(pixels).relu()) for part in (self.left, self.right))
        return self.head(sum(branches))


def losses_of_one_batch(steps, **tricks):
    """The loss of the same rows again and again, by weights that all but stand still."""
    recipe = replace(RECIPE, lr=1e-12, warmup=0)
    torch.manual_seed(0)
    trainer = Trainer(Forgetful(), made_splits(), CE(), recipe, engine(**tricks), HALF)
    trainer.model.train()
    rows = steps_of(recipe, 0, 100, "cuda")[0]
    return torch.tensor([trainer.take(rows).item() for _ in range(steps)])


def test_dropout_is_drawn_anew_in_every_compiled_step():
    plain = losses_of_one_batch(64, graph=False)
    replayed = losses_of_one_batch(64, graph=True, compiled=True)
    assert len(replayed.unique()) > 60
    noise = (plain.var() + replayed.var()).div(64).sqrt().item()
    assert replayed.mean().item() == pytest.approx(plain.mean().item(), abs=5 * noise)


def test_a_killed_run_goes_on_close_to_the_whole(tmp_path):
    loss, graph = AdaFocal(), engine(graph=True)
    whole, _ = trained(small(), loss, engine=graph)
    with pytest.raises(Killed), listen(killed_after(11)):
        trained(small(), loss, engine=graph, folder=tmp_path, checkpoint_every=0.0)
    went_on, _ = trained(small(seed=5), loss, engine=graph, folder=tmp_path)
    for key, value in whole.items():
        torch.testing.assert_close(went_on[key], value, rtol=1e-3, atol=1e-4)


def test_the_whole_engine_learns():
    torch.manual_seed(0)
    sizes = {"train": 512, "val": 64, "test": 64}
    images = {part: made_images(rows, rows + len(part), 32) for part, rows in sizes.items()}
    splits = replace(made_splits(), train_index=torch.arange(512), **images)
    model = build("wrn16x4", 4, width=1)
    best = Engine.best("cuda")
    assert (best.compiled, best.graph, best.precision) == (True, True, torch.bfloat16)
    history = train(model, splits, CE(), replace(RECIPE, batch=64, epochs=6), normalise=HALF)
    assert history[-1].watched.accuracy > 0.9


def test_other_work_on_the_device_is_not_disturbed():
    before = torch.cuda.get_rng_state()
    trained(small(dropout=0.5), CE(), engine=engine(graph=True))
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert Engine.best("cuda").as_json()["device"] == torch.cuda.get_device_name(0)
