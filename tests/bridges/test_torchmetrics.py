"""The torchmetrics class beside `featcal.metrics` on all rows, and beside torchmetrics' own."""

import importlib
import json
import pickle
import sys
import warnings
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from featcal import InputError, ReliabilityDiagram, metrics

torchmetrics = pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")
from featcal.bridges.torchmetrics import METRICS, CalibrationMetric  # noqa: E402

K = 5
ROWS = {"adaptive_ece", "debiased_ce", "smooth_ece", "ks_error", "auroc", "aurc", "e_aurc"}
every_metric = pytest.mark.parametrize("name", METRICS)


@pytest.fixture(scope="module")
def made_rows():
    draw = torch.Generator().manual_seed(3)
    logits = torch.randn(240, K, generator=draw) * 2
    labels = (logits / 3 + torch.randn(240, K, generator=draw)).argmax(1)
    return SimpleNamespace(logits=logits, probs=logits.softmax(1), labels=labels)


def metric_of(name, **arguments):
    return CalibrationMetric(name, num_classes=K, **arguments)


def fed(metric, values, labels, cuts=(0, 1, 100, 100, 240)):
    """The metric after batches of 1, 99, 0 and 140 rows."""
    for start, end in pairwise(cuts):
        metric.update(values[start:end], labels[start:end])
    return metric


def expected(name, **given):
    """The function of `featcal.metrics` on all rows; two are fields of a summary alone."""
    if name in ("confidence", "overconfidence"):
        found = metrics.Bins.of(**given)
        accuracy = float(found.correct.sum()) / found.n
        return found.overconfidence + (accuracy if name == "confidence" else 0)
    return getattr(metrics, name)(**given)


@every_metric
def test_a_metric_keeps_torchmetrics_contract_and_gives_the_value_of_all_rows(name, made_rows):
    probs, labels = made_rows.probs, made_rows.labels
    metric = metric_of(name)
    metric.update(probs[:0], labels[:0])
    with pytest.raises(InputError, match="there are no rows"):
        metric.compute()
    metric.reset()
    first = metric(probs[:90], labels[:90])  # forward gives the batch and keeps the whole
    assert float(first) == pytest.approx(
        expected(name, probs=probs[:90], labels=labels[:90]), rel=1e-12
    )
    metric.update(probs[90:91], labels[90:91])
    metric.update(probs[91:], labels[91:])
    value = metric.compute()
    assert (value.shape, value.dtype, metric.update_count) == ((), torch.float64, 3)
    whole = expected(name, probs=probs, labels=labels)
    assert float(value) == pytest.approx(whole, rel=1e-12)
    for other in (metric.clone(), pickle.loads(pickle.dumps(metric))):
        assert torch.equal(other.compute(), value)
    lists = [key for key, state in metric.metric_state.items() if isinstance(state, list)]
    assert bool(lists) == (name in ROWS)  # only metrics that rank rows keep rows
    of_logits = fed(metric_of(name, kind="logits"), made_rows.logits, labels)
    whole = expected(name, logits=made_rows.logits, labels=labels)
    assert float(of_logits.compute()) == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize("name", ["mce", "classwise_ece", "debiased_ce"])
def test_the_number_of_bins_counts(name, made_rows):
    metric = fed(metric_of(name, bins=7), made_rows.probs, made_rows.labels)
    whole = getattr(metrics, name)(made_rows.probs, made_rows.labels, bins=7)
    assert float(metric.compute()) == pytest.approx(whole, rel=1e-12)
    assert whole != pytest.approx(getattr(metrics, name)(made_rows.probs, made_rows.labels))


@pytest.mark.parametrize("shape", [(-1,), (-1, 1)])
def test_a_single_logit_and_its_float_labels_are_two_classes(shape, made_rows):
    z = made_rows.logits[:, 0] - made_rows.logits[:, 1]
    labels = (made_rows.labels == 0).float()
    metric = CalibrationMetric("ece", kind="logits")
    metric.update(z.reshape(shape), labels.reshape(shape))
    pair = torch.stack([torch.zeros_like(z), z], 1)
    assert float(metric.compute()) == metrics.ece(logits=pair, labels=labels.long())


@pytest.mark.parametrize(("ours", "norm"), [("ece", "l1"), ("mce", "max"), ("rms_ce", "l2")])
@pytest.mark.parametrize("bins", [15])
def test_torchmetrics_own_class_gives_the_same_where_conventions_agree(ours, norm, bins, made_rows):
    theirs = torchmetrics.classification.MulticlassCalibrationError(K, n_bins=bins, norm=norm)
    theirs.update(made_rows.probs, made_rows.labels)
    metric = fed(CalibrationMetric(ours, bins=bins), made_rows.probs, made_rows.labels)
    assert float(metric.compute()) == pytest.approx(float(theirs.compute()), abs=1e-6)


