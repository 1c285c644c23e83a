"""The second hour: what was fitted is used elsewhere, as a person would type it."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import featcal
from featcal import Batch
from featcal.arrays import Calibrated
from featcal.cli import main
from featcal.report.compare import every_recipe

ROWS, CLASSES = 400, 4
NAMES = ("ant", "bee", "cat", "dog")


def drawn(seed, rows=ROWS, classes=CLASSES):
    """Overconfident logits and their labels."""
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, classes, generator=draw)
    noise = -torch.rand(rows, classes, generator=draw).log()
    return 3 * logits, (logits - noise.log()).argmax(1)


def run(*args):
    with pytest.raises(SystemExit) as left:
        main([str(one) for one in args])
    return left.value.code


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """A folder with a calibrator of logits, and the calibrator."""
    folder = tmp_path_factory.mktemp("fitted")
    calibrator = featcal.parse("temperature").fit(Batch(*drawn(0)))
    featcal.save(calibrator, folder / "cal.safetensors")
    return folder / "cal.safetensors", calibrator


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- a calibrator from a file --------------------------------------------------------------------


def test_a_loaded_calibrator_takes_logits_of_any_kind(fitted):
    path, calibrator = fitted
    logits, _ = drawn(1)
    expected = logits / calibrator.temperature
    loaded = featcal.load(path)
    torch.testing.assert_close(loaded.transform(logits), expected)
    torch.testing.assert_close(loaded(logits), expected)
    found = loaded.transform(logits.numpy())
    assert isinstance(found, np.ndarray)
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-6)
    np.testing.assert_allclose(loaded.transform(logits.tolist()), expected.numpy(), rtol=1e-6)
    with pytest.raises(featcal.InputError, match="4 classes, and these rows have 7"):
        loaded.transform(torch.zeros(3, 7))
    with pytest.raises(featcal.InputError, match="NaN"):
        loaded.transform(logits / 0)
    with pytest.raises(featcal.InputError, match="one number"):
        loaded.transform(3.0)
    seen = []
    featcal.attach(Net(), featcal.Temperature(), head="fc").apply(seen.append)  # torch's own
    assert any(isinstance(part, featcal.Temperature) for part in seen)


def test_features_go_in_with_their_head(tmp_path):
    torch.manual_seed(0)
    head = nn.Linear(6, 3)
    data = Batch(None, torch.randint(3, (90,)), 5 * torch.randn(90, 6).relu())
    clip = featcal.parse("clip | temperature").fit(data, head)
    loaded = featcal.load(featcal.save(clip, tmp_path / "c.safetensors"))
    with torch.no_grad():
        torch.testing.assert_close(loaded.transform(data.features, head), clip(data.features, head))
        wide = loaded.transform(data.features.double().numpy(), head)  # numpy's own type
        np.testing.assert_allclose(wide, clip(data.features, head), rtol=1e-6)
    with pytest.raises(featcal.InputError, match="pass them with head="):
        loaded.transform(data.features)
    with pytest.raises(featcal.InputError, match="3 classes, and these rows have 7"):
        loaded.transform(data.features, nn.Linear(6, 7))
    with pytest.raises(featcal.InputError, match="head is a tuple"):
        loaded.transform(data.features, (head.weight, head.bias))
    with pytest.raises(featcal.InputError, match="6 features, and these rows have 5"):
        loaded.transform(data.features[:, :5], head)
    array = Calibrated.load(
        tmp_path / "c.safetensors", head=(head.weight.detach(), head.bias.detach())
    )
    with torch.no_grad():
        expected = clip(data.features, head).softmax(1)
    np.testing.assert_allclose(array.predict_proba(data.features), expected, atol=1e-6)


def test_an_estimator_is_loaded_fitted(fitted):
    path, calibrator = fitted
    logits, labels = drawn(1)
    one = Calibrated.load(path, classes=NAMES)
    expected = (logits / calibrator.temperature).softmax(1)
    np.testing.assert_allclose(one.predict_proba(logits), expected, rtol=1e-6)
    assert one.score(logits, np.array(NAMES)[labels]) == pytest.approx(
        (logits.argmax(1) == labels).float().mean().item()
    )
    np.testing.assert_allclose(
        Calibrated.load(path, kind="probs").predict_proba(logits.softmax(1)), expected, atol=1e-5
    )


def test_two_classes_come_as_one_logit_or_two(tmp_path):
    logits, labels = drawn(0, classes=2)
    one = logits[:, 1] - logits[:, 0]
    path = tmp_path / "b.safetensors"
    featcal.save(Calibrated("temperature").fit(one, labels), path)
    loaded = Calibrated.load(path)
    both = loaded.predict_proba(logits)
    np.testing.assert_allclose(loaded.predict_proba(one), both, atol=1e-6)
    np.testing.assert_allclose(
        torch.tensor(featcal.load(path).transform(one.numpy())).sigmoid(), both[:, 1], atol=1e-6
    )


def test_probabilities_among_logits_are_noticed():
    logits, labels = drawn(0)
    with pytest.warns(featcal.CalibrationWarning, match="kind='probs'"):
        Calibrated("temperature").fit(logits.softmax(1), labels)


# --- files of rows without labels ----------------------------------------------------------------


def sources(folder, logits, probs):
    """The same rows in every format, with what the command has to be told."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet
    from safetensors.torch import save_file

    np.savez(folder / "a.npz", logits=logits)
    np.save(folder / "test_logits.npy", logits)
    np.save(folder / "new.npy", logits)
    save_file({"logits": torch.tensor(logits)}, folder / "a.safetensors")
    header = ",".join(NAMES)
    np.savetxt(folder / "a.csv", logits, delimiter=",", header=header, comments="")
    tabs = "\t".join(f"prob_{name}" for name in NAMES)
    np.savetxt(folder / "p.tsv", probs, delimiter="\t", header=tabs, comments="")
    columns = {f"logit_{name}": logits[:, i] for i, name in enumerate(NAMES)}
    parquet.write_table(arrow.table(columns), folder / "a.parquet")
    parquet.write_table(arrow.table({"logits": list(logits)}), folder / "lists.parquet")
    return {
        **{name: [] for name in ("a.npz", "test_logits.npy", "a.safetensors", "a.parquet")},
        **{"lists.parquet": [], "new.npy": ["--logits"], "a.csv": ["--logits"], "p.tsv": []},
    }


