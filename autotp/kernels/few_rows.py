"""Products of a few rows while decoding: what is read is the weight, once, and the rest is done on the way.

| tensor | shape, of one dtype |
|---|---|
| x | `[..., K]`, M rows |
| w, b | `[N, K]`, `[N]`; gated: `[2N, K]`, `[2N]`, the gate's rows, then up's |
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


def linear_gated(x: Tensor, w: Tensor, b: Tensor | None, activation: str) -> Tensor:
    """`activation(x @ gate.T) * (x @ up.T)`, with biases, of x `[..., K]`; only where `fits` says so.

    Args:
        w, b: `[2N, K]` and `[2N]`, the gate's rows, then up's. activation: a key of reference.ACTIVATIONS.
    """
    return select(_problem(x, w, activation))(x, w, b, activation)


def _problem(x: Tensor, w: Tensor, activation: str) -> Problem:
    width = x.shape[-1]
    return Problem("linear_few", x.device.type, x.dtype, activation, x.numel() // width, width, outputs=w.shape[0])


def fits(x: Tensor, w: Tensor, b: Tensor | None = None) -> bool:
    """Whether the product of `x` `[..., K]` is one of few rows within `decoding`, without gradient, of plain memory."""
    if not is_decoding() or type(x) not in PLAIN or type(w) not in PLAIN:
        return False
    if torch.is_grad_enabled() and (x.requires_grad or w.requires_grad or (b is not None and b.requires_grad)):
        return False
    if x.dtype is not w.dtype or (b is not None and b.dtype is not w.dtype) or torch.is_autocast_enabled(x.device.type):
        return False
    return 0 < x.numel() <= MOST_ROWS * x.shape[-1] and x.is_contiguous() and w.stride(1) == 1 and w.numel() > 0
