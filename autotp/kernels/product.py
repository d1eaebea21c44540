"""The product of one input with the weights of one linear, or of several that read it, as one step of autograd.

M rows, K in, N out (`N1 + N2 + ...` over the weights).

| direction | algebra |
|---|---|
| forward | `y = x @ w.T`, then `sum_output`, then `+ b`; with it the residual `x` itself |
| dgrad | `dx = dy @ w` (`+` the residual's gradient), then `sum_input` |
| wgrad | `dw = dy.T @ x`, `db = dy.sum(0)`, each followed by its `sum_copies`; into `main_grad` where that is asked for |

Each of dx, dw and db is computed where it is wanted and for its own sake. Weights that lie side by side take one GEMM in each
direction; others one each, whose input gradients add up in one buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .autocast import autocast_dtype, disable_autocast
from .blocks import multiply_and_sum, sum_whole
from .gradients import as_rows, bias_gradients, check_versions, find_factors, join_gradients, weight_gradients
from .main_grad import find_main_grad
from .matmul import dgrad, linear
from .ownership import Ownership, count_references

Sum = Callable[[Tensor], Tensor]  # takes over the memory of what it is given


class ProductSpec(NamedTuple):
    """What stays the same from call to call.

    Attributes:
        run: the forward product `(x, w, b=None) -> y`.
        sum_input, sum_output: what makes the input's gradient, or the output, out of this rank's part of it.
        transposed: weights are `[K, N]`, as Conv1D's.
        sum_copies: for each weight, then each bias, what sums its gradient over the ranks that hold copies.
        main_grads: for each weight, then each bias, its name where its gradient goes into its `main_grad`.
        residual: return the input as well, last.
        adds_residual: whether this rank adds the residual's gradient to its part of the input's: one of them does.
        dealt: how rows are dealt to the ranks between products, see kernels/dealt.py.
        sums: how they are dealt while a sum is made of them behind a product, in place of `sum_input` or `sum_output`.
    """

    run: Callable[..., Tensor] = linear
    sum_input: Sum | None = None
    sum_output: Sum | None = None
    transposed: bool = False
    sum_copies: tuple[Sum | None, ...] = (None, None)
    main_grads: tuple[str | None, ...] = (None, None)
    residual: bool = False
    adds_residual: bool = True
    dealt: Any = None
    sums: Any = None


class Merged(NamedTuple):
    """All weights `[N, K]` as one tensor over their own memory, and all biases `[N]`, if any."""

    weight: Tensor
    bias: Tensor | None


def multiply(
    spec: ProductSpec, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], merged: Merged | None = None
) -> Any:
    """`x @ w.T + b` as autograd sees it; a tuple where there are several weights, or the residual."""
    if spec.residual and not (x.requires_grad and torch.is_grad_enabled()):
        y = multiply(spec._replace(residual=False), x, weights, biases, merged)
        return (*y, x) if len(weights) > 1 else (y, x)
    if spec.residual:
        _ownership.measure(x.device, lambda y: _Product.apply(_PLAIN_RESIDUAL, None, None, y, torch.ones_like(y), None))
    if not torch._C._is_any_autocast_enabled():
        return _Product.apply(spec, None, merged, x, *weights, *biases)
    dtype = autocast_dtype(x)
    with disable_autocast(x):
        return _Product.apply(spec, dtype, merged, x, *weights, *biases)


# A compiler would not see what is added to main_grad: it is interrupted there.
multiply_uncompiled: Callable[..., Any] = torch.compiler.disable(multiply)


def linear_with_residual(
    x: Tensor, w: Tensor, b: Tensor | None = None, *, accumulate_into_main_grad: bool = False, name: str = "this linear"
) -> tuple[Tensor, Tensor]:
    """`(x @ w.T + b, x)`, where the GEMM of x's gradient adds to the gradient that arrives at the second.

    | tensor | shape |
    |---|---|
    | x, x_res | `[..., K]` |
    | w, b | `[N, K]`, `[N]` |
    | y | `[..., N]` |

    dgrad: `dx = dx_res + dy @ w`, in dx_res' own memory where that is contiguous and nobody else's. Autograd may give one
    tensor to several, or one that is expanded: such a gradient is left alone, and added to the product.

    Args:
        accumulate_into_main_grad: add the gradients of `w` and `b`, Parameters then, to their `main_grad`.
        name: of the linear, for messages.
    """
    if torch.compiler.is_compiling() and not accumulate_into_main_grad:
        return linear(x, w, b), x
    names = (f"{name}.weight", f"{name}.bias") if accumulate_into_main_grad else (None, None)
    run = multiply_uncompiled if accumulate_into_main_grad else multiply
    return run(ProductSpec(main_grads=names, residual=True), x, (w,), (b,))


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, spec: ProductSpec, dtype: torch.dtype | None, merged: Merged | None, x: Tensor, *params: Any) -> Any:
        count = len(params) // 2
        weights, biases = params[:count], params[count:]
        ctx.set_materialize_grads(False)
        ctx.spec, ctx.weights, ctx.biases, ctx.merged = spec, weights, biases, None
        ctx.shape, ctx.dtype = x.shape, x.dtype
        source, x = x, _cast(x, dtype)
        wanted = ctx.needs_input_grad
        kept = x if True in wanted[4 : 4 + count] else None
        if merged is not None:
            weight = _cast(merged.weight, dtype)
            if wanted[3]:  # the weights' own memory: that nobody writes to it is checked as autograd checks what it saves
                ctx.merged = weight
                ctx.versions = [w._version for w in weights] if weight is merged.weight else None
            ctx.save_for_backward(kept)
            y = spec.run(x, weight, _cast(merged.bias, dtype))
            outputs = torch.unsafe_split_with_sizes(y, [w.shape[0] for w in weights], -1)
            return (*outputs, source.view_as(source)) if spec.residual else outputs
        cast = [_cast(w, dtype) for w in weights]
        ctx.save_for_backward(kept, *(cast if wanted[3] else ()))
        if count == 1 and not spec.residual:
            return _run_one(spec, x, cast[0], biases[0], dtype)
        outputs = tuple(_run_one(spec, x, w, b, dtype) for w, b in zip(cast, biases, strict=True))
        return (*outputs, source.view_as(source)) if spec.residual else outputs

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor | None) -> Any:
        ctx.residual, ctx.owned = None, False
        if ctx.spec.residual:
            ctx.residual = grads[-1]
            ctx.owned = ctx.residual is not None and _ownership.owns(ctx.residual, count_references(ctx.residual))
        rows = {i: g.reshape(-1, g.shape[-1]) for i, g in enumerate(grads[: len(ctx.weights)]) if g is not None}
        if torch._C._is_any_autocast_enabled():
            with disable_autocast(ctx.weights[0]):
                return _backward(ctx, rows)
        return _backward(ctx, rows)


_ownership = Ownership()
_PLAIN_RESIDUAL = ProductSpec(residual=True)


def _run_one(spec: ProductSpec, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    if spec.sum_output is None:
        return _own(spec.run(x, weight, _cast(bias, dtype)))
    if spec.sums is None:
        y = _own(spec.sum_output(spec.run(x, weight)))
    else:
        rows = multiply_and_sum(spec.sums, x.reshape(-1, x.shape[-1]), [as_rows(weight, spec).t()])
        y = _own(rows.view(*x.shape[:-1], -1))
    return y if bias is None else y.add_(bias.to(y.dtype))


def _own(y: Tensor) -> Tensor:
    """`y`, no view of what the product made: autograd allows no changes in place of a view that a Function returns."""
    return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y


def _cast(tensor: Any, dtype: torch.dtype | None) -> Any:
    return tensor if tensor is None or dtype is None else tensor.to(dtype)


# -- backward -----------------------------------------------------------------------------------------------------------


def _backward(ctx: Any, rows: dict[int, Tensor]) -> tuple[Tensor | None, ...]:
    if not rows:
        return None, None, None, ctx.residual, *[None] * (2 * len(ctx.weights))
    params, wanted = (*ctx.weights, *ctx.biases), ctx.needs_input_grad
    for parameter, name, wants in zip(params, ctx.spec.main_grads, wanted[4:], strict=True):
        if name is not None and wants:
            find_main_grad(parameter, name)  # before any collective: a rank that raises inside would leave the others waiting
    x, *saved = ctx.saved_tensors
    joined = join_gradients(ctx, rows)

    def multiply_weights() -> list[Tensor | None]:
        return weight_gradients(ctx, rows, joined, x)

    if not wanted[3]:
        dx, dw = None, multiply_weights()
    elif ctx.spec.sums is None or ctx.spec.sum_input is None:
        dx, dw = _input_gradient(ctx, rows, joined, saved), multiply_weights()
    else:
        dx, dw = _sum_input_gradient(ctx, find_factors(ctx, rows, joined, saved), multiply_weights)
    db = bias_gradients(ctx, rows, joined)
    return None, None, None, dx, *dw, *db


def _sum_input_gradient(
    ctx: Any, factors: Any, meanwhile: Callable[[], list[Tensor | None]]
) -> tuple[Tensor, list[Tensor | None]]:
    """The input's gradient, summed over the ranks behind what is computed meanwhile."""
    if ctx.merged is not None:
        check_versions(ctx)
    dx, dw = sum_whole(ctx.spec.sums, factors, meanwhile)
    dx = dx.view(ctx.shape).to(ctx.dtype)
    return dx if ctx.residual is None else dx + ctx.residual, dw


