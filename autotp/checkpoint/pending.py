"""The part of a save that writes: into a directory beside, in each rank alone, and the names changed at the end by one.

| file of `checkpoint-STEP` | holds |
|---|---|
| `__R_0.distcp` | the tensors that rank R wrote |
| `.metadata` | where each tensor's chunks lie, as `torch.distributed.checkpoint` has it |
| `state.json` | all that is no large tensor, the size of every file, and checksums of `.metadata` and itself; written last |

(Each tensor in a `.distcp` file has its checksums with it.)

A rank leaves a note of what it wrote in the directory, so that no collective is needed while the ranks compute.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
import zlib
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .dcp import METADATA, TensorWriter

ABOUT = "state.json"
PREFIX = "checkpoint-"
STRAY_S = 60  # for which the notes of other ranks are waited for when nothing else can tell that they come


class PendingSave:
    """A save that is agreed on and not yet done.

    Args:
        writer: agreed and, if the tensors may change meanwhile, staged.
        final: the directory's name to be.
        about: what `state.json` will hold beside the files.
        rank, size: of the ranks that save.
        keep_last: see `TrainingState.save`.
    """

    def __init__(self, writer: TensorWriter, final: Path, about: dict[str, Any], rank: int, size: int, keep_last: int) -> None:
        self.writer, self.final, self.about, self.rank, self.size = writer, final, about, rank, size
        self.keep_last = keep_last
        self.partial = partial_of(final)
        self.error: BaseException | None = None
        self.stop = threading.Event()
        self.written, self.all_written = threading.Event(), threading.Event()
        self.thread: threading.Thread | None = None
        self.finished = False

    def start(self, beside: bool) -> None:
        """Write this rank's file: now, or in a thread, which then finishes the save on rank 0."""
        if beside:
            self.thread = threading.Thread(target=self._run, name=f"saving {self.final}")
            self.thread.start()
        else:
            self._write()

    def _run(self) -> None:
        self._write()
        if self.error is None and self.rank == 0:
            try:
                self.finish()
            except BaseException as error:  # raised where the caller comes back
                self.error = error

    def _write(self) -> None:
        try:
            note = self.writer.write()
            _write_json(self.partial / _note_name(self.rank), note)
        except BaseException as error:  # raised where the caller comes back
            self.error = error
        finally:
            self.written.set()

    def raise_error(self) -> None:
        """Raise what went wrong on this rank, if anything did."""
        if self.error is not None:
            raise self.error

    def give_up(self) -> None:
        """Some rank failed: nothing is waited for any more, and what was written goes."""
        self.stop.set()
        if self.thread is not None:
            self.thread.join()
        if self.rank == 0 and not self.finished:
            shutil.rmtree(self.partial, ignore_errors=True)

    def complete(self) -> None:
        """On rank 0, after every rank has written: the directory has its name when this returns."""
        self.all_written.set()
        if self.thread is not None:
            self.thread.join()
            self.raise_error()
        if not self.finished:
            self.finish()

    def finish(self) -> None:
        """Wait for the notes, write what rank 0 writes, change the names, remove what is not kept."""
        notes = self._read_notes()
        self.writer.finish(notes)
        files = {METADATA, *(row[2] for note in notes for row in note)}
        sizes = {name: (self.partial / name).stat().st_size for name in sorted(files)}
        for rank in range(self.size):
            (self.partial / _note_name(rank)).unlink()
        sums = {METADATA: zlib.crc32((self.partial / METADATA).read_bytes())}
        about = {**self.about, "files": sizes, "crc32": sums}
        _write_json(self.partial / ABOUT, {**about, "own_crc32": sum_json(about)})
        old = old_of(self.final)
        shutil.rmtree(old, ignore_errors=True)
        if self.final.exists():
            self.final.rename(old)
        self.partial.rename(self.final)
        sync_directory(self.final.parent)
        self.finished = True
        shutil.rmtree(old, ignore_errors=True)
        remove_older(self.final, self.keep_last)

    def _read_notes(self) -> list[Any]:
        """Every rank's note; while ranks compute there is no other word of them than their files."""
        until = None
        paths = [self.partial / _note_name(rank) for rank in range(self.size)]
        while missing := [path.name for path in paths if not path.exists()]:
            if self.all_written.is_set() or not threading.main_thread().is_alive():
                until = until or time.monotonic() + STRAY_S
            if self.stop.is_set() or (until is not None and time.monotonic() > until):
                raise CheckpointError(
                    f"{missing} of other ranks are not in {self.partial}: the directory must be one that all ranks share"
                )
            time.sleep(0.02)
        return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


# -- names ----------------------------------------------------------------------------------------------------------------


def partial_of(final: Path) -> Path:
    """Where a save is written before it has its name."""
    return final.with_name(f".{final.name}.partial")


def old_of(final: Path) -> Path:
    """What a state of the same step is called while it is replaced."""
    return final.with_name(f".{final.name}.old")


def find_steps(directory: Path) -> dict[int, Path]:
    """The states in `directory` by step, newest first; one that was being replaced counts if its successor is not there."""
    found: dict[int, Path] = {}
    names = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
    for name in names:  # the dot comes before letters: a state with its own name wins
        match = re.fullmatch(rf"\.{PREFIX}(\d+)\.old|{PREFIX}(\d+)", name)
        if match:
            found[int(match[1] or match[2])] = directory / name
    return dict(sorted(found.items(), reverse=True))


def find_partial(directory: Path) -> dict[int, Path]:
    """What saves that did not come to their end left, by step, newest first."""
    found = {path.name.split(".")[1].removeprefix(PREFIX): path for path in directory.glob(f".{PREFIX}*.partial")}
    return {int(step): found[step] for step in sorted(filter(str.isdigit, found), key=int, reverse=True)}


def remove_older(newest: Path, keep_last: int) -> None:
    """Remove the states of steps before `newest`'s but the last `keep_last`, itself among them; 0 keeps all."""
    step = int(newest.name.removeprefix(PREFIX))
    before = [path for number, path in find_steps(newest.parent).items() if number <= step and (path / ABOUT).exists()]
    for path in before[keep_last:] if keep_last else ():
        gone = old_of(path).with_suffix(".gone")  # in one step, so that no half of it bears the name
        path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def clean_up(final: Path) -> None:
    """Remove what earlier saves left half done, or end it; on rank 0, before a save."""
    for path in final.parent.glob(f".{PREFIX}*.old"):
        if not (own := path.with_name(path.name[1:].removesuffix(".old"))).exists():
            path.rename(own)
    for ending in ("partial", "gone", "old"):
        for path in final.parent.glob(f".{PREFIX}*.{ending}"):
            shutil.rmtree(path, ignore_errors=True)


def sum_json(value: Any) -> int:
    """CRC-32 of what stands in a JSON file, whatever its spaces."""
    return zlib.crc32(json.dumps(value).encode())


# -- files ----------------------------------------------------------------------------------------------------------------


def _note_name(rank: int) -> str:
    return f"note-{rank}.json"


def _write_json(path: Path, value: Any) -> None:
    aside = path.with_name(path.name + ".tmp")
    with aside.open("w", encoding="utf-8") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Bring names that were changed to the disk, where the system can."""
    try:
        number = os.open(directory, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(number)
    except OSError:
        pass
    finally:
        os.close(number)
