"""The product of one input with the weights of one linear, or of several that read it, as one step of autograd.

M rows, K in, N out (`N1 + N2 + ...` over the weights), T ranks.

| direction | algebra |
|---|---|
| forward | `y = x @ w.T`, summed over the ranks where the product `leaves`, `+ b` |
| dgrad | `dx = dy @ w`, summed over the ranks where the product `enters` |
| wgrad | `dw = dy.T @ x`, `db = dy.sum(0)`, each summed over the holders of what several ranks hold |

Each of dx, dw and db is computed where it is wanted and for its own sake. Weights that lie side by side take one GEMM in each
direction; others one each, whose input gradients add up in one buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._device import DeviceContext

from ..collectives import sum_over_holders
from ..comm import TPGroup
from ..kernels.matmul import dgrad, join_columns, view_side_by_side, wgrad
from ..shard import Shard

SMALL = 1 << 20  # elements up to which copying a gradient costs less than launching another product


class ProductSpec(NamedTuple):
    """What stays the same from call to call.

    Attributes:
        run: the dispatched forward product.
        group: the ranks; reduce_dtype: in which partial sums are added up, None for their own.
        enters, leaves: whether the input's gradient, or the output, is a partial sum.
        transposed: weights are `[K, N]`, as Conv1D's.
        copied: for each weight, then each bias, its Shard where several ranks hold parts of it.
    """

    run: Callable[..., Tensor]
    group: TPGroup
    reduce_dtype: torch.dtype | None
    enters: bool
    leaves: bool
    transposed: bool
    copied: tuple[Shard | None, ...]


class Merged(NamedTuple):
    """All weights `[N, K]` as one tensor over their own memory, and all biases `[N]`, if any."""

    weight: Tensor
    bias: Tensor | None


def multiply(
    spec: ProductSpec, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], merged: Merged | None = None
) -> Any:
    """`x @ w.T + b` as autograd sees it; a tuple of one output for each weight where there are several."""
    dtype = autocast_dtype(x)
    with disable_autocast(x):
        return _Product.apply(spec, dtype, merged, x, *weights, *biases)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast runs linears in where `x` lives; None where it is off or leaves `x` alone."""
    if not torch._C._is_any_autocast_enabled() or x.dtype is torch.float64:
        return None
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def disable_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Within it products run in the dtypes they are given: autocast's cache must not see casts that autograd does not know."""
    return torch.autocast(x.device.type, enabled=False) if torch._C._is_any_autocast_enabled() else nullcontext()


