"""The largest of logits whose columns are dealt to the ranks, in two launches: each program's best, then everybody's.

A logit and its column are one integer whose order is that of the logits, and among equal ones that of the columns backwards: so
the largest integer is the first of the largest logits, as torch.argmax gives it, NaN before all.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from .triton_early import early, start_next, wait_for_previous
from .triton_launch import ceil_power, on_own_device
from .triton_peers import Inbox, send_words, wait_for_words

BLOCK, MOST_PARTS = 4096, 64


@triton.jit
def _best_part(logits, keys, N, start, row_step, parts, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """The best key of every `parts`-th block of a row's N columns: keys int64 `[R, parts]`."""
    start_next(EARLY)
    wait_for_previous(EARLY)
    row, part = tl.program_id(1), tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), -0x8000000000000000, tl.int64)
    for first in range(part * BLOCK, N, parts * BLOCK):
        at = first + cols
        x = tl.load(logits + row.to(tl.int64) * row_step + at, mask=at < N, other=float("-inf")).to(tl.float32) + 0.0
        bits = x.to(tl.int32, bitcast=True)
        bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        bits = tl.where(x != x, 0x7FFFFFFF, bits)
        key = (bits.to(tl.int64) << 32) | (0xFFFFFFFF - (start + at).to(tl.int64))
        best = tl.where((at < N) & (key > best), key, best)
    tl.store(keys + row * parts + part, tl.max(best, 0))


@triton.jit(do_not_specialize=["rank", "patience"])
def _best_of_all(
    keys, halt, tokens, halted, addresses, counters, rank, patience, parts,
    T: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    start_next(EARLY)
    wait_for_previous(EARLY)
    row = tl.program_id(0)
    part = tl.arange(0, PARTS)
    own = tl.max(tl.load(keys + row * parts + part, mask=part < parts, other=-0x8000000000000000), 0)
    word = tl.arange(0, 4)
    call = tl.load(counters + row) + 1
    asked = tl.load(halt).to(tl.int32)
    mine = tl.where(word == 0, (own >> 32).to(tl.int32), tl.where(word == 1, own.to(tl.int32), asked))
    send_words(addresses, mine, word, word < 3, call, row, rank, T, ROWS, WORDS)
    best, asking = own, asked * 0
    for source in tl.static_range(T):
        data = wait_for_words(addresses, counters, word, word < 3, call, row, rank, source, patience, T, ROWS, WORDS)
        high = tl.sum(tl.where(word == 0, data, 0), 0).to(tl.int64)
        low = tl.sum(tl.where(word == 1, data, 0), 0).to(tl.int64) & 0xFFFFFFFF
        best = tl.maximum(best, (high << 32) | low)
        asking += tl.sum(tl.where(word == 2, data, 0), 0)
    tl.store(tokens + row, 0xFFFFFFFF - (best & 0xFFFFFFFF))
    if row == 0:
        tl.store(halted, asking.to(tl.int64))
    tl.debug_barrier()
    tl.store(counters + row, call)


@on_own_device
def best_columns(logits: Tensor, inbox: Inbox, start: int, halt: Tensor) -> tuple[Tensor, Tensor]:
    """reference_decode.best_columns of all ranks' `logits`; every rank must make the same call."""
    rows, columns = logits.shape
    parts = min(MOST_PARTS, triton.cdiv(columns, BLOCK))
    keys = torch.empty((rows, parts), dtype=torch.int64, device=logits.device)
    tokens, halted = torch.empty_like(keys[:, 0]), torch.empty_like(halt)
    _best_part[(parts, rows)](logits, keys, columns, start, logits.stride(0), parts, BLOCK=BLOCK, num_warps=8, **early(logits))
    _best_of_all[(rows,)](
        keys, halt, tokens, halted, inbox.addresses, inbox.counters, inbox.rank, inbox.patience, parts,
        T=inbox.size, ROWS=inbox.rows, WORDS=inbox.words, PARTS=ceil_power(parts), num_warps=1, **early(logits),
    )  # fmt: skip
    return tokens, halted
