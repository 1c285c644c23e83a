"""Pixels and tokens as rows, and models without a linear head, as a person would type it.

The images are drawn: two discs on a noisy ground, the outermost row of pixels not labelled. The
networks are trained here, in about a second each.
"""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import featcal
from featcal import Batch, InputError
from featcal.cli import main

VOID, SIDE, CLASSES = 255, 12, 3


def discs(images, seed):
    """Images (n, 3, 12, 12) and their masks (n, 12, 12); each image has a brightness of its own."""
    draw = np.random.default_rng(seed)
    down, across = np.mgrid[:SIDE, :SIDE]
    masks = np.zeros((images, SIDE, SIDE), np.int64)
    for mask in masks:
        for number in (1, 2):
            y, x, radius = *draw.uniform(0, SIDE, 2), draw.uniform(2, 4)
            mask[(down - y) ** 2 + (across - x) ** 2 < radius**2] = number
    pictures = np.eye(CLASSES)[masks].transpose(0, 3, 1, 2) + draw.normal(0, 1, (images, 3, 1, 1))
    pictures = pictures + draw.normal(0, 0.7, pictures.shape)
    masks[:, 0] = VOID
    return torch.tensor(pictures, dtype=torch.float32), torch.tensor(masks)


def loader(images=20, seed=1, batch=8):
    return DataLoader(TensorDataset(*discs(images, seed)), batch)


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), nn.ReLU())
        self.out = nn.Conv2d(12, CLASSES, 1)

    def forward(self, x):
        return self.out(self.body(x))


class Upsampled(nn.Module):
    """As torchvision's: the last layer works on a smaller map, and the output is a dict."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        small = self.inner(F.avg_pool2d(x, 2))
        return {"out": F.interpolate(small, size=SIDE, mode="bilinear"), "size": SIDE}


def trained(model, loss, rate, rounds):
    """By plain descent; importing one of torch's optimisers takes longer than the training."""
    for _ in range(rounds):
        loss(model).backward()
        with torch.no_grad():
            for weight in model.parameters():
                if weight.grad is not None:
                    weight -= rate * weight.grad
        model.zero_grad()
    return model.eval()


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    x, y = discs(6, 0)
    return trained(
        Segmenter(), lambda model: F.cross_entropy(model(x), y, ignore_index=VOID), 0.3, 100
    )


