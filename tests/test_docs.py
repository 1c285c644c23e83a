"""What the documents show is what the code does and the result files hold."""

import importlib.util
import inspect
import json
import multiprocessing
import re
import shlex
import sys
import types
import warnings
from collections import OrderedDict
from pathlib import Path

import click
import numpy as np
import pytest
import torch
import yaml
from torch import nn

import featcal
from featcal.cli.app import HELP, group, main
from featcal.core.fit import ece

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))


def script(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def python_blocks(path):
    return re.findall(r"```python\n(.*?)```", (ROOT / path).read_text(), flags=re.DOTALL)


def shell_blocks(path):
    """The shell commands of a page, lines that go on put together."""
    blocks = re.findall(r"^```bash\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)
    return [block.replace("\\\n", " ") for block in blocks]


def between(text, start, end):
    return text.split(start)[1].split(end)[0].strip()


def results(name):
    return json.loads((ROOT / "results" / f"{name}.json").read_text())


def test_tables_are_those_of_their_result_files():
    figures = script(ROOT / "experiments" / "figures.py")
    shown = between((ROOT / "README.md").read_text(), figures.START, figures.END)
    assert shown == figures.table(results("demo"))
    clips = script(ROOT / "experiments" / "clips.py")
    assert between(clips.DOCS.read_text(), clips.START, clips.END) == clips.tables(results("clips"))
    bench = script(ROOT / "bench" / "tables.py")
    for page in bench.PARTS:
        text = (ROOT / "docs" / page).read_text()
        for name, part in bench.parts(page).items():
            assert between(text, bench.START.format(name), bench.END.format(name)) == part


def test_what_the_benchmarks_are_said_to_show():
    jobs = {job["job"]: job["cases"] for job in results("bench-cpu")["jobs"]}
    assert {cases[0]["name"] for cases in jobs.values()} == {"featcal"}
    assert jobs["temperature"][0]["excess"] < 1e-9
    clip, published = jobs["clip"]
    assert published["seconds"] > 100 * clip["seconds"]


def test_the_result_file_is_what_the_code_gives_today():
    pack = featcal.demo_pack()
    for row in results("demo")["rows"]:
        (found,) = featcal.compare(
            *(pack.split("val"), pack.split("test"), [row["recipe"]], pack.head),
            **{"mode": row["mode"], "resamples": 0},
        )
        for name in ("accuracy", "ece", "nll", "brier"):
            assert found.scores.metrics[name] == pytest.approx(row["metrics"][name], abs=2e-3)


def test_every_method_and_every_option_is_documented():
    text = (ROOT / "docs" / "methods.md").read_text()
    for name, method in featcal.METHODS.items():
        arguments = inspect.signature(method).parameters.values()
        call = f"{name}({', '.join(f'{a.name}={a.default!r}' for a in arguments)})"
        assert f"\n{call}\n" in text, f"docs/methods.md does not show {call}"
        assert f"`{name}`" in text


def test_the_recipes_of_the_documents_can_be_read():
    for path in ("README.md", "docs/methods.md", "docs/cli.md", "docs/reproduction.md"):
        for text in re.findall(r"`([a-z_]+\([^`)]*=[^`)]*\))`", (ROOT / path).read_text()):
            name = text.partition("(")[0]
            if name in featcal.METHODS:
                featcal.parse(text)


@pytest.mark.no_cover
@pytest.mark.filterwarnings("ignore::featcal.CalibrationWarning")
def test_the_readme_and_the_quickstart_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(6, 16), nn.ReLU())
    model = nn.Sequential(OrderedDict(body=body, fc=nn.Linear(16, 3)))
    x = torch.randn(300, 6)
    with torch.no_grad():
        features = body(x)
        logits = model(x)
        labels = (logits + torch.randn(300, 3)).argmax(1)
    probs = torch.rand(300, 3).softmax(1)
    weight, bias = (value.detach() for value in model.fc.parameters())
    names = {
        **{"model": model, "x": x, "val_loader": [(x, labels)], "labels": labels},
        **{"test_loader": [(x, labels)], "np": np, "weight": weight, "bias": bias},
        **{"probs": probs, "logits": probs.log(), "probs_a": probs, "probs_b": probs},
        **{"labels_a": labels, "labels_b": labels, "featcal": featcal},
        **{"val_logits": logits, "val_labels": labels, "test_logits": logits},
        **{"val_features": features, "test_features": features, "test_labels": labels},
        **{"p": probs[:, 1], "positive": labels == 1},
    }
    first, *others = python_blocks("README.md") + python_blocks("docs/quickstart.md")
    assert others[0] == first  # it need not run twice
    for block in others:
        exec(compile(block, "quickstart.md", "exec"), {**names})
    assert len(others) == 6
    assert (tmp_path / "cal.safetensors").is_file()
    assert (tmp_path / "model.onnx").is_file()
    assert sorted(featcal.import_files("mine.npz", "mine").manifest.splits) == ["test", "val"]


@pytest.mark.no_cover
def test_every_snippet_of_the_page_on_two_classes_runs():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1)).eval()
    x = torch.randn(300, 6)
    p = (3 * model(x)).sigmoid().detach()[:, 0]
    y = torch.bernoulli(p).long()
    names = {"model": model, "x": x, "val_loader": [(x, y)], "test_loader": [(x, y)]}
    names |= {"val_p": p.numpy(), "val_labels": y.numpy(), "test_p": p.numpy()}
    names |= {"test_labels": y.numpy()}
    for block in python_blocks("docs/binary.md"):
        exec(compile(block, "binary.md", "exec"), names)
    assert names["calibrated"](x).shape == (300, 1)
    assert names["test_p"].shape == (300,)


