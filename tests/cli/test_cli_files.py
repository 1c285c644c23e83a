"""`featcal pack import` of every format: the same pack, the options of tables, the refusals."""

import csv
import json
import re
import shlex
from itertools import product
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import safetensors.numpy
import torch
from cli_cases import done, logits_alone, refused, save

PAGE = Path(__file__).parents[2] / "docs" / "files.md"


def write(folder, made):
    """The arrays in files of every format."""
    save(folder / "arrays.npz", made)
    safetensors.numpy.save_file(made, folder / "arrays.safetensors")
    for key, values in made.items():
        np.save(folder / f"{key}.npy", values)
    for split, form in product(("val", "test"), ("csv", "parquet")):
        table(folder / f"{split}.{form}", made[f"{split}_logits"], made[f"{split}_labels"])


def table(path, scores, labels, *, label="label", names=("a", "b", "c", "d")):
    columns = dict(zip(names, scores.T, strict=True))
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table({**columns, label: labels}), path)
        return
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*names, label])
        for row, one in zip(scores, labels, strict=True):
            writer.writerow([*map(str, row), names[one]])


def test_probabilities_labels_and_names(tmp_path):
    made = logits_alone(val=30, test=20)
    for split, name in (("val", "one.csv"), ("test", "two.parquet")):
        logits = made[f"{split}_logits"].astype("f8")
        probs = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        table(tmp_path / name, probs, made[f"{split}_labels"], label="y")
    files = [f"val={tmp_path / 'one.csv'}", f"test={tmp_path / 'two.parquet'}"]
    args = ("pack", "import", *files, "--probs", "--label", "y", "-o", tmp_path / "pack", "--json")
    found = done(*args).json
    assert found["meta"] == {"source": "probabilities"}
    assert {name: split["rows"] for name, split in found["splits"].items()} == {
        "val": 30,
        "test": 20,
    }
    assert found["output"] == str(tmp_path / "pack")
    assert (found["classes"], found["tensors"]["logits"]) == (4, "float32")


def test_names_cannot_give_orders_to_a_terminal(tmp_path):
    meta = json.dumps({"dataset": "a\x1b[2Jb", "model": "\x9bm"})
    made = {**logits_alone(val=30, test=20), "meta": meta}
    np.savez(tmp_path / "a.npz", **{key: np.array(value) for key, value in made.items()})
    pack = tmp_path / "p\x1b[31m"
    told = done("pack", "import", tmp_path / "a.npz", "-o", pack).out
    told += done("pack", "info", pack).out + refused("fit", pack, "clip\x1b", "-o", tmp_path / "c")
    assert "a\\x1b[2Jb, \\x9bm" in told
    assert not {*told} & {"\x1b", "\x9b"}


def test_one_column_and_columns_to_ignore(tmp_path):
    (tmp_path / "val.csv").write_text("id,prob,text,label\na,0.9,x,1\nb,0.2,,0\n")
    args = ("pack", "import", tmp_path / "val.csv", "-o", tmp_path / "pack", "--json")
    found = done(*args, "--ignore", "id", "--ignore", "t*", "--probs").json
    assert found["classes"] == 2


def test_the_page_on_files_can_be_copied(tmp_path, monkeypatch):
    """Its Python runs, its tables are read, and every command in it makes the same pack."""
    monkeypatch.chdir(tmp_path)
    made = logits_alone(val=40, test=30)
    write(tmp_path, made)
    text = PAGE.read_text(encoding="utf-8")
    torch.save({"logits": torch.zeros(3, 2), "labels": torch.tensor([0, 1, 1])}, "outputs.pt")
    for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        exec(compile(block, PAGE.name, "exec"), dict(made))
    done("pack", "import", "val.npz", "-o", "converted")
    shards = set()
    for number, command in enumerate(re.findall(r"`featcal (pack import .* -o )pack`", text)):
        done(*shlex.split(command), f"pack{number}")
        shards.add((tmp_path / f"pack{number}" / "val-00000.safetensors").read_bytes())
    assert len(shards) == 1
    assert number == 4
    for number, block in enumerate(re.findall(r"```text\n(label,.*?)```", text, flags=re.DOTALL)):
        (tmp_path / f"t{number}.csv").write_text(block)
        done("pack", "import", f"t{number}.csv", "-o", f"table{number}")
    assert number == 1
