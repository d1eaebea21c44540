"""Grouped products by PyTorch's `F.grouped_mm`: on Hopper and Blackwell one kernel that reads the offsets on the device."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from .dispatch import Problem


def why_not_grouped(problem: Problem) -> list[str]:
    """Reasons against it."""
    against = []
    if problem.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        against.append(f"has no {problem.dtype}")
    if not problem.aligned:
        against.append("wants row lengths and addresses in multiples of 16 bytes: shards of so many columns avoid the fallback")
    if problem.rows == 0:
        against.append("the input is empty")
    return against


def rather_not_grouped(problem: Problem) -> list[str]:
    """Where it is a loop over the experts itself, which waits for the device."""
    if problem.device != "cuda":
        return []
    if problem.dtype != torch.bfloat16:
        return [f"has one kernel for bfloat16 only, and loops over the experts in {problem.dtype}"]
    return [] if _has_kernel() else ["loops over the experts on this GPU"]


@lru_cache
def _has_kernel() -> bool:
    return torch.cuda.get_device_capability()[0] in (9, 10)


def grouped_product(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """reference_experts.grouped_product; rows of no expert are left as they were in memory."""
    return F.grouped_mm(x, weight, offs=offsets)


def grouped_outer(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """reference_experts.grouped_outer."""
    return F.grouped_mm(a.t(), b, offs=offsets)