def use_scale():
    """In a process of its own: it makes a method known."""
    warnings.simplefilter("error")
    (block,) = python_blocks("docs/adding-a-method.md")
    exec(compile(block, "adding-a-method.md", "exec"), {"__name__": "scale"})
    pack = featcal.demo_pack()
    rows = next(iter(pack.split("val"))).rows(slice(0, 300))
    tried = [("scale", "joint"), ("clip | scale", "joint"), ("clip | scale", "sequential")]
    for recipe, mode in tried:
        found = featcal.parse(recipe).fit(rows, pack.head, mode=mode)
        assert found.report.loss_after < found.report.loss_before
        again = featcal.load(featcal.save(found, "c.safetensors", overwrite=True))
        assert all(map(torch.equal, again.buffers(), found.buffers()))
    featcal.parse("scale").fit(rows, pack.head, loss=ece)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_the_method_of_the_guide_is_a_whole_method(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    child = multiprocessing.get_context("fork").Process(target=use_scale)
    child.start()
    child.join()
    assert child.exitcode == 0


def test_every_snippet_of_the_models_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    x, y = torch.randn(90, 3, 8, 8), torch.randint(0, 3, (90,))
    loader = [(x[i : i + 30], y[i : i + 30]) for i in (0, 30, 60)]
    layer = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2))
    model = nn.Sequential(OrderedDict(layer3=layer, pool=pool, fc=nn.Linear(8, 3)))
    names = {"model": model, "val_loader": loader, "test_loader": [*loader], "x": x}
    names["featcal"] = featcal
    rows = featcal.collect(model, loader)
    names["features"] = torch.cat([batch.features for batch in rows])
    blocks = [block for block in python_blocks("docs/models.md") if "pretrained" not in block]
    assert len(blocks) == 6  # the one of Hugging Face is a test of its own, in test_journeys.py
    for block in blocks:
        exec(block, names)
    again = featcal.load("calibration.safetensors", onto=names["model"]).eval()
    assert torch.equal(again(x), names["calibrated"].eval()(x))
    assert list(names["calibrated"].state_dict())[-3:-1] == [
        "fc.bias",
        "fc.calibrator.steps.0.threshold",
    ]
    assert names["pack"].manifest.class_names == ("cat", "dog", "owl")
    assert "layer3.calibrator.threshold" in names["early"].state_dict()


def test_every_snippet_of_the_multi_label_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    x = torch.randn(300, 6)
    y = torch.bernoulli((model(x) / 2).sigmoid()).detach()
    names = {"model": model, "x": x, "val_loader": [(x, y)], "test_loader": [(x, y)]}
    for block in python_blocks("docs/multi-label.md"):
        exec(block, names)
    assert names["scores"].n == 4 * names["scores"].samples == 1200
    assert names["probs"].shape == (300, 4)
    assert (tmp_path / "model.onnx").is_file()
    assert featcal.Pack.open("pack").manifest.several


@pytest.mark.no_cover
def test_every_snippet_of_the_segmentation_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 3, 1))
    x = torch.randn(30, 3, 6, 6)
    with torch.no_grad():
        noise = -torch.rand(30, 3, 6, 6).log()
        y = (model(x) - noise.log()).argmax(1)
        model[2].weight *= 3  # surer than it may be
    y[:, 0] = 255
    resized = nn.Sequential(nn.AvgPool2d(2), model, nn.Upsample(6))
    loader = [(x[i : i + 10], y[i : i + 10]) for i in (0, 10, 20)]
    names = {"model": model, "resized": resized, "x": x, "val_loader": loader}
    blocks = python_blocks("docs/segmentation.md")
    assert len(blocks) == 4
    for block in blocks:
        exec(block, names | {"test_loader": [*loader], "featcal": featcal})
    assert (tmp_path / "resized.onnx").is_file()


