"""Ctrl-C between two steps: half a step cannot be kept, a whole one can."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import final

# Ctrl-C; what Slurm and docker send before they kill; a terminal that was closed.
NAMES = ("SIGINT", "SIGTERM", "SIGHUP")
NUMBERS = [getattr(signal, name) for name in NAMES if hasattr(signal, name)]


@final
class Interrupts:
    """Whether somebody has asked the run to stop.

    Attributes:
        asked: True from the first signal on. A second one does not wait for the end of the step.
    """

    def __init__(self) -> None:
        self.asked = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Notes signals in the block instead of ending it; other threads never see one."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        found = {number: signal.getsignal(number) for number in NUMBERS}
        # What is ignored (nohup) stays so, and what is not Python's cannot be put back.
        before = {n: was for n, was in found.items() if was not in (signal.SIG_IGN, None)}

        def note(number: int, frame: FrameType | None) -> None:
            if self.asked:
                signal.signal(number, before[number])
                signal.raise_signal(number)
            self.asked = True

        for number in before:
            signal.signal(number, note)
        try:
            yield
        finally:
            for number, was in before.items():
                signal.signal(number, was)
