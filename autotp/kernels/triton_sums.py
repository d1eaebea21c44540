"""Sums of many rows over ranks that can write to each other's memory, in one launch, with what follows: bias, residual and norm.

Rows are dealt to the ranks in groups. Each rank writes its parts of a group to the rank that owns it, who adds them up and writes
the sum to all; the norm is computed by everyone. So a row crosses each link once as a part and once as a sum, and groups are on
their way while others are added up.

What was written is announced by a flag that counts the calls, so none is reset, and each place is used once a call: it is free
for the next call once all sums of this one are there, since whoever sent them had read it. A program waits for the same program
of the other ranks alone, and their programs start in the same order, so all come through however few run at once.

A flag that does not come is looked for `patience` times, as words are in triton_peers.py, and what it announces reads as -1.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
from __future__ import annotations

from typing import NamedTuple

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from .triton_launch import ceil_power, on_own_device
from .triton_peers import choose_warps, first_of, join_words, load_words, norm_words, second_of

GROUP = 4  # rows that one flag announces
FLAGS = 16384  # groups of one call, at most


class Board(NamedTuple):
    """Memory into which the ranks of a group write for each other, as one rank sees it.

    Attributes:
        addresses: int64 `[T + 1]`, on this rank's device: where each rank's board begins, zeros at first; and an int32 that the
            host reads, 0 until a rank's flag did not come, whose number plus one it is then.
        counters: int32 `[programs + 1]`, this rank's own: calls so far, by each program; and that number once more.
        part_words: of 4 bytes, between the parts of one rank and those of the next; rank, size: this rank's place among T ranks.
        patience: how often a flag is looked for.
    """

    addresses: Tensor
    counters: Tensor
    part_words: int
    rank: int
    size: int
    patience: int


def measure_board(n_bytes: int, row_bytes: int, size: int) -> tuple[int, int]:
    """Bytes of a board for sums of `n_bytes`, in rows of `row_bytes`, over `size` ranks, and its `part_words`.

    It holds flags, each rank's parts of the owner's rows, and the sums of all rows.
    """
    part_words = (n_bytes // size + 2 * GROUP * row_bytes) // 4
    return 4 * ((size + 1) * FLAGS + size * part_words) + n_bytes, part_words


def holds(rows: int, size: int) -> bool:
    """Whether there are flags for `rows`."""
    return rows <= GROUP * (FLAGS - size)


@triton.jit
def _board(addresses, rank):
    return tl.multiple_of(tl.load(addresses + rank).to(tl.pointer_type(tl.int32)), 16)


@triton.jit
def _flag(board, kind, group, FLAGS: tl.constexpr):
    """Where the flag of a group lies: `kind` is the rank whose parts it announces, or T for sums."""
    return board + kind * FLAGS + group


@triton.jit
def _announce(flag, call):
    tl.debug_barrier()  # what all threads wrote comes before the flag
    tl.atomic_xchg(flag, call, sem="release", scope="sys")


@triton.jit
def _come(flag, call, addresses, counters, source, patience, T: tl.constexpr, PROGRAMS: tl.constexpr):
    """Wait for a flag of rank `source`; whether it came."""
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    looks = 0
    waits = seen != call
    while waits:
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        looks += 1
        gave_up = 0
        if looks % 256 == 0:
            gave_up = tl.atomic_add(counters + PROGRAMS, 0)
        if (seen != call) & (looks >= patience):
            tl.atomic_xchg(counters + PROGRAMS, source + 1)
            tl.store(tl.load(addresses + T).to(tl.pointer_type(tl.int32)), source + 1)
            gave_up = 1
        waits = (seen != call) & (gave_up == 0)
    return seen == call


@triton.jit
def _load_moved(source, came, inside):
    """Words that another rank wrote, past this multiprocessor's cache; -1 where they did not come."""
    return tl.where(came, tl.load(source, mask=inside, other=0, cache_modifier=".cg"), -1)