def test_rows_of_every_format_are_predicted_without_labels(fitted, here):
    path, calibrator = fitted
    logits, _ = drawn(1)
    expected = (logits / calibrator.temperature).softmax(1).numpy()
    given = sources(here, logits.numpy(), logits.double().softmax(1).numpy())
    for place, (name, told) in enumerate(given.items()):
        assert run("predict", name, path, *told, "-o", f"{place}.npy") == 0, name
        found = np.load(f"{place}.npy")
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, atol=2e-5, err_msg=name)


def test_probabilities_are_written_as_the_ending_says(fitted, here):
    import pyarrow.parquet as parquet
    from safetensors.torch import load_file

    path, calibrator = fitted
    logits, labels = drawn(1)
    expected = (logits / calibrator.temperature).softmax(1).numpy()
    columns = [f"logit_{name}" for name in NAMES]
    np.savetxt("in.csv", logits, delimiter=",", header=",".join(columns), comments="")
    for end in ("npy", "csv", "tsv", "parquet", "safetensors"):
        assert run("predict", "in.csv", path, "-o", f"out.{end}") == 0
    found = {
        "npy": np.load("out.npy"),
        "csv": np.loadtxt("out.csv", delimiter=",", skiprows=1),
        "tsv": np.loadtxt("out.tsv", delimiter="\t", skiprows=1),
        "parquet": np.stack([c.to_numpy() for c in parquet.read_table("out.parquet").columns], 1),
        "safetensors": load_file("out.safetensors")["probs"].numpy(),
    }
    for end, values in found.items():
        np.testing.assert_allclose(values, expected, atol=1e-6, err_msg=end)
    # What was written is read again, by predict and, with labels, by import.
    assert run("predict", "out.csv", path, "-o", "twice.npy") == 0
    text = (here / "out.csv").read_text().splitlines()
    rows = [f"{line},{NAMES[y]}" for line, y in zip(text[1:], labels.tolist(), strict=True)]
    (here / "val.csv").write_text("\n".join([f"{text[0]},label", *rows]))
    assert run("pack", "import", "val.csv", "-o", "pack") == 0
    assert featcal.Pack.open("pack").manifest.class_names == NAMES


