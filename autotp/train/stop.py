"""What ends a run before its last step: a signal, or a number that is none."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from ..errors import AutoTPError


class TrainInterrupted(AutoTPError):
    """The run was stopped (Ctrl-C, SIGTERM): it is saved, and the message says how to resume.

    Attributes:
        step: steps that are done.
        checkpoint: the directory to resume from.
    """

    def __init__(self, step: int, checkpoint: str) -> None:
        super().__init__(step, checkpoint)
        self.step, self.checkpoint = step, checkpoint

    def __str__(self) -> str:
        return f"interrupted after step {self.step} and saved: go on with --resume {self.checkpoint}"


class NonFiniteLossError(AutoTPError):
    """The loss, or the norm of the gradients, is not a finite number; the step was not taken.

    Attributes:
        step: the step, from 1.
        batch: number of the micro-batch in the run, from 0, over all data ranks; of the step's first for a norm.
    """

    def __init__(self, message: str, step: int, batch: int) -> None:
        super().__init__(message, step, batch)
        self.step, self.batch = step, batch

    def __str__(self) -> str:
        return str(self.args[0])


class StopSignals:
    """Notes SIGINT and SIGTERM instead of dying of them, inside a `with` block of the main thread.

    A second SIGINT raises KeyboardInterrupt. SIGTERM is only noted, however often: a launcher that is interrupted sends it
    after the terminal's SIGINT.

    Attributes:
        seen: whether one came.
    """

    def __init__(self) -> None:
        self.seen = False
        self._interrupts = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.seen = True
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            raise KeyboardInterrupt
