"""Bad input: exit code 2, one clear sentence that names the culprit, and nothing written."""

import json
import os

import numpy as np
import pytest
import torch
from cli_cases import arrays, featcal, logits_alone, packed, refused, save, tree
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

import featcal.io as calibrator_file


def put(key, where, value):
    """Changes some values of one array."""

    def change(made):
        made[key] = made[key].copy()
        made[key][where] = value

    return change


def turn(key, function):
    """Replaces an array by a function of it."""

    def change(made):
        made[key] = function(made[key])

    return change


def without(*keys):
    def change(made):
        for key in keys:
            del made[key]

    return change


def empty_val(made):
    made["val_features"], made["val_labels"] = made["val_features"][:0], made["val_labels"][:0]


def unknown_names(made):
    made.clear()
    made.update(X=np.zeros((3, 2)), y=np.zeros(3))


BAD_ARRAYS = {
    "nan feature": (put("val_features", (3, 2), np.nan), ["'val'", "features", "row 3"]),
    "inf features": (put("test_features", slice(7, 57), np.inf), ["'test'", "50 rows (7, 8, 9"]),
    "label -1": (put("val_labels", 5, -1), ["labels", "0..3", "row 5"]),
    "label k": (put("test_labels", 6, 4), ["labels", "0..3", "row 6"]),
    "label 2**64-1": (
        turn("val_labels", lambda y: np.where(np.arange(len(y)) == 4, 2**64 - 1, y.astype("u8"))),
        ["labels", "row 4"],
    ),
    "float labels": (turn("val_labels", lambda y: y.astype("f4")), ["val_labels", "float32"]),
    "text labels": (turn("val_labels", lambda y: y.astype("U")), ["val_labels", "integers"]),
    "one-hot labels": (turn("val_labels", lambda y: np.eye(4)[y]), ["val_labels", "argmax(1)"]),
    "column labels": (turn("val_labels", lambda y: y[:, None]), ["val_labels", "ravel()"]),
    "object labels": (turn("val_labels", lambda y: y.astype(object)), ["val_labels", "objects"]),
    "fewer labels": (turn("val_labels", lambda y: y[:-1]), ["240 rows", "239"]),
    "features (n,)": (turn("val_features", lambda x: x[:, 0]), ["val_features", "(240,)"]),
    "features (n, d, 1, 1)": (
        turn("val_features", lambda x: x[..., None, None]),
        ["val_features", "(240, 6, 1, 1)"],
    ),
    "integer features": (turn("val_features", lambda x: x.astype(int)), ["val_features", "int64"]),
    "splits differ": (turn("test_features", lambda x: x[:, :5]), ["'test'", "5)", "6)"]),
    "another head": (turn("weight", lambda w: w[:, :5]), ["weight", "(4, 5)", "6 columns"]),
    "bias too short": (turn("bias", lambda b: b[:-1]), ["bias", "(3,)"]),
    "nan weight": (put("weight", (0, 0), np.nan), ["weight", "NaN"]),
    "missing head": (without("weight", "bias"), ["weight is missing"]),
    "missing labels": (without("test_labels"), ["test_labels is missing"]),
    "missing features": (without("test_features"), ["test_features"]),
    "empty split": (empty_val, ["'val' is empty"]),
    "unknown names": (unknown_names, ["X, y", "_features", "_logits"]),
    "meta is no JSON": (lambda made: made.update(meta="cifar"), ["meta", "JSON"]),
    "class names": (lambda made: made.update(class_names=np.array(["a"])), ["class_names", "4"]),
}


@pytest.mark.parametrize(("spoil", "words"), BAD_ARRAYS.values(), ids=BAD_ARRAYS)
def test_import_refuses_bad_arrays(tmp_path, spoil, words):
    made = arrays()
    spoil(made)
    file = save(tmp_path / "bad.npz", made)
    before = tree(tmp_path)
    said = refused("pack", "import", file, "-o", tmp_path / "pack")
    assert all(word in said for word in [*words, "bad.npz"]), said
    assert tree(tmp_path) == before


def test_import_sees_a_transposed_weight(tmp_path):
    """The commonest mistake gets its remedy, whether or not a bias gives it away first."""
    made = arrays()
    made["weight"] = made["weight"].T
    file = save(tmp_path / "bad.npz", made)
    assert "weight.T" in refused("pack", "import", file, "-o", tmp_path / "pack")
    del made["bias"]
    file = save(tmp_path / "bad.npz", made)
    assert "weight.T" in refused("pack", "import", file, "-o", tmp_path / "pack")


