"""Products of a few rows in Triton, at the speed at which the weights can be read; sums in float32, rounded once.

| rows | a program |
|---|---|
| 1 or 2, in float32 to 4 | one or two rows of the weight (gate's and up's), multiplied elementwise with those of x, then summed |
| to 16 | a block of rows of the weight on the matrix units, x padded to 16 rows |
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

from typing import NamedTuple

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from .dispatch import MOST_ELEMENTWISE
from .triton_early import early, start_next, wait_for_previous
from .triton_gated import _activate
from .triton_launch import ceil_div, on_own_device

MOST_DOT_ROWS = 2  # rows of x that are multiplied without the matrix units, but in float32


class Tile(NamedTuple):
    """How a product is cut: rows of the weight and columns of a step, warps, pipeline stages or steps unrolled."""

    rows: int
    block: int
    warps: int
    depth: int


@triton.jit
def _finish(gate, up, bias, scale, n, inside, N, dtype: tl.constexpr, ACTIVATION: tl.constexpr):
    """The sums of one row of x, with scale, bias and gate."""
    if scale is not None:
        gate *= tl.load(scale + n, mask=inside, other=0.0)
        if ACTIVATION != "":
            up *= tl.load(scale + N + n, mask=inside, other=0.0)
    if bias is not None:
        gate += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION != "":
        if bias is not None:
            up += tl.load(bias + N + n, mask=inside, other=0.0).to(tl.float32)
        gate, _ = _activate(gate, ACTIVATION, dtype == tl.float32)
        gate *= up
    return gate.to(dtype)


@triton.jit
def _load_tile(rows, start, cols, inside, K: tl.constexpr, WHOLE: tl.constexpr):
    mask = inside[:, None] & (start < K) if WHOLE else inside[:, None] & (cols < K - start)[None, :]
    return tl.load(rows + start, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _dot_rows(
    x, w, bias, scale, y, N, x_step, w_step,
    K: tl.constexpr, M: tl.constexpr, ACTIVATION: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr,
    WHOLE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Each step loads the weights of the next; those of the first are on their way before x is there."""
    start_next(EARLY)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = n < N
    cols = tl.arange(0, BLOCK)
    first = w + n.to(tl.int64)[:, None] * w_step + cols[None, :]
    second = w + (n.to(tl.int64) + N)[:, None] * w_step + cols[None, :]
    wg = _load_tile(first, 0, cols, inside, K, WHOLE)
    if ACTIVATION != "":
        wu = _load_tile(second, 0, cols, inside, K, WHOLE)
    wait_for_previous(EARLY)
    g0 = tl.zeros((ROWS, BLOCK), tl.float32)
    g1, g2, g3, u0, u1, u2, u3 = g0, g0, g0, g0, g0, g0, g0
    for start in tl.range(0, K, BLOCK, loop_unroll_factor=UNROLL):
        gate = wg.to(tl.float32)
        if ACTIVATION != "":
            up = wu.to(tl.float32)
        if K > BLOCK:
            wg = _load_tile(first, start + BLOCK, cols, inside, K, WHOLE)
            if ACTIVATION != "":
                wu = _load_tile(second, start + BLOCK, cols, inside, K, WHOLE)
        for m in tl.static_range(M):
            if WHOLE:
                row = tl.load(x + m * x_step + start + cols).to(tl.float32)[None, :]
            else:
                row = tl.load(x + m * x_step + start + cols, mask=cols < K - start, other=0.0).to(tl.float32)[None, :]
            if m == 0:
                g0 += gate * row
                if ACTIVATION != "":
                    u0 += up * row
            elif m == 1:
                g1 += gate * row
                if ACTIVATION != "":
                    u1 += up * row
            elif m == 2:
                g2 += gate * row
                if ACTIVATION != "":
                    u2 += up * row
            else:
                g3 += gate * row
                if ACTIVATION != "":
                    u3 += up * row
    dtype: tl.constexpr = y.dtype.element_ty
    tl.store(y + n, _finish(tl.sum(g0, 1), tl.sum(u0, 1), bias, scale, n, inside, N, dtype, ACTIVATION), mask=inside)
    if M > 1:
        tl.store(y + N + n, _finish(tl.sum(g1, 1), tl.sum(u1, 1), bias, scale, n, inside, N, dtype, ACTIVATION), mask=inside)
    if M > 2:
        tl.store(y + 2 * N + n, _finish(tl.sum(g2, 1), tl.sum(u2, 1), bias, scale, n, inside, N, dtype, ACTIVATION), mask=inside)
    if M > 3:
        tl.store(y + 3 * N + n, _finish(tl.sum(g3, 1), tl.sum(u3, 1), bias, scale, n, inside, N, dtype, ACTIVATION), mask=inside)


