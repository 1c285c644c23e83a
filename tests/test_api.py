"""The short path, on a small network that is really trained and overconfident by design."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import featcal
from featcal import Batch, FeatureClip, InputError, Temperature, collect, find_head
from featcal.heads.head import CalibratedHead


class Net(nn.Module):
    def __init__(self, d=10, k=4):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(d, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 32)
        )
        self.fc = nn.Linear(32, k)

    def forward(self, x):
        return self.fc(self.body(x).relu())


def blobs(n, seed):
    """Four clouds that overlap, in ten dimensions."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (n,), generator=draw)
    centres = torch.randn(4, 10, generator=torch.Generator().manual_seed(99)) * 0.7
    return centres[labels] + torch.randn(n, 10, generator=draw), labels


@pytest.fixture(scope="module")
def trained():
    """Trained on 200 samples until it knows them by heart."""
    state = torch.get_rng_state()
    torch.manual_seed(0)
    model, (x, y) = Net(), blobs(200, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(120):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    torch.set_rng_state(state)
    return model


@pytest.fixture
def model(trained):
    return copy.deepcopy(trained)


@pytest.fixture(scope="module")
def loader():
    return DataLoader(TensorDataset(*blobs(1100, 2)), batch_size=128)


def nll(model, x, y):
    model.eval()
    with torch.no_grad():
        return float(F.cross_entropy(model(x), y))


@pytest.mark.parametrize("recipe", ["clip | temperature", "temperature"])
def test_same_class_same_weights_better_probabilities(model, loader, recipe):
    model.train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    random = torch.get_rng_state()
    found = featcal.calibrate(model, loader, recipe)
    assert type(found) is Net
    assert isinstance(found.fc, CalibratedHead)
    assert isinstance(model.fc, nn.Linear)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert all(p.grad is None for p in model.parameters())
    assert found.fc.weight is model.fc.weight
    x, y = blobs(2000, 3)
    assert nll(found, x, y) < nll(model, x, y) - 0.05
    probs = found(x).softmax(-1)
    assert torch.allclose(probs.sum(1), torch.ones(2000))
    assert random.shape == torch.get_rng_state().shape


def test_the_default_recipe_and_a_calibrator_as_recipe(model, loader):
    by_default = featcal.calibrate(model, loader)
    assert by_default.fc.calibrator.report.recipe == "auto"
    by_name = featcal.calibrate(model, loader, "clip | temperature", mode="sequential")
    assert repr(by_name.fc.calibrator) == "clip | temperature"
    assert by_name.fc.calibrator.report.mode == "sequential"
    mine = Temperature()
    by_hand = featcal.calibrate(model, loader, mine)
    assert by_hand.fc.calibrator is mine
    assert mine.report is not None


def test_a_calibrated_model_is_refused_a_second_time(model, loader):
    once = featcal.calibrate(model, loader, "temperature")
    with pytest.raises(InputError, match=r"calibrated already: detach\(model\) first"):
        featcal.calibrate(once, loader, "temperature")
    x, _ = blobs(50, 5)
    again = featcal.calibrate(featcal.detach(once), loader, "temperature")
    assert torch.equal(again.eval()(x), once.eval()(x))


def test_a_bad_recipe_costs_no_pass_over_the_data(model):
    class Never:
        def __iter__(self):
            pytest.fail("the loader was read")

    with pytest.raises(InputError, match="no method is called 'nope'"):
        featcal.calibrate(model, Never(), "nope")


@pytest.mark.gpu
def test_a_model_on_the_gpu_is_calibrated_there(model, loader):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    expected = featcal.calibrate(model, loader, "clip | temperature")
    x, _ = blobs(50, 5)
    with torch.no_grad():
        reference = expected.eval()(x)
    on_gpu = copy.deepcopy(model).cuda()
    found = featcal.calibrate(on_gpu, loader, "clip | temperature").eval()
    with torch.no_grad():
        logits = found(x.cuda())
    assert logits.is_cuda
    torch.testing.assert_close(logits.cpu(), reference, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("rows", "seed"), [(500, 2), (2500, 8)])
def test_the_clip_of_a_small_trained_network_is_the_best_one(model, rows, seed):
    """Two valleys: a shallow one where little is clipped, and the true one far below."""
    (batch,) = collect(model, [blobs(rows, seed)])
    found = FeatureClip().fit(batch, model.fc)

    def score(c):
        with torch.no_grad():
            logits = model.fc(batch.features.clamp(-c, c))
        return float(F.cross_entropy(logits.double(), batch.labels))

    lowest = min(map(score, torch.logspace(-2, math.log10(30), 400).tolist()))
    assert score(float(found.threshold)) <= lowest + 1e-4


@pytest.mark.parametrize("ending", [torch.softmax, torch.log_softmax])
def test_a_model_that_gives_probabilities_is_calibrated_before_its_softmax(model, loader, ending):
    class Soft(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return ending(self.inner(x), 1)

    soft = Soft(model)
    found = featcal.calibrate(soft, loader, "temperature").eval()
    bare = featcal.calibrate(model, loader, "temperature").eval()
    assert isinstance(found, Soft)
    assert isinstance(found.inner.fc, CalibratedHead)
    assert float(found.inner.fc.calibrator.temperature) > 1
    x, _ = blobs(50, 5)
    with torch.no_grad():
        torch.testing.assert_close(found(x), ending(bare(x), 1))
        assert torch.equal(soft.eval()(x), ending(model.eval()(x), 1))
    assert find_head(soft, inputs=x) == "inner.fc"


def test_a_model_that_keeps_another_way_to_its_head_is_refused(model, loader):
    class Sly(Net):
        def __init__(self):
            super().__init__()
            self.parts = [self.fc]  # a plain list: no part of the model, and the layer itself

        def forward(self, x):
            return self.parts[0](self.body(x).relu())

    sly = Sly()
    sly.load_state_dict(model.state_dict())
    with pytest.raises(InputError, match="does not run its own 'fc': the model keeps another ref"):
        featcal.calibrate(sly, loader, "temperature")


def test_two_heads_that_are_averaged_are_calibrated_behind_the_mean(model, loader):
    class Distilled(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.other = inner, nn.Linear(10, 4)

        def forward(self, x):
            return (self.inner(x) + self.other(x)) / 2

    torch.manual_seed(0)
    net = Distilled(model)
    with pytest.raises(InputError, match=r"clip works on features, and no linear layer makes the"):
        featcal.calibrate(net, loader, "clip")
    x, _ = blobs(50, 5)
    for found in (
        featcal.calibrate(net, loader, "temperature"),
        featcal.calibrate(nn.Sequential(net, nn.Identity()), loader, "temperature", head="1"),
    ):
        hot = list(found.buffers())[-1]
        assert float(hot) > 1
        with torch.no_grad():
            torch.testing.assert_close(found.eval()(x), net.eval()(x) / hot)


def test_a_binary_model_with_one_logit():
    torch.manual_seed(0)
    binary, (x, _) = Net(k=1), blobs(2000, 3)
    with torch.no_grad():
        binary.fc.weight.mul_(8)
        draw = torch.Generator().manual_seed(4)
        truth = torch.bernoulli(torch.sigmoid(binary.eval()(x)[:, 0] / 3), generator=draw)
    found = featcal.calibrate(binary, [(x, truth[:, None])], "temperature").eval()
    with torch.no_grad():
        before, after = binary(x), found(x)
        assert after.shape == before.shape
        torch.testing.assert_close(after, before / found.fc.calibrator.temperature)

    def loss(t):
        return float(F.binary_cross_entropy_with_logits(before[:, 0].double() / t, truth.double()))

    best = min(torch.linspace(0.5, 6, 551).tolist(), key=loss)
    assert loss(best) < loss(1) - 0.01
    assert float(found.fc.calibrator.temperature) == pytest.approx(best, abs=0.01)


def test_the_loader_may_have_any_form(model, loader):
    x, y = blobs(300, 2)
    expected = featcal.calibrate(model, [(x, y)], "temperature").eval()
    found = featcal.calibrate(
        model, [(y, x, "note")], "temperature", unpack=lambda batch: (batch[1], batch[0])
    )
    assert torch.equal(found.eval()(x), expected(x))


def test_evaluate_scores_what_the_calibrated_model_gives(model, loader):
    x, y = blobs(1000, 3)
    test, found = collect(model, [(x, y)]), featcal.calibrate(model, loader, "clip | temperature")
    calibrator = found.fc.calibrator
    scores = featcal.evaluate(test, calibrator, model.fc)
    assert scores.n == 1000
    assert scores.metrics["nll"] == pytest.approx(nll(found, x, y), abs=1e-5)
    assert featcal.evaluate(test, head=model.fc).metrics["nll"] == pytest.approx(nll(model, x, y))
    with pytest.raises(InputError, match="head"):
        featcal.evaluate(list(test), calibrator)
    with pytest.raises(InputError, match="features"):
        featcal.evaluate([Batch(test[0].logits, y)], calibrator, model.fc)
