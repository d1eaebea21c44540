"""A layer of stacked experts as one differentiable function: two grouped products and five kernels, forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..errors import KernelUnsupported
from ..kernels.experts import (
    LAYOUTS,
    combine_rows,
    gate_rows,
    gate_rows_backward,
    grouped_outer,
    grouped_product,
    route_tokens,
    spread_rows,
)


def grouped_experts(
    x: Tensor, up: Tensor, down: Tensor, top_k_index: Tensor, weights: Tensor,
    activation: str = "silu", layout: str = "gate_up", transposed: bool = False,
) -> Tensor:  # fmt: skip
    """`out[t] = sum over j of weights[t, j] * down[e] @ gate(up[e] @ x[t])` with `e = top_k_index[t, j]`, differentiable once.

    T tokens with k of E experts each, H in and out, F columns inside, this rank's in a sharded layer; S = T * k rows.

    | tensor | shape |
    |---|---|
    | x, out | `[T, H]` |
    | up | `[E, 2F, H]`, `[E, F, H]` "ungated"; transposed `[E, H, 2F]` |
    | down | `[E, H, F]`; transposed `[E, F, H]` |
    | top_k_index | `[T, k]` integers; what is not in 0 .. E - 1 is no expert, and adds nothing |
    | weights | `[T, k]` of any floating dtype |

    forward: `h = x @ up[e].T`, `a = gate(h)`, `y = a @ down[e].T`, `out = sum of w * y`.
    dgrad: `da = dout[t] @ down[e]`, `dh = w * da * gate'(h)`, `dx = sum over j of dh @ up[e]`, `dw = <da, a>`.
    wgrad: `ddown[e] = dout[t].T @ (w * a)`, `dup[e] = dh.T @ x[t]` over the rows of e.

    Saves x and h alone beside weights and indices; a is computed again, y is not needed. Each gradient is computed only where
    it is wanted.

    Args:
        activation: a name in kernels.reference.ACTIVATIONS. layout: of up's columns, one of kernels.experts.LAYOUTS.
        transposed: both weights have their input first.

    Raises:
        KernelUnsupported: shapes or dtypes that do not belong together, or a layout that is not known.
    """
    _check(x, up, down, top_k_index, weights, layout, transposed)
    if not torch.is_grad_enabled():
        return _run(x, up, down, top_k_index, weights, activation, layout, transposed)[0]
    return _Experts.apply(x, up, down, top_k_index, weights, activation, layout, transposed)


def _run(
    x: Tensor, up: Tensor, down: Tensor, top_k_index: Tensor, weights: Tensor, activation: str, layout: str, transposed: bool
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """(out, h, how tokens were routed)."""
    routes = route_tokens(top_k_index, len(up))
    (_, inverse, offsets), top_k = routes, top_k_index.shape[1]
    h = grouped_product(spread_rows(x, inverse, top_k), up if transposed else up.mT, offsets)
    y = grouped_product(gate_rows(h, activation, layout), down if transposed else down.mT, offsets)
    return combine_rows(y, inverse, offsets, weights, top_k), h, routes


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, up, down, top_k_index, weights, activation, layout, transposed):
        out, h, routes = _run(x, up, down, top_k_index, weights, activation, layout, transposed)
        ctx.save_for_backward(x, up, down, weights, h, *routes)
        ctx.options = activation, layout, transposed
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        x, up, down, weights, h, order, inverse, offsets = ctx.saved_tensors
        need_x, need_up, need_down, _, need_weights = ctx.needs_input_grad[:5]
        activation, layout, transposed = ctx.options
        top_k = weights.shape[1]
        dx = dup = ddown = dweights = None
        rows = spread_rows(dout, inverse, top_k)
        da = grouped_product(rows, down.mT if transposed else down, offsets)
        wanted = need_x or need_up, need_down, need_weights
        dh, scaled, dweights = gate_rows_backward(da, h, weights, order, offsets, activation, layout, wanted)
        del da
        if scaled is not None:
            ddown = _outer(scaled, rows, offsets, transposed)
        del rows, scaled
        if need_up and dh is not None:
            dup = _outer(spread_rows(x, inverse, top_k), dh, offsets, transposed)
        if need_x and dh is not None:
            dx = combine_rows(grouped_product(dh, up.mT if transposed else up, offsets), inverse, offsets, None, top_k)
        if dweights is not None:
            dweights = dweights.view(weights.shape).to(weights.dtype)
        return dx, dup, ddown, None, dweights, None, None, None


def _outer(inputs: Tensor, grads: Tensor, offsets: Tensor, transposed: bool) -> Tensor:
    """The gradient of a stacked weight, its input first if transposed."""
    return grouped_outer(inputs, grads, offsets) if transposed else grouped_outer(grads, inputs, offsets)


def _check(x: Tensor, up: Tensor, down: Tensor, top_k_index: Tensor, weights: Tensor, layout: str, transposed: bool) -> None:
    if layout not in LAYOUTS:
        raise KernelUnsupported(f"experts: layout {layout!r} is none of {', '.join(LAYOUTS)}")
    experts, out, inside = up.shape if not transposed else (up.shape[0], up.shape[2], up.shape[1])
    columns = out if layout == "ungated" else out / 2
    want = (experts, columns, inside) if transposed else (experts, inside, columns)
    if down.shape != want or x.shape[1:] != (inside,):
        raise KernelUnsupported(
            f"experts: x {tuple(x.shape)}, up {tuple(up.shape)} and down {tuple(down.shape)} do not fit together as {layout}"
            f"{' transposed' * transposed}: down should be {want}, x [tokens, {inside}]"
        )
    if top_k_index.shape != weights.shape or len(weights) != len(x) or weights.ndim != 2:
        raise KernelUnsupported(
            f"experts: {len(x)} tokens, top_k_index {tuple(top_k_index.shape)} and weights {tuple(weights.shape)}: the last two "
            f"should be [tokens, k]"
        )
    if not x.dtype == up.dtype == down.dtype:
        raise KernelUnsupported(f"experts: x is {x.dtype}, up {up.dtype}, down {down.dtype}: cast them to one dtype")
