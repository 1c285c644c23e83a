"""A pack straight from a model: the same as from its batches, and the same after any kill."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from featcal import InputError, Pack, collect, find_head, write_pack
from featcal.data import pack as shards
from featcal.data import resume as partial_module
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


def test_it_is_the_pack_of_the_collected_batches(tmp_path):
    model = net()
    found = collect_pack(model, loaders(), tmp_path / "a", name="net", dataset="made")
    data = {name: collect(model, loader) for name, loader in loaders().items()}
    bare = {
        name: [type(b)(None, b.labels, b.features) for b in part] for name, part in data.items()
    }
    write_pack(tmp_path / "b", bare, head=model[3], model="net", dataset="made")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert isinstance(found, Pack)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_the_network_is_called_by_its_class_unless_it_has_a_name(tmp_path):
    found = collect_pack(net(), loaders(), tmp_path / "a", class_names=list("abcd"), meta={"s": 1})
    assert found.manifest.model == "Sequential"
    assert found.manifest.class_names == tuple("abcd")
    assert found.manifest.meta == {"s": 1}


def test_a_head_that_is_not_linear_keeps_the_logits(tmp_path):
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.top = nn.Linear(6, 8), net()[1:]

        def forward(self, x):
            return self.top(self.body(x))

    model = Whole()
    found = collect_pack(model, loaders(), tmp_path / "a", head="top")
    assert found.head is None
    assert set(found.manifest.dtypes) == {"features", "labels", "logits"}
    batch = next(iter(found.split("val")))
    assert torch.equal(
        batch.logits, torch.cat([b.logits for b in collect(model, loaders()["val"])])
    )


def test_one_logit_is_stored_as_two_classes(tmp_path):
    model = net(classes=1)
    data = TensorDataset(rows(20)[:][0], torch.arange(20)[:, None] % 2.0)
    found = collect_pack(model, {"val": DataLoader(data, batch_size=6)}, tmp_path / "a")
    assert found.manifest.classes == 2
    assert torch.equal(found.head.weight[1:], model[3].weight)
    assert not found.head.weight[0].any()
    assert next(iter(found.split("val"))).labels.tolist() == [0, 1] * 10


def test_an_inner_layer_is_stored_with_its_name(tmp_path):
    found = collect_pack(net(), loaders(), tmp_path / "a", layer="1")
    assert found.manifest.meta == {"layer": "1"}
    assert found.head is None


@pytest.mark.parametrize("step", range(9))
def test_a_run_that_dies_at_any_step_goes_on_to_the_same_bytes(tmp_path, monkeypatch, step):
    whole = collect_pack(net(), loaders(), tmp_path / "whole", shard_rows=10)
    left = [step]

    def dying(real):
        def write(*args):
            if left[0] == 0:
                left[0] = -1
                raise Killed
            left[0] -= 1
            return real(*args)

        return write

    monkeypatch.setattr(partial_module, "write_json", dying(partial_module.write_json))
    with pytest.raises(Killed):
        collect_pack(net(), loaders(), tmp_path / "a", shard_rows=10)
    assert not (tmp_path / "a").exists()
    collect_pack(net(), loaders(), tmp_path / "a", shard_rows=10)
    assert contents(tmp_path / "a") == contents(whole.path)
    assert not partial_of(tmp_path / "a").exists()


def test_a_run_that_dies_between_the_last_two_steps_is_whole(tmp_path, monkeypatch):
    whole = collect_pack(net(), loaders(), tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(partial_module, "_settle", lambda *_: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            collect_pack(net(), loaders(), tmp_path / "a")
    collect_pack(net(), loaders(), tmp_path / "a")
    assert contents(tmp_path / "a") == contents(whole.path)


class Counting(torch.utils.data.Dataset):
    def __init__(self, data):
        self.data, self.asked = data, []

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        self.asked.append(index)
        return self.data[index]


def broken_after(model, passes):
    """The model dies in its n-th forward pass."""
    calls = [0]

    def count(*_):
        calls[0] += 1
        if calls[0] > passes:
            raise Killed

    return model.register_forward_pre_hook(count)


def test_samples_that_are_done_are_not_even_loaded_again(tmp_path):
    model, data = net(), Counting(rows(50))
    hook = broken_after(model, 8)  # one pass proves the head
    with pytest.raises(Killed):
        collect_pack(model, {"val": DataLoader(data, batch_size=5)}, tmp_path / "a", shard_rows=12)
    hook.remove()
    data.asked.clear()
    found = collect_pack(
        model, {"val": DataLoader(data, batch_size=5)}, tmp_path / "a", shard_rows=12
    )
    assert sorted(data.asked) == [*range(5), *range(20, 50)]  # rows to 24 are on disk
    assert found.manifest.rows("val") == 50


class Stream(IterableDataset):
    def __iter__(self):
        return iter(rows(40))


@pytest.mark.parametrize("kind", ["list", "stream"])
def test_other_loaders_go_on_too(tmp_path, kind):
    def made():
        return (
            list(DataLoader(rows(40), batch_size=6))
            if kind == "list"
            else DataLoader(Stream(), batch_size=6)
        )

    whole = collect_pack(net(), {"val": made()}, tmp_path / "whole", shard_rows=9)
    model = net()
    hook = broken_after(model, 5)
    with pytest.raises(Killed):
        collect_pack(model, {"val": made()}, tmp_path / "a", shard_rows=9)
    hook.remove()
    assert (partial_of(tmp_path / "a") / JOURNAL).exists()
    collect_pack(model, {"val": made()}, tmp_path / "a", shard_rows=9)
    assert contents(tmp_path / "a") == contents(whole.path)


@pytest.fixture
def begun(tmp_path):
    """A collection that died with shards on disk."""
    model = net()
    hook = broken_after(model, 6)
    with pytest.raises(Killed):
        collect_pack(model, loaders(), tmp_path / "a", shard_rows=10)
    hook.remove()
    return tmp_path / "a"


def shuffled_behind(n, first=7):
    """The same first batch, and the others in another order."""
    data = rows(53)
    order = [*range(first), *torch.randperm(53 - first, generator=torch.Generator()).add(first)]
    return DataLoader(torch.utils.data.Subset(data, order), batch_size=7)


def test_another_order_behind_the_first_batch_is_noticed(begun):
    other = {"val": shuffled_behind(53), "test": loaders()["test"]}
    with pytest.raises(InputError, match=r"rows from \d+ on of 'val' have other features"):
        collect_pack(net(), other, begun, shard_rows=10)


def test_more_or_fewer_rows_are_noticed(begun):
    with pytest.raises(InputError, match=r"was begun with rows \{'val': 53.*now it is \{'val': 40"):
        collect_pack(net(), loaders(val=40), begun, shard_rows=10)


def test_another_precision_is_noticed(begun):
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(InputError, match="have other features"),
    ):
        collect_pack(net(), loaders(), begun, shard_rows=10)


def test_a_wrong_number_of_class_names_is_refused_and_the_work_kept(begun):
    before = contents(partial_of(begun))
    with pytest.raises(InputError, match=r"2 class_names for 4 classes.*is kept in .*a\.partial"):
        collect_pack(net(), loaders(), begun, shard_rows=10, class_names=["a", "b"])
    assert contents(partial_of(begun)) == before


def test_a_split_that_is_whole_is_looked_at_again(tmp_path):
    model = net()
    hook = broken_after(model, 11)  # val needs eight passes, and one to prove the head
    with pytest.raises(Killed):
        collect_pack(model, loaders(), tmp_path / "a", shard_rows=10)
    hook.remove()
    other = net()
    other[0].weight.data += 1
    with pytest.raises(InputError, match="rows from 0 on of 'val' have other features"):
        collect_pack(other, loaders(), tmp_path / "a", shard_rows=10)
    whole = collect_pack(net(), loaders(), tmp_path / "whole", shard_rows=10)
    assert contents(collect_pack(net(), loaders(), tmp_path / "a", shard_rows=10).path) == contents(
        whole.path
    )


def test_plain_iterables_that_changed_their_length_are_refused(tmp_path):
    batches = list(loaders()["val"])
    model = net()
    hook = broken_after(model, 6)
    with pytest.raises(Killed):
        collect_pack(model, {"val": NoLength(batches)}, tmp_path / "a", shard_rows=10)
    hook.remove()
    with pytest.raises(InputError, match="the loader of 'val' has other than the 30 rows that are"):
        collect_pack(model, {"val": NoLength(batches[:2])}, tmp_path / "a", shard_rows=10)


class NoLength:
    """An iterable that does not know its length."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


def test_a_loader_of_another_class_is_iterated_as_it_wants(tmp_path):
    class Doubled(DataLoader):
        def __iter__(self):
            return ((2 * x, y) for x, y in super().__iter__())

    def made():
        return {"val": Doubled(rows(53), batch_size=7)}

    whole = collect_pack(net(), made(), tmp_path / "whole", shard_rows=10)
    model = net()
    hook = broken_after(model, 5)
    with pytest.raises(Killed):
        collect_pack(model, made(), tmp_path / "a", shard_rows=10)
    hook.remove()
    collect_pack(model, made(), tmp_path / "a", shard_rows=10)
    assert contents(tmp_path / "a") == contents(whole.path)


def test_a_batch_is_unpacked_once(tmp_path):
    def unpack(batch):
        return batch["x"], batch.pop("answers")

    batches = [{"x": x, "answers": y} for x, y in loaders()["val"]]
    assert collect_pack(net(), {"val": batches}, tmp_path / "a", unpack=unpack).splits == ("val",)


def test_after_an_error_the_model_is_as_it_was(tmp_path):
    model = net().train()
    bad = [(torch.zeros(4, 6), torch.tensor([0, 1, 2, 9]))]
    state = torch.get_rng_state()
    with pytest.raises(InputError, match="outside 0") as caught:
        collect_pack(model, {"val": bad}, tmp_path / "a")
    assert model.training  # while the exception is alive, as in a notebook
    assert torch.equal(torch.get_rng_state(), state)
    del caught


