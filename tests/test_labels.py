"""Several labels a sample, as a user types it: digits of scikit-learn, five questions about each.

The digits are blurred by noise and a small network is trained on 500 of them for a second, so that
it is far too sure of the others.
"""

import json
from types import SimpleNamespace

import numpy as np
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import minimize_scalar
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import nn

import featcal
from featcal import METHODS, Batch, InputError, parse
from featcal.arrays import Calibrated
from featcal.cli import main
from featcal.heads.head import linear_of
from featcal.methods import norm_clip

QUESTIONS = {
    **{"even": (0, 2, 4, 6, 8), "large": (5, 6, 7, 8, 9), "loop": (0, 6, 8, 9)},
    **{"prime": (2, 3, 5, 7), "one": (1,)},
}
K = len(QUESTIONS)


class Network(nn.Module):
    def __init__(self, last=None):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
        self.fc = nn.Linear(64, K)
        self.last = last

    def forward(self, x):
        logits = self.fc(self.body(x))
        return logits if self.last is None else self.last(logits)


@pytest.fixture(scope="module")
def world():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x, digit = (torch.tensor(values) for values in load_digits(return_X_y=True))
        x = x.float() / 16
        x = x + 0.6 * torch.randn_like(x)
        y = torch.stack([torch.isin(digit, torch.tensor(q)) for q in QUESTIONS.values()], 1)
        order = torch.randperm(len(x))
        x, y = x[order], y[order].float()  # as BCEWithLogitsLoss takes them
        model = Network()
        steps = torch.optim.Adam(model.parameters(), 1e-2)
        for _ in range(100):
            steps.zero_grad()
            F.binary_cross_entropy_with_logits(model(x[:500]), y[:500]).backward()
            steps.step()
    model.eval().requires_grad_(False)
    parts = [slice(i, i + 200) for i in range(500, 1700, 200)]
    loaders = [[(x[p], y[p]) for p in some] for some in (parts[:3], parts[3:])]
    x, y = x[1100:1700], y[1100:1700]
    return SimpleNamespace(model=model, val=loaders[0], test=loaders[1], x=x, y=y)


@pytest.fixture(scope="module")
def rows(world):
    """What entered and left the last layer over val."""
    return featcal.collect(world.model, world.val)


@pytest.fixture(scope="module")
def pack(world, rows, tmp_path_factory):
    splits = {"val": rows, "test": featcal.collect(world.model, world.test)}
    path = tmp_path_factory.mktemp("labels") / "digits"
    return featcal.write_pack(path, splits, head=world.model.fc, class_names=list(QUESTIONS))


def run(*args):
    with pytest.raises(SystemExit) as left:
        main([str(one) for one in args])
    return left.value.code


def whole(rows):
    return torch.cat([b.logits for b in rows]).double(), torch.cat([b.labels for b in rows])


def bce(logits, labels):
    return float(F.binary_cross_entropy_with_logits(logits.double(), labels.double()))


def best_temperature(logits, labels):
    options = {"method": "bounded", "bounds": (0.05, 50), "options": {"xatol": 1e-10}}
    return minimize_scalar(lambda t: bce(logits / t, labels), **options).x


# --- values, held against scipy and scikit-learn ---


def test_one_temperature_for_all_labels_and_one_for_each_are_those_of_scipy(rows):
    z, y = whole(rows)
    shared = parse("all_labels(temperature)").fit(rows)
    assert float(shared.parts[0].temperature) == pytest.approx(best_temperature(z, y), rel=1e-4)
    assert shared.report.loss_before == pytest.approx(bce(z, y), rel=1e-6)
    own = parse("per_label(temperature)").fit(rows)
    expected = [best_temperature(z[:, j], y[:, j]) for j in range(K)]
    assert own.report.steps[0].values["temperature"] == pytest.approx(expected, rel=1e-4)
    mapped = own.transform(z.float())
    torch.testing.assert_close(mapped, (z / torch.tensor(expected)).float(), rtol=1e-4, atol=1e-4)
    assert own.report.loss_after == pytest.approx(bce(mapped, y), rel=1e-5)


