"""Cross-entropy on logits whose columns are dealt to the ranks: the whole `[M, V]` is never made on any of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..comm import TPGroup
from ..errors import PlanError
from ..kernels.softmax import cross_entropy_backward, sum_exponentials
from ..shard import Shard
from .embedding import vocab_range


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Losses `[M]` of logits `[M, V_r]`; backward computes the softmax again instead of keeping it in float32.

    forward:  m = max over ranks of x; [s, t, u] = sum over ranks of [sum exp(x - m), x_target - m, sum(x - m) / V]
              loss = log s - (1 - e) * t - e * u        with smoothing e
    dgrad:    dx_r = (exp(x_r - m - log s) - (1 - e) * [column is the target] - e / V) * dloss, no collective
    """

    @staticmethod
    def forward(ctx, logits: Tensor, target: Tensor, start: int, vocab: int, group: TPGroup, ignore_index: int, smoothing: float):
        own, sums, totals = sum_exponentials(logits)
        peak = group.all_reduce_owned(own.clone(), "max")
        shift = own - peak  # from this rank's largest logit to that of all
        counted = target != ignore_index
        local, here = _place_targets(target, counted, start, logits.shape[-1], vocab)
        found = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1) - peak
        parts = [sums * shift.exp(), found.masked_fill(~here, 0)]
        if smoothing:
            parts.append((totals + shift * logits.shape[-1]) / vocab)
        sums = group.all_reduce_owned(torch.stack(parts))
        log_sum = sums[0].log()
        losses = log_sum - (1 - smoothing) * sums[1]
        if smoothing:
            losses = losses - smoothing * sums[2]
        ctx.save_for_backward(logits, local.masked_fill(~here, -1), counted, peak, log_sum)
        ctx.shares = 1 - smoothing, smoothing / vocab
        return losses.masked_fill(~counted, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        logits, column, counted, peak, log_sum = ctx.saved_tensors
        dx = cross_entropy_backward(logits, peak, log_sum, column, grad.masked_fill(~counted, 0), *ctx.shares)
        return dx, None, None, None, None, None, None


def _place_targets(target: Tensor, counted: Tensor, start: int, width: int, vocab: int) -> tuple[Tensor, Tensor]:
    """Each target's column here (0 if another rank has it or it is ignored), and whether it is here.

    A target that no rank has keeps its place out of range, so that looking it up fails on every rank as it does in torch.
    """
    local = target - start
    here = counted & (local >= 0) & (local < width)
    known = ~counted | ((target >= 0) & (target < vocab))
    return local.masked_fill(known & ~here, 0), here


def vocab_parallel_cross_entropy(
    logits_local: Tensor,
    target: Tensor,
    shard_or_offsets: Shard | Sequence[int],
    group: TPGroup,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """What `F.cross_entropy` gives for the whole logits, from each rank's columns; two all-reduces of `[M]` forward, none back.

    Args:
        logits_local: `[..., V_r]`, this rank's columns, any float dtype; computed in float32 at least.
        target: `[...]` int64, the same on all ranks.
        shard_or_offsets: the head weight's Shard (vocabulary on dim 0), or T + 1 column offsets, rank r from `[r]` to `[r + 1]`.
        group: the ranks that share the vocabulary.
        reduction: "mean" over the targets that are not `ignore_index` (nan if there are none), "sum" or "none".

    Returns:
        The loss, replicated: a scalar, or `target`'s shape for "none"; float32, or float64 for float64 logits.

    Raises:
        ValueError: shapes that do not fit each other, or an unknown reduction.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{reduction} is not a reduction: use 'mean', 'sum' or 'none'")
    if isinstance(shard_or_offsets, Shard):
        vocab, ranges = shard_or_offsets.shape[0], [vocab_range(shard_or_offsets, r, "the loss") for r in range(group.tp_size)]
    else:
        vocab, ranges = shard_or_offsets[-1], list(pairwise(shard_or_offsets))
    start, stop = ranges[group.tp_rank]
    for rank, (first, end) in enumerate(ranges):  # on every rank: the others would wait for it
        if first == end:
            raise PlanError(f"TP rank {rank} would hold none of the {vocab} columns of the vocabulary. Use fewer ranks.")
    if logits_local.shape[-1] != stop - start:
        raise PlanError(
            f"TP rank {group.tp_rank} was given logits of {logits_local.shape[-1]} columns, but holds columns {start} to {stop} "
            f"of a vocabulary of {vocab}. Pass this rank's columns."
        )
    if logits_local.shape[:-1] != target.shape:
        raise ValueError(f"logits of shape {tuple(logits_local.shape)} do not fit targets of shape {tuple(target.shape)}")
    flat = target.reshape(-1)
    losses = _VocabParallelCrossEntropy.apply(
        logits_local.reshape(-1, stop - start), flat, start, vocab, group, ignore_index, label_smoothing
    )
    if reduction == "none":
        return losses.view(target.shape)
    return losses.sum() if reduction == "sum" else losses.sum() / (flat != ignore_index).sum()
