"""Two processes train the network one process would; the last batch is odd on purpose."""

import os
from pathlib import Path

import pytest
import tiny
import torch
import torch.distributed as torch_dist
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file
from tiny import HALF, Killed, killed_after, made_splits, same, small

from featcal import InputError
from featcal.core import dist
from featcal.core.progress import listen
from featcal.losses import CE, AdaFocal, Focal
from featcal.train import Engine, Recipe, train

# 101 rows in batches of 20: the last batch has a single row, which no two processes can share.
RECIPE = Recipe(epochs=2, batch=20, seed=7)
CASES = {
    "mean": (CE(), RECIPE),
    "sum": (Focal(reduction="sum"), RECIPE.published()),
    # The clip of the published recipe would hide a factor.
    "sum without a clip": (Focal(reduction="sum"), Recipe(epochs=2, batch=20, seed=7, lr=0.005)),
    "adafocal": (AdaFocal(), RECIPE),
}


def trained(case, rows):
    loss, recipe = CASES[case]
    model = small(norm=False)  # statistics of a batch would be those of a rank's part of it
    splits = made_splits(train=rows, held_out=30)
    history = train(model, splits, loss, recipe, engine=Engine.best("cpu"), normalise=HALF)
    return model, [epoch.loss for epoch in history]


def dropped_units():
    """The random numbers that a network draws in the steps of two epochs."""
    model, drawn = small(norm=False), []
    model.head.register_forward_pre_hook(
        lambda *_: drawn.append(torch.rand(4)) if model.training else None
    )
    splits, recipe = made_splits(), Recipe(epochs=2, batch=20)
    train(model, splits, CE(), recipe, engine=Engine.best("cpu"), normalise=HALF)
    return drawn


def forgetful(**options):
    """A network with dropout, trained."""
    model, _ = tiny.trained(small(norm=False, dropout=0.5), recipe=RECIPE, **options)
    return model


def forgetful_and_killed(folder):
    options = {"folder": Path(folder), "checkpoint_every": 0.0}
    with pytest.raises(Killed), listen(killed_after(8)):
        forgetful(**options)
    return forgetful(**options)


def on_rank(rank, folder):
    torch.set_num_threads(1)
    torch_dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2
    )
    for case in CASES:
        model, losses = trained(case, 101)
        found = {**model.state_dict(), "losses": torch.tensor(losses)}
        found = {key: value.contiguous() for key, value in found.items()}
        save_file(found, f"{folder}/{case}-{rank}.safetensors")
    drawn = dropped_units()
    save_file({"drawn": torch.stack(drawn)}, f"{folder}/dropout-{rank}.safetensors")
    models = {"whole": forgetful(), "killed": forgetful_and_killed(folder)}
    told = []
    models["statistics"], _ = tiny.trained(
        small(), recipe=RECIPE, report=told.append, begun=told.append
    )
    assert len(told) == (3 if rank == 0 else 0)  # that it begins, and two epochs
    for name, model in models.items():
        found = {key: value.contiguous() for key, value in model.state_dict().items()}
        save_file(found, f"{folder}/{name}-{rank}.safetensors")
    with pytest.raises(InputError, match="batch is 21: give a multiple of the 2 processes"):
        train(small(), made_splits(), CE(), Recipe(epochs=1, batch=21), normalise=HALF)
    with pytest.raises(InputError, match="needs one process on a GPU: leave it out"):
        Engine.best("cpu", graph=True)
    torch_dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # A process that has used CUDA cannot be forked; elsewhere torch need not be loaded again.
    way = "spawn" if torch.cuda.is_available() else "fork"
    mp.start_processes(on_rank, args=(str(folder),), nprocs=2, start_method=way)
    return {
        case: [load_file(folder / f"{case}-{rank}.safetensors") for rank in range(2)]
        for case in (*CASES, "statistics", "dropout", "whole", "killed")
    }


def test_each_process_draws_random_numbers_of_its_own(ranks):
    one, other = (found["drawn"] for found in ranks["dropout"])
    assert len(torch.cat([one, other]).unique(dim=0)) == 20  # other ones in each of ten steps
    assert torch.equal(one, torch.stack(dropped_units()))  # the first as a run of one process


def test_a_killed_run_with_dropout_ends_as_the_whole_bit_for_bit(ranks):
    for whole, killed in zip(ranks["whole"], ranks["killed"], strict=True):
        assert same(whole, killed)
    assert not same(ranks["whole"][0], forgetful().state_dict())  # which drops other units


@pytest.mark.parametrize("case", [*CASES, "statistics"])
def test_both_end_with_the_same_weights(case, ranks):
    one, other = ranks[case]
    assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("case", CASES)
def test_they_are_those_of_one_process(case, ranks):
    # One process without the row that two leave out: the last of each epoch's own order.
    assert dist.world() == 1
    model, losses = without_the_odd_row(case)
    for key, value in model.state_dict().items():
        torch.testing.assert_close(ranks[case][0][key], value, rtol=1e-4, atol=1e-5)
    seen = torch.tensor(losses) * 101 / 100  # of two processes, the mean over the rows they saw
    torch.testing.assert_close(ranks[case][0]["losses"], seen, rtol=1e-4, atol=1e-5)


def without_the_odd_row(case):
    from featcal.train import loop as loop

    kept = loop.Trainer._taken

    def taken(self, rows):
        return torch.zeros(()) if len(rows.images) == 1 else kept(self, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Trainer, "_taken", taken)
        return trained(case, 101)
