"""Every format holds the same data: one pack comes of all of them, and of nothing else."""

import csv
import json
import math
import pickle
import struct
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from featcal.core.batch import CHUNK_ROWS
from featcal.core.checks import InputError
from featcal.core.progress import listen
from featcal.data import Pack, import_files, read_files

NAMES = ["cat", "dog", "a, b"]
ARRAYS = ["npz", "npy", "safetensors"]
FORMATS = [*ARRAYS, "csv", "tsv", "parquet", "lists"]


def made(*, kind="logits", dtype="f4", val=11, test=7, k=3):
    """Named arrays of two splits."""
    draw = np.random.default_rng(0)
    arrays = {}
    for split, rows in (("val", val), ("test", test)):
        scores = 3 * draw.normal(size=(rows, k))
        if kind == "probs":
            probs = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
            scores = probs if k > 1 else draw.random((rows, 1))
        arrays[f"{split}_{kind}"] = scores.astype(dtype)
        arrays[f"{split}_labels"] = draw.integers(max(k, 2), size=rows)
    return arrays


def with_features(*, d=5, k=3, **changes):
    draw = np.random.default_rng(2)
    arrays = {"weight": draw.normal(size=(k, d)), "bias": draw.normal(size=k)}
    for split, rows in (("val", 11), ("test", 7)):
        arrays[f"{split}_features"] = draw.normal(size=(rows, d))
        arrays[f"{split}_labels"] = draw.integers(max(k, 2), size=rows)
    arrays = {key: v.astype("f4" if v.dtype.kind == "f" else "i8") for key, v in arrays.items()}
    return {key: value for key, value in {**arrays, **changes}.items() if value is not None}


def write(folder, form, arrays):
    """The arrays as files of one format, by that format's own library; returns their paths."""
    if form == "npz":
        np.savez(folder / "all.npz", **arrays)
        return folder / "all.npz"
    if form == "npy":
        for key, values in arrays.items():
            np.save(folder / f"{key}.npy", values)
        return [folder / f"{key}.npy" for key in arrays]
    if form == "safetensors":
        safetensors.numpy.save_file(arrays, folder / "all.safetensors")
        return [folder / "all.safetensors"]
    paths = []
    for split in (key.removesuffix("_labels") for key in arrays if key.endswith("_labels")):
        kind = "logits" if f"{split}_logits" in arrays else "probs"
        scores, labels = arrays[f"{split}_{kind}"], arrays[f"{split}_labels"]
        heads = [f"{kind}_{name}" for name in (NAMES if scores.shape[1] == 3 else ["cat"])]
        paths.append(folder / f"{split}.{'parquet' if form == 'lists' else form}")
        if form == "lists":
            table = pyarrow.table({"label": labels, kind: list(scores)})
            pyarrow.parquet.write_table(table, paths[-1])
        elif form == "parquet":
            columns = {**dict(zip(heads, scores.T, strict=True)), "label": labels}
            pyarrow.parquet.write_table(pyarrow.table(columns), paths[-1])
        else:
            with paths[-1].open("w", newline="", encoding="utf-8") as file:
                writer = csv.writer(file, delimiter="\t" if form == "tsv" else ",")
                writer.writerow(["label", *heads])
                for label, row in zip(labels, scores, strict=True):
                    writer.writerow([label, *map(str, row)])  # the shortest exact text
    return paths


def shards(pack):
    """The sha256 of every shard, by file."""
    return {p.file: p.sha256 for split in pack.manifest.splits.values() for p in split}


@pytest.mark.parametrize("kind", ["logits", "probs"])
@pytest.mark.parametrize("k", [3, 1])
def test_all_formats_give_the_same_bytes_and_the_numbers_that_went_in(tmp_path, kind, k):
    arrays, seen = made(kind=kind, dtype="f8", k=k), {}
    for form in FORMATS:
        folder = tmp_path / form
        folder.mkdir()
        pack = import_files(write(folder, form, arrays), folder / "pack")
        seen[form] = shards(pack)
        assert set(pack.splits) == {"val", "test"}
        assert pack.manifest.meta == ({"source": "probabilities"} if kind == "probs" else {})
        named = form in ("csv", "tsv", "parquet") and k > 1
        assert pack.manifest.class_names == (tuple(NAMES) if named else None)
        batch = read_files(write(folder, form, arrays))["val"]
        (stored,) = pack.split("val")
        assert torch.equal(batch.logits, stored.logits)
    assert all(found == seen["npz"] for found in seen.values())
    for split in ("val", "test"):
        (batch,) = pack.split(split)
        scores = arrays[f"{split}_{kind}"]
        if k == 1:
            scores = np.hstack([np.zeros_like(scores) if kind == "logits" else 1 - scores, scores])
        expected = scores if kind == "logits" else np.log(scores)
        assert np.array_equal(batch.logits.numpy(), expected.astype("f4"))
        assert np.array_equal(batch.labels.numpy(), arrays[f"{split}_labels"])
    Pack.open(pack.path).verify()


