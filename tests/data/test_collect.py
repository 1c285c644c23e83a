"""What `collect` keeps, of which models and loaders, and that all is as it was afterwards."""

import random
from collections import UserDict

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    SubsetRandomSampler,
    TensorDataset,
)

from featcal import FeatureClip, InputError, Temperature, attach, collect
from featcal.core.progress import listen
from featcal.data.collect import placed, rows_expected, unpacked

# The labels here follow no network, so that a temperature may end at its cap.
pytestmark = pytest.mark.filterwarnings("ignore::featcal.CalibrationWarning")

X = torch.randn(10, 5, generator=torch.Generator().manual_seed(1))
Y = torch.arange(10) % 3
ROWS = TensorDataset(X, Y)


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


def parts(size=4):
    return [(X[i : i + size], Y[i : i + size]) for i in range(0, 10, size)]


def joined(data, name):
    return torch.cat([getattr(batch, name) for batch in data])


@torch.no_grad()
def by_hand(net):
    """Features and logits of the model in eval mode, written out."""
    linear, norm = net.body[0], net.body[1]
    h = X @ linear.weight.T + linear.bias
    h = (h - norm.running_mean) / (norm.running_var + norm.eps).sqrt() * norm.weight + norm.bias
    return h.relu(), h.relu() @ net.fc.weight.T + net.fc.bias


def test_features_logits_and_labels_are_those_of_the_model(net):
    data = collect(net, [(X[:0], Y[:0]), *parts()])  # batches without rows are passed over
    features, logits = by_hand(net)
    torch.testing.assert_close(joined(data, "features"), features)
    torch.testing.assert_close(joined(data, "logits"), logits)
    assert torch.equal(joined(data, "labels"), Y)
    assert (data.rows, data.path, data.layer) == (10, "fc", None)
    assert [len(batch) for batch in data] == [4, 4, 2]
    torch.testing.assert_close(data.head(features), logits)


@pytest.mark.parametrize(
    "loader",
    [
        [[X, Y]],
        DataLoader(ROWS, batch_size=4),
        ((a, b.tolist()) for a, b in parts()),
        [(X, Y.int().numpy())],
        [{"x": X, "labels": Y, "idx": Y}],
        iter([UserDict({"anything": X, "target": Y})]),
    ],
)
def test_every_form_of_loader_gives_the_same(net, loader):
    data = collect(net, loader)
    assert torch.equal(joined(data, "labels").long(), Y)
    torch.testing.assert_close(joined(data, "logits"), by_hand(net)[1])


def test_several_inputs_and_unpack():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(5, 3)

        def forward(self, left, right):
            return self.out(left - right)

    both = {"right": X + 1, "left": X}
    for batch in (((X, X + 1), Y), ([X, X + 1], Y), (both, Y), {**both, "label": Y, "weight": Y}):
        data = collect(Two(), [batch])
        torch.testing.assert_close(data[0].features, torch.full((10, 5), -1.0))
    data = collect(Two(), [(X, X + 1, Y)], unpack=lambda batch: (batch[:2], batch[2]))
    assert torch.equal(data[0].labels, Y)


def test_what_is_kept_is_a_copy_of_its_own():
    """A view of one token would keep every token; a loader may fill its tensors again."""

    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(5, 3)

        def forward(self, tokens):
            return self.fc(tokens[:, 0])

    buffer, labels = torch.zeros(10, 100, 5), Y.clone()

    def refilled():
        for place in range(3):
            buffer.fill_(place)
            labels.fill_(place)
            yield buffer, labels

    for place, batch in enumerate(collect(Tokens(), refilled())):
        assert bool((batch.features == place).all())
        assert bool((batch.labels == place).all())
        for part in (batch.features, batch.logits, batch.labels):
            assert part.untyped_storage().nbytes() == part.nbytes


@pytest.mark.parametrize("ending", [lambda z: z.softmax(1), lambda z: {"logits": z.log_softmax(1)}])
def test_the_logits_are_those_before_a_softmax(ending):
    net = Net(lambda net, h: ending(net.fc(h)))
    torch.testing.assert_close(collect(net, [(X, Y)])[0].logits, by_hand(net)[1])


@pytest.mark.parametrize("shape", [(-1, 1), (-1,)])
def test_a_single_logit_is_kept_as_two(shape):
    net = Net(lambda net, h: net.fc(h).reshape(shape), classes=1)
    truth = (Y > 0).long()
    for labels in (truth, truth.bool(), truth.float()[:, None]):
        data = collect(net, [(X, labels)])
        z = by_hand(net)[1]
        torch.testing.assert_close(data[0].logits, torch.cat([torch.zeros(10, 1), z], 1))
        assert torch.equal(data[0].labels, truth)
        torch.testing.assert_close(data.head(data[0].features), data[0].logits)


