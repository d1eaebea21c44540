"""Dropout whose mask is one rank's own, as plain arithmetic on numbers that all ranks draw alike.

A compiler, or a CUDA graph, draws from the default generator, whose state is the same on all ranks; what is drawn there is made
a rank's own by mixing its number in. Nothing is seeded on the host, so that every replay, and every recomputation, draws as its
generator stands.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

BITS = 31
_MASK = (1 << BITS) - 1


def mix_bits(bits: Tensor, part: int) -> Tensor:
    """Numbers below 2**31, int64, of which those of two parts are independent of each other, of alike `bits` of that kind."""
    bits = bits ^ ((part + 1) * 0x9E3779B1 & _MASK)
    for factor in (0x045D9F3B, 0x0119DE1F):  # below 2**27: no product overflows
        bits = ((bits ^ (bits >> 16)) * factor) & _MASK
    return bits ^ (bits >> 15)


def drop_apart(part: int, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """`F.dropout(x, p, training)` of any shape, its mask a function of the default generator and `part`."""
    if not training or p == 0.0:
        return x
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    if p == 1.0:
        return x * 0.0
    bits = mix_bits(torch.randint(0, 1 << BITS, x.shape, device=x.device), part)
    dropped = (x * (1.0 / (1.0 - p))).masked_fill(bits < round(p * (1 << BITS)), 0.0)
    return x.copy_(dropped) if inplace else dropped


def attend_apart(
    part: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention` `[..., h, L, D]` whose dropout is `drop_apart`, on weights in memory."""
    if dropout_p == 0.0:
        return F.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
    if enable_gqa:
        copies = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(copies, -3), value.repeat_interleave(copies, -3)
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        scores = scores + attn_mask
    elif attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        weights = weights.masked_fill(~attn_mask.any(-1, keepdim=True), 0.0)  # a row that sees nothing
    return drop_apart(part, weights, dropout_p) @ value
