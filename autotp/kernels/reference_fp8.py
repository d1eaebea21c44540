"""The plain-torch meaning of fp8.py's operations: the same scales and the same rounding, products summed in float32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .fp8_scaled import BLOCK, LEAST_AMAX, LIMITS, Operands, Quantised, Share, Stack, padded


def quantise(
    x: Tensor,
    scaling: str,
    dtype: torch.dtype,
    rows: bool,
    columns: bool,
    cut: int | None,
    share: Share | None,
    bad: Tensor | None,
) -> Operands:
    """fp8.quantise, on any device."""
    wide = x.float().contiguous()
    if scaling == "tensorwise":
        amax = wide.abs().amax() if wide.numel() else wide.new_zeros(())
        values, scale = _scale(wide, _share(amax, None if cut is None else share), dtype, bad)
        found = Quantised(values, scale, scaling) if rows else None
        return found, Quantised(_pad(values.t(), scaling), scale, scaling) if columns else None
    if scaling == "squares":
        return _squares(wide, dtype, rows, columns, bad)
    if scaling == "blockwise":
        first = _by_block(wide, dtype, bad) if rows else None
        return first, _by_block(_pad(wide.t(), scaling), dtype, bad) if columns else None
    first = _by_row(wide, dtype, share if cut == 1 else None, bad) if rows else None
    return first, _by_row(_pad(wide.t(), scaling), dtype, share if cut == 0 else None, bad) if columns else None


def quantise_stacks(like: Tensor, stacks: Sequence[Stack], dtype: torch.dtype, share: Share | None) -> list[Operands]:
    """fp8.quantise_stacks, on any device."""
    wide = [torch.cat([part.float() for part in stack.parts]) for stack in stacks]
    amax = _share(torch.stack([each.abs().amax() for each in wide]), share)
    found: list[Operands] = []
    for stack, each, largest in zip(stacks, wide, amax.unbind(), strict=True):
        values, scale = _scale(each, largest, dtype, stack.bad)
        turned = Quantised(_pad(values.t(), "tensorwise"), scale, "tensorwise") if stack.columns else None
        found.append((Quantised(values, scale, "tensorwise"), turned))
    return found


def _by_row(x: Tensor, dtype: torch.dtype, share: Share | None, bad: Tensor | None) -> Quantised:
    amax = x.abs().amax(1) if x.numel() else x.new_zeros(x.shape[0])
    values, scale = _scale(x, _share(amax, share)[:, None], dtype, bad)
    return Quantised(values, scale, "rowwise")


def _share(amax: Tensor, share: Share | None) -> Tensor:
    return amax if share is None else share(amax.view(torch.int32)).view(torch.float32)


def _by_block(x: Tensor, dtype: torch.dtype, bad: Tensor | None) -> Quantised:
    whole = _pad(x, "blockwise").unflatten(1, (-1, BLOCK))
    values, scale = _scale(whole, whole.abs().amax(2, keepdim=True), dtype, bad)
    values = values.flatten(1)[:, : x.shape[1]].contiguous()
    return Quantised(values, scale.squeeze(2).t().contiguous().t(), "blockwise")


def _squares(x: Tensor, dtype: torch.dtype, rows: bool, columns: bool, bad: Tensor | None) -> Operands:
    height, width = x.shape
    whole = _pad(_pad(x, "squares").t(), "squares").t().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    values, scale = _scale(whole, whole.abs().amax((1, 3), keepdim=True), dtype, bad)
    values = values.flatten(2, 3).flatten(0, 1)[:height, :width].contiguous()
    scale = scale.squeeze(3).squeeze(1)
    found = Quantised(values, _lay_squares(scale), "squares") if rows else None
    return found, Quantised(_pad(values.t(), "squares"), _lay_squares(scale.t()), "squares") if columns else None


def turn_values(values: Tensor, scaling: str) -> Tensor:
    """Values turned, and padded with zeros: by PyTorch, see dispatch.py for what Triton makes of some."""
    return _pad(values.t(), scaling)


def _lay_squares(scale: Tensor) -> Tensor:
    """`[R/128, C/128]` as a product reads it: turned, its columns contiguous and padded to a multiple of 4."""
    return F.pad(scale, (0, -scale.shape[1] % 4)).contiguous().t()


def _pad(x: Tensor, scaling: str) -> Tensor:
    """`x` with zero columns up to a multiple, contiguous."""
    missing = padded(x.shape[1], scaling) - x.shape[1]
    if not missing:
        return x.contiguous()
    return torch.cat([x, torch.zeros(x.shape[0], missing, dtype=x.dtype, device=x.device)], 1)


def _scale(x: Tensor, amax: Tensor, dtype: torch.dtype, bad: Tensor | None) -> tuple[Tensor, Tensor]:
    """x's values, and their scales of amax' shape."""
    limit = LIMITS[dtype]
    if bad is not None:
        bad.add_((~amax.isfinite()).sum())
    amax = amax.clamp(min=LEAST_AMAX)  # keeps what is no number
    limits = torch.full_like(amax, limit)  # a number in place of it would be divided by its reciprocal on a GPU, rounded twice
    return (x * (limits / amax)).clamp(-limit, limit).to(dtype), amax / limits


def dequantise(operand: Quantised) -> Tensor:
    """The float32 `[R, C]` that an operand stands for."""
    values, scale, scaling = operand
    wide = values.float()
    if scaling in ("tensorwise", "rowwise"):
        return wide * scale
    if scaling == "blockwise":
        return wide * scale.repeat_interleave(BLOCK, 1)[:, : wide.shape[1]]
    scale = scale.t().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return wide * scale[: wide.shape[0], : wide.shape[1]]


def multiply(a: Quantised, b: Quantised, dtype: torch.dtype, fast: bool) -> Tensor:
    """fp8.multiply, on any device."""
    if {a.scaling, b.scaling} <= {"tensorwise", "rowwise"}:
        return (torch.mm(a.values.float(), b.values.float().t()) * a.scale * b.scale.t()).to(dtype)
    return torch.mm(dequantise(a), dequantise(b).t()).to(dtype)
