"""The surface of the package as a person types it: fixed values, evidence, pages, notebooks."""

import math
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import featcal
from featcal import Batch
from featcal.cli import main


def drawn(seed=0, rows=400, classes=4, scale=3.0):
    """Overconfident logits, by `scale`, and their labels."""
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, classes, generator=draw)
    noise = -torch.rand(rows, classes, generator=draw).log()
    return scale * logits, (logits - noise.log()).argmax(1)


def run(*args):
    with pytest.raises(SystemExit) as left:
        main([str(one) for one in args])
    return left.value.code


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    """A pack of features, with a head that is too sure of itself."""
    draw = torch.Generator().manual_seed(0)
    weight = 2 * torch.randn(3, 6, generator=draw)
    arrays = {"weight": weight.numpy(), "bias": np.zeros(3, np.float32)}
    for part in ("val", "test"):
        x = torch.randn(300, 6, generator=draw).relu()
        noise = -torch.rand(300, 3, generator=draw).log()
        labels = (x @ weight.T / 3 - noise.log()).argmax(1)
        arrays |= {f"{part}_features": x.numpy(), f"{part}_labels": labels.numpy()}
    folder = tmp_path_factory.mktemp("mine")
    np.savez(folder / "mine.npz", **arrays)
    return featcal.import_files([folder / "mine.npz"], folder / "mine").path


# --- values that a recipe fixes ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "fixed"),
    [
        ("temperature(temperature=1.4)", {"temperature": 1.4}),
        ("logit_clip(threshold=2)", {"threshold": 2}),
        ("clip(threshold=0.5)", {"threshold": 0.5}),
        ("norm_clip(threshold=1.5)", {"threshold": 1.5}),
    ],
)
@pytest.mark.filterwarnings("ignore::featcal.CalibrationWarning")
def test_a_fixed_value_is_applied_and_never_fitted(recipe, fixed, mine, tmp_path):
    pack = featcal.Pack.open(mine)
    val = next(iter(pack.split("val")))
    fresh, fitted = featcal.parse(recipe), featcal.parse(recipe).fit(pack.split("val"))
    loaded = featcal.load(featcal.save(fitted, tmp_path / "c.safetensors"))
    (step,) = loaded.report.steps
    for one in (fresh, fitted, loaded):
        assert repr(one) == recipe
        torch.testing.assert_close(
            one(val.features, pack.head), fresh(val.features, pack.head), rtol=0, atol=0
        )
        assert {key: float(value) for key, value in one.named_buffers()} == pytest.approx(fixed)
        assert repr(one.reset()) == recipe
    assert step.values == fixed
    assert not step.noop
    assert "as given, not fitted" in step.message


@pytest.mark.filterwarnings("ignore::featcal.CalibrationWarning")
def test_the_other_steps_adapt_to_a_fixed_value(mine):
    pack = featcal.Pack.open(mine)
    val = pack.split("val")
    after = featcal.parse("clip(threshold=1.0) | temperature").fit(val)
    clipped = [Batch(b.features.clamp(max=1) @ pack.head.weight.T, b.labels) for b in val]
    alone = featcal.Temperature().fit(clipped)
    assert float(after.steps[1].temperature) == pytest.approx(float(alone.temperature), rel=1e-4)
    # In a joint fit the clip is chosen for the temperature that is given, not for the best one.
    before = featcal.parse("clip | temperature(temperature=0.5)").fit(val)
    tried = {}
    for c in [*np.linspace(0.2, 3, 57), math.inf]:
        logits = torch.cat([b.features.clamp(max=float(c)) @ pack.head.weight.T for b in val])
        labels = torch.cat([b.labels for b in val])
        tried[c] = float(nn.functional.cross_entropy(logits / 0.5, labels))
    assert before.report.loss_after <= min(tried.values()) + 1e-6


def test_a_fixed_value_that_harms_is_said_and_kept():
    with pytest.warns(featcal.CalibrationWarning, match=r"T = 0\.1 as given.* rises"):
        one = featcal.parse("temperature(temperature=0.1)").fit(Batch(*drawn()))
    assert float(one.temperature) == pytest.approx(0.1)
    assert one.report.warnings


