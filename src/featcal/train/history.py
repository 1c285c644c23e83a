"""What a run said of its epochs, read back from its folder."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from safetensors import SafetensorError

from featcal.core.disk import LOCK
from featcal.core.errors import InputError
from featcal.train.checkpoint import FILE as CHECKPOINT
from featcal.train.checkpoint import FORMAT, said_in
from featcal.train.epoch import Epoch
from featcal.train.folder import RECORD


@final
@dataclass(frozen=True)
class History:
    """The epochs of a run.

    Attributes:
        folder: of the run.
        loss: what it minimises, as text.
        planned: how many epochs it has in all.
        epochs: those that are over.
    """

    folder: Path
    loss: str
    planned: int
    epochs: tuple[Epoch, ...]

    @classmethod
    def read(cls, folder: Path | str) -> History:
        """That of a run which is finished, under way, or was killed.

        Raises:
            InputError: for a folder without a run, or one without an epoch that is over.
        """
        folder = Path(folder)
        if not os.path.isdir(folder):  # Path.is_dir raises where a name is too long
            raise InputError(f"{folder} is no folder: give that of a run of featcal train")
        loss, planned, epochs = _found_in(folder)
        if not epochs:
            raise InputError(f"{folder} has no epoch that is over: there is nothing to show yet")
        return cls(folder, loss, planned, epochs)

    def as_json(self) -> dict[str, Any]:
        """The public form."""
        return {
            **{"run": str(self.folder), "loss": self.loss, "planned": self.planned},
            "epochs": [epoch.as_json() for epoch in self.epochs],
        }


Found = tuple[str, int, tuple[Epoch, ...]]
UNREADABLE = (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError)


def _found_in(folder: Path) -> Found:
    """Loss, planned epochs and those that are over, by the record or by the checkpoint."""
    # The record comes before the checkpoint goes: a run that ends between two looks has the former.
    for file, read in ((RECORD, _recorded), (CHECKPOINT, _kept), (RECORD, _recorded)):
        try:
            return read(folder / file)
        except FileNotFoundError:
            continue
        except UNREADABLE as error:
            raise InputError(
                f"{folder / file} cannot be read ({type(error).__name__}: {error}): it is damaged, "
                "or of another version of featcal"
            ) from error
    if (folder / LOCK).exists():
        raise InputError(
            f"{folder} is of a run that has kept no checkpoint yet: look again when it has "
            "(--checkpoint-every)"
        )
    raise InputError(
        f"{folder} holds no run: give a folder that featcal train made, with {RECORD} or "
        f"{CHECKPOINT} in it"
    )


def _recorded(path: Path) -> Found:
    record = json.loads(path.read_text())
    epochs = tuple(map(Epoch.of_json, record["epochs"]))
    # `write_run` takes any facts, and a record from Python may have few.
    planned = record.get("recipe", {}).get("epochs", len(epochs))
    return str(record.get("loss", "?")), int(planned), epochs


def _kept(path: Path) -> Found:
    about = said_in(path)
    if about["format"] != FORMAT:
        raise ValueError(f"format {about['format']}, not {FORMAT}")
    settings = about["settings"]
    epochs = tuple(map(Epoch.of_json, about["position"]["history"]))
    return str(settings["loss"]), int(settings["recipe"]["epochs"]), epochs
