"""The plain-torch meaning of what is done with a static cache in a decoding step, and of the choice among sharded logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def attend_cache(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """`softmax(scale * q @ k.T, where mask) @ v` in float32 (float64 for float64), rounded once; `[B, 1, Hq, E]`.

    Each kv head serves Hq / Hkv query heads, one after another. A query that sees nothing gets zeros.

    Args:
        q: `[B, Hq, 1, D]`. k, v: `[B, Hkv, L, D]` and `[B, Hkv, L, E]`. mask: bool `[B or 1, 1, 1, L]`, None for all.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    batch, heads, _, width = q.shape
    grouped = q.to(wide).view(batch, k.shape[1], -1, width)
    scores = grouped @ k.to(wide).transpose(-1, -2) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    weights = torch.softmax(scores, -1).nan_to_num(0.0)
    return (weights @ v.to(wide)).view(batch, 1, heads, -1).to(q.dtype)


def best_columns(parts: Sequence[Tensor], starts: Sequence[int], halts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Tokens int64 `[R]` of the largest of all ranks' logits `[R, V_r]`, the first of equal ones, and the sum of the halts.

    Args:
        starts: the first column of each, ascending; halts: int64 `[1]` of each.
    """
    pairs = zip(starts, parts, strict=True)
    columns = torch.cat([start + torch.arange(part.shape[1], device=part.device) for start, part in pairs])
    return columns[torch.cat(list(parts), 1).argmax(-1)], torch.stack(list(halts)).sum(0)


def look_up(ids: Tensor, weight: Tensor, start: int, vocabulary: int) -> Tensor:
    """Rows of `weight` `[V_r, H]`, which holds ids from `start` on; zeros for what other ranks hold, NaN for no id of any.

    Args:
        ids: integers `[...]`; vocabulary: V, over all ranks. Result `[..., H]`.
    """
    local = ids - start
    held = (local >= 0) & (local < weight.shape[0])
    found = weight[local.where(held, 0)].where(held.unsqueeze(-1), 0.0)
    return found.where(((ids >= 0) & (ids < vocabulary)).unsqueeze(-1), float("nan"))


def write_cache(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> None:
    """Write `k` and `v` `[B, Hkv, 1, D]` into the caches `[B, Hkv, L, D]` at token `position`, int64 `[1]` on their device."""
    keys.index_copy_(2, position, k)
    values.index_copy_(2, position, v)
