"""What PyTorch itself has fused kernels for, in the shapes of reference.py's operations."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .dispatch import Problem


def why_not_norm(problem: Problem) -> list[str]:
    """Reasons against PyTorch's layer_norm and rms_norm kernels."""
    against = []
    if problem.kind == "rms1p":
        against.append("has no 1 + weight that is rounded once")
    if problem.device == "cpu" and problem.kind == "rms":
        against.append("has no fused rms_norm on the CPU")
    if problem.device == "cpu" and problem.dtype not in (torch.float32, torch.float64):
        against.append(f"rounds the statistics to {problem.dtype} on the CPU")
    if problem.bias and problem.kind == "rms":
        against.append("has no rms_norm with a bias")
    if problem.weight_dtype not in (None, problem.dtype):
        against.append(f"wants a weight of the input's {problem.dtype}, not of {problem.weight_dtype}")
    if problem.rows == 0:
        against.append("the input is empty")
    return against


def norm_forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: str, residual: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """reference.norm_forward by PyTorch's kernels."""
    total = x if residual is None else x + residual
    with _outside_autocast(x):
        if kind == "rms":
            y, rstd = torch.ops.aten._fused_rms_norm(total, [x.shape[-1]], weight, eps)
            return y, rstd.flatten(), None, total
        y, mean, rstd = torch.native_layer_norm(total, [x.shape[-1]], weight, bias, eps)
    return y, rstd.flatten(), mean.flatten(), total


def _outside_autocast(x: Tensor) -> AbstractContextManager:
    """Autocast would turn the result into float32."""
    device = x.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


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
    """reference.norm_backward by PyTorch's kernels; the sum with residual_grad is rounded twice, as autograd's own."""
    shape, size = [x.shape[-1]], [*x.shape[:-1], 1]
    need = (wanted[0], wanted[1] and weight is not None)
    dx = dweight = dbias = None
    if kind == "rms":
        if any(need):
            dx, dweight = torch.ops.aten._fused_rms_norm_backward(dy, x, shape, rstd.view(size), weight, need)
    else:
        statistics = (mean.view(size), rstd.view(size))  # pyright: ignore[reportOptionalMemberAccess]
        # the weight stands for the bias, of which PyTorch reads no more than the shape and dtype
        mask = (*need, wanted[2] and weight is not None)
        dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(dy, x, shape, *statistics, weight, weight, mask)
    if wanted[2] and dbias is None:
        dbias = dy.reshape(-1, x.shape[-1]).sum(0)
    if residual_grad is not None and dx is not None:
        dx = dx.add_(residual_grad)
    return dx, dweight, dbias
