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
from featcal.data import import_files, read_files, tables

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
    "logit prefix": "logit_cat,logit_dog,label\n0.5,1.5,cat\n-1,2,dog\n",
    "logits prefix": "logits_cat,logits_dog,label\n0.5,1.5,0\n-1,2,1\n",
}


def test_the_same_table_in_many_ways(read):
    for case, text in ALIKE.items():
        batch = read(text)
        assert batch.logits.tolist() == [[0.5, 1.5], [-1, 2]], case
        assert batch.labels.tolist() == [0, 1], case


def test_class_names_come_from_the_header(tmp_path):
    (tmp_path / "val.csv").write_text('"a, b","say ""hi""",prob_,label\n1,2,3,"a, b"\n')
    pack = import_files(tmp_path / "val.csv", tmp_path / "pack", kind="logits")
    assert pack.manifest.class_names == ("a, b", 'say "hi"', "prob_")
    (tmp_path / "test.csv").write_text("prob_ä b,probs_c_d,label\n.25,.75,c_d\n")
    pack = import_files(tmp_path / "test.csv", tmp_path / "other")
    assert pack.manifest.class_names == ("ä b", "c_d")
    (batch,) = pack.split("test")
    assert torch.allclose(batch.logits.exp(), torch.tensor([[0.25, 0.75]]))
    assert batch.labels.tolist() == [1]


@pytest.mark.parametrize("column", ["logits", "score", "logit_spam", "prob", "p"])
def test_one_column_of_a_binary_model(tmp_path, read, column):
    kind = "logits" if column == "score" else "probs" if column == "p" else None
    scores = torch.tensor([0.25, 0.75])
    expected = scores if column[0] == "p" else scores.sigmoid()
    for first, second in (("0", "1"), ("0.0", "1.0"), ("False", "True"), ("false", "true")):
        text = f"label,{column}\n{first},0.25\n{second},0.75\n"
        batch = read(text, kind=kind)
        assert batch.labels.tolist() == [0, 1]
        assert torch.allclose(batch.logits.softmax(1)[:, 1], expected)
    pack = import_files(tmp_path / "val.csv", tmp_path / "pack", kind=kind)
    assert (pack.manifest.classes, pack.manifest.class_names) == (2, None)
    with pytest.raises(InputError, match="line 4, column 'label': '2' is none of the classes 0, 1"):
        read(text + "2,0.5\n", kind=kind)


def test_numbers_as_class_names(read):
    assert read("0,1,2,label\n1.5,2,3,2\n1,2,3,0.0\n").labels.tolist() == [2, 0]
    from_one = "1,2,3,label\n1.5,2,3,3\n1,2,3,1\n"
    assert read(from_one).labels.tolist() == [2, 0]  # by name, not by position
    with pytest.raises(InputError, match=r"line 2, .*'0' is none of the classes 1, 2, 3"):
        read("1,2,3,label\n1.5,2,3,0\n")
    assert read("2,0,1,label\n1.5,2,3,0\n1,2,3,2\n").labels.tolist() == [1, 0]


def test_columns_of_other_splits_are_put_in_order(tmp_path):
    (tmp_path / "val.csv").write_text("logit_a,logit_b,label\n1,2,a\n")
    (tmp_path / "x.csv").write_text("id,label,logit_b,logit_a\ni,0,20,10\n")
    found = read_files([tmp_path / "val.csv", f"test={tmp_path / 'x.csv'}"], ignore=["id"])
    assert found["test"].logits.tolist() == [[10, 20]]
    assert found["test"].labels.tolist() == [0]


def test_a_wide_header_is_looked_through_once(read, monkeypatch):
    """Looking for every column from the first one on took minutes at 100,000 columns."""
    compared, reader = [], csv.reader

    class Name(str):
        __hash__ = str.__hash__

        def __eq__(self, other):
            compared.append(other)
            return str.__eq__(self, other)

        def strip(self):
            return self

    class Named:
        def __init__(self, *args, **options):
            self.lines = reader(*args, **options)

        def __getattr__(self, name):
            return getattr(self.lines, name)

        def __iter__(self):
            return ([Name(cell) for cell in cells] for cells in self.lines)

    monkeypatch.setattr(tables.csv, "reader", Named)
    names = [f"c{i}" for i in range(1000)]
    lines = [[*names, "label"], [*map(str, range(1000)), "c7"]]
    batch = read("\n".join(map(",".join, lines)))
    assert (batch.logits[0, 7], batch.labels[0]) == (7, 7)
    assert len(compared) < 100 * len(names)


