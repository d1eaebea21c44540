"""Putting a checkpoint's files in place: written aside, then moved over, so that a crash leaves what was there before."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path

from ..errors import CheckpointError
from .source import INDEX_NAME, SINGLE_NAME
from .writer import PlannedTensor

PARTIAL = ".autotp-partial"  # subdirectory in which a save is written before its files are put in place
_SHARD_FILE = re.compile(r"model(-\d+)?-\d{5}-of-\d{5}\.safetensors")
_UNITS = {"": 1, "B": 1}
_UNITS |= {unit + "B": 1000**power for power, unit in enumerate("KMGT", 1)}
_UNITS |= {unit + "IB": 1024**power for power, unit in enumerate("KMGT", 1)}


def parse_size(size: int | str) -> int:
    """Bytes of a size such as 5000000, "5GB" or "2GiB".

    Raises:
        CheckpointError: it is no such size.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
    value = int(float(found[1]) * _UNITS[found[2].upper()]) if found and found[2].upper() in _UNITS else 0
    if value <= 0:
        raise CheckpointError(f"max_shard_size {size!r} is not a number of bytes, nor one with a unit such as '5GB' or '500MiB'")
    return value


@contextmanager
def write_aside(directory: Path, needed: int, wait_s: float = 0) -> Iterator[Path]:
    """A subdirectory that everything is written into first, if the disk has `needed` bytes for it; gone at the end.

    Who else writes to the directory is waited for, `wait_s` long: what is there at the end is one checkpoint, the last.

    Raises:
        CheckpointError: it has not, the directory can't be written to, or someone else still writes to it.
    """
    partial = directory / PARTIAL
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handle = os.open(directory, os.O_RDONLY)
    except OSError as error:
        raise CheckpointError(_deny(directory, error)) from error
    try:
        _take_turn(directory, handle, wait_s)
        try:
            shutil.rmtree(partial, ignore_errors=True)  # left by a crash
            partial.mkdir()
        except OSError as error:
            raise CheckpointError(_deny(directory, error)) from error
        try:
            _check_room(directory, needed)
            yield partial
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    finally:
        fcntl.flock(handle, fcntl.LOCK_UN)  # said, as a process that was forked meanwhile has the handle too
        os.close(handle)


def _deny(directory: Path, error: OSError) -> str:
    return f"{directory} can't be written to ({error}): name a directory that can be"


def _take_turn(directory: Path, handle: int, wait_s: float) -> None:
    """Lock the open directory, which ends with the process at the latest; where no locks are, go on without."""
    until = time.monotonic() + wait_s
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                raise CheckpointError(
                    f"something else writes to {directory} now, and did for {wait_s:.0f} s: name another directory, or let one "
                    f"alone write there (of data-parallel replicas the one with is_main_process=True)"
                ) from None
        except OSError:
            return None
        time.sleep(0.02)


def _check_room(directory: Path, needed: int) -> None:
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise CheckpointError(
            f"{directory} has {free:,} bytes free, the checkpoint needs {needed:,} beside the one that is there. "
            f"Make room, or name another directory."
        )


def name_files(directory: Path, count: int) -> list[str]:
    """transformers' names; with a number in them where the directory's present checkpoint uses those, so it stays whole."""
    if count == 1:
        return [SINGLE_NAME]
    tag, number = "", 1
    while True:
        names = [f"model{tag}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
        if not any((directory / name).exists() for name in names):
            return names
        number += 1
        tag = f"-{number}"


def write_index(partial: Path, names: Sequence[str], files: Sequence[Sequence[PlannedTensor]]) -> None:
    """The index of several files, as transformers writes it; nothing for a single one."""
    if len(files) < 2:
        return
    tensors = [tensor for file in files for tensor in file]
    metadata = {"total_parameters": sum(prod(t.shape) for t in tensors), "total_size": sum(t.nbytes for t in tensors)}
    weight_map = {tensor.name: name for name, file in zip(names, files, strict=True) for tensor in file}
    index = {"metadata": metadata, "weight_map": weight_map}
    (partial / INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def put_in_place(partial: Path, directory: Path, names: Sequence[str]) -> None:
    """Move the files over; the index, or the single file, is last: it decides which checkpoint the directory holds.

    Files of an older checkpoint are removed after that, other files are left alone.
    """
    last = SINGLE_NAME if len(names) == 1 else INDEX_NAME
    move_files(partial, directory, [name for name in names if name != last], last)
    if last == INDEX_NAME:  # transformers prefers a single file to an index
        (directory / SINGLE_NAME).unlink(missing_ok=True)
    else:
        (directory / INDEX_NAME).unlink(missing_ok=True)
    for path in directory.iterdir():
        if _SHARD_FILE.fullmatch(path.name) and path.name not in names:
            path.unlink()


def move_files(partial: Path, directory: Path, first: Sequence[str], last: str) -> None:
    """Move all files of `partial` into `directory`: `first`, then the others, then `last`; on disk when this returns."""
    others = [path.name for path in partial.iterdir() if path.name != last and path.name not in first]
    for name in [*first, *others, last]:
        if (directory / name).is_dir():
            shutil.rmtree(directory / name)
        os.replace(partial / name, directory / name)
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