def test_files_that_pages_name_are_there():
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    named = {
        (page.name, path)
        for page in pages
        for path in re.findall(
            r"`((?:tests|experiments|bench|examples)/[\w/]+\.py)", page.read_text()
        )
    }
    inside = re.findall(
        r"`(\w+/\w+\.(?:py|txt)|\w+/assets/[\w.]+)`", (ROOT / "docs/architecture.md").read_text()
    )
    assert len(named) > 20
    assert len(inside) > 10
    missing = [pair for pair in named if not (ROOT / pair[1]).exists()]
    missing += [
        path
        for path in inside
        if not any((r / path).exists() for r in (ROOT, ROOT / "src/featcal"))
    ]
    assert not missing


def test_the_function_for_collect_is_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (block,) = python_blocks("docs/cli.md")
    torch.save(nn.Linear(2, 3).state_dict(), "weights.pt")
    rows = torch.utils.data.TensorDataset(torch.randn(9, 2), torch.arange(9) % 3)
    names = {"torch": torch, "MyNet": lambda: nn.Linear(2, 3), "val_set": rows, "test_set": rows}
    exec(block, names | {"DataLoader": torch.utils.data.DataLoader}, names)
    names["build"].__globals__.update(names)
    model, loaders = names["build"]()
    assert {name: len(featcal.collect(model, one)) for name, one in loaders.items()} == {
        "val": 1,
        "test": 1,
    }


class Blocks(dict):
    """What the bridge asks of a data set of Ray's, in one process; test_ray.py has a cluster."""

    columns = dict.keys

    def map_batches(self, work, **options):
        return Blocks(work(self))

    def iter_rows(self):
        return (dict(zip(self, row, strict=True)) for row in zip(*self.values(), strict=True))


def test_the_snippet_on_ray_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict(body=nn.ReLU(), fc=nn.Linear(6, 3)))
    x = torch.rand(200, 6)
    logits, y = model(x).detach().numpy(), torch.arange(200).numpy() % 3
    rows = Blocks(logits=4 * logits, label=y)
    data = types.SimpleNamespace(read_parquet=lambda path: rows)
    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(data=data))
    names = {"featcal": featcal, "dataset": Blocks(embedding=x.numpy(), y=y), "model": model}
    (block,) = [one for one in python_blocks("docs/bridges.md") if "import ray" in one]
    exec(block, names)
    assert repr(names["calibrator"]) == "clip | temperature"


RUN_BY = {  # who runs the Python of a page
    "tests/test_docs.py": "README quickstart binary models multi-label segmentation cli "
    "adding-a-method",
    "tests/test_examples.py": "vision text",
    "tests/bridges/test_sklearn.py": "sklearn",
    "tests/bridges/conftest.py": "bridges",
    "tests/analysis/test_base.py": "analysis",
    "tests/cli/test_cli_files.py": "files",
    "tests/cli/test_cli_train.py": "training",
    "tests/datasets/test_page.py": "datasets",
    "tests/export/test_export_docs.py": "export",
    "tests/losses/test_losses_docs.py": "losses",
    "tests/networks/test_networks_page.py": "networks",
    "tests/page/test_html.py": "report",
    "tests/theory/test_theory_docs.py": "theory",
}


def test_every_page_with_code_is_run_by_a_test():
    pages = {page.stem for page in (*PAGES, ROOT / "README.md") if "```python" in page.read_text()}
    assert pages == {name for names in RUN_BY.values() for name in names.split()}


def test_every_block_says_what_it_is_and_every_command_is_one():
    """Options and commands are known; nothing is run, and no file is looked for."""
    seen = 0
    for page in (*PAGES, ROOT / "README.md"):
        kinds = re.findall(r"^```(.*)$", page.read_text(), re.MULTILINE)
        assert all(kinds[::2]), page.name
        shell = "\n".join(shell_blocks(page))
        for line in re.findall(r"^(?:.* -m )?featcal (.*)$", shell, re.MULTILINE):
            seen += 1
            context = click.Context(group, **HELP)
            words = shlex.split(line, comments=True)
            command = group.get_command(context, words.pop(0))
            while isinstance(command, click.Group):
                command = command.get_command(context, words.pop(0))
            assert command is not None, line
            command.make_parser(click.Context(command, context)).parse_args(words)  # or it raises
    assert seen > 40


BUILD = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    {model}
    with torch.no_grad():
        logits = model(x)
        noise = -torch.rand_like(logits).log()
        y = (logits / 3 - noise.log()).argmax(1)
    {void}
    half = len(x) // 2
    return model.eval(), {{"val": [(x[:half], y[:half])], "test": [(x[half:], y[half:])]}}
