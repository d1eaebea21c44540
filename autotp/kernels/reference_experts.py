"""The plain-torch meaning of the experts' operations; runs on any device and dtype. Shapes as in experts.py."""

from __future__ import annotations

import torch
from torch import Tensor

from .reference import ACTIVATIONS


def route_tokens(top_k_index: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sorts slots by expert, in their own order within one: (order, inverse, offsets)."""
    slots = top_k_index.flatten()
    owner = slots.where((slots >= 0) & (slots < num_experts), num_experts)
    owner, order = torch.sort(owner, stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    experts = torch.arange(num_experts, device=owner.device, dtype=owner.dtype)
    return order.int(), inverse.int(), torch.searchsorted(owner, experts, right=True, out_int32=True)


def spread_rows(x: Tensor, inverse: Tensor, top_k: int) -> Tensor:
    """Each token's row, once for each of its slots: `out[inverse[t * k + j]] = x[t]`."""
    rows = x.new_empty(len(inverse), x.shape[1])
    rows[inverse] = x.repeat_interleave(top_k, 0)
    return rows


def combine_rows(y: Tensor, inverse: Tensor, offsets: Tensor, weights: Tensor | None, top_k: int) -> Tensor:
    """`out[t] = sum over j of weights[t, j] * y[inverse[t * k + j]]`, without slots that have no expert."""
    wide = torch.promote_types(y.dtype, torch.float32)
    rows = y[inverse].to(wide)
    if weights is not None:
        rows = rows * weights.reshape(-1, 1).to(wide)
    rows = rows.masked_fill((inverse >= offsets[-1])[:, None], 0)
    return rows.view(-1, top_k, y.shape[1]).sum(1).to(y.dtype)


def split_gate(h: Tensor, layout: str) -> tuple[Tensor, Tensor | None]:
    """(gate, up) of the columns of `h` as views; up is None where there is none."""
    if layout == "ungated":
        return h, None
    if layout == "interleaved":
        return h[:, ::2], h[:, 1::2]
    first, second = h.chunk(2, -1)
    return (first, second) if layout == "gate_up" else (second, first)


def gate_rows(h: Tensor, activation: str, layout: str) -> Tensor:
    """`activation(gate) * up`, computed in float32 (float64 for float64) and rounded once."""
    gate, up = split_gate(h.to(torch.promote_types(h.dtype, torch.float32)), layout)
    value = ACTIVATIONS[activation](gate)
    return (value if up is None else value * up).to(h.dtype)


def gate_rows_backward(
    da: Tensor, h: Tensor, weights: Tensor, order: Tensor, offsets: Tensor, activation: str, layout: str,
    wanted: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """See experts.gate_rows_backward."""
    wide = torch.promote_types(h.dtype, torch.float32)
    gate, up = split_gate(h.to(wide), layout)
    with torch.enable_grad():
        leaf = gate.detach().requires_grad_()
        value = ACTIVATIONS[activation](leaf)
        (slope,) = torch.autograd.grad(value.sum(), leaf)
    value = value.detach()
    scale, grad = weights.reshape(-1, 1).to(wide)[order], da.to(wide)
    a = value if up is None else value * up
    dh = dweights = None
    if wanted[0]:
        dh = torch.empty_like(h, memory_format=torch.contiguous_format)
        dgate, dup = split_gate(dh, layout)
        dgate.copy_(grad * scale * slope if up is None else grad * scale * slope * up)
        if dup is not None:
            dup.copy_(grad * scale * value)
    if wanted[2]:
        there = torch.arange(len(order), device=order.device) < offsets[-1]
        dweights = torch.empty(len(order), dtype=wide, device=h.device)
        dweights[order] = (grad * a).sum(-1).where(there, 0)
    return dh, (a * scale).to(h.dtype) if wanted[1] else None, dweights


def grouped_product(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """`x[rows of e] @ weight[e]` for each expert e, one product after another; the others' rows are zeros."""
    y = x.new_zeros(x.shape[0], weight.shape[2])
    for expert, (start, stop) in enumerate(_spans(offsets)):
        if start < stop:
            torch.mm(x[start:stop], weight[expert], out=y[start:stop])
    return y


def grouped_outer(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """`a[rows of e].T @ b[rows of e]` for each expert e; zeros for one without rows."""
    out = a.new_zeros(len(offsets), a.shape[1], b.shape[1])
    for expert, (start, stop) in enumerate(_spans(offsets)):
        if start < stop:
            torch.mm(a[start:stop].t(), b[start:stop], out=out[expert])
    return out


def _spans(offsets: Tensor) -> list[tuple[int, int]]:
    ends = offsets.tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))
