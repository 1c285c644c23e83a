"""What files say: schemas, depth, sizes, checksums."""

import io
import json
import tracemalloc
import zipfile
from dataclasses import dataclass, field
from typing import Any, TypedDict

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from featcal import InputError
from featcal.core.checks import ArgumentError
from featcal.core.files import new_file
from featcal.core.stored import (
    DEEPEST,
    check_unpacked,
    digest,
    json_of,
    made,
    map_npy,
    npy_of,
    read_tensors,
    reading,
    save_tensors,
)


class Inner(TypedDict):
    rows: int


@dataclass(frozen=True)
class Record:
    name: str
    loss: float
    inner: tuple[Inner, ...] = ()
    more: dict[str, Any] = field(default_factory=dict)
    best: int | None = None


GOOD = {"name": "a", "loss": 1, "inner": [{"rows": 3}], "best": None}


def test_a_record_is_made_of_what_its_annotations_say():
    found = made(Record, {**GOOD, "of a later version": 7})
    assert found == Record("a", 1.0, ({"rows": 3},))
    assert made(Record, {"name": "a", "loss": 0.5}) == Record("a", 0.5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": 3}, "name is 3, not text"),
        *(({"loss": value}, "loss is .* finite number") for value in ("1", True, None, 10**400)),
        *(({"best": value}, "best is .* whole") for value in (-1, 1.0, True, 2**63, "1")),
        ({"inner": {}}, "inner is .* not a list"),
        ({"inner": [{"rows": 1}, {}]}, r"inner\[1\] has no 'rows'"),
        ({"inner": [{"rows": "x" * 500}]}, r"inner\[0\]\.rows is .{0,60}, not"),
        ({"more": []}, "more is .* object"),
    ],
)
def test_a_field_of_another_type_is_named(change, words):
    with pytest.raises(ValueError, match=words):
        made(Record, {**GOOD, **change})


def test_documents_are_shallow_finite_and_written_in_whole_letters():
    deep = DEEPEST - 1
    assert json_of("[" * deep + "]" * deep)
    for text in ("[" * 40 + "]" * 40, "[NaN]", "[1e999]", '"\\ud800"', '{"\\udfff": 1}'):
        with pytest.raises(ValueError, match=r"deeper|finite|surrogates"):
            json_of(text)
    with (
        pytest.raises(InputError, match=r"^a\.json cannot be read \(RecursionError.*\): copy it$"),
        reading("a.json", "copy it"),
    ):
        json_of("[" * 100_000)


def test_what_a_parser_says_is_one_short_line_without_the_name_of_the_file():
    for error, words in (
        (ValueError("a.json\n  is odd"), "it is odd"),
        (KeyError("a.json"), "KeyError: 'it'"),
        (ValueError("x" * 5000), "x" * 200 + " ..."),
        (ValueError("x" * 200), "x" * 200),
    ):
        with pytest.raises(InputError) as caught, reading("a.json", "copy it"):
            raise error
        assert str(caught.value) == f"a.json cannot be read ({words}): copy it"
        assert caught.value.__cause__ is error


def test_refusals_of_our_own_have_the_name_of_the_file_once_and_no_memory_is_no_fault_of_it():
    for said, words in (("it is odd", "a.json: it is odd"), ("a.json is odd", "a.json is odd")):
        with pytest.raises(InputError, match=f"^{words}$"), reading("a.json", "copy it"):
            raise InputError(said)
    for error in (MemoryError(), ArgumentError("<batch> is 0")):
        with pytest.raises(type(error)) as caught, reading("a.json", "copy it"):
            raise error
        assert caught.value is error


def check_known(texts):
    """As `io.load` does: texts of other names are of no file of ours."""
    if texts.keys() != {"recipe"}:
        raise ValueError("another text")


TENSORS = {
    "a": torch.arange(6.0).reshape(2, 3),
    "b": torch.tensor(True),
    "c": torch.zeros(0),
    "d": torch.ones(()).expand(1),
}


def test_one_flipped_bit_is_noticed_and_files_without_a_sha256_are_read(tmp_path):
    path = tmp_path / "a.safetensors"
    save_tensors(path, TENSORS, {"recipe": "clip"})
    whole = path.read_bytes()
    tensors, texts = read_tensors(path)
    assert texts == {"recipe": "clip"}
    assert digest(tensors, texts) == digest(TENSORS, texts)
    for place in range(8, len(whole)):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        with pytest.raises(InputError), reading(path, "copy it"):
            # Where only the name of the sha256 is another, there is a text that no caller knows.
            check_known(read_tensors(path)[1])
    save_file(TENSORS, path)
    assert read_tensors(path)[1] == {}


