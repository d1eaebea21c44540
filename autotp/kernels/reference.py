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