@pytest.mark.parametrize("form", ["npz", "csv"])
def test_more_than_a_chunk_and_progress(tmp_path, form):
    arrays, told = made(val=CHUNK_ROWS + 5), []
    with listen(lambda *step: told.append(step)):
        found = read_files(write(tmp_path, form, arrays))["val"]
    assert np.array_equal(found.logits.numpy(), arrays["val_logits"])
    if form == "csv":
        size = (tmp_path / "val.csv").stat().st_size
        assert ("reading val.csv", size, size) in told


@pytest.mark.parametrize("labels", ["f4", "bool", "column", "flat logits"])
def test_labels_of_a_binary_loss(tmp_path, labels):
    arrays = made(k=1)
    expected = arrays["val_labels"]
    for split in ("val", "test"):
        given = arrays[f"{split}_labels"]
        if labels == "flat logits":
            arrays[f"{split}_logits"] = arrays[f"{split}_logits"][:, 0]
        else:
            arrays[f"{split}_labels"] = (
                given[:, None] if labels == "column" else given.astype(labels)
            )
    batch = read_files(write(tmp_path, "npz", arrays))["val"]
    assert np.array_equal(batch.labels.numpy(), expected)
    with pytest.raises(InputError, match="labels"):
        read_files(write(tmp_path, "npz", {**arrays, "val_labels": np.full(11, 0.5)}))


@pytest.mark.parametrize("form", ARRAYS)
def test_features_and_head(tmp_path, form):
    arrays = with_features()
    pack = import_files(write(tmp_path, form, arrays), tmp_path / "pack")
    assert np.array_equal(pack.head.weight.numpy(), arrays["weight"])
    (batch,) = pack.split("test")
    assert np.array_equal(batch.features.numpy(), arrays["test_features"])
    assert batch.logits is None
    assert read_files(write(tmp_path, form, arrays))["val"].features.shape == (11, 5)


def test_features_beside_their_logits_in_lists_and_a_head_without_bias(tmp_path):
    arrays = with_features(bias=None)
    for split in ("val", "test"):
        features = arrays[f"{split}_features"]
        columns = {"features": list(features), "logits": list(features @ arrays["weight"].T)}
        table = pyarrow.table({**columns, "y": arrays[f"{split}_labels"]})
        pyarrow.parquet.write_table(table, tmp_path / f"{split}.parquet")
    safetensors.numpy.save_file({"weight": arrays["weight"]}, tmp_path / "head.safetensors")
    files = [tmp_path / name for name in ("val.parquet", "test.parquet", "head.safetensors")]
    pack = import_files(files, tmp_path / "pack", label="y")
    (batch,) = pack.split("val")
    assert np.array_equal(batch.features.numpy(), arrays["val_features"])
    assert batch.logits.shape == (11, 3)
    assert not pack.head.bias.any()