def test_import_refuses_bad_logits(tmp_path):
    made = logits_alone()
    made["test_logits"][9, 1] = np.nan
    file = save(tmp_path / "bad.npz", made)
    said = refused("pack", "import", file, "-o", tmp_path / "pack")
    assert "'test'" in said
    assert "logits" in said
    assert "row 9" in said


def test_import_refuses_a_head_that_did_not_make_the_logits(tmp_path):
    """Found when the pack is made, not when it is first used."""
    made = {**arrays(), **logits_alone()}
    made["val_logits"] = made["val_logits"] + 3 * np.eye(4, dtype="f4")[made["val_labels"]]
    file = save(tmp_path / "bad.npz", made)
    before = tree(tmp_path)
    assert "head" in refused("pack", "import", file, "-o", tmp_path / "pack")
    assert tree(tmp_path) == before


def test_import_refuses_a_part_of_a_file(tmp_path):
    whole = save(tmp_path / "whole.npz", arrays()).read_bytes()
    cut = tmp_path / "cut.npz"
    for size in (0, 4, 100, len(whole) // 2, len(whole) - 30, len(whole) - 1):
        cut.write_bytes(whole[:size])
        before = tree(tmp_path)
        assert "cut.npz" in refused("pack", "import", cut, "-o", tmp_path / "pack")
        assert tree(tmp_path) == before
    flipped = bytearray(whole)
    flipped[len(whole) // 3] ^= 1
    cut.write_bytes(flipped)
    assert "cannot be read" in refused("pack", "import", cut, "-o", tmp_path / "pack")


def test_import_refuses_foreign_files(tmp_path, pack):
    text = tmp_path / "notes.npz"
    text.write_text("features?")
    assert "not an .npz" in refused("pack", "import", text, "-o", tmp_path / "pack")
    assert "not an .npz" in refused("pack", "import", pack, "-o", tmp_path / "pack")
    assert "does not exist" in refused("pack", "import", tmp_path / "no.npz", "-o", tmp_path / "p")


BAD_RECIPES = {
    "": ["empty"],
    "clip |": ["does not parse"],
    "clip || temperature": ["does not parse"],
    "clip(min_accuracy=0.5": ["does not parse"],
    "klip": ["'klip'", "did you mean clip?", "temperature"],
    "clip and temperature": ["clip and temperature", "'|'"],
    "clip(3)": ["by name"],
    "clip(c=3)": ["'c'", "min_accuracy"],
    "clip(min_accuracy=2)": ["min_accuracy is 2"],
    "clip(min_accuracy=True)": ["min_accuracy is True"],
    "clip(min_accuracy=__import__('os'))": ["not a literal"],
    "clip(criterion='auc')": ["'auc'", "nll, brier or ece"],
    "clip(criterion=['nll'])": ["criterion", "nll, brier or ece"],
    "clip(reference=1)": ["reference is 1"],
    "clip(min_accuracy=0.9, min_accuracy=0.8)": ["min_accuracy"],
    "temperature | clip": ["wrong order", "clip | temperature"],
    "temperature(T=2)": ["'T'"],
    "().__class__": ["cannot read"],
    "a" * 3000: ["3000"],
    "(" * 500: ["does not parse"],
}


@pytest.mark.parametrize(("recipe", "words"), BAD_RECIPES.items(), ids=lambda value: value[:24])
def test_fit_and_compare_refuse_bad_recipes(tmp_path, pack, recipe, words):
    for said in (
        refused("fit", pack, recipe, "-o", tmp_path / "cal"),
        refused("compare", pack, "none", recipe),
    ):
        assert all(word in said for word in words), said
    assert tree(tmp_path) == {}


def test_two_clips_are_one_too_many(tmp_path, pack):
    said = refused("fit", pack, "clip | clip", "--sequential", "-o", tmp_path / "cal")
    assert "clip" in said
    assert tree(tmp_path) == {}


def test_clip_needs_features(tmp_path, logits_pack, cal):
    for command in (
        ("fit", logits_pack, "clip | temperature", "-o", tmp_path / "out"),
        ("eval", logits_pack, cal),
        ("predict", logits_pack, cal, "-o", tmp_path / "out"),
    ):
        said = refused(*command)
        assert "logits alone" in said
        assert str(logits_pack) in said
    assert tree(tmp_path) == {}


def test_compare_speaks_to_a_user_of_the_command_line(logits_pack):
    said = refused("compare", logits_pack, "none", "clip")
    assert "head=" not in said  # that is Python's way to say it
    assert str(logits_pack) in said


def test_splits_that_do_not_exist(tmp_path, pack, cal):
    for command in (
        ("fit", pack, "clip", "-o", tmp_path / "out", "--split", "train"),
        ("eval", pack, "--split", "train"),
        ("predict", pack, cal, "-o", tmp_path / "out", "--split", "train"),
        ("compare", pack, "--fit-split", "train"),
        ("compare", pack, "--test-split", "train"),
    ):
        said = refused(*command)
        assert "'train'" in said
        assert "val, test" in said
    assert "never fit on test" in refused("compare", pack, "--test-split", "val")
    assert tree(tmp_path) == {}


def writers(pack, cal, out):
    """The three commands that write to a path, writing to this one."""
    return {
        "fit": ("fit", pack, "temperature", "-o", out),
        "predict": ("predict", pack, cal, "-o", out),
        "import": ("pack", "import", pack.with_suffix(".npz"), "-o", out),
    }


@pytest.mark.parametrize("command", ["fit", "predict", "import"])
def test_outputs_that_cannot_be(tmp_path, pack, cal, command):
    taken = tmp_path / "taken"
    taken.write_text("mine")
    (tmp_path / "folder").mkdir()
    before = tree(tmp_path)
    for out, word in (
        (taken, "exists"),
        (tmp_path / "folder", "exists"),
        (tmp_path / "missing" / "out", "does not exist"),
        (taken / "out", "does not exist"),
        (tmp_path / ("long" * 80), "long"),
    ):
        said = refused(*writers(pack, cal, out)[command])
        assert word in said, said
        assert tree(tmp_path) == before


@pytest.mark.parametrize("command", ["fit", "predict", "import"])
def test_outputs_in_a_folder_one_may_not_write(tmp_path, pack, cal, command, monkeypatch):
    # Even root cannot make a folder here; for everyone else os.access says no first.
    said = refused(*writers(pack, cal, "/proc/featcal-test")[command])
    assert "/proc" in said
    monkeypatch.setattr(os, "access", lambda _path, mode: mode == os.R_OK)
    assert "cannot be written" in refused(*writers(pack, cal, tmp_path / "out")[command])
    assert tree(tmp_path) == {}


def test_an_output_that_exists_names_the_option_there_is(tmp_path, pack, cal):
    taken = tmp_path / "taken"
    taken.write_text("mine")
    said = {name: refused(*args) for name, args in writers(pack, cal, taken).items()}
    assert "--force" in said["fit"]
    assert "--force" in said["predict"]
    assert "overwrite" not in said["import"]  # it has no such option
    assert "folder" in refused("fit", pack, "temperature", "-o", tmp_path, "--force")


def test_a_full_disk_while_saving_the_calibrator(tmp_path, pack, monkeypatch):
    def full(*_args, **_kwargs):
        raise SafetensorError("Error while serializing: I/O error: No space left on device")

    monkeypatch.setattr(calibrator_file, "save_file", full)
    assert "No space left" in refused("fit", pack, "temperature", "-o", tmp_path / "cal")
    assert tree(tmp_path) == {}


def test_missing_and_surplus_arguments(tmp_path, pack, cal):
    for command, word in (
        (("fit", pack, "clip"), "'-o'"),
        (("pack", "import", pack.with_suffix(".npz")), "'-o'"),
        (("predict", pack, cal), "'-o'"),
        (("eval",), "PACK"),
        (("eval", pack, cal, "more"), "more"),
        (("eval", pack, "--nope"), "--nope"),
        (("eval", pack, "--bins", "0"), "--bins"),
        (("eval", pack, "--bins", "few"), "--bins"),
        (("evaluate", pack), "evaluate"),
        (("demo", "--out", cal), str(cal)),
    ):
        assert word in refused(*command)


def test_things_that_are_no_pack(tmp_path, pack, cal):
    file = pack.with_suffix(".npz")
    for path, word in (
        (tmp_path / "nowhere", "does not exist"),
        (tmp_path, "manifest.json"),
        (cal, "not a folder"),
        (file, "featcal pack import"),
        (pack / "manifest.json", "not a folder"),
    ):
        for command in (("eval", path), ("compare", path), ("pack", "info", path)):
            said = refused(*command)
            assert str(path) in said
            assert word in said


@pytest.fixture
def own(tmp_path):
    """A pack to damage."""
    return packed(tmp_path, arrays(val=40, test=50))


@pytest.mark.parametrize("name", ["val-00000.safetensors", "head.safetensors", "manifest.json"])
def test_truncated_packs(own, name):
    file = own / name
    whole = file.read_bytes()
    for size in (0, 7, 8, 60, len(whole) // 2, len(whole) - 2):
        file.write_bytes(whole[:size])
        for command in (("eval", own), ("pack", "info", own)):
            assert str(file) in refused(*command)
    file.unlink()
    assert name in refused("eval", own)


def test_a_changed_byte_is_found_by_verify(own):
    file = own / "test-00000.safetensors"
    flipped = bytearray(file.read_bytes())
    flipped[200] ^= 1
    file.write_bytes(flipped)
    assert featcal("pack", "info", own).code == 0
    said = refused("pack", "info", own, "--verify")
    assert str(file) in said
    assert "sha256" in said


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"version": 2}, "update featcal"),
        ({"format": "zip"}, "zip"),
        ({"features": 7}, "[4, 6]"),
        ({"classes": 3}, "disagrees"),
        ({"splits": {}}, "no split"),
        ({"head": {"file": "../x.safetensors", "bytes": 1, "sha256": "0" * 64}}, "../x"),
    ],
    ids=["future", "foreign", "features", "classes", "no split", "outside"],
)
def test_manifests_that_do_not_fit(own, change, word):
    file = own / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    assert word in refused("eval", own)


