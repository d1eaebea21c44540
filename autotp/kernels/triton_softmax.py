"""Sums of exponentials and gradients of cross-entropy in Triton: each logit is read once, computed in float32, rounded once."""

# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from .triton_gated import _exp
from .triton_launch import Remembered, ceil_div, ceil_power, on_own_device

WIDEST, WARPS = 4096, 8  # columns at a time


@Remembered
@triton.jit
def _sum_exponentials(x, peaks, sums, totals, V, step, COLS: tl.constexpr, PRECISE: tl.constexpr):
    row = tl.program_id(0)
    x += row.to(tl.int64) * step
    peak = tl.full((), float("-inf"), tl.float32)
    sum, mean = tl.zeros((COLS,), tl.float32), tl.zeros((COLS,), tl.float32)
    for start in range(0, V, COLS):
        cols = start + tl.arange(0, COLS)
        v = tl.load(x + cols, mask=cols < V, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(peak, tl.max(v, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        sum = sum * _exp(tl.zeros((1,), tl.float32) + (peak - base), PRECISE) + _exp(v - base, PRECISE)
        mean += tl.where(cols < V, v, 0.0) / V
        peak = higher
    tl.store(peaks + row, peak)
    tl.store(sums + row, tl.sum(sum, 0))
    tl.store(totals + row, V * (tl.sum(mean, 0) - tl.where(peak == float("-inf"), 0.0, peak)))


@Remembered
@triton.jit
def _backward(
    x, peak, log_sum, column, scale, dx, V, step, target_share, every_share, COLS: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(V, COLS)
    row = tl.program_id(0) // blocks
    cols = tl.program_id(0) % blocks * COLS + tl.arange(0, COLS)
    v = tl.load(x + row.to(tl.int64) * step + cols, mask=cols < V, other=0.0).to(tl.float32)
    v = _exp((v - tl.load(peak + row)) - tl.load(log_sum + row), PRECISE)
    v -= tl.where(cols == tl.load(column + row), target_share, 0.0)
    v = (v - every_share) * tl.load(scale + row)
    tl.store(dx + row.to(tl.int64) * V + cols, v.to(dx.dtype.element_ty), mask=cols < V)


@on_own_device
def sum_exponentials(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """reference.sum_exponentials."""
    x = _lay_out(x)
    rows, width = x.shape
    peaks, sums, totals = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(3))
    how = dict(COLS=min(WIDEST, ceil_power(width)), PRECISE=x.dtype is torch.float32, num_warps=WARPS)
    _sum_exponentials[(rows,)](x, peaks, sums, totals, width, x.stride(0), **how)
    return peaks, sums, totals


@on_own_device
def cross_entropy_backward(
    x: Tensor, peak: Tensor, log_sum: Tensor, column: Tensor, scale: Tensor, target_share: float, every_share: float
) -> Tensor:
    """reference.cross_entropy_backward."""
    x = _lay_out(x)
    rows, width = x.shape
    dx = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    cols = min(WIDEST, ceil_power(width))
    how = dict(COLS=cols, PRECISE=x.dtype is torch.float32, num_warps=WARPS)
    grid, shares = (rows * ceil_div(width, cols),), (float(target_share), float(every_share))
    numbers = peak, log_sum, column, scale.contiguous()
    _backward[grid](x, *numbers, dx, width, x.stride(0), *shares, **how)
    return dx


def _lay_out(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()