@triton.jit
def _block_rows(
    x, w, bias, scale, y, N, M, x_step, w_step,
    K: tl.constexpr, ACTIVATION: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    start_next(EARLY)
    wait_for_previous(EARLY)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m = tl.arange(0, 16)
    inside, used = n < N, m < M
    cols = tl.arange(0, BLOCK)
    first = w + n.to(tl.int64)[:, None] * w_step + cols[None, :]
    second = w + (n.to(tl.int64) + N)[:, None] * w_step + cols[None, :]
    source = x + m[:, None] * x_step + cols[None, :]
    gate = tl.zeros((16, ROWS), tl.float32)
    up = gate
    for start in range(0, K, BLOCK):
        present = (cols < K - start)[None, :]
        mask, row_mask = inside[:, None], used[:, None]
        if not WHOLE:
            mask, row_mask = mask & present, row_mask & present
        rows = tl.load(source + start, mask=row_mask, other=0.0)
        wg = tl.load(first + start, mask=mask, other=0.0, eviction_policy="evict_first")
        gate = tl.dot(rows, wg.to(rows.dtype).trans(), gate, input_precision="ieee")
        if ACTIVATION != "":
            wu = tl.load(second + start, mask=mask, other=0.0, eviction_policy="evict_first")
            up = tl.dot(rows, wu.to(rows.dtype).trans(), up, input_precision="ieee")
    if scale is not None:
        gate *= tl.load(scale + n, mask=inside, other=0.0)[None, :]
        if ACTIVATION != "":
            up *= tl.load(scale + N + n, mask=inside, other=0.0)[None, :]
    if bias is not None:
        gate += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    if ACTIVATION != "":
        if bias is not None:
            up += tl.load(bias + N + n, mask=inside, other=0.0).to(tl.float32)[None, :]
        gate, _ = _activate(gate, ACTIVATION, y.dtype.element_ty == tl.float32)
        gate *= up
    tl.store(y + m[:, None] * N + n[None, :], gate.to(y.dtype.element_ty), mask=used[:, None] & inside[None, :])


def is_elementwise(m: int, dtype: torch.dtype) -> bool:
    """Whether `m` rows are multiplied without the matrix units."""
    return m <= (MOST_ELEMENTWISE if dtype is torch.float32 else MOST_DOT_ROWS)


def choose_tile(m: int, n: int, k: int, gated: bool, dtype: torch.dtype, small: bool = False) -> Tile:
    """The tile for `m` rows of x, `n` outputs of `k` terms; the best of scripts/bench_decode.py on an H200.

    Weights of 8 bits (`small`) take twice the rows where the whole weight is small (benchmarks/2026-11-29-fp8.md). Of a gated one
    of more bits two rows are read side by side, in half as wide a block (benchmarks/2026-11-30-two-gpus.md).
    """
    if not is_elementwise(m, dtype):
        if k < 256:
            return Tile(16, 64, 4, 4)
        return Tile(32, 128, 4, 4) if gated else Tile(32, 256, 4, 3) if n >= 32768 else Tile(16, 256, 4, 4)
    blocks = (1024, 512) if m == 1 and gated and not small else (2048, 1024, 512)
    block = next((block for block in blocks if k % block == 0), 1024)
    while block > 64 and block >= 2 * k:
        block //= 2
    rows = 2 if (m == 2 and not gated and block == 2048) or (small and block >= 512 and n * k < 1 << 24) else 1
    return Tile(rows, block, 8 if m == 1 and n >= 8192 and block == 2048 else 4, 2)


@on_own_device
def linear_few(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    activation: str = "",
    scale: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """reference.linear_few in one kernel; x's rows lie in steps, w is `[N, K]` with columns side by side."""
    *lead, k = x.shape
    rows = x.reshape(-1, k)
    m, n = rows.shape[0], w.shape[0] // (2 if activation else 1)
    y = torch.empty((*lead, n), dtype=x.dtype, device=x.device)
    tile = tile or choose_tile(m, n, k, bool(activation), x.dtype, scale is not None)
    grid, whole = (ceil_div(n, tile.rows),), k % tile.block == 0
    if is_elementwise(m, x.dtype):
        _dot_rows[grid](
            rows, w, bias, scale, y, n, rows.stride(0), w.stride(0), K=k, M=m, ACTIVATION=activation,
            ROWS=tile.rows, BLOCK=tile.block, UNROLL=tile.depth, WHOLE=whole, num_warps=tile.warps, **early(x),
        )  # fmt: skip
    else:
        _block_rows[grid](
            rows, w, bias, scale, y, n, m, rows.stride(0), w.stride(0), K=k, ACTIVATION=activation,
            ROWS=tile.rows, BLOCK=tile.block, WHOLE=whole, num_warps=tile.warps, num_stages=tile.depth, **early(x),
        )  # fmt: skip
    return y
