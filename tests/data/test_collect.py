"""What `collect` keeps, of which models, and that everything is as it was afterwards."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from featcal import FeatureClip, InputError, Temperature, attach, collect
from featcal.core.progress import listen

# The labels here follow no network, so that a temperature may end at its cap.
pytestmark = pytest.mark.filterwarnings("ignore::featcal.CalibrationWarning")


class Net(nn.Module):
    """A body with BatchNorm and dropout, and a head; `give` says what comes out of it."""

    def __init__(self, give=lambda net, h: net.fc(h), classes=3):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.5))
        self.fc = nn.Linear(4, classes)
        self.give = give

    def forward(self, x):
        return self.give(self, self.body(x))


@pytest.fixture(autouse=True)
def _weights():
    torch.manual_seed(0)


@pytest.fixture
def net():
    return Net()


@pytest.fixture
def x():
    return torch.randn(10, 5, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def y():
    return torch.arange(10) % 3


def parts(x, y, size=4):
    return [(x[i : i + size], y[i : i + size]) for i in range(0, len(x), size)]


def joined(data, name):
    return torch.cat([getattr(batch, name) for batch in data])


@torch.no_grad()
def by_hand(net, x):
    """Features and logits of the model in eval mode, written out."""
    linear, norm = net.body[0], net.body[1]
    h = x @ linear.weight.T + linear.bias
    h = (h - norm.running_mean) / (norm.running_var + norm.eps).sqrt() * norm.weight + norm.bias
    return h.relu(), h.relu() @ net.fc.weight.T + net.fc.bias


# --- what is kept -----------------------------------------------------------------------------


def test_features_logits_and_labels_are_those_of_the_model(net, x, y):
    data = collect(net, parts(x, y))
    features, logits = by_hand(net, x)
    torch.testing.assert_close(joined(data, "features"), features)
    torch.testing.assert_close(joined(data, "logits"), logits)
    assert torch.equal(joined(data, "labels"), y)
    assert (data.rows, data.path, data.layer) == (10, "fc", None)
    assert [len(batch) for batch in data] == [4, 4, 2]
    torch.testing.assert_close(data.head(features), logits)


@pytest.mark.parametrize(
    "batches",
    [
        lambda x, y: [[x, y]],
        lambda x, y: DataLoader(TensorDataset(x, y), batch_size=4),
        lambda x, y: ((a, b.tolist()) for a, b in parts(x, y)),
        lambda x, y: [(x, y.numpy())],
        lambda x, y: [(x, y.int())],
        lambda x, y: [{"x": x, "labels": y, "idx": y}],
        lambda x, y: iter([{"anything": x, "target": y.numpy()}]),
    ],
)
def test_every_form_of_loader_gives_the_same(net, x, y, batches):
    data = collect(net, batches(x, y))
    assert torch.equal(joined(data, "labels").long(), y)
    torch.testing.assert_close(joined(data, "logits"), by_hand(net, x)[1])
    Temperature().fit(data, data.head)


def test_unpack(net, x, y):
    data = collect(net, [(x, "note", y)], unpack=lambda batch: (batch[0], batch[2]))
    assert torch.equal(data[0].labels, y)


def test_several_inputs(x, y):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(5, 3)

        def forward(self, left, right):
            return self.out(left - right)

    net = Two()
    for inputs in ((x, x + 1), [x, x + 1], {"right": x + 1, "left": x}):
        data = collect(net, [(inputs, y)])
        torch.testing.assert_close(data[0].features, torch.full((10, 5), -1.0))
    data = collect(net, [{"left": x, "right": x + 1, "label": y, "weight": y}])
    torch.testing.assert_close(data[0].features, torch.full((10, 5), -1.0))


def test_what_is_kept_is_a_copy_of_its_own(x, y):
    """A view of one token would keep every token; a loader may fill its tensors again."""

    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(5, 3)

        def forward(self, tokens):
            return self.fc(tokens[:, 0])

    buffer, labels = torch.zeros(10, 100, 5), y.clone()

    def refilled():
        for place in range(3):
            buffer.fill_(place)
            labels.fill_(place)
            yield buffer, labels

    data = collect(Tokens(), refilled())
    for place, batch in enumerate(data):
        assert bool((batch.features == place).all())
        assert bool((batch.labels == place).all())
        for part in (batch.features, batch.logits, batch.labels):
            assert part.untyped_storage().nbytes() == part.nbytes


ENDINGS = [lambda z: z, lambda z: z.softmax(1), lambda z: {"logits": z.log_softmax(1)}]


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_logits_are_those_before_a_softmax(x, y, ending):
    net = Net(lambda net, h: ending(net.fc(h)))
    torch.testing.assert_close(collect(net, [(x, y)])[0].logits, by_hand(net, x)[1])


@pytest.mark.parametrize("shape", [(-1, 1), (-1,)])
@pytest.mark.parametrize("labels", [torch.Tensor.long, torch.Tensor.bool, torch.Tensor.float])
def test_a_single_logit_is_kept_as_two(x, y, shape, labels):
    net = Net(lambda net, h: net.fc(h).reshape(shape), classes=1)
    truth = (y > 0).long()
    for form in (labels(truth), labels(truth)[:, None]):
        data = collect(net, [(x, form)])
        z = by_hand(net, x)[1]
        torch.testing.assert_close(data[0].logits, torch.cat([torch.zeros(10, 1), z], 1))
        assert torch.equal(data[0].labels, truth)
        torch.testing.assert_close(data.head(data[0].features), data[0].logits)


def test_a_convolution_of_one_pixel(y):
    net = nn.Sequential(nn.Conv2d(5, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Conv2d(4, 3, 1))
    net.append(nn.Flatten())
    images = torch.randn(10, 5, 4, 4)
    data = collect(net, [(images, y)])
    assert data.path == "2"
    with torch.no_grad():
        assert torch.equal(data[0].features, net[1](net[0](images)).flatten(1))
        assert torch.equal(data[0].logits, net(images))
    assert isinstance(data.head, nn.Linear)


def test_a_head_of_whole_samples(y):
    """SqueezeNet's: convolution, ReLU, mean."""
    head = nn.Sequential(nn.Dropout(), nn.Conv2d(5, 3, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    net = nn.Sequential(nn.Conv2d(2, 5, 3), head, nn.Flatten()).eval()
    images = torch.randn(10, 2, 5, 5)
    data = collect(net, [(images, y)], head="1")
    assert data[0].features.shape == (10, 5 * 3 * 3)
    found = attach(net, FeatureClip().assign(threshold=0.1), head="1")
    with torch.no_grad():
        expected = net[1](net[0](images).clamp(-0.1, 0.1)).flatten(1)
        torch.testing.assert_close(found(images), expected)
        torch.testing.assert_close(data.head(data[0].features.clamp(-0.1, 0.1)), expected)


class Causal(nn.Module):
    """Scores every token, and returns the scores of the last one that is not padding."""

    def __init__(self, score):
        super().__init__()
        self.embed, self.score = nn.Embedding(9, 5), score

    def forward(self, ids):
        scores = self.score(self.embed(ids))
        return scores[torch.arange(len(ids)), (ids > 0).sum(1) - 1]


@pytest.mark.parametrize(
    "score",
    [
        nn.Linear(5, 3, bias=False),
        nn.Sequential(nn.Dropout(), nn.Linear(5, 3)),
        nn.Linear(5, 1),
    ],
)
def test_the_one_token_that_is_kept(score, y):
    net = Causal(score).eval()
    ids = torch.randint(1, 9, (10, 7))
    ids[torch.arange(7) >= torch.randint(1, 8, (10, 1))] = 0
    last = net.embed(ids)[torch.arange(10), (ids > 0).sum(1) - 1]
    data = collect(net, [(ids, y.clamp(max=1))], head="score")
    assert torch.equal(data[0].features, last)
    found = attach(net, FeatureClip().assign(threshold=0.2), head="score")
    with torch.no_grad():
        logits = found(ids)
        torch.testing.assert_close(logits, score(last.clamp(-0.2, 0.2)))


def test_a_calibrated_model_is_collected_with_its_calibrated_logits(net, x, y):
    found = attach(net, Temperature().assign(temperature=2.0))
    data = collect(found, [(x, y)])
    features, logits = by_hand(net, x)
    torch.testing.assert_close(data[0].logits, logits / 2)
    torch.testing.assert_close(data[0].features, features)
    torch.testing.assert_close(data.head(features), logits / 2)


# --- precision --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_half_precision_gets_its_own_type(net, x, y, dtype):
    data = collect(net.to(dtype), [(x, y)])
    assert data[0].features.dtype == dtype
    assert data[0].logits.dtype == dtype
    assert data.head.weight.dtype == torch.float32
    (FeatureClip() | Temperature()).fit(data, data.head)


def test_autocast_is_respected(net, x, y):
    with torch.autocast("cpu", torch.bfloat16):
        data = collect(net, [(x, y)])
    assert data[0].logits.dtype == torch.bfloat16
    assert collect(net, [(x, y)])[0].logits.dtype == torch.float32
    assert Temperature().fit(data, data.head).report.rows == 10


@pytest.mark.gpu
def test_a_model_on_the_gpu_gets_its_inputs_there_and_the_results_come_back(net, x, y):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    expected = collect(net, parts(x, y))
    state = torch.cuda.get_rng_state()
    data = collect(net.cuda(), parts(x, y))
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert data.head.weight.is_cuda
    for name in ("features", "logits", "labels"):
        assert joined(data, name).device.type == "cpu"
        torch.testing.assert_close(joined(data, name), joined(expected, name), rtol=1e-3, atol=1e-3)
    with torch.autocast("cuda", torch.float16):
        assert collect(net, parts(x, y))[0].logits.dtype == torch.float16


def test_nan_is_for_the_fit_to_name(net, x, y):
    x = x.clone()
    x[3] = float("nan")
    data = collect(net, parts(x, y))
    with pytest.raises(InputError, match=r"NaN or infinite in row 3"):
        Temperature().fit(data, data.head)


# --- everything as it was ---------------------------------------------------------------------


class Noisy(Dataset):
    """Draws from every generator there is."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, place):
        noise = random.random() + np.random.rand() + float(torch.rand(()))
        return self.x[place] + noise, self.y[place]


def snapshot(net):
    return (
        [part.training for part in net.modules()],
        {key: value.clone() for key, value in net.state_dict().items()},
        [None if p.grad is None else p.grad.clone() for p in net.parameters()],
        (torch.get_rng_state(), random.getstate(), np.random.get_state()),
        [len(part._forward_hooks) + len(part._forward_pre_hooks) for part in net.modules()],
        torch.is_grad_enabled(),
    )


def same(first, second):
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, np.ndarray):
        return np.array_equal(first, second)
    if isinstance(first, dict):
        return same(list(first.items()), list(second.items()))
    if isinstance(first, (list, tuple)):
        pairs = zip(first, second, strict=True)
        return len(first) == len(second) and all(same(a, b) for a, b in pairs)
    return first == second


@pytest.fixture
def unsettled(net, x):
    """In the middle of training: mixed flags, and gradients that are not used yet."""
    net.train()
    net.body[1].eval()
    net.fc.eval()
    net(x).sum().backward()
    net.body[0].bias.grad = None
    return net


@pytest.mark.parametrize("layer", [None, "body.2"])
def test_the_model_and_every_generator_are_as_they_were(unsettled, x, y, layer):
    before = snapshot(unsettled)
    loader = DataLoader(Noisy(x, y), batch_size=4, shuffle=True)
    collect(unsettled, loader, layer=layer)
    assert same(snapshot(unsettled), before)


def test_a_second_run_sees_the_same_rows(net, x, y):
    loader = DataLoader(Noisy(x, y), batch_size=4, shuffle=True)
    first, second = collect(net, loader), collect(net, loader)
    assert torch.equal(joined(first, "features"), joined(second, "features"))


def broken(x, y):
    yield x, y
    raise OSError("the disk is gone")


@pytest.mark.parametrize(
    ("give", "loader", "error"),
    [
        (lambda net, h: net.fc(h[:, :2]), lambda x, y: [(x, y)], RuntimeError),
        (lambda net, h: net.fc(h), broken, OSError),
        (lambda net, h: net.fc(h), lambda x, y: [(x, y), (x, y[:3])], InputError),
        (lambda net, h: net.fc(h), lambda x, y: [(x, y), (x[:, :2], y)], RuntimeError),
        (lambda net, h: 2 * net.fc(h), lambda x, y: [(x, y)], InputError),
        (lambda net, h: net.fc(h), lambda x, y: [(x, y), 3], InputError),
    ],
)
def test_all_is_as_it_was_after_an_error_too(unsettled, x, y, give, loader, error):
    before = snapshot(unsettled)
    unsettled.give = give
    with pytest.raises(error):
        collect(unsettled, loader(x, y))
    assert same(snapshot(unsettled), before)


def test_nothing_that_is_kept_asks_for_a_gradient(net, x, y):
    data = collect(net, parts(x.requires_grad_(), y))
    assert not any(joined(data, name).requires_grad for name in ("features", "logits"))
    assert x.grad is None


# --- refusals ---------------------------------------------------------------------------------


def test_empty_loaders(net):
    for empty in ([], iter(()), DataLoader(TensorDataset(torch.zeros(0, 5)), batch_size=2)):
        with pytest.raises(InputError, match="loader is empty: pass held-out data"):
            collect(net, empty)


def test_what_is_no_loader(net):
    with pytest.raises(InputError, match="loader is a NoneType: pass an iterable"):
        collect(net, None)


def test_a_wrong_path_and_a_wrapped_model_are_refused_before_the_loader_runs(net):
    def never():
        pytest.fail("the loader was read")
        yield

    with pytest.raises(InputError, match="head 'nope' is not a module"):
        collect(net, never(), head="nope")
    with pytest.raises(InputError, match="layer 'nope' is not a module"):
        collect(net, never(), layer="nope")
    with pytest.raises(InputError, match="wrapped in DataParallel"):
        collect(nn.DataParallel(net), never())


def test_a_head_that_runs_twice(x, y):
    net = Net(lambda net, h: (net.fc(h * 2), net.fc(h))[1])
    with pytest.raises(InputError, match="'fc' ran 2 times in one forward pass, not once"):
        collect(net, [(x, y)])


def test_labels_of_another_number(net, x, y):
    with pytest.raises(InputError, match="'fc' works on 10 rows for 4 labels: name a layer"):
        collect(net, [(x, y[:4])])


def test_a_score_for_every_token_and_none_chosen(y):
    net = nn.Sequential(nn.Linear(5, 3))
    with pytest.raises(InputError, match="'0' works on 70 rows for 10 labels"):
        collect(net, [(torch.randn(10, 7, 5), y)])


def test_a_head_of_whole_samples_that_gives_more_than_a_row(y):
    net = nn.Sequential(nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)))
    with pytest.raises(InputError, match=r"values of shape \(7, 3\) for a sample"):
        collect(net, [(torch.randn(10, 7, 5), y)], head="0")


def test_a_head_that_takes_more_than_its_features(x, y):
    class Two(nn.Linear):
        def forward(self, x, scale=1.0):
            return super().forward(x) * scale

    by_place = Net(lambda net, h: net.fc(h, 2.0))
    by_place.fc = Two(4, 3)
    by_name = Net(lambda net, h: net.fc(input=h))
    for net in (by_place, by_name):
        with pytest.raises(InputError, match="something else than one tensor by position"):
            collect(net, [(x, y)])


def test_a_head_whose_features_are_changed_by_a_hook_is_refused(net, x, y):
    """The features that are kept are those behind the hook, and it would act on them again."""
    net.fc.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 3,))
    with pytest.raises(InputError, match=r"head\(features\) differs from the stored logits"):
        collect(net, [(x, y)])


# --- progress ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loader", "told"),
    [
        (lambda x, y: DataLoader(TensorDataset(x, y), 4), [(4, 10), (8, 10), (10, 10)]),
        (lambda x, y: DataLoader(TensorDataset(x, y), 4, drop_last=True), [(4, 8), (8, 8)]),
        (lambda x, y: DataLoader(TensorDataset(x, y), 4, sampler=range(6)), [(4, 6), (6, 6)]),
        (parts, [(4, 10), (8, 10), (10, 10)]),
        (lambda x, y: iter(parts(x, y)), [(4, 4), (8, 8), (10, 10)]),
    ],
)
def test_progress_is_told_in_rows(net, x, y, loader, told):
    seen = []
    with listen(lambda *news: seen.append(news)):
        collect(net, loader(x, y))
    assert [news[1:] for news in seen] == told
    assert {news[0] for news in seen} == {"collecting rows"}


def test_batches_without_rows_are_passed_over():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    x, y = torch.randn(8, 4), torch.arange(8) % 3
    found = collect(model, [(x[:0], y[:0]), (x, y), (x[:0], y[:0])])
    assert found.rows == 8