def test_a_head_with_one_logit(tmp_path):
    arrays = with_features(k=1)
    arrays["val_labels"] = arrays["val_labels"].astype("f4")
    pack = import_files(write(tmp_path, "npz", arrays), tmp_path / "pack")
    (batch,) = pack.split("val")
    z = (arrays["val_features"] * arrays["weight"]).sum(1, keepdims=True) + arrays["bias"]
    expected = np.hstack([np.zeros_like(z), z])
    assert np.allclose(pack.head(batch.features).numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint64", ">i4"])
def test_integers_and_byte_orders_of_any_kind(tmp_path, dtype):
    arrays = with_features()
    given = {key: v.astype(dtype) for key, v in arrays.items() if key.endswith("labels")}
    swapped = {key: v.astype(">f4") for key, v in arrays.items() if key.endswith("features")}
    found = read_files(write(tmp_path, "npz", {**arrays, **given, **swapped, "other": 3}))["val"]
    assert np.array_equal(found.labels.numpy(), arrays["val_labels"])
    assert np.array_equal(found.features.numpy(), arrays["val_features"])


def test_class_names_and_meta_in_every_form(tmp_path):
    texts = {"class_names": json.dumps(NAMES), "meta": '{"model": "m", "x": 1}', "format": "pt"}
    logits = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    tensors = {"val_logits": logits, "val_labels": torch.tensor([0, 1, 2, 0, 1], dtype=torch.uint8)}
    safetensors.torch.save_file(tensors, tmp_path / "a.safetensors", metadata=texts)
    one = import_files(tmp_path / "a.safetensors", tmp_path / "one")
    assert one.manifest.dtypes["logits"] == "bfloat16"
    arrays = {**made(), "class_names": np.array(NAMES), "meta": np.array(texts["meta"])}
    for form in ("npz", "npy"):
        pack = import_files(write(tmp_path, form, arrays), tmp_path / form)
        for found in (one, pack):
            assert (found.manifest.model, found.manifest.meta) == ("m", {"x": 1})
            assert found.manifest.class_names == tuple(NAMES)


def test_one_file_per_split_with_bare_names(tmp_path):
    arrays = made()
    for split, name in (("val", "val"), ("test", "other")):
        values = {key: arrays[f"{split}_{key}"] for key in ("logits", "labels")}
        np.savez_compressed(tmp_path / f"{name}.npz", **values)
    files = [str(tmp_path / "val.npz"), f"test={tmp_path / 'other.npz'}"]
    pack = import_files(files, tmp_path / "pack")
    assert shards(pack) == shards(import_files(write(tmp_path, "npz", arrays), tmp_path / "same"))


def test_names_by_text_and_by_mapping(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arrays = made()
    Path("lr=1").mkdir()  # a path may hold the sign of a name
    np.save("lr=1/a=b.npy", arrays["val_logits"])
    np.save("y.npy", arrays["val_labels"])
    files = {"val_logits": Path("lr=1/a=b.npy"), "val_labels": "y.npy"}
    assert set(read_files(files)) == {"val"}
    assert set(read_files([f"{name}={path}" for name, path in files.items()])) == {"val"}
    assert read_files(write(Path("lr=1"), "csv", arrays)[0])["val"].logits.shape == (11, 3)


def test_zero_probabilities_stay_finite_and_alike(tmp_path):
    floors = {}
    for dtype in ("f2", "f4", "f8"):
        probs = np.array([[1.0, 0.0], [0.5, 0.5]], dtype)
        np.savez(tmp_path / "a.npz", val_probs=probs, val_labels=[0, 1])
        floors[dtype] = float(read_files(tmp_path / "a.npz")["val"].logits[0, 1])
    assert floors["f4"] == floors["f8"] == pytest.approx(math.log(np.finfo("f4").tiny))
    assert floors["f2"] == pytest.approx(math.log(2.0**-24))  # the next half above 0


def bad_probs(value):
    probs = made(kind="probs", dtype="f8")
    probs["test_probs"][4] = value
    return probs


def ones(*shape, **kind):
    return np.ones(shape, **kind)


PROBS = made(kind="probs")["val_probs"]
OBJECTS = np.array([1, "a", None], dtype=object)
REFUSED = [
    ({"x": ones(3), "train_x": ones(3, 2)}, "no scores .*found: x, train_x"),
    (with_features(val_labels=None), "val_labels is missing"),
    (with_features(val_features=None), "val_logits or val_features is missing"),
    (with_features(weight=None), "weight is missing, and val_features"),
    ({**made(), "bias": ones(3)}, "weight is missing, and .* or bias"),
    (with_features(weight=ones(5, 3), bias=None), r"transposed, give weight\.T"),
    (with_features(weight=ones(4)), r"head is a tuple of tensors of shapes \[\(4,\)"),
    (with_features(val_labels=np.zeros(5, int)), "val_features has 11 rows and 5 labels"),
    (with_features(val_labels=np.zeros(11)), "split 'val': labels"),
    (with_features(val_labels=np.zeros((11, 1), int)), "split 'val': labels"),
    (with_features(test_features=ones(0, 5, dtype="f4"), test_labels=ones(0, dtype=int)), "empty"),
    (with_features(val_features=ones(11, 2, 2)), "val_features has .* 2, 2"),
    (with_features(val_features=ones(11, 5, dtype=np.longdouble)), "val_features has type"),
    ({**made(), "a-b_logits": ones(1, 3), "a-b_labels": [0]}, "'a-b'"),
    ({**made(), "val_logits": np.array(1.0)}, "val_logits has"),
    ({**made(), "meta": np.array(3)}, "meta cannot be read"),
    ({**made(), "class_names": np.array(["a", "b"])}, "2 class_names for 3 classes"),
    ({**made(), "class_names": np.arange(3)}, "class_names.* must be text"),
    ({**made(), **made(kind="probs")}, "_probs and .*_logits are both there"),
    ({**made(), "val_probs": PROBS, "val_logits": None}, "val_probs and test_logits are both"),
    (with_features(val_probs=PROBS), "val_probs and .*_features are both there"),
    (bad_probs([0.5, 0.2, 0.2]), "test_probs, row 4, .* with the sum 0.9: prob"),
    (bad_probs([50, 30, 20]), "test_probs, row 4.*divide percentages by 100"),
    (bad_probs(math.nan), "test_probs, row 4"),
    *[({**with_features(), key: OBJECTS}, key) for key in ("val_labels", "weight", "meta")],
]


@pytest.mark.parametrize(("values", "message"), REFUSED, ids=[case[1] for case in REFUSED])
def test_refused_arrays_leave_nothing(tmp_path, values, message):
    values = {key: value for key, value in values.items() if value is not None}
    file = write(tmp_path, "npz", values)
    with pytest.raises(InputError, match=message) as caught:
        import_files(file, tmp_path / "pack")
    assert str(caught.value).startswith(f"{file}: ")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("suffix", [".pt", ".pkl", ".PTH", ".ckpt"])
def test_pickles_are_never_read(tmp_path, suffix):
    file = tmp_path / f"logits{suffix}"
    file.write_bytes(pickle.dumps([1]))
    with pytest.raises(InputError, match=r"is a pickle, .* never read: .*numpy\.savez"):
        import_files(file, tmp_path / "pack")
    files = write(tmp_path, "npy", {**made(), "val_labels": OBJECTS})
    with pytest.raises(InputError, match=r"val_labels cannot be read .*Python objects"):
        import_files(files, tmp_path / "pack")


@pytest.mark.parametrize("form", [*FORMATS[:3], "parquet"])
@pytest.mark.parametrize("content", [b"", b"junk\n", pickle.dumps([1]), "half"])
def test_broken_files_are_named(tmp_path, form, content):
    files = write(tmp_path, form, made())
    file = files if form == "npz" else files[0]
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2] if content == "half" else content)
    with pytest.raises(InputError, match=r"cannot be read") as told:
        import_files(files, tmp_path / "pack")
    assert "\n" not in str(told.value)
    assert not (tmp_path / "pack").exists()


