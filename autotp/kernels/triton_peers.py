"""Sums over ranks that can write to each other's memory, in one launch, with what follows: bias, residual and norm.

Each rank writes its row into every rank's inbox and waits for the others' in its own. A word of 8 bytes carries 4 bytes of data
and the number of the call, so whoever sees the number has the data: no fence, no barrier. A row's calls take two places in turn;
a place is free again two calls later, since a rank answers a call only after it has done with the one before.

Words that do not come are looked for `patience` times. Then the rank that owes them is noted, on the device, so that no later
wait lasts, and where the host reads it; what did not come reads as -1: a NaN in sums, and a token that is in every vocabulary.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
from __future__ import annotations

from typing import NamedTuple

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from .triton_early import early, start_next, wait_for_previous
from .triton_launch import ceil_power, on_own_device


class Inbox(NamedTuple):
    """Memory into which the ranks of a group write for each other, as one rank sees it.

    Attributes:
        addresses: int64 `[T + 1]`, on this rank's device: where each rank's inbox begins, `[2, T, rows, words]` of 8 bytes, zeros
            at first; and an int32 that the host reads, 0 until words of a rank did not come, whose number plus one it is then.
        counters: int32 `[rows + 1]`, this rank's own: calls so far of each row; and that number once more.
        words: of 4 bytes that a row may hold; rank, size: this rank's place among T ranks.
        patience: how often a word is looked for.
    """

    addresses: Tensor
    counters: Tensor
    words: int
    rank: int
    size: int
    patience: int

    @property
    def rows(self) -> int:
        """Of one call, at most."""
        return len(self.counters) - 1


@triton.jit
def first_of(word, dtype: tl.constexpr):
    """The number in a word, or in its lower half."""
    if dtype == tl.float32:
        return word.to(tl.float32, bitcast=True)
    else:
        return (word & 0xFFFF).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def second_of(word, dtype: tl.constexpr):
    """The number in a word's upper half; none in float32."""
    if dtype == tl.float32:
        return tl.zeros(word.shape, tl.float32)
    else:
        return (word >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def join_words(first, second, dtype: tl.constexpr):
    if dtype == tl.float32:
        return first.to(tl.int32, bitcast=True)
    else:
        low = first.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        return low | (second.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def load_words(source, word, inside):
    return tl.load(source.to(tl.pointer_type(tl.int32)) + word, mask=inside, other=0)


@triton.jit
def norm_words(words, scale, moved, inside, N, eps, dtype: tl.constexpr, KIND: tl.constexpr):
    """The norm of a row of N words, by the words of its weight and of what is added after it, if there are any."""
    first = tl.where(inside, first_of(words, dtype), 0.0)
    second = tl.where(inside, second_of(words, dtype), 0.0)
    count = N if dtype == tl.float32 else 2 * N
    if KIND == "layernorm":
        centre = (tl.sum(first, 0) + tl.sum(second, 0)) / count
        first = tl.where(inside, first - centre, 0.0)
        second = tl.where(inside, second - centre, 0.0) if dtype != tl.float32 else second
    square = tl.sum(first * first + second * second, 0) / count
    rstd = tl.rsqrt(square + eps)
    first *= rstd
    second *= rstd
    if scale is not None:
        one = 1.0 if KIND == "rms1p" else 0.0
        first *= first_of(scale, dtype) + one
        second *= second_of(scale, dtype) + one
    if moved is not None:
        first += first_of(moved, dtype)
        second += second_of(moved, dtype)
    return join_words(first, second, dtype)


@triton.jit
def send_words(
    addresses, words, word, inside, call, row, rank, T: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr
):  # fmt: skip
    """Write this rank's `words` of a row into every rank's inbox, its own too."""
    packed = (call.to(tl.int64) << 32) | (words.to(tl.int64) & 0xFFFFFFFF)
    place = (((call & 1) * T + rank) * ROWS + row) * WORDS + word
    for i in tl.static_range(T):
        inbox = tl.load(addresses + (rank + 1 + i) % T).to(tl.pointer_type(tl.int64))
        tl.store(inbox + place, packed, mask=inside)


@triton.jit
def wait_for_words(
    addresses, counters, word, inside, call, row, rank, source, patience, T: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr
):  # fmt: skip
    """The words that rank `source` sent for this call; -1 for those that did not come."""
    inbox = tl.load(addresses + rank).to(tl.pointer_type(tl.int64))
    place = inbox + (((call & 1) * T + source) * ROWS + row) * WORDS + word
    got = tl.load(place, mask=inside, other=0, volatile=True)
    missing = inside & ((got >> 32).to(tl.int32) != call)
    state = tl.max(tl.where(missing, 1, 0), 0)  # 1: something is missing; 2: and was given up
    looks = 0
    while state == 1:
        gave_up = tl.load(counters + ROWS, volatile=True)
        got = tl.load(place, mask=inside, other=0, volatile=True)
        missing = inside & ((got >> 32).to(tl.int32) != call)
        # Threads may read different flags; what the loop does must be one thing for all, and is after a maximum.
        state = tl.max(tl.where(missing, tl.where(gave_up != 0, 2, 1), 0), 0)
        looks += 1
        if (state == 1) & (looks >= patience):
            tl.store(counters + ROWS, source + 1)
            tl.store(tl.load(addresses + T).to(tl.pointer_type(tl.int32)), source + 1)
            state = 2
    return tl.where(missing, -1, got.to(tl.int32))


@triton.jit(do_not_specialize=["rank", "patience"])
def _reduce_rows(
    x, bias, residual, weight, shift, total, y, addresses, counters, rank, patience, N, x_step, residual_step, eps,
    T: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program sums one row of N words; steps are in words, too."""
    start_next(EARLY)
    dtype: tl.constexpr = x.dtype.element_ty
    row = tl.program_id(0)
    word = tl.arange(0, BLOCK)
    inside = word < N
    scale, moved = None, None
    if weight is not None:
        scale = load_words(weight, word, inside)
    if shift is not None:
        moved = load_words(shift, word, inside)
    if bias is not None:
        added = load_words(bias, word, inside)
    wait_for_previous(EARLY)
    call = tl.load(counters + row) + 1
    send_words(addresses, load_words(x, row * x_step + word, inside), word, inside, call, row, rank, T, ROWS, WORDS)
    if residual is not None:
        kept = load_words(residual, row * residual_step + word, inside)
    first = tl.zeros((BLOCK,), tl.float32)
    second = tl.zeros((BLOCK,), tl.float32)
    for source in tl.static_range(T):  # in one order on all ranks, so that all get the same bits
        data = wait_for_words(addresses, counters, word, inside, call, row, rank, source, patience, T, ROWS, WORDS)
        first += first_of(data, dtype)
        second += second_of(data, dtype)
    if bias is not None:
        first += first_of(added, dtype)
        second += second_of(added, dtype)
    if residual is not None:
        first += first_of(kept, dtype)
        second += second_of(kept, dtype)
    out = join_words(first, second, dtype)
    tl.store(total.to(tl.pointer_type(tl.int32)) + row * N + word, out, mask=inside)
    if y is not None:
        normed = norm_words(out, scale, moved, inside, N, eps, dtype, KIND)
        tl.store(y.to(tl.pointer_type(tl.int32)) + row * N + word, normed, mask=inside)
    tl.debug_barrier()  # all have read the counter
    tl.store(counters + row, call)


def choose_warps(words: int) -> int:
    """Warps for a row of `words`."""
    return min(8, max(1, ceil_power(words) // 128))


@on_own_device
def reduce_rows(
    x: Tensor,
    inbox: Inbox,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    shift: Tensor | None = None,
    eps: float = 0.0,
    kind: str = "",
    warps: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """reference.reduce_rows of all ranks' contiguous `x`, which `inbox` must hold; every rank must make the same call."""
    width, words = x.shape[-1], x.shape[-1] * x.element_size() // 4
    rows = x.numel() // width
    total = torch.empty_like(x)
    y = torch.empty_like(x) if kind else None
    _reduce_rows[(rows,)](
        x, bias, residual, weight, shift, total, y, inbox.addresses, inbox.counters, inbox.rank, inbox.patience,
        words, words, words, eps, T=inbox.size, ROWS=inbox.rows, WORDS=inbox.words, KIND=kind, BLOCK=ceil_power(words),
        num_warps=warps or choose_warps(words), **early(x),
    )  # fmt: skip
    return total, y
