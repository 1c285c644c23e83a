"""The feature pack: what goes in comes out, and nothing broken gets in or stays behind."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from featcal.core.batch import CHUNK_ROWS, Batch, as_data
from featcal.core.checks import InputError
from featcal.core.fit import survey
from featcal.core.progress import listen
from featcal.data import Pack, write_pack
from featcal.data import pack as shards_module
from featcal.data.manifest import _label_dtype

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def batch(rows=6, d=4, k=3, *, dtype=torch.float32, features=True, logits=False, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return Batch(
        torch.randn(rows, k, generator=draw).to(dtype) if logits else None,
        torch.randint(k, (rows,), generator=draw),
        torch.randn(rows, d, generator=draw).to(dtype) if features else None,
    )


def linear(d=4, k=3):
    torch.manual_seed(0)
    return nn.Linear(d, k)


def joined(data):
    """All rows of some data as one batch."""
    parts = list(data)
    cat = lambda name: torch.cat([getattr(part, name) for part in parts])  # noqa: E731
    first = parts[0]
    return Batch(
        None if first.logits is None else cat("logits"),
        cat("labels"),
        None if first.features is None else cat("features"),
    )


def same(a, b):
    return (a is None and b is None) or (a.dtype == b.dtype and torch.equal(a, b))


def edit(pack, change):
    """Changes the manifest on disk."""
    file = pack.path / "manifest.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


@pytest.fixture
def pack(tmp_path):
    splits = {"val": [batch(6)], "test": [batch(9, seed=1)]}
    return write_pack(tmp_path / "p", splits, head=linear(), shard_rows=4)


# --- what goes in comes out ------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any),
    d=st.integers(1, 5),
    k=st.integers(2, 5),
    dtype=st.sampled_from(FLOATS),
    stored=st.sampled_from([(True, False), (False, True), (True, True)]),
    shard_rows=st.integers(1, 12),
)
def test_round_trip(tmp_path_factory, sizes, d, k, dtype, stored, shard_rows):
    features, logits = stored
    given_ = [
        batch(n, d, k, dtype=dtype, features=features, logits=logits, seed=i)
        for i, n in enumerate(sizes)
    ]
    head = linear(d, k) if features else None
    if features and logits:
        with torch.no_grad():
            given_ = [
                Batch(head(b.features.float()).to(dtype), b.labels, b.features) for b in given_
            ]
    out = tmp_path_factory.mktemp("trip") / "pack"
    pack = write_pack(out, {"val": given_}, head=head, shard_rows=shard_rows)
    whole, read = joined(given_), joined(pack.split("val"))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert same(read.features, None if whole.features is None else whole.features.to(wide))
    assert same(read.logits, None if whole.logits is None else whole.logits.float())
    assert same(read.labels, whole.labels)
    rows = [shard.rows for shard in pack.manifest.splits["val"]]
    assert sum(rows) == sum(sizes) == pack.split("val").rows
    assert set(rows[:-1]) <= {shard_rows}
    assert rows[-1] <= shard_rows
    pack.verify()


def test_the_head_comes_back_frozen_and_draws_no_random_numbers(tmp_path):
    given_ = linear().double()
    pack = write_pack(tmp_path / "p", {"val": batch()}, head=given_)
    before = torch.get_rng_state()
    head = pack.head
    assert torch.equal(before, torch.get_rng_state())
    assert head.weight.dtype == head.bias.dtype == torch.float32
    assert torch.equal(head.weight, given_.weight.float())
    assert torch.equal(head.bias, given_.bias.float())
    assert not head.training
    assert not any(p.requires_grad for p in head.parameters())
    head.weight.zero_()
    assert torch.equal(pack.head.weight, given_.weight.float())


@pytest.mark.parametrize("head", [nn.Linear(4, 3, bias=False), (torch.ones(3, 4), None)])
def test_a_head_without_bias_has_a_bias_of_zeros(tmp_path, head):
    pack = write_pack(tmp_path / "p", {"val": batch()}, head=head)
    assert torch.equal(pack.head.bias, torch.zeros(3))


def test_logits_alone_have_no_head(tmp_path):
    pack = write_pack(tmp_path / "p", {"val": batch(features=False, logits=True)})
    assert pack.head is None
    assert pack.manifest.features is None
    assert next(iter(pack.split("val"))).features is None


def test_features_and_logits_need_no_linear_head(tmp_path):
    pack = write_pack(tmp_path / "p", {"val": batch(logits=True)})
    assert pack.head is None
    assert next(iter(pack.split("val"))).features is not None


def test_features_keep_their_type_on_disk(tmp_path):
    given_ = batch(100, 8, dtype=torch.float16)
    pack = write_pack(tmp_path / "p", {"val": given_}, head=linear(8))
    assert pack.manifest.dtypes == {"features": "float16", "labels": "uint8"}
    assert 100 * 8 * 2 < pack.manifest.splits["val"][0].bytes < 100 * 8 * 2 + 100 + 400


def test_wide_logits_are_stored_as_they_are_read(tmp_path):
    given_ = batch(features=False, logits=True, dtype=torch.float64)
    pack = write_pack(tmp_path / "p", {"val": given_})
    assert pack.manifest.dtypes["logits"] == "float32"
    assert torch.equal(joined(pack.split("val")).logits, given_.logits.float())


@pytest.mark.parametrize(
    ("classes", "dtype"),
    [
        *[(2, "uint8"), (256, "uint8"), (257, "int16"), (2**15, "int16")],
        *[(2**15 + 1, "int32"), (2**31, "int32"), (2**31 + 1, "int64")],
    ],
)
def test_labels_take_the_smallest_type(classes, dtype):
    assert _label_dtype(classes) == dtype


def test_the_largest_label_survives(tmp_path):
    given_ = Batch(torch.zeros(2, 257), torch.tensor([0, 256], dtype=torch.int32))
    pack = write_pack(tmp_path / "p", {"val": given_})
    assert joined(pack.split("val")).labels.tolist() == [0, 256]


def test_names_and_meta_come_back(tmp_path):
    pack = write_pack(
        tmp_path / "p",
        {"val": batch()},
        head=linear(),
        dataset="d",
        model="m",
        class_names=["a", "b", "ü"],
        meta={"epochs": 3, "list": (1, 2)},
    )
    again = Pack.open(str(tmp_path / "p"))
    assert again == pack
    assert (again.manifest.dataset, again.manifest.model) == ("d", "m")
    assert again.manifest.class_names == ("a", "b", "ü")
    assert again.manifest.meta == {"epochs": 3, "list": [1, 2]}


def test_gradients_generators_and_strange_strides_are_welcome(tmp_path):
    one = batch(6)
    turned = Batch(None, one.labels, one.features.t().contiguous().t().requires_grad_())
    pack = write_pack(tmp_path / "p", {"val": (b for b in [turned])}, head=linear())
    assert torch.equal(joined(pack.split("val")).features, one.features)


def test_batches_are_cut_at_the_chunk_and_read_again_alike(tmp_path):
    rows = 2 * CHUNK_ROWS + 5
    pack = write_pack(tmp_path / "p", {"val": batch(rows, dtype=torch.float16)}, head=linear())
    split = pack.split("val")
    first, second = list(split), list(split)
    assert [len(b) for b in first] == [CHUNK_ROWS, CHUNK_ROWS, 5]
    for a, b in zip(first, second, strict=True):
        assert same(a.features, b.features)
        assert same(a.labels, b.labels)


def test_only_one_chunk_is_read_at_a_time(tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr("featcal.data.pack._batch", lambda chunk: read.append(1) or chunk)
    pack = write_pack(tmp_path / "p", {"val": batch(20_000)}, head=linear())
    batches = iter(pack.split("val"))
    assert read == []
    next(batches)
    assert len(read) == 1
    batches.close()


def test_writing_reads_no_further_than_the_shard_at_hand(tmp_path, monkeypatch):
    given_, ahead = [], []
    save = shards_module.save_part

    def watched(path, tensors, **kwargs):
        ahead.append(sum(given_) - len(ahead) * 4)
        return save(path, tensors, **kwargs)

    def stream():
        for seed in range(6):
            given_.append(3)
            yield batch(3, seed=seed)

    monkeypatch.setattr(shards_module, "save_part", watched)
    write_pack(tmp_path / "p", {"val": stream()}, head=linear(), shard_rows=4)
    assert max(ahead[:-1]) <= 4 + 3


def test_what_a_reader_does_to_a_batch_does_not_reach_the_disk(pack):
    for part in pack.split("val"):
        part.features.zero_()
    pack.verify()
    assert joined(pack.split("val")).features.abs().sum() > 0


def test_a_split_is_data(pack):
    facts = survey(as_data(pack.split("test")), pack.head)
    assert (facts.rows, facts.classes) == (9, 3)


def test_summary_is_json(pack):
    summary = json.loads(json.dumps(pack.summary()))
    assert summary["name"] == "p"
    assert summary["head"] is True
    assert (summary["features"], summary["classes"]) == (4, 3)
    assert summary["splits"]["test"]["rows"] == 9
    assert summary["splits"]["test"]["shards"] == 3
    assert summary["tensors"] == {"features": "float32", "labels": "uint8"}
    files = [f for f in pack.path.iterdir() if f.suffix == ".safetensors"]
    assert summary["bytes"] == sum(f.stat().st_size for f in files)


def test_everyone_may_read_the_files(pack):
    assert all(file.stat().st_mode & 0o044 == 0o044 for file in pack.path.iterdir())


def test_writing_and_verifying_tell_their_progress(tmp_path):
    seen = []
    with listen(lambda *step: seen.append(step)):
        write_pack(tmp_path / "p", {"val": batch()}, head=linear()).verify()
    assert seen == [("write", 0, 1), ("write", 1, 1)] + [("verify", i, 2) for i in range(3)]


# --- what write_pack refuses -----------------------------------------------------------------


def changed(**values):
    one = batch()
    return Batch(**{"logits": one.logits, "labels": one.labels, "features": one.features, **values})


def nan_at(row, rows=6):
    one = batch(rows)
    one.features[row, 0] = float("nan")
    return one


OK = batch()
REFUSED = {
    "no split": ({}, {}, "splits is empty"),
    "split name": ({"a/b": OK}, {}, "split name 'a/b'"),
    "split name dots": ({"..": OK}, {}, "split name '..'"),
    "empty split": ({"val": OK, "test": []}, {}, "split 'test' is empty"),
    "empty batches": ({"val": [batch(0), batch(0)]}, {}, "split 'val' is empty"),
    "no batches": ({"val": 3}, {}, "split 'val': data is int"),
    "foreign item": ({"val": [(1, 2)]}, {}, "split 'val': data holds a tuple"),
    "nan": (
        {"val": [batch(5), nan_at(2)]},
        {},
        "split 'val': features are NaN or infinite in row 7",
    ),
    "infinite logits": (
        {"val": Batch(torch.full((2, 3), 1e300, dtype=torch.float64), torch.tensor([0, 1]))},
        {"head": None},
        "logits are NaN or infinite in 2 rows",
    ),
    "negative label": (
        {"val": changed(labels=torch.tensor([0, 1, 2, -1, 0, 1]))},
        {},
        r"split 'val': labels are outside 0\.\.2 in row 3",
    ),
    "large label": ({"val": changed(labels=torch.full((6,), 3))}, {}, r"outside 0\.\.2 in 6 rows"),
    "float labels": ({"val": changed(labels=torch.zeros(6))}, {}, "labels have shape"),
    "label column": ({"val": changed(labels=torch.zeros(6, 1).long())}, {}, "labels have shape"),
    "rows": ({"val": changed(labels=torch.zeros(5).long())}, {}, "one row a label"),
    "integer features": ({"val": changed(features=torch.ones(6, 4).int())}, {}, "has type int32"),
    "flat features": ({"val": changed(features=torch.ones(6))}, {}, r"shape \(6,\)"),
    "no columns": ({"val": changed(features=torch.ones(6, 0))}, {}, r"shape \(6, 0\)"),
    "nothing": ({"val": changed(features=None)}, {}, "neither logits nor features"),
    "head missing": ({"val": OK}, {"head": None}, "pass the head"),
    "head type": ({"val": OK}, {"head": nn.ReLU()}, "head is ReLU"),
    "head pair": ({"val": OK}, {"head": (torch.ones(3, 4), 0.0)}, "head is tuple"),
    "head bias": ({"val": OK}, {"head": (torch.ones(3, 4), torch.ones(4))}, r"bias \(4,\)"),
    "head scalar": ({"val": OK}, {"head": (torch.tensor(1.0), None)}, r"shape \(\)"),
    "head dtype": ({"val": OK}, {"head": (torch.ones(3, 4).int(), None)}, "has type int32"),
    "head nan": (
        {"val": OK},
        {"head": (torch.full((3, 4), torch.nan), None)},
        "head weight is NaN",
    ),
    "head wide": ({"val": OK}, {"head": linear(5)}, r"\(3, 5\).* 4 columns.*not their head"),
    "head turned": ({"val": OK}, {"head": linear(3, 4)}, r"transposed, give weight\.T"),
    "head without features": ({"val": batch(features=False, logits=True)}, {}, "no features for"),
    "head classes": ({"val": batch(k=5, logits=True)}, {}, "3 classes and the logits have 5"),
    "one logit": ({"val": OK}, {"head": linear(4, 1)}, r"labels are outside 0\.\.1"),
    "one logit, names": (
        {"val": batch(k=2)},
        {"head": linear(4, 1), "class_names": ["yes"]},
        "1 class_names for 2 classes",
    ),
    "columns differ": (
        {"val": OK, "test": batch(d=5)},
        {},
        r"split 'test'.*\(n, 5\) after .*, 4\)",
    ),
    "types differ": ({"val": [OK, batch(dtype=torch.float16)]}, {}, "float16 features.*float32"),
    "tensors differ": ({"val": [OK, batch(logits=True)]}, {}, "same tensors"),
    "logits differ": (
        {"val": [batch(features=False, logits=True), batch(2, k=4, features=False, logits=True)]},
        {"head": None},
        r"\(n, 4\) after .*\(n, 3\)",
    ),
    "class names": ({"val": OK}, {"class_names": ["a"]}, "1 class_names for 3 classes"),
    "class names text": ({"val": OK}, {"class_names": "abc"}, "class_names must be a list"),
    "class names type": ({"val": OK}, {"class_names": [1, 2, 3]}, "class_names must be a list"),
    "meta": ({"val": OK}, {"meta": {"a": object()}}, "meta cannot be written as JSON"),
    "meta nan": ({"val": OK}, {"meta": {"a": float("nan")}}, "meta cannot be written as JSON"),
    "dataset": ({"val": OK}, {"dataset": None}, "dataset is None"),
    "shard rows": ({"val": OK}, {"shard_rows": 0}, "shard_rows is 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_write_pack_refuses_and_leaves_nothing(tmp_path, case):
    splits, options, message = REFUSED[case]
    with pytest.raises(InputError, match=message) as caught:
        write_pack(tmp_path / "p", splits, **{"head": linear(), "shard_rows": 2, **options})
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_not_touched(pack):
    before = {file.name: file.read_bytes() for file in pack.path.iterdir()}
    with pytest.raises(InputError, match="exists"):
        write_pack(pack.path, {"val": batch()}, head=linear())
    assert {file.name: file.read_bytes() for file in pack.path.iterdir()} == before


def test_an_error_in_the_data_passes_through_and_leaves_nothing(tmp_path):
    def broken():
        yield batch(9)
        assert list(tmp_path.iterdir()) != []
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_pack(tmp_path / "p", {"val": broken()}, head=linear(), shard_rows=2)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path, monkeypatch):
    def full(tensors, path):
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr(shards_module, "save_file", full)
    with pytest.raises(
        InputError, match=r"val-00000\.safetensors cannot be written .*No space left"
    ):
        write_pack(tmp_path / "p", {"val": batch()}, head=linear())
    assert list(tmp_path.iterdir()) == []


KILLED = """
import sys, torch
from featcal.core.batch import Batch
from featcal.data import write_pack
def endless():
    while True:
        yield Batch(torch.zeros(4, 3), torch.zeros(4).long())
        print("batch", flush=True)
