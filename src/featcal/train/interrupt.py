"""Ctrl-C between two steps: half a step cannot be kept, a whole one can."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import final


@final
class Interrupts:
    """Whether somebody has asked the run to stop.

    Attributes:
        asked: True from the first Ctrl-C on. A second one does not wait for the end of the step.
    """

    def __init__(self) -> None:
        self.asked = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Notes Ctrl-C in the block instead of raising; other threads never see one."""
        before = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or not callable(before):
            yield
            return

        def note(number: int, frame: FrameType | None) -> None:
            if self.asked:
                before(number, frame)
            self.asked = True

        signal.signal(signal.SIGINT, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
