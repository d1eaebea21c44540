"""Where weights come from: a module in memory, or a directory of safetensors files.

| source | `read` costs |
|---|---|
| `ModuleSource` | a copy of the rank's part |
| `SafetensorsSource` | the same; the files are mapped, and only the pages that hold the rank's runs are touched |
| | on the CPU, nothing for one run of bytes in the dtype that is asked for: it stays in the mapped file, as with transformers |

The mapping is private: writing to a tensor changes no file, and a file may be removed, or replaced by another, while the model
lives. One that is truncated or written over in place takes the weights with it. What is read twice may be the same memory.

Everything that can be wrong with a checkpoint's files is found when it is opened, from their headers, before any model is
changed.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ..errors import CheckpointError
from ..shard import Shard
from .header import CHECKSUMS, StoredTensor, read_header, read_index

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_SAMPLES = 32  # tensors that ranks compare a few bytes of: their directories may hold different steps of one model


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
        """What `rank` holds of it, in a storage of its own that may be written to, in `dtype` (None: as stored) on `device`."""
        ...

    def view(self, name: str) -> Tensor:
        """All of it, as it is stored; it may lie in memory that is not the caller's."""
        ...

    def nbytes(self, name: str) -> int:
        """Bytes of it as it is stored, or about as many."""
        ...

    def check(self, name: str) -> None:
        """Read all of it, and raise CheckpointError if it is not what was saved, where that can be told."""
        ...

    def digest(self) -> str:
        """A short hash of what it holds, without the values: equal on all ranks that see the same."""
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

    def view(self, name: str) -> Tensor:
        """The module's own tensor."""
        return self._tensors[name].detach()

    def nbytes(self, name: str) -> int:
        """Bytes of the tensor."""
        return self._tensors[name].nbytes

    def check(self, name: str) -> None:
        """Nothing can have happened to it."""

    def digest(self) -> str:
        """A short hash of names, shapes and dtypes."""
        return digest_lines(f"{name} {tuple(t.shape)} {t.dtype}" for name, t in self._tensors.items())


def take_part(full: Tensor, shard: Shard | None, rank: int, dtype: torch.dtype | None, device: torch.device) -> Tensor:
    """`rank`'s part of `full`, contiguous, in memory of its own; the part alone is converted and moved, and copied once."""
    return _own_part(full if shard is None else shard.split(full, rank), full, dtype, device)


def _own_part(part: Tensor, full: Tensor, dtype: torch.dtype | None, device: torch.device) -> Tensor:
    made = not _shares(part, full) and part.is_contiguous() and part.untyped_storage().nbytes() == part.nbytes  # by the cut
    return part.to(device=device, dtype=dtype or full.dtype, copy=not made, memory_format=torch.contiguous_format)


def _shares(part: Tensor, full: Tensor) -> bool:
    return part.untyped_storage().data_ptr() == full.untyped_storage().data_ptr()


def digest_lines(lines: Iterable[str]) -> str:
    """A short hash of `lines`, whatever their order."""
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16]


