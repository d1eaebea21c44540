"""Files written by a thread, so that the tensors that come next are gathered meanwhile."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from .writer import PlannedTensor, SafetensorsWriter

_MOST_BYTES = 1 << 28  # that wait to be written


class BackgroundWriter:
    """Writes the tensors that it is given into safetensors files, one file after the other, while its caller goes on.

    What waits to be written is at most 256 MB, or one tensor. What goes wrong is raised by the next `put`, or at the end.

    Args:
        files: what each file will hold; tensors must come file by file.
    """

    def __init__(self, files: Mapping[Path, Sequence[PlannedTensor]]) -> None:
        self._files = files
        self._file_of = {tensor.name: path for path, file in files.items() for tensor in file}
        self._waiting: deque[tuple[str, Tensor] | None] = deque()
        self._bytes = 0
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="autotp-writer", daemon=True)

    def __enter__(self) -> BackgroundWriter:
        if self._files:
            self._thread.start()
        return self

    def __exit__(self, exc_type: Any, *_: Any) -> None:
        """Wait until all is on the disk; after an error, only until the tensor at hand is written."""
        if not self._files:
            return
        with self._changed:
            if exc_type is not None:
                self._waiting.clear()
                self._error = self._error or InterruptedError("stopped")
            self._waiting.append(None)
            self._changed.notify_all()
        self._thread.join()
        if exc_type is None and self._error is not None:
            raise self._error

    def put(self, name: str, full: Tensor) -> None:
        """Take a whole tensor to be written; wait while too much is waiting.

        Raises:
            OSError, CheckpointError: what came before could not be written.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or not self._bytes or self._bytes + full.nbytes <= _MOST_BYTES)
            if self._error is not None:
                raise self._error
            self._waiting.append((name, full))
            self._bytes += full.nbytes
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            for path, file in self._files.items():
                with SafetensorsWriter(path, file) as writer:
                    for _ in file:
                        self._write_next(writer)
            self._next()  # the end
        except BaseException as error:  # raised where the caller is
            with self._changed:
                self._error = self._error or error
                self._waiting.clear()
                self._changed.notify_all()

    def _write_next(self, writer: SafetensorsWriter) -> None:
        item = self._next()
        if item is None:
            raise self._error or InterruptedError("stopped")
        name, full = item
        writer.write(name, full)
        with self._changed:
            self._bytes -= full.nbytes
            self._changed.notify_all()

    def _next(self) -> tuple[str, Tensor] | None:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._waiting))
            return self._waiting.popleft()