def test_lightgbm_by_way_of_csv(here):
    """Its probabilities of digits in one table a split; new rows come back in the same columns."""
    lightgbm = pytest.importorskip("lightgbm")
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    train, val, test = order[:700], order[700:1250], order[1250:]
    model = lightgbm.LGBMClassifier(n_jobs=1, verbosity=-1).fit(x[train], y[train])
    header = [f"prob_{name}" for name in range(10)]
    for name, part in (("val", val), ("test", test), ("new", test)):
        columns, table = list(header), model.predict_proba(x[part])
        if name != "new":
            columns, table = [*columns, "label"], np.column_stack([table, y[part]])
        form = ["%.9g"] * 10 + ["%d"] * (len(columns) - 10)
        np.savetxt(f"{name}.csv", table, form, ",", header=",".join(columns), comments="")
    assert run("pack", "import", "val.csv", "test.csv", "-o", "pack") == 0
    assert run("fit", "pack", "temperature", "-o", "cal.safetensors") == 0
    assert run("predict", "new.csv", "cal.safetensors", "-o", "out.csv") == 0
    assert Path("out.csv").read_text().splitlines()[0].split(",") == header
    new, out = (np.loadtxt(f"{n}.csv", delimiter=",", skiprows=1) for n in ("new", "out"))
    raised = new ** (1 / float(featcal.load("cal.safetensors").temperature))
    np.testing.assert_allclose(out, raised / raised.sum(1, keepdims=True), atol=2e-6)
    before, after = (-np.log(p[np.arange(len(test)), y[test]]).mean() for p in (new, out))
    assert after < 0.9 * before


def test_features_in_a_file_of_any_types_are_predicted(tmp_path, here):
    torch.manual_seed(0)
    head, x = nn.Linear(6, 3), 5 * torch.randn(90, 6).relu()
    clip = featcal.FeatureClip().assign(threshold=1.0)
    featcal.save(clip, "clip.safetensors")
    weight, bias = head.weight.detach().double().numpy(), head.bias.detach().double().numpy()
    np.savez("f.npz", features=x.numpy(), weight=weight, bias=bias)
    assert run("predict", "f.npz", "clip.safetensors", "-o", "f.npy") == 0
    with torch.no_grad():
        expected = clip(x, head).softmax(1)
    np.testing.assert_allclose(np.load("f.npy"), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("args", "culprit"),
    [
        (["a.csv", "CAL", "-o", "out.pdf"], "out.pdf"),
        (["a.csv", "CAL", "-o", "out.npy"], "--logits"),
        (["five.npz", "CAL", "-o", "out.npy"], "fitted to 4 classes"),
        (["two.npz", "CAL", "-o", "out.npy"], "--test-split"),
        (["two.npz", "CAL", "--test-split", "train", "-o", "out.npy"], "--test-split"),
        (["none.npz", "CAL", "-o", "out.npy"], "none.npz"),
        (["a.csv", "CLIP", "--logits", "-o", "out.npy"], "works on features"),
    ],
)
def test_what_cannot_be_predicted_is_refused_and_nothing_written(
    fitted, here, capsys, args, culprit
):
    np.savetxt("a.csv", drawn(1)[0], delimiter=",", header=",".join(NAMES), comments="")
    np.savez("five.npz", logits=np.zeros((3, 5)))
    np.savez("two.npz", val_logits=np.zeros((3, 4)), test_logits=np.zeros((3, 4)))
    featcal.save(featcal.FeatureClip().assign(threshold=1.0), "clip.safetensors")
    known = {"CAL": fitted[0], "CLIP": "clip.safetensors"}
    assert run("predict", *(known.get(one, one) for one in args)) == 2
    assert culprit in capsys.readouterr().err
    assert not list(here.glob("out*"))


