"""The feature pack: what goes in comes out, and nothing broken gets in or stays behind."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from torch import nn

from featcal.core.batch import CHUNK_ROWS, Batch, as_data
from featcal.core.checks import InputError
from featcal.core.fit import survey
from featcal.core.progress import listen
from featcal.data import Pack, write_pack
from featcal.data import pack as pack_module
from featcal.data.pack import demo_pack, layout_of

ROOT = Path(__file__).parents[2]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def batch(rows=6, d=4, k=3, *, dtype=torch.float32, features=True, logits=False, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return Batch(
        torch.randn(rows, k, generator=draw).to(dtype) if logits else None,
        torch.randint(k, (rows,), generator=draw),
        torch.randn(rows, d, generator=draw).to(dtype) if features else None,
    )


def linear(d=4, k=3):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(d, k)


def joined(data):
    """All rows of some data as one batch."""
    parts = list(data)

    def whole(name):
        found = [getattr(part, name) for part in parts]
        return None if found[0] is None else torch.cat(found)

    return Batch(whole("logits"), whole("labels"), whole("features"))


def same(a, b):
    return (a is None and b is None) or (a.dtype == b.dtype and torch.equal(a, b))


@pytest.fixture
def pack(tmp_path):
    splits = {"val": [batch(6)], "test": [batch(9, seed=1)]}
    return write_pack(tmp_path / "p", splits, head=linear(), shard_rows=4)


@settings(max_examples=25, deadline=None)
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
    assert torch.equal(head.weight, given_.weight.float())
    assert torch.equal(head.bias, given_.bias.float())
    assert not head.training
    assert not any(p.requires_grad for p in head.parameters())
    head.weight.zero_()
    assert torch.equal(pack.head.weight, given_.weight.float())
    bare = write_pack(tmp_path / "q", {"val": batch()}, head=(torch.ones(3, 4), None))
    assert torch.equal(bare.head.bias, torch.zeros(3))


def test_types_on_disk_are_small(tmp_path):
    pack = write_pack(tmp_path / "p", {"val": batch(100, 8, dtype=torch.float16)}, head=linear(8))
    assert pack.manifest.dtypes == {"features": "float16", "labels": "uint8"}
    assert 100 * 8 * 2 < pack.manifest.splits["val"][0].bytes < 100 * 8 * 2 + 100 + 400
    wide = batch(features=False, logits=True, dtype=torch.float64)
    assert write_pack(tmp_path / "q", {"val": wide}).manifest.dtypes["logits"] == "float32"


@pytest.mark.parametrize(
    ("classes", "dtype"),
    [(2, "uint8"), (256, "uint8"), (257, "int16"), (2**15 + 1, "int32"), (2**31 + 1, "int64")],
)
def test_labels_take_the_smallest_type(classes, dtype):
    assert layout_of(batch(), classes)["dtypes"]["labels"] == dtype


def test_names_meta_and_summary(tmp_path):
    words = {"dataset": "d", "model": "m", "class_names": ["a", "b", "ü"]}
    meta = {"epochs": 3, "list": (1, 2)}
    pack = write_pack(tmp_path / "p", {"val": batch()}, head=linear(), meta=meta, **words)
    again = Pack.open(str(tmp_path / "p"))
    assert again == pack
    assert again.manifest.class_names == ("a", "b", "ü")
    assert again.manifest.meta == {"epochs": 3, "list": [1, 2]}
    summary = json.loads(json.dumps(again.summary()))
    size = sum(f.stat().st_size for f in pack.path.glob("*.safetensors"))
    shard = pack.manifest.splits["val"][0]
    assert summary == {
        **{"name": "p", "dataset": "d", "model": "m", "features": 4, "classes": 3, "head": True},
        "splits": {"val": {"rows": 6, "shards": 1, "bytes": shard.bytes}},
        "tensors": {"features": "float32", "labels": "uint8"},
        **{"bytes": size, "meta": {"epochs": 3, "list": [1, 2]}},
    }
    assert all(file.stat().st_mode & 0o044 == 0o044 for file in pack.path.iterdir())


def test_gradients_generators_and_strange_strides_are_welcome(tmp_path):
    one = batch(6)
    turned = Batch(None, one.labels.int(), one.features.t().contiguous().t().requires_grad_())
    pack = write_pack(tmp_path / "p", {"val": (b for b in [turned])}, head=linear())
    assert torch.equal(joined(pack.split("val")).features, one.features)


def test_a_split_is_data_read_a_chunk_at_a_time_as_often_as_asked(tmp_path):
    rows = 2 * CHUNK_ROWS + 5
    pack = write_pack(tmp_path / "p", {"val": batch(rows, dtype=torch.float16)}, head=linear())
    split = pack.split("val")
    first, second = list(split), list(split)
    assert [len(b) for b in first] == [CHUNK_ROWS, CHUNK_ROWS, 5]
    assert all(same(a.features, b.features) for a, b in zip(first, second, strict=True))
    first[0].features.zero_()  # a reader's own copy
    pack.verify()
    facts = survey(as_data(split), pack.head)
    assert (facts.rows, facts.classes) == (rows, 3)


def test_writing_reads_no_further_than_the_shard_at_hand(tmp_path, monkeypatch):
    given_, ahead = [], []
    save = pack_module.save_part

    def watched(path, tensors, **kwargs):
        ahead.append(sum(given_) - len(ahead) * 4)
        return save(path, tensors, **kwargs)

    def stream():
        for seed in range(6):
            given_.append(3)
            yield batch(3, seed=seed)

    monkeypatch.setattr(pack_module, "save_part", watched)
    write_pack(tmp_path / "p", {"val": stream()}, head=linear(), shard_rows=4)
    assert max(ahead[:-1]) <= 4 + 3


def test_writing_and_verifying_tell_their_progress(tmp_path):
    seen = []
    with listen(lambda *step: seen.append(step)):
        write_pack(tmp_path / "p", {"val": batch()}, head=linear()).verify()
    assert seen == [("write", 0, 1), ("write", 1, 1)] + [("verify", i, 2) for i in range(3)]


def changed(**values):
    one = batch()
    return Batch(**{"logits": one.logits, "labels": one.labels, "features": one.features, **values})


def nan_at(row):
    one = batch()
    one.features[row, 0] = float("nan")
    return one


OK, LOGITS = batch(), batch(features=False, logits=True)
REFUSED = [
    ({}, {}, "splits"),
    ({"a/b": OK}, {}, "split name 'a/b'"),
    ({"val": OK, "test": [batch(0)]}, {}, "split 'test' is empty"),
    ({"val": [(1, 2)]}, {}, "split 'val': data holds a tuple"),
    ({"val": [batch(5), nan_at(2)]}, {}, "split 'val': features are NaN or infinite in row 7"),
    ({"val": changed(labels=torch.tensor([0, 1, 2, -1, 0, 1]))}, {}, "labels are .* in row 3"),
    ({"val": changed(labels=torch.zeros(6))}, {}, "labels have shape"),
    ({"val": changed(labels=torch.zeros(5).long())}, {}, "features have shape"),
    ({"val": changed(features=None)}, {}, "no features"),
    ({"val": OK}, {"head": None}, "no logits"),
    ({"val": OK}, {"head": nn.ReLU()}, "head is a ReLU"),
    ({"val": OK}, {"head": (torch.ones(3, 4), torch.ones(4))}, r"\(3, 4\), \(4,\)\]: give"),
    ({"val": OK}, {"head": (torch.full((3, 4), torch.nan), None)}, "head weight .* NaN"),
    ({"val": OK}, {"head": linear(5)}, r"head weight has shape \(3, 5\)"),
    ({"val": OK}, {"head": linear(3, 4)}, r"transposed, give weight\.T"),
    ({"val": LOGITS}, {}, "no features for"),
    ({"val": batch(k=5, logits=True)}, {}, "3 classes and the stored logits have 5"),
    ({"val": batch(logits=True)}, {}, r"head\(features\) differs"),
    ({"val": batch(k=2)}, {"head": linear(4, 1), "class_names": ["a"]}, "1 class_names for 2"),
    ({"val": OK, "test": batch(d=5)}, {}, "split 'test': .*'features': 5.* after .*'features': 4"),
    ({"val": [OK, batch(dtype=torch.float16)]}, {}, "float16.* after .*float32"),
    (
        {"val": [LOGITS, batch(2, k=4, features=False, logits=True)]},
        {"head": None},
        "'classes': 4.* after",
    ),
    ({"val": OK}, {"meta": {"a": float("nan")}}, "meta"),
    ({"val": OK}, {"dataset": None}, "dataset is None"),
    ({"val": OK}, {"shard_rows": 0}, "shard_rows is 0"),
]


@pytest.mark.parametrize(("splits", "options", "message"), REFUSED, ids=[r[2] for r in REFUSED])
def test_write_pack_refuses_and_leaves_nothing(tmp_path, splits, options, message):
    with pytest.raises(InputError, match=message) as caught:
        write_pack(tmp_path / "p", splits, **{"head": linear(), "shard_rows": 2, **options})
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_and_a_full_disk_leave_nothing(tmp_path, monkeypatch):
    def broken():
        yield batch(9)
        assert list(tmp_path.iterdir()) != []
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_pack(tmp_path / "p", {"val": broken()}, head=linear(), shard_rows=2)
    assert list(tmp_path.iterdir()) == []

    def full(tensors, path):
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr(pack_module, "save_file", full)
    with pytest.raises(InputError, match=r"val-00000\.safetensors cannot be .*No space left"):
        write_pack(tmp_path / "p", {"val": batch()}, head=linear())
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "p").mkdir()
    with pytest.raises(InputError, match="exists"):
        write_pack(tmp_path / "p", {"val": batch()}, head=linear())


def test_what_is_no_pack(pack, tmp_path):
    (tmp_path / "my data.npz").write_bytes(b"")
    (tmp_path / "run").mkdir()
    pack.path.rename(tmp_path / "run" / "pack")
    for name, message in {
        "none": "none does not exist: .*make one with",
        "": r"not a folder with a manifest\.json",
        "my data.npz": r"import it with .*pack import '.*my data\.npz' -o 'my data'",
        "run": "the folder of a run; give .*pack",
    }.items():
        with pytest.raises(InputError, match=message):
            Pack.open(tmp_path / name)
    with pytest.raises(InputError, match="no split 'train': choose one of val, test"):
        Pack.open(tmp_path / "run" / "pack").split("train")


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[" * 100_000, b"[]", b"{}", b"3"])
def test_a_manifest_of_another_kind(pack, content):
    (pack.path / "manifest.json").write_bytes(content)
    with pytest.raises(InputError, match=r"manifest\.json (is no|cannot be read)"):
        Pack.open(pack.path)


def first(content, **changes):
    content["splits"]["val"]["shards"][0].update(changes)


TAMPERED = [
    (lambda m: m.update(format="zarr"), '"format" is "zarr"'),
    (lambda m: m.update(version=2), "has version 2"),
    (lambda m: m.pop("meta"), "'meta'"),
    (lambda m: m.update(dataset=None), "dataset is None"),
    (lambda m: m.update(meta=[]), "meta"),
    (lambda m: m.update(classes=2), "disagrees"),
    (lambda m: m.update(features=5), "disagrees"),
    (lambda m: m.update(features=None), '"features"'),
    (lambda m: m.update(class_names=["a"]), "class_names"),
    (lambda m: m.update(class_names=[1, 2, 3]), "class_names"),
    (lambda m: m["dtypes"].update(features=[]), "cannot be read"),
    (lambda m: m["dtypes"].update(features="float16"), "features F32.*features F16"),
    (lambda m: m["dtypes"].update(images="uint8"), "'images'"),
    (lambda m: m["dtypes"].pop("labels"), '"dtypes"'),
    (lambda m: m.update(features=None, dtypes={"labels": "uint8", "logits": "float32"}), "head"),
    (lambda m: m["head"].update(file="val-00000.safetensors"), "one twice"),
    (lambda m: m.update(head=None, splits={}), "names no file"),
    (lambda m: m["splits"]["val"].update(rows=7), '"rows"'),
    (lambda m: m["splits"]["val"].update(shards=[3]), "cannot be read"),
    (lambda m: first(m, file="gone.safetensors"), "gone.* is missing"),
    *[
        (lambda m, name=name: first(m, file=name), "not the plain name")
        for name in ("../x.safetensors", "/etc/x.safetensors", "a\\b.safetensors", "val.pkl")
    ],
    (lambda m: first(m, bytes=1), "has not its 1 bytes"),
]


def test_a_tampered_manifest(pack):
    file = pack.path / "manifest.json"
    whole = file.read_text()
    for change, message in TAMPERED:
        content = json.loads(whole)
        change(content)
        file.write_text(json.dumps(content))
        with pytest.raises(InputError, match=message) as caught:
            Pack.open(pack.path)
        assert str(pack.path) in str(caught.value)
        assert "\n" not in str(caught.value)
    file.write_text(json.dumps({**json.loads(whole), "extra": 1}))  # left to later versions
    assert Pack.open(pack.path) == pack


def test_a_damaged_shard_is_named(pack):
    truncated, broken, gone = (
        f"{name}.safetensors" for name in ("test-00001", "head", "val-00001")
    )
    whole = (pack.path / truncated).read_bytes()
    (pack.path / truncated).write_bytes(whole[:-3])
    with pytest.raises(InputError, match=f"{truncated} is missing, or has not its"):
        Pack.open(pack.path)
    with pytest.raises(InputError, match=f"{truncated} is damaged"):
        list(pack.split("test"))
    (pack.path / truncated).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(InputError, match=f"{truncated} is damaged: its sha256 has changed"):
        Pack.open(pack.path).verify()
    (pack.path / broken).write_bytes(b"\xff" * (pack.path / broken).stat().st_size)
    with pytest.raises(InputError, match=f"{broken} cannot be read"):
        Pack.open(pack.path)
    (pack.path / gone).unlink()
    with pytest.raises(InputError, match=f"{gone} cannot be read"):
        list(pack.split("val"))


def test_small_files_are_checked_when_they_are_first_read_and_large_ones_on_demand(
    pack, monkeypatch
):
    shard = pack.path / "val-00000.safetensors"
    whole = shard.read_bytes()
    opened = Pack.open(pack.path)
    list(opened.split("val"))
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 64]))
    list(opened.split("val"))  # once is enough
    with pytest.raises(InputError, match=rf"{shard} is damaged: its sha256"):
        list(Pack.open(pack.path).split("val"))
    list(Pack.open(pack.path).split("test"))
    monkeypatch.setattr("featcal.data.pack.SMALL", shard.stat().st_size - 1)
    large = Pack.open(pack.path)
    list(large.split("val"))
    with pytest.raises(InputError, match=rf"{shard} is damaged: its sha256"):
        large.verify()


def test_the_demo_is_whole_small_and_the_network_it_says_it_is():
    pack = demo_pack()
    pack.verify()
    manifest, head = pack.manifest, pack.head
    assert (manifest.classes, manifest.features, manifest.dataset) == (100, 256, "cifar100")
    assert {name: pack.split(name).rows for name in pack.splits} == {"val": 5000, "test": 10000}
    assert sum(file.stat().st_size for file in pack.path.iterdir()) <= 9_000_000
    assert manifest.dtypes == {"features": "float16", "labels": "uint8"}
    assert list(manifest.class_names) == sorted(set(manifest.class_names))
    assert (manifest.class_names[0], manifest.class_names[-1]) == ("apple", "worm")
    assert (manifest.meta["architecture"], manifest.meta["epochs"]) == ("Wide-ResNet-16-4", 90)
    right = (head(b.features).argmax(1) == b.labels for b in pack.split("test"))
    assert sum(int(part.sum()) for part in right) == 7504


@pytest.mark.shared
def test_the_script_makes_the_demo_again(tmp_path, monkeypatch):
    if not (ROOT.parent / "shared" / "packs").is_dir():
        pytest.skip("the packs in ../shared are not beside the project")
    script = ROOT / "experiments" / "make_demo_pack.py"
    monkeypatch.setattr(sys, "argv", [str(script), str(tmp_path / "demo")])
    runpy.run_path(str(script), run_name="__main__")
    for file in demo_pack().path.iterdir():
        assert (tmp_path / "demo" / file.name).read_bytes() == file.read_bytes()
