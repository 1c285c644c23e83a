"""Broken, lying and hostile inputs for every reader: what loads, what is refused, what is neither.

Usage: python experiments/fuzz.py [--minutes 10] [--inputs N] [--seed 0] [--only READER ...]

Good files are made once; each input is one of them with some damage (bits, bytes, lengths, JSON
fields, tensors, with the checksums mended or not), or a text that hypothesis makes up. Input number
n of a reader depends on the seed, the reader and n alone; minutes (all readers together) or inputs
(of each reader) say how many there are. What loads is used: a calibrator predicts, a pack is fitted
to, a checkpoint is trained on. The only other end allowed is an `InputError` of one line within
SECONDS, and MEMORY more than before. Anything else is a failure, kept in .cache/fuzz/. Writes
results/fuzz.json and the table in docs/trust.md.
"""

import argparse
import contextlib
import copy
import io
import itertools
import json
import random
import resource
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import traceback
import warnings
import zipfile
from collections import Counter
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import hypothesis
import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from hypothesis import strategies as st
from paper_docs import fill
from safetensors.torch import load, save
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import featcal
from featcal import METHODS, Batch, InputError, parse
from featcal.cli.fit import load_for
from featcal.core.stored import digest
from featcal.data import Pack, import_files, read_files
from featcal.data.pack import write_pack
from featcal.data.resume import collect_pack, partial_of
from featcal.datasets import Images, Normalisation, Splits
from featcal.losses import LOSSES, AdaFocal, parse_loss
from featcal.page.serve import Explorer
from featcal.report.tables import Table, fitted_text
from featcal.train import History, Recipe, train
from featcal.train.loop import write_run

ROOT = Path(__file__).resolve().parents[1]
RESULTS, DOCS, KEPT = ROOT / "results" / "fuzz.json", ROOT / "docs" / "trust.md", ROOT / ".cache"
START = "<!-- {}: made by experiments/fuzz.py -->"
ENDS = ("loaded", "refused")
BATCH = 250  # inputs of a reader before it is the next one's turn
SECONDS, MEMORY = 10, 2**28  # of one input: bytes beyond what the process has held so far
ROWS, WIDTH, CLASSES = 60, 5, 3
DEEP = 3000
METHODS_SAVED = (
    *("clip | temperature", "sample", "ensemble", "vector", "sms", "dirichlet", "classwise"),
    *("histogram(bins=4)", "isotonic", "spline", "bbq", "logit_clip", "norm_clip", "auto"),
    *("group(partitions=2, min_rows=5)", "proximity", "parameterised(restarts=1)"),
)
ODD = (
    *(None, True, False, -1, 0, 1, 2, 10**9, 2**31, 2**63, 10**30, -0.0, 0.5, 1e-300, 1e308),
    *(float("nan"), float("inf"), "", "x", "7", "clip", "../../x.safetensors", "\x1b[31m"),
    *("\ud800", "<script>", "x" * 3000, [], {}, [[]], [None], {"": None}, {"a": {"b": 1}}, [1e300]),
)
NUMBERS = (0, 1, 7, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1)


class TooLong(BaseException):
    """An input that took more than SECONDS."""


# --- damage ---


def damaged(rng, content):
    """Bytes with one to three of the usual accidents."""
    content = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at, end = (rng.randrange(len(content) + 1) for _ in range(2))
        # Headers are where files lie best.
        at = rng.randrange(min(len(content), 200) + 1) if rng.random() < 0.5 else at
        match rng.randrange(8):
            case 0 | 1 if at < len(content):
                content[at] ^= 1 << rng.randrange(8)
            case 2 if at < len(content):
                content[at] = rng.randrange(256)
            case 3:
                del content[at:]
            case 4:
                del content[min(at, end) : max(at, end)]
            case 5:
                content[at:at] = rng.randbytes(rng.choice((1, 8, 64)))
            case 6:
                content[at:at] = content[min(at, end) : max(at, end)]
            case 7:
                size = rng.choice((2, 4, 8))
                whole = (rng.choice(NUMBERS) % 256**size).to_bytes(size, "little")
                content[at : at + size] = whole
    return bytes(content)


