"""Every format holds the same data: one pack comes of all of them, and of nothing else."""

import csv
import json
import math
import pickle
import sys

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from featcal.core.checks import InputError
from featcal.core.progress import listen
from featcal.data import Pack, import_files, import_npz, read_files
from featcal.data.arrays import CHUNK_ROWS

NAMES = ["cat", "dog", "a, b"]
FORMATS = ["npz", "npy", "safetensors", "csv", "tsv", "parquet", "lists"]


def made(*, kind="logits", dtype="f4", val=11, test=7, k=3):
    """Named arrays of two splits."""
    draw = np.random.default_rng(0)
    arrays = {}
    for split, rows in (("val", val), ("test", test)):
        scores = 3 * draw.normal(size=(rows, k))
        if kind == "probs":
            scores = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
        arrays[f"{split}_{kind}"] = scores.astype(dtype)
        arrays[f"{split}_labels"] = draw.integers(max(k, 2), size=rows)
    return arrays


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
    suffix = "parquet" if form == "lists" else form
    splits = [key.removesuffix("_labels") for key in arrays if key.endswith("_labels")]
    for split in splits:
        write_table(folder / f"{split}.{suffix}", form, arrays, split)
    return [folder / f"{split}.{suffix}" for split in splits]


def write_table(path, form, arrays, split):
    kind = "logits" if f"{split}_logits" in arrays else "probs"
    scores, labels = arrays[f"{split}_{kind}"], arrays[f"{split}_labels"]
    if form == "lists":
        columns = {"label": labels, kind: list(scores)}
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
        return
    heads = [f"{kind}_{name}" for name in (NAMES if scores.shape[1] == 3 else ["cat"])]
    if form == "parquet":
        columns = {**dict(zip(heads, scores.T, strict=True)), "label": labels}
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
        return
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter="\t" if form == "tsv" else ",")
        writer.writerow(["label", *heads])
        for label, row in zip(labels, scores, strict=True):
            writer.writerow([label, *(str(value) for value in row)])  # the shortest exact text


def shards(pack):
    """The sha256 of every shard, by file."""
    return {p.file: p.sha256 for split in pack.manifest.splits.values() for p in split}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_logits_come_back_to_the_bit(tmp_path, form, dtype):
    arrays = made(dtype=dtype)
    pack = import_files(write(tmp_path, form, arrays), tmp_path / "pack")
    assert set(pack.splits) == {"val", "test"}
    for split in pack.splits:
        (batch,) = pack.split(split)
        assert np.array_equal(batch.logits.numpy(), arrays[f"{split}_logits"].astype("f4"))
        assert np.array_equal(batch.labels.numpy(), arrays[f"{split}_labels"])
    assert pack.manifest.meta == {}
    named = form in ("csv", "tsv", "parquet")
    assert pack.manifest.class_names == (tuple(NAMES) if named else None)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("k", [3, 1])
def test_probabilities_become_their_logarithms(tmp_path, form, k):
    arrays = made(kind="probs", dtype="f8", k=k)
    if k == 1:
        for split in ("val", "test"):
            arrays[f"{split}_probs"] = np.random.default_rng(1).random((11, 1))[
                : len(arrays[f"{split}_labels"])
            ]
    pack = import_files(write(tmp_path, form, arrays), tmp_path / "pack")
    assert pack.manifest.meta == {"source": "probabilities"}
    assert pack.manifest.classes == max(k, 2)
    for split in pack.splits:
        p = arrays[f"{split}_probs"]
        p = np.hstack([1 - p, p]) if k == 1 else p
        (batch,) = pack.split(split)
        assert np.array_equal(batch.logits.numpy(), np.log(p).astype("f4"))