# --- a calibrator as a file for other languages --------------------------------------------------


def test_a_calibrator_alone_becomes_onnx(fitted, here):
    import onnxruntime

    path, calibrator = fitted
    assert run("export", path, "-o", "cal.onnx") == 0
    session = onnxruntime.InferenceSession("cal.onnx")
    logits, _ = drawn(1)
    (given,) = session.get_inputs()
    outputs = dict(
        zip(
            [one.name for one in session.get_outputs()],
            session.run(None, {given.name: logits.numpy()}),
            strict=True,
        )
    )
    expected = (logits / calibrator.temperature).softmax(1)
    np.testing.assert_allclose(outputs["probabilities"], expected, atol=1e-6)


# --- models --------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.fc = nn.Sequential(nn.Linear(8, 16), nn.ReLU()), nn.Linear(16, 3)

    def forward(self, x):
        return self.fc(self.body(x))


def loader(seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [(torch.randn(60, 8, generator=draw), torch.randint(3, (60,), generator=draw))] * 2


def trained():
    torch.manual_seed(3)
    net = Net()
    net.fc.weight.data *= 20
    return net.eval()


@pytest.mark.parametrize("recipe", ["temperature", "clip | temperature"])
@pytest.mark.parametrize("layer", [None, "body"])
def test_the_calibration_of_a_model_goes_to_a_file_and_onto_another_copy(recipe, layer, tmp_path):
    if layer and "clip" not in recipe:
        recipe = f"clip | {recipe}"
    model = featcal.calibrate(trained(), loader(), recipe, layer=layer)
    path = featcal.save(model, tmp_path / "calibration.safetensors")
    torch.save(featcal.detach(model).state_dict(), tmp_path / "weights.pt")
    again = Net().eval()
    again.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    again = featcal.load(path, onto=again)
    x, _ = loader(1)[0]
    with torch.no_grad():
        assert torch.equal(again(x), model(x))
        assert not torch.equal(again(x), featcal.detach(model)(x))
    assert isinstance(featcal.load(path), featcal.Calibrator)


def test_what_has_no_calibration_is_not_saved(tmp_path):
    for given in (trained(), Calibrated("temperature"), object()):
        with pytest.raises(featcal.InputError, match="calibrat"):
            featcal.save(given, tmp_path / "none.safetensors")
    assert not list(tmp_path.iterdir())


def test_the_state_dict_of_a_calibrated_model_holds_the_calibration_too(tmp_path):
    model = featcal.calibrate(trained(), loader(), "temperature")
    torch.save(model.state_dict(), tmp_path / "all.pt")
    again = featcal.attach(Net().eval(), featcal.Temperature(), head="fc")
    again.load_state_dict(torch.load(tmp_path / "all.pt", weights_only=True))
    x, _ = loader(1)[0]
    with torch.no_grad():
        assert torch.equal(again(x), model(x))


def test_a_hugging_face_model_keeps_its_calibration_beside_its_weights(tmp_path):
    from transformers import AutoModelForSequenceClassification, BertConfig
    from transformers import BertForSequenceClassification as Bert

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=50, intermediate_size=16, num_labels=3, **sizes)
    net = Bert(config).eval()
    net.classifier.weight.data *= 50
    tokens = torch.randint(50, (120, 6))
    with torch.no_grad():
        labels = net(tokens).logits.argmax(1)
    labels[::3] = torch.randint(3, (40,))
    batch = {"input_ids": tokens, "labels": labels}
    model = featcal.calibrate(net, [batch], "temperature")
    featcal.detach(model).save_pretrained(tmp_path)
    featcal.save(model, tmp_path / "calibration.safetensors")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    again = featcal.load(tmp_path / "calibration.safetensors", onto=again)
    with torch.no_grad():
        torch.testing.assert_close(again(tokens).logits, model(tokens).logits)