def test_a_confidence_of_exactly_one_is_in_the_last_bin_here_and_alone_there():
    """Two sure rows, one wrong, and one at 0.97, right: one bin of three here, two bins there."""
    probs = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.97, 0.03]])
    labels = torch.tensor([0, 1, 0])
    theirs = torchmetrics.classification.MulticlassCalibrationError(2, n_bins=10)
    ours = CalibrationMetric("ece", bins=10)
    assert float(ours(probs, labels)) == pytest.approx(abs(2.97 - 2) / 3)
    assert float(theirs(probs, labels)) == pytest.approx((abs(2 - 1) + abs(0.97 - 1)) / 3)


def test_logits_between_0_and_1_are_guessed_there_and_refused_here():
    logits, labels = torch.tensor([[0.9, 0.1], [0.2, 0.4]]), torch.tensor([0, 0])
    theirs = torchmetrics.classification.MulticlassCalibrationError(2)
    assert float(theirs(logits, labels)) != pytest.approx(
        metrics.ece(logits=logits, labels=labels), abs=0.1
    )
    with pytest.raises(InputError, match=r"the sum 0\.6: .*with kind='logits', else divide"):
        CalibrationMetric("ece").update(logits, labels)
    found = CalibrationMetric("ece", kind="logits")(logits, labels)
    assert float(found) == metrics.ece(logits=logits, labels=labels)


@pytest.mark.parametrize("name", ["ece", "nll", "classwise_ece", "smooth_ece"])
def test_states_are_saved_when_asked_for(name, made_rows):
    metric = fed(metric_of(name), made_rows.probs, made_rows.labels)
    assert metric.state_dict() == {}
    metric.persistent(True)
    again = metric_of(name)
    again.persistent(True)
    again.load_state_dict(metric.state_dict())
    again.update(made_rows.probs[:50], made_rows.labels[:50])
    metric.update(made_rows.probs[:50], made_rows.labels[:50])
    assert torch.equal(again.compute(), metric.compute())


def test_a_collection_shares_the_states_of_metrics_that_keep_the_same(made_rows):
    names = ["ece", "mce", "nll", "brier", "auroc", "adaptive_ece"]
    collection = torchmetrics.MetricCollection({name: metric_of(name) for name in names})
    collection.update(made_rows.probs[:140], made_rows.labels[:140])
    collection.update(made_rows.probs[140:], made_rows.labels[140:])
    assert len(collection.compute_groups) == 3
    for name, value in collection.compute().items():
        assert float(value) == pytest.approx(
            getattr(metrics, name)(made_rows.probs, made_rows.labels), rel=1e-12
        )
    collection.reset()
    collection(preds=made_rows.probs, target=made_rows.labels)


def test_what_a_metric_says_of_itself():
    said = {name: metric_of(name).higher_is_better for name in METRICS}
    assert [name for name, higher in said.items() if higher] == ["accuracy", "auroc"]
    unranked = [name for name, higher in said.items() if higher is None]
    assert unranked == ["confidence", "overconfidence"]
    metric = CalibrationMetric()
    assert metric.metric == "ece"
    assert metric.is_differentiable is False
    assert metric.full_state_update is False
    tracker = torchmetrics.wrappers.MetricTracker(metric, maximize=metric.higher_is_better)
    assert tracker.maximize is False


# --- types and devices -----------------------------------------------------------------------

CASTS = {
    "to bfloat16": lambda module: module.to(torch.bfloat16),
    "to half": lambda module: module.to(device="cpu", dtype=torch.half),
    "set_dtype": lambda module: (module.half(), module.metric.set_dtype(torch.half)),
}


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("name", ["ece", "nll", "classwise_ece", "adaptive_ece"])
def test_casting_the_model_around_it_leaves_the_sums_as_they_are(name, cast, made_rows):
    model = nn.Module()
    model.layer, model.metric = nn.Linear(2, 2), metric_of(name)
    fed(model.metric, made_rows.probs, made_rows.labels)
    CASTS[cast](model)
    assert model.layer.weight.dtype in (torch.half, torch.bfloat16)
    whole = getattr(metrics, name)(made_rows.probs, made_rows.labels)
    assert float(model.metric.compute()) == pytest.approx(whole, rel=1e-12)
    model.metric.reset()
    fed(model.metric, made_rows.probs, made_rows.labels)
    assert float(model.metric.compute()) == pytest.approx(whole, rel=1e-12)


def test_states_follow_the_metric_to_its_device():
    """The meta device stands in for any other."""
    metric = CalibrationMetric("ece").to("meta")
    assert metric.device.type == metric.count.device.type == "meta"
    assert metric.count.dtype == torch.float64


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["ece", "nll", "classwise_ece", "smooth_ece"])
def test_a_metric_on_a_gpu(name, made_rows):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    metric = metric_of(name).to("cuda")
    fed(metric, made_rows.probs.cuda(), made_rows.labels.cuda())
    value = metric.compute()
    assert value.is_cuda
    assert float(value) == pytest.approx(expected(name, **rows(made_rows)), rel=1e-6)