def test_a_convolution_of_one_pixel():
    net = nn.Sequential(nn.Conv2d(5, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Conv2d(4, 3, 1))
    net.append(nn.Flatten())
    images = torch.randn(10, 5, 4, 4)
    data = collect(net, [(images, Y)])
    assert data.path == "2"
    assert isinstance(data.head, nn.Linear)
    with torch.no_grad():
        assert torch.equal(data[0].features, net[1](net[0](images)).flatten(1))
        assert torch.equal(data[0].logits, net(images))


@pytest.mark.parametrize(
    "score", [nn.Sequential(nn.Dropout(), nn.Linear(5, 3)), nn.Linear(5, 1, bias=False)]
)
def test_the_one_token_that_is_kept(score):
    class Causal(nn.Module):
        """Scores every token, and returns the scores of the last one that is not padding."""

        def __init__(self):
            super().__init__()
            self.embed, self.score = nn.Embedding(9, 5), score

        def forward(self, ids):
            scores = self.score(self.embed(ids))
            return scores[torch.arange(len(ids)), (ids > 0).sum(1) - 1]

    net = Causal().eval()
    ids = torch.randint(1, 9, (10, 7))
    ids[torch.arange(7) >= torch.randint(1, 8, (10, 1))] = 0
    last = net.embed(ids)[torch.arange(10), (ids > 0).sum(1) - 1]
    data = collect(net, [(ids, Y.clamp(max=1))], head="score")
    assert torch.equal(data[0].features, last)
    found = attach(net, FeatureClip().assign(threshold=0.2), head="score")
    with torch.no_grad():
        torch.testing.assert_close(found(ids), score(last.clamp(-0.2, 0.2)))


def test_a_calibrated_model_is_collected_with_its_calibrated_logits(net):
    data = collect(attach(net, Temperature().assign(temperature=2.0)), [(X, Y)])
    features, logits = by_hand(net)
    torch.testing.assert_close(data[0].logits, logits / 2)
    torch.testing.assert_close(data.head(features), logits / 2)


def test_half_precision_and_autocast(net):
    with torch.autocast("cpu", torch.bfloat16):
        assert collect(net, [(X, Y)])[0].logits.dtype == torch.bfloat16
    data = collect(net.to(torch.bfloat16), [(X, Y)])
    assert data[0].features.dtype == data[0].logits.dtype == torch.bfloat16
    assert data.head.weight.dtype == torch.float32
    assert Temperature().fit(data, data.head).report.rows == 10


def test_inputs_go_to_the_device_and_the_type_of_the_model(net):
    half = nn.Linear(5, 3).half()
    found = placed({"x": X, "ids": Y, "more": [X, "text", None]}, half)
    assert (found["x"].dtype, found["ids"].dtype) == (torch.float16, torch.int64)
    assert found["more"][1:] == ("text", None)
    mixed = nn.Sequential(nn.Linear(5, 5).bfloat16(), nn.LayerNorm(5))  # casts for itself
    assert placed(X, mixed).dtype == torch.float32
    buffers = nn.Module()
    buffers.register_buffer("scale", torch.ones(1, device="meta"))
    for away in (nn.Linear(5, 3, device="meta"), buffers):
        assert placed((X, X), away)[1].device.type == "meta"
    assert placed(X, nn.ReLU()) is X

    class Graphs:
        def to(self, device):
            self.device = device
            return self

    assert placed(Graphs(), net).device == torch.device("cpu")


@pytest.mark.gpu
def test_a_model_on_the_gpu_gets_its_inputs_there_and_the_results_come_back(net):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    expected = collect(net, parts())
    state = torch.cuda.get_rng_state()
    data = collect(net.cuda(), parts())
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert data.head.weight.is_cuda
    for name in ("features", "logits", "labels"):
        assert joined(data, name).device.type == "cpu"
        torch.testing.assert_close(joined(data, name), joined(expected, name), rtol=1e-3, atol=1e-3)
    with torch.autocast("cuda", torch.float16):
        assert collect(net, parts())[0].logits.dtype == torch.float16


class Noisy(Dataset):
    """Draws from every generator there is."""

    def __len__(self):
        return 10

    def __getitem__(self, place):
        return X[place] + random.random() + np.random.rand() + float(torch.rand(())), Y[place]


def snapshot(net):
    """The state of the model and of every generator, as text."""
    state = (
        [part.training for part in net.modules()],
        [value.tolist() for value in net.state_dict().values()],
        [None if p.grad is None else p.grad.tolist() for p in net.parameters()],
        [len(part._forward_hooks) + len(part._forward_pre_hooks) for part in net.modules()],
        (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()),
        torch.is_grad_enabled(),
    )
    return repr(state)


@pytest.fixture
def unsettled(net):
    """In the middle of training: mixed flags, and gradients that are not used yet."""
    net.train()
    net.body[1].eval()
    net.fc.eval()
    net(X).sum().backward()
    net.body[0].bias.grad = None
    return net


@pytest.mark.parametrize("layer", [None, "body.2"])
def test_the_model_and_every_generator_are_as_they_were(unsettled, layer):
    before = snapshot(unsettled)
    loader = DataLoader(Noisy(), batch_size=4, shuffle=True)
    first = collect(unsettled, loader, layer=layer)
    assert snapshot(unsettled) == before
    second = collect(unsettled, loader, layer=layer)  # which sees the same rows
    assert torch.equal(joined(first, "features"), joined(second, "features"))
    assert not first[0].features.requires_grad


def broken():
    yield X, Y
    raise OSError("the disk is gone")


@pytest.mark.parametrize(
    ("give", "loader", "error"),
    [
        (lambda net, h: net.fc(h[:, :2]), [(X, Y)], RuntimeError),
        (lambda net, h: net.fc(h), broken(), OSError),
        (lambda net, h: net.fc(h), [(X, Y), (X, Y[:3])], InputError),
        (lambda net, h: (h, 2 * net.fc(h)), [(X, Y)], InputError),
    ],
)
def test_all_is_as_it_was_after_an_error_too(unsettled, give, loader, error):
    before = snapshot(unsettled)
    unsettled.give = give
    with pytest.raises(error):
        collect(unsettled, loader)
    assert snapshot(unsettled) == before


class Text(nn.Module):
    """Takes what a tokenizer gives."""

    def forward(self, input_ids, attention_mask=None, labels=None):
        raise AssertionError("it is never run here")


class Open(nn.Module):
    """Takes anything by name."""

    def forward(self, input_ids=None, **more):
        raise AssertionError("it is never run here")


def test_mappings_are_told_apart_by_names():
    batch = {"input_ids": X, "attention_mask": X, "y": X, "label": Y, "text": ["a"] * 10}
    inputs, labels = next(unpacked(Text(), [batch]))
    assert set(inputs) == {"input_ids", "attention_mask"}
    assert torch.equal(labels, Y)  # the first of the usual names
    assert set(next(unpacked(Open(), [batch]))[0]) == {"input_ids", "attention_mask", "y"}
    for model in (Text(), Open(), Net()):  # one input under any name
        assert next(unpacked(model, [{"picture": X, "label": Y}]))[0] is X


@pytest.mark.parametrize(
    ("batch", "unpack", "message"),
    [
        ((X, X, Y), None, "a batch comes as tuple, .* pass unpack="),
        (X, None, "comes as Tensor"),
        ((X, Y), lambda batch: {"a": X}, "comes as dict"),
        ((X, ["cat", "dog"]), None, r"labels of a batch are \['cat'"),
        ((X[0], 3), None, r"labels of a batch are 3"),
        ({"input_ids": X, "truth": Y}, None, "mapping of input_ids, truth: .* pass unpack="),
        ({"a": X, "b": X, "label": Y}, None, "mapping of a, b, label.*input_ids, attention_mask"),
        ({"label": Y}, None, "mapping of label"),
    ],
)
def test_batches_in_no_known_form_are_refused(batch, unpack, message):
    with pytest.raises(InputError, match=message):
        next(unpacked(Text(), [batch], unpack))


class Batches(Dataset):
    """Gives whole batches."""

    def __len__(self):
        return 3

    def __getitem__(self, place):
        return X, Y


@pytest.mark.parametrize(
    ("loader", "rows"),
    [
        (DataLoader(ROWS, batch_size=4, shuffle=True), 10),
        (DataLoader(ROWS, batch_size=4, drop_last=True), 8),
        (DataLoader(ROWS, batch_size=2, sampler=SubsetRandomSampler([1, 2, 3])), 3),
        (DataLoader(Batches(), batch_size=None), 0),
        (iter([(X, Y)]), 0),
    ],
)
def test_rows_a_loader_will_give_and_its_progress(net, loader, rows):
    assert rows_expected(loader) == rows
    if rows:
        seen = []
        with listen(lambda *news: seen.append(news)):
            collect(net, loader)
        assert seen[-1] == ("collecting rows", rows, rows)
        assert {news[2] for news in seen} == {rows}


def hooked():
    """The features that are kept are those behind the hook, and it would act on them again."""
    net = Net()
    net.fc.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 3,))
    return net