def test_platt_scaling_of_each_label_is_logistic_regression(rows):
    z, y = whole(rows)
    found = parse("per_label(vector(ridge=0))").fit(rows).transform(z.float()).sigmoid()
    for j in range(K):
        model = LogisticRegression(C=np.inf, tol=1e-10).fit(z[:, j : j + 1], y[:, j])
        expected = torch.tensor(model.predict_proba(z[:, j : j + 1])[:, 1]).float()
        torch.testing.assert_close(found[:, j], expected, rtol=0, atol=2e-3)


def test_a_clip_of_all_labels_or_of_each_reaches_the_best_of_a_grid(world, rows):
    features, labels = torch.cat([b.features for b in rows]), whole(rows)[1]
    grid = torch.logspace(-2, 1.5, 300).tolist()
    logits = torch.stack([world.model.fc(features.clamp(-c, c)) for c in grid])
    lowest = min(bce(one, labels) for one in logits)
    assert parse("all_labels(clip)").fit(rows).report.loss_after <= lowest + 1e-4
    each = [min(bce(one[:, j], labels[:, j]) for one in logits) for j in range(K)]
    assert parse("per_label(clip)").fit(rows).report.loss_after <= np.mean(each) + 1e-4


class Soft(nn.Module):
    """A head that is no linear layer, of all labels or of one."""

    def __init__(self, layer, label=slice(None)):
        super().__init__()
        self.layer, self.label = layer, label

    def forward(self, features):
        return 9 * (self.layer(features)[:, self.label] / 3).tanh()


def test_own_values_are_those_of_a_model_of_each_label_alone(world, rows, monkeypatch):
    monkeypatch.setattr(norm_clip, "SAMPLE", 50)
    x, y = rows[0].features, rows[0].labels
    own = parse("per_label(norm_clip)").fit(Batch(None, y, x), Soft(world.model.fc))
    for j, part in enumerate(own.parts):
        head = Soft(world.model.fc, slice(j, j + 1))
        alone = parse("norm_clip").fit(Batch(None, y[:, j], x), head)
        assert float(part.threshold) == pytest.approx(float(alone.threshold), rel=1e-6)


REFUSED = {"group", "density", "proximity"}
SLOW = {
    "parameterised",
    "matrix",
    "dirichlet",
    "auto",
}  # and told apart from others by nothing here


@pytest.mark.parametrize("wrapper", ["all_labels", "per_label"])
@pytest.mark.parametrize("recipe", sorted({*METHODS, "clip | temperature"} - REFUSED - SLOW))
def test_every_method_is_fitted_to_the_answers_and_kept(recipe, wrapper, world, rows, tmp_path):
    text, head = f"{wrapper}({recipe})", linear_of(world.model.fc.weight[2:4], None)
    logits = head(rows[0].features)
    batch = Batch(logits, rows[0].labels[:, 2:4], rows[0].features)
    assert torch.equal(parse(text).wrap(head)(batch.features), logits)
    found = parse(text).fit(batch, head)
    assert repr(found) == text
    again = featcal.load(featcal.save(found, tmp_path / "c.safetensors"))
    mapped = found.wrap(head)(batch.features)
    assert torch.equal(mapped, again.wrap(head)(batch.features))
    assert found.report.loss_after <= found.report.loss_before
    assert found.report.loss_after == pytest.approx(bce(mapped, batch.labels), abs=1e-5)


@pytest.mark.parametrize("recipe", [*sorted(REFUSED), "auto", "all_labels(clip)"])
def test_what_suits_no_answers_is_refused_with_what_does(recipe):
    with pytest.raises(InputError, match=r"per_label has no use for .*: give .*isotonic"):
        parse(f"per_label({recipe})")


