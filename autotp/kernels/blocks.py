"""Products of rows dealt to the ranks, block by block while rows move; no autograd.

M rows of all ranks, R = ceil(M / T) of one, K in, N out. `gather` and `scatter` are those of an exchange (autotp/exchange.py),
which is passed in. Where it moves blocks beside what computes, a product starts with the rows that are here, or that the others
wait for; else it is one GEMM, and what moves does so before or after.

| function | algebra | what hides behind it |
|---|---|---|
| `multiply_gathered_rows` | `y = gather(x) @ w` | the gather, behind this rank's own block |
| `multiply_gathered_gradient` | `dx = gather(dy) @ w` | the same |
| `multiply_into_scatter` | `y = scatter(x @ w)` | the scatter, behind this rank's own block, which comes last |
| `sum_scattered` | `dx = scatter(dy @ w)` | the scatter, behind the other blocks and what the caller does meanwhile |
| `sum_whole` | `dx = gather(scatter(dy @ w))` | both, behind the other blocks and what the caller does meanwhile |
| `multiply_and_sum` | `y = gather(scatter(x @ w))` | the scatter, behind this rank's own block |

The last two are for rows that all ranks have, and whose sums all ranks get: they are dealt for that moment only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from .matmul import dgrad
from .moves import BY_SIZE, Moves

Found = TypeVar("Found")
Factors = Sequence[tuple[Tensor, Tensor]]  # dy `[M, N]`, w `[N, K]`, whose products are added up


@lru_cache(maxsize=4096)
def block_of(rows: int, rank: int, tp_size: int) -> slice:
    """The rows of `rank` where they are dealt in blocks of `ceil(rows / tp_size)`; the last blocks may be short or empty."""
    size = -(-rows // tp_size)
    return slice(min(rows, rank * size), min(rows, (rank + 1) * size))


@dataclass(frozen=True)
class Dealt:
    """How rows are dealt in this call, and in all that are like it: what follows from it is found out once.

    Attributes:
        exchange: what moves them; rank, tp_size: of the ranks they are dealt to.
        shape: of all rows, such as `(M,)` or `(B, S)`: outputs of a column product are `[*shape, N]`.
        local_shape: of one rank's, such as `(R,)` or `(1, R)`.
        reduce_dtype: in which partial rows are summed; None for their own.
        moves: which way rows move.
    """

    exchange: Any
    rank: int
    tp_size: int
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    reduce_dtype: torch.dtype | None = None
    moves: Moves = BY_SIZE

    @cached_property
    def rows(self) -> int:
        """M."""
        return prod(self.shape)

    @cached_property
    def blocks(self) -> tuple[slice, ...]:
        """The rows of each rank."""
        return tuple(block_of(self.rows, rank, self.tp_size) for rank in range(self.tp_size))

    @cached_property
    def own(self) -> slice:
        """The rows of this rank."""
        return self.blocks[self.rank]

    @cached_property
    def missing(self) -> int:
        """Rows of padding behind this rank's."""
        return -(-self.rows // self.tp_size) - (self.own.stop - self.own.start)

    def trim(self, full: Tensor) -> Tensor:
        """The rows `[M, K]` of `full` `[T * R, K]`."""
        return full if full.shape[0] == self.rows else full[: self.rows]


def multiply_gathered_rows(
    dealt: Dealt,
    gather: Any,
    weights: Sequence[Tensor],
    outs: Sequence[Tensor],
    biases: Sequence[Tensor | None] = (None,),
    dtype: torch.dtype | None = None,
) -> None:
    """Write `rows @ w + b` for each w `[K, N]` into its `[M, N]`, block by block as rows, cast to `dtype`, arrive."""
    for rank in gather.order:
        block = dealt.blocks[rank]
        rows = _take(gather, rank, block)
        rows = rows if dtype is None else rows.to(dtype)
        for w, bias, out in zip(weights, biases, outs, strict=True):
            if bias is None:
                torch.mm(rows, w, out=out[block])
            else:
                torch.addmm(bias, rows, w, out=out[block])
    gather.wait_all()


def _take(gather: Any, rank: int, block: slice) -> Tensor:
    """The rows of `rank` that are rows of the whole, once they are here."""
    rows, size = gather.wait(rank), block.stop - block.start
    return rows if rows.shape[0] == size else rows[:size]


def multiply_gathered_gradient(dealt: Dealt, gather: Any, weights: Sequence[Tensor]) -> Tensor:
    """`[M, K]`, the sum of `dy @ w` for each w `[Ni, K]`, whose dy `[M, Ni]` are the columns of gathered rows in turn."""
    sizes = [w.shape[0] for w in weights]
    if not gather.order:
        return add_products([*zip(dealt.trim(gather.wait_all()).split(sizes, 1), weights, strict=True)])
    dx = weights[0].new_empty(dealt.rows, weights[0].shape[1])
    for rank in gather.order:
        block = dealt.blocks[rank]
        rows = _take(gather, rank, block)
        add_products([*zip(rows.split(sizes, 1), weights, strict=True)], out=dx[block])
    return dx


def multiply_into_scatter(dealt: Dealt, rows: Tensor, weights: Sequence[Tensor], multiply: Callable[[], Tensor]) -> Tensor:
    """This rank's `[R, N1 + N2 + ...]` of the ranks' sum of `rows @ w` for each w `[K, Ni]`, side by side.

    Args:
        multiply: gives this rank's part of all rows, where they are not given in blocks.
    """
    sizes = [w.shape[1] for w in weights]
    scatter = dealt.exchange.scatter(dealt.rows, sum(sizes), rows, dealt.reduce_dtype, dealt.moves.forward)
    if not scatter.order:
        return scatter.reduce(pad(multiply(), dealt))

    for rank in scatter.order:
        _multiply_block(rows[dealt.blocks[rank]], weights, scatter.place(rank))
        scatter.send(rank)
    return pad_own(_multiply_own(dealt, scatter, rows, weights), dealt)


def _multiply_block(rows: Tensor, weights: Sequence[Tensor], out: Tensor) -> Tensor:
    if len(weights) == 1:
        return torch.mm(rows, weights[0], out=out)
    for w, part in zip(weights, out.split([w.shape[1] for w in weights], 1), strict=True):
        torch.mm(rows, w, out=part)
    return out


def _multiply_own(dealt: Dealt, scatter: Any, rows: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """This rank's block of the sum; what it computes of that itself hides the last of the others' parts."""
    block = rows[dealt.own]
    if len(weights) == 1:
        own = torch.mm(block, weights[0])
    else:
        own = _multiply_block(block, weights, rows.new_empty(len(block), sum(w.shape[1] for w in weights)))
    received = scatter.receive()
    return own.add_(received) if received.dtype == own.dtype else received.add_(own).to(own.dtype)


def sum_scattered(dealt: Dealt, factors: Factors, meanwhile: Callable[[], Found]) -> tuple[Tensor, Found]:
    """This rank's rows `[R, K]` of the ranks' sum of all `dy @ w`, and what `meanwhile()` returns, run while rows move.

    With `dealt.moves.early` the rows are complete before that runs.
    """
    dy, w = factors[0]
    scatter = dealt.exchange.scatter(dealt.rows, w.shape[1], dy, dealt.reduce_dtype, dealt.moves.scatter)
    if not scatter.order:  # at once, and before the rest: a collective in sequence has nothing to hide behind
        return scatter.reduce(pad(add_products(factors), dealt)), meanwhile()
    for rank in scatter.order:
        add_products(factors, dealt.blocks[rank], scatter.place(rank))
        scatter.send(rank)
    if dealt.moves.early:
        return pad_own(_complete(dealt, factors, scatter), dealt), meanwhile()
    found = meanwhile()
    return pad_own(_complete(dealt, factors, scatter), dealt), found


def sum_whole(dealt: Dealt, factors: Factors, meanwhile: Callable[[], Found]) -> tuple[Tensor, Found]:
    """`[M, K]`, the ranks' sum of all `dy @ w` on each of them, and what `meanwhile()` returns, run while rows move.

    The exchange gives rows in blocks: where it does not, a sum of the whole is one collective, and the caller's.
    """
    dy, w = factors[0]
    exchange = dealt.exchange
    full = dy.new_empty(dealt.tp_size * -(-dealt.rows // dealt.tp_size), w.shape[1])
    scatter = exchange.scatter(dealt.rows, w.shape[1], dy, dealt.reduce_dtype, True)
    for rank in scatter.order:
        add_products(factors, dealt.blocks[rank], scatter.place(rank))
        scatter.send(rank)
    mine = add_products(factors, dealt.own)
    with exchange.beside():  # what is kept in names here lives until all of it has arrived
        received = scatter.receive()
        total = pad_own(received.add_(mine).to(mine.dtype), dealt)
        gather = exchange.gather(total, True, full)
    found = meanwhile()
    return dealt.trim(gather.wait_all()), found


def multiply_and_sum(dealt: Dealt, rows: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """`[M, N1 + N2 + ...]`, the ranks' sum of `rows @ w` for each w `[K, Ni]`, side by side, on each of them."""
    width = sum(w.shape[1] for w in weights)
    scatter = dealt.exchange.scatter(dealt.rows, width, rows, dealt.reduce_dtype, True)
    for rank in scatter.order:
        _multiply_block(rows[dealt.blocks[rank]], weights, scatter.place(rank))
        scatter.send(rank)
    own = pad_own(_multiply_own(dealt, scatter, rows, weights), dealt)
    return dealt.trim(dealt.exchange.gather(own, True).wait_all())


def _complete(dealt: Dealt, factors: Factors, scatter: Any) -> Tensor:
    """This rank's own block of the sum: the others' parts of it, to which its own products are added."""
    received, block = scatter.receive(), dealt.own
    if received.dtype == factors[0][0].dtype:
        return add_products(factors, block, received, begun=True)
    own = add_products(factors, block)
    return received.add_(own).to(own.dtype)


def add_products(factors: Factors, block: slice = slice(None), out: Tensor | None = None, begun: bool = False) -> Tensor:
    """The sum of the products of a block of rows, in `out`; added to what is there if that is `begun`."""
    for dy, w in factors:
        if begun:
            dgrad(dy[block], w, out)
        elif out is None:
            out, begun = dgrad(dy[block], w), True
        else:
            torch.mm(dy[block], w, out=out)
            begun = True
    assert out is not None
    return out


def pad(rows: Tensor, dealt: Dealt) -> Tensor:
    """`[M, N]` with zero rows after it, up to `[T * R, N]`."""
    missing = -rows.shape[0] % dealt.tp_size
    return torch.cat([rows, rows.new_zeros(missing, rows.shape[1])]) if missing else rows


def pad_own(rows: Tensor, dealt: Dealt) -> Tensor:
    """This rank's rows with zero rows after them, up to `[R, N]`."""
    return torch.cat([rows, rows.new_zeros(dealt.missing, rows.shape[1])]) if dealt.missing else rows
