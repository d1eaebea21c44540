"""FP8 operands of many weights in two kernels, whatever their number: largest sizes, then both operands of each.

What differs between the parts lies in a table on the device, a row of int64 for each:

| entry | |
|---|---|
| 0 | the first program of those that work on it |
| 1 | address of the part `[M, N]`, its columns contiguous |
| 2 | elements between its rows |
| 3, 4 | M, N |
| 5 | number of its stack, whose largest size and scale it shares |
| 6 | address of its rows in values `[all M, N]` |
| 7 | address of its columns in turned `[N, P]`, 0 for none |
| 8 | P |
| 9 | address of the count of what is not finite, in a stack's first part; 0 for none |
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false, reportOperatorIssue=false
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from .fp8_scaled import LIMITS, Operands, Quantised, Share, Stack
from .triton_fp8 import INTERPRETS, TILES, WARPS, _count, _limit_to, _round, _size_bits
from .triton_launch import Remembered, ceil_div, ceil_power, on_own_device

ENTRIES = tl.constexpr(10)
SCALING = "tensorwise"
(HEIGHT, WIDTH), STEP = TILES[SCALING], 4  # numbers at multiples of 16 bytes


@triton.jit
def _load_tile(table, like, PARTS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, count):
    """The tile of this program: its part's row of the table, values, rows, columns and where they are inside."""
    numbers = tl.arange(0, PARTS)
    firsts = tl.load(table + numbers * ENTRIES, mask=numbers < count, other=1 << 40)
    part = tl.sum((firsts <= tl.program_id(0)).to(tl.int32), 0) - 1
    row = table + part * ENTRIES
    x = tl.load(row + 1).to(like.dtype)
    step, M, N = tl.load(row + 2), tl.multiple_of(tl.load(row + 3), 16), tl.multiple_of(tl.load(row + 4), 16)
    tile = tl.program_id(0) - tl.load(row)
    blocks = tl.cdiv(N, COLS)
    rows = tile // blocks * ROWS + tl.arange(0, ROWS)
    cols = tile % blocks * COLS + tl.arange(0, COLS)
    inside = (rows < M)[:, None] & (cols < N)[None, :]
    places = tl.multiple_of(x + (rows[:, None] * step + cols[None, :]), [1, 16])
    v = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    return row, v, rows, cols, inside, N, tile


@Remembered
@triton.jit(do_not_specialize=["count"])
def _find_amax(table, like, amax, count, PARTS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The bits of the largest size in each stack; `amax` holds zeros."""
    row, v, _, _, _, _, _ = _load_tile(table, like, PARTS, ROWS, COLS, count)
    tl.atomic_max(amax + tl.load(row + 5), tl.max(tl.max(_size_bits(v), 1), 0))


@Remembered
@triton.jit(do_not_specialize=["count"])
def _cast(
    table, like, amax, scales, kind, count, PARTS: tl.constexpr, STEP: tl.constexpr, LIMIT: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    row, v, rows, cols, inside, N, tile = _load_tile(table, like, PARTS, ROWS, COLS, count)
    stack = tl.load(row + 5)
    bits = tl.load(amax + stack)
    largest = _limit_to(bits)
    if tile == 0:
        tl.store(scales + stack * STEP, tl.div_rn(largest, LIMIT))
        bad = tl.load(row + 9)
        if bad != 0:
            _count(bad.to(amax.dtype), bits + tl.zeros((1,), tl.int32))
    q = _round(v, tl.div_rn(LIMIT + 0.0 * largest, largest), LIMIT, kind.dtype.element_ty, ROUND)
    values = tl.load(row + 6).to(kind.dtype)
    tl.store(tl.multiple_of(values + (rows.to(tl.int64)[:, None] * N + cols[None, :]), [1, 16]), q, mask=inside)
    turned = tl.load(row + 7)
    if turned != 0:
        P = tl.multiple_of(tl.load(row + 8), 16)
        places = turned.to(kind.dtype) + (cols.to(tl.int64)[:, None] * P + rows[None, :])
        tl.store(tl.multiple_of(places, [1, 16]), tl.trans(q), mask=tl.trans(inside))


@on_own_device
def quantise_stacks(like: Tensor, stacks: Sequence[Stack], dtype: torch.dtype, share: Share | None) -> list[Operands]:
    """reference_fp8.quantise_stacks, of stacks that are even."""
    device = like.device
    amax = torch.zeros(len(stacks), dtype=torch.int32, device=device)  # what ranks share, whichever backend each takes
    scales = torch.empty(len(stacks), STEP, dtype=torch.float32, device=device)
    found: list[Operands] = []
    table: list[tuple[int, ...]] = []
    programs = 0
    for number, (stack, scale) in enumerate(zip(stacks, scales[:, 0].unbind(), strict=True)):
        width, height = stack.width, stack.height
        values = torch.empty(height, width, dtype=dtype, device=device)
        turned = torch.empty(width, height, dtype=dtype, device=device) if stack.columns else None
        places = values.data_ptr(), 0 if turned is None else turned.data_ptr()
        bad, above = 0 if stack.bad is None else stack.bad.data_ptr(), 0
        for part in stack.parts:
            m = part.shape[0]
            at = places[0] + above * width, places[1] and places[1] + above  # of elements of one byte
            table.append((programs, part.data_ptr(), part.stride(0), m, width, number, *at, height, 0 if above else bad))
            above, programs = above + m, programs + ceil_div(m, HEIGHT) * ceil_div(width, WIDTH)
        found.append((Quantised(values, scale, SCALING), None if turned is None else Quantised(turned, scale, SCALING)))
    _run(like, table, programs, amax, scales, found[0][0], share)
    return found


def _run(
    like: Tensor, rows: list[tuple[int, ...]], programs: int, amax: Tensor, scales: Tensor, first: Quantised | None,
    share: Share | None,
) -> None:  # fmt: skip
    assert first is not None
    table = torch.tensor(rows, dtype=torch.int64, pin_memory=like.is_cuda).to(like.device, non_blocking=True)
    how = dict(PARTS=ceil_power(len(rows)), ROWS=HEIGHT, COLS=WIDTH, num_warps=WARPS[SCALING])
    _find_amax[(programs,)](table, like, amax, len(rows), **how)
    amax = amax if share is None else share(amax)
    limit = LIMITS[first.values.dtype]
    _cast[(programs,)](table, like, amax, scales, first.values, len(rows), STEP=STEP, LIMIT=limit, ROUND=INTERPRETS, **how)