@triton.jit(do_not_specialize=["rank", "patience"])
def _sum_rows(
    x, bias, residual, weight, shift, total, y, addresses, counters, rank, patience, M, N, part_words, eps,
    T: tl.constexpr, GROUP: tl.constexpr, FLAGS: tl.constexpr, PROGRAMS: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """M rows of N words. Rank r owns groups `r * mine` to `(r + 1) * mine`; a program takes every PROGRAMS-th of each rank."""
    dtype: tl.constexpr = x.dtype.element_ty
    program = tl.program_id(0)
    word = tl.arange(0, BLOCK)
    inside = word < N
    scale, moved = None, None
    if weight is not None:
        scale = load_words(weight, word, inside)
    if shift is not None:
        moved = load_words(shift, word, inside)
    if bias is not None:
        added = load_words(bias, word, inside)
    call = tl.load(counters + program) + 1
    groups = tl.cdiv(M, GROUP)
    mine = tl.cdiv(groups, T)
    width, part = tl.cast(N, tl.int64), tl.cast(part_words, tl.int64)  # rows may lie further than 31 bits reach
    parts = (T + 1) * FLAGS  # words from a board's beginning: parts of rank r begin at r * part_words, then sums
    sums = parts + T * part
    here = _board(addresses, rank)
    totals = total.to(tl.pointer_type(tl.int32))
    for local in range(program, mine, PROGRAMS):
        for step in tl.static_range(1, T):
            owner = (rank + step) % T
            group = owner * mine + local
            there = _board(addresses, owner)
            for i in range(GROUP):
                row = group * GROUP + i
                held = word < tl.where(row < M, N, 0)
                place = parts + rank * part + (local * GROUP + i) * width
                tl.store(there + place + word, load_words(x, row * width + word, held), mask=held)
            _announce(_flag(there, rank, local, FLAGS), call)
    for local in range(program, mine, PROGRAMS):
        group = rank * mine + local
        came = call > 0
        for step in tl.static_range(1, T):
            sender = (rank + step) % T
            came &= _come(_flag(here, sender, local, FLAGS), call, addresses, counters, sender, patience, T, PROGRAMS)
        for i in range(GROUP):
            row = group * GROUP + i
            held = word < tl.where(row < M, N, 0)
            own = load_words(x, row * width + word, held)
            first = tl.zeros((BLOCK,), tl.float32)
            second = tl.zeros((BLOCK,), tl.float32)
            for source in tl.static_range(T):  # one order, whoever owns the row
                place = parts + source * part + (local * GROUP + i) * width
                data = _load_moved(here + place + word, came, word < tl.where(source == rank, 0, N))
                data = tl.where(source == rank, own, data)
                first += first_of(data, dtype)
                second += second_of(data, dtype)
            if bias is not None:
                first += first_of(added, dtype)
                second += second_of(added, dtype)
            if residual is not None:
                kept = load_words(residual, row * width + word, held)
                first += first_of(kept, dtype)
                second += second_of(kept, dtype)
            out = join_words(first, second, dtype)
            tl.store(totals + row * width + word, out, mask=held)
            for step in tl.static_range(1, T):
                there = _board(addresses, (rank + step) % T)
                tl.store(there + sums + row * width + word, out, mask=held)
            if y is not None:
                normed = norm_words(out, scale, moved, inside, N, eps, dtype, KIND)
                tl.store(y.to(tl.pointer_type(tl.int32)) + row * width + word, normed, mask=held)
        for step in tl.static_range(1, T):
            there = _board(addresses, (rank + step) % T)
            _announce(_flag(there, T, group, FLAGS), call)
    for local in range(program, mine, PROGRAMS):
        for step in tl.static_range(1, T):
            owner = (rank + step) % T
            group = owner * mine + local
            came = _come(_flag(here, T, group, FLAGS), call, addresses, counters, owner, patience, T, PROGRAMS)
            for i in range(GROUP):
                row = group * GROUP + i
                held = word < tl.where(row < M, N, 0)
                out = _load_moved(here + sums + row * width + word, came, held)
                tl.store(totals + row * width + word, out, mask=held)
                if y is not None:
                    normed = norm_words(out, scale, moved, inside, N, eps, dtype, KIND)
                    tl.store(y.to(tl.pointer_type(tl.int32)) + row * width + word, normed, mask=held)
    tl.debug_barrier()  # all have read the counter
    tl.store(counters + program, call)


@on_own_device
def sum_rows(
    x: Tensor,
    board: Board,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    shift: Tensor | None = None,
    eps: float = 0.0,
    kind: str = "",
    warps: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """reference.reduce_rows of all ranks' contiguous `x`, which `board` must hold; every rank must make the same call."""
    width, words = x.shape[-1], x.shape[-1] * x.element_size() // 4
    rows, programs = x.numel() // width, len(board.counters) - 1
    total = torch.empty_like(x)
    y = torch.empty_like(x) if kind else None
    _sum_rows[(programs,)](
        x, bias, residual, weight, shift, total, y, board.addresses, board.counters, board.rank, board.patience,
        rows, words, board.part_words, eps, T=board.size, GROUP=GROUP, FLAGS=FLAGS, PROGRAMS=programs, KIND=kind,
        BLOCK=ceil_power(words), num_warps=warps or choose_warps(words),
    )  # fmt: skip
    return total, y