def rows(made_rows):
    return {"probs": made_rows.probs, "labels": made_rows.labels}


def test_plot_is_the_reliability_diagram(made_rows):
    pytest.importorskip("matplotlib")
    metric = fed(CalibrationMetric("mce", bins=10), made_rows.probs, made_rows.labels)
    diagram = metric.diagram("before")
    assert diagram.title == "before"
    whole = ReliabilityDiagram.of(made_rows.probs, made_rows.labels, bins=10)
    torch.testing.assert_close(diagram.gap, whole.gap, rtol=1e-9, atol=0, equal_nan=True)
    figure, ax = metric.plot()
    assert ax in figure.axes
    assert ax.get_ylabel() == "accuracy"
    mine = figure.add_subplot()
    assert metric.plot(ax=mine)[1] is mine


def test_plot_of_values_is_torchmetrics_own(made_rows):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    metric = fed(CalibrationMetric("ece"), made_rows.probs, made_rows.labels)
    _, ax = metric.plot([metric.compute(), metric.compute()])
    assert ax.get_title() != "accuracy"
    with pytest.raises(InputError, match=r"nll keeps no bins: take the diagram of 'ece'"):
        CalibrationMetric("nll").diagram()
    brier = fed(CalibrationMetric("brier"), made_rows.probs, made_rows.labels)
    figure, _ = brier.plot()
    assert len(figure.axes) == 1
    pyplot.close("all")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"metric": "acc"}, r"metric is 'acc': choose accuracy, .* or e_aurc"),
        ({"kind": "scores"}, r"kind is 'scores': choose probs or logits"),
        ({"bins": 0}, r"bins is 0: give a whole number from 1 to"),
        ({"metric": "classwise_ece"}, r"num_classes is None: .* from 2 up"),
        ({"metric": "classwise_ece", "num_classes": 1}, r"num_classes is 1: .* from 2 up"),
    ],
)
def test_arguments_that_cannot_be_used(arguments, message):
    with pytest.raises(InputError, match=message):
        CalibrationMetric(**arguments)


def test_predictions_that_cannot_be_used(made_rows):
    metric = CalibrationMetric("ece")
    with pytest.raises(InputError, match=r"lie in 0..1 .*make the CalibrationMetric with kind="):
        metric.update(made_rows.logits, made_rows.labels)
    with pytest.raises(InputError, match=r"there are 3 labels"):
        metric.update(made_rows.probs, made_rows.labels[:3])
    with pytest.raises(InputError, match=r"preds has 5 classes and num_classes is 4"):
        CalibrationMetric("classwise_ece", num_classes=4).update(*rows(made_rows).values())
    with pytest.raises(ValueError, match="Unexpected keyword"):
        CalibrationMetric("ece", n_bins=10)


def test_a_missing_torchmetrics_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    monkeypatch.delitem(sys.modules, "featcal.bridges.torchmetrics")
    with pytest.raises(ImportError, match=r"pip install 'featcal\[torchmetrics\]'"):
        importlib.import_module("featcal.bridges.torchmetrics")


def test_the_documents_run(made_rows, shown):
    batches = [(made_rows.logits[a:b], made_rows.labels[a:b]) for a, b in ((0, 100), (100, 240))]
    names = {"model": lambda logits: logits, "val_loader": batches}
    for block in shown("torchmetrics"):
        exec(block, names)
    assert sorted(names["found"]) == ["auroc", "ece", "nll"]
    whole = metrics.ece(logits=made_rows.logits, labels=made_rows.labels)
    assert float(names["found"]["ece"]) == pytest.approx(whole, rel=1e-12)


# --- two processes ---------------------------------------------------------------------------


def on_rank(rank, folder, data):
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "The ``compute`` method")
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    found = {}
    for layout in ("uneven", "one has no rows"):
        cut = 200 if layout == "uneven" else 0
        mine = slice(0, cut) if rank else slice(cut, None)
        for name in METRICS:
            metric = CalibrationMetric(name, num_classes=5)
            if layout == "uneven" or rank == 0:
                metric.update(data["probs"][mine], data["labels"][mine])
            found[f"{layout} {name}"] = float(metric.compute())
            metric(data["probs"][:9], data["labels"][:9])  # goes on after the exchange
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_two_processes_give_the_value_of_one(made_rows, tmp_path):
    if torch.cuda.is_initialized():
        pytest.skip("a process that has used CUDA cannot be forked")
    mp.start_processes(on_rank, (tmp_path, rows(made_rows)), nprocs=2, start_method="fork")
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert found[0] == found[1]
    assert len(found[0]) == 2 * len(METRICS)
    for key, value in found[0].items():
        assert value == pytest.approx(expected(key.split()[-1], **rows(made_rows)), rel=1e-9), key
