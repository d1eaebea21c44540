"""Norms and gates in Triton that begin to quantise what they compute: see begun.py for what each leaves.

A norm's program has whole rows, so it makes their operand; a gate's has a tile as the cast's, so it makes both of blocks. What
spans programs is left as largest sizes.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false, reportOperatorIssue=false
from __future__ import annotations

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from .begun import Begun, Wish
from .fp8_scaled import BLOCK, LIMITS, Quantised, padded
from .triton_fp8 import (
    INTERPRETS,
    TILES,
    WARPS,
    _count,
    _empty_scale,
    _keep_largest,
    _limit_to,
    _round,
    _size_bits,
    _store_rows,
    _store_turned,
)
from .triton_gated import _gate
from .triton_launch import Remembered, address_rows, ceil_div, count_processors, on_own_device
from .triton_norm import _normalise, prepare_forward
from .zeros import zeros

PROGRAMS_PER_PROCESSOR = 3  # of a norm that looks for the largest of each column: the fewer, the less they add up at the end
BLOCK_WARPS = 16  # of a gate's tile that becomes both operands
E4M3 = torch.float8_e4m3fn
LIMIT = LIMITS[E4M3]


@Remembered
@triton.jit(do_not_specialize=["M"])
def _norm_begun(
    x, residual, weight, bias, y, total, rstd, mean, whole, of_rows, of_cols, values, scale, bad,
    M, N, inner, outer_step, inner_step, residual_step, eps,
    KIND: tl.constexpr, GROUP: tl.constexpr, LIMIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Each program takes every `num_programs`th block of ROWS rows. `scale` `[groups, M]`: of GROUP columns of a row."""
    cols = tl.arange(0, BLOCK)
    groups = tl.arange(0, BLOCK // GROUP)
    if of_cols is not None:
        largest = tl.zeros((BLOCK,), tl.int32)
    for block in range(tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0)):
        rows = block * ROWS + tl.arange(0, ROWS)
        v = _normalise(
            x,
            residual,
            weight,
            bias,
            total,
            rstd,
            mean,
            rows,
            cols,
            M,
            N,
            inner,
            outer_step,
            inner_step,
            residual_step,
            eps,
            KIND,
        )
        mask = (rows < M)[:, None] & (cols < N)[None, :]
        places = rows.to(tl.int64)[:, None] * N + cols[None, :]
        rounded = v.to(y.dtype.element_ty)
        tl.store(y + places, rounded, mask=mask)
        v = tl.where(mask, rounded.to(tl.float32), 0.0)
        _keep_largest(_size_bits(v), whole, of_rows, None, rows, cols, M, N)
        if of_cols is not None:
            largest = tl.maximum(largest, tl.max(_size_bits(v), 0))
        if values is not None:
            v = tl.reshape(v, (ROWS, BLOCK // GROUP, GROUP))
            bits = tl.max(_size_bits(v), 2)
            amax = _limit_to(bits)
            inside = (rows < M)[:, None] & (groups * GROUP < N)[None, :]
            tl.store(scale + groups.to(tl.int64)[None, :] * M + rows[:, None], tl.div_rn(amax, LIMIT), mask=inside)
            _count(bad, bits)
            factor = tl.div_rn(tl.full(amax.shape, LIMIT, tl.float32), amax)[:, :, None]
            q = _round(v, factor, LIMIT, values.dtype.element_ty, ROUND)
            tl.store(values + places, tl.reshape(q, (ROWS, BLOCK)), mask=mask)
    if of_cols is not None:
        tl.atomic_max(of_cols + cols, largest, mask=cols < N)


@Remembered
@triton.jit(do_not_specialize=["M"])
def _gated_begun(
    gate, up, y, whole, of_rows, of_cols, values, turned, scale, turned_scale, bad, M, N, P, gate_step, up_step,
    ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Tiles as triton_fp8's; values `[M, N]` and turned `[N, P]` with a scale for each ROWS or COLS of them, or None."""
    blocks = tl.cdiv(N, COLS)
    row_block, col_block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    rows = row_block * ROWS + tl.arange(0, ROWS)
    cols = col_block * COLS + tl.arange(0, COLS)
    inside = (rows < M)[:, None] & (cols < N)[None, :]
    wide_rows = rows.to(tl.int64)[:, None]
    places = wide_rows * N + cols[None, :]
    rounded = _gate(gate, up, wide_rows, cols[None, :], inside, gate_step, up_step, ACTIVATION).to(y.dtype.element_ty)
    tl.store(y + places, rounded, mask=inside)
    v = rounded.to(tl.float32)
    bits = _size_bits(v)
    _keep_largest(bits, whole, of_rows, of_cols, rows, cols, M, N)
    if values is not None:
        place = scale + col_block.to(tl.int64) * M + rows
        _store_rows(v, tl.max(bits, 1), True, values, place, places, inside, rows < M, bad, LIMIT, ROUND)
    if turned is not None:
        place = turned_scale + row_block.to(tl.int64) * N + cols
        places = cols.to(tl.int64)[:, None] * P + rows[None, :]
        turned_inside = (cols < N)[:, None] & (rows < P)[None, :]
        _store_turned(v, tl.max(bits, 0), True, turned, place, places, turned_inside, cols < N, bad, LIMIT, ROUND)


@on_own_device
def norm_begun(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: str, residual: Tensor | None, wish: Wish
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """reference.norm_forward in one kernel, which leaves what `wish` has of it."""
    given = prepare_forward(x, weight, bias, eps, kind, residual)
    count, width, (rows, block, warps) = given.count, given.width, given.tile
    whole, of_rows, of_cols = _make_bits(wish, count, width, x.device)
    operand = None
    if wish.scaling == "blockwise" or (wish.scaling == "rowwise" and not wish.cut_rows):
        operand = _empty_operand(wish.scaling, count, width, x.device)
    programs = ceil_div(count, rows)
    if of_cols is not None:
        programs = min(programs, PROGRAMS_PER_PROCESSOR * count_processors(x.device))
    _norm_begun[(programs,)](
        *given.tensors, whole, of_rows, of_cols, *_parts(operand), wish.bad, *given.sizes,
        KIND=kind, GROUP=min(block, BLOCK) if wish.scaling == "blockwise" else block, LIMIT=LIMIT,
        ROWS=rows, BLOCK=block, ROUND=INTERPRETS, num_warps=warps,
    )  # fmt: skip
    wish.begun = Begun(operand, None, of_rows if whole is None else whole, of_cols)
    return given.results


@on_own_device
def gated_begun(gate: Tensor, up: Tensor, activation: str, wish: Wish) -> Tensor:
    """reference.gated_forward in one kernel, which leaves what `wish` has of it."""
    width = gate.shape[-1]
    count = gate.numel() // width
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    gate, _, gate_step, _ = address_rows(gate)
    up, _, up_step, _ = address_rows(up)
    bits = _make_bits(wish, count, width, y.device, every_row=True)
    blockwise, depth = wish.scaling == "blockwise", padded(count, wish.scaling)
    rows = _empty_operand(wish.scaling, count, width, y.device) if blockwise else None
    turned = _empty_operand(wish.scaling, width, depth, y.device) if blockwise and wish.turned else None
    height, columns = TILES[wish.scaling]
    (values, scale), (turned_values, turned_scale) = _parts(rows), _parts(turned)
    _gated_begun[(ceil_div(count if turned is None else depth, height) * ceil_div(width, columns),)](
        gate, up, y, *bits, values, turned_values, scale, turned_scale, wish.bad, count, width, depth, gate_step, up_step,
        ACTIVATION=activation, LIMIT=LIMIT, ROWS=height, COLS=columns, ROUND=INTERPRETS,
        num_warps=BLOCK_WARPS if blockwise else WARPS,
    )  # fmt: skip
    wish.begun = Begun(rows, turned, bits[1] if bits[0] is None else bits[0], bits[2])
    return y


def _make_bits(
    wish: Wish, rows: int, columns: int, device: torch.device, every_row: bool = False
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Zeros for the largest sizes that are wanted: of all, of each row, of each column.

    Args:
        every_row: no program has whole rows, so that no operand of them is made.
    """
    kinds: Any = dict(dtype=torch.int32, device=device)
    if wish.scaling == "tensorwise":
        return zeros.take(device), None, None
    if wish.scaling == "blockwise":
        return None, None, None
    sizes = rows if every_row or wish.cut_rows else 0, columns if wish.turned else 0
    if not any(sizes):
        return None, None, None
    found = torch.zeros(sum(sizes), **kinds).split(sizes)
    return None, found[0] if sizes[0] else None, found[1] if sizes[1] else None


def _empty_operand(scaling: str, rows: int, columns: int, device: torch.device) -> Quantised:
    """Memory for an operand `[rows, columns]`."""
    values = torch.empty(rows, columns, dtype=E4M3, device=device)
    return Quantised(values, _empty_scale(scaling, rows, columns, device), scaling)


def _parts(operand: Quantised | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if operand is None else (operand.values, operand.scale)