"""
FLAT = "model, x = nn.Sequential(nn.ReLU(), nn.Linear(6, 3)), 9 * torch.randn(300, 6)"
MAPS = "model, x = nn.Sequential(nn.ReLU(), nn.Conv2d(6, 3, 1)), 9 * torch.randn(60, 6, 4, 4)"
ENDLESS = ("featcal explore", "featcal train", "featcal history", "featcal compare run/pack")


def inputs_of(page):
    """What a reader of the page has in the folder before the first command."""
    from featcal.cli.packs import load_target

    Path("my_project").mkdir()
    of_pixels = page == "segmentation.md"
    void = "y[:, 0] = 255" if of_pixels else ""
    source = BUILD.format(model=MAPS if of_pixels else FLAT, void=void)
    Path("my_project", "models.py").write_text(source)
    if of_pixels:
        return
    model, loaders, _ = load_target("my_project.models:build")
    arrays = {key: v.detach().numpy() for key, v in model[1].named_parameters()}
    answers = {}
    for name, ((x, y),) in loaders.items():
        logits = model(x).detach()
        arrays |= {f"{name}_features": x.relu().numpy(), f"{name}_labels": y.numpy()}
        yes = torch.bernoulli((logits / 3).sigmoid()).numpy().astype(int)
        answers |= {f"{name}_logits": logits.numpy(), f"{name}_labels": yes}
        rows = torch.cat([y[:, None], logits.softmax(1)], 1)
        np.savetxt(f"{name}.csv", rows, "%.9g", ",", header="label,0,1,2", comments="")
    np.savetxt("new.csv", rows[:, 1:], "%.9g", ",", header="0,1,2", comments="")
    np.savez("arrays.npz", **answers)
    np.savez("mine.npz", **arrays)
    featcal.import_files("mine.npz", "ready")
    featcal.save(
        featcal.Temperature(temperature=2.0).fit(featcal.Pack.open("ready").split("val")),
        "one.safetensors",
    )


@pytest.mark.no_cover
@pytest.mark.parametrize(
    "page",
    ["README.md", "quickstart.md", "files.md", "multi-label.md", "segmentation.md", "export.md"],
)
def test_the_commands_of_a_journey_run(page, tmp_path, monkeypatch, few_choices):
    """As they are typed, in the order of the page; those that train or serve have other tests."""
    monkeypatch.setattr("featcal.page.content.POINTS", 8)
    monkeypatch.setattr(sys, "path", list(sys.path))
    blocks = shell_blocks(ROOT / page if page == "README.md" else ROOT / "docs" / page)
    ran = 0
    for number, block in enumerate(blocks):
        (tmp_path / str(number)).mkdir()
        monkeypatch.chdir(tmp_path / str(number))
        inputs_of(page)
        for made, ready in (("mine", "ready"), ("cal.safetensors", "one.safetensors")):
            if f"-o {made}" not in block and Path(ready).exists():
                Path(ready).rename(made)
        for line in block.splitlines():
            if line.startswith("featcal ") and not line.startswith(ENDLESS):
                _, command, *words = shlex.split(line, comments=True)
                words += ["--resamples", "100"] * (command == "compare")  # a tenth of the time
                with pytest.raises(SystemExit) as left:
                    main([command, *words])
                assert left.value.code == 0, line
                ran += 1
        for name in [one for one in sys.modules if one.startswith("my_project")]:
            monkeypatch.delitem(sys.modules, name)
    assert ran


# --- the site -------------------------------------------------------------------------------------

MADE = {"index.md", "contributing.md", "changelog.md", "cli-reference.md", "api.md"}  # by hooks.py


def prose(path):
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(path):
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    words = re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE)
    return {
        re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", one.lower())).strip("-") for one in words
    }


def test_the_site_has_every_page_and_no_other():
    def leaves(entry):
        if isinstance(entry, str):
            return [entry]
        found = entry.values() if isinstance(entry, dict) else entry
        return [leaf for one in found for leaf in leaves(one)]

    nav = leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert sorted(nav) == sorted({path.name for path in PAGES} | MADE)


def test_every_link_leads_somewhere():
    broken = []
    for page in [*PAGES, *ROOT.glob("*.md")]:
        for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
            path, _, anchor = target.partition("#")
            if "://" in target:
                continue
            goal = page.parent / path if path else page
            if not goal.exists() or (anchor and anchor not in anchors(goal)):
                broken.append((page.name, target))
    assert not broken


def test_every_attack_on_the_page_of_trust_has_its_tests():
    page = (ROOT / "docs" / "trust.md").read_text()
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", page)
    assert len(named) > 30
    for file, test in named:
        assert f"\ndef {test}(" in (ROOT / "tests" / file).read_text()
