"""Safetensors files written tensor by tensor: the header is known before the first one comes."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from .header import CHECKSUMS, DTYPES, spell_checksums, sum_entries

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_CHUNK_BYTES = 1 << 24  # written and summed at a time, so that the second reads what the first left in the cache


@dataclass(frozen=True)
class PlannedTensor:
    """A whole tensor to be written: its dtype and shape, and where its bytes lie behind the header of its file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * self.dtype.itemsize


def plan_tensor(name: str, dtype: torch.dtype, shape: Sequence[int]) -> PlannedTensor:
    """A tensor to be written, if a file can hold its dtype.

    Raises:
        CheckpointError: it can't.
    """
    if dtype not in DTYPE_NAMES:
        raise CheckpointError(f"'{name}' has dtype {dtype}, which safetensors files can't hold: convert the model first")
    return PlannedTensor(name, dtype, tuple(shape))


def cut_files(tensors: Sequence[PlannedTensor], max_bytes: int) -> list[list[PlannedTensor]]:
    """`tensors` in their order, cut into files of at most `max_bytes`; a larger tensor gets a file of its own."""
    files: list[list[PlannedTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if files[-1] and size + tensor.nbytes > max_bytes:
            files.append([])
            size = 0
        files[-1].append(tensor)
        size += tensor.nbytes
    return [place_tensors(file) for file in files]


def place_tensors(file: Sequence[PlannedTensor]) -> list[PlannedTensor]:
    """The same tensors with their offsets: wide dtypes first, so that every tensor lies at a multiple of its item size."""
    begin, begins = 0, {}
    for tensor in sorted(file, key=lambda t: -t.dtype.itemsize):
        begins[tensor.name] = begin
        begin += tensor.nbytes
    return [replace(t, begin=begins[t.name]) for t in file]


class SafetensorsWriter:
    """One safetensors file; its tensors are written straight to their place, in any order, and their checksums noted.

    Args:
        path: the file, made anew.
        file: what it will hold, as `place_tensors` gives it.
    """

    def __init__(self, path: Path, file: Sequence[PlannedTensor], metadata: Mapping[str, str] | None = None) -> None:
        self.path = path
        self._left = {tensor.name: tensor for tensor in file}
        self._order = [t.name for t in sorted(file, key=lambda t: (t.begin, t.begin + t.nbytes, t.name))]
        self._metadata = dict(metadata or {"format": "pt"})
        self._entries = {t.name: _describe(t) for t in sorted(file, key=lambda t: t.begin)}
        self._crcs: dict[str, int] = dict.fromkeys(self._order, 0)
        self._header = self._encode_header()
        self._size = len(self._header) + sum(tensor.nbytes for tensor in file)
        self._file = path.open("wb")

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, exc_type: Any, *_: Any) -> None:
        try:
            if exc_type is None:
                self._finish()
        finally:
            self._file.close()

    def write(self, name: str, full: Tensor) -> None:
        """Write one tensor; where it is on a GPU, it goes through the host's memory.

        Raises:
            CheckpointError: it has another shape or dtype than planned, or comes twice.
            OSError: the disk is full, or gone.
        """
        planned = self._left.pop(name, None)
        if planned is None or full.dtype != planned.dtype or tuple(full.shape) != planned.shape:
            wanted = "nothing more" if planned is None else f"{planned.dtype} {planned.shape}"
            raise CheckpointError(
                f"'{name}' changed while it was saved: it came as {full.dtype} {tuple(full.shape)}, "
                f"{self.path.name} takes {wanted}"
            )
        flat = full.detach().to("cpu").contiguous().reshape(-1)
        self._file.seek(len(self._header) + planned.begin)
        self._crcs[name] = self._write_bytes(flat.view(torch.uint8).numpy().data if flat.numel() else b"")

    def _write_bytes(self, data: Any) -> int:
        crc = 0
        for start in range(0, len(data), _CHUNK_BYTES):
            chunk = data[start : start + _CHUNK_BYTES]
            self._file.write(chunk)
            crc = zlib.crc32(chunk, crc)
        return crc

    def _encode_header(self) -> bytes:
        """The header with the checksums that are known so far; its length does not depend on them."""
        crcs = [sum_entries(self._entries), *(self._crcs[name] for name in self._order)]
        header = {"__metadata__": {**self._metadata, CHECKSUMS: spell_checksums(crcs)}, **self._entries}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    def _finish(self) -> None:
        if self._left:
            raise CheckpointError(f"'{next(iter(self._left))}' did not come: the model was changed while it was saved")
        self._file.seek(0)
        self._file.write(self._encode_header())
        self._file.truncate(self._size)
        self._file.flush()
        os.fsync(self._file.fileno())


def _describe(tensor: PlannedTensor) -> dict[str, Any]:
    offsets = [tensor.begin, tensor.begin + tensor.nbytes]
    return {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