@pytest.mark.parametrize(
    ("recipe", "culprit"),
    [
        ("clip(c=0.5)", "threshold=None"),
        ("clip(threshold=-1)", "threshold is -1"),
        ("clip(threshold=1e999)", "threshold is inf"),
        ("temperature(temperature=True)", "temperature is True"),
        ("temperature(temperature=1.4, grid=True)", "leave out grid"),
        ("clip(threshold=0.5, min_accuracy=0.9)", "leave out min_accuracy"),
    ],
)
def test_what_no_value_can_be_is_refused(recipe, culprit):
    with pytest.raises(featcal.InputError, match=culprit):
        featcal.parse(recipe)


def test_a_fixed_value_is_told_by_fit_and_compare(mine, here, capsys):
    assert run("fit", mine, "clip(threshold=2.0) | temperature", "-o", "c.safetensors") == 0
    told = capsys.readouterr().out
    assert "c = 2 (given)" in told
    assert "as given, not fitted" in told
    recipes = ("none", "temperature(temperature=2.5)")
    assert run("compare", mine, *recipes, "--resamples", "0") == 0
    assert "T = 2.5 (given)" in capsys.readouterr().out


# --- evidence ------------------------------------------------------------------------------------


class Net(nn.Module):
    """Gives three logits of three inputs, `sure` times too large."""

    def __init__(self, sure=3.0):
        super().__init__()
        self.fc = nn.Linear(3, 3, bias=False)
        self.fc.weight.data = sure * torch.eye(3)

    def forward(self, x):
        return self.fc(x)


def loader(seed, rows=600):
    logits, labels = drawn(seed, rows, classes=3, scale=1.0)
    return [(logits, labels)]


@pytest.mark.parametrize("told", ["test", "val alone"])
def test_calibrate_brings_evidence_on_rows_it_was_not_fitted_on(told):
    test = loader(1) if told == "test" else None
    net = Net()
    model = featcal.calibrate(net, loader(0), "temperature", test=test)
    before, after = (row.scores.metrics for row in model.calibration.comparison)
    assert before["nll"] > after["nll"]
    text = str(model.calibration)
    assert "fitted on 600 rows" in text
    assert "temperature" in text.splitlines()[0]
    assert text.count("better") >= 2
    if test is not None:
        plain = featcal.evaluate(net, test).metrics, featcal.evaluate(model, test).metrics
        assert (before["nll"], after["nll"]) == pytest.approx([one["nll"] for one in plain])
    else:
        assert "cross-fitted" in text
        # Every fold has its own temperature, and none of them saw the rows it is scored on.
        folds = {float(one.temperature) for one in model.calibration.comparison[1].folds}
        assert len(folds) == 5
    assert not model.calibration.warnings
    assert not hasattr(featcal.detach(model), "calibration")
    assert not hasattr(net, "calibration")
    assert "calibration" not in model.state_dict()
    quick = featcal.calibrate(net, loader(0), "temperature", evidence=False)
    assert not hasattr(quick, "calibration")


def test_few_rows_are_said_by_calibrate_and_by_fit(here, capsys):
    with pytest.warns(featcal.CalibrationWarning, match="45 rows are few"):
        model = featcal.calibrate(Net(), loader(0, 45), "temperature")
    assert "45 rows are few" in str(model.calibration)
    logits, labels = drawn(0, 45)
    np.savez("few.npz", val_logits=logits, val_labels=labels)
    assert run("pack", "import", "few.npz", "-o", "few") == 0
    assert run("fit", "few", "temperature", "-o", "c.safetensors") == 0
    assert "Warning: 45 rows are few" in capsys.readouterr().out
    assert run("fit", "few", "temperature(temperature=2)", "-o", "d.safetensors") == 0
    assert "few:" not in capsys.readouterr().out  # nothing was learned
    with pytest.warns(featcal.CalibrationWarning, match="3 rows are few"):
        model = featcal.calibrate(Net(), loader(0, 3), "temperature")
    assert model.calibration.comparison is None
    estimator = featcal.arrays.Calibrated("temperature")
    for fit in (featcal.Temperature().fit, lambda pair: estimator.fit(*pair)):
        with pytest.warns(featcal.CalibrationWarning, match="45 rows are few"):
            fit((logits, labels))
    with pytest.warns(featcal.CalibrationWarning) as said:
        featcal.calibrate(Net(), loader(0, 45), "temperature")
    assert sum("few" in str(one.message) for one in said) == 1


