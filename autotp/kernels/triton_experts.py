"""The experts' operations in Triton: sorting slots, moving rows, and the gate with everything that its backward needs.

No atomics, so that every result is the same in every run, and nothing that waits for the device.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from .triton_gated import _activate
from .triton_launch import address_rows, ceil_div, ceil_power, on_own_device

SLOTS = 1024  # that a program of _route_tokens looks at in one step
COLUMNS = 2048  # that a program of the others holds


@triton.jit(do_not_specialize=["S"])
def _route_tokens(index, order, inverse, offsets, S, E, BLOCK: tl.constexpr):
    """One program for each expert, and one for slots without: it counts what comes before its own, then places its own."""
    expert = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    before = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, S, BLOCK):
        slots = first + lanes
        owner = tl.load(index + slots, mask=slots < S, other=0)
        owner = tl.where((owner >= 0) & (owner < E), owner, E)
        before += ((owner < expert) & (slots < S)).to(tl.int32)
    start = tl.sum(before, 0)
    for first in range(0, S, BLOCK):
        slots = first + lanes
        owner = tl.load(index + slots, mask=slots < S, other=0)
        owner = tl.where((owner >= 0) & (owner < E), owner, E)
        mine = (owner == expert) & (slots < S)
        row = start + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(order + row, slots, mask=mine)
        tl.store(inverse + slots, row, mask=mine)
        start += tl.sum(mine.to(tl.int32), 0)
    if expert < E:
        tl.store(offsets + expert, start)


@triton.jit
def _spread_rows(x, inverse, out, H, x_step, K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + token * x_step + cols, mask=cols < H)
    for j in tl.static_range(K):
        row = tl.load(inverse + token * K + j).to(tl.int64)
        tl.store(out + row * H + cols, values, mask=cols < H)


@triton.jit
def _combine_rows(y, inverse, end, weights, out, H, y_step, K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    rows_of_experts = tl.load(end)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(K):
        row = tl.load(inverse + token * K + j).to(tl.int64)
        there = row < rows_of_experts
        values = tl.load(y + row * y_step + cols, mask=cols < tl.where(there, H, 0), other=0.0).to(tl.float32)
        if weights is not None:
            values *= tl.where(there, tl.load(weights + token * K + j).to(tl.float32), 0.0)
        total += values
    tl.store(out + token * H + cols, total.to(out.dtype.element_ty), mask=cols < H)


@triton.jit
def _gate_rows(h, a, F, h_step, gate_start, up_start, step, ACTIVATION: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = h + row * h_step + cols * step
    gate = tl.load(at + gate_start, mask=cols < F, other=0.0).to(tl.float32)
    value, _ = _activate(gate, ACTIVATION, h.dtype.element_ty == tl.float32)
    if GATED:
        value *= tl.load(at + up_start, mask=cols < F, other=0.0).to(tl.float32)
    tl.store(a + row * F + cols, value.to(a.dtype.element_ty), mask=cols < F)


@triton.jit
def _gate_rows_backward(
    da, h, weights, order, end, dh, scaled, dweights, F, da_step, h_step, dh_step, gate_start, up_start, step,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`scaled` may lie where da lies: all of a block is read before any of it is written."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(order + row).to(tl.int64)
    weight = tl.load(weights + slot).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, F, BLOCK):
        cols = first + tl.arange(0, BLOCK)
        inside = cols < F
        at = row * h_step + cols * step
        grad = tl.load(da + row * da_step + cols, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(h + at + gate_start, mask=inside, other=0.0).to(tl.float32)
        value, slope = _activate(gate, ACTIVATION, h.dtype.element_ty == tl.float32)
        a = value
        if GATED:
            up = tl.load(h + at + up_start, mask=inside, other=0.0).to(tl.float32)
            a = value * up
            slope *= up
        if dweights is not None:
            total += tl.where(inside, grad * a, 0.0)
        grad *= weight
        if dh is not None:
            at = row * dh_step + cols * step
            tl.store(dh + at + gate_start, (grad * slope).to(dh.dtype.element_ty), mask=inside)
            if GATED:
                tl.store(dh + at + up_start, (grad * value).to(dh.dtype.element_ty), mask=inside)
        if scaled is not None:
            tl.debug_barrier()
            tl.store(scaled + row * da_step + cols, (a * weight).to(scaled.dtype.element_ty), mask=inside)
    if dweights is not None:
        tl.store(dweights + slot, tl.where(row < tl.load(end), tl.sum(total, 0), 0.0))


@on_own_device
def route_tokens(top_k_index: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """reference_experts.route_tokens in one kernel."""
    slots = top_k_index.numel()
    order, inverse = (torch.empty(slots, dtype=torch.int32, device=top_k_index.device) for _ in range(2))
    offsets = torch.empty(num_experts, dtype=torch.int32, device=top_k_index.device)
    block = min(SLOTS, ceil_power(slots))
    _route_tokens[(num_experts + 1,)](
        top_k_index.contiguous(), order, inverse, offsets, slots, num_experts, BLOCK=block, num_warps=4
    )
    return order, inverse, offsets


@on_own_device
def spread_rows(x: Tensor, inverse: Tensor, top_k: int) -> Tensor:
    """reference_experts.spread_rows in one kernel, which reads each token once."""
    x, _, step, _ = address_rows(x)
    tokens, width = x.shape
    out = torch.empty(len(inverse), width, dtype=x.dtype, device=x.device)
    grid, block, warps = _tile(tokens, width)
    _spread_rows[grid](x, inverse, out, width, step, K=top_k, BLOCK=block, num_warps=warps)
    return out


@on_own_device
def combine_rows(y: Tensor, inverse: Tensor, offsets: Tensor, weights: Tensor | None, top_k: int) -> Tensor:
    """reference_experts.combine_rows in one kernel."""
    y, _, step, _ = address_rows(y)
    tokens, width = len(inverse) // top_k, y.shape[1]
    out = torch.empty(tokens, width, dtype=y.dtype, device=y.device)
    grid, block, warps = _tile(tokens, width)
    weights = None if weights is None else weights.contiguous()
    _combine_rows[grid](y, inverse, offsets[-1:], weights, out, width, step, K=top_k, BLOCK=block, num_warps=warps)
    return out


@on_own_device
def gate_rows(h: Tensor, activation: str, layout: str) -> Tensor:
    """reference_experts.gate_rows in one kernel."""
    h, _, h_step, _ = address_rows(h)
    gate_start, up_start, step, width = _columns(h, layout)
    a = torch.empty(h.shape[0], width, dtype=h.dtype, device=h.device)
    grid, block, warps = _tile(h.shape[0], width)
    _gate_rows[grid](
        h, a, width, h_step, gate_start, up_start, step,
        ACTIVATION=activation, GATED=layout != "ungated", BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return a


@on_own_device
def gate_rows_backward(
    da: Tensor, h: Tensor, weights: Tensor, order: Tensor, offsets: Tensor, activation: str, layout: str,
    wanted: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """reference_experts.gate_rows_backward in one kernel; `w * a` takes da's place."""
    (da, _, da_step, _), (h, _, h_step, _) = address_rows(da), address_rows(h)
    gate_start, up_start, step, width = _columns(h, layout)
    dh = torch.empty(h.shape, dtype=h.dtype, device=h.device) if wanted[0] else None
    dweights = torch.empty(len(order), dtype=torch.float32, device=h.device) if wanted[2] else None
    block = min(COLUMNS, ceil_power(width))
    _gate_rows_backward[(len(order),)](
        da, h, weights.contiguous(), order, offsets[-1:], dh, da if wanted[1] else None, dweights,
        width, da_step, h_step, h.shape[1], gate_start, up_start, step,
        ACTIVATION=activation, GATED=layout != "ungated", BLOCK=block, num_warps=max(1, block // 256),
    )  # fmt: skip
    return dh, da if wanted[1] else None, dweights


def _columns(h: Tensor, layout: str) -> tuple[int, int, int, int]:
    """Where gate and up start in a row of h, the step from one column to the next, and how many there are."""
    width = h.shape[1]
    if layout == "ungated":
        return 0, 0, 1, width
    half = width // 2
    return {"gate_up": (0, half, 1, half), "up_gate": (half, 0, 1, half), "interleaved": (0, 1, 2, half)}[layout]


def _tile(rows: int, width: int) -> tuple[tuple[int, int], int, int]:
    """(grid, columns of a program, warps): 8 columns a thread, 16 bytes of bfloat16."""
    block = min(COLUMNS, ceil_power(width))
    return (rows, ceil_div(width, block)), block, max(1, block // 256)
