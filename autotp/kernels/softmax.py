"""What cross-entropy reads and writes of its logits: one pass forward, one backward, nothing of their size kept.

x, dx are `[M, V]`, this rank's columns; all else is `[M]`, float32 (float64 for float64 logits).
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import reference
from .dispatch import Problem, select


def sum_exponentials(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`(peak, sum(exp(x - base)), sum(x - base))` of each row, with peak its largest value and base that, or 0 for -inf."""
    if torch.compiler.is_compiling():
        return reference.sum_exponentials(x)
    return select(_problem("sum_exponentials", x))(x)


def cross_entropy_backward(
    x: Tensor, peak: Tensor, log_sum: Tensor, column: Tensor, scale: Tensor, target_share: float, every_share: float
) -> Tensor:
    """`dx = (exp(x - peak - log_sum) - target_share * [this is the column] - every_share) * scale`, of x's dtype.

    Args:
        column: int64, of the target, -1 where it is not here.
    """
    if torch.compiler.is_compiling():
        return reference.cross_entropy_backward(x, peak, log_sum, column, scale, target_share, every_share)
    return select(_problem("cross_entropy_backward", x))(x, peak, log_sum, column, scale, target_share, every_share)


def _problem(op: str, x: Tensor) -> Problem:
    rows, width = x.shape
    return Problem(op, x.device.type, x.dtype, rows=rows if width else 0, width=width)