def places(document, path=()):
    """Every place in a JSON document."""
    yield path
    if isinstance(document, (dict, list)):
        items = document.items() if isinstance(document, dict) else enumerate(document)
        for key, value in items:
            yield from places(value, (*path, key))


def altered(rng, document):
    """A JSON document with one place changed; as text, for some changes have no other form."""
    document = copy.deepcopy(document)
    path = rng.choice(list(places(document)))
    if not path:
        return json.dumps(rng.choice(ODD))
    *before, last = path
    parent = document
    for key in before:
        parent = parent[key]
    match rng.randrange(8):
        case 0:
            del parent[last]
        case 1 if isinstance(parent, dict):
            parent[rng.choice(("x", "", f"{last}x"))] = parent.pop(last)
        case 2:  # deeper than any reader of JSON goes, or than ours does
            deep = rng.choice((20, 40, 500, DEEP))
            parent[last] = "DEEP"
            return json.dumps(document).replace('"DEEP"', "[" * deep + "]" * deep)
        case 3:
            parent[last] = [parent[last]]
        case 4 if isinstance(parent[last], (int, float)):
            parent[last] = rng.choice((-1, 1, 10, 0.5)) * parent[last] + rng.choice((0, 1, 1e-3))
        case _:
            parent[last] = rng.choice(ODD)
    return json.dumps(document)


def resaved(rng, content):
    """A safetensors file with another tensor or text, its sha256 right, gone or left as it was."""
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    texts, tensors = header.get("__metadata__", {}), load(content)
    if rng.random() < 0.5 and tensors:
        key = rng.choice(sorted(tensors))
        value = tensors[key].clone()
        flat = value.view(-1) if value.numel() else value
        match rng.randrange(7):
            case 0:
                del tensors[key]
            case 1:
                tensors[rng.choice(("x", "weight", f"{key}x"))] = tensors.pop(key)
            case 2:
                tensors[key] = value.to(rng.choice((torch.float16, torch.int64, torch.float64)))
            case 3:
                tensors[key] = torch.cat([value.reshape(-1)] * 2)
            case 4:
                tensors[key] = value.reshape(rng.choice(((-1,), (1, -1), (-1, 1))))
            case _ if value.is_floating_point() and value.numel():
                odd = (torch.nan, torch.inf, -torch.inf, 0.0, -1.0, 1e38, 1e-40)
                flat[rng.randrange(value.numel())] = rng.choice(odd)
                tensors[key] = value
            case _:
                tensors[key] = value.new_full((rng.choice((0, 1, 3)),), 1)
    elif texts:
        key = rng.choice(sorted(texts))
        try:
            texts[key] = altered(rng, json.loads(texts[key]))
        except ValueError:
            texts[key] = rng.choice((texts[key] * 2, "", "2", "clip", texts[key][:-1], "x" * 5000))
    match rng.randrange(3) if "sha256" in texts else 0:
        case 1:
            del texts["sha256"]
        case 2:
            rest = {key: text for key, text in texts.items() if key != "sha256"}
            texts["sha256"] = digest(tensors, rest)
    with contextlib.suppress(UnicodeEncodeError):
        return save(tensors, texts)
    return content