def test_files_that_are_not_ours_are_never_removed(tmp_path):
    folder = partial_of(tmp_path / "a")
    folder.mkdir()
    (folder / "my_weights.safetensors").write_bytes(b"mine")
    with pytest.raises(InputError, match=r"holds my_weights\.safetensors, which no collection"):
        collect_pack(net(), loaders(), tmp_path / "a")
    assert (folder / "my_weights.safetensors").read_bytes() == b"mine"


def test_a_file_in_the_way_and_a_dangling_link_are_refused(tmp_path):
    partial_of(tmp_path / "a").write_text("mine")
    with pytest.raises(InputError, match=r"a\.partial is in the way"):
        collect_pack(net(), loaders(), tmp_path / "a")
    (tmp_path / "b").symlink_to(tmp_path / "nowhere")
    with pytest.raises(InputError, match="b exists"):
        collect_pack(net(), loaders(), tmp_path / "b")


def test_a_journal_of_another_version_is_told_from_a_damaged_one(begun):
    journal = partial_of(begun) / JOURNAL
    journal.write_text(journal.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(InputError, match="has version 2 and this featcal goes on with 1"):
        collect_pack(net(), loaders(), begun, shard_rows=10)


def test_another_model_or_loader_cannot_go_on_with_it(begun):
    with pytest.raises(InputError, match=r"the last layer has other weights.*or remove a\.partial"):
        collect_pack(net(seed=5), loaders(), begun, shard_rows=10)
    other = net()
    other[0].weight.data += 1
    with pytest.raises(InputError, match="rows from 0 on of 'val' have other features"):
        collect_pack(other, loaders(), begun, shard_rows=10)
    shuffled = {"val": DataLoader(rows(53, seed=9), batch_size=7), "test": loaders()["test"]}
    with pytest.raises(InputError, match="rows from 0 on of 'val' have other"):
        collect_pack(net(), shuffled, begun, shard_rows=10)


def test_other_settings_cannot_go_on_with_it(begun):
    with pytest.raises(InputError, match="was begun with shard_rows 10 and now it is 11: go on as"):
        collect_pack(net(), loaders(), begun, shard_rows=11)


def test_a_damaged_or_foreign_partial_folder_is_refused(begun):
    folder = partial_of(begun)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"holds notes\.txt, which no collection wrote"):
        collect_pack(net(), loaders(), begun, shard_rows=10)
    (folder / "notes.txt").unlink()
    (folder / "val-00009.safetensors").mkdir()  # the name of a shard, but no file
    with pytest.raises(InputError, match=r"holds val-00009\.safetensors, which no collection"):
        collect_pack(net(), loaders(), begun, shard_rows=10)
    (folder / "val-00009.safetensors").rmdir()
    shard = folder / "val-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    with pytest.raises(InputError, match=r"val-00000\.safetensors is damaged: remove a\.partial"):
        collect_pack(net(), loaders(), begun, shard_rows=10)
    (folder / JOURNAL).write_text("{")
    with pytest.raises(InputError, match=r"journal\.json is damaged: remove a\.partial"):
        collect_pack(net(), loaders(), begun, shard_rows=10)


