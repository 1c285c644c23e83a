"""Tables: what a header and a cell may be, and where and how everything else is refused."""

import csv
import io
import string

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from featcal.core.checks import InputError
from featcal.data import import_files, read_files
from featcal.data import tables as table

PLAIN = "cat,dog,label\n0.5,1.5,0\n-1,2,1\n"


@pytest.fixture
def read(tmp_path):
    """Reads the text, or the columns, of a table of one split."""

    def read_(content, name="val.csv", **options):
        file = tmp_path / name
        if isinstance(content, dict):
            pyarrow.parquet.write_table(pyarrow.table(content), file)
        else:
            file.write_bytes(content.encode() if isinstance(content, str) else content)
        return read_files(file, **{"kind": "logits", **options})["val"]

    return read_


ALIKE = {
    "plain": PLAIN,
    "byte order mark": "\ufeff" + PLAIN,
    "windows": PLAIN.replace("\n", "\r\n"),
    "old mac": PLAIN.replace("\n", "\r"),
    "no last newline": PLAIN[:-1],
    "blank lines": "\n\n" + PLAIN.replace("\n", "\n  \n\n"),
    "quotes": '"cat","dog","label"\n"0.5","1.5","0"\n"-1","2","1"\n',
    "blanks": " cat , dog ,label\n 0.5, 1.5 , 0\n-1 ,\t2, 1 \n",
    "label first": "label,cat,dog\n0,0.5,1.5\n1,-1,2\n",
    "label names": "cat,dog,label\n0.5,1.5,cat\n-1,2,dog\n",
    "label floats": "cat,dog,label\n0.5,1.5,0.0\n-1,2,1.0\n",
    "exponents": "cat,dog,label\n5e-1,+1.5E0,0\n-1.,2,1\n",
    "logit prefix": "logit_cat,logit_dog,label\n0.5,1.5,dog\n-1,2,dog\n".replace("5,dog", "5,cat"),
    "logits prefix": "logits_cat,logits_dog,label\n0.5,1.5,0\n-1,2,1\n",
}


@pytest.mark.parametrize("case", ALIKE)
def test_the_same_table_in_many_ways(read, case):
    batch = read(ALIKE[case])
    assert batch.logits.tolist() == [[0.5, 1.5], [-1, 2]]
    assert batch.labels.tolist() == [0, 1]


def test_class_names_come_from_the_header(tmp_path):
    (tmp_path / "val.csv").write_text('"a, b","say ""hi""",prob_,label\n1,2,3,"a, b"\n')
    pack = import_files(tmp_path / "val.csv", tmp_path / "pack", kind="logits")
    assert pack.manifest.class_names == ("a, b", 'say "hi"', "prob_")
    (tmp_path / "test.csv").write_text("prob_ä b,probs_c_d,label\n.25,.75,c_d\n")
    pack = import_files(tmp_path / "test.csv", tmp_path / "other")
    assert pack.manifest.class_names == ("ä b", "c_d")
    assert pack.manifest.meta == {"source": "probabilities"}
    (batch,) = pack.split("test")
    assert torch.allclose(batch.logits.exp(), torch.tensor([[0.25, 0.75]]))
    assert batch.labels.tolist() == [1]


@pytest.mark.parametrize("column", ["logit", "logits", "score", "logit_spam", "prob", "p"])
@pytest.mark.parametrize("labels", ["0,1", "0.0,1.0", "False,True", "FALSE,TRUE", "false,true"])
def test_one_column_of_a_binary_model(tmp_path, read, column, labels):
    first, second = labels.split(",")
    text = f"label,{column}\n{first},0.25\n{second},0.75\n"
    kind = "logits" if column == "score" else "probs" if column == "p" else None
    batch = read(text, kind=kind)
    assert batch.labels.tolist() == [0, 1]
    p = torch.tensor([0.25, 0.75]) if column[0] == "p" else torch.tensor([0.25, 0.75]).sigmoid()
    assert torch.allclose(batch.logits.softmax(1)[:, 1], p)
    pack = import_files(tmp_path / "val.csv", tmp_path / "pack", kind=kind)
    assert (pack.manifest.classes, pack.manifest.class_names) == (2, None)
    with pytest.raises(InputError, match="'2' is no class: give 0 or 1, which is the class of the"):
        read(text + "2,0.5\n", kind=kind)


def test_numbers_as_class_names(read):
    counted = "0,1,2,label\n1.5,2,3,2\n1,2,3,0.0\n"
    assert read(counted).labels.tolist() == [2, 0]
    from_one = "1,2,3,label\n1.5,2,3,3\n1,2,3,1\n"
    assert read(from_one).labels.tolist() == [2, 0]  # by name, not by position
    with pytest.raises(InputError, match=r"line 2, .*'0' is no class: give a name of the header"):
        read("1,2,3,label\n1.5,2,3,0\n")
    turned = "2,0,1,label\n1.5,2,3,0\n1,2,3,2\n"
    assert read(turned).labels.tolist() == [1, 0]