def test_auto_chooses_one_recipe_for_all_labels(rows):
    batch = rows[0].rows(slice(0, 120))
    found = parse("all_labels(auto)").fit(Batch(batch.logits[:, :2], batch.labels[:, :2]))
    kept = found.outcome()
    assert repr(kept) == f"all_labels({found.report.steps[0].values['recipe']})"
    assert torch.equal(kept.transform(batch.logits[:, :2]), found.transform(batch.logits[:, :2]))


def test_steps_for_all_labels_and_for_each_go_together(rows):
    mixed = parse("clip | per_label(temperature)").fit(rows)
    assert repr(mixed) == "all_labels(clip) | per_label(temperature)"
    whole_text = repr(parse("all_labels(clip) | all_labels(temperature)"))
    assert whole_text == "all_labels(clip | temperature)"
    assert repr(parse(whole_text)) == whole_text
    assert mixed.report.loss_after < mixed.report.loss_before


def test_a_label_without_a_single_yes_does_not_run_away(rows):
    z, y = whole(rows)
    y = y.clone()
    y[:, 1] = 0
    z = z.float().clone()
    z[:, 1] = -z[:, 1].abs() - 1  # and the network knows
    own = parse("per_label(temperature)").fit(Batch(z, y))
    assert 0.05 < own.report.steps[0].values["temperature"][1] <= 1
    assert bool(torch.isfinite(own.transform(z)).all())


# --- models ---


def test_a_calibrated_model_gives_logits_whose_sigmoids_are_honest(world, tmp_path):
    calibrated = featcal.calibrate(world.model, world.val, "clip | per_label(vector(ridge=0))")
    before, after = (featcal.evaluate(one, world.test) for one in (world.model, calibrated))
    assert after.metrics["ece"] < 0.4 * before.metrics["ece"]
    assert after.metrics["nll"] < 0.75 * before.metrics["nll"]
    logits = calibrated(world.x)
    assert after.metrics["nll"] == pytest.approx(bce(logits, world.y), rel=1e-5)
    path = featcal.save(calibrated, tmp_path / "c.safetensors")
    assert torch.equal(featcal.load(path, onto=world.model)(world.x), logits)
    file = tmp_path / "m.onnx"
    made = featcal.export.onnx(calibrated, file, world.x[:8], probabilities=True)
    assert "no prediction changed" in str(made)
    session = onnxruntime.InferenceSession(file)
    probs = session.run(["probabilities"], {session.get_inputs()[0].name: world.x.numpy()})[0]
    torch.testing.assert_close(torch.tensor(probs), logits.sigmoid(), rtol=0, atol=1e-4)


def test_a_model_that_gives_sigmoids_stays_one(world, tmp_path):
    model = Network(nn.Sigmoid()).eval()
    model.load_state_dict(world.model.state_dict())
    calibrated = featcal.calibrate(model, world.val, "temperature")
    expected = featcal.calibrate(world.model, world.val, "temperature")(world.x).sigmoid()
    torch.testing.assert_close(calibrated(world.x), expected, rtol=0, atol=1e-6)
    made = featcal.export.onnx(calibrated, tmp_path / "m.onnx", world.x[:8])
    assert list(made.outputs) == ["probabilities"]
    with pytest.raises(InputError, match=r"give labels \(n, k\) of 0 and 1"):
        featcal.calibrate(model, [(x, y[:, 0]) for x, y in world.val], "temperature")


# --- metrics ---


