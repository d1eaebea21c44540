"""A checkpoint cut beforehand: one safetensors file a rank, and a manifest that says which slice of what each one holds.

| file | holds |
|---|---|
| `autotp.json` | the number of ranks, the model's tensors in order, the `Shard` of each that is split, and the plan |
| `autotp-00001-of-00004.safetensors` | rank 0's parts, and what is whole on every rank, once |
| `config.json`, the tokenizer's files | as in the checkpoint that was cut |

A rank of a model cut in the same way reads its own file from end to end; any other cut is put together tensor by tensor.
"""

from __future__ import annotations

import json
import os
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError, PlanError
from ..shard import Shard
from .header import StoredTensor, read_header
from .source import MappedFiles, digest_lines, take_part

MANIFEST_NAME = "autotp.json"
_MAX_MANIFEST_BYTES = 100_000_000
_MAX_RANKS = 4096


class ShardedSource:
    """A directory that `shard_checkpoint` made.

    Raises:
        CheckpointError: its manifest or a rank's file is missing, damaged, or does not fit the others.
    """

    def __init__(self, directory: str | os.PathLike) -> None:
        self.directory = Path(directory)
        self._manifest = self.directory / MANIFEST_NAME
        data = self._read_manifest()
        self.tp_size: int = data["tp_size"]
        self.plan: dict[str, Any] | None = data.get("plan")
        self._files = MappedFiles()
        paths = [self.directory / name for name in rank_files(self.tp_size)]
        for path in paths:
            if not path.is_file():
                raise CheckpointError(f"{path} is missing: {self._manifest} is of {self.tp_size} ranks. Copy or make it again.")
        self._parts = [read_header(path) for path in paths]
        self.shards = {name: self._read_shard(name, entry) for name, entry in data["shards"].items()}
        self._names: list[str] = data["names"]
        for name in self._names:
            if name not in self.shards and name not in self._parts[0]:
                raise CheckpointError(
                    f"{paths[0]} does not hold '{name}', though {self._manifest} names it. Copy or make it again."
                )

    def _read_manifest(self) -> dict[str, Any]:
        try:
            if self._manifest.stat().st_size > _MAX_MANIFEST_BYTES:
                raise ValueError(f"it has {self._manifest.stat().st_size} bytes")
            data = json.loads(self._manifest.read_text(encoding="utf-8"))
            good = type(data["tp_size"]) is int and 1 <= data["tp_size"] <= _MAX_RANKS and isinstance(data["shards"], dict)
            if not good or data["format"] != 1 or not all(isinstance(name, str) for name in data["names"]):
                raise ValueError(f"format {data['format']!r}, tp_size {data['tp_size']!r}")
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{self._manifest} is no manifest of a sharded checkpoint ({error!r})") from error
        return data

    def _read_shard(self, name: str, entry: Any) -> Shard:
        """The Shard of one tensor, once its sizes are those of the parts: nothing is allocated for what is not there."""
        try:
            shape = entry["shape"]
            numbers = [
                entry["tp_size"],
                *shape,
                *(n for cut in entry["cuts"] for runs in cut["runs"] for run in runs for n in run),
            ]
            if any(type(number) is not int or number < 0 for number in numbers):
                raise ValueError("numbers that are none")
            stored = [part[name] for part in self._parts]
            if entry["tp_size"] != self.tp_size or not 0 < prod(shape) <= sum(prod(each.shape) for each in stored):
                raise ValueError(f"shape {shape} over {entry['tp_size']} ranks, of which the files do not hold all")
            shard = Shard.from_json(entry)
            for rank, each in enumerate(stored):
                if each.shape != shard.local_shape(rank) or each.dtype != stored[0].dtype:
                    raise ValueError(
                        f"{each.file.name} holds {each.dtype} {each.shape}, which is not rank {rank}'s part of {shape}"
                    )
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, PlanError) as error:
            raise CheckpointError(f"'{name}' in {self._manifest} does not fit the files beside it: {error}") from error
        return shard

    def __enter__(self) -> ShardedSource:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the mapped files."""
        self._files.close()

    def names(self) -> set[str]:
        """Names of all tensors, which are the model's."""
        return set(self._names)

    def ordered_names(self) -> list[str]:
        """The same, in the order of the model's state dict."""
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the full tensor."""
        return self.shards[name].shape if name in self.shards else self._parts[0][name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Dtype it is stored in."""
        return self._parts[0][name].dtype

    def read(self, name: str, shard: Shard | None, rank: int, dtype: torch.dtype | None, device: torch.device) -> Tensor:
        """What `rank` holds of it: from its own file, or put together if `shard` is not the one that was cut.

        Raises:
            CheckpointError: a file changed since it was opened, or can't be read.
        """
        own = self.shards.get(name)
        if own is None:
            return self._files.take(name, self._parts[0][name], shard, rank, dtype, device)
        if own == shard:
            return self._files.take(name, self._parts[rank][name], None, rank, dtype, device)
        return take_part(self.view(name), shard, rank, dtype, device)

    def view(self, name: str) -> Tensor:
        """The whole tensor: in the mapped file's memory, or put together of all ranks' parts."""
        own = self.shards.get(name)
        return self._get(0, name) if own is None else own.join([self._get(r, name) for r in range(self.tp_size)])

    def _get(self, rank: int, name: str) -> Tensor:
        return self._files.get(name, self._parts[rank][name])

    def _stored(self, name: str) -> list[StoredTensor]:
        return [part[name] for part in self._parts] if name in self.shards else [self._parts[0][name]]

    def nbytes(self, name: str) -> int:
        """Bytes of all parts."""
        return sum(stored.nbytes for stored in self._stored(name))

    def check(self, name: str) -> None:
        """Compare all parts with their checksums.

        Raises:
            CheckpointError: they differ.
        """
        for stored in self._stored(name):
            self._files.check(name, stored)

    def digest(self) -> str:
        """A short hash of names, shapes, dtypes, cuts and checksums: equal on all ranks that see one checkpoint."""
        return digest_lines(
            f"{name} {self.dtype(name)} {self.shards.get(name)} {[(each.shape, each.crc) for each in self._stored(name)]}"
            for name in self._names
        )


def rank_files(tp_size: int) -> list[str]:
    """The ranks' file names."""
    return [f"autotp-{rank + 1:05d}-of-{tp_size:05d}.safetensors" for rank in range(tp_size)]