def test_columns_of_other_splits_are_put_in_order(tmp_path):
    (tmp_path / "val.csv").write_text("logit_a,logit_b,label\n1,2,a\n")
    (tmp_path / "x.csv").write_text("id,label,logit_b,logit_a\ni,0,20,10\n")
    found = read_files([tmp_path / "val.csv", f"test={tmp_path / 'x.csv'}"], ignore=["id"])
    assert found["test"].logits.tolist() == [[10, 20]]
    assert found["test"].labels.tolist() == [0]


def test_columns_to_ignore(read):
    text = 'id,text,cat,dog,label,f_0,f_1\nx,"a, b",0.5,1.5,0,9,9\ny,,-1,2,1,8,nan\n'
    batch = read(text, ignore=["id", "text", "f_*"])
    assert batch.logits.tolist() == [[0.5, 1.5], [-1, 2]]
    unnamed = ",cat,dog,label\n0,0.5,1.5,0\n1,-1,2,1\n"  # as pandas writes its index
    assert read(unnamed, ignore=[""]).logits.shape == (2, 2)
    assert read("x,a,b,label\ny,0.5,1.5,0\n", ignore="x").logits.shape == (1, 2)


@pytest.mark.parametrize("first", [0, 1000])
def test_row_numbers_are_no_class(read, first):
    rows = [f"{first + 7 * i % 100},{i / 8},{i / 4},0" for i in range(12)]
    text = "\n".join(["id,cat,dog,label", *rows])
    with pytest.raises(InputError, match="column 'id' holds another whole number in every row"):
        read(text)
    named = text.replace("id,cat,dog", "logit_id,logit_cat,logit_dog")
    assert read(named).logits.shape == (12, 3)
    votes = "\n".join(["cat,dog,label", *(f"{i % 4},{3 - i % 4},0" for i in range(12))])
    assert read(votes).logits.shape == (12, 2)


