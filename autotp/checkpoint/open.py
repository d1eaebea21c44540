"""Which kind of checkpoint a directory holds."""

from __future__ import annotations

import os
from pathlib import Path

from .gguf import find_gguf
from .gguf_tensors import GGUFSource
from .sharded import MANIFEST_NAME, ShardedSource
from .source import INDEX_NAME, SINGLE_NAME, SafetensorsSource
from .torch_files import BIN_INDEX_NAME, BIN_NAME, TorchFileSource

CheckpointSource = SafetensorsSource | ShardedSource | TorchFileSource | GGUFSource


def open_checkpoint(path: str | os.PathLike) -> CheckpointSource:
    """The weights at `path`: a directory that `autotp shard` wrote, with safetensors files, with `.bin` files or with a GGUF
    file, or that file itself; looked for in this order.

    Raises:
        CheckpointError: there are none, or a file is missing, truncated or damaged. Of safetensors files only headers are read.
    """
    directory = Path(path)
    if (directory / MANIFEST_NAME).is_file():
        return ShardedSource(directory)
    if not any((directory / name).is_file() for name in (SINGLE_NAME, INDEX_NAME)):
        if any((directory / name).is_file() for name in (BIN_NAME, BIN_INDEX_NAME)):
            return TorchFileSource(directory)
        gguf = find_gguf(str(directory))
        if gguf is not None:
            return GGUFSource(gguf)
    return SafetensorsSource(directory)