class MappedFiles:
    """Safetensors files, each mapped when its first tensor is asked for: what is not touched takes no memory."""

    def __init__(self) -> None:
        self._open: dict[Path, Any] = {}

    def get(self, name: str, stored: StoredTensor) -> Tensor:
        """The whole tensor, in the mapped file's memory.

        Raises:
            CheckpointError: the file changed since its header was read, or can't be read.
        """
        try:
            if stored.file not in self._open:
                self._open[stored.file] = safe_open(stored.file, framework="pt")
            full = self._open[stored.file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"'{name}' can't be read from {stored.file}: {error}") from error
        if tuple(full.shape) != stored.shape:
            raise CheckpointError(f"{stored.file} changed while it was read: '{name}' is {tuple(full.shape)}, was {stored.shape}")
        return full

    def take(
        self, name: str, stored: StoredTensor, shard: Shard | None, rank: int, dtype: torch.dtype | None, device: torch.device
    ) -> Tensor:
        """`rank`'s part: where it lies in the file if it can be used there, copied otherwise.

        Raises:
            CheckpointError: as `get`.
        """
        full = self.get(name, stored)
        part = full if shard is None else shard.split(full, rank)
        if device.type != "cpu" or dtype not in (None, full.dtype) or not part.is_contiguous() or not _shares(part, full):
            return _own_part(part, full, dtype, device)
        storage = full.untyped_storage()
        begin = part.data_ptr() - storage.data_ptr()
        own: Any = storage[begin : begin + part.nbytes]
        return torch.empty(0, dtype=full.dtype).set_(own, 0, part.shape, part.stride())

    def check(self, name: str, stored: StoredTensor) -> None:
        """Compare all of a tensor's bytes with the checksum that was saved beside it, if one was.

        Raises:
            CheckpointError: they differ.
        """
        if stored.crc is None:
            return
        crc = zlib.crc32(self.get(name, stored).reshape(-1).view(torch.uint8).numpy().data) if stored.nbytes else 0
        if crc != stored.crc:
            raise CheckpointError(
                f"'{name}' in {stored.file} is not what was saved: its CRC-32 is {crc:08x}, was {stored.crc:08x}. The file is "
                f"damaged: copy or save it again. (If you changed it yourself, write it without '{CHECKSUMS}' in its metadata.)"
            )

    def close(self) -> None:
        """Let go of the files."""
        self._open.clear()


class SafetensorsSource:
    """A directory with `model.safetensors`, or with shard files and their index, as transformers writes them.

    Raises:
        CheckpointError: no such directory, no safetensors files in it, or a file that is missing, truncated or not what
            the index says. Only headers are read; no tensor is.
    """

    def __init__(self, directory: str | os.PathLike) -> None:
        self.directory = Path(directory)
        self.tensors: dict[str, StoredTensor] = {}
        self._files = MappedFiles()
        single, index = self.directory / SINGLE_NAME, self.directory / INDEX_NAME
        if single.is_file():
            self.tensors = read_header(single)
        elif index.is_file():
            self._read_index(index)
        else:
            raise CheckpointError(f"{self.directory} {_explain_absence(self.directory)}")

    def _read_index(self, index: Path) -> None:
        weight_map = read_index(index)
        headers = {file: read_header(self.directory / file) for file in sorted(set(weight_map.values()))}
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
        self._files.close()

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
        """What `rank` holds of it, which is all that takes memory, if it does not stay in the mapped file.

        Raises:
            CheckpointError: the file changed since it was opened, or can't be read.
        """
        return self._files.take(name, self.tensors[name], shard, rank, dtype, device)

    def view(self, name: str) -> Tensor:
        """All of it, in the mapped file's memory.

        Raises:
            CheckpointError: the file changed since it was opened, or can't be read.
        """
        return self._files.get(name, self.tensors[name])

    def nbytes(self, name: str) -> int:
        """Bytes of the tensor."""
        return self.tensors[name].nbytes

    def check(self, name: str) -> None:
        """Compare it with the checksum that was saved beside it, if one was.

        Raises:
            CheckpointError: they differ.
        """
        self._files.check(name, self.tensors[name])

    def digest(self) -> str:
        """A short hash of names, shapes, dtypes, files, checksums and a few bytes: equal on ranks that see one checkpoint."""
        lines = [f"{name} {t.file.name} {t.shape} {t.dtype} {t.crc}" for name, t in self.tensors.items()]
        names = sorted(self.tensors)
        return digest_lines([*lines, *(read_middle(self.tensors[name]) for name in names[:: len(names) // _SAMPLES + 1])])


def read_middle(stored: StoredTensor) -> str:
    """A few bytes of a tensor, which another step of a training would have changed."""
    with stored.file.open("rb") as file:
        file.seek(stored.begin + stored.nbytes // 2)
        return file.read(min(64, stored.nbytes - stored.nbytes // 2)).hex()


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
