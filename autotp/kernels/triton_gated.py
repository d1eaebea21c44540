"""Gated activations in Triton: tiles of rows and columns, each element loaded once, computed in float32, rounded once."""

# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from .triton_launch import Remembered, address_rows, ceil_div, ceil_power, on_own_device

TILE, WARPS = 1024, 4  # elements of a program


@triton.jit
def _exp(x, PRECISE: tl.constexpr):
    """e to the x; the hardware's rounds x * log2(e), which costs digits of a large x: precise puts back what was rounded off."""
    if PRECISE:
        power = x * 1.4426950408889634
        rest = tl.fma(x, 1.4426950216293335, -power) + x * 1.9259629911e-8
        y = tl.exp2(power)
        return tl.where(tl.abs(x) < 80.0, y + y * (rest * 0.6931471805599453), y)
    else:
        return tl.exp(x)


@triton.jit
def _divide(a, b, PRECISE: tl.constexpr):
    if PRECISE:
        return tl.div_rn(a, b)
    else:
        return a / b


@triton.jit
def _sigmoid(x, PRECISE: tl.constexpr):
    """(s, 1 - s), the second without the digits that 1 - s loses for a large x; below -80, where s is 0 in effect, it stands."""
    e = _exp(tl.minimum(-x, 80.0), PRECISE)
    s = _divide(tl.full(x.shape, 1.0, tl.float32), 1.0 + e, PRECISE)
    return s, e * s


@triton.jit
def _tanh(x, PRECISE: tl.constexpr):
    """(tanh(x), its derivative).

    1 - t loses digits where t is near 1, so there the series is taken; its first term left out is below 1e-8.
    """
    size = tl.abs(x)
    t = _exp(-2.0 * size, PRECISE)
    large = _divide(1.0 - t, 1.0 + t, PRECISE)
    square = x * x
    small = size * (1.0 + square * (-0.33333333 + square * (0.13333333 + square * (-0.053968254 + square * 0.021869489))))
    y = tl.where(size < 0.25, small, large)
    return tl.where(x < 0.0, -y, y), _divide(4.0 * t, (1.0 + t) * (1.0 + t), PRECISE)


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr, PRECISE: tl.constexpr):
    """(activation(x), its derivative); PRECISE for float32, the quicker forms where the result is rounded to 16 bits."""
    if ACTIVATION == "silu":
        s, rest = _sigmoid(x, PRECISE)
        y, slope = x * s, s * (1.0 + x * rest)
    elif ACTIVATION == "gelu":
        s = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        y, slope = x * s, s + x * 0.3989422804014327 * _exp(-0.5 * x * x, PRECISE)
    elif ACTIVATION == "gelu_tanh":  # (1 + tanh(z)) / 2 is sigmoid(2 z), without the cancellation
        s, rest = _sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * x * x), PRECISE)
        y, slope = x * s, s + s * rest * (x * (1.5957691216057308 + 0.21406443847910179 * x * x))
    elif ACTIVATION == "gelu_quick":
        s, rest = _sigmoid(1.702 * x, PRECISE)
        y, slope = x * s, s * (1.0 + 1.702 * x * rest)
    elif ACTIVATION == "mish":  # tanh(log(1 + e)) is n / (n + 2) with n = e * (e + 2); e is cut off where that is 1
        e = _exp(tl.minimum(x, 20.0), PRECISE)
        n = e * (e + 2.0)
        t = _divide(n, n + 2.0, PRECISE)
        y, slope = x * t, t + x * 4.0 * e * (1.0 + e) / ((n + 2.0) * (n + 2.0))
    elif ACTIVATION == "sigmoid":
        y, rest = _sigmoid(x, PRECISE)
        slope = y * rest
    elif ACTIVATION == "tanh":
        y, slope = _tanh(x, PRECISE)
    elif ACTIVATION == "relu":
        y, slope = tl.maximum(x, 0.0), tl.where(x > 0.0, 1.0, 0.0)
    elif ACTIVATION == "relu2":
        y = tl.maximum(x, 0.0)
        y, slope = y * y, 2.0 * y
    elif ACTIVATION == "relu6":
        y, slope = tl.minimum(tl.maximum(x, 0.0), 6.0), tl.where((x > 0.0) & (x < 6.0), 1.0, 0.0)
    elif ACTIVATION == "leaky_relu":
        y, slope = tl.where(x > 0.0, x, 0.01 * x), tl.where(x > 0.0, 1.0, 0.01)
    elif ACTIVATION == "hardswish":
        y = x * tl.minimum(tl.maximum(x + 3.0, 0.0), 6.0) / 6.0
        slope = tl.where(x <= -3.0, 0.0, tl.where(x < 3.0, x / 3.0 + 0.5, 1.0))
    else:
        tl.static_assert(ACTIVATION == "identity")
        y, slope = x, tl.full(x.shape, 1.0, tl.float32)
    return y, slope


