"""RMSNorm and LayerNorm, alone or after a residual addition, fused forward and backward.

M rows (all dimensions but the last), N columns.

| tensor | shape, dtype |
|---|---|
| x, residual, y, total | `[..., N]` of one dtype |
| weight, bias | `[N]` of any floating dtype, or None |
| rstd, mean | `[M]` float32 (float64 for float64); mean is None for the rms kinds |

forward: `y = (x - mean) * rstd * weight + bias`; dgrad: `dx = rstd * (g - mean(g) - n * mean(g * n))` with
`n = (x - mean) * rstd` and `g = dy * weight`; wgrad: `dweight = sum(dy * n)`, `dbias = sum(dy)` over the rows. All in float32
(float64 for float64), rounded once to x's dtype, the gradients of weight and bias to the parameters'.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..errors import KernelUnsupported
from . import reference
from .dispatch import Problem, select

KINDS = ("rms", "rms1p", "layernorm")


def norm_forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: str
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The norm y of x, with the statistics (rstd, mean) that `norm_backward` wants; not differentiable by autograd.

    Args:
        kind: "rms": no mean is taken off; "rms1p": the same, and the weight is `1 + weight`; "layernorm".

    Raises:
        KernelUnsupported: an unknown kind, a weight or bias that is not `[N]`, or a named backend that can't run this.
    """
    _check(x, weight, bias, kind)
    y, rstd, mean, _ = select(_problem("norm_forward", x, weight, kind, bias))(x, weight, bias, eps, kind)
    return y, rstd, mean


def norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    mean: Tensor | None,
    kind: str,
    residual_grad: Tensor | None = None,
    wanted: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of the norm: `dx + residual_grad` like x, dweight and dbias `[N]` in the weight's dtype (x's without one).

    Args:
        dy, residual_grad: like x, any strides; neither is written to.
        rstd, mean: what `norm_forward` returned for x.
        wanted: which of dx, dweight, dbias to compute; the others are None.
    """
    if not any(wanted):
        return None, None, None
    run = select(_problem("norm_backward", x, weight, kind))
    return run(dy, x, weight, rstd, mean, kind, residual_grad, wanted)


def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: str) -> Tensor:
    """`norm_forward`'s y, differentiable once; saves x and the statistics."""
    if torch.compiler.is_compiling():
        return reference.norm_forward(x, weight, bias, eps, kind)[0]
    if not torch.is_grad_enabled() or not _any_requires_grad(x, weight, bias):
        return norm_forward(x, weight, bias, eps, kind)[0]
    return _Norm.apply(x, None, weight, bias, eps, kind)[0]


def add_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: str
) -> tuple[Tensor, Tensor]:
    """(y, total): the norm of `total = x + residual`, differentiable once.

    total is rounded to its dtype before it is normalised. In backward the gradient that comes in through total is added to the
    norm's in the same kernel; x and residual get one tensor between them.

    Raises:
        KernelUnsupported: x and residual differ in shape or dtype; else as `norm_forward`.
    """
    if x.shape != residual.shape or x.dtype != residual.dtype:
        raise KernelUnsupported(
            f"add_norm: x is {tuple(x.shape)} {x.dtype}, residual {tuple(residual.shape)} {residual.dtype}; "
            f"add them first and call norm, which takes any one tensor"
        )
    if torch.compiler.is_compiling():
        y, _, _, total = reference.norm_forward(x, weight, bias, eps, kind, residual)
        return y, total
    _check(x, weight, bias, kind)
    if not torch.is_grad_enabled() or not _any_requires_grad(x, residual, weight, bias):
        y, _, _, total = select(_problem("norm_forward", x, weight, kind, bias))(x, weight, bias, eps, kind, residual)
        return y, total
    return _Norm.apply(x, residual, weight, bias, eps, kind)


class _Norm(torch.autograd.Function):
    """(y, total) of x and a residual or None; total is no output of its own, but None, without a residual."""

    @staticmethod
    def forward(ctx, x, residual, weight, bias, eps, kind):
        _check(x, weight, bias, kind)
        run = select(_problem("norm_forward", x, weight, kind, bias))
        y, rstd, mean, total = run(x, weight, bias, eps, kind, residual)
        ctx.save_for_backward(total, weight, rstd, mean)
        ctx.kind, ctx.bias_dtype = kind, None if bias is None else bias.dtype
        ctx.set_materialize_grads(False)
        return y, None if residual is None else total

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dtotal):
        x, weight, rstd, mean = ctx.saved_tensors
        need_x, need_residual, need_weight, need_bias = ctx.needs_input_grad[:4]
        dx, dweight, dbias = dtotal, None, None
        if dy is not None:
            wanted = (need_x or need_residual, need_weight, need_bias)
            dx, dweight, dbias = norm_backward(dy, x, weight, rstd, mean, ctx.kind, dtotal, wanted)
        if dbias is not None:
            dbias = dbias.to(ctx.bias_dtype)
        return dx if need_x else None, dx if need_residual else None, dweight, dbias, None, None


def _any_requires_grad(*tensors: Tensor | None) -> bool:
    return any(t is not None and t.requires_grad for t in tensors)


def _problem(op: str, x: Tensor, weight: Tensor | None, kind: str, bias: Tensor | None = None) -> Problem:
    width, weight_dtype = x.shape[-1], None if weight is None else weight.dtype
    return Problem(op, x.device.type, x.dtype, kind, x.numel() // max(width, 1), width, weight_dtype, bias is not None)


def _check(x: Tensor, weight: Tensor | None, bias: Tensor | None, kind: str) -> None:
    if kind not in KINDS:
        raise KernelUnsupported(f"norm kind {kind!r} is none of {', '.join(KINDS)}")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and parameter.shape != x.shape[-1:]:
            raise KernelUnsupported(f"norm of {tuple(x.shape)}: the {name} is {tuple(parameter.shape)}, not [{x.shape[-1]}]")
