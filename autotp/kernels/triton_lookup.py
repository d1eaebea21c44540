"""The lookup of a few ids in this rank's rows of a vocabulary, in one launch."""

# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from .triton_early import early, start_next, wait_for_previous
from .triton_launch import ceil_div, ceil_power, on_own_device

BLOCK = 1024


@triton.jit
def _look_up(ids, weight, y, start, stop, vocabulary, H, step, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    start_next(EARLY)
    wait_for_previous(EARLY)
    row, cols = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(ids + row).to(tl.int64) + tl.zeros((BLOCK,), tl.int64)
    held, inside = (token >= start) & (token < stop), cols < H
    found = tl.load(weight + (token - start) * step + cols, mask=inside & held, other=0.0)
    found = tl.where((token >= 0) & (token < vocabulary), found, float("nan"))
    tl.store(y + row * H + cols, found.to(y.dtype.element_ty), mask=inside)


@on_own_device
def look_up(ids: Tensor, weight: Tensor, start: int, vocabulary: int) -> Tensor:
    """reference_decode.look_up in one kernel; `ids` are contiguous."""
    count, width = weight.shape
    y = torch.empty((*ids.shape, width), dtype=weight.dtype, device=weight.device)
    block = min(BLOCK, ceil_power(width))
    _look_up[(ceil_div(width, block), ids.numel())](
        ids, weight, y, start, start + count, vocabulary, width, weight.stride(0), BLOCK=block, num_warps=4, **early(weight)
    )
    return y
