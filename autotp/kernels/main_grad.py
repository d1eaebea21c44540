"""Gradients that go into `parameter.main_grad` as they are computed, instead of into `parameter.grad` afterwards.

The protocol is the one of Megatron and TransformerEngine:

| attribute of the Parameter | who sets it | meaning |
|---|---|---|
| `main_grad` | the caller | a tensor of the Parameter's shape, float32 as a rule, that gradients are added to |
| `overwrite_main_grad` | the caller, or absent | True: the next gradient replaces what `main_grad` holds |
| `grad_added_to_main_grad` | set to True here, always | this Parameter's gradient is in `main_grad`; `.grad` holds none of it |

What autograd gets in the gradient's place is zeros, so that hooks of the Parameter run, and what other modules add to the
`.grad` of a tied Parameter stays right.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..errors import AutoTPError
from .matmul import wgrad


def find_main_grad(parameter: Any, name: str) -> Tensor:
    """`parameter.main_grad`.

    Raises:
        AutoTPError: it has none, or one of another shape or place.
    """
    main_grad = getattr(parameter, "main_grad", None)
    if not isinstance(main_grad, Tensor):
        raise AutoTPError(
            f"{name} is trained with its gradient accumulated into main_grad, but has none: set parameter.main_grad = "
            f"torch.zeros_like(parameter, dtype=torch.float32), or call autotp.enable_main_grad(model, False)"
        )
    if main_grad.shape != parameter.shape or main_grad.device != parameter.device:
        raise AutoTPError(
            f"{name} has shape {tuple(parameter.shape)} on {parameter.device}, its main_grad {tuple(main_grad.shape)} on "
            f"{main_grad.device}: give it one like the parameter (on this rank: like its shard)"
        )
    return main_grad


def add_product(parameter: Any, name: str, dy: Tensor, x: Tensor) -> Tensor:
    """Add `dy.T @ x` `[N, K]` to `parameter.main_grad` inside the GEMM; returns what autograd is given instead."""
    wgrad(dy, x, find_main_grad(parameter, name), overwrite=getattr(parameter, "overwrite_main_grad", False))
    return mark_added(parameter)


def add_gradient(parameter: Any, name: str, grad: Tensor) -> Tensor:
    """Add `grad`, of the parameter's shape, to `parameter.main_grad`; returns what autograd is given instead."""
    main_grad = find_main_grad(parameter, name)
    if getattr(parameter, "overwrite_main_grad", False):
        main_grad.copy_(grad)
    else:
        main_grad.add_(grad)
    return mark_added(parameter)


def mark_added(parameter: Any) -> Tensor:
    """Say that the gradient is in `main_grad`; zeros of the parameter's shape."""
    parameter.grad_added_to_main_grad = True
    return torch.zeros_like(parameter)


class _IntoMainGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, parameter: Tensor, name: str) -> Tensor:
        ctx.parameter, ctx.name = parameter, name
        return parameter.view_as(parameter)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return add_gradient(ctx.parameter, ctx.name, grad), None


def into_main_grad(parameter: Any, name: str) -> Tensor:
    """`parameter` itself, whose gradient is added to its `main_grad`: for what is no product."""
    return _IntoMainGrad.apply(parameter, name)
