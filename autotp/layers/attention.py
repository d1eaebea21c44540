"""`nn.MultiheadAttention` with its heads dealt to ranks, and torch's inference fast paths kept off what is sharded.

E embed_dim, H heads of D = E / H, h heads on this rank, N batch, L queries, S keys.

| parameter | full | on a rank |
|---|---|---|
| `in_proj_weight`, packed `[q | k | v]` | `[3E, E]` | `[3hD, E]` |
| `q_proj_weight`, `k_proj_weight`, `v_proj_weight` | `[E, E]`, `[E, kdim]`, `[E, vdim]` | `[hD, ...]` |
| `in_proj_bias`; `bias_k`, `bias_v` | `[3E]`; `[1, 1, E]` | `[3hD]`; `[1, 1, hD]` |
| `out_proj.weight`; its bias | `[E, E]`; `[E]` | `[E, hD]`; whole, added once after the sum |
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..collectives import copy_to_group, gather_from_group, reduce_from_group
from ..comm import TPGroup
from ..errors import PlanError
from ..index_runs import Run, compress_indices, take_runs
from ..shard import Cut, Shard
from .base import TensorParallel_Layer, insert_class, plain_class
from .draws import Draws
from .linear import LinearAllreduce, rewrite_linear

OUT = "out_proj.weight"


class ParallelMultiheadAttention(TensorParallel_Layer, nn.MultiheadAttention):
    """`nn.MultiheadAttention` whose heads are dealt to ranks; its `out_proj` is a row linear.

        forward: y = all_reduce(heads(x) @ w_out.T) + b_out
        dgrad:   dx = all_reduce(sum over local heads), once for each distinct one of query, key and value
        wgrad:   local

    `embed_dim` and `num_heads` stay the full ones: they are what the module's inputs and masks are checked against.

    Attributes:
        reduce_dtype: dtype in which gradients of the inputs are summed; None for their own.
    """

    reduce_dtype: torch.dtype | None = None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As the plain forward; every rank gets the whole output and the weights of all heads.

        Raises:
            PlanError: a nested tensor, which torch supports only in its fast path.
            RuntimeError: `is_causal` without the mask that it is a hint about.
        """
        if query.is_nested or key.is_nested or value.is_nested:
            raise PlanError(f"{self.full_name}: nested tensors run only unsharded. Pad them, and give a key_padding_mask.")
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal is a hint about attn_mask, so attn_mask is needed as well")
        batched = F._mha_shape_check(query, key, value, key_padding_mask, attn_mask, self.num_heads)
        q, k, v = self._project(*self._as_batches(batched, *self._enter(query, key, value)))
        only_causal = is_causal and key_padding_mask is None and not need_weights
        mask = None if only_causal else self._merge_masks(query, key_padding_mask, attn_mask, q.shape[0], k.shape[2])
        out, weights = self._attend(q, k, v, mask, only_causal, need_weights)
        y = self.out_proj(out.transpose(1, 2).flatten(2))  # [N, L, hD] -> [N, L, E]
        if weights is not None:
            weights = self._share_weights(weights, average_attn_weights)
        if not batched:
            return y.squeeze(0), None if weights is None else weights.squeeze(0)
        return y if self.batch_first else y.transpose(0, 1), weights

    def _enter(self, *inputs: Tensor) -> list[Tensor]:
        """The inputs as sharded computation reads them: the same tensor is entered once."""
        entered: dict[int, Tensor] = {}
        for x in inputs:
            if id(x) not in entered:
                wanted = x.requires_grad and torch.is_grad_enabled()
                entered[id(x)] = copy_to_group(x, self.tp, self.reduce_dtype) if wanted else x
        return [entered[id(x)] for x in inputs]

    def _as_batches(self, batched: bool, *inputs: Tensor) -> list[Tensor]:
        """`[N, L, E]` of `[L, E]`, `[L, N, E]` or `[N, L, E]`; what is one tensor stays one."""
        if batched and self.batch_first:
            return list(inputs)
        made = {id(x): x.transpose(0, 1) if batched else x.unsqueeze(0) for x in inputs}
        return [made[id(x)] for x in inputs]

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """q `[N, h, L, D]`, k and v `[N, h, S', D]`, where S' counts the added key of `bias_k` and of `add_zero_attn`."""
        bias = self.in_proj_bias
        if self.in_proj_weight is not None and query is key and key is value:
            q, k, v = F.linear(query, self.in_proj_weight, bias).chunk(3, -1)
        else:
            separate = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            weights: Any = separate if self.in_proj_weight is None else self.in_proj_weight.chunk(3)
            biases: Any = (None,) * 3 if bias is None else bias.chunk(3)
            q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self.bias_k.to(k.dtype).expand(k.shape[0], 1, -1)], 1)
            v = torch.cat([v, self.bias_v.to(v.dtype).expand(v.shape[0], 1, -1)], 1)
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        return [x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in (q, k, v)]

    def _merge_masks(self, query: Tensor, padding: Tensor | None, attn: Tensor | None, batch: int, keys: int) -> Tensor | None:
        """What is added to the scores, `[N or 1, h or 1, L or 1, S']`; None for nothing.

        Args:
            padding: `[N, S]` or, unbatched, `[S]`; attn: `[L, S]` or `[N * H, L, S]`; bool (True is shut out) or floating.
            keys: S', the keys added after the given ones are seen by every query.
        """
        kind = F._none_or_dtype(attn)
        padding = F._canonical_mask(padding, "key_padding_mask", kind, "attn_mask", query.dtype)
        attn = F._canonical_mask(attn, "attn_mask", None, "", query.dtype, False)
        parts = []
        if attn is not None:
            if attn.requires_grad and torch.is_grad_enabled():
                attn = copy_to_group(attn, self.tp, self.reduce_dtype)
            if attn.dim() == 3:
                attn = take_runs(attn.unflatten(0, (batch, self.num_heads)), 1, self._head_runs()[self.tp.tp_rank])
            parts.append(attn if attn.dim() == 4 else attn[None, None])
        if padding is not None:
            if padding.requires_grad and torch.is_grad_enabled():
                padding = copy_to_group(padding, self.tp, self.reduce_dtype)
            parts.append(padding.view(batch, 1, 1, -1))
        if not parts:
            return None
        mask, added = sum(parts[1:], parts[0]), keys - parts[0].shape[-1]
        return F.pad(mask, (0, added)) if added else mask

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """`[N, h, L, D]`, and the weights `[N, h, L, S']` (after dropout, as torch returns them) where they are needed."""
        rate = self.dropout if self.training else 0.0
        with Draws(self.tp).open(self.tp.tp_rank) if rate > 0 else nullcontext():
            if not need_weights:
                return F.scaled_dot_product_attention(q, k, v, mask, rate, is_causal), None
            scores = (q * (1 / math.sqrt(self.head_dim))) @ k.transpose(-2, -1)
            weights = (scores if mask is None else scores + mask).softmax(-1)
            weights = F.dropout(weights, rate) if rate > 0 else weights
        return weights.to(v.dtype) @ v, weights

    def _share_weights(self, weights: Tensor, average: bool) -> Tensor:
        """`[N, L, S']`, averaged over all heads, or `[N, H, L, S']` of the local `[N, h, L, S']`."""
        if average:
            return reduce_from_group(weights.sum(1) / self.num_heads, self.tp, self.reduce_dtype)
        n, _, length, keys = weights.shape
        shape = (n, self.num_heads, length, keys)
        return gather_from_group(weights, self.tp, Shard(shape, self.tp.tp_size, (Cut(1, self._head_runs()),)))

    def _head_runs(self) -> tuple[tuple[Run, ...], ...]:
        packed = "in_proj_weight" in self.shards
        return find_heads(self.shards["in_proj_weight" if packed else "q_proj_weight"], self.head_dim, 3 if packed else 1)


