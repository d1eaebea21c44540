"""Log-probabilities of labels straight from hidden states and a head whose rows are dealt to the ranks, for TRL's trainers.

TRL's trainers never call the head: they give its weight to a function that makes logits piece by piece. Of a head that is
split, that function would take one rank's rows for the whole vocabulary, and train on in silence; `wrap_trl` sends such weights
to the function below. Whatever else reads the weight of a split head past its forward is refused at the model's edge (entry.py).
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..comm import TPGroup
from ..kernels.autocast import autocast_dtype, disable_autocast
from ..kernels.matmul import dgrad, linear, wgrad
from .base import holder_of
from .embedding import VocabParallelHead, vocab_range

ROWS = 1024  # tokens whose logits exist at a time
OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


class Scaling(NamedTuple):
    """How a head's product becomes logits: `softcap * tanh(scale * y / softcap) / temperature`; no softcap if None."""

    scale: float
    softcap: float | None
    temperature: float

    def apply(self, y: Tensor) -> Tensor:
        """The logits, float32, of products `y`."""
        z = y.float() * self.scale
        if self.softcap is not None:
            z = self.softcap * torch.tanh(z / self.softcap)
        return z / self.temperature

    def slope(self, z: Tensor) -> Tensor | float:
        """Derivative of the logits by the products, where they are `z`."""
        capped = 1.0 if self.softcap is None else 1 - (z * self.temperature / self.softcap) ** 2
        return capped * (self.scale / self.temperature)


class LogProbs(NamedTuple):
    """Of each token, float32 `[N]` but for `is_top1`, bool; what was not asked for is None."""

    log_probs: Tensor
    entropy: Tensor | None
    log_sum_sq_probs: Tensor | None
    mean_logits: Tensor | None
    is_top1: Tensor | None