def test_broken_arrays_are_named(tmp_path):
    file = write(tmp_path, "npz", with_features())
    flipped = bytearray(file.read_bytes())
    flipped[flipped.index(b"val_features.npy") + 200] ^= 255
    file.write_bytes(bytes(flipped))
    with pytest.raises(InputError, match="val_features cannot be read"):
        import_files(file, tmp_path / "out")
    tensors = {"val_logits": torch.zeros(2, 2), "val_labels": torch.tensor([0, 1])}
    for texts in ({"class_names": "cat, dog"}, {"class_names": "[1, 2]"}, {"meta": "[]"}):
        safetensors.torch.save_file(tensors, tmp_path / "a.safetensors", metadata=texts)
        with pytest.raises(InputError, match=next(iter(texts))):
            import_files(tmp_path / "a.safetensors", tmp_path / "out")


def test_lists_that_are_no_matrix(tmp_path):
    file = tmp_path / "val.parquet"
    for columns, options, message in (
        ({"logits": [[1.0, 2.0], [1.0]], "label": [0, 1]}, {}, "val_logits"),
        ({"logits": [[1.0, None], [1.0, 2.0]], "label": [0, 1]}, {}, "logits are NaN"),
        ({"logits": [[1.0, 2.0]] * 2, "label": [0, None]}, {}, "labels"),
        ({"logits": [[1.0, 2.0]] * 2, "label": [0, 1]}, {"label": "y"}, "no column 'y'"),
    ):
        pyarrow.parquet.write_table(pyarrow.table(columns), file)
        with pytest.raises(InputError, match=message):
            import_files(file, tmp_path / "pack", **options)


