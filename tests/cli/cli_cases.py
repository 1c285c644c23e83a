"""A small overconfident network on disk, and the command line called in this process."""

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass

import numpy as np
import pytest

from featcal.cli import main


@dataclass(frozen=True)
class Ran:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self):
        """The one object on standard output, read strictly."""
        return json.loads(self.out, parse_constant=_refuse)


def _refuse(text):
    raise ValueError(f"{text} is not JSON")


def featcal(*args):
    """Runs a command; anything but a clean exit is the test's to see."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main([str(arg) for arg in args])
    except SystemExit as end:
        return Ran(end.code, out.getvalue(), err.getvalue())
    raise AssertionError("main returned without an exit code")


def done(*args):
    """Runs a command that must succeed and say nothing on stderr."""
    ran = featcal(*args)
    assert (ran.code, ran.err) == (0, ""), ran
    return ran


def encoded(monkeypatch, encoding, *args):
    """What a command that must succeed writes to a standard output of an encoding."""
    written = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", written)
        with pytest.raises(SystemExit) as end:
            main([str(arg) for arg in args])
    assert end.value.code == 0
    written.flush()
    return written.buffer.getvalue().decode(encoding)


def refused(*args):
    """Runs a command that must be refused: exit code 2, one sentence on stderr, nothing else."""
    ran = featcal(*args)
    assert ran.code == 2, ran
    assert ran.out == ""
    assert ran.err.startswith("Error: ")
    assert ran.err.count("\n") == 1, ran.err
    assert "Traceback" not in ran.err
    assert "Usage" not in ran.err
    return ran.err


def tree(folder):
    """Every file below a folder with its bytes, hidden ones too."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def arrays(*, val=240, test=300, d=6, k=4, seed=0):
    """Features with outliers the labels know nothing of, so that clip and temperature both act."""
    draw = np.random.default_rng(seed)
    weight = draw.normal(size=(k, d)).astype(np.float32)
    bias = draw.normal(size=k).astype(np.float32)
    made = {"weight": weight, "bias": bias}
    for split, rows in (("val", val), ("test", test)):
        features = np.maximum(draw.standard_t(3, size=(rows, d)), 0).astype(np.float32)
        true = np.minimum(features, 1) @ weight.T + bias
        made[f"{split}_features"] = features
        made[f"{split}_labels"] = (true + draw.gumbel(size=true.shape)).argmax(1)
    return made


def logits_alone(**sizes):
    """The logits of the same network, without features and head."""
    made = arrays(**sizes)
    return {
        key: value
        for split in ("val", "test")
        for key, value in (
            (f"{split}_logits", made[f"{split}_features"] @ made["weight"].T + made["bias"]),
            (f"{split}_labels", made[f"{split}_labels"]),
        )
    }


def save(path, made):
    """The arrays as an .npz file."""
    np.savez(path, **made)
    return path


def packed(folder, made, name="pack"):
    """The arrays as a pack, by the command a user has for it."""
    file = save(folder / f"{name}.npz", made)
    done("pack", "import", file, "-o", folder / name)
    return folder / name