@pytest.fixture(scope="module")
def tokens():
    """A small transformer of random weights that learned a tag for each token, and its loader."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 16, "num_labels": 4}
    config = transformers.BertConfig(num_hidden_layers=1, num_attention_heads=2, **sizes)
    words = torch.randint(2, 20, (24, 10))
    tags = torch.where(torch.rand(24, 10) < 0.7, words % 4, torch.randint(4, (24, 10)))
    tags[:, 0] = -100  # as of a token that only begins the text
    net = transformers.BertForTokenClassification(config)
    trained(net, lambda model: model(input_ids=words[:12], labels=tags[:12]).loss, 0.5, 30)
    rest = zip(words[12:].split(5), tags[12:].split(5), strict=True)
    return net, [{"input_ids": ids, "labels": labels} for ids, labels in rest]


def run(*args):
    with pytest.raises(SystemExit) as left:
        main([str(one) for one in args])
    return left.value.code


def whole(rows, name):
    return torch.cat([getattr(batch, name) for batch in rows])


# --- rows ----------------------------------------------------------------------------------------


def test_every_pixel_is_a_row_of_its_image(net):
    x, y = discs(5, 3)
    rows = featcal.collect(net, [(x[:3], y[:3]), (x[3:], y[3:])], ignore_index=VOID, positions=999)
    with torch.no_grad():
        logits = net(x).permute(0, 2, 3, 1)[y != VOID]
    torch.testing.assert_close(whole(rows, "logits"), logits)
    torch.testing.assert_close(rows.head(whole(rows, "features")), logits)
    assert torch.equal(whole(rows, "labels"), y[y != VOID])
    assert torch.equal(whole(rows, "groups"), (y != VOID).nonzero()[:, 0])
    assert rows.path == "out"


def test_positions_are_drawn_with_a_seed_whatever_the_batches(net):
    def drawn(**options):
        data = featcal.collect(net, loader(**options.pop("of", {})), ignore_index=VOID, **options)
        return data, whole(data, "features"), whole(data, "groups")

    data, rows, groups = drawn(positions=7)
    assert groups.tolist() == [number for number in range(20) for _ in range(7)]
    _, same, _ = drawn(positions=7, of={"batch": 3})
    assert torch.equal(rows, same)
    _, other, _ = drawn(positions=7, seed=1)
    assert not torch.equal(rows, other)
    every = {tuple(row) for row in drawn(positions=999)[1].tolist()}
    assert {tuple(row) for row in rows.tolist()} <= every
    assert len({tuple(row) for row in rows.tolist()}) == 140  # without replacement
    assert "positions 7; seed 0; ignore_index 255" in repr(data)
    assert drawn()[0].drawn["positions"] == 256
    for wrong in ({"positions": 0}, {"seed": -1}, {"positions": 2.5}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            drawn(**wrong)


def test_many_classes_are_drawn_at_fewer_positions():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 2**17))
    tokens = torch.randint(9, (2, 6))
    assert featcal.collect(net, [(tokens, tokens)]).rows == 4


def test_what_is_evaluated_is_the_loss_of_all_pixels(net):
    x, y = discs(20, 1)
    with torch.no_grad():
        expected = F.cross_entropy(net(x), y, ignore_index=VOID)
    found = featcal.evaluate(net, loader(), ignore_index=VOID, positions=999)
    assert found.metrics["nll"] == pytest.approx(float(expected), rel=1e-5)
    assert found.n == 20 * SIDE * (SIDE - 1)


def test_a_segmentation_network_is_calibrated(net):
    test = loader(seed=2)
    for recipe in (None, "clip | temperature"):
        calibrated = featcal.calibrate(net, loader(), recipe, ignore_index=VOID)
        assert type(calibrated) is Segmenter
        assert calibrated(discs(2, 5)[0]).shape == (2, CLASSES, SIDE, SIDE)
        before, after = (
            featcal.evaluate(model, test, ignore_index=VOID).metrics for model in (net, calibrated)
        )
        assert after["nll"] < before["nll"] - 0.02
        assert after["ece"] < before["ece"]
    recipes = ["none", "temperature"]
    found = featcal.compare(net, loader(), ignore_index=VOID, resamples=0, recipes=recipes)
    assert found.settings["folds"] == 5
    assert found[1].scores.metrics["nll"] < found[0].scores.metrics["nll"]


def test_one_channel_is_a_binary_model_of_pixels():
    torch.manual_seed(0)
    x, _ = discs(12, 0)
    body = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 1, 1), nn.Sigmoid())
    with torch.no_grad():
        disc = torch.bernoulli(body(x)[:, 0])
    disc[:, 0] = -100
    for labels in (disc, disc[:, None]):
        rows = featcal.collect(body, [(x, labels)], positions=50)
        assert rows.path == "2"
        assert whole(rows, "logits").shape == (600, 2)
        assert set(whole(rows, "labels").tolist()) == {0, 1}
    calibrated = featcal.calibrate(body, [(x, disc)], "temperature")
    assert calibrated(x).shape == (12, 1, SIDE, SIDE)


def test_a_token_classifier_of_transformers(tokens, tmp_path):
    net, batches = tokens
    rows = featcal.collect(net, batches)
    assert rows.path == "classifier"
    assert rows.rows == 12 * 9
    assert whole(rows, "groups").tolist() == [number for number in range(12) for _ in range(9)]
    with torch.no_grad():
        expected = sum(float(net(**batch).loss) * len(batch["labels"]) for batch in batches) / 12
    assert featcal.evaluate(net, batches).metrics["nll"] == pytest.approx(expected, rel=1e-4)
    calibrated = featcal.calibrate(net, batches, "temperature")
    again = featcal.load(featcal.save(calibrated, tmp_path / "c.safetensors"), onto=net)
    ids = batches[0]["input_ids"]
    hot = calibrated.classifier.calibrator.temperature
    with torch.no_grad():
        torch.testing.assert_close(again(input_ids=ids).logits, net(input_ids=ids).logits / hot)


def test_the_labels_of_a_language_model_are_the_tokens_that_follow():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=30, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    net = transformers.GPT2LMHeadModel(config).eval()
    words = torch.randint(30, (6, 9))
    labels = words.clone()
    labels[:, :3] = -100  # a prompt
    batch = {"input_ids": words, "labels": labels}
    rows = featcal.collect(net, [batch])
    assert rows.path == "lm_head"
    assert torch.equal(whole(rows, "labels"), words[:, 3:].flatten())
    with torch.no_grad():
        expected = net(**batch).loss
    found = featcal.evaluate(net, [batch])
    assert found.metrics["nll"] == pytest.approx(float(expected), rel=1e-4)


# --- samples stay whole --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def learnt_by_heart():
    """24 samples of twenty rows that are alike in a sample, and have one label."""
    draw = torch.Generator().manual_seed(0)
    own = 1.5 * torch.randn(24, 6, generator=draw)
    labels = torch.multinomial(own.softmax(1), 1, generator=draw)[:, 0]
    groups = torch.arange(24).repeat_interleave(20)
    logits = own[groups] + 0.05 * torch.randn(480, 6, generator=draw)
    return Batch(logits, labels[groups], groups=groups)


def test_folds_of_rows_would_let_a_sample_judge_itself(learnt_by_heart):
    """Matrix scaling learns each sample's label by heart; only other samples show that."""
    rows = learnt_by_heart

    def losses(data):
        found = featcal.compare(data, folds=2, recipes=["none", "matrix"], resamples=0)
        return [row.scores.metrics["nll"] for row in found]

    none, matrix = losses(rows)
    assert matrix > 0.9 * none
    none, matrix = losses(Batch(rows.logits, rows.labels))
    assert matrix < 0.2 * none
    with pytest.raises(InputError, match="25 for 24 samples"):
        featcal.compare(rows, folds=25, recipes=["none"])


