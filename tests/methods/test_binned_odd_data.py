"""Histogram, isotonic, spline and BBQ on odd data, in any order and in two processes."""

import json
import os
import subprocess
import sys
from functools import cache

import pytest
import torch
from method_cases import drawn, mapped

from featcal import Batch, parse

RECIPES = [
    "histogram",
    "histogram(smooth=False)",
    "histogram(edges='width')",
    "histogram(edges='width', smooth=False)",
    "histogram(reading='one_vs_rest')",
    "histogram(reading='one_vs_rest', edges='width', smooth=False)",
    "isotonic",
    "isotonic(between='step')",
    "isotonic(reference=True)",
    "isotonic(reading='one_vs_rest')",
    "isotonic(reading='one_vs_rest', between='step')",
    "isotonic(reading='one_vs_rest', reference=True)",
    "isotonic(reading='top')",
    "isotonic(reading='top', between='step')",
    "spline",
    "spline(knots=2)",
    "spline(reference=True)",
    "bbq",
]
every_recipe = pytest.mark.parametrize("recipe", RECIPES)


@cache
def worlds():
    logits, labels = drawn(n=200, k=4)
    return {
        "all right": (logits, logits.argmax(1)),
        "all wrong": (logits, logits.argmin(1)),
        "constant": (torch.zeros(40, 5), torch.arange(40) % 5),
        "constant and right": (torch.zeros(40, 5), torch.zeros(40, dtype=torch.int64)),
        "one class": (logits[:, :1], torch.zeros(200, dtype=torch.int64)),
        "one row": (logits[:1], labels[:1]),
        "one row, right": (logits[:1], logits[:1].argmax(1)),
        "one row, wrong": (logits[:1], logits[:1].argmin(1)),
        "two rows": (logits[:2], labels[:2]),
        "two classes": drawn(n=200, k=2),
        "duplicates": (logits[:5].repeat(20, 1), labels[:100]),
        "huge": (logits * 1e4, labels),
        "tiny": (logits * 1e-6, labels),
        "double": (logits.double(), labels),
        "absent classes": (torch.cat([logits, logits - 3], 1), labels),
    }


@pytest.mark.parametrize("world", list(worlds()))
@every_recipe
def test_odd_data_gives_a_sound_result(recipe, world):
    assert_sound(recipe, *worlds()[world])


@pytest.mark.parametrize(
    "recipe",
    [
        "histogram",
        "histogram(reading='one_vs_rest', edges='width')",
        "isotonic",
        "isotonic(reading='one_vs_rest')",
        "spline",
        "bbq",
    ],
)
def test_a_thousand_classes_with_two_rows_each(recipe):
    logits = torch.randn(2000, 1000, generator=torch.Generator().manual_seed(0))
    assert_sound(recipe, logits, torch.arange(2000) % 1000)


def assert_sound(recipe, logits, labels):
    calibrator = parse(recipe).fit(Batch(logits, labels))
    found = mapped(calibrator, logits)
    report = calibrator.report
    assert report.loss_after <= report.loss_before or "reference" in recipe
    assert report.noop == torch.equal(found, logits)
    assert found.dtype == logits.dtype
    calibrator.check()
    some = logits[:300]
    for inputs in (found, some, some * 0, -some * 100):
        out = found if inputs is found else mapped(calibrator, inputs)
        before = logits if inputs is found else inputs
        assert out.isfinite().all()
        assert out.log_softmax(1).isfinite().all()
        assert torch.equal(out.argmax(1), before.argmax(1)) or not calibrator.keeps_accuracy


@every_recipe
def test_the_order_of_rows_does_not_matter(recipe):
    logits, labels = drawn()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
    one = parse(recipe).fit(Batch(logits, labels))
    two = parse(recipe).fit([Batch(logits[i], labels[i]) for i in order.split(77)])
    for key, value in one.state_dict().items():
        # Counts are exact; sums of probabilities may round differently.
        torch.testing.assert_close(two.state_dict()[key], value, rtol=1e-6, atol=1e-7)


@every_recipe
def test_one_sentence_for_a_person(recipe):
    logits, labels = drawn()
    step = parse(recipe).fit(Batch(logits, labels)).report.steps[0]
    assert step.values
    assert all(isinstance(value, (int, float)) for value in step.values.values())
    assert len(step.message) < 120


# --- two processes ----------------------------------------------------------------------------

WORKER = """
import datetime, json, os, sys
import torch
torch.set_num_threads(1)
import torch.distributed as dist
from featcal import Batch, parse

recipes, folder = json.loads(sys.argv[1]), sys.argv[2]
data = torch.load(f"{folder}/data.pt")

def part(a, b):
    return Batch(data["logits"][a:b], data["labels"][a:b])

def shard(rank, layout):
    if layout == "uneven":
        return [part(0, 7), part(7, 90)] if rank == 0 else [part(90, 600)]
    return [part(0, 600)] if rank == 0 else []

def work(rank):
    for layout in ("uneven", "no rows"):
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/{layout}", rank=rank, world_size=2,
            timeout=datetime.timedelta(seconds=30))
        found = {r: parse(r).fit(shard(rank, layout)).state_dict() for r in recipes}
        torch.save(found, f"{folder}/{layout}-{rank}.pt")
        dist.destroy_process_group()

other = os.fork()
work(1 if other else 0)
if other:
    os.waitpid(other, 0)
"""


def test_two_processes_give_the_result_of_one(tmp_path):
    logits, labels = drawn()
    torch.save({"logits": logits, "labels": labels}, tmp_path / "data.pt")
    subprocess.run(
        [sys.executable, "-c", WORKER, json.dumps(RECIPES), tmp_path],
        check=True,
        timeout=100,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
    )
    one = {recipe: parse(recipe).fit(Batch(logits, labels)).state_dict() for recipe in RECIPES}
    for layout in ("uneven", "no rows"):
        for rank in range(2):
            found = torch.load(tmp_path / f"{layout}-{rank}.pt")
            for recipe in RECIPES:
                for key, value in one[recipe].items():
                    torch.testing.assert_close(found[recipe][key], value, rtol=1e-6, atol=1e-7)
