"""`featcal pack import` of every format: the same pack, the options of tables, the refusals."""

import csv
import re
import shlex
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import safetensors.numpy
import torch
from cli_cases import done, logits_alone, refused, save, tree

PAGE = Path(__file__).parents[2] / "docs" / "files.md"
OPTIONS = {"csv": ["--logits"], "parquet": ["--logits"]}


def write(folder, form, made):
    """The arrays in files of one format, and what to type for them."""
    if form == "npz":
        return [save(folder / "arrays.npz", made)]
    if form == "safetensors":
        safetensors.numpy.save_file(made, folder / "arrays.safetensors")
        return [folder / "arrays.safetensors"]
    if form == "npy":
        for key, values in made.items():
            np.save(folder / f"{key}.npy", values)
        return [folder / f"{key}.npy" for key in made]
    for split in ("val", "test"):
        table(folder / f"{split}.{form}", made[f"{split}_logits"], made[f"{split}_labels"])
    return [folder / f"val.{form}", folder / f"test.{form}"]


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


@pytest.mark.parametrize("form", ["npz", "npy", "safetensors", "csv", "parquet"])
def test_every_format_from_files_to_scores(tmp_path, form):
    made = logits_alone(val=60, test=80)
    files = write(tmp_path, form, made)
    reference = save(tmp_path / "reference.npz", made)
    done("pack", "import", reference, "-o", tmp_path / "reference")
    said = done("pack", "import", *files, *OPTIONS.get(form, []), "-o", tmp_path / "pack").out
    assert "Wrote" in said
    done("fit", tmp_path / "pack", "temperature", "-o", tmp_path / "cal")
    scores = [
        done("eval", tmp_path / name, tmp_path / "cal", "--json").json
        for name in ("pack", "reference")
    ]
    assert scores[0] == scores[1]
    for split in ("val", "test"):
        shard = f"{split}-00000.safetensors"
        first, second = (tmp_path / name / shard for name in ("pack", "reference"))
        assert first.read_bytes() == second.read_bytes()


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


def test_one_column_and_columns_to_ignore(tmp_path):
    (tmp_path / "val.csv").write_text("id,prob,text,label\na,0.9,x,1\nb,0.2,,0\n")
    args = ("pack", "import", tmp_path / "val.csv", "-o", tmp_path / "pack", "--json")
    found = done(*args, "--ignore", "id", "--ignore", "t*", "--probs").json
    assert found["classes"] == 2


def test_refusals_are_one_sentence_with_a_remedy(tmp_path):
    (tmp_path / "val.csv").write_text("id,a,b,label\nx,1,2,0\n")
    (tmp_path / "bad.csv").write_text("a,b,label\n1,2,0\n1,oops,0\n")
    (tmp_path / "net.pt").write_bytes(b"\x80\x02.")
    before = tree(tmp_path)
    out = ("-o", tmp_path / "pack")
    for args, words in (
        (("val.csv",), ["--logits", "--probs"]),
        (("val.csv", "--logits"), ["val.csv", "line 2", "column 'id'", "--ignore id"]),
        (("bad.csv", "--logits"), ["bad.csv", "line 3", "column 'b'", "'oops'"]),
        (("val.csv", "--logits", "--probs"), ["--logits", "contradict"]),
        (("val.csv", "--logits", "--label", "y"), ["'y'", "--label"]),
        (("val.csv", "--logits", "--ignore", "ids"), ["'ids'", "id, a, b, label"]),
        (("net.pt",), ["net.pt", "pickle", "never read", "numpy.savez"]),
        (("none.csv",), ["none.csv", "does not exist"]),
    ):
        said = refused("pack", "import", tmp_path / args[0], *args[1:], *out)
        assert all(word in said for word in words), said
        assert tree(tmp_path) == before
    assert "FILE" in refused("pack", "import", *out)


def test_help_has_an_example_of_every_format():
    said = done("pack", "import", "--help").out
    for ending in (".npz", ".npy", ".safetensors", ".csv", ".parquet"):
        assert any(ending in line for line in said.splitlines() if "featcal pack import" in line), (
            ending
        )


def test_the_page_on_files_can_be_copied(tmp_path, monkeypatch):
    """Its Python runs, its tables are read, and every command in it makes the same pack."""
    monkeypatch.chdir(tmp_path)
    made = logits_alone(val=40, test=30)
    for form in ("npz", "npy", "safetensors", "csv", "parquet"):
        write(tmp_path, form, made)
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
    for number, block in enumerate(re.findall(r"```\n(label,.*?)```", text, flags=re.DOTALL)):
        (tmp_path / f"t{number}.csv").write_text(block)
        done("pack", "import", f"t{number}.csv", "-o", f"table{number}")
    assert number == 1
