"""The differentiable collectives: what autograd knows of the communication among the ranks of a group.

| function | forward | backward | used where |
|---|---|---|---|
| `copy_to_group` | identity | all-reduce | what all ranks hold enters sharded computation |
| `reduce_from_group` | all-reduce | identity | partial sums leave it |
| `gather_from_group` | all-gather | slice | sharded columns become whole for replicated computation |
| `split_to_group` | slice | all-gather | whole columns become sharded after replicated computation |
| `gather_columns_from_group`, `split_columns_to_group` | all-gather; slice | slice; all-gather | the same, of columns of rows |
| `copy_columns_to_group` | identity | all-reduce of some columns | the same, where only they enter |
| `keep_on_first` | identity on rank 0, zeros elsewhere | all-reduce of rank 0's | a bias is added to partial sums once |
| `sum_copies` | identity | sum over the holders | sharded computation reads what several ranks hold |

They return their result and never write into their input, whatever its strides. `autotp/row_collectives.py` has those of rows
that are dealt to the ranks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .comm import TPGroup
from .errors import PlanError
from .index_runs import put_runs, run_width, take_runs
from .shard import Cut, Shard


def give_fresh(out: Tensor) -> Tensor:
    """What a Function's forward may return to a compiler: no tensor that shares memory with another made in it.

    torch 2.11's passes zeros to the backward of such a Function, in place of its output's gradient.
    """
    return out.clone() if torch.compiler.is_compiling() else out


class _CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: TPGroup, dtype: torch.dtype | None) -> Tensor:
        ctx.group, ctx.dtype = group, dtype
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return ctx.group.all_reduce(grad, dtype=ctx.dtype), None, None


class _ReduceFromGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: TPGroup, dtype: torch.dtype | None) -> Tensor:
        return give_fresh(group.all_reduce(x, dtype=dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return grad, None, None


class _ReduceOwnedFromGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: TPGroup) -> Tensor:
        ctx.mark_dirty(x)
        return group.all_reduce_owned(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return grad, None


class _GatherFromGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: TPGroup, shard: Shard) -> Tensor:
        ctx.group, ctx.shard = group, shard
        return give_fresh(group.all_gather(x, shard))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return ctx.shard.split(grad, ctx.group.tp_rank).contiguous(), None, None


def _join_columns(x: Tensor, group: TPGroup, cut: Cut, size: int) -> Tensor:
    """All ranks' columns `[M, n]` as `[M, size]`; each is held by one rank."""
    widths = [run_width(runs) for runs in cut.runs]
    padded = F.pad(x, (0, max(widths) - x.shape[1])) if x.shape[1] < max(widths) else x
    every = group.gather_rows(padded).view(group.tp_size, x.shape[0], max(widths))
    full = x.new_empty(x.shape[0], size)
    for rank, (runs, width) in enumerate(zip(cut.runs, widths, strict=True)):
        put_runs(full, 1, runs, every[rank, :, :width])
    return full


class _GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: TPGroup, cut: Cut, size: int) -> Tensor:
        ctx.runs = cut.runs[group.tp_rank]
        return give_fresh(_join_columns(x, group, cut, size))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return take_runs(grad, 1, ctx.runs).contiguous(), None, None, None


class _SplitColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: TPGroup, cut: Cut) -> Tensor:
        ctx.group, ctx.cut, ctx.size = group, cut, x.shape[1]
        return take_runs(x, 1, cut.runs[group.tp_rank]).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return _join_columns(grad, ctx.group, ctx.cut, ctx.size), None, None


class _SplitToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: TPGroup, shard: Shard) -> Tensor:
        ctx.group, ctx.shard = group, shard
        return shard.split(x, group.tp_rank).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return ctx.group.all_gather(grad, ctx.shard), None, None


class _CopyColumnsToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: TPGroup, columns: tuple[tuple[int, int], ...], dtype: torch.dtype | None) -> Tensor:
        ctx.group, ctx.columns, ctx.dtype = group, columns, dtype
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        entering = [grad[..., start:stop] for start, stop in ctx.columns]
        summed = ctx.group.all_reduce(torch.cat(entering, -1), dtype=ctx.dtype)
        out = grad.clone()
        for (start, stop), part in zip(ctx.columns, summed.split([e.shape[-1] for e in entering], -1), strict=True):
            out[..., start:stop] = part
        return out, None, None, None


class _KeepOnFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: TPGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x) if group.tp_rank == 0 else torch.zeros_like(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return ctx.group.all_reduce(grad if ctx.group.tp_rank == 0 else torch.zeros_like(grad)), None


class _SumCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: TPGroup, shard: Shard) -> Tensor:
        ctx.group, ctx.shard = group, shard
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return sum_over_holders(grad, ctx.group, ctx.shard), None, None


