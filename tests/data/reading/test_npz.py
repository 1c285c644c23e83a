"""Importing arrays: real packs come in whole, everything else is refused by key."""

import io
import json
import pickle
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from featcal.core.checks import InputError
from featcal.data import import_npz

SHARED = Path(__file__).parents[3].parent / "shared"
ACCURACY = {
    "cifar100-wrn16x4": 75.04,
    "cifar10-wrn16x4": 93.83,
    "cifar10-resnet50": 93.23,
    "cifar10-vit": 67.60,
    "imagenet5k-efficientnet_lite0": 75.10,
}


def arrays(**changes):
    """Arrays that import well, with changes; None removes a key."""
    draw = np.random.default_rng(0)
    base = {
        "val_features": draw.normal(size=(6, 4)).astype(np.float16),
        "val_labels": draw.integers(3, size=6).astype(np.int16),
        "test_features": draw.normal(size=(9, 4)).astype(np.float16),
        "test_labels": draw.integers(3, size=9).astype(np.int16),
        "weight": draw.normal(size=(3, 4)).astype(np.float32),
        "bias": draw.normal(size=3).astype(np.float32),
        "meta": np.array(json.dumps({"dataset": "d", "model": "m", "epochs": 3})),
    }
    return {key: value for key, value in {**base, **changes}.items() if value is not None}


def logits_only(**changes):
    empty = dict.fromkeys(("val_features", "test_features", "weight", "bias"))
    logits = {"val_logits": np.ones((6, 3)), "test_logits": np.ones((9, 3))}
    return arrays(**{**empty, **logits, **changes})


@pytest.fixture
def load(tmp_path):
    def load_(values, *, save=np.savez):
        save(tmp_path / "in.npz", **values)
        return import_npz(tmp_path / "in.npz", tmp_path / "out")

    return load_


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_features_and_head(load, save):
    values = arrays()
    pack = load(values, save=save)
    assert pack.splits == ("val", "test")
    assert (pack.manifest.dataset, pack.manifest.model) == ("d", "m")
    assert pack.manifest.meta == {"epochs": 3}
    assert pack.manifest.dtypes == {"features": "float16", "labels": "uint8"}
    (batch,) = pack.split("val")
    assert np.array_equal(batch.features.numpy(), values["val_features"].astype(np.float32))
    assert np.array_equal(batch.labels.numpy(), values["val_labels"])
    assert np.array_equal(pack.head.weight.numpy(), values["weight"])
    assert np.array_equal(pack.head.bias.numpy(), values["bias"])


def test_logits_alone(load):
    pack = load(logits_only())
    assert pack.head is None
    assert pack.manifest.features is None
    assert pack.manifest.classes == 3


def test_features_and_logits(load):
    values = arrays()
    for split in ("val", "test"):
        values[f"{split}_logits"] = (
            values[f"{split}_features"] @ values["weight"].T + values["bias"]
        )
    (batch,) = load(values).split("val")
    assert batch.features.shape == (6, 4)
    assert batch.logits.shape == (6, 3)


def test_any_split_name(load):
    values = logits_only(my_own_logits=np.zeros((2, 3)), my_own_labels=np.array([0, 1]))
    assert load(values).splits == ("val", "test", "my_own")


def test_no_bias_no_meta_class_names(load):
    pack = load(arrays(bias=None, meta=None, class_names=np.array(["a", "b", "c"])))
    assert torch.equal(pack.head.bias, torch.zeros(3))
    assert pack.manifest.dataset == ""
    assert pack.manifest.class_names == ("a", "b", "c")


@pytest.mark.parametrize("dtype", ["uint8", "int32", "uint16", "uint64", ">i4"])
def test_integer_labels_of_any_kind(load, dtype):
    values = arrays()
    pack = load({**values, "val_labels": values["val_labels"].astype(dtype)})
    (batch,) = pack.split("val")
    assert np.array_equal(batch.labels.numpy(), values["val_labels"])


@pytest.mark.parametrize("dtype", [">f4", ">f8"])
def test_the_other_byte_order(load, dtype):
    values = arrays()
    swapped = {key: values[key].astype(dtype) for key in ("val_features", "test_features")}
    (batch,) = load({**values, **swapped}).split("val")
    assert np.array_equal(batch.features.numpy(), swapped["val_features"])


def test_extra_arrays_and_fortran_order_do_no_harm(load):
    values = arrays(epoch=np.array(3), weight=np.asfortranarray(arrays()["weight"]))
    assert np.array_equal(load(values).head.weight.numpy(), arrays()["weight"])


def poisoned(value):
    features = arrays()["val_features"]
    features[[1, 4], 2] = value
    return features


