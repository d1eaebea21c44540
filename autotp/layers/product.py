"""What a group of ranks adds to products: sums of partial outputs, of input gradients, of what several ranks hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from ..collectives import sum_over_holders
from ..comm import TPGroup
from ..kernels.product import ProductSpec
from ..shard import Shard
from .draws import watches_functions


def sum_owned(tensor: Tensor, group: TPGroup, dtype: torch.dtype | None, kind: str | None = None) -> Tensor:
    """The sum over the ranks of `tensor`, which the caller made and nobody else reads; outside autograd.

    Args:
        dtype: in which it is added up, None for its own; kind: of a small sum, see TPGroup.all_reduce_small.
    """
    if kind is not None and group.tp_size > 1:
        return group.all_reduce_small(tensor.to(dtype or tensor.dtype).contiguous(), kind).to(tensor.dtype)
    if dtype is None or dtype == tensor.dtype:
        return group.all_reduce_owned(tensor)
    return group.all_reduce(tensor, dtype=dtype)


def widen(tensor: Tensor) -> torch.dtype:
    """In which parts of a parameter's gradient are added up: float32 at least, so that many ranks round them as one does."""
    return torch.promote_types(tensor.dtype, torch.float32)


def make_spec(
    run: Callable[..., Tensor],
    group: TPGroup,
    reduce_dtype: torch.dtype | None,
    copied: Sequence[Shard | None],
    main_grads: Sequence[str | None],
    enters: bool = False,
    leaves: bool = False,
    transposed: bool = False,
    residual: bool = False,
    kind: str | None = None,
) -> ProductSpec:
    """How a layer of `group` multiplies.

    Args:
        run: the dispatched forward product; reduce_dtype: in which partial sums are added up, None for their own.
        copied: for each weight, then each bias, its Shard where several ranks hold parts of it.
        main_grads: for each weight, then each bias, its name where its gradient goes into its `main_grad`.
        enters, leaves: whether the input's gradient, or the output, is a partial sum.
        transposed: weights are `[K, N]`; residual: return the input as well.
        kind: how a small output is summed, see `sum_owned`.
    """
    total = partial(sum_owned, group=group, dtype=reduce_dtype)
    copies = tuple(None if shard is None else partial(sum_over_holders, group=group, shard=shard) for shard in copied)
    own = not enters or group.tp_rank == 0
    return ProductSpec(
        run,
        total if enters else None,
        partial(total, kind=kind) if leaves else None,
        transposed,
        copies,
        tuple(main_grads),
        residual,
        own,
    )


def watches_operations() -> bool:
    """Whether something reads operations one by one (a compiler, a torch function mode): it must see plain ones."""
    return torch.compiler.is_compiling() or (torch._C._len_torch_function_stack() > 0 and watches_functions())
