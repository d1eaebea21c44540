"""The three products of a linear, each into memory that the caller may choose.

M rows, K in, N out.

| product | algebra | shapes | into |
|---|---|---|---|
| `linear` | `y = x @ w.T + b` | `[..., K]`, `[N, K]`, `[N]` -> `[..., N]` | new memory |
| `dgrad` | `dx = dy @ w` | `[M, N]`, `[N, K]` -> `[M, K]` | new memory, or added to what is there |
| `wgrad` | `dw = dy.T @ x` | `[M, N]`, `[M, K]` -> `[N, K]` | new memory, or added to a main gradient |
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)


def linear(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """`x @ w.T + b`: x `[..., K]`, w `[N, K]`, b `[N]`, result `[..., N]`."""
    return F.linear(x, w, b)


def dgrad(dy: Tensor, w: Tensor, accumulate_into: Tensor | None = None) -> Tensor:
    """`dy @ w`: dy `[M, N]`, w `[N, K]`, result `[M, K]`.

    Args:
        accumulate_into: `[M, K]` of the same dtype, which the product is added to by the GEMM itself, and which is returned.
            It is the caller's to overwrite: nobody else may read it.
    """
    if accumulate_into is None:
        return torch.mm(dy, w)
    return torch.addmm(accumulate_into, dy, w, out=accumulate_into)


def wgrad(dy: Tensor, x: Tensor, main_grad: Tensor | None = None, overwrite: bool = False) -> Tensor | None:
    """`dy.T @ x`: dy `[M, N]`, x `[M, K]`, result `[N, K]` in their dtype, or None where it went into `main_grad`.

    Args:
        main_grad: `[N, K]`, float32 as a rule, which the product is added to. From half precision on a GPU the GEMM adds in
            float32 itself; where it can't, the product is rounded to dy's dtype and then added.
        overwrite: write `main_grad` instead of adding to it, whatever it held.
    """
    if main_grad is None:
        return torch.mm(dy.t(), x)
    beta = 0 if overwrite else 1
    if main_grad.dtype == dy.dtype:
        torch.addmm(main_grad, dy.t(), x, beta=beta, out=main_grad)
    elif accumulates_wide(dy, main_grad):
        torch.addmm(main_grad, dy.t(), x, beta=beta, out_dtype=main_grad.dtype, out=main_grad)
    elif overwrite:
        main_grad.copy_(torch.mm(dy.t(), x))
    else:
        main_grad.add_(torch.mm(dy.t(), x))
    return None


def accumulates_wide(dy: Tensor, main_grad: Tensor) -> bool:
    """Whether the GEMM itself can add a product of `dy`'s dtype to `main_grad`."""
    return dy.is_cuda and dy.dtype in HALF and main_grad.dtype is torch.float32 and main_grad.is_contiguous()


def view_side_by_side(parts: Sequence[Tensor]) -> Tensor | None:
    """`[M, N1 + N2 + ...]` over the memory of `parts` `[M, Ni]` that are neighbouring columns of one buffer, else None."""
    first = parts[0]
    rows, width = first.shape[0], 0
    row, start = first.stride(0), first.storage_offset()
    storage = first.untyped_storage()._cdata
    for part in parts:
        if part.shape[0] != rows or part.dtype != first.dtype or part.storage_offset() != start + width:
            return None
        if (part.shape[1] > 1 and part.stride(1) != 1) or (rows > 1 and part.stride(0) != row):
            return None
        if part.untyped_storage()._cdata != storage:
            return None
        width += part.shape[1]
    if rows > 1 and row < width:
        return None
    return first.as_strided((rows, width), (row if rows > 1 else width, 1), start)


def join_columns(parts: Sequence[Tensor]) -> Tensor:
    """`[M, N1 + N2 + ...]` of `parts` `[M, Ni]`: their own memory where it lies side by side, a copy elsewhere."""
    found = view_side_by_side(parts)
    return torch.cat(list(parts), 1) if found is None else found
