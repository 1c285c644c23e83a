"""The callback in real trainers, of both packages Lightning is published as."""

import copy
import importlib
import pickle
import subprocess
import sys
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import featcal
from featcal import InputError
from featcal.bridges.lightning import Calibrate
from featcal.core.calibrator import CalibratedHead

PACKAGES = ["lightning.pytorch", "pytorch_lightning"]
pytestmark = [  # Lightning's advice on loaders, and what it uses of torch that has a new name
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning"),
]


def package(name):
    found = pytest.importorskip(name, reason=f"{name} is not installed")
    importlib.import_module(f"{name}.loggers")
    importlib.import_module(f"{name}.callbacks")
    return found


@pytest.fixture(scope="module", params=PACKAGES)
def either(request):
    return package(request.param)


@pytest.fixture(scope="module")
def pl():
    return package(PACKAGES[0])


@pytest.fixture(scope="module")
def rows():
    """Labels drawn from logits that a network trained on them without end would overstate."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(600, 6, generator=draw)
    weight = torch.randn(6, 3, generator=draw)
    noise = torch.randn(600, 3, generator=draw) * 2
    y = (x @ weight + noise).argmax(1)
    return SimpleNamespace(
        train=DataLoader(TensorDataset(x[:200], y[:200]), batch_size=50),
        val=DataLoader(TensorDataset(x[200:], y[200:]), batch_size=64),
        x=x[200:],
        y=y[200:],
    )


def net(pl, **methods):
    """A module that learns fast and grows too sure, with dropout and batch norm on the way."""

    class Net(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(
                nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1)
            )
            self.fc = nn.Linear(32, 3)

        def forward(self, x):
            return self.fc(self.body(x))

        def training_step(self, batch):
            return F.cross_entropy(self(batch[0]), batch[1])

        def validation_step(self, batch):
            loss = F.cross_entropy(self(batch[0]), batch[1])
            self.log("val_loss", loss, sync_dist=True)

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.05)

    torch.manual_seed(0)
    for name, method in methods.items():
        setattr(Net, name, method)
    return Net()


def trainer_of(pl, callbacks, tmp_path, **arguments):
    quiet = {
        **{"max_epochs": 2, "accelerator": "cpu", "devices": 1, "logger": False},
        **{"enable_progress_bar": False, "enable_model_summary": False},
        **{"enable_checkpointing": False, "num_sanity_val_steps": 0, "log_every_n_steps": 1},
    }
    return pl.Trainer(**{**quiet, **arguments}, callbacks=callbacks, default_root_dir=str(tmp_path))


def fitted(pl, rows, tmp_path, *, module=None, val=None, trainer=None, **arguments):
    callback = Calibrate(**{"recipe": "temperature", "folds": None, **arguments})
    module = net(pl) if module is None else module
    run = trainer_of(pl, [callback], tmp_path, **(trainer or {}))
    run.fit(module, rows.train, rows.val if val is None else val)
    return SimpleNamespace(callback=callback, module=module, trainer=run)


def state(module):
    return {key: value.clone() for key, value in module.state_dict().items()}


# --- a whole run -----------------------------------------------------------------------------


def test_a_run_ends_with_a_calibrated_copy(either, rows, tmp_path):
    path = tmp_path / "cal.safetensors"
    logger = either.loggers.CSVLogger(tmp_path, name="", version="")
    done = fitted(
        either,
        rows,
        tmp_path,
        recipe="clip | temperature",
        mode="sequential",
        folds=2,
        path=path,
        trainer={"logger": logger},
    )
    callback, module = done.callback, done.module
    assert callback.calibrator.report.rows == 400
    assert callback.calibrator.report.loss_after < callback.calibrator.report.loss_before

    module.eval()
    with torch.no_grad():
        expected = callback.calibrator(module.body(rows.x), module.fc)
        assert torch.equal(callback.model(rows.x), expected)
    assert type(callback.model) is type(module)
    assert isinstance(callback.model.fc, CalibratedHead)
    assert isinstance(module.fc, nn.Linear)
    assert callback.model.body is module.body

    same = featcal.calibrate(module, [(rows.x, rows.y)], mode="sequential")
    assert torch.allclose(same(rows.x), expected, atol=1e-5)
    again = featcal.load(path)
    assert all(map(torch.equal, again.buffers(), callback.calibrator.buffers()))

    logged = last_row(tmp_path / "metrics.csv")
    before, after = (row.scores.metrics for row in callback.comparison)
    assert float(logged["calibration/before/ece"]) == pytest.approx(before["ece"], rel=1e-5)
    assert float(logged["calibration/after/nll"]) == pytest.approx(after["nll"], rel=1e-5)
    assert float(logged["calibration/fit_rows"]) == 400
    assert float(logged["step"]) == done.trainer.global_step


def last_row(path):
    """The last value of every column of a CSVLogger's file."""
    names, *lines = (line.split(",") for line in path.read_text().splitlines())
    found = {}
    for line in lines:
        found |= {name: value for name, value in zip(names, line, strict=True) if value}
    return found


