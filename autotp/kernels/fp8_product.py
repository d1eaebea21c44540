"""The product of one input with the weights of one linear, or of several that read it, in FP8, as one step of autograd.

M rows, K in, N out (`N1 + N2 + ...` over the weights); `|a|` is an operand of 8 bits, summed over its columns.

| direction | algebra | operands |
|---|---|---|
| forward | `y = x @ w.T`, then `sum_output`, then `+ b` | `|x| [M, K]`, `|w| [N, K]` |
| dgrad | `dx = dy @ w`, then `sum_input` | `|dy| [M, N]`, `|w.T| [K, N]` |
| wgrad | `dw = dy.T @ x`, `db = dy.sum(0)`, then `sum_copies`; into `main_grad` | `|dy.T| [N, M]`, `|x.T| [K, M]` |

A tensor is read once for both of its operands. What is kept for backward is `|x.T|` and `|w.T|`, of a byte each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .autocast import autocast_dtype, disable_autocast
from .fp8 import Recipe, multiply, quantise, turn
from .fp8_scaled import Operands, Quantised, Share
from .gradients import bias_gradients
from .main_grad import add_gradient, find_main_grad
from .matmul import join_columns
from .product import ProductSpec


class Scaled(NamedTuple):
    """How products are made in FP8.

    Attributes:
        recipe: scalings and formats.
        read_weights: gives the operands of all weights, one below the other: `|w|`, and `|w.T|` where it is asked for.
        cut: 0 where a rank has a part of the outputs, 1 of the inputs, None of neither.
        share: the largest over the ranks, of scales that span their parts.
        bad: int32 `[]` each: scales that were not finite, of inputs, weights and output gradients.
        note_backward: is told of a backward, once all forwards that it needs again have run.
        gather_rows: gives the values `[M, N]` of all ranks' rows, of which the output gradient has one rank's: of a tensorwise
            recipe, whose one scale is all ranks'; `sum_output` has scattered the output then.
        keeps: whether a backward may follow.
    """

    recipe: Recipe
    read_weights: Callable[[bool], Operands]
    cut: int | None = None
    share: Share | None = None
    bad: Sequence[Tensor] | None = None
    note_backward: Callable[[], None] | None = None
    gather_rows: Callable[[Tensor], Tensor] | None = None
    keeps: bool = True

    def count(self, place: int) -> Tensor | None:
        """Where what is not finite is counted."""
        return None if self.bad is None else self.bad[place]


_view = torch.ops.aten._unsafe_view.default  # autograd allows no changes in place of a view that a Function returns


def multiply_fp8(
    spec: ProductSpec, scaled: Scaled, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """`x @ w.T + b` for each weight: x `[..., K]`, results `[..., Ni]` in the autocast dtype, if one is set, or x's."""
    if scaled.keeps != torch.is_grad_enabled():
        scaled = scaled._replace(keeps=not scaled.keeps)
    if not torch._C._is_any_autocast_enabled():
        return _ScaledProduct.apply(spec, scaled, x.dtype, x, *weights, *biases)
    dtype = autocast_dtype(x) or x.dtype
    with disable_autocast(x):
        return _ScaledProduct.apply(spec, scaled, dtype, x, *weights, *biases)


class _ScaledProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, spec: ProductSpec, scaled: Scaled, dtype: torch.dtype, x: Tensor, *params: Any) -> Any:
        count = len(params) // 2
        weights, biases = params[:count], params[count:]
        ctx.set_materialize_grads(False)
        ctx.spec, ctx.scaled, ctx.weights, ctx.biases = spec, scaled, weights, biases
        shape, wanted = x.shape, ctx.needs_input_grad
        ctx.shape, ctx.dtype = shape, x.dtype
        wants_dx, wants_dw = scaled.keeps and wanted[3], scaled.keeps and True in wanted[4 : 4 + count]
        rows, turned = _quantise_input(scaled, x if len(shape) == 2 else x.reshape(-1, shape[-1]), wants_dw)
        w, w_turned = scaled.read_weights(wants_dx)
        assert rows is not None and w is not None
        ctx.scalings = None if turned is None else turned.scaling, None if w_turned is None else w_turned.scaling
        ctx.save_for_backward(*(turned or (None,) * 3)[:2], *(w_turned or (None,) * 3)[:2] if wants_dx else (None, None))
        y = multiply(rows, w, dtype, fast=True)
        if spec.sum_output is not None:
            y = spec.sum_output(y)
        ctx.sizes = sizes = [weight.shape[1 if spec.transposed else 0] for weight in weights]
        shape = (*shape[:-1], y.shape[1]) if scaled.gather_rows is None else y.shape
        outputs = (_view(y, shape),) if count == 1 else torch.unsafe_split_with_sizes(y.view(shape), sizes, -1)
        for part, bias in zip(outputs, biases, strict=True):
            if bias is not None:
                part.add_(bias.to(dtype))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor | None) -> Any:
        found = [g for g in grads if g is not None]
        if not found:
            return (None,) * len(ctx.needs_input_grad)
        if torch._C._is_any_autocast_enabled():
            with disable_autocast(found[0]):
                return _backward(ctx, grads)
        return _backward(ctx, grads)