def test_metrics_are_those_of_the_answers_their_mean_over_labels_and_of_each(world, pack):
    scores = featcal.evaluate(pack)
    z, y = whole(pack.split("test"))
    p, y = z.sigmoid(), y.bool()
    assert (scores.n, scores.samples) == (y.numel(), len(y))
    assert scores.metrics["accuracy"] == pytest.approx(float(((p > 0.5) == y).double().mean()))
    assert scores.metrics["nll"] == pytest.approx(bce(z, y), rel=1e-5)
    assert scores.metrics["brier"] == pytest.approx(2 * float((p - y.double()).square().mean()))
    for j, one in enumerate(scores.labels):
        alone = featcal.evaluate(Batch(z[:, j].float(), y[:, j]))
        assert one == pytest.approx(alone.metrics, rel=1e-6, nan_ok=True)
    macro = [one["ece"] for one in scores.labels]
    assert scores.macro["ece"] == pytest.approx(np.mean(macro))
    assert f"{y.numel():,} answers about {K} labels of {len(y)} samples" in repr(scores)
    assert scores._repr_html_().count(f"<td>{scores.macro['nll']:.4f}</td>") == 2
    told = scores.as_json()
    assert told["macro"]["nll"] == pytest.approx(told["metrics"]["nll"])
    assert len(told["labels"]) == K


def test_compare_takes_loaders_and_folds_of_whole_samples(world):
    recipes = ["none", "temperature", "per_label(temperature)"]
    found = featcal.compare(world.model, world.val, world.test, recipes=recipes, resamples=100)
    raw, shared, own = (row.scores for row in found)
    assert [row.recipe for row in found] == recipes
    assert own.macro["ece"] < shared.macro["ece"] < raw.macro["ece"]
    assert found.difference(1, "nll").verdict == "better"
    assert "5 labels of 600 samples" in repr(found)
    folded = featcal.compare(world.model, world.val, recipes=recipes[:2], resamples=0)
    assert folded[1].scores.n == 600 * K
    assert folded[1].scores.metrics["nll"] < folded[0].scores.metrics["nll"]


@pytest.mark.filterwarnings("ignore::featcal.CalibrationWarning")
def test_what_the_page_of_rows_says_to_type_can_be_typed(world, rows, tmp_path):
    test = featcal.collect(world.model, world.test)
    how = {"recipes": ["temperature"], "resamples": 100}
    made = featcal.report(rows, test, tmp_path / "page.html", **how)
    names = {"featcal": featcal, "val": rows, "test": test}
    exec(made.summary.command, names)
    assert repr(names["calibrator"]) == "all_labels(temperature)"


@pytest.mark.parametrize("samples", [300, 5000])  # of 5,000 with 4 labels rows are drawn in groups
def test_intervals_draw_whole_samples(samples):
    draw = torch.Generator().manual_seed(0)
    z = 2 * torch.randn(samples, 1, generator=draw)
    y = torch.bernoulli((z / 2).sigmoid(), generator=draw).long()
    four = featcal.evaluate(Batch(z.expand(-1, 4), y.expand(-1, 4)), resamples=400)  # said 4 times
    once = featcal.evaluate(Batch(z, y), resamples=400)
    for name in ("accuracy", "nll", "ece", "smooth_ece"):
        assert four.metrics[name] == pytest.approx(once.metrics[name], abs=1e-3)
        spans = [ends.high - ends.low for ends in (four.interval(name), once.interval(name))]
        assert spans[0] == pytest.approx(spans[1], rel=0.15), name  # half as wide by single rows


# --- refusals ---

Z = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
Y = (torch.arange(120).reshape(40, 3) % 5 < 2).long()


@pytest.mark.parametrize(
    ("labels", "recipe", "says"),
    [
        (Y, "temperature", 'fit featcal.parse("all_labels(temperature)")'),
        (Y[:, 0], "all_labels(temperature)", "give the recipe inside alone"),
        (F.one_hot(Y.sum(1), 3), "all_labels(temperature)", "pass labels.argmax(1)"),
        (Y + 1, "all_labels(temperature)", "neither 0 nor 1 in rows 0"),
        (Y * 0.5, "all_labels(temperature)", "(rows, 3) of 0 and 1"),
        (Y[:, :2], "all_labels(temperature)", "there are 3 classes"),
    ],
)
def test_labels_that_do_not_fit_are_refused_by_name(labels, recipe, says):
    with pytest.raises(InputError) as refused:
        parse(recipe).fit(Batch(Z, labels))
    assert says in str(refused.value)