def test_columns_to_ignore(read):
    text = 'id,text,cat,dog,label,f_0,f_1\nx,"a, b",0.5,1.5,0,9,9\ny,,-1,2,1,8,nan\n'
    batch = read(text, ignore=["id", "text", "f_*"])
    assert batch.logits.tolist() == [[0.5, 1.5], [-1, 2]]
    unnamed = ",cat,dog,label\n0,0.5,1.5,0\n1,-1,2,1\n"  # as pandas writes its index
    assert read(unnamed, ignore=[""]).logits.shape == (2, 2)
    assert read("x,a,b,label\ny,0.5,1.5,0\n", ignore="x").logits.shape == (1, 2)


def test_row_numbers_are_no_class(read):
    rows = [f"{1000 + 7 * i % 100},{i / 8},{i / 4},0" for i in range(12)]
    text = "\n".join(["id,cat,dog,label", *rows])
    with pytest.raises(InputError, match="column 'id' holds another whole number in every row"):
        read(text)
    named = text.replace("id,cat,dog", "logit_id,logit_cat,logit_dog")
    assert read(named).logits.shape == (12, 3)
    votes = "\n".join(["cat,dog,label", *(f"{i % 4},{3 - i % 4},0" for i in range(12))])
    assert read(votes).logits.shape == (12, 2)


