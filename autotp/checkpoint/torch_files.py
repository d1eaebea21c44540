"""Checkpoints that torch wrote (`pytorch_model.bin`): nothing in them is run, as only tensors are unpickled."""

from __future__ import annotations

import os
import pickle
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..shard import Shard
from .header import read_index
from .source import digest_lines, take_part

BIN_NAME = "pytorch_model.bin"
BIN_INDEX_NAME = "pytorch_model.bin.index.json"
_ZIP = b"PK\x03\x04"


class TorchFileSource:
    """A directory with `pytorch_model.bin`, or with several such files and their index.

    Files of torch 1.6 and later are mapped, and every rank reads its slices. Older ones can't be: they are loaded one at a
    time, by one rank.

    Raises:
        CheckpointError: a file is missing, damaged, or holds anything but tensors.
    """

    def __init__(self, directory: str | os.PathLike) -> None:
        self.directory = Path(directory)
        index = self.directory / BIN_INDEX_NAME
        single = self.directory / BIN_NAME
        self._files = [single] if single.is_file() else [self.directory / f for f in sorted(set(read_index(index).values()))]
        self.one_reader = not all(_is_zip(path) for path in self._files)
        self._where: dict[str, tuple[Path, tuple[int, ...], torch.dtype]] = {}
        self._mapped: dict[Path, dict[str, Tensor]] = {}

    def _tensors(self) -> dict[str, tuple[Path, tuple[int, ...], torch.dtype]]:
        """Where each tensor is, its shape and dtype; the files are looked at when this is first asked for."""
        for path in self._files if not self._where else ():
            for name, tensor in self._open(path).items():
                self._where[name] = (path, tuple(tensor.shape), tensor.dtype)
        return self._where

    def _open(self, path: Path) -> dict[str, Tensor]:
        if path not in self._mapped:
            if self.one_reader:
                self._mapped.clear()
            self._mapped[path] = load_tensors(path, mapped=not self.one_reader)
        return self._mapped[path]

    def __enter__(self) -> TorchFileSource:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the files."""
        self._mapped.clear()

    def names(self) -> set[str]:
        """Names of all tensors, as the checkpoint spells them."""
        return set(self._tensors())

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the full tensor."""
        return self._tensors()[name][1]

    def dtype(self, name: str) -> torch.dtype:
        """Dtype it is stored in."""
        return self._tensors()[name][2]

    def read(self, name: str, shard: Shard | None, rank: int, dtype: torch.dtype | None, device: torch.device) -> Tensor:
        """What `rank` holds of it, copied.

        Raises:
            CheckpointError: the file can't be read any more.
        """
        return take_part(self.view(name), shard, rank, dtype, device)

    def view(self, name: str) -> Tensor:
        """All of it, in the file's memory."""
        return self._open(self._tensors()[name][0])[name]

    def nbytes(self, name: str) -> int:
        """Bytes of the tensor."""
        _, shape, dtype = self._tensors()[name]
        return prod(shape) * dtype.itemsize

    def check(self, name: str) -> None:
        """There is nothing to compare it with."""

    def digest(self) -> str:
        """A short hash of names, shapes and dtypes."""
        return digest_lines(f"{name} {shape} {dtype}" for name, (_, shape, dtype) in self._tensors().items())


def _is_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == _ZIP


def load_tensors(path: Path, mapped: bool) -> dict[str, Tensor]:
    """The tensors of a file that `torch.save` wrote, by name; in the mapped file's memory, or in one's own.

    Raises:
        CheckpointError: it is damaged, or holds anything else.
    """
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except (
        RuntimeError,
        OSError,
        ValueError,
        KeyError,
        TypeError,
        EOFError,
        AttributeError,
        IndexError,
        AssertionError,
    ) as error:
        raise CheckpointError(f"{path} can't be read: {_first_line(error)}. Download or save it again.") from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds more than tensors, which could run anything once it is loaded, or is damaged: {_first_line(error)}. "
            f"If you trust it, load it with torch.load(weights_only=False) yourself and save its tensors alone."
        ) from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, not tensors by name")
    odd = [name for name, value in found.items() if not isinstance(value, Tensor) or value.layout != torch.strided]
    if odd:
        raise CheckpointError(f"{path} holds '{str(odd[0])[:80]}', which is no plain tensor: save the model's state_dict alone")
    return {str(name): value.detach() for name, value in found.items()}


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
