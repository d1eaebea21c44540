"""Rotary position embedding of queries and keys, in one kernel, forward and backward.

| tensor | shape |
|---|---|
| q, k | `[B, h, S, D]`, `[B, hk, S, D]` of one dtype, any strides: transposed views of column slices are read in place |
| cos, sin | `[B or 1, S, R]`, any floating dtype, R even and at most D: the columns from R on stay as they are |
| result | as q and k, in `[B, S, heads, D]` memory order, which attention reads well and the output projection takes as a view |

With column i < R and its partner j (`i + R / 2`, or `i + 1` interleaved): `y_i = x_i * cos_i - x_j * sin_i`,
`y_j = x_j * cos_j + x_i * sin_j`; dgrad is the transpose. In float32 (float64 for float64), rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..errors import KernelUnsupported
from . import reference
from .dispatch import Problem, select


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """q and k turned by the angles of cos and sin, differentiable once in q and k; saves cos and sin.

    Where cos or sin want a gradient, plain torch operations give it.

    Args:
        interleaved: partners are neighbours, as in GPT-J and Cohere; else half of R apart, as transformers' `rotate_half`.

    Raises:
        KernelUnsupported: shapes that do not fit each other, or a named backend that can't run.
    """
    _check(q, k, cos, sin)
    grad = torch.is_grad_enabled()
    if torch.compiler.is_compiling() or (grad and (cos.requires_grad or sin.requires_grad)):
        return reference.rotary_forward(q, k, cos, sin, interleaved)
    if not grad or not (q.requires_grad or k.requires_grad):
        return select(_problem("rotary_forward", q, interleaved))(q, k, cos, sin, interleaved)
    return _Rotary.apply(q, k, cos, sin, interleaved)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin, interleaved):
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        ctx.set_materialize_grads(False)
        return select(_problem("rotary_forward", q, interleaved))(q, k, cos, sin, interleaved)

    @staticmethod
    @once_differentiable
    def backward(ctx, dq, dk):
        cos, sin = ctx.saved_tensors
        dq, dk = (grad if needed else None for grad, needed in zip((dq, dk), ctx.needs_input_grad[:2], strict=True))
        some = dk if dq is None else dq
        if some is not None:
            run = select(_problem("rotary_backward", some, ctx.interleaved))
            dq, dk = run(dq, dk, cos, sin, ctx.interleaved)
        return dq, dk, None, None, None


def _problem(op: str, x: Tensor, interleaved: bool) -> Problem:
    batch, heads, tokens, width = x.shape
    kind = "interleaved" if interleaved else "halves"
    return Problem(op, x.device.type, x.dtype, kind, batch * tokens if heads * width else 0, width)


def fits(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether the shapes, and the dtypes of q and k, are those of the table above."""
    if not (q.dim() == k.dim() == 4 and cos.dim() == 3 and cos.shape == sin.shape and q.dtype == k.dtype):
        return False
    (batch, _, tokens, width), (angles_batch, angles_tokens, turned) = q.shape, cos.shape
    alike = (batch, tokens, width) == (k.shape[0], k.shape[2], k.shape[3])
    return alike and angles_batch in (1, batch) and angles_tokens == tokens and turned <= width and turned % 2 == 0


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    if not fits(q, k, cos, sin):
        raise KernelUnsupported(
            f"rotary: q {tuple(q.shape)} {q.dtype}, k {tuple(k.shape)} {k.dtype}, cos {tuple(cos.shape)}, sin {tuple(sin.shape)} "
            f"are not [B, h, S, D] and [B, hk, S, D] of one dtype, and [B or 1, S, R] twice with an even R <= D"
        )