@pytest.mark.parametrize("kind", ["logits", "probs"])
@pytest.mark.parametrize("k", [3, 1])
def test_all_formats_give_the_same_bytes(tmp_path, kind, k):
    arrays = made(kind="logits", dtype="f8", k=k)
    if kind == "probs":
        arrays = made(kind="probs", dtype="f8", k=3)
    seen = {}
    for form in FORMATS:
        folder = tmp_path / form
        folder.mkdir()
        seen[form] = shards(import_files(write(folder, form, arrays), folder / "pack"))
    assert all(found == seen["npz"] for found in seen.values())


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("shape", [(-1,), (-1, 1)])
def test_one_logit_a_row_is_that_of_class_1(tmp_path, form, shape):
    arrays = made(k=1)
    flat = form in ("npz", "npy", "safetensors")
    given = {
        key: value.reshape(shape) if flat and key.endswith("logits") else value
        for key, value in arrays.items()
    }
    (batch,) = import_files(write(tmp_path, form, given), tmp_path / "pack").split("val")
    expected = np.hstack([np.zeros((11, 1), "f4"), arrays["val_logits"]])
    assert np.array_equal(batch.logits.numpy(), expected)


@pytest.mark.parametrize("labels", ["f4", "bool", "column"])
def test_labels_of_a_binary_loss(tmp_path, labels):
    arrays = made(k=1)
    for split in ("val", "test"):
        given = arrays[f"{split}_labels"]
        other = given[:, None] if labels == "column" else given.astype(labels)
        arrays[f"{split}_labels"] = other
    (batch,) = import_files(write(tmp_path, "npz", arrays), tmp_path / "pack").split("val")
    assert np.array_equal(batch.labels.numpy(), made(k=1)["val_labels"])
    arrays["val_labels"] = np.full(11, 0.5)
    (tmp_path / "more").mkdir()
    with pytest.raises(InputError, match="val_labels has type float64: save integers"):
        import_files(write(tmp_path / "more", "npz", arrays), tmp_path / "other")


def with_features(arrays, *, d=5, rows=3):
    draw = np.random.default_rng(2)
    made_ = {"weight": draw.normal(size=(rows, d)), "bias": draw.normal(size=rows)}
    for split in ("val", "test"):
        labels = arrays[f"{split}_labels"]
        made_[f"{split}_features"] = draw.normal(size=(len(labels), d))
        made_[f"{split}_labels"] = labels
    return {
        key: value.astype("f4" if value.dtype.kind == "f" else "i8") for key, value in made_.items()
    }


@pytest.mark.parametrize("form", ["npz", "npy", "safetensors"])
def test_features_and_head(tmp_path, form):
    arrays = with_features(made())
    pack = import_files(write(tmp_path, form, arrays), tmp_path / "pack")
    assert np.array_equal(pack.head.weight.numpy(), arrays["weight"])
    (batch,) = pack.split("test")
    assert np.array_equal(batch.features.numpy(), arrays["test_features"])


def test_features_in_lists_and_the_head_beside_them(tmp_path):
    arrays = with_features(made())
    for split in ("val", "test"):
        columns = {"y": arrays[f"{split}_labels"], "features": list(arrays[f"{split}_features"])}
        pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / f"{split}.parquet")
    head = {key: arrays[key] for key in ("weight", "bias")}
    safetensors.numpy.save_file(head, tmp_path / "head.safetensors")
    files = [tmp_path / name for name in ("val.parquet", "test.parquet", "head.safetensors")]
    pack = import_files(files, tmp_path / "pack", label="y")
    (batch,) = pack.split("val")
    assert np.array_equal(batch.features.numpy(), arrays["val_features"])
    assert np.array_equal(pack.head.bias.numpy(), arrays["bias"])


def test_a_head_with_one_logit(tmp_path):
    arrays = with_features(made(k=1), rows=1)
    arrays["val_labels"] = arrays["val_labels"].astype("f4")
    pack = import_files(write(tmp_path, "npz", arrays), tmp_path / "pack")
    (batch,) = pack.split("val")
    z = (arrays["val_features"] * arrays["weight"]).sum(1, keepdims=True) + arrays["bias"]
    expected = np.hstack([np.zeros_like(z), z])
    assert np.allclose(pack.head(batch.features).numpy(), expected, atol=1e-5)