def _backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    spec, scaled, wanted, count = ctx.spec, ctx.scaled, ctx.needs_input_grad, len(ctx.weights)
    for parameter, name, wants in zip((*ctx.weights, *ctx.biases), spec.main_grads, wanted[4:], strict=True):
        if name is not None and wants:
            find_main_grad(parameter, name)  # before any collective: a rank that raises inside would leave the others waiting
    saved = ctx.saved_tensors  # once: a checkpoint gives them no second time
    if scaled.note_backward is not None:
        scaled.note_backward()  # now: a checkpoint has run forward again
    turned, w_turned = _operand(ctx, saved, 0), _operand(ctx, saved, 1)
    dy = _join_gradients(ctx, grads)
    rows, columns = _quantise_gradient(scaled, dy, w_turned is not None, turned is not None)
    fast, dx, dw = scaled.recipe.fast_gradients, None, [None] * count
    if rows is not None and w_turned is not None:
        dx = multiply(rows, w_turned, dy.dtype, fast).view(ctx.shape)
        dx = _as_dtype(dx if spec.sum_input is None else spec.sum_input(dx), ctx.dtype)
    if columns is not None and turned is not None:
        dw = _weight_gradients(ctx, columns, turned, fast)
    if True not in wanted[4 + count :]:
        return None, None, None, dx, *dw, *[None] * count
    parts = dict(enumerate(dy.split(ctx.sizes, 1)))
    return None, None, None, dx, *dw, *bias_gradients(ctx, parts, dy)


def _quantise_input(scaled: Scaled, x: Tensor, wants_columns: bool) -> Operands:
    cut = 1 if scaled.cut == 1 else None
    return quantise(x, scaled.recipe.scaling, columns=wants_columns, cut=cut, share=scaled.share, bad=scaled.count(0))


def _quantise_gradient(scaled: Scaled, dy: Tensor, wants_rows: bool, wants_columns: bool) -> Operands:
    recipe, bad = scaled.recipe, scaled.count(2)
    how: Any = dict(dtype=recipe.gradient_dtype, share=scaled.share, bad=bad)
    if scaled.gather_rows is None:
        cut = 1 if scaled.cut == 0 else None
        return quantise(dy, recipe.scaling, rows=wants_rows, columns=wants_columns, cut=cut, **how)
    own, _ = quantise(dy, recipe.scaling, columns=False, cut=0, **how)
    assert own is not None
    rows = own._replace(values=scaled.gather_rows(own.values))
    return rows, turn(rows) if wants_columns else None


def _operand(ctx: Any, saved: Sequence[Tensor | None], which: int) -> Quantised | None:
    values, scale = saved[2 * which : 2 * which + 2]
    return None if values is None or scale is None else Quantised(values, scale, ctx.scalings[which])


def _as_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def _join_gradients(ctx: Any, grads: Sequence[Tensor | None]) -> Tensor:
    """The gradients of all outputs as one `[M, N]`, zeros where there is none."""
    first = next(g for g in grads if g is not None)
    if len(grads) == 1:
        return first.reshape(-1, ctx.sizes[0])
    count = first.numel() // first.shape[-1]
    parts = [first.new_zeros(count, n) if g is None else g.reshape(-1, n) for g, n in zip(grads, ctx.sizes, strict=True)]
    return join_columns(parts)


def _weight_gradients(ctx: Any, columns: Quantised, turned: Quantised, fast: bool) -> list[Tensor | None]:
    spec, start = ctx.spec, 0
    found: list[Tensor | None] = []
    whole = multiply(columns, turned, ctx.weights[0].dtype, fast)
    for i, (weight, size) in enumerate(zip(ctx.weights, ctx.sizes, strict=True)):
        grad, total = whole if len(ctx.sizes) == 1 else whole[start : start + size], spec.sum_copies[i]
        start += size
        if not ctx.needs_input_grad[4 + i]:
            found.append(None)
            continue
        grad = grad.t() if spec.transposed else grad
        grad = _as_dtype(grad, weight.dtype)
        grad = grad if total is None else total(grad)
        name = spec.main_grads[i]
        found.append(grad if name is None else add_gradient(weight, name, grad))
    return found