class _VocabParallelLogProbs(torch.autograd.Function):
    """z_r = scaling(x @ w_r.T + b_r) for some rows at a time, here and again in backward.

    forward:  m = max over ranks of z; e = exp(z - m)
              [s, q, v, u, t] = sum over ranks of [sum e, sum e * z, sum e^2, sum z, z_target]
              log p = t - m - log s; entropy = m + log s - q / s; a target is the first maximum if none before it reaches it
    dgrad:    dz_r = dlogp * ([column is the target] - p) - dentropy * p * (log p + entropy); dx = sum over ranks of dy_r @ w_r
    wgrad:    dw_r = dy_r.T @ x, db_r = sum of dy_r, local
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, w: Tensor, b: Tensor | None, target: Tensor, span: tuple[int, int], group: TPGroup, scaling, wanted
    ):
        ctx.set_materialize_grads(False)
        vocab, start = span
        dtype = autocast_dtype(x) or x.dtype
        local = target - start
        here = (local >= 0) & (local < w.shape[0])
        rows, count = x.shape[0], len(OUTPUTS) + 1
        peaks, sums = x.new_full((2, rows), -torch.inf, dtype=torch.float32), x.new_zeros((count, rows), dtype=torch.float32)
        with disable_autocast(x):
            weight, bias = w.to(dtype), None if b is None else b.to(dtype)
            for at in range(0, rows, ROWS):
                part = slice(at, at + ROWS)
                z = scaling.apply(linear(x[part].to(dtype), weight, bias))
                peaks[0, part] = peak = z.amax(-1)
                if "is_top1" in wanted:
                    before = torch.arange(w.shape[0], device=z.device) < local[part, None]
                    peaks[1, part] = z.masked_fill(~before, -torch.inf).amax(-1)
                e = torch.exp(z - peak.unsqueeze(-1))
                found = z.gather(-1, local[part].clamp(0, w.shape[0] - 1).unsqueeze(-1)).squeeze(-1)
                sums[:, part] = torch.stack(
                    [e.sum(-1), (e * z).sum(-1), (e * e).sum(-1), z.sum(-1), found.masked_fill(~here[part], 0)]
                )
        own = peaks[0].clone()
        m, before = group.all_reduce_owned(peaks, "max")
        shrink = torch.exp(own - m)
        s, q, v, u, t = group.all_reduce_owned(sums * torch.stack([shrink, shrink, shrink**2, *shrink.new_ones(2, rows)]))
        log_sum = m + s.log()
        entropy = log_sum - q / s
        ctx.save_for_backward(x, w, b, local, here, log_sum, entropy)
        ctx.group, ctx.scaling, ctx.dtype = group, scaling, dtype
        found = (entropy, v.log() - 2 * s.log(), u / vocab, (t >= m) & (t > before))
        found = tuple(value if name in wanted else None for name, value in zip(OUTPUTS, found, strict=True))
        ctx.mark_non_differentiable(*(value for value in found[1:] if value is not None))
        return t - log_sum, *found

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor | None, grad_entropy: Tensor | None, *_: Any):
        x, w, b, local, here, log_sum, entropy = ctx.saved_tensors
        dx, dw, db = (
            like.new_zeros(like.shape, dtype=torch.float32) if needed and like is not None else None
            for like, needed in zip((x, w, b), ctx.needs_input_grad, strict=False)
        )
        with disable_autocast(x):
            weight, bias = w.to(ctx.dtype), None if b is None else b.to(ctx.dtype)
            for at in range(0, x.shape[0], ROWS):
                part = slice(at, at + ROWS)
                some = x[part].to(ctx.dtype)
                z = ctx.scaling.apply(linear(some, weight, bias))
                log_p = z - log_sum[part, None]
                p, dz = log_p.exp(), torch.zeros_like(z)
                if grad is not None:
                    dz -= grad[part, None] * p
                    index = local[part].clamp(0, w.shape[0] - 1).unsqueeze(-1)
                    dz.scatter_add_(-1, index, (grad[part] * here[part]).unsqueeze(-1).to(dz.dtype))
                if grad_entropy is not None:
                    dz -= grad_entropy[part, None] * p * (log_p + entropy[part, None])
                dy = dz.mul_(ctx.scaling.slope(z)).to(ctx.dtype)
                if dx is not None:
                    dx[part] = dgrad(dy, weight)
                if dw is not None:
                    wgrad(dy, some, dw)
                if db is not None:
                    db += dy.float().sum(0)
        dx = None if dx is None else ctx.group.all_reduce_owned(dx.to(x.dtype))
        dw, db = (None if grad is None else grad.to(w.dtype) for grad in (dw, db))
        return dx, dw, db, None, None, None, None, None


def vocab_parallel_log_probs(
    hidden: Tensor, head: VocabParallelHead, weight: Tensor, bias: Tensor | None, target: Tensor, scaling: Scaling, wanted=OUTPUTS
) -> LogProbs:
    """Log-probability of each target, and what of OUTPUTS is `wanted`; whole logits are never made on any rank.

    Args:
        hidden: `[N, H]`, the same on all ranks; weight, bias: `[V_r, H]`, `[V_r]`, `head`'s.
        target: `[N]` int64, all within the vocabulary.
    """
    shard = head.shards["weight"]
    start, _ = vocab_range(shard, head.tp.tp_rank, head.full_name)
    head.ran = True
    return LogProbs(
        *_VocabParallelLogProbs.apply(hidden, weight, bias, target, (shard.shape[0], start), head.tp, scaling, wanted)
    )


def wrap_trl() -> None:
    """Make TRL's own function send the weights of split heads here, if TRL was imported and has it."""
    utils = sys.modules.get("trl.trainer.utils")
    original = getattr(utils, "_ChunkedLogProbFunction", None)
    if original is not None and not issubclass(original, _HeadSwitch):
        utils._ChunkedLogProbFunction = type(original.__name__, (_HeadSwitch, original), {"original": original})  # type: ignore[union-attr]


class _HeadSwitch:
    """Stands for TRL's `ChunkedLogProbFunction`; called only through `apply`."""

    original: Any

    @classmethod
    def apply(
        cls,
        hidden,
        weight,
        bias,
        targets,
        temperature,
        chunk_size,
        final_logit_softcapping=None,
        logit_scale=1.0,
        outputs=OUTPUTS,
    ) -> Any:
        held = holder_of(weight)
        if held is None or not isinstance(held[0], VocabParallelHead) or held[0].tp.tp_size == 1:
            given = (temperature, chunk_size, final_logit_softcapping, logit_scale, outputs)
            return cls.original.apply(hidden, weight, bias, targets, *given)
        scaling = Scaling(logit_scale, final_logit_softcapping, temperature)
        return vocab_parallel_log_probs(hidden, held[0], weight, bias, targets, scaling, outputs)