def test_the_scores_are_those_of_rows_a_fit_has_not_seen(pl, rows, tmp_path):
    callback = fitted(pl, rows, tmp_path, recipe="isotonic", folds=4).callback
    none, after = callback.comparison
    assert none.scores.metrics["nll"] == pytest.approx(callback.calibrator.report.loss_before)
    assert after.scores.metrics["nll"] > callback.calibrator.report.loss_after
    assert len(after.folds) == 4
    assert after.scores.n == 400


def test_the_module_and_the_random_state_stay_as_they_are(pl, rows, tmp_path):
    """A run with the callback trains the same weights as one without, and leaves nothing behind."""
    plain = net(pl)
    trainer_of(pl, [], tmp_path).fit(plain, rows.train, rows.val)
    random = torch.get_rng_state()
    done = fitted(pl, rows, tmp_path)
    assert torch.equal(torch.get_rng_state(), random)
    left, right = state(plain), state(done.module)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[key], right[key]) for key in left)
    assert {m.training for m in plain.modules()} == {m.training for m in done.module.modules()}
    assert done.module.trainer is done.trainer


def test_tensorboard_gets_pictures(pl, rows, tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = pl.loggers.TensorBoardLogger(tmp_path, name="", version="")
    fitted(pl, rows, tmp_path, folds=2, trainer={"logger": logger, "max_epochs": 1})
    tags = EventAccumulator(str(tmp_path)).Reload().Tags()
    assert "calibration/temperature/temperature" in tags["scalars"]
    assert sorted(tags["images"]) == [f"calibration/{w}/reliability" for w in ("after", "before")]


def test_nothing_is_logged_or_scored_when_not_wanted(pl, rows, tmp_path):
    logger = pl.loggers.CSVLogger(tmp_path, name="", version="")
    done = fitted(pl, rows, tmp_path, log=False, trainer={"logger": logger, "max_epochs": 1})
    assert done.callback.comparison is None
    assert "calibration" not in (tmp_path / "metrics.csv").read_text()


# --- which data ------------------------------------------------------------------------------


def test_a_loader_of_its_own(pl, rows, tmp_path):
    own = [{"x": rows.x[:150], "labels": rows.y[:150]}]
    done = fitted(pl, rows, tmp_path, loader=own, trainer={"limit_val_batches": 0})
    assert done.callback.calibrator.report.rows == 150


def test_the_whole_validation_loader_whatever_its_limit(pl, rows, tmp_path):
    done = fitted(pl, rows, tmp_path, trainer={"limit_val_batches": 1})
    assert done.callback.calibrator.report.rows == 400


def test_a_batch_of_another_form_is_unpacked(pl, rows, tmp_path):
    own = [(rows.x, rows.y, torch.zeros(400))]
    done = fitted(pl, rows, tmp_path, loader=own, unpack=lambda batch: (batch[0], batch[1]))
    assert done.callback.calibrator.report.rows == 400


def test_a_data_module(pl, rows, tmp_path):
    class Data(pl.LightningDataModule):
        def train_dataloader(self):
            return rows.train

        def val_dataloader(self):
            return {"only": rows.val}

    callback = Calibrate("temperature", folds=None)
    trainer_of(pl, [callback], tmp_path, max_epochs=1).fit(net(pl), datamodule=Data())
    assert callback.calibrator.report.rows == 400


@pytest.mark.parametrize("named", [True, False])
def test_several_validation_loaders_are_refused_before_training(pl, rows, tmp_path, named):
    val = {"near": rows.val, "far": rows.val} if named else [rows.val, rows.val]
    names = "2, near, far" if named else "2, 0, 1"
    module = net(pl, validation_step=lambda self, batch, batch_idx, dataloader_idx=0: None)
    start = state(module)
    with pytest.raises(InputError, match=f"needs one validation loader .* has {names}: pass load"):
        fitted(pl, rows, tmp_path, module=module, val=val)
    assert torch.equal(start["fc.weight"], module.fc.weight)


def test_batches_come_as_a_validation_step_gets_them(pl, rows, tmp_path):
    """Hooks that prepare batches run, and see validation, where they would not augment."""

    def prepared(self, batch, dataloader_idx):
        assert self.trainer.validating or self.trainer.training
        x, y = batch
        return (x + 0.1 * torch.randn_like(x) if self.trainer.training else x * 0.7), y

    module = net(pl, on_after_batch_transfer=prepared)
    done = fitted(pl, rows, tmp_path, module=module)
    module.eval()
    same = featcal.parse("temperature").fit(featcal.Batch(module(rows.x * 0.7).detach(), rows.y))
    assert torch.allclose(done.callback.calibrator.temperature, same.temperature, rtol=1e-4)
    assert not done.trainer.validating


# --- which weights ---------------------------------------------------------------------------


def test_weights_that_other_callbacks_put_in_last_are_the_ones_calibrated(pl, rows, tmp_path):
    class Averaged(pl.Callback):
        def on_train_end(self, trainer, pl_module):
            with torch.no_grad():
                pl_module.fc.weight.mul_(3)

    module, callback = net(pl), Calibrate("temperature", folds=None)
    trainer_of(pl, [callback, Averaged()], tmp_path).fit(module, rows.train, rows.val)
    module.eval()
    batch = featcal.Batch(module(rows.x).detach(), rows.y)
    same = featcal.parse("temperature").fit(batch)
    assert torch.allclose(callback.calibrator.temperature, same.temperature, rtol=1e-4)


def test_the_best_checkpoint(pl, rows, tmp_path):
    best = pl.callbacks.ModelCheckpoint(tmp_path / "ckpt", monitor="val_loss")
    module, callback = net(pl), Calibrate("temperature", folds=None, weights="best")
    arguments = {"enable_checkpointing": True, "max_epochs": 8}
    trainer_of(pl, [callback, best], tmp_path, **arguments).fit(module, rows.train, rows.val)
    saved = torch.load(best.best_model_path, weights_only=True)["state_dict"]
    assert not torch.equal(saved["fc.weight"], module.fc.weight)
    assert torch.equal(saved["fc.weight"], featcal.detach(callback.model).fc.weight)
    assert callback.model.body is not module.body


def test_a_run_that_saved_no_checkpoint_has_no_best_one(pl, rows, tmp_path):
    none = pl.callbacks.ModelCheckpoint(tmp_path / "ckpt", save_top_k=0)
    callback = Calibrate("temperature", weights="best")
    run = trainer_of(pl, [callback, none], tmp_path, enable_checkpointing=True, max_epochs=1)
    with pytest.raises(InputError, match=r"'best' and no checkpoint was saved: use 'last'"):
        run.fit(net(pl), rows.train, rows.val)


def test_a_checkpoint_that_is_more_than_weights_is_not_read(pl, rows, tmp_path):
    """Reading such a file would run what it says."""

    class Keeper(pl.Callback):
        def on_save_checkpoint(self, trainer, pl_module, checkpoint):
            checkpoint["extra"] = SimpleNamespace()

    best = pl.callbacks.ModelCheckpoint(tmp_path / "ckpt")
    callback = Calibrate("temperature", folds=None, weights="best")
    run = trainer_of(pl, [callback, Keeper(), best], tmp_path, enable_checkpointing=True)
    with pytest.raises(InputError, match=r"holds more than tensors and plain values"):
        run.fit(net(pl), rows.train, rows.val)


# --- precision -------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_precisions_of_the_trainer(pl, rows, tmp_path, precision):
    done = fitted(pl, rows, tmp_path, trainer={"precision": precision, "max_epochs": 1})
    report = done.callback.calibrator.report
    assert report.loss_after <= report.loss_before
    weight = done.module.fc.weight
    given = done.callback.model.eval()(rows.x.to(weight.dtype))
    assert given.dtype in (torch.float32, torch.float64)
    assert bool(given.isfinite().all())


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_trainer_on_a_gpu(either, rows, tmp_path, precision):
    """The work is done on the GPU, and everything is back in main memory afterwards."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    seen = set()
    module = net(either)
    module.fc.register_forward_hook(lambda layer, given, _: seen.add(given[0].device.type))
    arguments = {"accelerator": "gpu", "precision": precision}
    done = fitted(either, rows, tmp_path, module=module, folds=2, trainer=arguments)
    assert seen == {"cuda"}
    assert {value.device.type for value in done.callback.model.state_dict().values()} == {"cpu"}
    model = done.callback.model.eval()
    batch = featcal.Batch(featcal.detach(model)(rows.x).detach(), rows.y)
    same = featcal.parse("temperature").fit(batch)
    assert torch.allclose(done.callback.calibrator.temperature, same.temperature, rtol=0.01)
    module.cuda()
    moved = done.callback.model.eval()
    with torch.no_grad():
        assert torch.allclose(moved(rows.x.cuda()).cpu(), model.cpu()(rows.x), atol=1e-4)


# --- refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"recipe": "temprature"}, "did you mean temperature"),
        ({"recipe": "density"}, "density needs training rows: fit it by hand"),
        ({"mode": "both"}, "mode is 'both': choose joint or sequential"),
        ({"weights": "ema"}, "weights is 'ema': choose last or best"),
        ({"folds": 1}, "folds is 1: give a whole number from 2 up"),
        ({"log": "yes"}, "log is 'yes': give True or False"),
    ],
)
def test_arguments_that_cannot_be_used(pl, arguments, message):
    with pytest.raises(InputError, match=message):
        Calibrate(**arguments)


def test_what_would_fail_at_the_end_fails_at_the_start(pl, rows, tmp_path):
    (tmp_path / "taken").touch()
    module = net(pl)
    start = state(module)
    for arguments, trainer, message in [
        ({"head": "top"}, {}, "head 'top' is not a module"),
        ({}, {"limit_val_batches": 0}, "the trainer runs no validation: pass loader="),
        ({"weights": "best"}, {}, "add a ModelCheckpoint"),
        ({"path": tmp_path / "taken"}, {}, "taken exists: choose another path, or overwrite=True"),
    ]:
        with pytest.raises(InputError, match=message):
            fitted(pl, rows, tmp_path, module=module, trainer=trainer, **arguments)
    assert all(torch.equal(value, start[key]) for key, value in state(module).items())


def test_sharded_weights_are_refused_at_the_start(pl):
    class FSDPStrategy:
        """Stands in for Lightning's, which wants a GPU."""

    trainer = SimpleNamespace(
        strategy=FSDPStrategy(), enable_validation=True, checkpoint_callback=None
    )
    with pytest.raises(InputError, match=r"FSDPStrategy leaves a process only a part of the"):
        Calibrate().on_fit_start(trainer, net(pl))


def test_a_run_whose_validation_never_came(pl, rows, tmp_path):
    with pytest.raises(InputError, match="the trainer has none: pass loader="):
        fitted(pl, rows, tmp_path, trainer={"check_val_every_n_epoch": 5, "max_epochs": 1})


def test_before_the_fit_there_is_no_model(pl):
    callback = Calibrate()
    assert callback.calibrator.report is None
    with pytest.raises(InputError, match=r"nothing is fitted yet: run trainer\.fit first"):
        _ = callback.model


# --- the callback as such --------------------------------------------------------------------


def test_it_is_a_callback_of_every_lightning_that_is_loaded(either):
    callback = Calibrate("temperature")
    assert isinstance(callback, either.Callback)
    assert isinstance(callback, Calibrate)
    assert type(callback) is type(Calibrate("clip"))


def test_it_can_be_copied_and_pickled_and_stands_beside_another(pl, rows, tmp_path):
    callback = copy.deepcopy(Calibrate("temperature", folds=None))
    callback = pickle.loads(pickle.dumps(callback))
    other = Calibrate("temperature", folds=None)
    trainer_of(pl, [callback, other], tmp_path, max_epochs=1).fit(net(pl), rows.train, rows.val)
    assert torch.equal(callback.calibrator.temperature, other.calibrator.temperature)


def test_one_callback_needs_no_list(pl, tmp_path):
    callback = Calibrate()
    assert callback in trainer_of(pl, callback, tmp_path).callbacks


def test_without_any_lightning_the_extra_is_named(monkeypatch):
    for name in ("lightning", *PACKAGES):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InputError, match=r"needs Lightning: pip install 'featcal\[lightning\]'"):
        Calibrate()