def test_rows_are_counted_by_the_samples_they_belong_to():
    logits, labels = drawn(0, 4000)
    images = Batch(logits, labels, groups=torch.arange(4000) // 500)
    with pytest.warns(featcal.CalibrationWarning, match="8 samples are few"):
        featcal.Temperature().fit(images)


def test_a_calibration_that_overshoots_is_said():
    with pytest.warns(featcal.CalibrationWarning) as said:
        featcal.calibrate(Net(1.2), loader(0), "temperature(temperature=4)")
    (told,) = (str(one.message) for one in said if "overshoots" in str(one.message))
    assert "too high to" in told
    assert told.endswith("featcal.compare")
    assert any("does not help" in str(one.message) for one in said)


def test_what_was_never_fitted_is_said_where_it_is_attached():
    with pytest.warns(featcal.CalibrationWarning, match="temperature was never fitted"):
        featcal.attach(Net(), featcal.Temperature())


@pytest.mark.filterwarnings("error")
def test_what_was_fitted_assigned_or_fixed_is_attached_without_a_word():
    for one in (
        featcal.Temperature().fit(Batch(*drawn(0, classes=3))),
        featcal.Temperature().assign(temperature=2.0),
        featcal.parse("temperature(temperature=2)"),
    ):
        featcal.attach(Net(), one)


# --- one set of options and defaults -------------------------------------------------------------


def test_every_command_has_the_same_names_for_the_same_things():
    from featcal.cli.app import group

    def every(commands):
        for name, one in commands.items():
            yield from every(one.commands) if hasattr(one, "commands") else [(name, one)]

    known = {"--fit-split", "--test-split", "--train-split"}
    for name, command in every(group.commands):
        options = {text for one in command.params for text in one.opts if text.startswith("-")}
        assert {text for text in options if "split" in text} <= known, name
        assert not options & {"--out", "--joint"}, name
        assert ("-o" in options) == ("--output" in options), name
        fits = "--fit-split" in options
        assert fits == ("--sequential" in options), name


def test_compare_and_fit_fit_alike(mine):
    recipe = "clip | temperature"
    fitted = featcal.parse(recipe).fit(featcal.Pack.open(mine).split("val"))
    found = featcal.compare(featcal.Pack.open(mine), recipes=[recipe], resamples=0)
    assert str(found[0].calibrator) == str(fitted)
    assert found.settings["mode"] == "joint"
    stepwise = featcal.parse(recipe).fit(featcal.Pack.open(mine).split("val"), mode="sequential")
    assert str(stepwise) != str(fitted)


def test_metrics_are_known_in_any_case(mine, here, capsys):
    assert run("compare", mine, "none", "temperature", "--metric", "ECE", "--resamples", "0") == 0
    assert "ECE" in capsys.readouterr().out


def test_all_is_every_method_that_fits_the_data(mine, capsys, monkeypatch):
    from featcal.report.compare import every_recipe

    wide = set(every_recipe(classes=1000, features=False, train=True))
    assert wide.isdisjoint({"clip", "norm_clip", "matrix", "dirichlet"})
    assert {"none", "auto", "temperature", "svs"} <= wide
    every = every_recipe(classes=3, features=True, train=False)
    assert set(featcal.METHODS) - set(every) == {"density"}
    assert run("compare", mine, "--all", "--paper") == 2
    assert "--all" in capsys.readouterr().err
    asked = {}
    module = import_module("featcal.report.compare")  # the package has a function of its name
    few = ("none", "clip")
    monkeypatch.setattr(module, "every_recipe", lambda **given: asked.update(given) or few)
    assert run("compare", mine, "--all", "--resamples", "0") == 0
    assert asked == {"classes": 3, "features": True, "train": False}
    assert "clip" in capsys.readouterr().out


# --- notebooks and pictures ----------------------------------------------------------------------

ROOT = Path(__file__).parents[1]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_the_quickstart_notebook_runs_and_shows_tables_and_a_picture():
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    notebook = nbformat.read(ROOT / "examples" / "quickstart.ipynb", as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs for cell in cells)  # what is shown is what runs
    nbclient.NotebookClient(notebook, timeout=120).execute()
    shown = [cell.outputs[-1].data for cell in cells]
    _, compared, calibrator, report, scores, diagram, evidence, last = shown
    assert compared["text/html"].count("<tr>") == 4
    assert "<code>clip | temperature</code>" in compared["text/html"]
    for one in (calibrator, report):
        assert "T = 1.412" in one["text/html"]
    assert "ECE (equal-width bins)" in scores["text/html"]
    assert diagram["image/png"].startswith("iVBOR")
    assert "cross-fitted" in evidence["text/html"]
    assert 0.7 < float(last["text/plain"]) < 0.8


def test_what_notebooks_show_holds_no_html_of_a_name():
    one = featcal.compare(Batch(*drawn(1)), Batch(*drawn(2)), ["none"], resamples=0)
    evil = replace(one, settings={**one.settings, "pack": "<script>"})
    assert "<script>" not in evil._repr_html_()
    assert "&lt;script&gt;" in evil._repr_html_()
    fresh = featcal.parse("temperature(temperature=1.4)")
    assert "temperature=1.4" in fresh._repr_html_()


def test_a_diagram_is_known_to_pyplot_and_saved_by_its_ending(tmp_path):
    from matplotlib import pyplot

    logits, labels = drawn()
    diagram = featcal.ReliabilityDiagram.of(logits=logits, labels=labels)
    assert len(repr(diagram)) < 80
    pyplot.close("all")
    shown = diagram.plot()
    assert [pyplot.figure(number) for number in pyplot.get_fignums()] == [shown.axes[0].figure]
    assert shown._repr_png_() is None  # pyplot shows it
    pyplot.close("all")
    assert diagram.save(tmp_path / "T1.4.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in diagram.save(tmp_path / "d.SVG").read_bytes()
    assert not pyplot.get_fignums()
    for path, culprit in (("d.pdf", "no known format"), ("T1.4.png", "exists")):
        with pytest.raises(featcal.InputError, match=culprit):
            diagram.save(tmp_path / path)


# --- the page, from Python -----------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr("featcal.page.content.POINTS", 12)
    return {"recipes": ["temperature"], "resamples": 100}


def test_a_page_is_written_of_a_model_and_of_a_pack(mine, tmp_path, quick):
    path = tmp_path / "model.html"
    content = featcal.report(Net(), loader(0, 300), loader(1, 300), path, **quick)
    page = path.read_text()
    assert content.summary.command == "model = featcal.calibrate(model, val, 'temperature')"
    assert "featcal.calibrate(model, val" in page
    assert str(tmp_path.parent.parent) not in page.replace(str(path), "")  # no folder that is gone
    with pytest.raises(featcal.InputError, match="exists"):
        featcal.report(Net(), loader(0), loader(1), path)
    with pytest.raises(featcal.InputError, match="no known format"):
        featcal.report(Net(), loader(0), loader(1), tmp_path / "x.pdf")
    for wrong in ((3, loader(0), loader(1)), (Net(), "val", "test")):
        with pytest.raises(featcal.InputError, match="model, val_loader, test_loader"):
            featcal.report(*wrong, tmp_path / "x.html")
    with pytest.raises(featcal.InputError, match=r"featcal\.compare.* by cross-fitting"):
        featcal.report(Net(), loader(0), tmp_path / "x.html")
    one = loader(0)
    for test, why in ((None, "is a NoneType"), (["x"], "comes as str"), (one, "are the same")):
        with pytest.raises(featcal.InputError, match=why) as told:
            featcal.report(Net(), one, test, tmp_path / "x.html")
        assert "kept" not in str(told.value)  # in a folder that is gone
    found = featcal.report(featcal.Pack.open(mine), "val", "test", tmp_path / "p.html", **quick)
    again = featcal.report(featcal.Pack.open(mine), tmp_path / "q.html", **quick)
    assert str(again.summary) == str(found.summary)
    assert (tmp_path / "p.html").is_file()
    assert found.summary.command.startswith("featcal fit") or not found.summary.command


def test_a_page_is_written_of_rows_in_any_form(tmp_path, quick):
    net, val, test = Net(), loader(0, 300), loader(1, 300)
    of_model = featcal.report(net, val, test, tmp_path / "model.html", **quick)
    collected = [featcal.collect(net, one) for one in (val, test)]
    arrays = [(net(x).detach().numpy(), y.numpy()) for ((x, y),) in (val, test)]
    for name, rows in (("collected", collected), ("arrays", arrays)):
        content = featcal.report(*rows, tmp_path / f"{name}.html", **quick)
        for mine, other in zip(content.comparison, of_model.comparison, strict=True):
            assert mine.scores.metrics == pytest.approx(other.scores.metrics, abs=1e-5)
        assert content.summary.command == "calibrator = featcal.parse('temperature').fit(val)"
        assert (content.sweeps == ()) == (name == "arrays")  # which have no features


def test_the_package_behind_the_call_is_a_package_as_before():
    import featcal.report.bootstrap as module
    from featcal.report import Comparison

    assert module is featcal.report.bootstrap
    assert Comparison is featcal.report.Comparison
    assert callable(featcal.report)


# --- train names the culprit ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "culprit"),
    [
        ("train folder resnet5 -o r --data d", "did you mean resnet50"),
        ("train folder resnet50 -o r --data d --loss focl", "did you mean focal"),
        ("train cifar10 resnet50 -o r --data d --loss focl", "did you mean focal"),
        ("train folder resnet50 -o r --data d", "train"),
        ("train cifar100 resnet50 -o r --data d", "has no cifar100"),
    ],
)
def test_train_names_what_is_wrong_and_not_the_size_of_images(words, culprit, here, capsys):
    (here / "d").mkdir()
    assert run(*words.split()) == 2
    said = capsys.readouterr().err
    assert culprit in said
    assert "--image-size" not in said


def test_a_data_set_is_found_in_the_folder_of_its_name(tmp_path):
    from featcal.datasets import load_images

    pixels = bytes(3072)
    place = tmp_path / "data" / "cifar100"
    place.mkdir(parents=True)
    record = bytes([0, 7]) + pixels
    (place / "train.bin").write_bytes(record * 2)
    (place / "test.bin").write_bytes(record)
    (place / "fine_label_names.txt").write_text("\n".join(f"c{i}" for i in range(100)))
    found = load_images("cifar100", tmp_path / "data")
    assert (len(found.train), len(found.test)) == (2, 1)
    assert found.train.labels.tolist() == [7, 7]


def test_evidence_of_a_fit_that_changes_nothing_shows_no_other_fit():
    torch.manual_seed(0)
    net = nn.Linear(4, 3).eval()
    x = torch.randn(600, 4)
    y = (net(x) - (-torch.rand(600, 3).log()).log()).argmax(1)
    model = featcal.calibrate(net, [(x, y)], "auto")
    assert torch.equal(model(x), net(x))
    assert model.calibration.comparison is None
    assert "Nothing was changed" in str(model.calibration)


def test_scores_and_the_page_print_a_line(tmp_path):
    page = featcal.report(featcal.demo_pack(), path=tmp_path / "page.html", recipes=["temperature"])
    assert len(repr(page)) < 400
    scores = page.comparison[0].scores
    assert len(repr(scores)) < 200
    assert "accuracy" in repr(scores)