TOKENS = torch.randn(10, 7, 5)
DEEP = nn.Sequential(nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)))


@pytest.mark.parametrize(
    ("model", "loader", "options", "message"),
    [
        (Net(), [], {}, "loader is empty: pass held-out data"),
        (Net(), None, {}, "loader is a NoneType"),
        (Net(), None, {"head": "nope"}, "head 'nope' is not a module"),  # before the loader runs
        (Net(), None, {"layer": "nope"}, "layer 'nope' is not a module"),
        (nn.DataParallel(Net()), None, {}, "wrapped in DataParallel"),
        (Net(lambda net, h: (net.fc(-h), net.fc(h))[1]), [(X, Y)], {}, "'fc' must run once"),
        (Net(), [(X, Y[:4])], {}, "'fc' has 10 rows for 4 labels"),
        (nn.Sequential(nn.Linear(5, 3)), [(TOKENS, Y)], {}, "'0' has 70 rows for 10 labels"),
        (DEEP, [(TOKENS, Y)], {"head": "0"}, r"values of shape \(7, 3\) for a sample"),
        (Net(lambda net, h: net.fc(input=h)), [(X, Y)], {}, "more than one tensor"),
        (hooked(), [(X, Y)], {}, r"head\(features\) differs from the stored logits"),
    ],
)
def test_what_cannot_be_collected_is_refused(model, loader, options, message):
    with pytest.raises(InputError, match=message):
        collect(model, loader, **options)
