"""What an exchange of rows is, and the one that calls the group's collectives: whole, and in sequence with what computes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ..comm import TPGroup
from ..errors import KernelUnsupported
from ..kernels.blocks import block_of
from ..kernels.moves import SMALLEST_BLOCK_BYTES, Decision, Moves, decide


class Gather:
    """Blocks on their way here.

    Attributes:
        full: `[T * R, K]`, complete after `wait_all`.
        order: ranks, in the order in which to read their blocks, each after `wait`; empty if all are there at once.
    """

    def __init__(self, full: Tensor, order: Sequence[int] = ()) -> None:
        self.full, self.order = full, order

    def wait(self, rank: int) -> Tensor:
        """`rank`'s block of `full`; what is queued next on this stream may read it."""
        return self.full[block_of(self.full.shape[0], rank, len(self.order))]

    def wait_all(self) -> Tensor:
        """`full`, complete for what is queued next on this stream."""
        return self.full


class Scatter:
    """Partial blocks on their way to their ranks.

    Attributes:
        order: the other ranks, in the order in which to give their blocks; empty if all are given at once, by `reduce`.
    """

    order: Sequence[int] = ()

    def __init__(self, group: TPGroup, dtype: torch.dtype | None) -> None:
        self.group, self.dtype = group, dtype

    def place(self, rank: int) -> Tensor:
        """Where to write this rank's part of `rank`'s block, before `send`."""
        raise NotImplementedError

    def send(self, rank: int) -> None:
        """What was queued on this stream has written `place(rank)`."""
        raise NotImplementedError

    def receive(self) -> Tensor | None:
        """The sum of the others' parts of this rank's block; the caller's to overwrite. None where there are none."""
        raise NotImplementedError

    def reduce(self, parts: Tensor) -> Tensor:
        """This rank's block of the sum of all `parts` `[T * R, K]`."""
        return self.group.reduce_scatter_rows(parts, self.dtype)


class Exchange:
    """Moves blocks by the group's collectives, in sequence.

    Args:
        group: the ranks; why_not: why blocks are not copied between them instead.

    Attributes:
        smallest_bytes: of all blocks together, from which on they are copied unasked: in proportion to their number.
    """

    def __init__(self, group: TPGroup, why_not: str = "collectives in sequence were asked for") -> None:
        self.group, self.why_not = group, why_not
        self.smallest_bytes = SMALLEST_BLOCK_BYTES * group.tp_size

    def check(self, moves: Moves, name: str) -> None:
        """Raise where copies are asked for that there can't be; on a CPU, where nothing could hide, all run in sequence.

        Raises:
            KernelUnsupported: the ranks' GPUs don't reach each other's memory.
        """
        if self.why_not and self.group.device.type == "cuda" and True in moves[:4]:
            raise KernelUnsupported(
                f"{name}: copies between the ranks were asked for, but {self.why_not}: set the ub_* options and tp_overlap_comm "
                f"to None or False"
            )

    def decide(self, n_bytes: int, way: bool | None) -> Decision:
        """Whether `n_bytes`, of all blocks together, are copied, and why."""
        return decide(n_bytes, way, self.why_not, self.smallest_bytes)

    def beside(self) -> AbstractContextManager[Any]:
        """In it what is queued runs beside what is queued outside from now on, once what was queued before is done."""
        return nullcontext()

    def gather(self, local: Tensor, way: bool | None = None, full: Tensor | None = None, lent: bool = False) -> Gather:
        """Begin to gather `local` `[R, K]`, this rank's block, as large on all ranks; `way` as in kernels/moves.py.

        Args:
            full: memory that copies may be put into, `[T * R, K]`.
            lent: in place of `full`: the rows are read on this stream, and before the next gather but one begins, which may
                overwrite them.
        """
        return Gather(self.group.gather_rows(local))

    def scatter(self, rows: int, width: int, like: Tensor, dtype: torch.dtype | None = None, way: bool | None = None) -> Scatter:
        """Begin to scatter `[rows, width]` of `like`'s dtype, summed in `dtype` if one is named."""
        return Scatter(self.group, dtype)