def test_a_timm_model_gets_its_calibration_back(tmp_path):
    for name in ("nms", "qnms"):  # torchvision has no CPU build here; timm imports its Python alone
        if not hasattr(torch.ops.torchvision, name):
            schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{name}", schema)
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    net = timm.create_model("resnet10t", num_classes=4).eval()
    x = torch.randn(40, 3, 32, 32)
    with torch.no_grad():
        labels = net(x).argmax(1)
    labels[::3] = torch.randint(4, (14,))
    model = featcal.calibrate(net, [(x, labels)], "temperature")
    path = featcal.save(model, tmp_path / "c.safetensors")
    again = featcal.load(path, onto=net)
    with torch.no_grad():
        assert torch.equal(again(x), model(x))


# --- evidence where the work is done -------------------------------------------------------------


def noisy_loader(seed=0, rows=240):
    """Inputs and labels that the network of `trained` gets right two times in three."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 8, generator=draw)
    with torch.no_grad():
        labels = trained()(x).argmax(1)
    labels[::3] = torch.randint(3, (len(labels[::3]),), generator=draw)
    return list(zip(x.split(50), labels.split(50), strict=True))


def test_a_model_is_scored_on_a_loader_before_and_after(tmp_path):
    net, val, test = trained(), noisy_loader(0), noisy_loader(1)
    before = featcal.evaluate(net, test)
    with torch.no_grad():
        logits = torch.cat([net(x) for x, _ in test])
    labels = torch.cat([y for _, y in test])
    expected = nn.functional.cross_entropy(logits, labels)
    assert before.metrics["nll"] == pytest.approx(expected.item(), rel=1e-5)
    assert featcal.evaluate((logits.numpy(), labels.numpy())).metrics == pytest.approx(
        before.metrics, rel=1e-4
    )
    model = featcal.calibrate(net, val, "temperature")
    after = featcal.evaluate(model, test)
    assert after.metrics["nll"] < before.metrics["nll"]
    with torch.no_grad():
        warm = torch.cat([model(x) for x, _ in test])
    assert after.metrics["nll"] == pytest.approx(
        nn.functional.cross_entropy(warm, labels).item(), rel=1e-5
    )
    data = featcal.collect(net, test)
    assert featcal.evaluate(data).metrics == pytest.approx(before.metrics, rel=1e-6)


def test_recipes_are_compared_on_a_model_and_its_loaders():
    net, val, test = trained(), noisy_loader(0), noisy_loader(1)
    how = {"recipes": ["none", "temperature", "clip"], "resamples": 100}
    found = featcal.compare(net, val, test, **how)
    data = [featcal.collect(net, loader) for loader in (val, test)]
    again = featcal.compare(*data, **how)
    assert [row.scores.metrics for row in found] == [row.scores.metrics for row in again]
    assert featcal.compare(net, val, **how).settings["folds"] == 5
    merits = [row.scores.metrics["ece"] for row in found.sorted_by("ECE")]
    assert merits == sorted(merits)
    with pytest.raises(featcal.InputError, match="metric is 'ecee': choose"):
        found.sorted_by("ecee")
    with pytest.raises(featcal.InputError, match="calibrated already"):
        featcal.compare(featcal.calibrate(net, val, "temperature"), val, test)
    with pytest.raises(featcal.InputError, match="loader of val"):
        featcal.compare(net)


def test_a_pack_and_its_splits_bring_their_head_along():
    pack = featcal.demo_pack()
    fit = featcal.parse("clip | temperature").fit(pack.split("val"), mode="sequential")
    assert not fit.report.noop
    assert fit.report.features == 256
    scores = featcal.evaluate(pack, fit)
    assert scores.metrics == featcal.evaluate(pack.split("test"), fit, pack.head).metrics


def test_what_is_printed_fits_a_line():
    pack = featcal.demo_pack()
    data = featcal.collect(trained(), noisy_loader())
    bins = featcal.metrics.Bins.of(data[0].logits.softmax(1), data[0].labels)
    for shown in (pack, pack.split("val"), data, data[0], next(iter(pack.split("val"))), bins):
        assert len(repr(shown)) < 200, type(shown)
        assert f"{len(data[0]):,}" in repr(data)


# --- what else is tried ---------------------------------------------------------------------------


def batch(seed):
    return Batch(*drawn(seed))


def test_all_compares_every_method_in_a_shell(here):
    """In a process of its own: methods register when loaded, which nothing may have done."""
    featcal.write_pack(here / "mine", {"val": batch(1), "test": batch(2)})
    typed = ["compare", "mine", "--all", "--metric", "NLL", "--resamples", "0", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "featcal", *typed], check=True, capture_output=True, text=True
    )
    recipes = {row["recipe"] for row in json.loads(done.stdout)["rows"]}
    assert recipes == set(every_recipe(classes=4, features=False, train=False))
    assert {"none", "auto", "temperature", "isotonic"} <= recipes


def test_a_misspelt_command_names_the_nearest(capsys):
    assert run("comprae") == 2
    assert "Did you mean 'compare'?" in capsys.readouterr().err


def test_what_a_fit_did_is_short_and_readable():
    logits, labels = drawn(1)
    recipe = featcal.parse("clip(threshold=9.0) | temperature")
    report = recipe.fit(Batch(None, labels, logits), nn.Identity())
    told = str(report.report)
    assert told.startswith("clip(threshold=9.0) | temperature, fitted on 400 rows, joint: NLL ")
    assert "\ntemperature: T = " in told
    assert len(told) < 600
    assert "tensor(0,)" not in str(featcal.parse("sample").fit([batch(1)]))


def test_a_model_calibrated_from_a_file_says_how_it_was_fitted(tmp_path):
    model = nn.Linear(6, 3)
    loader = [(torch.randn(200, 6), torch.arange(200) % 3)]
    calibrated = featcal.calibrate(model, loader, "temperature(temperature=1.5)", evidence=False)
    featcal.save(calibrated, tmp_path / "c.safetensors")
    again = featcal.load(tmp_path / "c.safetensors", onto=model)
    assert "T = 1.5 as given" in str(again.calibration)
    assert not hasattr(featcal.detach(again), "calibration")


def test_arrays_are_compared_by_the_recipes_that_suit_them():
    val, test = ((one.logits.numpy(), one.labels.numpy()) for one in (batch(1), batch(2)))
    found = featcal.compare(val, test, resamples=0)
    assert [row.recipe for row in found] == ["none", "auto", "temperature"]
    fitted = Calibrated("temperature").fit(*val)
    by_estimator = featcal.evaluate(test, fitted)
    assert by_estimator.metrics == featcal.evaluate(test, fitted.calibrator_).metrics


class Detector(nn.Module):
    """Gives what torchvision's detectors give, one mapping per image."""

    def forward(self, images):
        found = {"boxes": torch.rand(2, 4), "labels": torch.ones(2), "scores": torch.rand(2)}
        return [found for _ in images]


