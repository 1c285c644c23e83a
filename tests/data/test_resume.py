"""A pack straight from a model: the same as from its batches, and the same after any kill."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from featcal import InputError, Pack, collect, write_pack
from featcal.data import resume
from featcal.data.resume import JOURNAL, collect_pack, partial_of


def net(classes=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, classes))
    for weight in model.parameters():
        weight.data = torch.randn(weight.shape, generator=generator)
    return model


def rows(n, seed=1, classes=4):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(n, 6, generator=generator)
    return TensorDataset(inputs, torch.randint(0, classes, (n,), generator=generator))


def loaders(val=53, test=30, batch=7):
    return {
        "val": DataLoader(rows(val), batch_size=batch),
        "test": DataLoader(rows(test, seed=2), batch_size=batch),
    }


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


class Killed(BaseException):
    """As sudden as a signal: nothing in between may catch it."""


def killed_after(passes, given, out, model=None, **options):
    """A collection whose model dies in its n-th forward pass; one of them proves the head."""
    model, calls = model or net(), [0]

    def count(*_):
        calls[0] += 1
        if calls[0] > passes:
            raise Killed

    hook = model.register_forward_pre_hook(count)
    with pytest.raises(Killed):
        collect_pack(model, given, out, **{"shard_rows": 10, **options})
    hook.remove()


@pytest.fixture
def begun(tmp_path):
    """A collection that died with shards on disk."""
    killed_after(6, loaders(), tmp_path / "a")
    return tmp_path / "a"


def test_it_is_the_pack_of_the_collected_batches_and_leaves_the_model_as_it_was(tmp_path):
    model = net().train()
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    words = {"dataset": "made", "class_names": list("abcd"), "meta": {"s": 1}}
    found = collect_pack(model, loaders(), tmp_path / "a", **words)
    assert all(part.training for part in model.modules())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    data = {name: collect(model, loader) for name, loader in loaders().items()}
    bare = {
        name: [type(b)(None, b.labels, b.features) for b in part] for name, part in data.items()
    }
    write_pack(tmp_path / "b", bare, head=model[3], model="Sequential", **words)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert isinstance(found, Pack)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_heads_that_are_not_linear_keep_the_logits(tmp_path):
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.top = nn.Linear(6, 8), net()[1:]

        def forward(self, x):
            return self.top(self.body(x))

    model = Whole()
    found = collect_pack(model, loaders(), tmp_path / "a", head="top", name="mine")
    assert (found.head, found.manifest.model) == (None, "mine")
    expected = torch.cat([b.logits for b in collect(model, loaders()["val"])])
    assert torch.equal(next(iter(found.split("val"))).logits, expected)
    inner = collect_pack(net(), loaders(), tmp_path / "b", layer="1")
    assert (inner.head, inner.manifest.meta) == (None, {"layer": "1"})


def test_one_logit_is_stored_as_two_classes(tmp_path):
    model = net(classes=1)
    data = TensorDataset(rows(20)[:][0], torch.arange(20)[:, None] % 2.0)
    found = collect_pack(model, {"val": DataLoader(data, batch_size=6)}, tmp_path / "a")
    assert found.manifest.classes == 2
    assert torch.equal(found.head.weight[1:], model[3].weight)
    assert not found.head.weight[0].any()
    assert next(iter(found.split("val"))).labels.tolist() == [0, 1] * 10


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "pack"
    return contents(collect_pack(net(), loaders(), path, shard_rows=10).path)


def test_a_run_that_dies_between_the_last_two_steps_is_whole(tmp_path, monkeypatch, whole):
    with monkeypatch.context() as patch:
        patch.setattr(resume, "_settle", lambda *_: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            collect_pack(net(), loaders(), tmp_path / "a", shard_rows=10)
    collect_pack(net(), loaders(), tmp_path / "a", shard_rows=10)
    assert contents(tmp_path / "a") == whole


def test_what_appears_in_the_place_of_the_pack_stays_and_so_does_the_work(tmp_path, whole):
    class Late(DataLoader):
        def __iter__(self):
            yield from super().__iter__()
            (tmp_path / "a").write_text("theirs")

    late = Late(rows(30, seed=2), batch_size=7)
    with pytest.raises(InputError, match=r"a has come to exist meanwhile: .* kept in .*a\.partial"):
        collect_pack(net(), loaders() | {"test": late}, tmp_path / "a", shard_rows=10)
    assert (tmp_path / "a").read_text() == "theirs"
    (tmp_path / "a").unlink()
    collect_pack(net(), loaders(), tmp_path / "a", shard_rows=10)
    assert contents(tmp_path / "a") == whole


def test_samples_that_are_done_are_not_even_loaded_again(tmp_path):
    class Counting(torch.utils.data.Dataset):
        def __init__(self):
            self.asked = []

        def __len__(self):
            return 50

        def __getitem__(self, index):
            self.asked.append(index)
            return rows(50)[index]

    model, data = net(), Counting()
    given = {"val": DataLoader(data, batch_size=5)}
    killed_after(8, given, tmp_path / "a", model, shard_rows=12)
    data.asked.clear()
    found = collect_pack(model, given, tmp_path / "a", shard_rows=12)
    assert sorted(data.asked) == [*range(5), *range(20, 50)]  # rows to 24 are on disk
    assert found.manifest.rows("val") == 50


class Stream(IterableDataset):
    def __iter__(self):
        return iter(rows(53))


class Doubled(DataLoader):
    def __iter__(self):
        return ((2 * x, y) for x, y in super().__iter__())


@pytest.mark.parametrize(
    "make",
    [
        lambda: list(loaders()["val"]),
        lambda: DataLoader(Stream(), batch_size=7),
        lambda: Doubled(rows(53), batch_size=7),
    ],
    ids=["list", "stream", "a class of its own"],
)
def test_other_loaders_go_on_too(tmp_path, make):
    expected = collect_pack(net(), {"val": make()}, tmp_path / "whole", shard_rows=9)
    killed_after(5, {"val": make()}, tmp_path / "a", shard_rows=9)
    assert (partial_of(tmp_path / "a") / JOURNAL).exists()
    collect_pack(net(), {"val": make()}, tmp_path / "a", shard_rows=9)
    assert contents(tmp_path / "a") == contents(expected.path)


def moved():
    other = net()
    other[0].weight.data += 1
    return other


def reordered():
    """The same first batch, and the others in another order."""
    order = [*range(7), *torch.randperm(46, generator=torch.Generator()).add(7).tolist()]
    return {**loaders(), "val": DataLoader(Subset(rows(53), order), batch_size=7)}


OTHER_ROWS = {**loaders(), "val": DataLoader(rows(53, seed=9), batch_size=7)}


@pytest.mark.parametrize(
    ("model", "given", "options", "message"),
    [
        (net(seed=5), loaders(), {}, r"the last layer has other weights.*or remove a\.partial"),
        (moved(), loaders(), {}, "rows from 0 on of 'val' have other features"),
        (net().half(), loaders(), {}, "other weights|other features"),
        (net(), OTHER_ROWS, {}, "rows from 0 on of 'val' have other"),
        (net(), reordered(), {}, r"rows from \d+ on of 'val' have other features"),
        (net(), loaders(val=40), {}, r"begun with .*'val': 53.* now it is .*'val': 40"),
        (net(), loaders(), {"shard_rows": 11}, "'shard_rows': 10.* now it is .*'shard_rows': 11"),
        (net(), loaders(), {"class_names": ["a", "b"]}, r"2 class_names for 4 .*kept in .*partial"),
    ],
)
def test_another_model_loader_or_setting_is_noticed_and_the_work_kept(
    begun, model, given, options, message
):
    before = contents(partial_of(begun))
    with pytest.raises(InputError, match=message):
        collect_pack(model, given, begun, **{"shard_rows": 10, **options})
    assert contents(partial_of(begun)) == before


def test_a_split_that_is_whole_is_looked_at_again(tmp_path, whole):
    killed_after(11, loaders(), tmp_path / "a")  # val needs eight passes, and one more
    with pytest.raises(InputError, match="rows from 0 on of 'val' have other features"):
        collect_pack(moved(), loaders(), tmp_path / "a", shard_rows=10)
    assert contents(collect_pack(net(), loaders(), tmp_path / "a", shard_rows=10).path) == whole


def test_plain_iterables_that_changed_their_length_are_refused(tmp_path):
    class NoLength:
        def __init__(self, batches):
            self.batches = batches

        def __iter__(self):
            return iter(self.batches)

    batches = list(loaders()["val"])
    killed_after(6, {"val": NoLength(batches)}, tmp_path / "a")
    with pytest.raises(InputError, match="the loader of 'val' has other than the 30 rows that are"):
        collect_pack(net(), {"val": NoLength(batches[:2])}, tmp_path / "a", shard_rows=10)


def test_a_damaged_or_foreign_partial_folder_is_refused(begun):
    folder = partial_of(begun)

    def refused(message):
        with pytest.raises(InputError, match=message):
            collect_pack(net(), loaders(), begun, shard_rows=10)

    (folder / "notes.txt").write_text("mine")
    refused(r"holds notes\.txt, which no collection wrote")
    assert (folder / "notes.txt").read_text() == "mine"
    (folder / "notes.txt").unlink()
    (folder / "val-00009.safetensors").mkdir()  # the name of a shard, but no file
    refused(r"holds val-00009\.safetensors, which no collection")
    (folder / "val-00009.safetensors").rmdir()
    shard, journal = folder / "val-00000.safetensors", folder / JOURNAL
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + b"x")
    refused(r"val-00000\.safetensors is damaged: remove a\.partial")
    shard.write_bytes(content)
    state = json.loads(journal.read_text())
    journal.write_text(json.dumps({**state, "version": 2}))
    refused("it has version 2, not 1")
    journal.write_text("{")
    refused(r"journal\.json cannot be read .*remove a\.partial")


def test_what_is_refused_before_anything_is_written(tmp_path):
    (tmp_path / "there").mkdir()
    partial_of(tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    before = sorted(tmp_path.iterdir())
    bad = [(torch.zeros(4, 6), torch.tensor([0, 1, 2, 9]))]
    for name, given, message in (
        ("a", {"val": DataLoader(rows(20), shuffle=True)}, "'val' shuffles.*shuffle=False"),
        ("a", {"val": []}, "split 'val' is empty"),
        ("a", {"val": bad}, "outside 0"),
        ("there", loaders(), "exists: choose another name, or remove it first"),
        ("file", loaders(), r"file\.partial is in the way"),
        ("link", loaders(), "link exists"),
    ):
        with pytest.raises(InputError, match=message):
            collect_pack(net(), given, tmp_path / name)
    assert sorted(tmp_path.iterdir()) == before


def test_two_at_once_are_refused(tmp_path):
    settings = {"rows": {"val": 0}}
    with (
        resume.opened(tmp_path / "a", settings),
        pytest.raises(InputError, match="is being written by another process"),
    ):
        resume.opened(tmp_path / "a", settings).__enter__()
