"""Norms over a width that is dealt to the ranks: the statistics are sums over all of them.

Only the sums are communicated, one number a row (two for a layernorm). Backward needs sums of its own, since every column's
gradient depends on the whole row's statistic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..comm import TPGroup
from ..errors import PlanError
from ..shard import Shard
from .base import TensorParallel_Layer, insert_class

KINDS = ("rms", "rms1p", "layernorm", "rms_gated")


class _NormOverGroup(torch.autograd.Function):
    """`x_local` `[..., N/T]` normalised over the whole width N, in float32 (float64 for float64 input); no weight yet.

    With h holders of a column, s the sum over the ranks of what each holds, and g the gradient of the result y:
    forward `m = s(x / h) / N` (layernorm; else 0), `r = rsqrt(s((x - m)^2 / h) / N + eps)`, `y = (x - m) * r`.
    dgrad `dx = r * (g - (s(g) / N + y * s(g * y) / N) / h)`, the first term for layernorm alone: each holder's g is its part.
    """

    @staticmethod
    def forward(ctx, x: Tensor, group: TPGroup, width: int, eps: float, centred: bool, holders: Tensor | None) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if centred:
            wide = wide - group.all_reduce_owned(_share(wide, holders).sum(-1, keepdim=True)) / width
        square = _share(wide.square(), holders).sum(-1, keepdim=True)
        scale = torch.rsqrt(group.all_reduce_owned(square) / width + eps)
        y = wide * scale
        ctx.save_for_backward(y, scale, holders)
        ctx.group, ctx.width, ctx.centred, ctx.dtype = group, width, centred, x.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        y, scale, holders = ctx.saved_tensors
        sums = (grad * y).sum(-1, keepdim=True)
        if ctx.centred:
            sums = torch.cat([sums, grad.sum(-1, keepdim=True)], -1)
        means = ctx.group.all_reduce_owned(sums) / ctx.width
        shared = y * means[..., :1] + means[..., 1:] if ctx.centred else y * means
        return ((grad - _share(shared, holders)) * scale).to(ctx.dtype), None, None, None, None, None


def _share(x: Tensor, holders: Tensor | None) -> Tensor:
    return x if holders is None else x / holders


@dataclass(frozen=True)
class DealtNorm:
    """How a DistributedNorm normalises.

    Attributes:
        kind: "rms", "rms1p", "layernorm" or "rms_gated"; eps: added to the mean square; width: columns of the whole tensor.
        holders: how many ranks hold each of this rank's columns, `[N_r]`, or None where all are held once.
    """

    kind: str
    eps: float
    width: int
    holders: Tensor | None = None


class DistributedNorm(TensorParallel_Layer):
    """A norm whose columns are dealt to the ranks; its forward stands for the module's own.

    | tensor | shape on rank r |
    |---|---|
    | x, y | `[..., N_r]` |
    | weight, bias | `[N_r]`, or None |

    forward: `y = normalise(x) * weight (1 + weight for "rms1p") + bias`, rounded once to x's dtype; "rms_gated" normalises
    `x * silu(gate)` where it is given a gate.

    The gradient of parameters with copies is summed over their holders by a RegionModule in front.

    Attributes:
        autotp_norm: the DealtNorm; one attribute, whose name no module has of its own.
    """

    autotp_norm: DealtNorm

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        norm, x = self.autotp_norm, hidden_states
        if gate is not None:
            wide = torch.promote_types(x.dtype, torch.float32)
            x = x.to(wide) * F.silu(gate.to(wide))
        weight, bias = getattr(self, "weight", None), getattr(self, "bias", None)
        return normalise_over_group(x, self.tp, norm, weight, bias).to(hidden_states.dtype)


def normalise_over_group(x: Tensor, group: TPGroup, norm: DealtNorm, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """The norm of this rank's columns `x` `[..., N_r]`, times its weight plus its bias `[N_r]`; float32, or float64 for that."""
    y = _NormOverGroup.apply(x, group, norm.width, norm.eps, norm.kind == "layernorm", norm.holders)
    if weight is not None:
        y = y * (weight.to(y.dtype) + 1 if norm.kind == "rms1p" else weight.to(y.dtype))
    return y if bias is None else y + bias.to(y.dtype)


def install_norm(module: Any, group: TPGroup, shards: dict[str, Shard], name: str, kind: str, eps: float, width: int) -> None:
    """Make `module` a DistributedNorm in place.

    Raises:
        PlanError: an unknown kind, or parameters that are not dealt as one dimension of `width` columns.
    """
    own = {key for key, value in module._parameters.items() if value is not None}
    if kind not in KINDS:
        raise PlanError(f"{name}: norm kind {kind!r} is none of {', '.join(KINDS)}")
    if not shards or own != set(shards) or own - {"weight", "bias"} or {s.shape for s in shards.values()} != {(width,)}:
        have = {key: tuple(value.shape) for key, value in module._parameters.items() if value is not None}
        raise PlanError(
            f"{name} ({type(module).__name__}): a norm over {width} dealt columns needs a weight, and a bias or none, of {width} "
            f"elements, both in the plan; it has {have}, and the plan deals {sorted(shards)}"
        )
    insert_class(module, DistributedNorm)
    module.tp, module.shards, module.full_name = group, shards, name
    shard = next(iter(shards.values()))
    module.autotp_norm = DealtNorm(kind, eps, width, count_holders(shard, group) if shard.copied is not None else None)


def count_holders(shard: Shard, group: TPGroup) -> Tensor:
    """How many ranks hold each of this rank's indices of a one-dimensional `shard`: float32 `[N_r]`, on the group's device."""
    (cut,) = shard.cuts
    counts = torch.stack([cut.mask(rank, shard.shape[0]) for rank in range(shard.tp_size)]).sum(0)
    return counts[cut.indices(group.tp_rank)].to(group.device, torch.float32)
