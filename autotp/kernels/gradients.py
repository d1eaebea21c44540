"""Gradients of the weights and biases of a product, and the gradients of its outputs as one matrix.

`ctx` is that of a product's autograd step: `spec` (a ProductSpec), `weights`, `biases`, `merged` (all weights as one, or None),
`versions` and `needs_input_grad`, whose weights begin at 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .main_grad import add_gradient, add_product, find_main_grad
from .matmul import join_columns, view_side_by_side, wgrad

SMALL = 1 << 20  # elements up to which copying a gradient costs less than launching another product


def join_gradients(ctx: Any, rows: dict[int, Tensor]) -> Tensor | None:
    """The gradients of all outputs as one `[M, N]`, or None where products one by one are wanted or cost less."""
    count = len(ctx.weights)
    if count == 1:
        return rows[0]
    if len(rows) < count or ctx.merged is None:
        return None
    parts = [rows[i] for i in range(count)]
    found = view_side_by_side(parts)
    if found is not None:
        return found
    m, n, k = parts[0].shape[0], ctx.merged.shape[0], ctx.merged.shape[1]
    # A copy reads and writes n columns; each further product reads and writes the k columns that it adds to.
    return join_columns(parts) if m * n <= SMALL or n <= (count - 1) * k else None


def as_rows(weight: Tensor, spec: Any) -> Tensor:
    """`weight` as `[N, K]`."""
    return weight.t() if spec.transposed else weight


def check_versions(ctx: Any) -> None:
    """Raise as autograd does for what it saved itself."""
    if ctx.versions is not None and ctx.versions != [w._version for w in ctx.weights]:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a weight of "
            f"linears that read one input, of shapes {[tuple(w.shape) for w in ctx.weights]}. Change weights after backward."
        )


def find_factors(
    ctx: Any, rows: dict[int, Tensor], joined: Tensor | None, saved: Sequence[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Pairs `dy [M, N]`, `w [N, K]` whose products add up to the input's gradient; `saved` are the weights without `merged`."""
    if joined is not None:
        return [(joined, ctx.merged if ctx.merged is not None else as_rows(saved[0], ctx.spec))]
    parts = saved if ctx.merged is None else ctx.merged.split([w.shape[0] for w in ctx.weights])
    return [(dy, as_rows(parts[i], ctx.spec)) for i, dy in rows.items()]


def weight_gradients(ctx: Any, rows: dict[int, Tensor], joined: Tensor | None, x: Tensor | None) -> list[Tensor | None]:
    weights, spec = ctx.weights, ctx.spec
    count = len(weights)
    wanted = ctx.needs_input_grad[4 : 4 + count]
    grads: list[Tensor | None] = [None] * count
    if x is None:
        return grads
    flat = x.reshape(-1, x.shape[-1])
    if count > 1 and joined is not None and False not in wanted and not any(spec.main_grads[:count]):
        whole = wgrad(joined, flat)
        assert whole is not None
        grads = list(torch.unsafe_split_with_sizes(whole.to(weights[0].dtype), [w.shape[0] for w in weights]))
        return [_sum_copies(spec, i, grad) for i, grad in enumerate(grads) if grad is not None]
    for i, dy in rows.items():
        if wanted[i]:
            left, right = (flat, dy) if spec.transposed else (dy, flat)
            grads[i] = _weight_gradient(spec, i, weights[i], left, right)
    return grads


def _weight_gradient(spec: Any, i: int, weight: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """`left.T @ right`, what several ranks hold summed; into main_grad where that is asked for."""
    name = spec.main_grads[i]
    if name is None:
        product = wgrad(left, right)
        assert product is not None
        return _sum_copies(spec, i, product.to(weight.dtype))
    if spec.sum_copies[i] is None:
        return add_product(weight, name, left, right)
    product = torch.empty_like(weight, dtype=find_main_grad(weight, name).dtype)
    wgrad(left, right, product, overwrite=True)
    return add_gradient(weight, name, _sum_copies(spec, i, product))


def bias_gradients(ctx: Any, rows: dict[int, Tensor], joined: Tensor | None) -> list[Tensor | None]:
    biases, spec = ctx.biases, ctx.spec
    count = len(biases)
    wanted = ctx.needs_input_grad[4 + count :]
    grads: list[Tensor | None] = [None] * count
    if True not in wanted:
        return grads
    if count > 1 and joined is not None and False not in wanted and not any(spec.main_grads[count:]):
        sums = joined.sum(0).to(biases[0].dtype)
        grads = list(torch.unsafe_split_with_sizes(sums, [b.shape[0] for b in biases]))
        return [_sum_copies(spec, count + i, grad) for i, grad in enumerate(grads) if grad is not None]
    for i, dy in rows.items():
        if wanted[i]:
            name = spec.main_grads[count + i]
            dtype = biases[i].dtype if name is None else find_main_grad(biases[i], name).dtype
            total = dy.sum(0).to(dtype) if name is None else dy.sum(0, dtype=dtype)
            total = _sum_copies(spec, count + i, total)
            grads[i] = total if name is None else add_gradient(biases[i], name, total)
    return grads


def _sum_copies(spec: Any, i: int, grad: Tensor) -> Tensor:
    """`grad` of parameter `i`, summed over the ranks that hold copies of it; every rank comes here for the same ones."""
    total = spec.sum_copies[i]
    return grad if total is None else total(grad)
