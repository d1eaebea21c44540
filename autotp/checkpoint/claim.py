"""One job alone writes training states into a directory: two would remove, replace and go on from each other's."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from pathlib import Path

from ..errors import CheckpointError

LOCK = ".autotp-states.lock"  # stays in the directory; what counts is who holds a lock on it, which ends with the process


class DirectoryClaim:
    """What a process has on the directory that it saves states into, until it ends, or lets go.

    A POSIX lock: processes that are forked meanwhile (those of a DataLoader) have no part in it, and several claims of one
    process do not shut each other out. Where the file system knows no locks, nothing is claimed.
    """

    def __init__(self) -> None:
        self._file: int | None = None

    def hold(self, directory: Path, wait_s: float) -> None:
        """Claim `directory`, in place of what was claimed before; wait for another process `wait_s` long.

        Raises:
            CheckpointError: another process has it, named.
        """
        path = directory / LOCK
        if self._file is None or not path.exists() or not os.path.samestat(os.fstat(self._file), path.stat()):
            self.release()
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        if not _lock(self._file, time.monotonic() + wait_s):
            other = os.pread(self._file, 200, 0).decode(errors="replace") or "another process"
            self.release()
            raise CheckpointError(
                f"{other} saves its training states to {directory} and still runs: two jobs would remove each other's. Name "
                f"another directory, or end that one first"
            )
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)

    def release(self) -> None:
        """Let others have it."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def __del__(self) -> None:
        self.release()


def _lock(file: int, until: float) -> bool:
    """Whether no other process has a lock on the open `file`, at `until` of the monotonic clock at the latest."""
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except (BlockingIOError, PermissionError):
            if time.monotonic() >= until:
                return False
        except OSError:
            return True
        time.sleep(0.05)
