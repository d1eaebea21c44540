"""What checkpoint files say of themselves, believed only after it was checked: headers of safetensors files, and indexes.

A checkpoint may come from anyone. Everything here reads a few kilobytes, compares every number with the file's real length,
and names the file that lies before a tensor is allocated.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch

from ..errors import CheckpointError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
CHECKSUMS = "autotp_crc32"  # in a file's metadata: CRC-32 of the header's entries, then of each tensor's bytes, as they lie
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_MAX_DIMS = 64  # torch's own limit
_AGAIN = "Download or save it again."


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a safetensors file: the file, its shape and dtype, where its bytes begin, and their CRC-32 if it is known."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    begin: int = 0
    crc: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * self.dtype.itemsize


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors that a safetensors file says it holds, after its numbers were checked against its length.

    Raises:
        CheckpointError: the file is truncated, longer than its tensors, damaged, or no safetensors file.
    """
    text, size = _read_text(path)
    start = 8 + len(text)
    try:
        header = json.loads(text, object_pairs_hook=_refuse_repeats)
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        spans = sorted((_check_entry(name, entry), name) for name, entry in entries.items())
        metadata = dict(header.get("__metadata__") or {})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a safetensors file, or its header is damaged ({error}). {_AGAIN}") from error
    end = start + max((stop for (_, stop), _ in spans), default=0)
    if size != end:
        what = "truncated" if size < end else "longer than its tensors"
        raise CheckpointError(f"{path} is {what}: its header needs {end} bytes, the file has {size}. {_AGAIN}")
    crcs = _read_checksums(path, metadata.get(CHECKSUMS), entries, len(spans))
    tensors, before = {}, 0
    for ((begin, stop), name), crc in zip(spans, crcs, strict=True):
        if begin != before:
            raise CheckpointError(
                f"'{name}' in {path} begins at byte {begin} of its data, though {before} are taken before it: its tensors "
                f"overlap, or leave holes. {_AGAIN}"
            )
        tensors[name] = _describe_tensor(path, name, entries[name], start, crc)
        before = stop
    return {name: tensors[name] for name in entries}


def _read_text(path: Path) -> tuple[bytes, int]:
    """The header's text, and the file's length, which it does not exceed."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > _MAX_HEADER_BYTES:
            raise CheckpointError(f"{path} is not a safetensors file (no header in {size} bytes). {_AGAIN}")
        if 8 + length > size:
            raise CheckpointError(
                f"{path} is truncated: its header alone takes {8 + length} bytes, the file has {size}. {_AGAIN}"
            )
        return file.read(length), size


def _refuse_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name comes twice")
    return found


def _check_entry(name: str, entry: dict[str, Any]) -> tuple[int, int]:
    """Where the tensor's bytes begin and stop, if all that is said of it are numbers that can be."""
    begin, stop = entry["data_offsets"]
    if not isinstance(entry["dtype"], str):
        raise ValueError(f"the dtype of '{name}' is no name")
    numbers = [begin, stop, *entry["shape"]]
    if any(type(number) is not int or number < 0 for number in numbers) or len(entry["shape"]) > _MAX_DIMS or begin > stop:
        raise ValueError(f"'{name}' has shape {str(entry['shape'])[:80]} at bytes {begin} to {stop}")
    return begin, stop


def _describe_tensor(path: Path, name: str, entry: dict[str, Any], start: int, crc: int | None) -> StoredTensor:
    begin, stop = entry["data_offsets"]
    if entry["dtype"] not in DTYPES:
        raise CheckpointError(
            f"'{name}' in {path} has dtype {entry['dtype'][:20]}, which can't be read by slices. "
            f"Load the model with transformers, then call autotp.parallelize on it."
        )
    shape, dtype = tuple(entry["shape"]), DTYPES[entry["dtype"]]
    if stop - begin != prod(shape) * dtype.itemsize:
        raise CheckpointError(f"'{name}' in {path} has {stop - begin} bytes, which do not make {shape} of {dtype}. {_AGAIN}")
    return StoredTensor(path, shape, dtype, start + begin, crc)


# -- checksums ----------------------------------------------------------------------------------------------------------


def sum_entries(entries: dict[str, Any]) -> int:
    """CRC-32 of a header's entries, however they are ordered."""
    return zlib.crc32(json.dumps(entries, sort_keys=True, separators=(",", ":")).encode())


def spell_checksums(crcs: Sequence[int]) -> str:
    """Checksums as they stand in the metadata: always of the same length."""
    return " ".join(f"{crc:08x}" for crc in crcs)


def _read_checksums(path: Path, text: str | None, entries: dict[str, Any], count: int) -> list[int | None]:
    """The CRC-32 of each tensor in the order of their offsets; None for each where the file was saved without."""
    if text is None:
        return [None] * count
    try:
        first, *crcs = (int(part, 16) for part in text.split())
    except (ValueError, AttributeError):
        first, crcs = -1, []
    if text != spell_checksums([first, *crcs]) or len(crcs) != count or first != sum_entries(entries):
        raise CheckpointError(f"the header of {path} is not the one that was saved: the file is damaged. {_AGAIN}")
    return list(crcs)


# -- indexes ------------------------------------------------------------------------------------------------------------


def read_index(index: Path) -> dict[str, str]:
    """Tensor name -> file name, of an index beside several weight files, each of which is there.

    Raises:
        CheckpointError: it is no index, names a file outside of its directory, or one that is missing.
    """
    try:
        if index.stat().st_size > _MAX_HEADER_BYTES:
            raise ValueError(f"it has {index.stat().st_size} bytes")
        weight_map = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        files = sorted(set(weight_map.values()))
        if not all(isinstance(file, str) for file in files):
            raise TypeError("file names that are no text")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index} is not an index of weight files ({error!r}): download or save it again") from error
    for file in files:
        check_inside(index, file)
        if not (index.parent / file).is_file():
            count = sum(other == file for other in weight_map.values())
            raise CheckpointError(f"{index.parent / file} is missing: {index.name} says that it holds {count} tensors. {_AGAIN}")
    return weight_map


def check_inside(where: Path, file: str) -> None:
    """Refuse a file name in `where` that leads out of its directory.

    Raises:
        CheckpointError: it is absolute, or climbs with `..`.
    """
    kinds = (PurePosixPath(file), PureWindowsPath(file))
    if not file or "\0" in file or any(kind.is_absolute() or kind.drive or kind.root or ".." in kind.parts for kind in kinds):
        raise CheckpointError(
            f"{where} names the file {file!r}, which is not inside its directory: don't load this checkpoint unless you know why"
        )
