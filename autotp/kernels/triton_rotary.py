"""Rotary position embedding in Triton: a program turns all heads of one token, so cos and sin are loaded once."""

# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from .triton_early import early, start_next, wait_for_previous
from .triton_launch import Remembered, ceil_power, on_own_device

TILE = 4096  # elements that a program turns at a time
WARP_ELEMENTS = 512


@triton.jit
def _turn_heads(
    x, y, token, start, head_step, heads_count, cos_a, cos_b, sin_a, sin_b, a, b, inside,
    D: tl.constexpr, R: tl.constexpr, HEADS: tl.constexpr, REST: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """All heads of a token: x + start is its first, y its first of `[tokens, heads, D]`; a and b are the columns of the pairs."""
    for first in range(0, heads_count, HEADS):
        heads = (first + tl.arange(0, HEADS)).to(tl.int64)
        present = (heads < heads_count)[:, None]
        source = x + start + heads[:, None] * head_step
        target = y + (token * heads_count + heads)[:, None] * D
        mask = present & inside[None, :]
        x_a = tl.load(source + a[None, :], mask=mask, other=0.0).to(tl.float32)
        x_b = tl.load(source + b[None, :], mask=mask, other=0.0).to(tl.float32)
        if BACKWARD:
            y_a, y_b = x_a * cos_a + x_b * sin_b, x_b * cos_b - x_a * sin_a
        else:
            y_a, y_b = x_a * cos_a - x_b * sin_a, x_b * cos_b + x_a * sin_b
        tl.store(target + a[None, :], y_a.to(y.dtype.element_ty), mask=mask)
        tl.store(target + b[None, :], y_b.to(y.dtype.element_ty), mask=mask)
        if REST > 0:
            rest = R + tl.arange(0, REST)
            mask = present & (rest < D)[None, :]
            tl.store(target + rest[None, :], tl.load(source + rest[None, :], mask=mask), mask=mask)


@Remembered
@triton.jit(do_not_specialize=["S"])
def _rotary(
    cos, sin, q, q_out, k, k_out, S, q_heads, k_heads, q_batch, q_head, q_token, k_batch, k_head, k_token,
    cos_batch, cos_token, sin_batch, sin_token,
    D: tl.constexpr, R: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, INTERLEAVED: tl.constexpr, BACKWARD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    start_next(EARLY)
    wait_for_previous(EARLY)
    token = tl.program_id(0).to(tl.int64)
    batch, position = token // S, token % S
    pairs = tl.arange(0, PAIRS)
    inside = pairs < R // 2
    a = pairs * 2 if INTERLEAVED else pairs
    b = a + 1 if INTERLEAVED else a + R // 2
    cos_row, sin_row = cos + batch * cos_batch + position * cos_token, sin + batch * sin_batch + position * sin_token
    cos_a = tl.load(cos_row + a, mask=inside, other=0.0).to(tl.float32)[None, :]
    cos_b = tl.load(cos_row + b, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin_a = tl.load(sin_row + a, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin_b = tl.load(sin_row + b, mask=inside, other=0.0).to(tl.float32)[None, :]
    if q is not None:
        start = batch * q_batch + position * q_token
        _turn_heads(
            q, q_out, token, start, q_head, q_heads, cos_a, cos_b, sin_a, sin_b, a, b, inside, D, R, Q_HEADS, REST, BACKWARD
        )  # fmt: skip
    if k is not None:
        start = batch * k_batch + position * k_token
        _turn_heads(
            k, k_out, token, start, k_head, k_heads, cos_a, cos_b, sin_a, sin_b, a, b, inside, D, R, K_HEADS, REST, BACKWARD
        )  # fmt: skip


def rotary_forward(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """reference.rotary_forward in one kernel."""
    return _launch(cos, sin, q, k, interleaved, False)


def rotary_backward(
    dq: Tensor | None, dk: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> tuple[Tensor | None, Tensor | None]:
    """reference.rotary_backward in one kernel."""
    return _launch(cos, sin, dq, dk, interleaved, True)


@on_own_device
def _launch(cos: Tensor, sin: Tensor, q, k, interleaved: bool, backward: bool):
    some = q if q is not None else k
    batch, _, tokens, width = some.shape
    q, q_out, q_steps, q_tile = _prepare(q)
    k, k_out, k_steps, k_tile = _prepare(k)
    cos, sin = _side_by_side(cos), _side_by_side(sin)
    turned = cos.shape[-1]
    _rotary[(batch * tokens,)](
        cos, sin, q, q_out, k, k_out, tokens, 0 if q is None else q.shape[1], 0 if k is None else k.shape[1], *q_steps, *k_steps,
        *_steps(cos), *_steps(sin),
        D=width, R=turned, PAIRS=ceil_power(turned // 2), REST=ceil_power(width - turned) if turned < width else 0,
        Q_HEADS=q_tile, K_HEADS=k_tile, INTERLEAVED=interleaved, BACKWARD=backward,
        num_warps=ceil_power(min(8, max(1, max(q_tile, k_tile) * ceil_power(width) // WARP_ELEMENTS))), **early(some),
    )  # fmt: skip
    return q_out, k_out


def _prepare(x: Tensor | None) -> tuple[Tensor | None, Tensor | None, tuple[int, int, int], int]:
    """(x with its columns side by side, where the result goes, the batch's, head's and token's steps, heads turned at a time)."""
    if x is None:
        return None, None, (0, 0, 0), 1
    batch, heads, tokens, width = x.shape
    x = _side_by_side(x)
    out = torch.empty((batch, tokens, heads, width), dtype=x.dtype, device=x.device).transpose(1, 2)
    return x, out, (x.stride(0), x.stride(1), x.stride(2)), min(ceil_power(heads), max(1, TILE // ceil_power(width)))


def _side_by_side(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _steps(angles: Tensor) -> tuple[int, int]:
    """Elements from one batch to the next, none where all share one, and from token to token."""
    return (0 if angles.shape[0] == 1 else angles.stride(0)), angles.stride(1)