@functools.lru_cache(maxsize=256)
def find_heads(weight: Shard, head_dim: int, parts: int) -> tuple[tuple[Run, ...], ...]:
    """Which heads each rank holds, as runs, of a projection of `parts` packed parts whose rows are dealt by whole heads.

    Raises:
        PlanError: a rank holds a part of a head, other heads of k or v than of q, or none.
    """
    cut = next((c for c in weight.cuts if c.dim == 0), None)
    size, found = weight.shape[0] // parts, []
    for rank in range(weight.tp_size):
        rows = torch.arange(weight.shape[0]) if cut is None else cut.indices(rank)
        heads = rows[: len(rows) // parts : head_dim] // head_dim
        own = (heads[:, None] * head_dim + torch.arange(head_dim)).flatten()
        if not len(heads) or not torch.equal(rows, torch.cat([own + part * size for part in range(parts)])):
            raise PlanError(
                f"rank {rank} of {weight.tp_size} holds rows {rows.tolist()[:8]}... of an attention projection of shape "
                f"{list(weight.shape)}, which are not whole heads of {head_dim}, the same in each of its {parts} parts. "
                f"Deal heads (attention_shards), at least one to each rank."
            )
        found.append(compress_indices(heads.tolist()))
    return tuple(found)


def attention_shards(module: nn.MultiheadAttention, units: Sequence[int], name: str = "") -> dict[str, Shard]:
    """Parameter name (below `module`, `out_proj.weight` too) -> Shard, where rank r holds `units[r]` neighbouring heads.

    Raises:
        PlanError: the units are not the module's heads, or a rank has none.
    """
    name = name or type(module).__name__
    if sum(units) != module.num_heads or min(units) < 1:
        raise PlanError(
            f"{name} has {module.num_heads} heads, which can't be dealt as {list(units)}: each of the {len(units)} ranks "
            f"needs one at least. Use at most {module.num_heads} ranks, or leave it whole."
        )
    width, shards = module.embed_dim, {}
    for key, parameter in module.named_parameters(recurse=False):
        dim = 2 if key in ("bias_k", "bias_v") else 0
        parts = (width,) * 3 if key.startswith("in_proj") else None
        shards[key] = Shard.dealt(tuple(parameter.shape), dim, units, parts)
    shards[OUT] = Shard.dealt(tuple(module.out_proj.weight.shape), 1, units)
    return shards


def rewrite_attention(
    module: nn.Module, group: TPGroup, shards: Mapping[str, Shard], name: str, dtype: torch.dtype | None = None
) -> None:
    """Turn `module` and its `out_proj` into their sharded forms in place; the data is cut elsewhere.

    Args:
        shards: as `attention_shards` gives them; every parameter but `out_proj.bias` must be there.

    Raises:
        PlanError: it is no `nn.MultiheadAttention`, has a forward that replaces the plain one, or its heads are not dealt.
    """
    if not isinstance(module, nn.MultiheadAttention):
        raise PlanError(f"{name} is a {type(module).__name__}, not an nn.MultiheadAttention, so its heads can't be dealt")
    own = {key: shard for key, shard in shards.items() if key != OUT}
    check_dealt(module, own, shards, name)
    cls: Any = type(module)
    layer: Any = ParallelMultiheadAttention
    if cls.forward is nn.MultiheadAttention.forward:
        insert_class(module, layer)
    elif "super" in cls.forward.__code__.co_names:  # it builds on the plain forward
        module.__class__ = type(cls.__name__, (cls, layer), {"__module__": cls.__module__, "plain_class": cls})
    else:
        raise PlanError(
            f"{name}: {cls.__name__} has a forward of its own that does not build on nn.MultiheadAttention.forward, so it can't "
            f"be sharded. Leave it out of the plan."
        )
    state: Any = module
    state.tp, state.shards, state.full_name, state.reduce_dtype = group, own, name, dtype
    rewrite_linear(state.out_proj, LinearAllreduce, group, {"weight": shards[OUT]}, f"{name}.out_proj", dtype)


def check_dealt(module: nn.MultiheadAttention, own: Mapping[str, Shard], shards: Mapping[str, Shard], name: str) -> None:
    """Raise unless all parameters are dealt by the same heads, each held by one rank.

    Raises:
        PlanError: naming the parameter that is not.
    """
    wanted = {key for key, _ in module.named_parameters(recurse=False)} | {OUT}
    if missing := sorted(wanted ^ set(shards)):
        raise PlanError(f"{name}: the shards of an attention are those of {sorted(wanted)}; {missing} differ")
    packed = "in_proj_weight" in own
    heads = find_heads(own["in_proj_weight" if packed else "q_proj_weight"], module.head_dim, 3 if packed else 1)
    for key, shard in shards.items():
        turned = shard if key.startswith("in_proj") or key.endswith("proj_weight") else _as_rows(shard)
        if shard.has_copies or find_heads(turned, module.head_dim, 3 if key.startswith("in_proj") else 1) != heads:
            raise PlanError(f"{name}: {key} is not dealt by the same heads as the queries. Use attention_shards.")


def _as_rows(shard: Shard) -> Shard:
    """The same cut of the last dimension, as one of a vector."""
    last = len(shard.shape) - 1
    return Shard(shard.shape[-1:], shard.tp_size, tuple(Cut(0, cut.runs) for cut in shard.cuts if cut.dim == last))


# -- torch's fast paths -------------------------------------------------------------------------------------------------


class PlainEncoderLayer(nn.Module):
    """In front of an `nn.TransformerEncoderLayer`: in evaluation it hands its children's weights, which would be one rank's,
    to one fused call, unless its activation is none that this call knows."""

    activation_relu_or_gelu = property(lambda self: 0)


class PlainEncoder(nn.Module):
    """In front of an `nn.TransformerEncoder`: it makes nested tensors of padded ones, which only the fused call can read."""

    use_nested_tensor = property(lambda self: False)


def disable_fast_paths(model: nn.Module) -> None:
    """Make every encoder (layer) of `model` that holds something sharded call its children; call it after the rewrite."""
    for module in model.modules():
        for plain, mixin in ((nn.TransformerEncoderLayer, PlainEncoderLayer), (nn.TransformerEncoder, PlainEncoder)):
            sharded = any(isinstance(child, TensorParallel_Layer) for child in module.modules())
            if isinstance(module, plain) and sharded and not isinstance(module, mixin):
                insert_class(module, mixin)


def restore_fast_paths(model: nn.Module) -> None:
    """Undo `disable_fast_paths`; what was sharded must be plain again."""
    for module in model.modules():
        if isinstance(module, PlainEncoderLayer | PlainEncoder):
            module.__class__ = plain_class(module)
