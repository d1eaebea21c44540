"""Attention of one new token over a static cache, in Triton, and the new token's write into it.

A program takes one kv head of one sequence and a part of the cache, for all query heads that share it: keys and values are read
once, in place. What lies before the first token that the mask shows, or behind the last, is not. Parts are put together by a
second, short kernel.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from .triton_early import early, start_next, wait_for_previous
from .triton_launch import ceil_power, count_processors, on_own_device

BLOCK, LONGEST_PART = 64, 8192  # tokens of a step, and of a program, at most
WARPS = 4
STAGES = 3
SHARED_BYTES = 100_000  # of a program: two fit a multiprocessor
PROGRAMS_PER_PROCESSOR = 4
LOG2_E = 1.4426950408889634


@triton.jit
def _attend(
    q, k, v, mask, y, best, total, scale, L, split, splits,
    q_batch, q_head, k_batch, k_head, k_token, v_batch, v_head, v_token, mask_batch,
    GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr,
    LOOK: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Part `split` of the cache for one kv head: y `[B, Hq, splits, E]`, best and total `[B, Hq, splits]`."""
    start_next(EARLY)
    wait_for_previous(EARLY)
    batch, head, part = tl.program_id(2).to(tl.int64), tl.program_id(1), tl.program_id(0)
    rows, cols, out = tl.arange(0, ROWS), tl.arange(0, COLS), tl.arange(0, OUT)
    queries = head * GROUP + rows
    used = rows < GROUP
    q_mask = used[:, None] & (cols < D)[None, :]
    asked = tl.load(q + batch * q_batch + queries[:, None] * q_head + cols[None, :], mask=q_mask, other=0.0)
    keys, values = k + batch * k_batch + head * k_head, v + batch * v_batch + head * v_head
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, OUT), tl.float32)
    begin = part * split
    stop = tl.minimum(L, begin + split)
    if LOOK > 0:  # from the first block with a token that is seen to the last
        every = begin + tl.arange(0, LOOK)
        shown = (tl.load(mask + batch * mask_batch + every, mask=every < stop, other=0) != 0) & (every < stop)
        stop = tl.max(tl.where(shown, every + 1, begin), 0)
        begin += (tl.min(tl.where(shown, every, stop), 0) - begin) // BLOCK * BLOCK
    for start in tl.range(begin, stop, BLOCK, num_stages=STAGES):
        token = start + tl.arange(0, BLOCK)
        seen, place = token < stop, token.to(tl.int64)
        key = tl.load(keys + place[:, None] * k_token + cols[None, :], mask=seen[:, None] & (cols < D)[None, :], other=0.0)
        value = tl.load(values + place[:, None] * v_token + out[None, :], mask=seen[:, None] & (out < E)[None, :], other=0.0)
        if mask is not None:
            seen = seen & (tl.load(mask + batch * mask_batch + token, mask=seen, other=0) != 0)
        score = tl.dot(asked, key.trans(), input_precision="ieee") * scale
        score = tl.where(seen[None, :], score, float("-inf"))
        now = tl.maximum(top, tl.max(score, 1))
        base = tl.where(now == float("-inf"), 0.0, now)  # nothing seen yet
        share = tl.exp2(score - base[:, None])
        kept = tl.exp2(top - base)
        weight = weight * kept + tl.sum(share, 1)
        acc = acc * kept[:, None] + tl.dot(share.to(value.dtype), value, input_precision="ieee")
        top = now
    place = (batch * HEADS + queries) * splits + part
    if best is None:
        acc = acc / tl.where(weight > 0.0, weight, 1.0)[:, None]
    else:
        tl.store(best + place, top, mask=used)
        tl.store(total + place, weight, mask=used)
    tl.store(y + place[:, None] * E + out[None, :], acc.to(y.dtype.element_ty), mask=used[:, None] & (out < E)[None, :])


@triton.jit
def _join(parts, best, total, y, splits, E: tl.constexpr, OUT: tl.constexpr, SPLITS: tl.constexpr, EARLY: tl.constexpr):
    """One query head: its parts `[splits, E]` weighed by what each program saw."""
    start_next(EARLY)
    wait_for_previous(EARLY)
    head = tl.program_id(0).to(tl.int64)
    part, out = tl.arange(0, SPLITS), tl.arange(0, OUT)
    there = part < splits
    tops = tl.load(best + head * splits + part, mask=there, other=float("-inf"))
    weights = tl.load(total + head * splits + part, mask=there, other=0.0)
    top = tl.max(tops, 0)
    factor = tl.where(weights > 0.0, tl.exp2(tops - top), 0.0)
    mask = there[:, None] & (out < E)[None, :]
    values = tl.load(parts + (head * splits + part)[:, None] * E + out[None, :], mask=mask, other=0.0)
    whole = tl.sum(weights * factor, 0)
    sums = tl.sum(values * factor[:, None], 0) / tl.where(whole > 0.0, whole, 1.0)
    tl.store(y + head * E + out, sums.to(y.dtype.element_ty), mask=out < E)


