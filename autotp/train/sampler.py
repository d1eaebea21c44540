"""Which samples of a data set each data rank gets; the ranks that share one model get the same."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from ..errors import AutoTPError
from ..groups import resolve_group


class DataSampler(DistributedSampler):
    """torch's `DistributedSampler` over the data axis alone, that can go on in the midst of an epoch.

    Every rank of a TP group gets the same samples in the same order, and together the data ranks get each sample once (some twice
    where `drop_last` is off and they do not divide evenly). For `DataLoader(dataset, batch_size, sampler=...)`.

    Args:
        dataset: has a length.
        dp: the process group, or one-axis DeviceMesh, of the data ranks: `mesh["dp"]`; None where the model has no copies.
        shuffle: draw an order of its own for each epoch, from `seed` and the epoch.
        seed: equal on all ranks.
        drop_last: leave out the last samples that don't divide evenly, instead of repeating some of the first.

    Raises:
        AutoTPError: the data set has no length; this rank is not in `dp`.
    """

    def __init__(self, dataset: Any, dp: Any = None, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False) -> None:
        if not isinstance(dataset, Sized):
            raise AutoTPError(
                f"{type(dataset).__name__} has no length, so its samples can't be dealt: give a data set with __len__, or deal "
                f"its stream by the data rank, mesh['dp'].get_local_rank()"
            )
        group = None if dp is None else resolve_group(dp).group
        rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        super().__init__(dataset, ranks, rank, shuffle, seed, drop_last)  # type: ignore[arg-type]
        self.start = 0

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Iterate over that epoch next.

        Args:
            epoch: its number.
            start: how many of its samples were taken already, counted over all data ranks: iteration begins behind them, in the
                same order over any number of data ranks. For this one epoch only.
        """
        super().set_epoch(epoch)
        self.start = start

    def __iter__(self) -> Iterator[int]:
        return iter(self._remaining()[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return len(self._remaining()) // self.num_replicas

    def _remaining(self) -> list[int]:
        """What is left of the epoch, over all data ranks; a multiple of their number."""
        size = len(self.dataset)  # type: ignore[arg-type]
        if self.shuffle:
            order = torch.randperm(size, generator=torch.Generator().manual_seed(self.seed + self.epoch)).tolist()
        else:
            order = list(range(size))
        left = max(size - self.start, 0)
        if self.drop_last:
            return order[self.start : self.start + left // self.num_replicas * self.num_replicas]
        wanted = self.start + -(-left // self.num_replicas) * self.num_replicas
        repeats = -(-wanted // size) if size else 0
        return (order * repeats)[self.start : wanted]
