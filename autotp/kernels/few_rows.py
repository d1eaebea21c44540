"""Products of a few rows while decoding: what is read is the weight, once, and the rest is done on the way.

| tensor | shape, of one dtype |
|---|---|
| x | `[..., K]`, M rows |
| w, b | `[N, K]`, `[N]`; gated: `[2N, K]`, `[2N]`, the gate's rows, then up's |
| scale | of w in E4M3: float32, one for each of its rows |
| y | `[..., N]`: `x @ w.T + b`; gated: `activation(x @ gate.T + b_gate) * (x @ up.T + b_up)` |

Without gradient, inside `decode.decoding()` alone: a launch costs the host more than PyTorch's product does.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from . import reference
from .decode import is_decoding
from .dispatch import Problem, select

MOST_ROWS = 16  # more are left to cuBLAS
PLAIN = (Tensor, Parameter)  # whose memory a kernel may read


def linear(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """`x @ w.T + b`: x `[..., K]`, w `[N, K]`, b `[N]`, result `[..., N]`; differentiable, and then PyTorch's own."""
    if not fits(x, w, b):
        return reference.linear(x, w, b)
    return select(_problem(x, w, ""))(x, w, b)


def linear_scaled(x: Tensor, w: Tensor, scale: Tensor, b: Tensor | None = None) -> Tensor:
    """`x @ (w * scale).T + b` of x `[..., K]`, w `[N, K]` in E4M3; only where `fits` says so."""
    return select(_problem(x, w, ""))(x, w, b, "", scale)


def linear_gated(x: Tensor, w: Tensor, b: Tensor | None, activation: str, scale: Tensor | None = None) -> Tensor:
    """`activation(x @ gate.T) * (x @ up.T)`, with biases, of x `[..., K]`; only where `fits` says so.

    Args:
        w, b: `[2N, K]` and `[2N]`, the gate's rows, then up's. activation: a key of reference.ACTIVATIONS.
        scale: `[2N]`, of w in E4M3.
    """
    return select(_problem(x, w, activation))(x, w, b, activation, scale)


def _problem(x: Tensor, w: Tensor, activation: str) -> Problem:
    width = x.shape[-1]
    rows = x.numel() // width
    return Problem("linear_few", x.device.type, x.dtype, activation, rows, width, w.dtype, outputs=w.shape[0])


def fits(x: Tensor, w: Tensor, b: Tensor | None = None, scaled: bool = False) -> bool:
    """Whether the product of `x` `[..., K]` is one of few rows within `decoding`, without gradient, of plain memory.

    One of a `scaled` weight of 8 bits is so outside `decoding`, too: PyTorch has none that reads it.
    """
    if not (is_decoding() or scaled) or type(x) not in PLAIN or type(w) not in PLAIN:
        return False
    if torch.is_grad_enabled() and (x.requires_grad or w.requires_grad or (b is not None and b.requires_grad)):
        return False
    if (
        (x.dtype is not w.dtype and not scaled)
        or (b is not None and b.dtype is not x.dtype)
        or torch.is_autocast_enabled(x.device.type)
    ):
        return False
    return 0 < x.numel() <= MOST_ROWS * x.shape[-1] and x.is_contiguous() and w.stride(1) == 1 and w.numel() > 0
