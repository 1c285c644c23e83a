"""One call for every logger, each the real library writing where the test can read it back."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import featcal
from featcal import Batch, InputError
from featcal.bridges.loggers import log


@pytest.fixture(scope="module")
def found():
    """Scores, a comparison and a report of the same rows."""
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(400, 4, generator=draw) * 3
    labels = (logits / 3 + torch.randn(400, 4, generator=draw)).argmax(1)
    batch = Batch(logits, labels)
    return SimpleNamespace(
        scores=featcal.evaluate(batch),
        comparison=featcal.compare(batch, None, ["none", "temperature"], folds=2, resamples=0),
        report=featcal.parse("temperature").fit(batch).report,
    )


def test_scores_are_sent_under_the_prefix(found):
    seen = {}
    sent = log(seen, found.scores)
    assert sent == seen
    assert sent == {f"calibration/{key}": value for key, value in found.scores.metrics.items()}
    assert log({}, found.scores, prefix="test")["test/ece"] == found.scores.metrics["ece"]
    assert log({}, found.scores, prefix="")["ece"] == found.scores.metrics["ece"]


def test_a_comparison_is_sent_recipe_by_recipe_and_a_report_as_that_of_the_fit(found):
    sent = log({}, found.comparison)
    for row in found.comparison:
        assert sent[f"calibration/{row.recipe}/nll"] == row.scores.metrics["nll"]
    assert log({}, found.comparison[1])["calibration/nll"] == sent["calibration/temperature/nll"]
    calls = []
    log(lambda *given: calls.append(given), found.report, step=7, prefix="val")
    numbers = {
        "val/fit_rows": 400,
        "val/fit_nll_before": found.report.loss_before,
        "val/fit_nll_after": found.report.loss_after,
        "val/temperature/temperature": found.report.steps[0].values["temperature"],
    }
    assert calls == [(numbers, 7)]


def test_what_is_not_finite_is_left_out():
    nothing_clipped = featcal.parse("clip")
    batch = Batch(torch.eye(3), torch.arange(3), torch.eye(3))
    head = torch.nn.Linear(3, 3, bias=False)
    torch.nn.init.eye_(head.weight)
    nothing_clipped.fit(batch, head)
    assert nothing_clipped.report.noop
    assert "calibration/clip/threshold" not in log({}, nothing_clipped.report)
    assert "calibration/auroc" not in log({}, featcal.evaluate(batch))
    assert log({}, {"a": float("nan"), "b": torch.tensor(2.0)}) == {"calibration/b": 2.0}


def test_what_cannot_be_logged():
    for logger in (None, "runs", torch.nn.Linear(1, 1), object()):
        with pytest.raises(InputError, match=r"logger is a .*looked for: add_scalar .*log_metrics"):
            log(logger, {"ece": 0.25})
    with pytest.raises(InputError, match=r"found is a list: pass what evaluate\(\) or compare"):
        log({}, [0.1])
    with pytest.raises(InputError, match=r"name is 'resnet': a logger takes numbers"):
        log({}, {"name": "resnet"})


@pytest.mark.parametrize("bridge", ["loggers", "lightning"])
def test_no_other_library_is_imported_for_it(bridge):
    text = Path(importlib.util.find_spec(f"featcal.bridges.{bridge}").origin).read_text()
    for name in ("tensorboard", "mlflow", "wandb", "lightning", "pytorch_lightning", "matplotlib"):
        assert f"\nimport {name}" not in text
        assert f"\nfrom {name}" not in text


def test_the_documents_run(found, tmp_path, monkeypatch, shown):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    monkeypatch.chdir(tmp_path)
    (block,) = shown("Loggers")
    names = {"scores": found.scores, "comparison": found.comparison, "report": found.report}
    exec(block, names)
    assert names["numbers"] == {"test/ece": found.scores.metrics["ece"]}
    assert events(tmp_path / "runs").Scalars("calibration/temperature/ece")


def events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


def test_tensorboard(found, tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard", reason="no tensorboard here")
    with tensorboard.SummaryWriter(tmp_path) as writer:
        sent = log(writer, found.scores, step=3)
        log(writer, found.comparison, step=4)
    read = events(tmp_path)
    for name, value in sent.items():
        (event,) = read.Scalars(name)
        assert event.step == 3
        assert event.value == pytest.approx(value, rel=1e-6)
    assert read.Scalars("calibration/temperature/ece")[0].step == 4
    assert sorted(read.Tags()["images"]) == [
        "calibration/none/reliability",
        "calibration/reliability",
        "calibration/temperature/reliability",
    ]
    picture = read.Images("calibration/reliability")[0].encoded_image_string
    assert picture.startswith(b"\x89PNG")


def test_without_matplotlib_the_numbers_are_sent_all_the_same(found, tmp_path, monkeypatch):
    tensorboard = pytest.importorskip("torch.utils.tensorboard", reason="no tensorboard here")
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *_: None if name == "matplotlib" else find(name)
    )
    with tensorboard.SummaryWriter(tmp_path) as writer:
        log(writer, found.scores)
    read = events(tmp_path)
    assert "calibration/ece" in read.Tags()["scalars"]
    assert read.Tags()["images"] == []


@pytest.fixture
def mlflow(tmp_path, monkeypatch):
    module = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    before = module.get_tracking_uri()
    module.set_tracking_uri((tmp_path / "store").as_uri())
    yield module
    module.set_tracking_uri(before)


def test_mlflow(found, mlflow):
    with mlflow.start_run() as run:
        sent = log(mlflow, found.scores, step=2)
        log(mlflow, found.report)
    client = mlflow.MlflowClient()
    stored = client.get_run(run.info.run_id).data.metrics
    assert sent.items() <= stored.items()
    assert stored["calibration/fit_rows"] == 400
    (history,) = client.get_metric_history(run.info.run_id, "calibration/ece")
    assert history.step == 2
    files = [file.path for file in client.list_artifacts(run.info.run_id, "calibration")]
    assert files == ["calibration/reliability-2.png"]


class Sent:
    """A real run that is watched: what it was told is kept beside."""

    def __init__(self, run, monkeypatch):
        self.calls = []
        say = type(run).log

        def watched(this, data, step=None, **more):
            self.calls.append((data, step))
            return say(this, data, step=step, **more)

        monkeypatch.setattr(type(run), "log", watched)


@pytest.fixture
def wandb(monkeypatch):
    module = pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    return module


def test_wandb(found, wandb, tmp_path, monkeypatch):
    run = wandb.init(mode="offline", dir=tmp_path, project="featcal", reinit="finish_previous")
    try:
        seen = Sent(run, monkeypatch)
        sent = log(run, found.scores, step=5)
        numbers, picture = seen.calls
        assert numbers == (sent, 5)
        assert picture[1] == 5
        assert isinstance(picture[0]["calibration/reliability"], wandb.Image)
        log(wandb, found.scores, step=6, prefix="module")  # the module stands for its run
    finally:
        run.finish()
    wandb.teardown()  # waits until all is written
    (store,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert b"calibration/ece" in store.read_bytes()
    assert b"module/ece" in store.read_bytes()
    assert list(tmp_path.glob("wandb/offline-run-*/files/media/images/**/*.png"))


@pytest.fixture
def lightning_loggers():
    return pytest.importorskip("lightning.pytorch.loggers", reason="Lightning is not installed")


def test_lightning_tensorboard(found, lightning_loggers, tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    logger = lightning_loggers.TensorBoardLogger(tmp_path, name="", version="")
    sent = log(logger, found.scores, step=9)
    logger.finalize("success")
    read = events(tmp_path)
    assert read.Scalars("calibration/ece")[0].value == pytest.approx(sent["calibration/ece"])
    assert read.Tags()["images"] == ["calibration/reliability"]


def test_lightning_mlflow(found, mlflow, lightning_loggers, tmp_path):
    logger = lightning_loggers.MLFlowLogger(tracking_uri=(tmp_path / "store").as_uri())
    sent = log(logger, found.scores, step=1)
    stored = logger.experiment.get_run(logger.run_id).data.metrics
    assert stored == pytest.approx(sent)
    files = logger.experiment.list_artifacts(logger.run_id, "calibration")
    assert [file.path for file in files] == ["calibration/reliability-1.png"]


def test_lightning_wandb(found, wandb, lightning_loggers, tmp_path, monkeypatch):
    logger = lightning_loggers.WandbLogger(save_dir=tmp_path, offline=True)
    run = logger.experiment
    try:
        seen = Sent(run, monkeypatch)
        sent = log(logger, found.scores, step=5)
        numbers, picture = (call[0] for call in seen.calls)
        assert numbers == {**sent, "trainer/global_step": 5}
        assert isinstance(picture["calibration/reliability"][0], wandb.Image)
        assert picture["trainer/global_step"] == 5
    finally:
        run.finish()
