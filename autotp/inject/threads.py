"""TPGroups without processes: ranks that are threads of this one, and one rank of several that runs alone."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..comm import TPGroup
from ..errors import ProofError
from ..shard import Shard

CPU = torch.device("cpu")


@contextmanager
def one_core() -> Iterator[None]:
    """torch computes in the calling threads alone: on tensors as small as a plan's, its own threads wait more than they work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def young_garbage() -> Iterator[None]:
    """Python looks for garbage among what is made inside alone, not through the libraries again and again.

    Where the caller has set things aside already, that stays as it is.
    """
    mine = gc.isenabled() and gc.get_freeze_count() == 0
    if mine:
        gc.freeze()
    try:
        yield
    finally:
        if mine:
            gc.unfreeze()


class ThreadRanks:
    """What the threads of one simulated job share: a barrier, and a slot a rank."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=120)
        self.slots: list[Any] = [None] * size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Every rank's `value`, on every rank."""
        self.slots[rank] = value
        self.barrier.wait()
        values = list(self.slots)
        self.barrier.wait()
        return values


class ThreadGroup(TPGroup):
    """A TPGroup whose ranks are threads of this process."""

    def __init__(self, ranks: ThreadRanks, rank: int) -> None:
        super().__init__(None, CPU)
        self.threads, self.tp_rank, self.tp_size, self.ranks = ranks, rank, ranks.size, tuple(range(ranks.size))

    def all_reduce_owned(self, tensor: Tensor, op: str = "sum") -> Tensor:
        values = self.threads.exchange(self.tp_rank, tensor.detach().clone())
        if any(value.shape != tensor.shape for value in values):
            raise ProofError(f"ranks reduce tensors of shapes {[list(value.shape) for value in values]} together")
        stacked = torch.stack(values)
        reduced = {"sum": stacked.sum(0), "max": stacked.amax(0), "min": stacked.amin(0)}[op]
        with torch.no_grad():
            return tensor.copy_(reduced)

    def all_reduce(self, tensor: Tensor, op: str = "sum", dtype: torch.dtype | None = None) -> Tensor:
        return self.all_reduce_owned(tensor.detach().clone(), op)

    def all_gather(self, local: Tensor, shard: Shard) -> Tensor:
        return shard.join(self.threads.exchange(self.tp_rank, local.detach().clone()))

    def gather_rows(self, rows: Tensor) -> Tensor:
        values = self.threads.exchange(self.tp_rank, rows.detach().clone())
        if any(value.shape != rows.shape for value in values):
            raise ProofError(f"ranks gather rows of shapes {[list(value.shape) for value in values]} together")
        return torch.cat(values)

    def reduce_scatter_rows(self, rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return self.all_reduce(rows).chunk(self.tp_size)[self.tp_rank].clone()


class SoloGroup(TPGroup):
    """One rank of several, running alone: its reductions return what they are given."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(None, CPU)
        self.tp_rank, self.tp_size, self.ranks = rank, size, tuple(range(size))

    def all_reduce_owned(self, tensor: Tensor, op: str = "sum") -> Tensor:
        return tensor

    def all_reduce(self, tensor: Tensor, op: str = "sum", dtype: torch.dtype | None = None) -> Tensor:
        return tensor.clone()

    def all_gather(self, local: Tensor, shard: Shard) -> Tensor:
        return torch.zeros(shard.shape, dtype=local.dtype)