def test_a_fit_and_a_choice_are_judged_on_other_samples(learnt_by_heart):
    alone = Batch(learnt_by_heart.logits, learnt_by_heart.labels)
    assert not featcal.parse("matrix").fit(alone).report.noop
    assert featcal.parse("matrix").fit(learnt_by_heart).report.noop
    strengths = [
        featcal.parse("sample").fit(rows).report.steps[0].details["strength"]
        for rows in (alone, learnt_by_heart)
    ]
    assert strengths == [1.0, None]  # one temperature for all, where samples are left out
    values = []
    for rows in (alone, learnt_by_heart):
        tried = featcal.parse("auto").fit(rows).report.choice.details["choice"]
        values.append({row["recipe"]: row["value"] for row in tried}["svs"])
    assert values[0] < values[1] - 0.3


# --- packs ---------------------------------------------------------------------------------------


class Stopped(Exception):
    pass


class Failing(TensorDataset):
    def __getitem__(self, index):
        if index >= 14:
            raise Stopped
        return super().__getitem__(index)


def test_a_pack_knows_its_samples_and_goes_on_in_the_middle_of_one(net, tmp_path, capsys):
    options = {"ignore_index": VOID, "positions": 30, "shard_rows": 64}
    loaders = {"val": loader(batch=4), "test": loader(seed=2, batch=4)}
    pack = featcal.collect_pack(net, loaders, tmp_path / "whole", **options)
    failing = {**loaders, "val": DataLoader(Failing(*discs(20, 1)), 4)}
    with pytest.raises(Stopped):
        featcal.collect_pack(net, failing, tmp_path / "killed", **options)
    with pytest.raises(InputError, match=r"'positions': 30.*'positions': 31"):
        featcal.collect_pack(net, loaders, tmp_path / "killed", **{**options, "positions": 31})
    again = featcal.collect_pack(net, loaders, tmp_path / "killed", **options)
    assert again.manifest == pack.manifest  # every file's sha256
    rows = list(pack.split("val"))
    assert whole(rows, "groups").tolist() == [number for number in range(20) for _ in range(30)]
    assert pack.manifest.meta["drawn"] == {"positions": 30, "seed": 0, "ignore_index": VOID}
    assert pack.summary()["splits"]["test"]["samples"] == 20
    assert run("pack", "info", pack.path) == 0
    assert "drawn of each sample: positions 30, seed 0, ignore_index 255" in capsys.readouterr().out
    assert run("fit", pack.path, "clip | temperature", "-o", tmp_path / "c.safetensors") == 0
    assert run("eval", pack.path, tmp_path / "c.safetensors", "--json") == 0
    capsys.readouterr()
    assert run("compare", pack.path, "none", "temperature", "--folds", 4, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    expected = featcal.compare(pack.split("val"), folds=4, recipes=["none", "temperature"])
    found = [row["metrics"]["nll"] for row in told["rows"]]
    assert found == pytest.approx([row.scores.metrics["nll"] for row in expected])


# --- no linear head ------------------------------------------------------------------------------


def test_a_model_without_a_linear_head_is_calibrated_at_its_output(net, tmp_path):
    model, x = Upsampled(net), discs(3, 5)[0]
    rows = featcal.collect(model, loader(), ignore_index=VOID)
    assert rows.head is None
    assert "logits alone" in repr(rows)
    calibrated = featcal.calibrate(model, loader(), "temperature", ignore_index=VOID)
    hot = calibrated.calibrator.temperature
    assert float(hot) != 1
    with torch.no_grad():
        torch.testing.assert_close(calibrated(x)["out"], model(x)["out"] / hot)
    assert calibrated(x)["size"] == SIDE
    assert calibrated.inner is net
    again = featcal.load(featcal.save(calibrated, tmp_path / "c.safetensors"), onto=model)
    assert torch.equal(again(x)["out"], calibrated(x)["out"])
    assert featcal.detach(calibrated) is model
    calibrated.load_state_dict(model.state_dict())  # the original's loads too
    before, after = (
        featcal.evaluate(one, loader(seed=2), ignore_index=VOID).metrics["nll"]
        for one in (model, calibrated)
    )
    assert after < before
    found = featcal.compare(model, loader(), loader(seed=2), ignore_index=VOID, resamples=0)
    assert [row.recipe for row in found] == ["none", "auto", "temperature"]
    assert found[2].scores.metrics["nll"] == pytest.approx(after)
    made = featcal.export.onnx(calibrated, tmp_path / "m.onnx", x, probabilities=True)
    assert made.parity.rows == 3 * SIDE * SIDE
    assert list(made.inputs) == ["x"]


def test_steps_of_features_are_refused_by_name_where_there_are_none(net):
    model = Upsampled(net)
    for recipe in ("clip", "clip | temperature", "density"):
        with pytest.raises(InputError, match=r"^(clip|density).* features"):
            featcal.calibrate(model, loader(), recipe, ignore_index=VOID)
    with pytest.raises(InputError, match="clip works on features"):
        featcal.compare(model, loader(), ignore_index=VOID, recipes=["clip"])
    with pytest.raises(InputError, match=r"clip acts on features.*head=''"):
        featcal.attach(net, featcal.parse("clip"), head="")


@pytest.mark.parametrize("kind", ["tuple", "object", "column", "flat"])
def test_logits_are_calibrated_wherever_a_model_gives_them(kind):
    torch.manual_seed(0)
    x = torch.randn(200, 5)
    centres = 3 * torch.randn(1 if kind in ("column", "flat") else 4, 5)

    class Distances(nn.Module):
        """Classes by their distance from a centre: no linear layer anywhere."""

        def forward(self, x):
            logits = 2 - torch.cdist(x, centres)
            if kind == "tuple":
                return logits, {"steps": 3}
            if kind == "object":
                from transformers.modeling_outputs import SequenceClassifierOutput

                return SequenceClassifierOutput(logits=logits)
            return logits if kind == "column" else logits[:, 0]

    model = Distances()

    def logits(one):
        given = one(x)
        return given[0] if kind == "tuple" else getattr(given, "logits", given)

    soft = logits(model) / 2  # twice as sure as it may be
    if kind in ("column", "flat"):
        labels = torch.bernoulli(soft.reshape(-1).sigmoid())
    else:
        labels = torch.multinomial(soft.softmax(1), 1)[:, 0]
    calibrated = featcal.calibrate(model, [(x, labels)], "temperature")
    assert calibrated.calibrator.temperature > 1
    assert type(calibrated(x)) is type(model(x))
    expected = logits(model) / calibrated.calibrator.temperature
    torch.testing.assert_close(logits(calibrated), expected)


# --- what is not supported -----------------------------------------------------------------------


def test_a_page_is_written_of_a_segmentation_network(net, tmp_path, monkeypatch):
    monkeypatch.setattr("featcal.page.content.POINTS", 12)
    how = {"recipes": ["temperature"], "resamples": 100, "ignore_index": VOID, "positions": 20}
    made = featcal.report(net, loader(), loader(seed=2), tmp_path / "page.html", **how)
    assert made.comparison[0].scores.n == 20 * 20
    assert made.comparison.settings["drawn"]["samples"] == 20
    names = {"featcal": featcal, "model": net, "val": loader(), "test": loader(seed=2)}
    exec(made.summary.command, names)  # what the page says to type


def test_what_is_not_supported_is_refused_by_its_name(net):
    x, y = discs(4, 0)
    boxes = [{"boxes": torch.zeros(1, 4), "labels": torch.ones(1)} for _ in x]
    head = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE * SIDE, 1))
    for model, labels, said in (
        (net, boxes, "detection boxes"),
        (net, boxes[0], "detection boxes"),
        (head, torch.rand(4), "regression"),
        (net, torch.rand(4, SIDE, SIDE), "regression"),
        (net, y[:, ::2, ::2], r"\(4, 6, 6\).*\(4, 12, 12\), 3 each.*resize"),
        (nn.Sequential(Upsampled(net), Softmax()), y, "gives probabilities"),
    ):
        with pytest.raises(InputError, match=said):
            featcal.calibrate(model, [(x, labels)], "temperature", ignore_index=VOID)
    with pytest.raises(InputError, match=r"labels hold 255.*pass ignore_index=255"):
        featcal.calibrate(net, [(x, y)], "temperature")
    with pytest.raises(InputError, match="layer= keeps whole samples"):
        featcal.collect(net, [(x, y)], layer="body", ignore_index=VOID)


class Softmax(nn.Module):
    def forward(self, given):
        return given["out"].softmax(1)