def test_texts_of_safetensors_and_bfloat16(tmp_path):
    logits = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    tensors = {"val_logits": logits, "val_labels": torch.tensor([0, 1, 2, 0, 1], dtype=torch.uint8)}
    texts = {"class_names": json.dumps(NAMES), "meta": '{"model": "m", "x": 1}', "format": "pt"}
    safetensors.torch.save_file(tensors, tmp_path / "a.safetensors", metadata=texts)
    pack = import_files(tmp_path / "a.safetensors", tmp_path / "pack")
    assert (pack.manifest.model, pack.manifest.meta) == ("m", {"x": 1})
    assert pack.manifest.class_names == tuple(NAMES)
    assert pack.manifest.dtypes["logits"] == "bfloat16"
    (batch,) = pack.split("val")
    assert torch.equal(batch.logits, logits.float())


def test_class_names_and_meta_as_npy(tmp_path):
    arrays = {**made(), "class_names": np.array(NAMES), "meta": np.array('{"dataset": "d"}')}
    pack = import_files(write(tmp_path, "npy", arrays), tmp_path / "pack")
    assert pack.manifest.class_names == tuple(NAMES)
    assert pack.manifest.dataset == "d"


def test_one_file_a_split_with_bare_names(tmp_path):
    arrays = made()
    for split, save in (("val", np.savez), ("other", np.savez_compressed)):
        values = {
            key: arrays[f"{'val' if split == 'val' else 'test'}_{key}"]
            for key in ("logits", "labels")
        }
        save(tmp_path / f"{split}.npz", **values)
    files = [str(tmp_path / "val.npz"), f"test={tmp_path / 'other.npz'}"]
    pack = import_files(files, tmp_path / "pack")
    assert shards(pack) == shards(import_files(write(tmp_path, "npz", arrays), tmp_path / "same"))


def test_names_by_text_and_by_mapping(tmp_path):
    arrays = made()
    np.save(tmp_path / "a=b.npy", arrays["val_logits"])
    np.save(tmp_path / "y.npy", arrays["val_labels"])
    files = {"val_logits": tmp_path / "a=b.npy", "val_labels": str(tmp_path / "y.npy")}
    assert import_files(files, tmp_path / "one").splits == ("val",)
    texts = [f"{name}={path}" for name, path in files.items()]
    assert import_files(texts, tmp_path / "two").splits == ("val",)


def test_a_path_may_hold_the_sign_of_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lr=1").mkdir()
    write(tmp_path / "lr=1", "csv", made())
    found = read_files(["lr=1/val.csv", "test=lr=1/test.csv"])
    assert set(found) == {"val", "test"}


@pytest.mark.parametrize("form", FORMATS)
def test_read_files_gives_batches(tmp_path, form):
    rows = CHUNK_ROWS + 5
    arrays = made(val=rows) if form != "lists" else made()
    found = read_files(write(tmp_path, form, arrays))
    assert set(found) == {"val", "test"}
    assert np.array_equal(found["val"].logits.numpy(), arrays["val_logits"])
    assert np.array_equal(found["val"].labels.numpy(), arrays["val_labels"])
    assert found["val"].features is None


def test_read_files_keeps_features(tmp_path):
    arrays = with_features(made())
    found = read_files(write(tmp_path, "npz", arrays))
    assert found["val"].logits is None
    assert np.array_equal(found["val"].features.numpy(), arrays["val_features"])


def test_zero_probabilities_stay_finite_and_alike(tmp_path):
    values = {"val_probs": np.array([[1.0, 0.0], [0.5, 0.5]]), "val_labels": np.array([0, 1])}
    floors = {}
    for dtype in ("f2", "f4", "f8"):
        np.savez(tmp_path / "a.npz", **{**values, "val_probs": values["val_probs"].astype(dtype)})
        floors[dtype] = float(read_files(tmp_path / "a.npz")["val"].logits[0, 1])
    tiny = np.finfo("f4").tiny
    assert floors["f4"] == floors["f8"] == pytest.approx(math.log(tiny))
    assert floors["f2"] == pytest.approx(math.log(2.0**-24))  # the next half above 0


def test_progress_is_told(tmp_path):
    told = []
    with listen(lambda *step: told.append(step)):
        import_files(write(tmp_path, "csv", made()), tmp_path / "pack")
    size = (tmp_path / "val.csv").stat().st_size
    assert ("reading val.csv", size, size) in told


def bad_probs(value):
    probs = made(kind="probs", dtype="f8")
    probs["test_probs"][4] = value
    return probs