def watches_operations() -> bool:
    """Whether something reads operations one by one (a compiler, a torch function mode): it must see plain ones."""
    if torch.compiler.is_compiling():
        return True
    modes = torch._C._len_torch_function_stack()
    return modes > 0 and any(type(torch._C._get_function_stack_at(i)) is not DeviceContext for i in range(modes))


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, spec: ProductSpec, dtype: torch.dtype | None, merged: Merged | None, x: Tensor, *params: Any) -> Any:
        count = len(params) // 2
        weights, biases = params[:count], params[count:]
        ctx.set_materialize_grads(False)
        ctx.spec, ctx.weights, ctx.biases, ctx.merged = spec, weights, biases, None
        ctx.shape, ctx.dtype = x.shape, x.dtype
        x = _cast(x, dtype)
        wanted = ctx.needs_input_grad
        kept = x if any(wanted[4 : 4 + count]) else None
        if merged is not None:
            weight = _cast(merged.weight, dtype)
            if wanted[3]:  # the weights' own memory: that nobody writes to it is checked as autograd checks what it saves
                ctx.merged = weight
                ctx.versions = [w._version for w in weights] if weight is merged.weight else None
            ctx.save_for_backward(kept)
            y = spec.run(x, weight, _cast(merged.bias, dtype))
            return torch.unsafe_split_with_sizes(y, [w.shape[0] for w in weights], -1)
        cast = [_cast(w, dtype) for w in weights]
        ctx.save_for_backward(kept, *(cast if wanted[3] else ()))
        if count == 1:
            return _run_one(spec, x, cast[0], biases[0], dtype)
        return tuple(_run_one(spec, x, w, b, dtype) for w, b in zip(cast, biases, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor | None) -> Any:
        count = len(ctx.weights)
        rows = {i: g.reshape(-1, g.shape[-1]) for i, g in enumerate(grads) if g is not None}
        if not rows:
            return (None,) * (4 + 2 * count)
        x, *saved = ctx.saved_tensors
        with disable_autocast(next(iter(rows.values()))):
            joined = _join(ctx, rows)
            dx = _input_gradient(ctx, rows, joined, saved) if ctx.needs_input_grad[3] else None
            dw = _weight_gradients(ctx, rows, joined, x)
            db = _bias_gradients(ctx, rows, joined)
        return None, None, None, dx, *dw, *db


def _run_one(spec: ProductSpec, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    if not spec.leaves:
        return _own(spec.run(x, weight, _cast(bias, dtype)))
    y = _own(sum_owned(spec.run(x, weight), spec.group, spec.reduce_dtype))
    return y if bias is None else y.add_(bias.to(y.dtype))


def _own(y: Tensor) -> Tensor:
    """`y`, no view of what the product made: autograd allows no changes in place of a view that a Function returns."""
    return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y


def sum_owned(tensor: Tensor, group: TPGroup, dtype: torch.dtype | None) -> Tensor:
    """The sum over the ranks of `tensor`, which the caller made and nobody else reads; outside autograd."""
    if dtype is None or dtype == tensor.dtype:
        return group.all_reduce_owned(tensor)
    return group.all_reduce(tensor, dtype=dtype)


def _cast(tensor: Any, dtype: torch.dtype | None) -> Any:
    return tensor if tensor is None or dtype is None else tensor.to(dtype)


# -- backward -----------------------------------------------------------------------------------------------------------


def _join(ctx: Any, rows: dict[int, Tensor]) -> Tensor | None:
    """The gradients of all outputs as one `[M, N]`, or None where products one by one are wanted or cost less."""
    count = len(ctx.weights)
    if count == 1:
        return rows[0]
    if len(rows) < count or ctx.merged is None:
        return None
    parts = [rows[i] for i in range(count)]
    found = view_side_by_side(parts)
    if found is not None:
        return found
    m, n, k = parts[0].shape[0], ctx.merged.shape[0], ctx.merged.shape[1]
    # A copy reads and writes n columns; each further product reads and writes the k columns that it adds to.
    return join_columns(parts) if m * n <= SMALL or n <= (count - 1) * k else None


def _input_gradient(ctx: Any, rows: dict[int, Tensor], joined: Tensor | None, saved: list[Tensor]) -> Tensor:
    spec, dx = ctx.spec, None
    if ctx.merged is not None:
        _check_versions(ctx)
    if joined is not None:
        dx = dgrad(joined, ctx.merged if ctx.merged is not None else _as_rows(saved[0], spec))
    else:
        parts = saved if ctx.merged is None else ctx.merged.split([w.shape[0] for w in ctx.weights])
        for i, dy in rows.items():
            dx = dgrad(dy, _as_rows(parts[i], spec), dx)
    assert dx is not None
    dx = dx.view(ctx.shape)
    if spec.enters:
        dx = sum_owned(dx, spec.group, spec.reduce_dtype)
    return dx.to(ctx.dtype)


def _as_rows(weight: Tensor, spec: ProductSpec) -> Tensor:
    return weight.t() if spec.transposed else weight


def _check_versions(ctx: Any) -> None:
    """Raise as autograd does for what it saved itself."""
    if ctx.versions is not None and ctx.versions != [w._version for w in ctx.weights]:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a weight of "
            f"linears that read one input, of shapes {[tuple(w.shape) for w in ctx.weights]}. Change weights after backward."
        )


def _weight_gradients(ctx: Any, rows: dict[int, Tensor], joined: Tensor | None, x: Tensor | None) -> list[Tensor | None]:
    weights, spec = ctx.weights, ctx.spec
    count = len(weights)
    wanted = ctx.needs_input_grad[4 : 4 + count]
    if x is None or not any(wanted):
        return [None] * count
    flat = x.reshape(-1, x.shape[-1])
    grads: list[Tensor | None] = [None] * count
    if count > 1 and joined is not None and all(wanted):
        whole = wgrad(joined, flat)
        assert whole is not None
        grads = list(torch.unsafe_split_with_sizes(whole.to(weights[0].dtype), [w.shape[0] for w in weights]))
    else:
        for i, dy in rows.items():
            if wanted[i]:
                product = wgrad(flat, dy) if spec.transposed else wgrad(dy, flat)
                assert product is not None
                grads[i] = product.to(weights[i].dtype)
    return _sum_copies(grads, spec.copied[:count], spec.group)


def _bias_gradients(ctx: Any, rows: dict[int, Tensor], joined: Tensor | None) -> list[Tensor | None]:
    biases = ctx.biases
    count = len(biases)
    wanted = ctx.needs_input_grad[4 + count :]
    grads: list[Tensor | None] = [None] * count
    if count > 1 and joined is not None and all(wanted):
        sums = joined.sum(0).to(biases[0].dtype)
        grads = list(torch.unsafe_split_with_sizes(sums, [b.shape[0] for b in biases]))
    else:
        for i, dy in rows.items():
            if wanted[i]:
                grads[i] = dy.sum(0).to(biases[i].dtype)
    return _sum_copies(grads, ctx.spec.copied[count:], ctx.spec.group)


def _sum_copies(grads: list[Tensor | None], copied: Sequence[Shard | None], group: TPGroup) -> list[Tensor | None]:
    """`grads`, each summed over the ranks that hold copies of it; every rank comes here for the same ones."""
    if not any(copied):
        return grads
    return [
        grad if grad is None or shard is None else sum_over_holders(grad, group, shard)
        for grad, shard in zip(grads, copied, strict=True)
    ]