def test_two_at_once_are_refused(tmp_path):
    settings = {"rows": {"val": 0}}
    with (
        partial_module.opened(tmp_path / "a", settings),
        pytest.raises(InputError, match="is being written by another process"),
    ):
        partial_module.opened(tmp_path / "a", settings).__enter__()


def test_a_loader_that_shuffles_is_refused_before_anything_is_written(tmp_path):
    shuffled = {"val": DataLoader(rows(20), shuffle=True)}
    with pytest.raises(InputError, match=r"split 'val' shuffles.*shuffle=False"):
        collect_pack(net(), shuffled, tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_output_and_an_empty_loader_are_refused(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(InputError, match="exists: choose another name, or remove it first"):
        collect_pack(net(), loaders(), tmp_path / "a")
    with pytest.raises(InputError, match="split 'val' is empty"):
        collect_pack(net(), {"val": []}, tmp_path / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_the_model_is_left_as_it_was(tmp_path):
    model = net().train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = torch.get_rng_state()
    collect_pack(model, loaders(), tmp_path / "a")
    assert torch.equal(torch.get_rng_state(), state)
    assert all(part.training for part in model.modules())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert find_head(model) == "3"


# Torch is loaded once: every line on stdin is a process more, which says its number and begins.
SCRIPT = """
import os, sys, time, torch
sys.path.insert(0, {here!r})
from test_collect_pack import loaders, net, killed_at
from featcal.data.resume import collect_pack
torch.set_num_threads(1)
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        killed_at(*line.split())
        model = net()
        model.register_forward_pre_hook(lambda *_: time.sleep(0.004))
        print(os.getpid(), flush=True)
        collect_pack(model, loaders(val=400, test=200), sys.argv[1], shard_rows=16)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def killed_at(moment="", call="0"):
    """Makes this process kill itself at the n-th call of one step of writing a file."""
    left = [int(call)]

    def dying(real):
        def step(*args, **options):
            left[0] -= 1
            if left[0] == 0 and moment == "inside":  # safetensors' own temporary file
                (Path(args[1]).parent / ".tmpAbC123").write_bytes(b"half")
            if left[0] != 0 or moment == "after":
                real(*args, **options)
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        return step

    if moment == "inside":
        shards.save_file = dying(shards.save_file)
    elif moment:
        os.replace = dying(os.replace)


def collecting(folder):
    script = SCRIPT.format(here=str(Path(__file__).parent))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    return subprocess.Popen([sys.executable, "-c", script, str(folder)], **pipes)


def test_killed_in_the_middle_of_any_file_the_pack_is_the_same_byte_for_byte(tmp_path):
    whole = collect_pack(net(), loaders(val=400, test=200), tmp_path / "whole", shard_rows=16)
    moments = [f"{moment} {call}" for call in (1, 2, 3) for moment in ("inside", "before", "after")]
    left = []
    with collecting(tmp_path / "a") as process:
        for moment in moments:
            process.stdin.write(moment + "\n")
            process.stdout.readline()
            assert int(process.stdout.readline()) == -signal.SIGKILL
            left += [p.name for p in partial_of(tmp_path / "a").iterdir() if p.is_dir()]
    assert len(left) == len(moments)  # every process left the file it was at
    collect_pack(net(), loaders(val=400, test=200), tmp_path / "a", shard_rows=16)
    assert contents(tmp_path / "a") == contents(whole.path)


def test_killed_at_random_moments_the_pack_is_the_same_byte_for_byte(tmp_path):
    whole = collect_pack(net(), loaders(val=400, test=200), tmp_path / "whole", shard_rows=16)
    draw = random.Random(0)
    kills = 0
    with collecting(tmp_path / "a") as process:
        for _ in range(12):
            process.stdin.write("\n")
            child = int(process.stdout.readline())
            time.sleep(draw.uniform(0.02, 0.25))
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            code = int(process.stdout.readline())
            if code == 0:
                break
            assert code == -signal.SIGKILL
            kills += 1
    if not (tmp_path / "a").exists():
        collect_pack(net(), loaders(val=400, test=200), tmp_path / "a", shard_rows=16)
    assert kills >= 2
    assert contents(tmp_path / "a") == contents(whole.path)
