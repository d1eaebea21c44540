"""The plain-torch meaning of every operation the layers dispatch; runs on any device and dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`: x `[..., K]`, weight `[N, K]`, bias `[N]`, result `[..., N]`."""
    return F.linear(x, weight, bias)


def linear_transposed(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight + bias`, as transformers' Conv1D: x `[..., K]`, weight `[K, N]`, bias `[N]`, result `[..., N]`."""
    flat = x.reshape(-1, x.shape[-1])
    product = torch.mm(flat, weight) if bias is None else torch.addmm(bias, flat, weight)
    return product.view(*x.shape[:-1], weight.shape[1])


def norm_forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: str, residual: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """`y = (t - m) * r * w + b` of `t = x + residual`; "layernorm": m is the mean; "rms": m = 0; "rms1p": and w is `1 + w`.

    `r = rsqrt(mean((t - m)^2) + eps)`; t is rounded to its dtype, the rest computed in float32 (float64 for float64) and rounded
    once.

    Returns:
        y like x, r `[M]`, m `[M]` or None, and t.
    """
    total = x if residual is None else x + residual
    y = total.to(_wide(x))
    mean = None
    if kind == "layernorm":
        mean = y.mean(-1, keepdim=True)
        y = y - mean
    rstd = torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    y = y * rstd
    if weight is not None:
        y = y * _scale(weight, kind, y.dtype)
    if bias is not None:
        y = y + bias.to(y.dtype)
    return y.to(x.dtype), rstd.flatten(), None if mean is None else mean.flatten(), total


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
    """Gradients of `norm_forward` at its input t, here x, in float32 (float64 for float64), each rounded once.

    With `n = (x - m) * r` and `g = dy * w`: `dx = r * (g - mean(g) - n * mean(g * n)) + residual_grad` (without mean(g) for the
    rms kinds), `dweight = sum over rows of dy * n`, `dbias = sum over rows of dy`.

    Returns:
        dx like x, dweight and dbias `[N]` in the weight's dtype (x's without one); None for what is not wanted.
    """
    wide, rows, width = _wide(x), x.shape[:-1].numel(), x.shape[-1]
    rstd, dtype = rstd[:, None], x.dtype if weight is None else weight.dtype
    grad, n = dy.reshape(rows, width).to(wide), x.reshape(rows, width).to(wide)
    n = (n if mean is None else n - mean[:, None]) * rstd
    dweight = (grad * n).sum(0).to(dtype) if wanted[1] and weight is not None else None
    dbias = grad.sum(0).to(dtype) if wanted[2] else None
    if not wanted[0]:
        return None, dweight, dbias
    if weight is not None:
        grad = grad * _scale(weight, kind, wide)
    shared = n * (grad * n).mean(-1, keepdim=True)
    if kind == "layernorm":
        shared = shared + grad.mean(-1, keepdim=True)
    dx = ((grad - shared) * rstd).view(x.shape)
    return (dx if residual_grad is None else dx + residual_grad.to(wide)).to(x.dtype), dweight, dbias


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _scale(weight: Tensor, kind: str, wide: torch.dtype) -> Tensor:
    return weight.to(wide) + 1 if kind == "rms1p" else weight.to(wide)