half = made(kind="probs")
REFUSED = {
    "probs beside logits": (
        {**made(), **made(kind="probs")},
        "_probs and .*_logits are both there",
    ),
    "probs of one split": (
        {**made(), "val_probs": half["val_probs"], "val_logits": None},
        "val_probs and test_logits are both there",
    ),
    "probs beside features": (
        {**with_features(made()), "val_probs": half["val_probs"]},
        "val_probs and .*_features are both there",
    ),
    "probs sum": (bad_probs([0.5, 0.2, 0.2]), "test_probs, row 4, .* with the sum 0.9: prob"),
    "probs percent": (bad_probs([50, 30, 20]), "divide percentages by 100"),
    "probs negative": (bad_probs([-0.5, 1, 0.5]), "from -0.5 to 1"),
    "probs nan": (bad_probs(math.nan), "row 4, holds numbers from nan"),
    "probs of class 1": (
        {"val_probs": np.array([0.5, 1.5]), "val_labels": np.array([0, 1])},
        "row 1, holds numbers from 1.5 to 1.5: prob",
    ),
    "labels of text": ({**made(), "val_labels": np.array(["cat"] * 11)}, "labels as integers"),
    "logits of images": ({**made(), "val_logits": np.ones((11, 3, 1))}, r"shape \(11, 3, 1\)"),
    "one number": ({**made(), "val_logits": np.array(1.0)}, r"val_logits has shape \(\)"),
}


@pytest.mark.parametrize("form", ["npz", "npy", "safetensors"])
@pytest.mark.parametrize("case", REFUSED)
def test_refused_arrays_leave_nothing(tmp_path, case, form):
    values, message = REFUSED[case]
    values = {key: value for key, value in values.items() if value is not None}
    if form == "safetensors" and case == "labels of text":
        pytest.skip("a tensor holds no text")
    files = write(tmp_path, form, values)
    before = set(tmp_path.iterdir())
    with pytest.raises(InputError, match=message) as caught:
        import_files(files, tmp_path / "pack")
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".pkl", ".PT", ".ckpt"])
def test_pickles_are_never_read(tmp_path, suffix):
    file = tmp_path / f"logits{suffix}"
    file.write_bytes(pickle.dumps([1]))
    with pytest.raises(InputError, match=r"is a pickle, .* never read: .*numpy\.savez"):
        import_files(file, tmp_path / "pack")


def test_pickled_npy_is_never_read(tmp_path):
    arrays = made()
    write(tmp_path, "npy", arrays)
    np.save(tmp_path / "val_labels.npy", np.array([1, "a", None], dtype=object))
    with pytest.raises(InputError, match="val_labels holds Python objects"):
        import_files([tmp_path / f"{key}.npy" for key in arrays], tmp_path / "pack")