HEADERS = {
    "empty": ("", "it is empty"),
    "blank": ("\n \n", "it is empty"),
    "no label": (PLAIN.replace("label", "y"), r"no column 'label' \(found: cat, dog, y\).*--label"),
    "no header": ("0.5,1.5,1\n0.2,0.3,0\n", "line 1 holds numbers: the first line must name"),
    "semicolons": ("cat;dog;label\n1;2;0\n", "parted by ';': save it with commas"),
    "tabs": ("cat\tdog\tlabel\n1\t2\t0\n", r"parted by '\\t': save it with commas"),
    "twice": ("cat,cat,label\n1,2,0\n", "2 columns are called 'cat': rename"),
    "same class": ("logit_a,logits_a,label\n1,2,0\n", "two columns name the same class"),
    "unnamed": (",cat,label\n0,1,0\n", "a column has no name .*index=False"),
    "label alone": ("label\n0\n", "no column but 'label'"),
    "extra": (
        "id,logit_a,logit_b,text,label\n1,1,2,x,0\n",
        "columns id, text are not named as logits and others are: .*--ignore id --ignore text",
    ),
    "both": (
        "logit_a,logit_b,prob_a,prob_b,label\n1,2,.3,.7,0\n",
        "prob_a, prob_b are not named as logits",
    ),
    "other kind": ("prob_a,prob_b,label\n.5,.5,0\n", "named as probs: do not call them logits"),
    "no rows": ("cat,dog,label\n", "split 'val' is empty"),
    "not utf-8": (PLAIN.encode("utf-16"), "not UTF-8 text .*: save it as UTF-8"),
    "latin": ("k\xe4se,dog,label\n1,2,0\n".encode("latin-1"), "not UTF-8 text"),
    "quotes": ('"cat"x,dog,label\n1,2,0\n', "line 1 is no row of a table .*correct its quotes"),
    "open quote": ('cat,dog,label\n1,2,"0\n1,2,0\n', "line 3 is no row of a table"),
    "huge cell": ("cat,dog,label\n1,2,0" + "0" * 200_000, "line 2 is no row of a table"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_refused_headers(read, tmp_path, case):
    text, message = HEADERS[case]
    with pytest.raises(InputError, match=message) as caught:
        read(text)
    assert str(caught.value).startswith(str(tmp_path / "val.csv"))
    assert "\n" not in str(caught.value)


CELLS = {
    "text": ("x", "'x' is not a number: .*--ignore dog .*ignore=.'dog'."),
    "empty": ("", "the cell is empty: fill it in"),
    "blank": ("  ", "the cell is empty: fill it in"),
    "nan": ("NaN", "'nan' is no finite number"),
    "inf": ("-inf", "'-inf' is no finite number"),
    "NA": ("NA", "'NA' is no finite number"),
    "too large": ("1e400", "'inf' is no finite number"),
    "decimal comma": ('"1,5"', r"'1,5' is not a number: write 1\.5"),
    "thousands": ('"1,500.0"', "'1,500.0' is not a number"),
    "underscore": ("1_0", "'1_0' is not a number"),
    "hexadecimal": ("0x10", "'0x10' is not a number"),
    "long": ("z" * 500, r"'z{37}\.\.\.' is not a number"),
    "nul": ("\0", r"'\\x00' is not a number"),
}


@pytest.mark.parametrize("case", CELLS)
def test_refused_cells_are_named(read, tmp_path, case):
    cell, message = CELLS[case]
    with pytest.raises(InputError, match=f"line 5, column 'dog': {message}") as caught:
        read(f'cat,label,dog\n"1",0,2\n\n1,0,3\n1,1,{cell}\n')
    assert str(caught.value).startswith(f"{tmp_path / 'val.csv'}: line 5")


ROWS = {
    "short": ("1,2", "line 3 has 2 cells and the header 3"),
    "long": ("1,5,2,5,0", "line 3 has 5 cells .* decimal points, and text with commas quotes"),
    "all empty": (",,", "line 3, column 'cat': the cell is empty"),
    "no label": ("1,2,", "line 3, column 'label': the label is empty"),
    "other name": ("1,2,bird", r"'bird' is no class: .*\(cat, dog\) or a number from 0 to 1"),
    "large label": ("1,2,2", "line 3, column 'label': '2' is no class"),
    "negative label": ("1,2,-1", "'-1' is no class"),
    "half label": ("1,2,0.5", "'0.5' is no class"),
    "case": ("1,2,Cat", "'Cat' is no class"),
}


@pytest.mark.parametrize("case", ROWS)
def test_refused_rows_are_named(read, case):
    row, message = ROWS[case]
    with pytest.raises(InputError, match=message):
        read(f"cat,dog,label\n1,2,0\n{row}\n1,2,1\n")


def test_lines_are_counted_in_the_file(read):
    """Not in rows: a quoted label may span lines, and blocks begin anew."""
    text = 'cat,dog,text,label\n1,2,"two\nlines",0\n\n1,x,a,0\n'
    with pytest.raises(InputError, match="line 5, column 'dog'"):
        read(text, ignore=["text"])


def test_errors_beyond_the_first_block(read, monkeypatch):
    monkeypatch.setattr(table, "BLOCK_CELLS", 8)
    rows = ["0.5,1.5,0"] * 30
    assert read("\n".join(["cat,dog,label", *rows])).logits.shape == (30, 2)
    rows[20] = "0.5,1.5,bird"
    with pytest.raises(InputError, match="line 22, column 'label'"):
        read("\n".join(["cat,dog,label", *rows]))
    rows[20] = "0.5,0.6,1"
    with pytest.raises(
        InputError, match=r"line 22 holds numbers from 0\.5 to 0\.6 with the sum 1\.1"
    ):
        read(
            "\n".join(["cat,dog,label", *(row.replace("1.5", ".5") for row in rows)]), kind="probs"
        )


def test_nothing_is_guessed(read):
    for text in (PLAIN, "cat,dog,label\n.5,.5,0\n", "score,label\n.5,1\n"):
        with pytest.raises(
            InputError, match=r"nothing says whether .* are logits or probabilities"
        ):
            read(text, kind=None)


def test_files_that_differ(tmp_path):
    (tmp_path / "val.csv").write_text("logit_a,logit_b,label\n1,2,0\n")
    for text, message in (
        ("logit_a,logit_c,label\n1,2,0\n", r"classes are not those of .*val\.csv \(b, c in one"),
        ("prob_a,prob_b,label\n.5,.5,0\n", r"it holds probs and .*val\.csv logits"),
        ("logit_a,logit_b,y\n1,2,0\n", "no column 'label'"),
    ):
        (tmp_path / "test.csv").write_text(text)
        with pytest.raises(InputError, match=message) as caught:
            read_files([tmp_path / "val.csv", tmp_path / "test.csv"])
        assert str(caught.value).startswith(str(tmp_path / "test.csv"))
    with pytest.raises(InputError, match="no column is called 'ids': choose of logit_a, logit_b"):
        read_files(tmp_path / "val.csv", ignore=["ids"])


PARQUET = {
    "integers": {"cat": [1, 2], "dog": [3, 4], "label": [0, 1]},
    "floats": {"cat": np.array([1, 2], "f2"), "dog": np.array([3, 4], "f4"), "label": [0, 1]},
    "names": {"cat": [1.0, 2.0], "dog": [3.0, 4.0], "label": ["cat", "dog"]},
    "bytes": {"cat": [1.0, 2.0], "dog": [3.0, 4.0], "label": np.array([0, 1], "u1")},
    "label floats": {"cat": [1.0, 2.0], "dog": [3.0, 4.0], "label": [0.0, 1.0]},
    "categories": {
        "label": pyarrow.array(["cat", "dog"]).dictionary_encode(),
        "cat": [1.0, 2.0],
        "dog": [3.0, 4.0],
    },
    "decimals": {
        "cat": pyarrow.array([1, 2], pyarrow.decimal128(5, 0)),
        "dog": [3.0, 4.0],
        "label": [0, 1],
    },
    "index of pandas": {
        "cat": [1.0, 2.0],
        "dog": [3.0, 4.0],
        "label": [0, 1],
        "__index_level_0__": [9, 4],
    },
}


@pytest.mark.parametrize("case", PARQUET)
def test_parquet_of_any_type(read, case):
    batch = read(PARQUET[case], "val.parquet")
    assert batch.logits.tolist() == [[1, 3], [2, 4]]
    assert batch.labels.tolist() == [0, 1]


PARQUET_REFUSED = {
    "null": ({"cat": [1.0, None], "dog": [3.0, 4.0]}, "row 1, column 'cat': the cell is empty"),
    "nan": ({"cat": [1.0, np.nan], "dog": [3.0, 4.0]}, "row 1, column 'cat': 'nan' is no finite"),
    "text": ({"cat": ["a", "b"], "dog": [3.0, 4.0]}, "row 0, column 'cat': 'a' is not a number"),
    "truth": ({"cat": [True, False], "dog": [3.0, 4.0]}, "'True' is not a number"),
    "no label": ({"cat": [1.0], "dog": [1.0], "label": [None]}, "row 0, .*the label is empty"),
    "label": ({"cat": [1.0], "dog": [1.0], "label": ["x"]}, "row 0, column 'label': 'x' is no"),
    "no rows": ({"cat": np.zeros(0), "dog": np.zeros(0), "label": []}, "'val' is empty"),
}


@pytest.mark.parametrize("case", PARQUET_REFUSED)
def test_refused_parquet(read, tmp_path, case):
    columns, message = PARQUET_REFUSED[case]
    with pytest.raises(InputError, match=message) as caught:
        read({"label": [0, 1], **columns}, "val.parquet")
    assert str(caught.value).startswith(str(tmp_path / "val.parquet"))


def test_parquet_in_blocks_with_dotted_names(read, monkeypatch):
    monkeypatch.setattr(table, "BLOCK_CELLS", 8)
    columns = {"a": np.arange(30) / 8, "a.b": -np.arange(30) / 8, "label": np.arange(30) % 2}
    batch = read(columns, "val.parquet")
    assert np.array_equal(batch.logits.numpy(), np.c_[columns["a"], columns["a.b"]])
    columns["a.b"][21] = np.inf
    with pytest.raises(InputError, match=r"row 21, column 'a\.b': 'inf'"):
        read(columns, "val.parquet")


names = st.lists(
    st.text(string.ascii_letters + string.punctuation + " äß漢", min_size=1, max_size=8)
    .map(str.strip)
    .filter(lambda name: name and name != "label"),
    min_size=2,
    max_size=5,
    unique=True,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), classes=names, line=st.sampled_from(["\n", "\r\n"]))
def test_any_table_comes_back(tmp_path, data, classes, line):
    """Any names and any numbers, quoted as the csv module sees fit."""
    k = len(classes)
    n = data.draw(st.integers(1, 7))
    logits = data.draw(
        arrays.arrays(np.float32, (n, k), elements=st.floats(-(2.0**99), 2.0**99, width=32))
    )
    labels = data.draw(arrays.arrays(np.int64, n, elements=st.integers(0, k - 1)))
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator=line, quoting=data.draw(st.sampled_from([0, 1])))
    writer.writerow([f"logit_{name}" for name in classes] + ["label"])
    for row, label in zip(logits, labels, strict=True):
        writer.writerow([*(str(value) for value in row), classes[label]])
    (tmp_path / "val.csv").write_text(text.getvalue(), encoding="utf-8", newline="")
    batch = read_files(tmp_path / "val.csv")["val"]
    assert np.array_equal(batch.logits.numpy(), logits)
    assert np.array_equal(batch.labels.numpy(), labels)