def test_natural_mistakes_are_told_in_a_sentence():
    model, loader = nn.Linear(6, 3), [(torch.randn(200, 6), torch.arange(200) % 3)]
    logits, labels = batch(1).logits, batch(1).labels
    with pytest.raises(featcal.InputError, match="model is a list: give a network"):
        featcal.calibrate(loader, model)
    with pytest.raises(featcal.InputError, match="never score on the rows of the fit"):
        featcal.compare(model, loader, loader)
    with pytest.raises(featcal.InputError, match=r"pass the pair \(logits, labels\)"):
        featcal.evaluate(logits.numpy(), labels.numpy())
    with pytest.raises(featcal.InputError, match=r"of two arrays pass \[\(inputs, labels\)\]"):
        featcal.calibrate(model, loader[0])
    with pytest.raises(featcal.InputError, match="rows are a DataLoader"):
        featcal.Temperature().fit([batch(1)]).transform(DataLoader(TensorDataset(logits)))
    with pytest.raises(featcal.InputError, match=r"recipe is a list.*test="):
        featcal.calibrate(model, loader, loader)
    with pytest.raises(featcal.InputError, match="recipes are given twice"):
        featcal.compare(model, loader, ["none"], recipes=["temperature"])
    with pytest.raises(featcal.InputError, match="never score on the rows of the fit"):
        featcal.compare((logits, labels), (logits.clone(), labels))
    with pytest.raises(featcal.InputError, match=r"rows first, evaluate\(data, calibrator\)"):
        featcal.evaluate(featcal.Temperature(), (logits, labels))
    with pytest.raises(featcal.InputError, match="model is the calibrator temperature"):
        featcal.calibrate(featcal.Temperature(), loader)
    for wrong in ("temperature", "cal.safetensors", None):
        with pytest.raises(featcal.InputError, match=r"parse\(.*load\(file, onto=.*calibrate\("):
            featcal.attach(model, wrong)
    with pytest.raises(featcal.InputError, match="or head=''"):
        featcal.attach(nn.ReLU(), featcal.parse("temperature(temperature=2)"))
    with pytest.raises(featcal.InputError, match="boxes, as detection does"):
        featcal.calibrate(Detector(), loader, "temperature")
    with pytest.raises(featcal.InputError, match="regression, which is not supported"):
        Calibrated().fit(logits, labels + 0.5)
    for recipes in ([featcal.Temperature()], featcal.Temperature(), "temperature", labels.numpy()):
        with pytest.raises(featcal.InputError, match=r"recipes (is|hold)"):
            featcal.compare(model, loader, [*loader], recipes=recipes)
    for call in (featcal.compare, featcal.evaluate, featcal.Temperature().fit):
        with pytest.raises(featcal.InputError, match=r"data holds a str.*Pack\.open"):
            call("mine")
    unfitted = Calibrated(featcal.parse("temperature").fit([batch(1)]))
    with pytest.raises(ValueError, match=r"Calibrated\.load"):
        unfitted.predict_proba(logits)


