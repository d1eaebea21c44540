"""Stand-ins for what is being written elsewhere: kernels/norm.py and kernels/matmul.py. Replaced by them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def norm_forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: str):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    flat = wide.reshape(-1, wide.shape[-1])
    mean = flat.mean(-1) if kind == "layernorm" else None
    centred = flat if mean is None else flat - mean[:, None]
    rstd = torch.rsqrt(centred.square().mean(-1) + eps)
    y = centred * rstd[:, None]
    if weight is not None:
        y = y * (weight.to(y.dtype) + (kind == "rms1p"))
    if bias is not None:
        y = y + bias.to(y.dtype)
    return y.to(x.dtype).view(x.shape), rstd, mean


def norm_backward(dy, x, weight, rstd, mean, kind, residual_grad=None, wanted=(True, True, True)):
    wide = x.to(rstd.dtype).reshape(-1, x.shape[-1])
    grad = dy.to(rstd.dtype).reshape(-1, x.shape[-1])
    hat = (wide if mean is None else wide - mean[:, None]) * rstd[:, None]
    dweight = (grad * hat).sum(0).to(weight.dtype) if wanted[1] and weight is not None else None
    dbias = grad.sum(0) if wanted[2] else None
    if not wanted[0]:
        return None, dweight, dbias
    g = grad if weight is None else grad * (weight.to(grad.dtype) + (kind == "rms1p"))
    inner = g - hat * (g * hat).mean(-1, keepdim=True)
    if mean is not None:
        inner = inner - g.mean(-1, keepdim=True)
    dx = inner * rstd[:, None]
    if residual_grad is not None:
        dx = dx + residual_grad.reshape(dx.shape)
    return dx.to(x.dtype).view(x.shape), dweight, dbias


def linear(x, w, b=None):
    return F.linear(x, w, b)


def dgrad(dy, w, accumulate_into=None):
    return dy @ w if accumulate_into is None else accumulate_into.addmm_(dy, w)


def wgrad(dy, x, main_grad=None, overwrite=False):
    if main_grad is None:
        return dy.t() @ x
    if overwrite:
        main_grad.zero_()
    main_grad.add_(dy.t() @ x)
    return None


def take_main_grad(parameter, name):
    from ..errors import AutoTPError

    main_grad = getattr(parameter, "main_grad", None)
    if main_grad is None:
        raise AutoTPError(
            f"{name}: gradients are to be added to its main_grad, and it has none: set parameter.main_grad to float32 of "
            f"shape {list(parameter.shape)} before backward"
        )
    if getattr(parameter, "overwrite_main_grad", False):
        main_grad.zero_()
    return main_grad


def norm(x, weight, bias, eps, kind):
    return norm_forward(x, weight, bias, eps, kind)[0]
