"""Where weights come from: a module in memory, or a directory of safetensors files.

| source | `read` costs |
|---|---|
| `ModuleSource` | a copy of the rank's part |
| `SafetensorsSource` | the same; the files are mapped, and only the pages that hold the rank's runs are touched |

Everything that can be wrong with a checkpoint's files is found when it is opened, from their headers, before any model is
changed.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ..errors import CheckpointError
from ..shard import Shard

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
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
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


class WeightSource(Protocol):
    """What the rewriter reads weights through."""

    def names(self) -> set[str]:
        """Names of all tensors."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the full tensor."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """Dtype it is stored in."""
        ...

    def read(self, name: str, shard: Shard | None, rank: int, dtype: torch.dtype | None, device: torch.device) -> Tensor:
        """What `rank` holds of it, in memory of its own, in `dtype` (None: as stored) on `device`."""
        ...


class ModuleSource:
    """The parameters and buffers of a module that is in memory."""

    def __init__(self, module: nn.Module) -> None:
        self._tensors = {name: t for name, t in module.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}

    def names(self) -> set[str]:
        """Names of all tensors of the state dict."""
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the full tensor."""
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of the tensor."""
        return self._tensors[name].dtype

    def read(self, name: str, shard: Shard | None, rank: int, dtype: torch.dtype | None, device: torch.device) -> Tensor:
        """What `rank` holds of it, copied."""
        return take_part(self._tensors[name].detach(), shard, rank, dtype, device)


def take_part(full: Tensor, shard: Shard | None, rank: int, dtype: torch.dtype | None, device: torch.device) -> Tensor:
    """`rank`'s part of `full`, contiguous, in memory of its own; the part alone is converted and moved."""
    part = full if shard is None else shard.split(full, rank)
    return part.to(device=device, dtype=dtype or full.dtype, copy=True, memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a safetensors file: the file, its shape and its dtype."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


class SafetensorsSource:
    """A directory with `model.safetensors`, or with shard files and their index, as transformers writes them.

    Raises:
        CheckpointError: no such directory, no safetensors files in it, or a file that is missing, truncated or not what
            the index says. Only headers are read; no tensor is.
    """

    def __init__(self, directory: str | os.PathLike) -> None:
        self.directory = Path(directory)
        self.tensors: dict[str, StoredTensor] = {}
        self._open: dict[Path, Any] = {}
        single, index = self.directory / SINGLE_NAME, self.directory / INDEX_NAME
        if single.is_file():
            self.tensors = read_header(single)
        elif index.is_file():
            self._read_index(index)
        else:
            raise CheckpointError(f"{self.directory} {_explain_absence(self.directory)}")

    def _read_index(self, index: Path) -> None:
        try:
            weight_map = dict(json.loads(index.read_text())["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{index} is not an index of safetensors files ({error!r}): download or save it again"
            ) from error
        headers = {}
        for file in sorted(set(weight_map.values())):
            if not (self.directory / file).is_file():
                count = sum(other == file for other in weight_map.values())
                raise CheckpointError(
                    f"{self.directory / file} is missing: {INDEX_NAME} says that it holds {count} tensors. "
                    f"Download or save it again."
                )
            headers[file] = read_header(self.directory / file)
        for name, file in weight_map.items():
            if name not in headers[file]:
                raise CheckpointError(
                    f"{self.directory / file} does not hold '{name}', though {INDEX_NAME} says so: the files come from "
                    f"different saves. Download or save them again."
                )
            self.tensors[name] = headers[file][name]

    def __enter__(self) -> SafetensorsSource:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the mapped files."""
        self._open.clear()

    def names(self) -> set[str]:
        """Names of all tensors, as the checkpoint spells them."""
        return set(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the full tensor."""
        return self.tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Dtype it is stored in."""
        return self.tensors[name].dtype

    def read(self, name: str, shard: Shard | None, rank: int, dtype: torch.dtype | None, device: torch.device) -> Tensor:
        """What `rank` holds of it, copied out of the mapped file: the rank's part is all that takes memory.

        Raises:
            CheckpointError: the file changed since it was opened, or can't be read.
        """
        stored = self.tensors[name]
        try:
            if stored.file not in self._open:
                self._open[stored.file] = safe_open(stored.file, framework="pt")
            full = self._open[stored.file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"'{name}' can't be read from {stored.file}: {error}") from error
        if tuple(full.shape) != stored.shape:
            raise CheckpointError(f"{stored.file} changed while it was read: '{name}' is {tuple(full.shape)}, was {stored.shape}")
        return take_part(full, shard, rank, dtype, device)

    def digest(self) -> str:
        """A short hash of names, shapes, dtypes and file names: equal on all ranks that see one checkpoint."""
        lines = sorted(f"{name} {t.file.name} {t.shape} {t.dtype}" for name, t in self.tensors.items())
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors that a safetensors file says it holds, after its length was checked against them.

    Raises:
        CheckpointError: the file is truncated, longer than its tensors, or no safetensors file.
    """
    again = "Download or save it again."
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) == 8 and length <= _MAX_HEADER_BYTES and 8 + length > size:
            raise CheckpointError(f"{path} is truncated: its header alone takes {8 + length} bytes, the file has {size}. {again}")
        try:
            if len(start) < 8 or length > _MAX_HEADER_BYTES:
                raise ValueError(f"no header in {size} bytes")
            header = json.loads(file.read(length))
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            end = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} is not a safetensors file ({error}). {again}") from error
    if size != end:
        what = "truncated" if size < end else "longer than its tensors"
        raise CheckpointError(f"{path} is {what}: its header needs {end} bytes, the file has {size}. {again}")
    tensors = {}
    for name, entry in entries.items():
        if entry["dtype"] not in DTYPES:
            raise CheckpointError(
                f"'{name}' in {path} has dtype {entry['dtype']}, which can't be read by slices. "
                f"Load the model with transformers, then call autotp.parallelize on it."
            )
        begin, stop = entry["data_offsets"]
        shape, dtype = tuple(entry["shape"]), DTYPES[entry["dtype"]]
        if stop - begin != prod(shape) * dtype.itemsize:
            raise CheckpointError(f"'{name}' in {path} has {stop - begin} bytes, which do not make {shape} of {dtype}. {again}")
        tensors[name] = StoredTensor(path, shape, dtype)
    return tensors


def _explain_absence(directory: Path) -> str:
    if not directory.exists():
        return "does not exist. Give a directory that holds config.json and safetensors files."
    if not directory.is_dir():
        return "is not a directory. Give the directory that holds config.json and the safetensors files."
    found = sorted(path.name for path in directory.iterdir())
    if any(name.endswith((".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5")) for name in found):
        return (
            f"holds no {SINGLE_NAME} and no {INDEX_NAME}, but weights in another format ({', '.join(found)}). Load it with "
            f"transformers and call autotp.parallelize, or save it once with transformers' save_pretrained."
        )
    return f"holds no {SINGLE_NAME} and no {INDEX_NAME}: there are no weights in it (found {', '.join(found) or 'nothing'})."
