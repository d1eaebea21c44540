"""Communication between ranks cut out, to see how much of it shows: a step takes less by that. Its numbers are wrong.

What would come from other ranks is a standing buffer of random numbers: zeros, and memory that nobody wrote, multiply faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from autotp.comm import TPGroup
from autotp.exchange import Exchange, Gather, Scatter, find_exchange
from autotp.kernels.moves import Decision

NOTHING_MOVES = "communication is cut out"
_standing: dict[Any, Tensor] = {}


def draw_standing(like: Tensor, *shape: int) -> Tensor:
    """The same normally distributed numbers in every call for one shape, of `like`'s dtype."""
    key = shape, like.dtype, like.device
    if key not in _standing:
        generator = torch.Generator(like.device).manual_seed(0)
        _standing[key] = torch.randn(shape, device=like.device, generator=generator).to(like.dtype)
    return _standing[key].data  # each with a version of its own: autograd may keep several


class NoExchange(Exchange):
    """Moves nothing."""

    def decide(self, n_bytes: int, way: bool | None) -> Decision:
        return Decision(False, NOTHING_MOVES)

    def gather(self, local: Tensor, way: bool | None = None, full: Tensor | None = None, lent: bool = False) -> Gather:
        return Gather(draw_standing(local, self.group.tp_size * local.shape[0], *local.shape[1:]))

    def scatter(self, rows: int, width: int, like: Tensor, dtype: torch.dtype | None = None, way: bool | None = None) -> Scatter:
        return _NoScatter(self.group, dtype)


class _NoScatter(Scatter):
    def reduce(self, parts: Tensor) -> Tensor:
        return own_rows(parts, self.group)


class NoExchangeInBlocks(NoExchange):
    """Moves nothing, and has products made in the blocks in which it would."""

    def decide(self, n_bytes: int, way: bool | None) -> Decision:
        return Decision(True, "to see what blocks cost")

    def gather(self, local: Tensor, way: bool | None = None, full: Tensor | None = None, lent: bool = False) -> Gather:
        size, me = self.group.tp_size, self.group.tp_rank
        rows = draw_standing(local, size * local.shape[0], *local.shape[1:])
        return Gather(rows, [(me + i) % size for i in range(size)])

    def scatter(self, rows: int, width: int, like: Tensor, dtype: torch.dtype | None = None, way: bool | None = None) -> Scatter:
        return _NoScatterInBlocks(self.group, rows, width, like)


class _NoScatterInBlocks(Scatter):
    def __init__(self, group: TPGroup, rows: int, width: int, like: Tensor) -> None:
        super().__init__(group, None)
        self.order = [(group.tp_rank + i) % group.tp_size for i in range(1, group.tp_size)]
        self.buffer = draw_standing(like, rows // group.tp_size, width)

    def place(self, rank: int) -> Tensor:
        return self.buffer

    def send(self, rank: int) -> None:
        pass

    def receive(self) -> Tensor:
        return self.buffer


def own_rows(rows: Tensor, group: TPGroup) -> Tensor:
    """This rank's block of `rows` `[tp_size * R, ...]`, as a view."""
    return rows.chunk(group.tp_size)[group.tp_rank]


@contextmanager
def no_communication(group: TPGroup) -> Iterator[None]:
    """Inside, sums over the ranks of `group` are their own parts, and gathered rows are standing random numbers.

    Of training and of prompts; integers, weights and what the ranks agree on move as ever. Decoding sums on another way.
    """
    exchange, nothing, gather_rows = find_exchange(group), NoExchange(group), group.gather_rows

    def gather(rows: Tensor) -> Tensor:
        if not rows.is_floating_point():
            return gather_rows(rows)
        return draw_standing(rows, group.tp_size * rows.shape[0], *rows.shape[1:])

    def scatter(rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return own_rows(rows, group).contiguous()

    def sum_owned(tensor: Tensor, op: str = "sum") -> Tensor:
        return tensor.contiguous()

    with ExitStack() as stack:  # of the objects themselves: layers keep them
        stack.enter_context(replace(exchange, gather=nothing.gather, scatter=nothing.scatter, decide=nothing.decide))
        stack.enter_context(replace(group, gather_rows=gather, reduce_scatter_rows=scatter, all_reduce_owned=sum_owned))
        yield


@contextmanager
def replace(instance: Any, **methods: Any) -> Iterator[None]:
    """Inside, `instance` has other methods than its class."""
    instance.__dict__.update(methods)
    try:
        yield
    finally:
        for name in methods:
            del instance.__dict__[name]