def test_probabilities_imported_or_predicted_as_logits_are_noticed(here, capsys):
    probs = batch(1).logits.softmax(1).numpy()
    labels = batch(1).labels.numpy()
    np.savez(here / "val.npz", logits=probs, labels=labels)
    assert run("pack", "import", "val.npz", "-o", "mine") == 0
    assert "Warning: the rows of val lie in 0..1" in capsys.readouterr().out
    with pytest.warns(featcal.CalibrationWarning, match="--probs"):
        featcal.import_files(here / "val.npz", here / "again")
    estimator = Calibrated("temperature", kind="probs").fit(probs, labels)
    featcal.save(estimator, here / "cal.safetensors")
    with pytest.warns(featcal.CalibrationWarning, match="kind='probs'"):
        Calibrated.load(here / "cal.safetensors").predict_proba(probs)


def test_probabilities_in_a_pair_or_a_file_are_noticed(here, fitted, capsys, monkeypatch):
    rows = [(one.logits.softmax(1).numpy(), one.labels.numpy()) for one in (batch(1), batch(2))]
    how = {"recipes": ["temperature"], "resamples": 0}
    monkeypatch.setattr("featcal.page.content.POINTS", 12)
    for call in (
        lambda: featcal.parse("temperature").fit(rows[0]),
        lambda: featcal.evaluate(rows[0]),
        lambda: featcal.compare(*rows, **how),
        lambda: featcal.compare(rows[0], **how),
        lambda: featcal.report(*rows, "r.html", recipes=["temperature"], resamples=100),
    ):
        with pytest.warns(featcal.CalibrationWarning, match=r"Batch\.from_probs") as told:
            call()
        assert {(one.filename, str(one.message)) for one in told} == {
            (__file__, str(told[0].message))  # the line of the caller, where Python says it once
        }
    path, _ = fitted
    (here / "new.csv").write_text("a,b,c,d\n0.33,0.33,0.33,0\n0.125,0.625,0.245,0\n")
    assert run("predict", "new.csv", path, "--logits", "-o", "out.csv") == 0
    assert "Warning: the rows of new.csv lie in 0..1" in capsys.readouterr().out
    (here / "z.csv").write_text("a,b,c,d\n0.33,0.33,0.33,0\n3,0,0,0\n")
    assert run("predict", "z.csv", path, "--logits", "-o", "z_out.csv") == 0
    assert "Warning" not in capsys.readouterr().out
    assert run("predict", "no.csv", path, "--logits", "-o", "no_out.csv") == 2
    assert "no.csv does not exist" in capsys.readouterr().err