def test_names_types_and_shapes_are_of_the_digest_as_values_are():
    one = torch.zeros(2, 3)
    others = [{"b": one}, {"a": one.int()}, {"a": one.T}, {"a": one + 1}, {"a": one, "b": one[:0]}]
    assert len({digest(tensors, {}) for tensors in ({"a": one}, *others)}) == 6
    assert digest({"a": one}, {"recipe": "clip"}) != digest({"a": one}, {})
    assert digest({"a": one, "b": one}, {}) == digest({"b": one, "a": one}, {})


def npy(shape, descr="<f4", content=b""):
    out = io.BytesIO()
    header = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(out, header)
    return out.getvalue() + content


@pytest.mark.parametrize("shape", [(10**12,), (10**20,), (2**40, 2**40), (850_000_000,), (-1,)])
def test_declared_shapes_are_compared_with_the_file_before_any_memory_is_taken(tmp_path, shape):
    path = tmp_path / "a.npy"
    path.write_bytes(npy(shape, content=bytes(64)))
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", npy(shape, content=bytes(2**21)))
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"needs more|never read"):
        map_npy(path)
    with (
        zipfile.ZipFile(tmp_path / "a.npz") as archive,
        archive.open("a.npy") as stream,
        pytest.raises(ValueError, match=r"would unpack|never read"),
    ):
        npy_of(stream, archive.getinfo("a.npy").compress_size)
    assert tracemalloc.get_traced_memory()[1] < 2**22
    tracemalloc.stop()


def test_arrays_that_end_early_or_go_on_are_refused():
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    content = npy((2, 3), content=values.tobytes())
    assert np.array_equal(npy_of(io.BytesIO(content), 99), values)
    for order, shape in (("C", (2, 3)), ("F", (2, 3)), ("C", (0, 3)), ("C", ())):
        out = io.BytesIO()
        np.save(out, np.asarray(np.arange(np.prod(shape)).reshape(shape), order=order))
        found = npy_of(io.BytesIO(out.getvalue()), 99)
        assert found.shape == shape
        assert found.flatten().tolist() == list(range(found.size))
    for spoiled in (content[:-1], content + b"x"):
        with pytest.raises(ValueError, match="last number"):
            npy_of(io.BytesIO(spoiled), 99)


def test_large_arrays_are_read_in_parts_and_every_version_of_the_format():
    values = np.arange(400_000.0)
    for version in ((1, 0), (2, 0), (3, 0)):
        out = io.BytesIO()
        np.lib.format.write_array(out, values, version=version)
        assert np.array_equal(npy_of(io.BytesIO(out.getvalue()), 99), values)
    for descr in ("|O", "|S0", "<U0"):
        with pytest.raises(ValueError, match="is never read: save numbers"):
            npy_of(io.BytesIO(npy((3,), descr)), 99)


def test_a_mapped_array_needs_every_byte_it_declares(tmp_path):
    path = tmp_path / "a.npy"
    np.save(path, np.arange(10.0))
    assert map_npy(path).tolist() == list(range(10))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="79 bytes"):
        map_npy(path)


@pytest.mark.parametrize(("stored", "unpacked"), [(2**20, 100 * 2**20), (1, 2**26), (2**30, 2**33)])
def test_numbers_unpack_to_a_hundred_times_their_size_or_64_mib(stored, unpacked):
    check_unpacked(stored, unpacked)
    with pytest.raises(ValueError, match="no honest numbers"):
        check_unpacked(stored, max(100 * stored, 2**26) + 1)


def test_a_full_disk_is_one_sentence_with_the_name_a_person_gave(tmp_path):
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        for write in (
            lambda path: save_tensors(path, {"a": torch.zeros(10_000)}),
            lambda path: path.write_text(json.dumps([0] * 10_000)),
        ):
            with (
                pytest.raises(
                    InputError, match=f"^output {tmp_path / 'a'} cannot be written: .*arge"
                ),
                new_file(tmp_path / "a") as temporary,
            ):
                write(temporary)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []
