"""One job alone writes training states into a directory: two would remove, replace and go on from each other's."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
import weakref
from pathlib import Path

from ..errors import CheckpointError

LOCK = ".autotp-states.lock"  # stays in the directory; what counts is who holds a lock on it, which ends with the process


class DirectoryClaim:
    """What a process has on the directory that it saves states into, until it ends, or lets go.

    Several claims of one process share it, and the last one that goes lets others have it. Processes that are forked
    meanwhile (those of a DataLoader) have no part in it. Where the file system knows no locks, nothing is claimed.
    """

    def __init__(self) -> None:
        self._lock: _LockedFile | None = None

    def hold(self, directory: Path, wait_s: float) -> None:
        """Claim `directory`, in place of what was claimed before; wait for another process `wait_s` long.

        Raises:
            CheckpointError: another process has it, named.
            OSError: its lock file can't be written.
        """
        path = directory / LOCK
        if self._lock is None or not self._lock.is_at(path):
            self.release()
            self._lock = _lock_file(path, time.monotonic() + wait_s)

    def release(self) -> None:
        """Let others have it, unless this process has other claims on it."""
        self._lock = None


class _LockedFile:
    """An open file that this process has locked, until nothing refers to this object.

    The lock is flock's: it belongs to this opening of the file, and stays when the process opens and closes the file
    otherwise, as by copying the directory.
    """

    def __init__(self, file: int) -> None:
        self._file: int | None = file

    def is_at(self, path: Path) -> bool:
        """Whether it is the file at `path` still, and in the process that locked it."""
        try:
            return self._file is not None and os.path.samestat(os.fstat(self._file), path.stat())
        except FileNotFoundError:
            return False

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def __del__(self) -> None:
        self.close()


_held: weakref.WeakValueDictionary[tuple[int, int], _LockedFile] = weakref.WeakValueDictionary()  # by device and inode


def _leave_to_parent() -> None:
    """In a forked process: else the lock would last as long as this one, too."""
    for lock in list(_held.values()):
        lock.close()
    _held.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


def _lock_file(path: Path, until: float) -> _LockedFile:
    """The file at `path` locked by this process, at `until` of the monotonic clock at the latest."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        found = os.fstat(file)
        key = (found.st_dev, found.st_ino)
        if key in _held:
            os.close(file)
            return _held[key]
        if not _try_lock(file, until):
            raise CheckpointError(
                f"{_read_holder(file)} saves its training states to {path.parent} and still runs: two jobs would remove each "
                f"other's. Name another directory, or end that one first"
            )
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    except BaseException:
        os.close(file)
        raise
    _held[key] = lock = _LockedFile(file)
    return lock


def _read_holder(file: int) -> str:
    """What the process that has locked `file` wrote into it."""
    with contextlib.suppress(OSError):  # where locks keep others from reading
        return os.pread(file, 200, 0).decode(errors="replace") or "another process"
    return "another process"


def _try_lock(file: int, until: float) -> bool:
    """Whether no other process has a lock on the open `file`, at `until` of the monotonic clock at the latest."""
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except (BlockingIOError, PermissionError):
            if time.monotonic() >= until:
                return False
        except OSError:
            return True
        time.sleep(0.05)
