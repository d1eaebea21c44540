"""Norms in Triton: a row, or several short ones, in a program's registers; float32 throughout, rounded once.

The weight's gradient is summed in two steps, without atomics: each of a fixed number of programs adds up its rows, then one
kernel adds up the programs. So the result is the same in every run.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

from functools import lru_cache

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from .triton_launch import Remembered, address_rows, ceil_div, ceil_power, count_processors, on_own_device

PROGRAMS_PER_PROCESSOR = 2  # of the backward kernel


@triton.jit
def _locate(rows, inner, outer_step, inner_step):
    return (rows // inner).to(tl.int64) * outer_step + (rows % inner).to(tl.int64) * inner_step


@triton.jit
def _load_scale(weight, cols, inside, KIND: tl.constexpr):
    scale = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
    if KIND == "rms1p":
        scale += 1.0
    return scale[None, :]


@Remembered
@triton.jit(do_not_specialize=["M"])
def _norm_forward(
    x, residual, weight, bias, y, total, rstd, mean, M, N, inner, outer_step, inner_step, residual_step, eps,
    KIND: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    inside = cols < N
    mask = (rows < M)[:, None] & inside[None, :]
    wide_rows = rows.to(tl.int64)
    own = wide_rows[:, None] * N + cols[None, :]
    offset = _locate(rows, inner, outer_step, inner_step)[:, None] + cols[None, :]
    values = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    if residual is not None:
        values += tl.load(residual + wide_rows[:, None] * residual_step + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + own, rounded, mask=mask)
        values = rounded.to(tl.float32)
    if KIND == "layernorm":
        centre = tl.sum(values, 1) / N
        tl.store(mean + rows, centre, mask=rows < M)
        values = tl.where(inside[None, :], values - centre[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(values * values, 1) / N + eps)
    tl.store(rstd + rows, scale, mask=rows < M)
    values *= scale[:, None]
    if weight is not None:
        values *= _load_scale(weight, cols, inside, KIND)
    if bias is not None:
        values += tl.load(bias + cols, mask=inside, other=0.0).to(tl.float32)[None, :]
    tl.store(y + own, values.to(y.dtype.element_ty), mask=mask)


@Remembered
@triton.jit(do_not_specialize=["M"])
def _norm_backward(
    dy, x, weight, rstd, mean, residual_grad, dx, dweight, dbias, M, N, inner, outer_step, inner_step, dy_step, residual_step,
    KIND: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program takes every `num_programs`th block of ROWS rows; dweight and dbias `[programs, N]` get its own sums."""
    program = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    inside = cols < N
    if weight is not None:
        scale = _load_scale(weight, cols, inside, KIND)
    if dweight is not None:
        weight_sum = tl.zeros((ROWS, BLOCK), tl.float32)
    if dbias is not None:
        bias_sum = tl.zeros((ROWS, BLOCK), tl.float32)
    for block in range(program, tl.cdiv(M, ROWS), tl.num_programs(0)):
        rows = block * ROWS + tl.arange(0, ROWS)
        mask = (rows < M)[:, None] & inside[None, :]
        wide_rows = rows.to(tl.int64)
        offset = _locate(rows, inner, outer_step, inner_step)[:, None] + cols[None, :]
        n = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(dy + wide_rows[:, None] * dy_step + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        r = tl.load(rstd + rows, mask=rows < M, other=0.0)
        if KIND == "layernorm":
            n -= tl.load(mean + rows, mask=rows < M, other=0.0)[:, None]
            n = tl.where(inside[None, :], n, 0.0)
        n *= r[:, None]
        if dweight is not None:
            weight_sum += grad * n
        if dbias is not None:
            bias_sum += grad
        if dx is not None:
            if weight is not None:
                grad *= scale
            shared = n * (tl.sum(grad * n, 1) / N)[:, None]
            if KIND == "layernorm":
                shared += (tl.sum(grad, 1) / N)[:, None]
            grad = (grad - shared) * r[:, None]
            if residual_grad is not None:
                add = residual_grad + wide_rows[:, None] * residual_step + cols[None, :]
                grad += tl.load(add, mask=mask, other=0.0).to(tl.float32)
            tl.store(dx + wide_rows[:, None] * N + cols[None, :], grad.to(dx.dtype.element_ty), mask=mask)
    if dweight is not None:
        tl.store(dweight + program.to(tl.int64) * N + cols, tl.sum(weight_sum, 0), mask=inside)
    if dbias is not None:
        tl.store(dbias + program.to(tl.int64) * N + cols, tl.sum(bias_sum, 0), mask=inside)


@Remembered
@triton.jit(do_not_specialize=["P"])
def _sum_programs(partial, out, P, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(0, P, ROWS):
        rows = first + tl.arange(0, ROWS)
        mask = (rows < P)[:, None] & (cols < N)[None, :]
        total += tl.load(partial + rows.to(tl.int64)[:, None] * N + cols[None, :], mask=mask, other=0.0)
    tl.store(out + cols, tl.sum(total, 0).to(out.dtype.element_ty), mask=cols < N)


@lru_cache
def tile_rows(width: int) -> tuple[int, int, int]:
    """(rows of a program, columns as a power of two, warps) for rows of `width` elements."""
    block = ceil_power(width)
    rows = max(1, 1024 // block)
    return rows, block, min(16, max(4, rows * block // 512))


@on_own_device
def norm_forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: str, residual: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """reference.norm_forward in one kernel."""
    source, inner, outer_step, inner_step = address_rows(x, inner_allowed=True)
    width = x.shape[-1]
    count = x.numel() // width
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty(count, dtype=torch.float32, device=x.device)
    mean = torch.empty_like(rstd) if kind == "layernorm" else None
    total, step = None, 0
    if residual is not None:
        residual, _, step, _ = address_rows(residual)
        total = torch.empty_like(y)
    rows, block, warps = tile_rows(width)
    _norm_forward[(ceil_div(count, rows),)](
        source, residual, _flat(weight), _flat(bias), y, total, rstd, mean,
        count, width, inner, outer_step, inner_step, step, eps,
        KIND=kind, ROWS=rows, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return y, rstd, mean, x if total is None else total


@on_own_device
def norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    mean: Tensor | None,
    kind: str,
    residual_grad: Tensor | None = None,
    wanted: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """reference.norm_backward in one kernel, and a short one for each of dweight and dbias."""
    source, inner, outer_step, inner_step = address_rows(x, inner_allowed=True)
    dy, _, dy_step, _ = address_rows(dy)
    width = x.shape[-1]
    count = x.numel() // width
    rows, block, warps = tile_rows(width)
    programs = min(ceil_div(count, rows), PROGRAMS_PER_PROCESSOR * count_processors(x.device))
    dx, step = None, 0
    if wanted[0]:
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if residual_grad is not None:
            residual_grad, _, step, _ = address_rows(residual_grad)
    partial = (programs, width)
    weight_sums = torch.empty(partial, dtype=torch.float32, device=x.device) if wanted[1] and weight is not None else None
    bias_sums = torch.empty(partial, dtype=torch.float32, device=x.device) if wanted[2] else None
    _norm_backward[(programs,)](
        dy, source, _flat(weight), rstd, mean, residual_grad if wanted[0] else None, dx, weight_sums, bias_sums,
        count, width, inner, outer_step, inner_step, dy_step, step,
        KIND=kind, ROWS=rows, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    dtype = x.dtype if weight is None else weight.dtype
    return dx, _sum_up(weight_sums, dtype), _sum_up(bias_sums, dtype)


def _flat(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.contiguous()


def _sum_up(partial: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if partial is None:
        return None
    programs, width = partial.shape
    out = torch.empty(width, dtype=dtype, device=partial.device)
    _sum_programs[(ceil_div(width, 32),)](partial, out, programs, width, ROWS=64, BLOCK=32)
    return out
