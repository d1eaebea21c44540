"""FP8 operands in Triton: one read of a tensor for its largest values, one for both operands; blocks need the second alone.

Largest values are kept as the bits of their size: as integers they compare as the numbers do, and what is no number is the
largest, so nothing is lost on the way.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false
from __future__ import annotations

import os
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from .fp8_scaled import BLOCK, LEAST_AMAX, LIMITS, Operands, Quantised, Share, padded
from .reference_fp8 import turn_values
from .triton_launch import Remembered, ceil_div, on_own_device
from .zeros import scales, zeros

Bits = tuple[Tensor | None, Tensor | None]  # of the largest sizes: of all or of rows; of columns
TILES = {"tensorwise": (64, 128), "rowwise": (128, 64), "blockwise": (BLOCK, BLOCK), "squares": (BLOCK, BLOCK)}
WARPS = {"tensorwise": 4, "rowwise": 8, "blockwise": 8, "squares": 8}  # tensorwise as measured on an H200, the others not
INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"  # as the decorators below read it
NOT_FINITE = tl.constexpr(0x7F800000)
LEAST = tl.constexpr(LEAST_AMAX)


@triton.jit
def _load(x, rows, cols, M, N, row_step, col_step):
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    place = rows.to(tl.int64)[:, None] * row_step + cols.to(tl.int64)[None, :] * col_step
    return tl.load(x + place, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _size_bits(v):
    return v.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _limit_to(bits):
    amax = bits.to(tl.float32, bitcast=True)
    return tl.where(amax < LEAST, LEAST, amax)


@triton.jit
def _round(v, factor, LIMIT: tl.constexpr, dtype: tl.constexpr, ROUND: tl.constexpr):
    v = v * factor
    v = tl.where(v > LIMIT, LIMIT, v)
    v = tl.where(v < -LIMIT, -LIMIT, v)
    if ROUND:  # the interpreter's own cast drops carries
        digits: tl.constexpr = 3 if LIMIT < 1000 else 2
        least: tl.constexpr = -6 if LIMIT < 1000 else -14
        exponent = ((v.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127
        exponent = tl.where(exponent < least, least, exponent)
        step = ((exponent - digits + 127) << 23).to(tl.float32, bitcast=True)
        v = (v / step + 12582912.0 - 12582912.0) * step
    return v.to(dtype)


@triton.jit
def _count(bad, bits):
    if bad is not None:
        found = tl.sum((bits >= NOT_FINITE).to(tl.int32))
        if found > 0:
            tl.atomic_add(bad, found)


@triton.jit
def _store_rows(v, bits, first, values, scale, places, inside, scale_inside, bad, LIMIT: tl.constexpr, ROUND: tl.constexpr):
    """A tile's values `[ROWS, COLS]` by the largest sizes of its rows, and their scales where the tile is the `first`."""
    amax = _limit_to(bits)
    if first:
        tl.store(scale, tl.div_rn(amax, LIMIT), mask=scale_inside)
        _count(bad, bits)
    factor = tl.div_rn(tl.full(amax.shape, LIMIT, tl.float32), amax)[:, None]
    tl.store(values + places, _round(v, factor, LIMIT, values.dtype.element_ty, ROUND), mask=inside)


@triton.jit
def _store_turned(v, bits, first, turned, scale, places, inside, scale_inside, bad, LIMIT: tl.constexpr, ROUND: tl.constexpr):
    """The same `[COLS, ROWS]`, by the largest sizes of its columns."""
    amax = _limit_to(bits)
    if first:
        tl.store(scale, tl.div_rn(amax, LIMIT), mask=scale_inside)
        _count(bad, bits)
    factor = tl.div_rn(tl.full(amax.shape, LIMIT, tl.float32), amax)[None, :]
    tl.store(turned + places, tl.trans(_round(v, factor, LIMIT, turned.dtype.element_ty, ROUND)), mask=inside)


