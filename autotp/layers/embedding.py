"""Embeddings cut over the vocabulary or over the hidden size, and the output embedding that turns states into logits.

A head that is tied to an input embedding stays tied: both modules hold one Parameter, and each records the same Shard.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..collectives import copy_to_group, gather_columns_from_group, reduce_from_group
from ..comm import TPGroup
from ..errors import GatherError, PlanError
from ..kernels import few_rows
from ..kernels.decode import is_decoding
from ..kernels.dispatch import Problem, select
from ..shard import Shard
from .base import TensorParallel_Layer
from .pending import pend


def check_embedding(module: nn.Module, name: str, shard: Shard | None = None) -> None:
    """Refuse an embedding whose options need the whole table in one place.

    Args:
        module: the plain module; name: its full name, for the message.
        shard: how its weight would be cut, where that is known already.

    Raises:
        PlanError: `max_norm`, `sparse` or `scale_grad_by_freq` is set, or the ranks would not hold neighbouring rows.
    """
    for option in ("max_norm", "sparse", "scale_grad_by_freq"):
        value = getattr(module, option, None)
        if value:
            raise PlanError(
                f"{name} ({type(module).__name__}) has {option}={value}, which a split embedding does not keep. "
                f"Leave it whole: plan {{'{name}': 'whole'}}."
            )
    if shard is not None and any(cut.dim == 0 for cut in shard.cuts):
        for rank in range(shard.tp_size):
            vocab_range(shard, rank, name)


def vocab_range(shard: Shard, rank: int, name: str = "this embedding") -> tuple[int, int]:
    """`(start, stop)` of the vocabulary rows that `rank` holds of a weight `[V, H]` or bias `[V]` cut on dim 0.

    Raises:
        PlanError: the rows are not one block of neighbours, or there are none.
    """
    cut = next((cut for cut in shard.cuts if cut.dim == 0), None)
    if cut is None:
        return 0, shard.shape[0]
    runs = cut.runs[rank]
    if len(runs) != 1 or (runs[0][3] > 1 and runs[0][2] != runs[0][1]):
        raise PlanError(
            f"{name}: TP rank {rank} of {shard.tp_size} would hold {len(runs)} blocks of its {shard.shape[0]} vocabulary rows, "
            f"but a vocabulary is split into one block of neighbouring rows a rank. Use Shard.even, or fewer ranks."
        )
    start, length, _, count = runs[0]
    return start, start + length * count


def read_local_weight(module: Any) -> Tensor:
    """This rank's `module.weight`.

    Raises:
        GatherError: it has another shape than this rank's shard, as inside a gather context.
    """
    weight, expected = module.weight, module.shards["weight"].local_shape(module.tp.tp_rank)
    if tuple(weight.shape) != expected:
        raise GatherError(
            f"{module.full_name}: forward with a weight of shape {tuple(weight.shape)}, where TP rank {module.tp.tp_rank} holds "
            f"{expected}. Inside GatherReplacedLayerParams a model can't run: leave the `with` block first."
        )
    return weight


def gather_columns(x_local: Tensor, weight: Shard, dim: int, group: TPGroup) -> Tensor:
    """`x_local` `[..., N/T]` made whole, `[..., N]`, where the ranks hold the columns that `weight` deals along `dim`."""
    cut = next((cut for cut in weight.cuts if cut.dim == dim), None)
    if cut is None:
        return x_local
    flat = x_local.reshape(-1, x_local.shape[-1])
    full = gather_columns_from_group(flat, group, cut, weight.shape[dim])
    return full.view(*x_local.shape[:-1], weight.shape[dim])


class VocabParallelEmbedding(TensorParallel_Layer, nn.Embedding):
    """An embedding whose rows are dealt to the ranks.

    | tensor | shape on rank r |
    |---|---|
    | ids | `[...]`, the same on all ranks |
    | weight | `[V_r, H]`, neighbouring rows; V need not be a multiple of T |
    | output | `[..., H]`, whole |

    forward: `y = all_reduce(ids held here ? weight[id - start] : 0)`, exact, since one rank alone adds something.
    wgrad: rows looked up here add `dy`; none is communicated. An id outside `[0, V)` fails as in `nn.Embedding`, but while
    decoding, where its row is NaN.
    """

    def _fill_padding_idx_with_zero(self) -> None:  # nn.Embedding's reset_parameters would clear a row by its place here
        if self.padding_idx is not None:
            start, stop = vocab_range(self.shards["weight"], self.tp.tp_rank, self.full_name)
            if start <= self.padding_idx < stop:
                with torch.no_grad():
                    self.weight[self.padding_idx - start].fill_(0)

    def forward(self, input: Tensor) -> Tensor:
        weight, shard = read_local_weight(self), self.shards["weight"]
        start, stop = vocab_range(shard, self.tp.tp_rank, self.full_name)
        if is_decoding() and not torch.is_grad_enabled() and input.is_contiguous() and weight.stride(1) == 1:
            problem = Problem("look_up", weight.device.type, weight.dtype, "", input.numel(), weight.shape[1])
            part = select(problem)(input, weight, start, shard.shape[0])
            pending = pend(part, self.tp, None, None)
            return reduce_from_group(part, self.tp) if pending is None else pending
        local = input - start
        # An id that no rank holds is left as it is, out of range, so that the lookup fails on every rank.
        elsewhere = ((input < start) & (input >= 0)) | ((input >= stop) & (input < shard.shape[0]))
        local = local.masked_fill(elsewhere, 0)
        padding = self.padding_idx
        padding = padding - start if padding is not None and start <= padding < stop else None
        found = F.embedding(local, weight, padding).masked_fill(elsewhere.unsqueeze(-1), 0)
        return reduce_from_group(found, self.tp)


class HiddenParallelEmbedding(TensorParallel_Layer, nn.Embedding):
    """An embedding whose columns are dealt to the ranks: weight `[V, H_r]`, output `[..., H]`.

    forward: `y = all_gather(weight[ids])` on the last dimension. wgrad: this rank's columns of `dy`, no collective.
    """

    def forward(self, input: Tensor) -> Tensor:
        found = F.embedding(input, read_local_weight(self), self.padding_idx)
        return gather_columns(found, self.shards["weight"], 1, self.tp)


class VocabParallelHead(TensorParallel_Layer, nn.Linear):
    """The output embedding, whose rows, and so the logits' columns, are dealt to the ranks.

    | tensor | shape on rank r |
    |---|---|
    | input | `[..., H]`, whole |
    | weight, bias | `[V_r, H]`, `[V_r]` |
    | output | `[..., V]`, or `[..., V_r]` while `keep_sharded` is set |

    forward: `y_r = x @ w_r.T + b_r`, then all-gather. dgrad: `dx = sum over ranks of dy_r @ w_r`. wgrad: `dy_r.T @ x`, local.

    Attributes:
        keep_sharded: set by entry.py for a forward whose loss works on this rank's columns alone.
        reduce_dtype: dtype in which `dx` is summed; None for its own.
        ran: set by every forward, for entry.py.
    """

    keep_sharded = False
    reduce_dtype = None
    ran = False

    def forward(self, input: Tensor) -> Tensor:
        self.ran = True
        entered = copy_to_group(input, self.tp, self.reduce_dtype)
        logits = few_rows.linear(entered, read_local_weight(self), self.bias)
        return logits if self.keep_sharded else gather_columns(logits, self.shards["weight"], 0, self.tp)
