"""The differentiable collectives of rows that are dealt to the ranks, block after block, zeros behind the last.

| function | forward | backward | used where |
|---|---|---|---|
| `gather_rows_from_group` | all-gather of rows | reduce-scatter | rows dealt to the ranks enter sharded computation |
| `scatter_rows_to_group` | reduce-scatter of rows | all-gather | partial sums leave it for dealt rows |
| `deal_rows` | slice of rows | all-gather | what all ranks hold is dealt by rows |
| `collect_rows` | all-gather of rows | slice | dealt rows become what all ranks hold |
| `enter_rows` | what was collected already | reduce-scatter of rows | the same, where each rank adds a part of the gradient |
| `sum_together` | identity | one all-reduce for all | parameters that dealt rows read |

They return their result and never write into their input, whatever its strides.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .collectives import give_fresh
from .comm import TPGroup


class _GatherRowsFromGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: TPGroup, dtype: torch.dtype | None) -> Tensor:
        ctx.group, ctx.dtype = group, dtype
        return give_fresh(group.gather_rows(x))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return ctx.group.reduce_scatter_rows(grad, ctx.dtype), None, None


class _ScatterRowsToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: TPGroup, dtype: torch.dtype | None) -> Tensor:
        ctx.group = group
        return give_fresh(group.reduce_scatter_rows(x, dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return ctx.group.gather_rows(grad), None, None


class _DealRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: TPGroup) -> Tensor:
        ctx.group, ctx.rows = group, x.shape[0]
        return take_rows(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return _first_rows(ctx.group.gather_rows(grad), ctx.rows), None


class _CollectRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: TPGroup, rows: int, gathered: Tensor | None) -> Tensor:
        ctx.group, ctx.rows, ctx.shape = group, rows, x.shape
        return give_fresh(_first_rows(group.gather_rows(x), rows)) if gathered is None else gathered

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return take_rows(grad.reshape(ctx.rows, -1), ctx.group).view(ctx.shape), None, None, None


class _EnterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, full: Tensor, group: TPGroup, dtype: torch.dtype | None) -> Tensor:
        ctx.group, ctx.shape, ctx.dtype = group, x.shape, dtype
        return full.view_as(full)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        rows = pad_rows(grad.reshape(-1, grad.shape[-1]), ctx.group.tp_size)
        return ctx.group.reduce_scatter_rows(rows, ctx.dtype).view(ctx.shape), None, None, None


class _SumTogether(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group: TPGroup, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.group = group
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor | None):
        there = [grad for grad in grads if grad is not None]
        if not there:
            return None, *grads
        wide = torch.promote_types(torch.float32, there[0].dtype)
        summed = ctx.group.all_reduce_owned(torch.cat([grad.reshape(-1).to(wide) for grad in there]))
        parts = iter(summed.split([grad.numel() for grad in there]))
        return None, *(None if grad is None else next(parts).view(grad.shape).to(grad.dtype) for grad in grads)


def pad_rows(x: Tensor, size: int) -> Tensor:
    """`x` `[M, ...]` with rows of zeros behind it, so that `size` divides their number."""
    short = -x.shape[0] % size
    return torch.cat([x, x.new_zeros(short, *x.shape[1:])]) if short else x


def take_rows(x: Tensor, group: TPGroup) -> Tensor:
    """This rank's block of the rows of `x` `[M, ...]`, `[ceil(M / tp_size), ...]`, zeros behind the last; no autograd."""
    share = -(-x.shape[0] // group.tp_size)
    part = x[group.tp_rank * share : (group.tp_rank + 1) * share]
    return torch.cat([part, x.new_zeros(share - part.shape[0], *x.shape[1:])]) if part.shape[0] < share else part.clone()


def _first_rows(x: Tensor, rows: int) -> Tensor:
    """`x[:rows]` as no view, which autograd would not let anybody change in place."""
    return x if x.shape[0] == rows else torch.ops.aten._unsafe_view(x[:rows], (rows, *x.shape[1:]))


def gather_rows_from_group(x: Tensor, group: TPGroup, dtype: torch.dtype | None = None) -> Tensor:
    """All ranks' rows `[R, ...]`, as many on each, as `[tp_size * R, ...]`; each rank's gradient of them is a part of it."""
    return x if group.tp_size == 1 else _GatherRowsFromGroup.apply(x, group, dtype)


def scatter_rows_to_group(x: Tensor, group: TPGroup, dtype: torch.dtype | None = None) -> Tensor:
    """This rank's rows `[R, ...]` of the sum of all ranks' `x` `[tp_size * R, ...]`; their gradients are gathered."""
    return x if group.tp_size == 1 else _ScatterRowsToGroup.apply(x, group, dtype)


def deal_rows(x: Tensor, group: TPGroup) -> Tensor:
    """This rank's rows `[ceil(M / tp_size), ...]` of `x` `[M, ...]`, which all ranks hold; zeros behind the last."""
    return _DealRows.apply(x, group)


def collect_rows(x: Tensor, group: TPGroup, rows: int, gathered: Tensor | None = None) -> Tensor:
    """The first `rows` of all ranks' rows, whole; its gradient is complete on every rank, and each takes that of its rows.

    `gathered`: they are here already, and are returned in the shape that they have.
    """
    return _CollectRows.apply(x, group, rows, gathered)


def enter_rows(x: Tensor, full: Tensor, group: TPGroup, dtype: torch.dtype | None = None) -> Tensor:
    """`full` `[..., K]`, collected from all ranks' rows `x`, whose gradient is the sum over the ranks; each has a part of it."""
    return _EnterRows.apply(x, full.detach(), group, dtype)


def sum_together(parameters: Sequence[Tensor], group: TPGroup) -> tuple[Tensor, ...]:
    """`parameters` themselves; their gradients are summed over the ranks, all in one all-reduce of float32 at least."""
    return _SumTogether.apply(group, *parameters)