wide = np.longdouble([[1.0, 2.0, 3.0, 4.0]] * 6)
REFUSED = {
    "no arrays": ({}, r"neither features nor logits nor probs \(found: nothing\)"),
    "other keys": (
        {"x": np.ones(3), "train_x": np.ones((3, 2))},
        r"found: x, train_x\): name the arrays <split>_features or <split>_logits",
    ),
    "many keys": ({f"x{i}": np.ones(1) for i in range(20)}, r"x11, \.\.\.\)"),
    "only labels": ({"val_labels": np.ones(3)}, "neither features nor logits"),
    "no labels": (arrays(val_labels=None), "val_labels is missing"),
    "no rows to label": (arrays(val_features=None), "add val_features or val_logits"),
    "no weight": (arrays(weight=None), "weight is missing, and val_features cannot be used"),
    "no weight, logits": (
        arrays(weight=None, bias=None, val_logits=np.ones((6, 3)), test_logits=np.ones((9, 3))),
        "weight is missing",
    ),
    "bias alone": (logits_only(bias=np.ones(3)), "bias is there without weight"),
    "head for logits": (logits_only(weight=np.ones((3, 4))), "no features for the head"),
    "weight turned": (arrays(weight=np.ones((4, 3)), bias=None), r"transposed, give weight\.T"),
    "weight other": (arrays(weight=np.ones((3, 7))), r"shape \(3, 7\) and the features have 4"),
    "weight flat": (arrays(weight=np.ones(4)), r"head weight has shape \(4,\)"),
    "weight nan": (arrays(weight=np.full((3, 4), np.nan)), "head weight is NaN"),
    "bias short": (arrays(bias=np.ones(2)), r"bias \(2,\)"),
    "labels short": (arrays(val_labels=np.zeros(5, int)), "6 rows and val_labels 5"),
    "labels negative": (
        arrays(val_labels=np.array([0, 0, -1, 0, 0, 0])),
        r"split 'val': labels are outside 0\.\.2 in row 2",
    ),
    "labels large": (arrays(test_labels=np.full(9, 3)), "split 'test': labels are outside"),
    "labels huge": (arrays(val_labels=np.full(6, 2**64 - 1, np.uint64)), "labels are outside"),
    "labels float": (arrays(val_labels=np.zeros(6)), r"val_labels\.astype\('int64'\)"),
    "labels bool": (arrays(val_labels=np.zeros(6, bool)), "val_labels has type bool"),
    "labels column": (arrays(val_labels=np.zeros((6, 1), int)), r"try val_labels\.ravel\(\)"),
    "labels one-hot": (arrays(val_labels=np.zeros((6, 3), int)), r"try val_labels\.argmax\(1\)"),
    "empty split": (
        arrays(test_features=np.ones((0, 4), np.float16), test_labels=np.ones(0, int)),
        "split 'test' is empty",
    ),
    "nan": (arrays(val_features=poisoned(np.nan)), r"split 'val': .*NaN or inf.* 2 rows \(1, 4\)"),
    "inf": (arrays(val_features=poisoned(np.inf)), "split 'val': features are NaN or infinite"),
    "flat": (arrays(val_features=np.ones(6)), r"val_features has shape \(6,\)"),
    "images": (arrays(val_features=np.ones((6, 2, 2))), r"val_features has shape \(6, 2, 2\)"),
    "integers": (arrays(val_features=np.ones((6, 4), int)), "val_features has type int64"),
    "long double": (arrays(val_features=wide), "save float16, float32 or float64"),
    "mixed": (arrays(test_features=np.ones((9, 4), np.float32)), "split 'test': float32 features"),
    "split name": (logits_only(**{"a-b_logits": np.ones((1, 3)), "a-b_labels": [0]}), "'a-b'"),
    "meta text": (arrays(meta=np.array("epochs: 3")), "meta is not a JSON object"),
    "meta list": (arrays(meta=np.array("[1]")), "meta is not a JSON object"),
    "meta array": (arrays(meta=np.array(["{}"])), "meta is not a JSON object"),
    "meta number": (arrays(meta=np.array(3)), "meta is not a JSON object"),
    "meta nan": (arrays(meta=np.array('{"a": NaN}')), "meta cannot be written as JSON"),
    "meta dataset": (arrays(meta=np.array('{"dataset": 3}')), '"dataset" in meta is 3'),
    "names few": (arrays(class_names=np.array(["a", "b"])), "2 class_names for 3 classes"),
    "names numbers": (arrays(class_names=np.arange(3)), "class_names has shape"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_arrays_leave_nothing(load, tmp_path, case):
    values, message = REFUSED[case]
    with pytest.raises(InputError, match=message) as caught:
        load(values)
    assert str(caught.value).startswith(str(tmp_path / "in.npz") + ": ")
    assert "\n" not in str(caught.value)
    assert [file.name for file in tmp_path.iterdir()] == ["in.npz"]


@pytest.mark.parametrize("key", ["val_features", "val_labels", "weight", "meta", "class_names"])
def test_pickled_arrays_are_never_loaded(load, tmp_path, key):
    objects = np.array([1, "a", None], dtype=object)
    with pytest.raises(InputError, match=f"{key} holds Python objects: save it as plain"):
        load(arrays(**{key: objects}))
    assert not (tmp_path / "out").exists()


def whole():
    buffer = io.BytesIO()
    np.savez(buffer, **arrays())
    return buffer.getvalue()


def flipped():
    content = bytearray(whole())
    content[content.index(b"val_features.npy") + 200] ^= 255
    return bytes(content)


def zipped(name, content):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr(name, content)
    return buffer.getvalue()


FILES = {
    "empty": (b"", "is not an .npz file"),
    "text": (b"a,b\n1,2\n", "is not an .npz file"),
    "pickle": (pickle.dumps([1, 2]), "is not an .npz file"),
    "array": (b"\x93NUMPY\x01\x00", "is not an .npz file"),
    "truncated": (whole()[:-100], "only a part of one: copy it again"),
    "junk in front": (b"junk" + whole(), "cannot be read"),
    "flipped byte": (flipped(), "val_features cannot be read .*copy the file again"),
    "foreign zip": (zipped("archive/data.pkl", b"x"), r"found: archive/data\.pkl"),
    "foreign member": (zipped("meta", b"x"), "meta is not an array"),
    "broken member": (zipped("val_logits.npy", b"\x93NUMPY\x01\x00\x05\x00junk!"), "val_labels is"),
}


@pytest.mark.parametrize("case", FILES)
def test_files_that_are_no_npz(tmp_path, case):
    content, message = FILES[case]
    file = tmp_path / "in.npz"
    file.write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        import_npz(file, tmp_path / "out")
    assert str(file) in str(caught.value)
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("content", [b"\x93NUMPY\x01\x00\x05\x00junk!", b"no array"])
def test_a_broken_member_is_named(tmp_path, content):
    buffer = io.BytesIO(zipped("val_logits.npy", content))
    with zipfile.ZipFile(buffer, "a") as file:
        labels = io.BytesIO()
        np.save(labels, np.zeros(3, int))
        file.writestr("val_labels.npy", labels.getvalue())
    (tmp_path / "in.npz").write_bytes(buffer.getvalue())
    with pytest.raises(InputError, match="val_logits"):
        import_npz(tmp_path / "in.npz", tmp_path / "out")


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(InputError, match="does not exist: give the path of"):
        import_npz(tmp_path / "none.npz", tmp_path / "out")
    with pytest.raises(InputError, match=r"is not an \.npz, \.npy"):
        import_npz(tmp_path, tmp_path / "out")


def test_an_existing_output_is_named_alone(load, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(InputError, match=f"^output {re.escape(str(tmp_path / 'out'))} exists"):
        load(arrays())


@pytest.mark.shared
@pytest.mark.parametrize("name", ACCURACY)
def test_the_packs_beside_the_project(tmp_path, name):
    file = SHARED / "packs" / f"{name}.npz"
    if not file.exists():
        pytest.skip("the packs in ../shared are not beside the project")
    pack = import_npz(file, tmp_path / name)
    pack.verify()
    head = pack.head
    right = sum(
        int((head(batch.features).argmax(1) == batch.labels).sum()) for batch in pack.split("test")
    )
    assert pack.manifest.dtypes["features"] == "float16"
    assert 100 * right / pack.split("test").rows == pytest.approx(ACCURACY[name], abs=0.005)


@pytest.mark.shared
@pytest.mark.parametrize("name", ["resnet50-cifar10-ce", "resnet50-cifar10-flsd53"])
def test_the_logits_beside_the_project(tmp_path, name):
    file = SHARED / "anchors" / f"{name}.npz"
    if not file.exists():
        pytest.skip("the anchors in ../shared are not beside the project")
    pack = import_npz(file, tmp_path / name)
    assert (pack.split("val").rows, pack.split("test").rows) == (5000, 10000)
    with np.load(file, allow_pickle=False) as archive:
        stored = torch.cat([batch.logits for batch in pack.split("test")])
        assert np.array_equal(stored.numpy(), archive["test_logits"])