def test_no_lightning_is_imported_for_it():
    probe = (
        "import sys, featcal.bridges.lightning\n"
        "print([n for n in sys.modules if n.split('.')[0] in ('lightning', 'pytorch_lightning')])"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", probe], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[]", done.stderr


# --- two processes ---------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("cuts", [None, (0, 100, 150, 400), (0, 400)])
def test_two_processes_give_the_fit_of_one(pl, rows, tmp_path, cuts):
    """Two processes under Lightning's DDP, with weights that the training leaves as they are.

    The trainer's own loader is shared out by rows; one of ours by batches, three or a single one.
    """
    if torch.cuda.is_available():
        pytest.skip("a process that has used CUDA cannot be forked")
    one = net(pl).eval()
    expected = featcal.parse("temperature").fit(featcal.Batch(one(rows.x).detach(), rows.y))
    path = tmp_path / "cal.safetensors"
    two = {"devices": 2, "strategy": "ddp_fork", "max_epochs": 1}
    optimizer = {"configure_optimizers": lambda self: torch.optim.SGD(self.parameters(), lr=0.0)}
    module = net(pl, **optimizer)
    module.body[1].momentum = 0.0
    loader = cuts and [(rows.x[a:b], rows.y[a:b]) for a, b in pairwise(cuts)]
    done = fitted(pl, rows, tmp_path, module=module, path=path, trainer=two, loader=loader, folds=2)
    assert done.callback.calibrator.report is None  # this process has only waited
    found = featcal.load(path)
    assert found.report.rows == 400
    assert found.report.loss_after == pytest.approx(expected.report.loss_after, abs=1e-6)
    assert torch.allclose(found.temperature, expected.temperature, rtol=1e-5)


# --- the documents ---------------------------------------------------------------------------


def test_the_documents_run(pl, rows, tmp_path, monkeypatch, shown):
    monkeypatch.chdir(tmp_path)
    trainer = partial(trainer_of, pl, tmp_path=tmp_path, max_epochs=1)
    names = {"Trainer": trainer, "module": net(pl), "train_loader": rows.train}
    (block,) = shown("Lightning")
    exec(block, {**names, "val_loader": rows.val, "x": rows.x})
    assert featcal.load(tmp_path / "cal.safetensors").report.rows == 400