def sum_over_holders(grad: Tensor, group: TPGroup, shard: Shard) -> Tensor:
    """`grad` of this rank's part, where each element that several ranks (or places) hold gets the sum over them; no autograd."""
    if shard.copied is None:
        return grad
    dim, count, by_rank = shard.copied
    places, slots = by_rank[group.tp_rank]
    shape = [*grad.shape[:dim], count, *grad.shape[dim + 1 :]]
    summed = grad.new_zeros(shape, dtype=torch.promote_types(grad.dtype, torch.float32))
    put_runs(summed, dim, slots, take_runs(grad, dim, places).to(summed.dtype))
    summed = group.all_reduce_owned(summed)
    out = grad.clone(memory_format=torch.contiguous_format)
    put_runs(out, dim, places, take_runs(summed, dim, slots).to(grad.dtype))
    return out


def copy_to_group(x: Tensor, group: TPGroup, dtype: torch.dtype | None = None) -> Tensor:
    """`x` itself; its gradient is summed over the ranks (in `dtype` if one is named), each of which adds a part of it."""
    return x if group.tp_size == 1 else _CopyToGroup.apply(x, group, dtype)


def copy_columns_to_group(
    x: Tensor, group: TPGroup, columns: tuple[tuple[int, int], ...], dtype: torch.dtype | None = None
) -> Tensor:
    """`x` `[..., N]` itself; the gradient of its columns `start:stop` is summed over the ranks, in one all-reduce."""
    return x if group.tp_size == 1 else _CopyColumnsToGroup.apply(x, group, columns, dtype)


def keep_on_first(x: Tensor, group: TPGroup) -> Tensor:
    """`x` on rank 0 and zeros elsewhere, so that it is added to a partial sum once; every rank gets rank 0's gradient."""
    return x if group.tp_size == 1 else _KeepOnFirst.apply(x, group)


def sum_copies(x_local: Tensor, group: TPGroup, shard: Shard) -> Tensor:
    """`x_local` itself, this rank's part of `shard`; the gradient of what several ranks hold is summed over its holders.

    All holders get the same bits, so copies that are equal stay equal. Every rank takes part, holders or not: the copied
    elements alone, in a zero tensor, are all-reduced over the whole group (in float32 at least).

    Raises:
        PlanError: an index repeats inside a rank, or several cuts have copies.
    """
    if group.tp_size == 1 or shard.copied is None:
        return x_local
    return _SumCopies.apply(x_local, group, shard)


def reduce_from_group(x: Tensor, group: TPGroup, dtype: torch.dtype | None = None) -> Tensor:
    """The sum of `x` over the ranks; every rank's gradient passes through unchanged."""
    return x if group.tp_size == 1 else _ReduceFromGroup.apply(x, group, dtype)


def reduce_owned_from_group(x: Tensor, group: TPGroup, dtype: torch.dtype | None = None) -> Tensor:
    """The same, in `x`'s own memory where that is possible: only for a product that nobody else reads."""
    if group.tp_size == 1 or (dtype or x.dtype) != x.dtype or not x.is_contiguous():
        return reduce_from_group(x, group, dtype)
    if not (x.requires_grad and torch.is_grad_enabled()):
        return group.all_reduce_owned(x)
    return _ReduceOwnedFromGroup.apply(x, group)


def check_held_once(shard: Shard) -> None:
    """Raise if ranks hold copies: the gradients of copies would have to be added up, and are not.

    Raises:
        PlanError: the parts hold more elements than the full tensor.
    """
    if shard.has_copies:
        raise PlanError(
            f"some elements of the tensor of shape {list(shard.shape)} are held more than once: gather or split its parts "
            f"outside autograd (TPGroup.all_gather, Shard.split)"
        )


def gather_from_group(x: Tensor, group: TPGroup, shard: Shard) -> Tensor:
    """The full tensor of the ranks' parts; the gradient, equal on all ranks, is split again. Parts held twice: refused."""
    if group.tp_size == 1:
        return x
    check_held_once(shard)
    return _GatherFromGroup.apply(x, group, shard)


def gather_columns_from_group(x: Tensor, group: TPGroup, cut: Cut, size: int) -> Tensor:
    """`[M, size]` of the ranks' columns `x` `[M, n]`, dealt as `cut` says; the gradient, equal on all ranks, is split again.

    Raises:
        PlanError: a column is held twice: the gradients of copies would have to be added up, and are not.
    """
    if group.tp_size == 1:
        return x
    _check_columns(cut, size)
    return _GatherColumns.apply(x, group, cut, size)


def split_columns_to_group(x: Tensor, group: TPGroup, cut: Cut) -> Tensor:
    """This rank's columns of `x` `[M, K]`, which is equal on all ranks; the parts' gradients are gathered.

    Raises:
        PlanError: a column is held twice.
    """
    if group.tp_size == 1:
        return x
    _check_columns(cut, x.shape[1])
    return _SplitColumns.apply(x, group, cut)


def _check_columns(cut: Cut, size: int) -> None:
    held = sum(run_width(runs) for runs in cut.runs)
    if held != size:
        raise PlanError(
            f"{held} columns are dealt of {size}, some held more than once: gather or split them outside autograd "
            f"(TPGroup.all_gather, Shard.split)"
        )


def split_to_group(x: Tensor, group: TPGroup, shard: Shard) -> Tensor:
    """This rank's part of `x`, which is equal on all ranks; the parts' gradients are gathered. Parts held twice: refused."""
    if group.tp_size == 1:
        return x
    check_held_once(shard)
    return _SplitToGroup.apply(x, group, shard)