def test_the_scikit_learn_face_sends_several_labels_elsewhere(rows, tmp_path):
    z, y = whole(rows)
    with pytest.raises(InputError, match="several labels a row are for"):
        Calibrated("temperature").fit(z, y)
    fitted = parse("all_labels(temperature)").fit((z.numpy(), y.numpy()))
    path = featcal.save(fitted, tmp_path / "c.safetensors")
    with pytest.raises(InputError, match="is for several labels a row"):
        Calibrated.load(path)


def test_a_calibrator_of_one_label_is_refused_on_rows_of_several():
    with pytest.raises(InputError, match="not made for data with several labels"):
        featcal.evaluate(Batch(Z, Y), parse("temperature"))


# --- the command line ---


def test_the_command_line_serves_a_pack_of_several_labels(pack, world, tmp_path, capsys):
    cal, probs, page = (tmp_path / name for name in ("c.safetensors", "p.npy", "r.html"))
    assert run("fit", pack.path, "per_label(temperature)", "-o", cal) == 0
    assert "own values for 5 of 5 labels" in " ".join(capsys.readouterr().out.split())
    assert run("eval", pack.path, cal, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["recipe"] == "per_label(temperature)"
    assert told["samples"] == 600
    assert told["metrics"]["ece"] < 0.05
    assert run("eval", pack.path, cal) == 0
    assert "prime" in capsys.readouterr().out
    assert run("predict", pack.path, cal, "-o", probs) == 0
    expected = featcal.load(cal).transform(whole(pack.split("test"))[0].float()).sigmoid()
    np.testing.assert_allclose(np.load(probs), expected, atol=1e-6)
    assert run("fit", pack.path, "clip | temperature", "-o", tmp_path / "two.safetensors") == 0
    assert run("export", pack.path, tmp_path / "two.safetensors", "-o", tmp_path / "h.onnx") == 0
    assert run("fit", pack.path, "group", "-o", tmp_path / "no")
    assert "all_labels has no use for group" in capsys.readouterr().err
    short = ["--recipe", "temperature", "--recipe", "per_label(vector)"]
    assert run("report", pack.path, cal, "-o", page, *short) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "A sample may have any of 5 labels" in out
    text = page.read_text()
    assert "Label by label" in text
    assert "own values for each label" in text
    assert "Class by class" not in text


def test_files_of_several_labels_become_a_pack(pack, tmp_path, capsys):
    arrays = {}
    for split in ("val", "test"):
        logits, labels = whole(pack.split(split))
        arrays |= {f"{split}_probs": logits.sigmoid().numpy(), f"{split}_labels": labels.numpy()}
    np.savez(tmp_path / "digits.npz", **arrays)
    assert run("pack", "import", tmp_path / "digits.npz", "-o", tmp_path / "two") == 0
    z = whole(featcal.Pack.open(tmp_path / "two").split("test"))[0]
    torch.testing.assert_close(z, whole(pack.split("test"))[0], rtol=1e-4, atol=1e-4)
    asked = ("none", "temperature", "--resamples", "0", "--json")
    assert run("compare", tmp_path / "two", *asked) == 0
    told = json.loads(capsys.readouterr().out.split("Wrote", 1)[1].split("\n", 1)[1])
    assert told["rows"][1]["macro"]["ece"] < told["rows"][0]["macro"]["ece"]


def test_a_given_value_holds_for_all_labels_and_is_no_fresh_start():
    given = parse("all_labels(temperature(temperature=2))")
    assert not given.fresh
    z = torch.randn(4, 3)
    assert torch.equal(given.transform(z), z / 2)
    with pytest.raises(InputError, match="give all_labels"):
        parse("per_label(temperature(temperature=2))")
