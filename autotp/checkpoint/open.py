"""Which kind of checkpoint a directory holds."""

from __future__ import annotations

import os
from pathlib import Path

from .sharded import MANIFEST_NAME, ShardedSource
from .source import SafetensorsSource

CheckpointSource = SafetensorsSource | ShardedSource


def open_checkpoint(directory: str | os.PathLike) -> CheckpointSource:
    """The weights in `directory`: as `autotp shard` wrote them, or safetensors files.

    Raises:
        CheckpointError: there are none, or a file is missing, truncated or damaged. Only headers are read.
    """
    if (Path(directory) / MANIFEST_NAME).is_file():
        return ShardedSource(directory)
    return SafetensorsSource(directory)
