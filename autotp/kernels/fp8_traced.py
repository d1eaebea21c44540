"""The product of one input with one weight in FP8 as a compiler reads it: plain operations, which it fuses itself.

M rows, K in, N out; the same operands and products as fp8_product.py's, for one scale a tensor or a row. The weight is quantised
in each forward, and scales that are not finite are not counted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import reference_fp8
from .fp8 import Recipe
from .fp8_scaled import Quantised, Share

E4M3 = torch.float8_e4m3fn


def multiply_traced(x: Tensor, weight: Tensor, recipe: Recipe, cut: int | None, share: Share | None) -> Tensor:
    """`x @ w.T` `[..., N]` of x's dtype: x `[..., K]`, weight `[N, K]`.

    Args:
        recipe: "tensorwise" or "rowwise".
        cut: 0 where a rank has a part of the outputs, 1 of the inputs, None of neither; share: see fp8.quantise.
    """
    rows = x.reshape(-1, x.shape[-1])
    how = recipe.scaling, recipe.gradient_dtype, recipe.fast_gradients, cut, share
    return _TracedProduct.apply(rows, weight, how).view(*x.shape[:-1], weight.shape[0])


class _TracedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, how: tuple[Any, ...]) -> Tensor:
        scaling, _, _, cut, share = how
        ctx.how, ctx.dtype = how, weight.dtype
        rows, turned = _quantise(x, scaling, E4M3, 1 if cut == 1 else None, share)
        w, w_turned = _quantise(weight, scaling, E4M3, cut, share)
        ctx.save_for_backward(turned.values, turned.scale, w_turned.values, w_turned.scale)
        return _multiply(rows, w, x.dtype, True).clone()  # torch 2.11's compiler gives a cast's backward zeros

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        scaling, gradient, fast, cut, share = ctx.how
        turned, scale, w_turned, w_scale = ctx.saved_tensors
        rows, columns = _quantise(dy, scaling, gradient, 1 if cut == 0 else None, share)
        dx = _multiply(rows, Quantised(w_turned, w_scale, scaling), dy.dtype, fast)
        return dx, _multiply(columns, Quantised(turned, scale, scaling), ctx.dtype, fast), None


def _quantise(x: Tensor, scaling: str, dtype: torch.dtype, cut: int | None, share: Share | None) -> Any:
    """Both operands."""
    return reference_fp8.quantise(x, scaling, dtype, True, True, cut, share, None)


def _multiply(a: Any, b: Any, dtype: torch.dtype, fast: bool) -> Tensor:
    """fp8.multiply, by an operation that inductor knows."""
    if not a.values.is_cuda:
        return reference_fp8.multiply(a, b, dtype, fast)
    out = torch.bfloat16 if a.scaling == "rowwise" and dtype is torch.float32 else dtype
    scale = b.scale.t() if b.scaling == "rowwise" else b.scale
    return torch._scaled_mm(a.values, b.values.t(), a.scale, scale, out_dtype=out, use_fast_accum=fast).to(dtype)