@triton.jit
def _place(M, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    blocks = tl.cdiv(N, BLOCK)
    rows = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    return rows.to(tl.int64)[:, None], cols[None, :], (rows < M)[:, None] & (cols < N)[None, :]


@Remembered
@triton.jit(do_not_specialize=["M"])
def _gated_forward(
    gate, up, y, M, N, gate_step, up_step, ACTIVATION: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    rows, cols, mask = _place(M, N, ROWS, BLOCK)
    g = tl.load(gate + rows * gate_step + cols, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + rows * up_step + cols, mask=mask, other=0.0).to(tl.float32)
    value, _ = _activate(g, ACTIVATION, gate.dtype.element_ty == tl.float32)
    tl.store(y + rows * N + cols, (value * u).to(y.dtype.element_ty), mask=mask)


@Remembered
@triton.jit(do_not_specialize=["M"])
def _gated_backward(
    dy, gate, up, dgate, dup, M, N, dy_step, gate_step, up_step, out_step,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows, cols, mask = _place(M, N, ROWS, BLOCK)
    d = tl.load(dy + rows * dy_step + cols, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(gate + rows * gate_step + cols, mask=mask, other=0.0).to(tl.float32)
    value, slope = _activate(g, ACTIVATION, gate.dtype.element_ty == tl.float32)
    if dup is not None:
        tl.store(dup + rows * out_step + cols, (d * value).to(dup.dtype.element_ty), mask=mask)
    if dgate is not None:
        u = tl.load(up + rows * up_step + cols, mask=mask, other=0.0).to(tl.float32)
        tl.store(dgate + rows * out_step + cols, (d * u * slope).to(dgate.dtype.element_ty), mask=mask)


def tile(count: int, width: int) -> tuple[int, int, int]:
    """(rows of a program, its columns, programs) for `count` rows of `width`."""
    block = min(ceil_power(width), TILE)
    rows = TILE // block
    return rows, block, ceil_div(count, rows) * ceil_div(width, block)


@on_own_device
def gated_forward(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """reference.gated_forward in one kernel."""
    width = gate.shape[-1]
    count = gate.numel() // width
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    gate, _, gate_step, _ = address_rows(gate)
    up, _, up_step, _ = address_rows(up)
    rows, block, programs = tile(count, width)
    _gated_forward[(programs,)](
        gate, up, y, count, width, gate_step, up_step, ACTIVATION=activation, ROWS=rows, BLOCK=block, num_warps=WARPS
    )
    return y


@on_own_device
def gated_backward(
    dy: Tensor, gate: Tensor, up: Tensor, activation: str, wanted: tuple[bool, bool] = (True, True)
) -> tuple[Tensor | None, Tensor | None]:
    """reference.gated_backward in one kernel."""
    *lead, width = gate.shape
    count, out_step = gate.numel() // width, width * sum(wanted)
    buffer = torch.empty((*lead, out_step), dtype=gate.dtype, device=gate.device)
    dgate = buffer[..., :width] if wanted[0] else None
    dup = buffer[..., out_step - width :] if wanted[1] else None
    dy, _, dy_step, _ = address_rows(dy)
    gate, _, gate_step, _ = address_rows(gate)
    up, _, up_step, _ = address_rows(up)
    rows, block, programs = tile(count, width)
    _gated_backward[(programs,)](
        dy, gate, up, dgate, dup, count, width, dy_step, gate_step, up_step, out_step,
        ACTIVATION=activation, ROWS=rows, BLOCK=block, num_warps=WARPS,
    )  # fmt: skip
    return dgate, dup