def test_python_compares_as_the_shell_does():
    rows = [(one.logits.numpy(), one.labels.numpy()) for one in (batch(1), batch(2))]
    plain = ["none", "temperature"]
    for data in (rows[0], Batch(*drawn(1)), [Batch(*drawn(1))]):
        assert featcal.compare(data, plain, resamples=0).settings["folds"] == 5
    net, val, test = trained(), noisy_loader(0), noisy_loader(1)
    crossed = featcal.compare(net, val, plain, resamples=0)
    collected = featcal.compare(featcal.collect(net, val), plain, resamples=0)
    assert [one.scores.metrics for one in collected] == [one.scores.metrics for one in crossed]
    assert [one.recipe for one in featcal.compare(net, val, test, plain, resamples=0)] == plain
    found = featcal.compare(*rows, plain, metrics=["NLL", "auroc"], resamples=0)
    assert str(found).startswith("| recipe | NLL | AUROC |")
    assert found[0].scores.metrics["nll"] <= found[1].scores.metrics["nll"]
    with pytest.raises(featcal.InputError, match="metric is 'nil'"):
        featcal.compare(*rows, plain, metrics=["nil"])
    one = slice(60)
    few = [(z[one], y[one]) for z, y in rows]
    every = featcal.compare(*few, recipes="all", resamples=0)
    assert [one.recipe for one in every] == list(
        every_recipe(classes=CLASSES, features=False, train=False)
    )


def test_a_calibrator_is_not_written_under_the_name_of_another_format(here, capsys):
    featcal.write_pack(here / "mine", {"val": batch(1)})
    assert run("fit", "mine", "temperature", "-o", "cal.onnx") == 2
    assert "featcal export" in capsys.readouterr().err
    with pytest.raises(featcal.InputError, match=r"end it in \.safetensors"):
        featcal.save(featcal.parse("temperature(temperature=2)"), here / "cal.pt")
    assert not list(here.glob("cal*"))
    (here / "val.csv").write_text("label;a;b\na;1;0\n")
    assert run("pack", "import", "val.csv", "--probs", "-o", "other") == 2
    assert "not ';'" in capsys.readouterr().err
    assert run("fit", "val.csv", "temperature", "-o", "cal.safetensors") == 2
    assert "featcal pack import val.csv -o val" in capsys.readouterr().err


def test_rows_without_labels_that_are_imported_are_sent_to_predict(here, capsys):
    np.savez("new.npz", logits=np.zeros((3, 4)))
    (here / "new.csv").write_text("logit_a,logit_b\n0,1\n")
    for name in ("new.npz", "new.csv"):
        assert run("pack", "import", name, "-o", "mine") == 2
        assert "featcal predict" in capsys.readouterr().err


def test_a_table_whose_classes_are_not_those_of_the_fit_is_refused(here, capsys):
    logits, labels = drawn(1)

    def table(name, order, *more):
        header = ",".join([*("label" for _ in more), *(f"logit_{NAMES[k]}" for k in order)])
        np.savetxt(name, np.column_stack([*more, logits[:, order]]), "%.9g", ",", header=header)
        Path(name).write_text(Path(name).read_text().removeprefix("# "))

    table("val.csv", [0, 1, 2, 3], labels)
    table("new.csv", [0, 1, 2, 3])
    table("mixed.csv", [0, 2, 1, 3])
    assert run("pack", "import", "val.csv", "-o", "mine") == 0
    assert run("fit", "mine", "vector", "-o", "cal.safetensors", "--fit-split", "val") == 0
    assert run("predict", "new.csv", "cal.safetensors", "-o", "p.csv") == 0
    capsys.readouterr()
    assert run("predict", "mixed.csv", "cal.safetensors", "-o", "q.csv") == 2
    assert "'bee' as class 1, and here that is 'cat'" in capsys.readouterr().err
    assert not (here / "q.csv").exists()
