"""What is looked at while a network is trained: every row once, in the precision of the run."""

import pytest
import torch
from tiny import HALF, made_images, made_splits, small, trained

from featcal.train import Engine
from featcal.train.history import Batches, outputs

CPU = torch.device("cpu")


@pytest.mark.parametrize("rows", [1, 16, 20, 40, 41])
def test_batches_hold_every_row_once_in_order_each_time(rows):
    images = made_images(40)
    batches = Batches(images, HALF, CPU, rows)
    for _ in range(2):
        found = list(batches)
        assert len(found) == len(batches)
        assert torch.equal(torch.cat([pixels for pixels, _ in found]), HALF(images.pixels))
        assert torch.equal(torch.cat([labels for _, labels in found]), images.labels)


def test_outputs_are_those_of_eval_mode_whatever_the_mode_and_stay_so():
    model, batches = small(dropout=0.5).train(), Batches(made_images(40), HALF, CPU, 16)
    logits, labels = outputs(model, batches, torch.float32)
    assert model.training
    with torch.no_grad():
        torch.testing.assert_close(logits, model.eval()(HALF(batches.dataset.pixels)))
    assert torch.equal(labels, batches.dataset.labels)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_val_is_looked_at_in_the_precision_of_the_run(precision):
    model, seen = small(), set()
    model.conv.register_forward_hook(lambda _, __, out: seen.add((len(out), out.dtype)))
    trained(model, splits=made_splits(val=41), engine=Engine.best("cpu", precision=precision))
    assert {dtype for rows, dtype in seen if rows == 41} == {getattr(torch, precision)}