def test_files_that_do_not_go_together(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez("val.npz", **made())
    np.savez("again.npz", **made())
    np.save("logits.npy", made()["val_logits"])
    Path("more").mkdir()
    for name in ("val.csv", "more/val.csv", "val-2.csv"):
        Path(name).write_text("logit_a,logit_b,label\n1,2,0\n")
    Path("notes.txt").write_text("x")
    pyarrow.parquet.write_table(pyarrow.table({"logit_a": [1.0], "label": [0]}), "val.parquet")
    for names, options, message in (
        ([], {}, "paths is empty"),
        (["val.npz", "val.csv"], {}, r"val\.csv is a table and .*val\.npz holds arrays"),
        (["val.csv", "more/val.csv"], {}, "two tables are called 'val'"),
        (["val.npz", "again.npz"], {}, r"val_logits is in val\.npz and again\.npz"),
        (["val-2.csv"], {}, "'val-2' cannot name a split"),
        (["logits.npy"], {}, "name 'logits' does not say what the array is"),
        (["notes.txt"], {}, r"notes\.txt is not an \.npz"),
        (["more"], {}, r"more is not an \.npz"),
        (["no.csv"], {}, r"no\.csv does not exist"),
        (["val.csv"], {"kind": "prob"}, "kind is 'prob'"),
        (["val.npz"], {"kind": "logits"}, "are for tables"),
        (["val.npz"], {"label": "y"}, "are for tables"),
    ):
        with pytest.raises(InputError, match=message):
            import_files(names, "pack", **options)
    with pytest.raises(InputError, match=r"^output more exists"):  # looked at first
        import_files("none.csv", "more")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert set(read_files("val.csv")) == {"val"}  # text needs no pyarrow
    with pytest.raises(InputError, match=r"needs pyarrow: pip install 'featcal\[arrow\]'"):
        import_files("val.parquet", "pack")


@pytest.mark.shared
@pytest.mark.parametrize(
    ("name", "accuracy"), [("cifar10-vit", 67.60), ("imagenet5k-efficientnet_lite0", 75.10)]
)
def test_the_packs_beside_the_project(tmp_path, shared_file, name, accuracy):
    pack = import_files(shared_file("packs", f"{name}.npz"), tmp_path / name)
    pack.verify()
    head = pack.head
    right = (head(b.features).argmax(1) == b.labels for b in pack.split("test"))
    found = 100 * sum(int(part.sum()) for part in right) / pack.split("test").rows
    assert pack.manifest.dtypes["features"] == "float16"
    assert found == pytest.approx(accuracy, abs=0.005)


@pytest.mark.shared
def test_the_logits_beside_the_project(tmp_path, shared_file):
    file = shared_file("anchors", "resnet50-cifar10-ce.npz")
    pack = import_files(file, tmp_path / "pack")
    assert (pack.split("val").rows, pack.split("test").rows) == (5000, 10000)
    with np.load(file, allow_pickle=False) as archive:
        stored = torch.cat([batch.logits for batch in pack.split("test")])
        assert np.array_equal(stored.numpy(), archive["test_logits"])


def test_text_that_is_no_text_is_refused(tmp_path):
    beyond = np.frombuffer(struct.pack("<III", 97, 0x110000, 98), "<U1")
    half = np.array(["a", "b", "\ud800"])
    values = {"val_logits": np.zeros((2, 3), "f4"), "val_labels": np.array([0, 1])}
    for more in ({"class_names": beyond}, {"class_names": half}, {"meta": beyond[1:2]}):
        np.savez(tmp_path / "a.npz", **values, **more)
        with pytest.raises(InputError, match=r"a\.npz: .*(meta|class_names|name)"):
            import_files(tmp_path / "a.npz", tmp_path / "out")
        assert not (tmp_path / "out").exists()
