"""The callback in real trainers, of both packages Lightning is published as."""

import copy
import importlib
import pickle
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


def test_a_run_ends_with_a_calibrated_copy(either, rows, tmp_path):
    path = tmp_path / "cal.safetensors"
    logger = either.loggers.CSVLogger(tmp_path, name="", version="")
    wanted = {"recipe": "clip | temperature", "mode": "sequential", "folds": 2, "path": path}
    done = fitted(either, rows, tmp_path, trainer={"logger": logger}, **wanted)
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

    same = featcal.calibrate(module, [(rows.x, rows.y)], "clip | temperature", mode="sequential")
    assert torch.allclose(same(rows.x), expected, atol=1e-5)
    again = featcal.load(path)
    assert all(map(torch.equal, again.buffers(), callback.calibrator.buffers()))
    fresh = net(either)  # as load_from_checkpoint makes it
    fresh.load_state_dict(featcal.detach(callback.model).state_dict())
    saved = featcal.save(callback.model, tmp_path / "model.safetensors")
    for onto in (featcal.load(path, onto=fresh.eval()), featcal.load(saved, onto=fresh)):
        assert type(onto) is type(fresh)
        assert torch.equal(onto(rows.x), callback.model(rows.x))

    logged = last_row(tmp_path / "metrics.csv")
    before, after = (row.scores.metrics for row in callback.comparison)
    assert float(logged["calibration/before/ece"]) == pytest.approx(before["ece"], rel=1e-5)
    assert float(logged["calibration/after/nll"]) == pytest.approx(after["nll"], rel=1e-5)
    assert float(logged["calibration/fit_rows"]) == 400
    assert len(callback.comparison[1].folds) == 2  # rows scored by fits that have not seen them
    assert float(logged["step"]) == done.trainer.global_step


def last_row(path):
    """The last value of every column of a CSVLogger's file."""
    names, *lines = (line.split(",") for line in path.read_text().splitlines())
    found = {}
    for line in lines:
        found |= {name: value for name, value in zip(names, line, strict=True) if value}
    return found


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


def test_a_loader_of_its_own_with_batches_of_another_form(pl, rows, tmp_path):
    own = [(rows.x[:150], rows.y[:150], torch.zeros(150))]
    logger = pl.loggers.CSVLogger(tmp_path, name="", version="")
    unvalidated = {"limit_val_batches": 0, "max_epochs": 1, "logger": logger}
    wanted = {"unpack": lambda batch: (batch[0], batch[1]), "log": False}
    done = fitted(pl, rows, tmp_path, loader=own, trainer=unvalidated, **wanted)
    assert done.callback.calibrator.report.rows == 150
    assert done.callback.comparison is None
    assert not list(tmp_path.rglob("metrics.csv"))


def test_several_validation_loaders_are_refused_before_training(pl, rows, tmp_path):
    module = net(pl, validation_step=lambda self, batch, batch_idx, dataloader_idx=0: None)
    start = state(module)
    with pytest.raises(InputError, match=r"needs one validation loader .* has 2: pass loader="):
        fitted(pl, rows, tmp_path, module=module, val=[rows.val, rows.val])
    assert torch.equal(start["fc.weight"], module.fc.weight)
    with pytest.raises(InputError, match="the trainer has none: pass loader="):
        fitted(pl, rows, tmp_path, trainer={"check_val_every_n_epoch": 5, "max_epochs": 1})


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


class Extra:
    """What a checkpoint may hold that only pickle reads."""


@pytest.mark.parametrize(
    ("kept", "message"),
    [(0, "'best' and no checkpoint was saved: use 'last'"), (1, "holds more than tensors and")],
)
def test_a_checkpoint_that_is_not_there_or_more_than_weights(pl, rows, tmp_path, kept, message):
    """Reading a file that holds more would run what it says."""

    class Keeper(pl.Callback):
        def on_save_checkpoint(self, trainer, pl_module, checkpoint):
            checkpoint["extra"] = Extra()

    best = pl.callbacks.ModelCheckpoint(tmp_path / "ckpt", save_top_k=kept)
    callback = Calibrate("temperature", folds=None, weights="best")
    arguments = {"enable_checkpointing": True, "max_epochs": 1}
    run = trainer_of(pl, [callback, Keeper(), best], tmp_path, **arguments)
    with pytest.raises(InputError, match=message):
        run.fit(net(pl), rows.train, rows.val)


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
def test_precisions_of_the_trainer(pl, rows, tmp_path, precision):
    done = fitted(pl, rows, tmp_path, trainer={"precision": precision, "max_epochs": 1})
    report = done.callback.calibrator.report
    assert report.loss_after <= report.loss_before
    weight = done.module.fc.weight
    given = done.callback.model.eval()(rows.x.to(weight.dtype))
    assert given.dtype in (torch.float32, torch.float64)
    assert bool(given.isfinite().all())


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16-mixed"])
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
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


def test_it_is_a_callback_of_every_lightning_that_is_loaded(either, tmp_path):
    callback = Calibrate("temperature")
    assert isinstance(callback, either.Callback)
    assert isinstance(callback, Calibrate)
    assert type(callback) is type(Calibrate("clip"))
    assert callback in trainer_of(either, callback, tmp_path).callbacks  # without a list
    with pytest.raises(InputError, match=r"nothing is fitted yet: run trainer\.fit first"):
        _ = callback.model


def test_it_can_be_copied_and_pickled_and_stands_beside_another(pl, rows, tmp_path):
    callback = copy.deepcopy(Calibrate("temperature", folds=None))
    callback = pickle.loads(pickle.dumps(callback))
    other = Calibrate("temperature", folds=None)
    trainer_of(pl, [callback, other], tmp_path, max_epochs=1).fit(net(pl), rows.train, rows.val)
    assert torch.equal(callback.calibrator.temperature, other.calibrator.temperature)


def test_without_any_lightning_the_extra_is_named(monkeypatch):
    for name in ("lightning", *PACKAGES):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InputError, match=r"needs Lightning: pip install 'featcal\[lightning\]'"):
        Calibrate()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("cuts", [None, (0, 400)])
def test_two_processes_give_the_fit_of_one(pl, rows, tmp_path, cuts):
    """Two processes under Lightning's DDP, with weights that the training leaves as they are.

    The trainer's own loader is shared out by rows; one of ours by batches, of which one gets none.
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


def test_the_documents_run(pl, rows, tmp_path, monkeypatch, shown):
    monkeypatch.chdir(tmp_path)
    trainer = partial(trainer_of, pl, tmp_path=tmp_path, max_epochs=1)
    names = {"Trainer": trainer, "module": net(pl), "train_loader": rows.train}
    (block,) = shown("Lightning")
    exec(block, {**names, "val_loader": rows.val, "x": rows.x})
    assert featcal.load(tmp_path / "cal.safetensors").report.rows == 400