write_pack(sys.argv[1], {"val": endless()}, shard_rows=4)
"""


def test_a_killed_writer_leaves_nothing_under_the_final_name(tmp_path):
    out = tmp_path / "p"
    command = [sys.executable, "-c", KILLED, str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for _ in range(3):
            assert process.stdout.readline() == "batch\n"
        os.kill(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not out.exists()
    assert write_pack(out, {"val": batch()}, head=linear()).split("val").rows == 6


# --- what Pack.open refuses ------------------------------------------------------------------


def test_no_folder(tmp_path):
    with pytest.raises(InputError, match="is not a feature pack: it does not exist; make one with"):
        Pack.open(tmp_path / "none")


def test_no_manifest(tmp_path):
    text = 'it has no manifest.json; make one with "featcal pack import FILE... -o DIR"'
    with pytest.raises(InputError, match=text):
        Pack.open(tmp_path)


def test_a_file(tmp_path):
    (tmp_path / "x.txt").write_text("x")
    with pytest.raises(InputError, match="it is a file, not a folder"):
        Pack.open(tmp_path / "x.txt")


def test_an_npz_file_is_to_be_imported(tmp_path):
    (tmp_path / "my data.npz").write_bytes(b"")
    with pytest.raises(InputError, match=r"pack import '.*my data\.npz' -o 'my data'\""):
        Pack.open(tmp_path / "my data.npz")


def test_unknown_split(pack):
    with pytest.raises(InputError, match="no split 'train': choose one of val, test"):
        pack.split("train")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b'{"format": NaN}', "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[]", "an object is expected"),
        (b"{}", '"format" is null, not "featcal.pack"'),
        (b'{"format": "' + b"x" * 60 + b'"}', r'"format" is "x{36}\.\.\.'),
        (b'{"format": "featcal.pack"}', '"version" is missing'),
    ],
)
def test_a_manifest_of_another_kind(pack, content, message):
    (pack.path / "manifest.json").write_bytes(content)
    with pytest.raises(InputError, match=message):
        Pack.open(pack.path)


def shard(content):
    return content["splits"]["val"]["shards"][0]


TAMPERED = {
    "foreign format": (lambda m: m.update(format="zarr"), '"format" is "zarr"'),
    "newer": (lambda m: m.update(version=2), "reads version 1: update featcal"),
    "version zero": (lambda m: m.update(version=0), '"version" is 0'),
    "version true": (lambda m: m.update(version=True), '"version" is true'),
    "dataset": (lambda m: m.update(dataset=None), '"dataset" is null'),
    "model": (lambda m: m.pop("model"), '"model" is missing'),
    "meta": (lambda m: m.update(meta=[]), r'"meta" is \[\]'),
    "classes": (lambda m: m.update(classes="3"), '"classes" is "3"'),
    "fewer classes": (lambda m: m.update(classes=2), "weight have shape"),
    "features": (lambda m: m.update(features=5), "have shape"),
    "no features": (lambda m: m.update(features=None), '"features" and "dtypes" disagree'),
    "names short": (lambda m: m.update(class_names=["a"]), "1 class names for 3 classes"),
    "names type": (lambda m: m.update(class_names=[1, 2, 3]), "text only"),
    "dtype unknown": (lambda m: m["dtypes"].update(features="int8"), "'int8', which no pack"),
    "dtype list": (lambda m: m["dtypes"].update(features=[]), "which no pack stores"),
    "dtype other": (lambda m: m["dtypes"].update(features="float16"), "features are F32, not F16"),
    "tensor unknown": (lambda m: m["dtypes"].update(images="uint8"), "'images' is 'uint8'"),
    "tensor missing": (lambda m: m["dtypes"].update(logits="float32"), "it holds"),
    "no labels": (lambda m: m["dtypes"].pop("labels"), "must name labels"),
    "head list": (lambda m: m.update(head=[]), '"head", is damaged: an object is expected'),
    "head without features": (
        lambda m: m.update(features=None, dtypes={"labels": "uint8", "logits": "float32"}),
        "no features to feed it",
    ),
    "head is a shard": (
        lambda m: m["head"].update(file="val-00000.safetensors"),
        '"val-00000.safetensors" 2 times',
    ),
    "no splits": (lambda m: m.update(splits={}), "it has no split"),
    "split name": (lambda m: m["splits"].update({"a b": m["splits"]["val"]}), "split name 'a b'"),
    "rows": (lambda m: m["splits"]["val"].update(rows=7), "7 rows are promised .* have 6"),
    "no shards": (lambda m: m["splits"]["val"].update(shards=[]), "6 rows are promised"),
    "no rows": (lambda m: m["splits"]["val"].update(rows=0, shards=[]), '"rows" is 0'),
    "shard rows": (
        lambda m: (m["splits"]["val"].update(rows=7), shard(m).update(rows=5)),
        r"have shape \[4.*not \[5",
    ),
    "shard missing": (lambda m: shard(m).update(file="gone.safetensors"), "gone.* is missing"),
    "shard outside": (lambda m: shard(m).update(file="../x.safetensors"), "not the plain name"),
    "shard absolute": (lambda m: shard(m).update(file="/etc/x.safetensors"), "not the plain name"),
    "shard hidden": (lambda m: shard(m).update(file="..safetensors"), "not the plain name"),
    "shard backslash": (lambda m: shard(m).update(file="a\\b.safetensors"), "not the plain name"),
    "shard pickle": (lambda m: shard(m).update(file="val.pkl"), "not the plain name"),
    "shard newline": (lambda m: shard(m).update(file="a.safetensors\n"), "not the plain name"),
    "shard twice": (lambda m: shard(m).update(file="val-00001.safetensors"), "2 times"),
    "shard bytes": (lambda m: shard(m).update(bytes=10**9), "it is truncated"),
    "shard longer": (lambda m: shard(m).update(bytes=1), "not the file that was written"),
    "sha": (lambda m: shard(m).update(sha256="abc"), "64 hexadecimal"),
}


@pytest.mark.parametrize("case", TAMPERED)
def test_a_tampered_manifest(pack, case):
    change, message = TAMPERED[case]
    edit(pack, change)
    with pytest.raises(InputError, match=message) as caught:
        Pack.open(pack.path)
    assert str(pack.path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_fields_are_left_to_later_versions(pack):
    edit(pack, lambda m: m.update(extra=1))
    assert Pack.open(pack.path) == pack


def test_a_truncated_shard(pack):
    file = pack.path / "test-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(InputError, match=r"test-00001\.safetensors has .* truncated"):
        Pack.open(pack.path)
    with pytest.raises(InputError, match=r"test-00001\.safetensors cannot be read"):
        list(pack.split("test"))


def test_a_shard_with_a_broken_header(pack):
    file = pack.path / "val-00000.safetensors"
    file.write_bytes(b"\xff" * file.stat().st_size)
    with pytest.raises(InputError, match=r"val-00000\.safetensors cannot be read"):
        Pack.open(pack.path)


def test_a_head_of_integers(pack):
    save_file(
        {"weight": torch.ones(3, 4, dtype=torch.int32), "bias": torch.ones(3)},
        pack.path / "head.safetensors",
    )
    size = (pack.path / "head.safetensors").stat().st_size
    edit(pack, lambda m: m["head"].update(bytes=size))
    with pytest.raises(InputError, match="weight are I32, not F16 or"):
        Pack.open(pack.path)


def test_an_unreadable_manifest(pack, monkeypatch):
    def denied(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", denied)
    with pytest.raises(InputError, match=r"manifest\.json cannot be read: Permission denied"):
        Pack.open(pack.path)


def test_a_shard_that_vanishes_after_opening(pack):
    (pack.path / "val-00001.safetensors").unlink()
    with pytest.raises(InputError, match=r"val-00001\.safetensors cannot be read"):
        list(pack.split("val"))
    with pytest.raises(InputError, match=r"val-00001\.safetensors cannot be read"):
        pack.verify()


@pytest.mark.parametrize("name", ["head.safetensors", "val-00000.safetensors"])
def test_verify_finds_a_flipped_byte(pack, name):
    pack.verify()
    content = bytearray((pack.path / name).read_bytes())
    content[-1] ^= 1
    (pack.path / name).write_bytes(content)
    reopened = Pack.open(pack.path)
    with pytest.raises(InputError, match=f"{name} is damaged: its sha256 has changed"):
        reopened.verify()
