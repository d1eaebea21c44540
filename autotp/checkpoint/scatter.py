"""A checkpoint that one rank reads for all: the others get their parts from it.

For files of which no slice can be read: every rank would load or dequantize all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..comm import TPGroup
from ..errors import CheckpointError
from ..shard import Shard
from .convert import ConvertedSource
from .gguf_tensors import GGUFSource
from .source import WeightSource

_WHAT = "sharing out a checkpoint"


def convert_source(model: nn.Module, source: WeightSource | GGUFSource) -> ConvertedSource:
    """`source` by the names of `model`."""
    return ConvertedSource(model, source.for_model(model) if isinstance(source, GGUFSource) else source)


def share_source(model: nn.Module, source: WeightSource | GGUFSource, group: TPGroup) -> WeightSource:
    """`source` by the names of `model`; read by rank 0 alone if it says so. Collective.

    Raises:
        CheckpointError, AutoTPError: on all ranks, if it can't be opened on one.
    """
    alone = getattr(source, "one_reader", False) and group.tp_size > 1
    seen: ConvertedSource | None = None
    about: Any = None
    with group.together("opening the checkpoint"):
        if not alone or group.tp_rank == 0:
            seen = convert_source(model, source)
            tensors = {name: (seen.shape(name), seen.dtype(name), seen.nbytes(name)) for name in seen.names()}
            about = (str(seen.directory), seen.digest(), tensors)
    return ScatteredSource(seen, group, about) if alone or seen is None else seen


class ScatteredSource:
    """What rank 0 reads and the others get from it; all ranks read the same tensors in the same order, inside `reading`.

    Args:
        source: on rank 0; None elsewhere.
        group: the ranks.
        about: on rank 0, the source's directory, digest, and shape, dtype and bytes by name.
    """

    def __init__(self, source: WeightSource | None, group: TPGroup, about: tuple[str, str, dict] | None) -> None:
        self._source, self._group = source, group
        self.directory, self._digest, self._tensors = group.broadcast_object(about)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Around all reads: a rank that stops early tells the others, which wait for it in their next one."""
        try:
            yield
            self._agree()
        except _StoppedError:
            raise
        except BaseException:
            self._group.arrive(_WHAT, "stopped", wait=False)
            raise

    def _agree(self) -> None:
        stopped = [rank for rank, note in enumerate(self._group.arrive(_WHAT)) if note]
        if stopped:
            raise _StoppedError(f"TP rank(s) {stopped} stopped {_WHAT}: see their own error")

    def names(self) -> set[str]:
        """Names of all tensors, as the model spells them."""
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the full tensor."""
        return self._tensors[name][0]

    def dtype(self, name: str) -> torch.dtype:
        """Dtype it is read in."""
        return self._tensors[name][1]

    def read(self, name: str, shard: Shard | None, rank: int, dtype: torch.dtype | None, device: torch.device) -> Tensor:
        """What this rank holds of it. Collective.

        Raises:
            CheckpointError: rank 0 can't read it, or a rank stopped.
        """
        full = None if self._source is None else self._source.view(name).to(dtype or self.dtype(name))
        shape = self.shape(name)
        own = torch.empty(shape if shard is None else shard.local_shape(rank), dtype=dtype or self.dtype(name), device=device)
        self._agree()
        return self._group.scatter_from_host(full, own, shard)

    def view(self, name: str) -> Tensor:
        """All of it, on every rank. Collective."""
        return self.read(name, None, self._group.tp_rank, None, self._group.device)

    def nbytes(self, name: str) -> int:
        """Bytes of it as it is stored."""
        return self._tensors[name][2]

    def check(self, name: str) -> None:
        """Nothing: no checksums are known of such files."""

    def digest(self) -> str:
        """Rank 0's."""
        return self._digest


class _StoppedError(CheckpointError):
    """Another rank stopped: it knows already, so it is not told again."""