@Remembered
@triton.jit(do_not_specialize=["M"])
def _find_amax(
    x, whole, of_rows, of_cols, M, N, row_step, col_step, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """The bits of the largest size in all of `x`, in each row, in each column; each None or zeros before."""
    blocks = tl.cdiv(N, COLS)
    rows = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(0) % blocks * COLS + tl.arange(0, COLS)
    bits = _size_bits(_load(x, rows, cols, M, N, row_step, col_step))
    if whole is not None:
        tl.atomic_max(whole, tl.max(tl.max(bits, 1), 0))
    if of_rows is not None:
        tl.atomic_max(of_rows + rows, tl.max(bits, 1), mask=rows < M)
    if of_cols is not None:
        tl.atomic_max(of_cols + cols, tl.max(bits, 0), mask=cols < N)


@Remembered
@triton.jit(do_not_specialize=["M"])
def _cast(
    x, row_amax, col_amax, values, turned, scale, turned_scale, bad, M, N, P, row_step, col_step, scale_step, turned_step,
    SCALING: tl.constexpr, LIMIT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Values `[M, N]` and turned `[N, P]`, each None or written, with their scales as fp8.py lays them."""
    blocks = tl.cdiv(N, COLS)
    row_block, col_block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    rows = row_block * ROWS + tl.arange(0, ROWS)
    cols = col_block * COLS + tl.arange(0, COLS)
    v = _load(x, rows, cols, M, N, row_step, col_step)
    places = rows.to(tl.int64)[:, None] * N + cols[None, :]
    turned_places = cols.to(tl.int64)[:, None] * P + rows[None, :]
    inside = (rows < M)[:, None] & (cols < N)[None, :]
    turned_inside = (cols < N)[:, None] & (rows < P)[None, :]
    if SCALING == "tensorwise" or SCALING == "squares":
        bits = tl.load(row_amax) if SCALING == "tensorwise" else tl.max(tl.max(_size_bits(v), 1), 0)
        amax = _limit_to(bits)
        if SCALING == "squares":
            if values is not None:
                tl.store(scale + row_block * scale_step + col_block, tl.div_rn(amax, LIMIT))
            if turned is not None:
                tl.store(turned_scale + col_block * turned_step + row_block, tl.div_rn(amax, LIMIT))
            _count(bad, bits + tl.zeros((1,), tl.int32))
        elif tl.program_id(0) == 0:
            tl.store(scale, tl.div_rn(amax, LIMIT))
            _count(bad, bits + tl.zeros((1,), tl.int32))
        if values is not None:
            q = _round(v, tl.div_rn(LIMIT + 0.0 * amax, amax), LIMIT, values.dtype.element_ty, ROUND)
            tl.store(values + places, q, mask=inside)
            if turned is not None:
                tl.store(turned + turned_places, tl.trans(q), mask=turned_inside)
        else:
            q = _round(v, tl.div_rn(LIMIT + 0.0 * amax, amax), LIMIT, turned.dtype.element_ty, ROUND)
            tl.store(turned + turned_places, tl.trans(q), mask=turned_inside)
    else:
        if values is not None:
            if SCALING == "rowwise":
                bits = tl.load(row_amax + rows, mask=rows < M, other=0)
                first, step = col_block == 0, 0
            else:
                bits = tl.max(_size_bits(v), 1)
                first, step = col_block >= 0, scale_step
            place = scale + col_block * step + rows
            _store_rows(v, bits, first, values, place, places, inside, rows < M, bad, LIMIT, ROUND)
        if turned is not None:
            if SCALING == "rowwise":
                bits = tl.load(col_amax + cols, mask=cols < N, other=0)
                first, step = row_block == 0, 0
            else:
                bits = tl.max(_size_bits(v), 0)
                first, step = row_block >= 0, turned_step
            place = turned_scale + row_block * step + cols
            _store_turned(v, bits, first, turned, place, turned_places, turned_inside, cols < N, bad, LIMIT, ROUND)


@on_own_device
def quantise(
    x: Tensor,
    scaling: str,
    dtype: torch.dtype,
    rows: bool,
    columns: bool,
    cut: int | None,
    share: Share | None,
    bad: Tensor | None,
) -> Operands:
    """reference_fp8.quantise in one kernel for blocks, two otherwise; one more for the turned operand of float32."""
    m, n = x.shape
    if columns and x.dtype is torch.float32 and x.is_cuda and scaling == "tensorwise":
        found, _ = quantise(x, scaling, dtype, True, False, cut, share, bad)
        assert found is not None
        return found if rows else None, found._replace(values=turn_values(found.values, scaling))
    layout = _lay_out(scaling, dtype, m, n, columns)
    amax = _find_largest(x, layout, rows, columns)
    if share is not None and cut is not None:
        amax = _share_amax(amax, scaling, cut, share)
    device, depth = x.device, layout.depth
    values = torch.empty(m, n, dtype=dtype, device=device) if rows else None
    turned = torch.empty(n, depth, dtype=dtype, device=device) if columns else None
    scale = _empty_scale(scaling, m, n, device)
    turned_scale = scale if scaling == "tensorwise" else _empty_scale(scaling, n, depth, device)
    steps = (m, n) if scaling == "blockwise" else (scale.stride(-1), turned_scale.stride(-1)) if scaling == "squares" else (0, 0)
    _cast[layout.cast_grid](
        x, *amax, values, turned, scale, turned_scale, bad, m, n, depth, *x.stride(), *steps, **layout.cast
    )  # fmt: skip
    found = None if values is None else Quantised(values, scale, scaling)
    return found, None if turned is None else Quantised(turned, turned_scale, scaling)


class _Layout(NamedTuple):
    """How tensors `[m, n]` are quantised: rows of the turned operand, grids, and what the kernels are compiled for."""

    scaling: str
    depth: int
    grid: tuple[int]
    cast_grid: tuple[int]
    tile: dict[str, Any]
    cast: dict[str, Any]


@lru_cache(maxsize=4096)
def _lay_out(scaling: str, dtype: torch.dtype, m: int, n: int, columns: bool) -> _Layout:
    depth, (height, width) = padded(m, scaling), TILES[scaling]
    tile: dict[str, Any] = dict(ROWS=height, COLS=width, num_warps=WARPS[scaling])
    cast: dict[str, Any] = dict(SCALING=scaling, LIMIT=LIMITS[dtype], ROUND=INTERPRETS, **tile)
    across = ceil_div(n, width)
    grids = (ceil_div(m, height) * across,), (ceil_div(depth if columns else m, height) * across,)
    return _Layout(scaling, depth, *grids, tile, cast)


def _find_largest(x: Tensor, layout: _Layout, rows: bool, columns: bool) -> Bits:
    """The bits that the cast reads: of all of `x`, or of its rows and of its columns; nothing for blocks."""
    m, n = x.shape
    if layout.scaling == "tensorwise":
        whole = zeros.take(x.device)
        _find_amax[layout.grid](x, whole, None, None, m, n, *x.stride(), **layout.tile)
        return whole, None
    if layout.scaling != "rowwise":
        return None, None
    height = m if rows else 0
    found = torch.zeros(height + (n if columns else 0), dtype=torch.int32, device=x.device)
    of_rows, of_cols = found[:height] if rows else None, found[height:] if columns else None
    _find_amax[layout.grid](x, None, of_rows, of_cols, m, n, *x.stride(), **layout.tile)
    return of_rows, of_cols


def _share_amax(bits: Bits, scaling: str, cut: int, share: Share) -> Bits:
    """The same, the largest over the ranks where it spans their parts."""
    of_rows, of_cols = bits
    if of_rows is not None and (cut == 1 or scaling == "tensorwise"):
        of_rows = share(of_rows)
    if of_cols is not None and cut == 0:
        of_cols = share(of_cols)
    return of_rows, of_cols


def _empty_scale(scaling: str, rows: int, columns: int, device: torch.device) -> Tensor:
    """Memory for the scale of an operand `[rows, columns]`."""
    if scaling == "tensorwise":
        return scales.take(device)
    if scaling == "rowwise":
        return torch.empty(rows, 1, device=device)
    blocks = ceil_div(columns, BLOCK)
    if scaling == "blockwise":
        return torch.empty(blocks, rows, device=device).t()
    return torch.zeros(ceil_div(rows, BLOCK), -(-blocks // 4) * 4, device=device).t()  # zeros behind the last block