BROKEN = {
    "all.safetensors": r"all\.safetensors is not a \.safetensors file, or only a part of one",
    "val.parquet": r"val\.parquet is not a \.parquet file, or only a part of one",
    "val_logits.npy": r"val_logits cannot be read",
    "val.csv": r"val\.csv: it is empty: the first line must name the columns",
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("content", [b"", b"junk\n", "half"])
def test_files_that_are_broken(tmp_path, name, content):
    form = name.rpartition(".")[2]
    files = write(tmp_path, form, made())
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[: len(whole) // 2] if content == "half" else content)
    if form == "csv" and content:  # half a text is a shorter text
        return
    with pytest.raises(InputError, match=BROKEN[name]) as caught:
        import_files(files, tmp_path / "pack")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "pack").exists()


def test_texts_of_safetensors_that_are_none(tmp_path):
    tensors = {"val_logits": torch.zeros(2, 2), "val_labels": torch.tensor([0, 1])}
    file = tmp_path / "a.safetensors"
    for texts, message in (
        ({"class_names": "cat, dog"}, "class_names cannot be read"),
        ({"class_names": "{}"}, "class_names has shape"),
        ({"class_names": "[1, 2]"}, "class_names has shape"),
        ({"meta": "[]"}, "meta is not a JSON object"),
    ):
        safetensors.torch.save_file(tensors, file, metadata=texts)
        with pytest.raises(InputError, match=message):
            import_files(file, tmp_path / "pack")
    tensors["meta"] = torch.zeros(1)
    safetensors.torch.save_file(tensors, file)
    with pytest.raises(InputError, match="meta is not a JSON object"):
        import_files(file, tmp_path / "pack")
    safetensors.torch.save_file(
        {**tensors, "val_labels": torch.zeros(2, dtype=torch.complex64)}, file
    )
    with pytest.raises(InputError):
        import_files(file, tmp_path / "pack")


def test_lists_that_are_no_matrix(tmp_path):
    file = tmp_path / "val.parquet"
    for logits, message in (
        ([[1.0, 2.0], [1.0]], "holes or different lengths"),
        ([[1.0, 2.0], None], "holes or different lengths"),
        ([[1.0, None], [1.0, 2.0]], "holes or different lengths"),
        ([["a", "b"], ["c", "d"]], "val_logits"),
    ):
        pyarrow.parquet.write_table(pyarrow.table({"logits": logits, "label": [0, 1]}), file)
        with pytest.raises(InputError, match=message):
            import_files(file, tmp_path / "pack")
    lists = pyarrow.table({"logits": [[1.0, 2.0]] * 2, "label": [0, None]})
    pyarrow.parquet.write_table(lists, file)
    with pytest.raises(InputError, match="row 1, column 'label': the cell is empty"):
        import_files(file, tmp_path / "pack")
    with pytest.raises(InputError, match="no column 'y': name the column of labels with --label"):
        import_files(file, tmp_path / "pack", label="y")


def test_pyarrow_is_asked_for_by_name(tmp_path, monkeypatch):
    files = write(tmp_path, "parquet", made())
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        InputError, match=r"needs pyarrow to be read: pip install 'featcal\[arrow\]'"
    ):
        import_files(files, tmp_path / "pack")


def test_files_that_do_not_go_together(tmp_path):
    np.savez(tmp_path / "val.npz", **made())
    (tmp_path / "val.csv").write_text("logit_a,logit_b,label\n1,2,0\n")
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "val.csv").write_text("logit_a,logit_b,label\n1,2,0\n")
    (tmp_path / "val-2.csv").write_text("logit_a,logit_b,label\n1,2,0\n")
    np.save(tmp_path / "logits.npy", made()["val_logits"])
    np.savez(tmp_path / "again.npz", **made())
    for names, message in (
        ([], "paths is empty"),
        (["val.npz", "val.csv"], r"val\.csv is a table and .*val\.npz holds arrays"),
        (["val.csv", "more/val.csv"], "are both called 'val': give each its split, as in 'val="),
        (["val.npz", "again.npz"], r"val_logits is in .*val\.npz and in .*again\.npz"),
        (["val-2.csv"], "'val-2' cannot be the name of a split: give one, as in 'val="),
        (["logits.npy"], "name 'logits' does not say what the array is"),
        (["notes.txt"], r"notes\.txt is not an \.npz, \.npy, \.safetensors, \.csv"),
        (["no.csv"], r"no\.csv does not exist"),
    ):
        with pytest.raises(InputError, match=message):
            import_files([tmp_path / name for name in names], tmp_path / "pack")
    with pytest.raises(InputError, match="kind is 'prob': give 'logits' or 'probs'"):
        import_files(tmp_path / "val.csv", tmp_path / "pack", kind="prob")
    for options in ({"kind": "logits"}, {"ignore": ["id"]}, {"label": "y"}):
        with pytest.raises(InputError, match="are for tables"):
            import_files(tmp_path / "val.npz", tmp_path / "pack", **options)
    with pytest.raises(InputError, match=r"val\.csv is not an \.npz file: import_files reads"):
        import_npz(tmp_path / "val.csv", tmp_path / "pack")


def test_the_output_is_looked_at_first(tmp_path):
    (tmp_path / "pack").mkdir()
    with pytest.raises(InputError, match=r"^output .* exists"):
        import_files(tmp_path / "none.csv", tmp_path / "pack")


def test_what_is_imported_can_be_opened(tmp_path):
    import_files(write(tmp_path, "csv", made()), tmp_path / "pack")
    Pack.open(tmp_path / "pack").verify()