def _input_gradient(ctx: Any, rows: dict[int, Tensor], joined: Tensor | None, saved: list[Tensor]) -> Tensor:
    spec, residual = ctx.spec, ctx.residual
    if ctx.merged is not None:
        check_versions(ctx)
    dtype = next(iter(rows.values())).dtype
    # Under autocast the product's dtype is not the residual's, whose gradient is whole on every rank and added last.
    early = residual if residual is not None and spec.adds_residual and residual.dtype == dtype else None
    late = residual if residual is not None and residual.dtype != dtype else None
    dx = early.view(-1, ctx.shape[-1]) if early is not None and ctx.owned else None
    if joined is not None:
        dx = dgrad(joined, ctx.merged if ctx.merged is not None else as_rows(saved[0], spec), dx)
    else:
        parts = saved if ctx.merged is None else ctx.merged.split([w.shape[0] for w in ctx.weights])
        for i, dy in rows.items():
            dx = dgrad(dy, as_rows(parts[i], spec), dx)
    assert dx is not None
    dx = dx.view(ctx.shape)
    if early is not None and not ctx.owned:
        dx.add_(early)
    if spec.sum_input is not None:
        dx = spec.sum_input(dx)
    dx = dx.to(ctx.dtype)
    return dx if late is None else dx + late