def another_shape(rng, content):
    """An .npy file that declares another shape, type or order."""
    size = struct.unpack("<H", content[8:10])[0]
    header = content[10 : 10 + size].decode()
    for old in ("'shape': (", "'<f4'", "'<i8'", "False"):
        if old in header and rng.random() < 0.6:
            sizes = rng.choice(
                ("10**12,", "-1, ", "99999999999999999999, ", "0, ", "2, 2, 3, ", "1e9,")
            )
            types = rng.choice(("'|O'", "'<U9'", "'<f8'", "'<c16'", "'|V7'", "'<M8[ns]'", "'<f2'"))
            made = {"'shape': (": f"'shape': ({sizes}", "False": rng.choice(("True", "None"))}
            header = header.replace(old, made.get(old, types), 1)
    header = header.strip().ljust(size + rng.choice((0, 64))) + "\n"
    return content[:8] + struct.pack("<H", len(header)) + header.encode() + content[10 + size :]


def another_archive(rng, content):
    """An .npz archive with one array damaged before it is packed, or packed in an odd way."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = rng.choice(sorted(members))
    match rng.randrange(5):
        case 0:
            members[name] = damaged(rng, members[name])
        case 1:
            members[f"x{name}"] = members.pop(name)
        case 2:  # honest, and far larger than the file
            zeros = np.zeros((2**23, rng.choice((3, 9))), np.float32)
            head = io.BytesIO()
            np.lib.format.write_array_header_1_0(
                head, {"descr": "<f4", "fortran_order": False, "shape": zeros.shape}
            )
            members[name] = head.getvalue() + bytes(2**22)
        case _:
            members[name] = another_shape(rng, members[name])
    out = io.BytesIO()
    way = rng.choice(
        (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)
    )
    with zipfile.ZipFile(out, "w", way) as archive:
        for key, value in members.items():
            archive.writestr(key, value)
    made = bytearray(out.getvalue())
    if rng.random() < 0.3:  # a field of the list at the end, such as the version or a size
        at = made.rindex(b"PK\x01\x02")
        made[at + rng.randrange(4, 46)] = rng.randrange(256)
    return bytes(made)


def another_table(rng, content):
    """Text with one cell replaced."""
    lines = content.decode().split("\n")
    row = rng.randrange(len(lines))
    mark = "\t" if "\t" in lines[0] else ","
    cells = lines[row].split(mark)
    odd = (
        "",
        "nan",
        "inf",
        "1e999",
        "label",
        '"',
        "0x1p3",
        "\u0661",
        "1_000",
        "\0",
        "\ud7ff",
        "x" * 200_000,
    )
    cells[rng.randrange(len(cells))] = rng.choice((*odd, *cells))
    lines[row] = mark.join(cells[: rng.choice((len(cells), len(cells) + 1, len(cells) - 1))])
    return "\n".join(lines).encode()


def another_parquet(rng, content):
    """A table of the same names with one column of another kind."""
    table = pyarrow.parquet.read_table(io.BytesIO(content))
    name = rng.choice(table.column_names)
    rows = table.num_rows
    kinds = {
        "timestamp": pyarrow.array(range(rows), pyarrow.timestamp("ns")),
        "nanoseconds": pyarrow.array([1 + 10**18] * rows, pyarrow.timestamp("ns", "UTC")),
        "empty lists": pyarrow.array([[]] * rows, pyarrow.list_(pyarrow.float32())),
        "uneven lists": pyarrow.array([[1.0] * (i % 3) for i in range(rows)]),
        "nulls": pyarrow.nulls(rows),
        "no letters": pyarrow.array([b"\xff\xfe"] * rows, pyarrow.binary()),
        "records": pyarrow.array([{"a": i} for i in range(rows)]),
        "dates": pyarrow.array(range(rows), pyarrow.date32()),
        "decimals": pyarrow.array(range(rows), pyarrow.decimal128(30, 3)),
        "text": pyarrow.array(["cat"] * rows).dictionary_encode(),
        "durations": pyarrow.array(range(rows), pyarrow.duration("ns")),
        "large": pyarrow.array([2**63] * rows, pyarrow.uint64()),
    }
    column = kinds[rng.choice(sorted(kinds))]
    table = table.set_column(table.column_names.index(name), name, column)
    if rng.random() < 0.2:
        table = table.slice(0, 0)
    out = io.BytesIO()
    pyarrow.parquet.write_table(table, out)
    made = out.getvalue()
    return made.replace(name.encode(), b"\xff" * len(name)) if rng.random() < 0.2 else made


ALTERED = {
    ".json": lambda rng, content: altered(rng, json.loads(content)).encode("utf-8", "ignore"),
    ".safetensors": resaved,
    ".npy": another_shape,
    ".npz": another_archive,
    ".csv": another_table,
    ".tsv": another_table,
    ".parquet": another_parquet,
}


def mutated(rng, files, targets):
    """A folder of files, by name, with one of the targets damaged or altered."""
    name = rng.choice([name for name in files if name.endswith(targets)])
    change = ALTERED[Path(name).suffix] if rng.random() < 0.6 else damaged
    files = {**files, name: change(rng, files[name])}
    lists = [one for one in files if one.endswith(("manifest.json", "journal.json"))]
    if lists and name not in lists and rng.random() < 0.7:  # whoever lies mends the checksums, too
        files[lists[0]] = mended(files[lists[0]], Path(name).name, files[name])
    return files


def mended(content, name, changed):
    """A manifest or journal that agrees with a file that was changed."""
    document = json.loads(content)
    for path in list(places(document)):
        if path and path[-1] == "file":
            part = document
            for key in path[:-1]:
                part = part[key]
            if part["file"] == name:
                part.update(bytes=len(changed), sha256=sha256(changed).hexdigest())
    return json.dumps(document).encode()


# --- good files, and what becomes of them ---


def contents_of(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def world(seed=0):
    draw = torch.Generator().manual_seed(seed)
    head = nn.Linear(WIDTH, CLASSES)
    with torch.no_grad():
        head.weight.copy_(2 * torch.randn(CLASSES, WIDTH, generator=draw))
        head.bias.zero_()
        features = torch.randn(ROWS, WIDTH, generator=draw)
        logits = head(features)
    noise = -torch.rand(ROWS, CLASSES, generator=draw).log()
    labels = (0.5 * logits - noise.log()).argmax(1)
    return Batch(logits, labels, features), head


class Forked(nn.Module):
    """A network for the collection: the features as they are, and a head."""

    def __init__(self, head):
        super().__init__()
        self.flat, self.head = nn.Flatten(), head

    def forward(self, inputs):
        """Logits."""
        return self.head(self.flat(inputs))


class Broken(TensorDataset):
    """Rows of which the last cannot be read, so that a collection ends early."""

    def __getitem__(self, index):
        if index == ROWS - 1:
            raise KeyboardInterrupt
        return super().__getitem__(index)


def splits_of():
    draw = torch.Generator().manual_seed(0)

    def images(rows):
        pixels = torch.randint(256, (rows, 4, 4, 3), generator=draw, dtype=torch.uint8)
        return Images(pixels, torch.arange(rows) % CLASSES)

    parts = {"train": images(12), "val": images(6), "test": images(6), "held_out": images(6)}
    names = tuple("abc"[:CLASSES])
    return Splits(
        name="made", class_names=names, train_index=torch.arange(12), val_index=None, **parts
    )


def run_of(folder):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, CLASSES))
    half = Normalisation((0.5,) * 3, (0.25,) * 3)
    recipe = Recipe(epochs=2, batch=6, seed=1)
    return model, train(model, splits_of(), AdaFocal(bins=3), recipe, normalise=half, folder=folder)


def one_table(mark, name=str):
    batch, _ = world()
    rows = [mark.join(["label", *(f"logit_c{i}" for i in range(CLASSES))])]
    rows += [
        mark.join([name(y), *map(str, z)])
        for z, y in zip(batch.logits.tolist(), batch.labels.tolist(), strict=True)
    ]
    return "\n".join(rows).encode()


class Readers:
    """Every reader by name: its good files and what is done with a folder of them."""

    def __init__(self, folder, recipes=METHODS_SAVED):
        self.folder = folder
        self.batch, self.head = world()
        (folder / "good").mkdir()
        write_pack(
            folder / "good" / "pack",
            {"val": self.batch, "test": self.batch},
            head=self.head,
            class_names=["a", "b", "c"],
            shard_rows=40,
        )
        self.pack = Pack.open(folder / "good" / "pack")
        arrays = {"val_logits": self.batch.logits.numpy(), "val_labels": self.batch.labels.numpy()}
        with_head = {
            "val_features": self.batch.features.numpy(),
            "val_labels": arrays["val_labels"],
            "weight": self.head.weight.detach().numpy(),
            "class_names": np.array(["a", "b", "c"]),
            "meta": np.array('{"dataset": "made", "n": [1, {"a": 2}]}'),
        }
        packed = io.BytesIO()
        np.savez_compressed(packed, **with_head)
        npy = {}
        for key, value in arrays.items():
            out = io.BytesIO()
            np.save(out, value)
            npy[f"{key}.npy"] = out.getvalue()
        tensors = {key: torch.from_numpy(value) for key, value in arrays.items()}
        texts = {"class_names": '["a", "b", "c"]', "meta": '{"dataset": "made", "n": [1, 2]}'}
        plain, lists = io.BytesIO(), io.BytesIO()
        columns = {f"logit_c{i}": arrays["val_logits"][:, i] for i in range(CLASSES)}
        pyarrow.parquet.write_table(
            pyarrow.table({**columns, "label": arrays["val_labels"]}), plain
        )
        pyarrow.parquet.write_table(
            pyarrow.table({"logits": list(arrays["val_logits"]), "label": arrays["val_labels"]}),
            lists,
        )
        pack = contents_of(self.pack.path)
        shards = tuple(name for name in pack if name.startswith(("val", "test")))
        run_of(self._made("run"))
        self.good = {
            "calibrator": (
                [{"c.safetensors": one} for one in self._calibrators(recipes)],
                ".safetensors",
            ),
            "pack manifest": ([pack], "manifest.json"),
            "pack shard": ([pack], shards),
            "pack head": ([pack], "head.safetensors"),
            "npz": ([{"val.npz": packed.getvalue()}], ".npz"),
            "npy": ([npy], ".npy"),
            "safetensors": ([{"val.safetensors": save(tensors, texts)}], ".safetensors"),
            "csv": ([{"val.csv": one_table(",", lambda y: f"c{y}")}], ".csv"),
            "tsv": ([{"val.tsv": one_table("\t")}], ".tsv"),
            "parquet": ([{"val.parquet": one.getvalue()} for one in (plain, lists)], ".parquet"),
            "checkpoint": ([contents_of(folder / "good" / "run")], ".safetensors"),
            "run.json": ([{"run.json": self._record()}], ".json"),
            "journal": ([self._begun()], ("journal.json", ".safetensors")),
        }
        live = SimpleNamespace(
            checked=parse,
            answer=lambda recipe, beside: {"recipe": repr(parse(recipe)), "beside": len(beside)},
        )
        self.errors = io.StringIO()
        self.server = Explorer("<p>", live)
        threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()
        self.texts = {
            "recipe": (recipe_texts(), self._recipe),
            "loss": (calls(LOSSES) | st.text(max_size=60), parse_loss),
            "HTTP request": (requests(), self._ask),
        }
        for name in ("pack manifest", "run.json", "journal"):
            self.texts[name] = (json_documents(), self._replacing(name))
        self.names = sorted({*self.good, *self.texts})
        for name, (folders, _) in self.good.items():
            for files in folders:
                self.read(name, files)  # what is good must load

    def _made(self, name):
        made = self.folder / "good" / name
        made.mkdir(exist_ok=True)
        return made

    def _calibrators(self, recipes):
        path = self.folder / "good" / "c.safetensors"
        for recipe in recipes:
            with warnings.catch_warnings(action="ignore"):
                fitted = parse(recipe).fit(self.batch, self.head, mode="sequential")
            yield featcal.save(fitted, path, overwrite=True).read_bytes()

    def _record(self):
        folder = self._made("finished")
        model, history = run_of(folder)
        facts = {"loss": "adafocal", "recipe": {"epochs": 2}, "rows": {"train": 12}}
        write_run(folder, model, history, facts)
        return (folder / "run.json").read_bytes()

    def _loaders(self, kind=TensorDataset):
        rows = kind(self.batch.features, self.batch.labels)
        return {"val": DataLoader(rows, batch_size=10)}

    def _begun(self):
        out = self.folder / "good" / "collected"
        with contextlib.suppress(KeyboardInterrupt):
            collect_pack(Forked(self.head), self._loaders(Broken), out, shard_rows=20, head="head")
        return contents_of(partial_of(out))

    def _replacing(self, name):
        """A reader of texts in the place of the one JSON file among good ones."""
        ((files, *_), _) = self.good[name]
        (file,) = (file for file in files if file.endswith(".json"))
        return lambda text: self.read(name, {**files, file: text.encode()})

    def read(self, name, files):
        """Reads a folder of files, and uses what it holds; whatever is raised is for the caller."""
        place = Path(tempfile.mkdtemp(dir=self.folder))
        folder = place / "work"
        try:
            for file, content in files.items():
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                (folder / file).write_bytes(content)
            self._use(name, folder)
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def _use(self, name, folder):
        files = sorted(folder.iterdir())
        if name == "calibrator":
            calibrator = load_for(files[0], self.pack)
            found = calibrator(self.batch.features, self.head).softmax(1)
            assert bool(found.isfinite().all()), "probabilities are not finite"
            if calibrator.report is not None:
                json.dumps(calibrator.report.as_json(), allow_nan=False)
                fitted_text([calibrator.report])
            assert repr(calibrator), str(calibrator)
        elif name.startswith("pack"):
            pack = Pack.open(folder)
            json.dumps(pack.summary(), allow_nan=False)
            for split in pack.splits:
                parse("temperature").fit(pack.split(split), pack.head)
        elif name == "checkpoint":
            run_of(folder)
            History.read(folder)
        elif name == "run.json":
            json.dumps(History.read(folder).as_json(), allow_nan=False)
        elif name == "journal":
            partial = partial_of(folder.with_name("out"))
            folder.rename(partial)
            collect_pack(
                Forked(self.head),
                self._loaders(),
                folder.with_name("out"),
                shard_rows=20,
                head="head",
            )
        else:
            kind = "logits" if name in ("csv", "tsv") else None
            read_files(files, kind=kind)
            if name in ("npz", "parquet"):
                import_files(files, folder / "pack")

    def _recipe(self, text):
        made = parse(text)
        assert repr(parse(repr(made))) == repr(made), "the recipe does not come back"

    def _ask(self, request):
        """Sends bytes to the explorer; an answer with an error is a refusal."""
        before = self.errors.tell()
        address = self.server.server_address
        with (
            contextlib.redirect_stderr(self.errors),
            socket.create_connection(address, SECONDS / 2) as to,
        ):
            with contextlib.suppress(OSError):
                to.sendall(request)
                to.shutdown(socket.SHUT_WR)
            answer = b""
            with contextlib.suppress(OSError):
                while part := to.recv(2**16):
                    answer += part
        assert self.errors.tell() == before, self.errors.getvalue()[before:][-2000:]
        status = answer[9:12]
        assert not status.startswith(b"5") or status in (b"501", b"505"), answer[:300]
        if status != b"200" or b'"error"' in answer:
            raise InputError(f"status {status.decode()}")


# --- texts that hypothesis makes up ---


LINES = (
    "POST /recipe HTTP/1.1;GET / HTTP/1.1;GET /x HTTP/1.0;POST / HTTP/9.9;PUT /recipe HTTP/1.1;"
    f"GET;;HEAD / HTTP/1.1;GET /{'a' * 70_000} HTTP/1.1"
).split(";")
HOSTS = ("127.0.0.1", "localhost:1", "evil.example", "", "127.0.0.1\r\nX: " + "y" * 300)
LENGTHS = ("", *f"0 5 -1 65536 65537 +7 1e3 \u0663 {'9' * 5000}".split())
LITERALS = f"() (1,) {{[]:1}} 1+1 __import__('os') ''' 0x{'f' * 1900} {'9' * 5000}".split()
OPTIONS = (
    *("bins", "partitions", "hidden", "ridge", "criterion", "reference", "terms", "seed", "groups"),
    *("layers", "knots", "top", "neighbours", "penalty", "restarts", "references", "min_rows"),
    *("min_accuracy", "gamma", "low", "high", "gammas", "reduction", "share", "start"),
)
KEYS = (
    *("format", "version", "splits", "head", "epochs", "settings", "shards", "rows", "val"),
    *("dtypes", "x", "recipe", "beside"),
)


def json_documents():
    leaves = st.one_of(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
        st.sampled_from(ODD),
    )
    several = st.sampled_from(KEYS)
    return st.recursive(
        leaves,
        lambda one: st.lists(one, max_size=4) | st.dictionaries(several, one, max_size=6),
        max_leaves=20,
    ).map(json.dumps)


def calls(known):
    """Names, with arguments or without."""
    odd = st.sampled_from(ODD) | st.integers() | st.floats() | st.text(max_size=8)
    value = odd.map(repr) | st.sampled_from(LITERALS)
    key = st.sampled_from(OPTIONS) | st.text(max_size=6)
    arguments = st.lists(st.tuples(key, value).map("=".join), max_size=3).map(", ".join)
    name = st.sampled_from(sorted(known)) | st.text(max_size=10)
    return name | st.tuples(name, arguments).map(lambda two: f"{two[0]}({two[1]})")


def recipe_texts():
    several = st.lists(calls(METHODS), min_size=1, max_size=5).map(" | ".join)
    many = st.builds(lambda one, n: "|".join([one] * n), calls(METHODS), st.integers(2, 400))
    deep = st.sampled_from(("(" * 999, "-" * 1500 + "1", "clip(" * 300))
    return several | many | deep | st.text(max_size=60)


def requests():
    asked = recipe_texts().map(lambda text: json.dumps({"recipe": text}))
    body = json_documents() | asked | st.text(max_size=40)
    kinds = ("application/json", "text/plain", "", "application/json; charset=x", "\xff")

    def request(line, host, kind, body, length):
        body = body.encode("utf-8", "replace")
        size = len(body) if length is None else length
        head = f"{line}\r\nHost: {host}\r\nContent-Type: {kind}\r\nContent-Length: {size}\r\n\r\n"
        return head.encode("utf-8", "replace") + body

    some = st.sampled_from
    made = st.builds(
        request, some(LINES), some(HOSTS), some(kinds), body, st.none() | some(LENGTHS)
    )
    return made | st.binary(max_size=200)


# --- the count ---


def ended(read, given):
    """How reading an input ends: "loaded", "refused", or what else became of it."""

    def stop(*_):
        raise TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        with warnings.catch_warnings(action="ignore"):
            read(given)
        how = "loaded"
    except InputError as error:
        hidden = "\n" in str(error) or "allocat" in str(error)  # memory that torch was refused
        how = f"badly refused: {error}" if hidden else "refused"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        how = "".join(traceback.format_exception(error)[-3:])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held) * 1024
    return how if grown <= MEMORY else f"{how}: and {grown} bytes of memory"


def counted(readers, name, inputs, seed):
    """The ends of so many inputs of a reader, and what failed with how it did."""
    ends, failures = Counter(), []
    rng = random.Random(f"{seed} {name}")

    def take(read, given):
        how = ended(read, given)
        ends[how if how in ENDS else "failed"] += 1
        if how not in ENDS:
            failures.append((given, how))

    if name in readers.good:
        folders, targets = readers.good[name]
        share = inputs if name not in readers.texts else inputs * 4 // 5
        for _ in range(share):
            files = mutated(rng, rng.choice(folders), targets)
            take(lambda given: readers.read(name, given), files)
        inputs -= share
    if name in readers.texts:
        strategy, read = readers.texts[name]

        @hypothesis.seed(rng.randrange(2**32))
        @hypothesis.settings(
            max_examples=inputs,
            database=None,
            deadline=None,
            phases=[hypothesis.Phase.generate],
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(strategy)
        def given(text):
            take(read, text)

        given()
    return ends, failures


def keep(name, number, given, how):
    """Writes a failure and its input down, to be looked at and repeated."""
    folder = KEPT / "fuzz" / f"{name.replace(' ', '-')}-{number}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "traceback.txt").write_text(how, errors="backslashreplace")
    for file, content in (given if isinstance(given, dict) else {"input": given}).items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        content = content if isinstance(content, bytes) else content.encode(errors="replace")
        (folder / file).write_bytes(content)


def table_of(found):
    """The counts as Markdown, and how to repeat them."""
    ends, readers = (*ENDS, "failed"), found["readers"]
    total = {end: sum(one[end] for one in readers.values()) for end in ends}
    rows = [
        (name, *(f"{one[end]:,}" for end in ends))
        for name, one in [*readers.items(), ("all", total)]
    ]
    heads = ("reader", "loaded, and used", "refused in one sentence", "anything else")
    return (
        f"`make fuzz`, seed {found['seed']}, {found['minutes']:.0f} minutes on Python "
        f"{found['python']}: {sum(total.values()):,} inputs, each with {SECONDS} seconds and "
        f"{MEMORY // 2**20} MiB at most. Good files with bits,\nbytes, lengths, fields and tensors "
        "changed, their checksums mended or not, and texts that hypothesis makes up. What loads is "
        "used: a\ncalibrator predicts, a pack is fitted to, a checkpoint is trained on. The "
        "numbers are in [results/fuzz.json](../results/fuzz.json).\n\n"
    ) + Table("", heads, tuple(rows)).markdown()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=10, help="of all readers together")
    parser.add_argument("--inputs", type=int, help="of each reader, in place of minutes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", help="readers; nothing is written then")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    room = pages * resource.getpagesize() + 2**33
    resource.setrlimit(resource.RLIMIT_AS, (room, room))  # the machine is not to suffer
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        readers = Readers(Path(scratch))
        names = asked.only or readers.names
        ends, failures = {name: Counter() for name in names}, 0
        for part in itertools.count():
            for name in names:
                size = BATCH if asked.inputs is None else min(BATCH, asked.inputs - part * BATCH)
                more, failed = counted(readers, name, size, f"{asked.seed} {part}")
                ends[name] += more
                for given, how in failed:
                    failures += 1
                    if failures <= 100:
                        keep(name, failures, given, how)
                        print(name, failures, how.strip().splitlines()[-1][:200], file=sys.stderr)
            done = sum(ends[names[-1]].values())
            minutes = (time.monotonic() - started) / 60
            if minutes >= asked.minutes if asked.inputs is None else done >= asked.inputs:
                break
    found = {
        **{"seed": asked.seed, "minutes": round(minutes, 1), "python": sys.version.split()[0]},
        "readers": {
            name: {end: one[end] for end in (*ENDS, "failed")} for name, one in ends.items()
        },
    }
    print(json.dumps(found, indent=1))
    if asked.only is None:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
        DOCS.write_text(fill(DOCS.read_text(), {"fuzz": table_of(found)}, START))
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
