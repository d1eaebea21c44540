"""What one new token of each sequence does with a static cache: it is written there, and attends to all that is there.

B sequences, Hq query heads and Hkv heads of keys and values of D and E columns, L tokens of cache. Without gradient.

| tensor | shape |
|---|---|
| q; k, v | `[B, Hq, 1, D]`; `[B, Hkv, 1, D]`, `[B, Hkv, 1, E]`, any strides with columns side by side |
| keys, values | `[B, Hkv, L, D]`, `[B, Hkv, L, E]` |
| mask | bool `[B or 1, 1, 1, L]`, True where a token is seen: padding, length and windows are all in it |
"""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import Problem, select

WIDEST_HEAD = 256  # columns of D and E
MOST_SHARING = 128  # query heads of one kv head


def attend_cache(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """`softmax(scale * q @ keys.T, where mask) @ values`, `[B, 1, Hq, E]`, keys and values read in place; only where `fits`."""
    return select(_problem("attend_cache", q))(q, keys, values, mask, scale)


def write_cache(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> None:
    """Write `k` and `v` into `keys` and `values` at token `position`, int64 `[1]` on their device."""
    alike = k.dtype is v.dtype is keys.dtype is values.dtype and k.stride(-1) == v.stride(-1) == 1
    run = select(_problem("write_cache", k), "auto" if alike and k.shape[2] == 1 else "reference")
    run(k, v, keys, values, position)


def _problem(op: str, x: Tensor) -> Problem:
    batch, heads, _, width = x.shape
    return Problem(op, x.device.type, x.dtype, "", batch * heads, width)


def fits(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> bool:
    """Whether shapes and dtypes are those of the table above, and no gradient is wanted."""
    if not (q.dim() == keys.dim() == values.dim() == 4 and q.dtype is keys.dtype is values.dtype):
        return False
    batch, heads, tokens, width = q.shape
    wanted = (batch, keys.shape[1], keys.shape[2])
    if tokens != 1 or heads % keys.shape[1] or heads > MOST_SHARING * keys.shape[1]:
        return False
    if keys.shape != (*wanted, width) or values.shape[:3] != wanted:
        return False
    if max(width, values.shape[3]) > WIDEST_HEAD or not q.stride(-1) == keys.stride(-1) == values.stride(-1) == 1:
        return False
    if torch.is_grad_enabled() and (q.requires_grad or keys.requires_grad or values.requires_grad):
        return False
    if mask is None:
        return True
    return mask.dtype is torch.bool and mask.shape in ((batch, 1, 1, wanted[2]), (1, 1, 1, wanted[2])) and mask.stride(3) == 1