REFUSED = [
    ("", "no column 'label'"),
    (PLAIN.replace("label", "y"), r"no column 'label' \(found: cat, dog, y\).*--label"),
    ("0.5,1.5,1\n0.2,0.3,0\n", r"no column 'label' \(found: 0\.5"),
    ("cat;dog;label\n1;2;0\n", r"no column 'label' \(found: cat;dog;label"),
    ("cat,cat,label\n1,2,0\n", "columns cat, cat, label name one class"),
    ("cat,dog,label,label\n1,2,0,0\n", "columns cat, dog, label, label name one"),
    ("logit_a,logits_a,label\n1,2,0\n", "logits_a, label name one class"),
    (",cat,label\n0,1,0\n", "a column has no name .*--ignore ''"),
    ("label\n0\n", "it has no scores"),
    ("id,logit_a,logit_b,text,label\n1,1,2,x,0\n", "columns id, text .*--ignore id --ignore text"),
    ("logit_a,prob_a,prob_b,label\n1,.3,.7,0\n", "prob_a, prob_b are not named as logits"),
    ("prob_a,prob_b,label\n.5,.5,0\n", "named as probs: do not call them logits"),
    ("cat,dog,label\n", "split 'val' is empty"),
    (PLAIN.encode("utf-16"), "not UTF-8 text .*: save it as UTF-8"),
    ('"cat"x,dog,label\n1,2,0\n', "line 1 is no row of a table .*correct its quotes"),
    ('cat,dog,label\n1,2,"0\n1,2,0\n', "line 3 is no row of a table"),
    *[
        (f"cat,label,dog\n1,0,2\n\n1,1,{cell}\n", f"line 4, column 'dog': {text} is not a finite")
        for cell, text in (
            *(("x", "'x'"), ("", "''"), ("NaN", "'NaN'"), ("1e400", "'1e400'"), ("0x10", "'0x10'")),
            *(('"1,5"', "'1,5'"), ("z" * 500, "'z{40}'")),
        )
    ],
    *[
        (f"cat,dog,label\n1,2,0\n1,2,{label}\n", f"line 3, column 'label': '{label}' is none of")
        for label in ("", "bird", "2", "-1", "0.5", "Cat")
    ],
    ("cat,dog,label\n1,2,0\n1,2\n", "line 3 has 2 cells and the header 3"),
    ("cat,dog,label\n1,5,2,5,0\n", "line 2 has 5 cells .* decimal points"),
    # Lines are counted in the file, not in rows.
    ('cat,dog,label\n1,2,"two\nlines"\n', "line 3, column 'label'"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_refused_tables_name_the_place(read, tmp_path, text, message):
    with pytest.raises(InputError, match=message) as caught:
        read(text)
    assert str(caught.value).startswith(str(tmp_path / "val.csv"))
    assert "\n" not in str(caught.value)


def test_errors_beyond_the_first_block(read, monkeypatch):
    monkeypatch.setattr(tables, "BLOCK_CELLS", 8)
    rows = ["0.5,0.5,0"] * 30
    assert read("\n".join(["cat,dog,label", *rows])).logits.shape == (30, 2)
    rows[20] = "0.5,0.5,bird"
    with pytest.raises(InputError, match="line 22, column 'label'"):
        read("\n".join(["cat,dog,label", *rows]))
    rows[20] = "0.5,0.6,1"
    with pytest.raises(InputError, match=r"line 22 holds 0\.5 to 0\.6 with the sum 1\.1"):
        read("\n".join(["cat,dog,label", *rows]), kind="probs")


def test_nothing_is_guessed(read):
    for text in (PLAIN, "cat,dog,label\n.5,.5,0\n", "score,label\n.5,1\n"):
        with pytest.raises(InputError, match=r"nothing says whether .* are logits or prob"):
            read(text, kind=None)


def test_files_that_differ(tmp_path):
    (tmp_path / "val.csv").write_text("logit_a,logit_b,label\n1,2,0\n")
    for text, message in (
        ("logit_a,logit_c,label\n1,2,0\n", r"not those of .*val\.csv \(logit_b, logit_c in one"),
        ("prob_a,prob_b,label\n.5,.5,0\n", r"not those of .*val\.csv \(logit_a, .*prob_b"),
        ("logit_a,logit_b,y\n1,2,0\n", "no column 'label'"),
    ):
        (tmp_path / "test.csv").write_text(text)
        with pytest.raises(InputError, match=message) as caught:
            read_files([tmp_path / "val.csv", tmp_path / "test.csv"])
        assert str(caught.value).startswith(str(tmp_path / "test.csv"))
    with pytest.raises(InputError, match="no column is called 'ids': choose of logit_a, logit_b"):
        read_files(tmp_path / "val.csv", ignore=["ids"])


SCORES = {"cat": [1.0, 2.0], "dog": [3.0, 4.0]}
PARQUET = {
    "integers": {"cat": [1, 2], "dog": [3, 4], "label": [0, 1]},
    "floats": {"cat": np.array([1, 2], "f2"), "dog": np.array([3, 4], "f4"), "label": [0.0, 1.0]},
    "bytes": {**SCORES, "label": np.array([0, 1], "u1")},
    "categories": {**SCORES, "label": pyarrow.array(["cat", "dog"]).dictionary_encode()},
    "decimals": {
        **{**SCORES, "cat": pyarrow.array([1, 2], pyarrow.decimal128(5, 0))},
        **{"label": ["cat", "dog"], "__index_level_0__": [9, 4]},  # as pandas writes its index
    },
}


@pytest.mark.parametrize("case", PARQUET)
def test_parquet_of_any_type(read, case):
    batch = read(PARQUET[case], "val.parquet")
    assert batch.logits.tolist() == [[1, 3], [2, 4]]
    assert batch.labels.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"cat": [1.0, None]}, "row 1, column 'cat'"),
        ({"cat": [1.0, np.nan]}, "row 1, column 'cat'"),
        ({"cat": ["a", "b"]}, "row 0, column 'cat': 'a' is not a finite number"),
        ({"cat": [True, False]}, "column 'cat': 'True'"),
        ({"label": [0, None]}, "row 1, column 'label': '' is none"),
        ({"label": ["cat", "x"]}, "row 1, column 'label': 'x' is none"),
        ({"cat": np.zeros(0), "dog": np.zeros(0), "label": []}, "'val' is empty"),
        ({"label": pyarrow.array([1, 2], pyarrow.timestamp("ns"))}, "val"),
        ({"cat": pyarrow.array([[], []], pyarrow.list_(pyarrow.float32()))}, "column 'cat'"),
        ({"logits": pyarrow.array([[], []], pyarrow.list_(pyarrow.float32()))}, "val"),
    ],
)
def test_refused_parquet(read, tmp_path, columns, message):
    with pytest.raises(InputError, match=message) as caught:
        read({**SCORES, "label": [0, 1], **columns}, "val.parquet")
    assert str(caught.value).startswith(str(tmp_path / "val.parquet"))


def test_parquet_whose_names_are_no_text_or_whose_rows_cannot_be_there(read, tmp_path, monkeypatch):
    read({**SCORES, "label": [0, 1]}, "val.parquet")
    file = tmp_path / "val.parquet"
    whole = file.read_bytes()
    file.write_bytes(whole.replace(b"cat", b"\xff\xfe\xff"))
    with pytest.raises(InputError, match="cannot be read"):
        read_files(file, kind="logits")
    monkeypatch.setattr("featcal.core.stored.UNPACKED", 2**20)
    many = np.zeros(500_000, np.float32)  # in a few bytes
    columns = {"cat": many, "dog": many, "label": many.astype("i1")}
    with pytest.raises(InputError, match="would unpack to"):
        read(columns, "val.parquet")
    lists = pyarrow.ListArray.from_arrays([0, len(many)], many)  # of one row
    with pytest.raises(InputError, match="would unpack to"):
        read({"logits": lists, "label": [0]}, "val.parquet", kind=None)


def test_parquet_in_blocks_with_dotted_names(read, monkeypatch):
    monkeypatch.setattr(tables, "BLOCK_CELLS", 8)
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


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
