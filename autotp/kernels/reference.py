"""The plain-torch meaning of every operation the layers dispatch; runs on any device and dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "hardswish": F.hardswish,
    "identity": lambda x: x,
    "leaky_relu": F.leaky_relu,
    "mish": F.mish,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "relu6": F.relu6,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "tanh": torch.tanh,
}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`: x `[..., K]`, weight `[N, K]`, bias `[N]`, result `[..., N]`."""
    return F.linear(x, weight, bias)


def linear_few(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "", scale: Tensor | None = None
) -> Tensor:
    """`linear`; with an activation `activation(gate) * up` of its halves: weight `[2N, K]`, bias `[2N]`, result `[..., N]`.

    A weight of 8 bits has a float32 scale for each of its rows.
    """
    if scale is not None:
        weight = (weight.float() * scale.view(-1, 1)).to(x.dtype)
    y = F.linear(x, weight, bias)
    gate, up = y.chunk(2, -1) if activation else (y, y)
    return gated_forward(gate, up, activation) if activation else y


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


def reduce_rows(
    parts: Sequence[Tensor],
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    shift: Tensor | None = None,
    eps: float = 0.0,
    kind: str = "",
) -> tuple[Tensor, Tensor | None]:
    """`total = sum(parts) + bias + residual` of all ranks' `[..., N]`, in float32, rounded once; with a kind also its norm.

    Returns:
        total, and `norm_forward`'s y of it with `weight` and, as its bias, `shift`; or None.
    """
    wide = _wide(parts[0])
    total = sum((part.to(wide) for part in parts[1:]), parts[0].to(wide))
    for more in (bias, residual):
        total = total if more is None else total + more.to(wide)
    total = total.to(parts[0].dtype)
    return total, norm_forward(total, weight, shift, eps, kind)[0] if kind else None


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


def gated_forward(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """`activation(gate) * up` in float32 (float64 for float64), rounded once."""
    wide = _wide(gate)
    return (ACTIVATIONS[activation](gate.to(wide)) * up.to(wide)).to(gate.dtype)


def gated_backward(
    dy: Tensor, gate: Tensor, up: Tensor, activation: str, wanted: tuple[bool, bool] = (True, True)
) -> tuple[Tensor | None, Tensor | None]:
    """`dgate = dy * up * activation'(gate)` and `dup = dy * activation(gate)`; in float32, rounded once.

    Returns:
        The wanted ones, side by side in one buffer `[..., 2F]` where both are; None for the other.
    """
    wide, dgate, dup = _wide(gate), None, None
    with torch.enable_grad():
        x = gate.detach().to(wide, copy=True).requires_grad_()
        y = ACTIVATIONS[activation](x)
    if wanted[0]:
        dgate = torch.autograd.grad(y, x, dy.to(wide) * up.to(wide))[0].to(gate.dtype)
    if wanted[1]:
        dup = (dy.to(wide) * y.detach()).to(gate.dtype)
    if dgate is None or dup is None:
        return dgate, dup
    both = torch.cat([dgate, dup], -1)
    return both[..., : gate.shape[-1]], both[..., gate.shape[-1] :]


def rotary_forward(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """q `[B, h, S, D]` and k `[B, hk, S, D]` turned by the angles of cos and sin `[B|1, S, R]`, in float32, rounded once.

    Of the first R columns, column i and its partner j, half of R further on (the next one, interleaved), become
    `x_i * cos_i - x_j * sin_i` and `x_j * cos_j + x_i * sin_j`; the columns from R on stay.
    """
    wide = _wide(q)
    c, s = cos.to(wide).unsqueeze(1), sin.to(wide).unsqueeze(1)
    q, k = (_rotate(x, lambda x: x * c + _swap_partners(x, interleaved, -1) * s, cos.shape[-1], wide) for x in (q, k))
    return q, k


def rotary_backward(
    dq: Tensor | None, dk: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> tuple[Tensor | None, Tensor | None]:
    """The transpose of `rotary_forward`: `dx_i = dy_i * cos_i + dy_j * sin_j`, `dx_j = dy_j * cos_j - dy_i * sin_i`.

    Returns:
        The gradients of q and k; None for one that does not come in.
    """
    wide = _wide(cos if dq is None else dq)
    c, s = cos.to(wide).unsqueeze(1), sin.to(wide).unsqueeze(1)
    dq, dk = (
        None if x is None else _rotate(x, lambda x: x * c + _swap_partners(x * s, interleaved, 1), cos.shape[-1], wide)
        for x in (dq, dk)
    )
    return dq, dk


def _rotate(x: Tensor, turn: Callable[[Tensor], Tensor], width: int, wide: torch.dtype) -> Tensor:
    """The first `width` columns turned, the others as they are, in `[B, S, h, D]` memory order."""
    turned = turn(x[..., :width].to(wide)).to(x.dtype)
    if width < x.shape[-1]:
        turned = torch.cat([turned, x[..., width:]], -1)
    return turned.transpose(1, 2).contiguous().transpose(1, 2)


def _swap_partners(x: Tensor, interleaved: bool, sign: int) -> Tensor:
    """Each column's partner in its place: the second of a pair, times `sign`, and the first, times `-sign`."""
    if interleaved:
        return torch.stack([x[..., 1::2] * sign, x[..., 0::2] * -sign], -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat([second * sign, first * -sign], -1)


def sum_exponentials(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """softmax.sum_exponentials."""
    peak = x.amax(-1).to(torch.promote_types(x.dtype, torch.float32))
    shifted = x - peak.masked_fill(peak == -torch.inf, 0).unsqueeze(-1)
    total = shifted.sum(-1)
    return peak, shifted.exp_().sum(-1), total


def cross_entropy_backward(
    x: Tensor, peak: Tensor, log_sum: Tensor, column: Tensor, scale: Tensor, target_share: float, every_share: float
) -> Tensor:
    """softmax.cross_entropy_backward."""
    dx = (x.to(peak.dtype) - peak.unsqueeze(-1)).sub_(log_sum.unsqueeze(-1)).exp_()
    here = column >= 0
    dx.scatter_add_(-1, column.clamp(min=0).unsqueeze(-1), (here.to(dx.dtype) * -target_share).unsqueeze(-1))
    if every_share:
        dx -= every_share
    return (dx * scale.unsqueeze(-1)).to(x.dtype)