def choose_splits(pairs: int, length: int, processors: int) -> int:
    """Into how many parts a cache of `length` tokens is cut, for `pairs` of sequence and kv head."""
    wanted = max(1, PROGRAMS_PER_PROCESSOR * processors // pairs)
    return max(min(wanted, triton.cdiv(length, BLOCK), 64), triton.cdiv(length, LONGEST_PART))


def choose_block(token_bytes: int) -> int:
    """Tokens of a step, of `token_bytes` in keys and values: several steps are in shared memory at a time."""
    block = BLOCK
    while block > 16 and block * token_bytes * STAGES > SHARED_BYTES:
        block //= 2
    return block


@on_own_device
def attend_cache(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, splits: int = 0, block: int = 0, warps: int = 0
) -> Tensor:
    """reference_decode.attend_cache in two kernels, or one where the cache is not cut; what is masked must be finite."""
    batch, heads, _, width = q.shape
    kv_heads, length, out = k.shape[1], k.shape[2], v.shape[-1]
    splits = splits or choose_splits(batch * kv_heads, length, count_processors(q.device))
    block = block or choose_block((max(16, ceil_power(width)) + max(16, ceil_power(out))) * q.element_size())
    split = triton.cdiv(triton.cdiv(length, splits), block) * block
    splits = triton.cdiv(length, split)
    y = torch.empty((batch, heads, out), dtype=q.dtype, device=q.device)
    parts, best, total = y, None, None
    if splits > 1:
        parts = torch.empty((batch, heads, splits, out), dtype=torch.float32, device=q.device)
        best, total = torch.empty((2, batch, heads, splits), dtype=torch.float32, device=q.device)
    seen, mask_batch = (None, 0) if mask is None else (mask.view(torch.uint8), mask.stride(0) if mask.shape[0] > 1 else 0)
    group = heads // kv_heads
    _attend[(splits, kv_heads, batch)](
        q, k, v, seen, parts, best, total, scale * LOG2_E, length, split, splits,
        q.stride(0), q.stride(1), *k.stride()[:3], *v.stride()[:3], mask_batch,
        GROUP=group, HEADS=heads, D=width, E=out,
        ROWS=max(16, ceil_power(group)), COLS=max(16, ceil_power(width)), OUT=max(16, ceil_power(out)), BLOCK=block,
        LOOK=ceil_power(split) if mask is not None and split > block else 0, STAGES=STAGES,
        num_warps=warps or (WARPS if max(width, out) <= 128 else 2 * WARPS), **early(q),
    )  # fmt: skip
    if splits > 1:
        _join[(batch * heads,)](
            parts, best, total, y, splits, E=out, OUT=ceil_power(out), SPLITS=ceil_power(splits), num_warps=WARPS, **early(q)
        )
    return y.unsqueeze(1)


@triton.jit
def _write(
    k, v, keys, values, position, heads, k_batch, k_head, v_batch, v_head,
    keys_batch, keys_head, keys_token, values_batch, values_head, values_token,
    D: tl.constexpr, E: tl.constexpr, COLS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    start_next(EARLY)
    wait_for_previous(EARLY)
    batch, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    token = tl.load(position)
    cols = tl.arange(0, COLS)
    key = tl.load(k + batch * k_batch + head * k_head + cols, mask=cols < D)
    value = tl.load(v + batch * v_batch + head * v_head + cols, mask=cols < E)
    tl.store(keys + batch * keys_batch + head * keys_head + token * keys_token + cols, key, mask=cols < D)
    tl.store(values + batch * values_batch + head * values_head + token * values_token + cols, value, mask=cols < E)


@on_own_device
def write_cache(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> None:
    """reference_decode.write_cache in one kernel."""
    batch, heads, _, width = k.shape
    _write[(batch * heads,)](
        k, v, keys, values, position, heads, *k.stride()[:2], *v.stride()[:2], *keys.stride()[:3], *values.stride()[:3],
        D=width, E=v.shape[-1], COLS=ceil_power(max(width, v.shape[-1])), num_warps=1, **early(k),
    )  # fmt: skip