def test_truncated_calibrators(tmp_path, pack, cal):
    whole, cut = cal.read_bytes(), tmp_path / "cut.safetensors"
    for size in (0, 7, 8, 100, len(whole) // 2, len(whole) - 1):
        cut.write_bytes(whole[:size])
        assert str(cut) in refused("eval", pack, cut)
        assert str(cut) in refused("predict", pack, cut, "-o", tmp_path / "out")
    assert list(tree(tmp_path)) == ["cut.safetensors"]


def test_foreign_calibrators(tmp_path, pack):
    for path in (tmp_path / "no", pack.with_suffix(".npz"), pack / "head.safetensors"):
        assert str(path) in refused("eval", pack, path)
    said = refused("eval", pack, pack)
    assert "folder" in said  # it does exist


def rewritten(cal, path, metadata=None, tensors=None):
    """The calibrator with parts of its file replaced; None leaves a part out."""
    with safe_open(cal, framework="pt") as file:
        names, text = file.keys(), file.metadata()
        held = {name: file.get_tensor(name) for name in names}
    text, held = {**text, **(metadata or {})}, {**held, **(tensors or {})}
    save_file(
        {key: value for key, value in held.items() if value is not None},
        path,
        metadata={key: value for key, value in text.items() if value is not None},
    )
    return path


T, C = "steps.1.temperature", "steps.0.threshold"
DAMAGED = {
    "future": ({"version": "2"}, {}),
    "format": ({"format": None}, {}),
    "unknown method": ({"recipe": "klip"}, {}),
    "another recipe": ({"recipe": "temperature"}, {}),
    "no recipe": ({"recipe": None}, {}),
    "no report": ({"report": "{"}, {}),
    "tensor missing": ({}, {T: None}),
    "tensor too many": ({}, {"more": torch.ones(1)}),
    "wrong shape": ({}, {T: torch.ones(3, 7)}),
    "nan": ({}, {T: torch.tensor(float("nan"))}),
    "zero": ({}, {T: torch.tensor(0.0)}),
    "negative T": ({}, {T: torch.tensor(-2.0)}),
    "negative c": ({}, {C: torch.tensor(-2.0)}),
}


@pytest.mark.parametrize(("metadata", "tensors"), DAMAGED.values(), ids=DAMAGED)
def test_calibrators_whose_parts_do_not_fit(tmp_path, pack, cal, metadata, tensors):
    path = rewritten(cal, tmp_path / "cal", metadata, tensors)
    assert str(path) in refused("eval", pack, path)
    assert str(path) in refused("predict", pack, path, "-o", tmp_path / "probs.npy")
    assert list(tree(tmp_path)) == ["cal"]


@pytest.mark.parametrize("command", ["fit temperature", "fit clip", "eval", "compare", "predict"])
def test_logits_that_overflow(tmp_path, pack, command):
    """Finite features whose logits are not: no command makes a number of them."""
    made = arrays()
    for split in ("val", "test"):
        made[f"{split}_features"][17, 0] = 3e38
    made["weight"][:, 0] = 5
    file, huge, cal = save(tmp_path / "huge.npz", made), tmp_path / "huge", tmp_path / "cal"
    featcal("fit", pack, "temperature", "-o", cal)
    if featcal("pack", "import", file, "-o", huge).code == 2:
        return  # better still
    before = tree(tmp_path)
    words = {
        "fit temperature": ("fit", huge, "temperature", "-o", tmp_path / "out"),
        "fit clip": ("fit", huge, "clip", "-o", tmp_path / "out"),
        "eval": ("eval", huge),
        "compare": ("compare", huge),
        "predict": ("predict", huge, cal, "-o", tmp_path / "out"),
    }
    assert "row 17" in refused(*words[command])
    assert tree(tmp_path) == before
