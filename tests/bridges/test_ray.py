"""The Ray bridge on a real local cluster: the numbers of the library on the same rows."""

import signal

import numpy as np
import pytest
import torch

from featcal import InputError, demo_pack, load, parse, save
from featcal.bridges.ray import Rows
from featcal.report import evaluate

ray = pytest.importorskip("ray.data", exc_type=ImportError)
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own


@pytest.fixture(scope="module")
def cluster():
    import ray as package

    on_term = signal.getsignal(signal.SIGTERM)  # Ray leaves another, with which forks would exit
    package.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    ray.DataContext.get_current().enable_progress_bars = False
    yield
    package.shutdown()
    signal.signal(signal.SIGTERM, on_term)


@pytest.fixture(scope="module")
def pack():
    return demo_pack()


@pytest.fixture(scope="module")
def rows(cluster, pack):
    (batch,) = pack.split("val")
    table = [
        {"features": x, "label": y}
        for x, y in zip(batch.features.numpy(), batch.labels.numpy(), strict=True)
    ]
    dataset = ray.from_items(table, override_num_blocks=3)
    return Rows(dataset.materialize(), pack.head)


@pytest.mark.parametrize("recipe", ["temperature", "clip | temperature"])
def test_a_fit_is_that_of_the_library(rows, pack, recipe, tmp_path):
    found = rows.fit(recipe)
    known = parse(recipe).fit(pack.split("val"), pack.head, mode="sequential")
    assert found.report.loss_before == pytest.approx(known.report.loss_before, abs=1e-6)
    assert found.report.loss_after == pytest.approx(known.report.loss_after, abs=2e-4)
    if recipe == "temperature":
        assert float(found.temperature) == pytest.approx(float(known.temperature), abs=2e-4)
    assert (found.report.rows, found.report.classes, found.report.features) == (5000, 100, 256)
    again = load(save(found, tmp_path / "cal.safetensors"))
    assert str(again) == str(found)


def test_scores_are_those_of_the_library(rows, pack):
    calibrator = parse("clip | temperature").fit(pack.split("val"), pack.head)
    found, known = rows.evaluate(calibrator), evaluate(pack.split("val"), calibrator, pack.head)
    assert found.n == known.n == 5000
    assert {"ece", "nll", "classwise_ece", "brier", "mce"} <= found.metrics.keys()
    for name, value in found.metrics.items():
        assert value == pytest.approx(known.metrics[name], abs=1e-5), name


def test_logits_under_other_names_and_what_is_refused(cluster, pack):
    draw = np.random.default_rng(0)
    logits = (4 * draw.normal(size=(300, 3))).astype(np.float32)
    labels = (logits / 4 + draw.gumbel(size=logits.shape)).argmax(1)
    table = [{"z": z, "y": int(y)} for z, y in zip(logits, labels, strict=True)]
    dataset = ray.from_items(table, override_num_blocks=2)
    found = Rows(dataset, values="z", labels="y").fit()
    known = parse("temperature").fit((torch.tensor(logits), torch.tensor(labels)))
    assert float(found.temperature) == pytest.approx(float(known.temperature), rel=1e-4)
    with pytest.raises(InputError, match="name the columns"):
        Rows(dataset).fit()
    with pytest.raises(InputError, match="is not fitted in Ray"):
        Rows(dataset, values="z", labels="y").fit("vector")
    with pytest.raises(InputError, match="works on features"):
        Rows(dataset, values="z", labels="y").fit("clip")
    with pytest.raises(Exception, match=r"labels are outside 0\.\.2"):
        Rows(dataset.add_column("bad", lambda _: 7), values="z", labels="bad").fit()
