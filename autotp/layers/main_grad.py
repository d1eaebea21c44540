"""Gradients that are added to `weight.main_grad` by the product that computes them, instead of to `weight.grad`.

`main_grad` is the caller's, of the weight's shape, float32 as a rule. `grad_added_to_main_grad` is set to True whenever a
gradient has reached it; a weight whose `overwrite_main_grad` is true has it written instead of added to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..errors import AutoTPError
from ..kernels.matmul import wgrad


def find_main_grad(weight: Tensor, name: str) -> Tensor:
    """The tensor that `weight`'s gradients are added to.

    Raises:
        AutoTPError: there is none.
    """
    found = getattr(weight, "main_grad", None)
    if found is None:
        raise AutoTPError(
            f"{name} has no main_grad to add its gradient to: set weight.main_grad to a tensor of shape {list(weight.shape)}, "
            f"float32 as a rule, before backward, or build the layer without fuse_wgrad_accumulation"
        )
    return found


def add_to_main_grad(weight: Any, dy: Tensor, x: Tensor, complete: Callable[[Tensor], Tensor] | None = None) -> None:
    """Add `dy.T @ x` to the weight's `main_grad`, and note on the weight that it is there.

    Args:
        dy: `[M, N]`; x: `[M, K]`; the weight is `[N, K]`.
        complete: sums the product over the ranks that have parts of it; None lets the GEMM itself add it.
    """
    overwrite = getattr(weight, "overwrite_main_grad", False)
    if complete is None:
        wgrad(dy, x, weight.main_grad, overwrite)
    else:
        product = wgrad(dy, x)
        assert product is not None
        weight.main_grad.copy_(complete(product)) if overwrite else weight.main_grad.add_(complete(product))
    weight.grad_added_to_main_grad = True
