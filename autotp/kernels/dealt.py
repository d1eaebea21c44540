"""Products whose input rows, or output rows, are dealt to the ranks: what moves does so while the product runs.

M rows of all ranks, R = ceil(M / T) of one, K in, N out. The last rank's rows are padded with rows that count for nothing.

| product | forward | dgrad | wgrad |
|---|---|---|---|
| `multiply_gathered` (column) | `y = gather(x) @ w.T + b` | `dx = scatter(dy @ w)` | `dw = dy.T @ gather(x)` |
| `multiply_scattered` (row) | `y = scatter(x @ w.T)` | `dx = gather(dy) @ w` | `dw = gather(dy).T @ x` |

`gather` and `scatter` are an exchange's (autotp/exchange.py, passed in). Where it moves blocks beside what computes, a product
starts with the rows that are here, or that the others wait for; else it is one GEMM, and what moves does so before or after.

| step | what hides behind it |
|---|---|
| column forward | the gather, behind this rank's own block |
| column backward | the gather of x behind dgrad, the scatter of dx behind wgrad; the own block of dgrad comes last, adding up |
| row forward | the scatter, behind this rank's own block, which comes last |
| row dgrad | the gather of dy, behind this rank's own block; wgrad reads it once more |

Only x's own rows are kept for a column's backward, which gathers them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .autocast import autocast_dtype, disable_autocast
from .gradients import as_rows, bias_gradients, check_versions, join_gradients, weight_gradients
from .main_grad import find_main_grad
from .matmul import dgrad
from .product import Merged, ProductSpec


def block_of(rows: int, rank: int, tp_size: int) -> slice:
    """The rows of `rank` where they are dealt in blocks of `ceil(rows / tp_size)`; the last blocks may be short or empty."""
    size = -(-rows // tp_size)
    return slice(min(rows, rank * size), min(rows, (rank + 1) * size))


class Dealt(NamedTuple):
    """How rows are dealt in this call.

    Attributes:
        exchange: what moves them; rank, tp_size: of the ranks they are dealt to.
        shape: of all rows, `(M,)` or `(B, S)`: outputs of a column product are `[*shape, N]`.
        local_shape: of one rank's, `(R,)` or `(1, R)`.
        reduce_dtype: in which partial rows are summed; None for their own.
        gather: begun already, of the input's rows.
    """

    exchange: Any
    rank: int
    tp_size: int
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    reduce_dtype: torch.dtype | None = None
    gather: Any = None

    @property
    def rows(self) -> int:
        """M."""
        count = 1
        for size in self.shape:
            count *= size
        return count


def multiply_gathered(
    spec: ProductSpec, x_local: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], merged: Merged | None = None
) -> tuple[Tensor, ...]:
    """`gather(x) @ w.T + b` for each weight `[N, K]`: x_local `[*local_shape, K]`, results `[*shape, N]`; see the module's table.

    The gradient of x_local is the ranks' sum for its rows.
    """
    return _apply(_Gathered, spec, x_local, weights, biases, merged)


def multiply_scattered(spec: ProductSpec, x: Tensor, weight: Tensor) -> Tensor:
    """This rank's rows of the ranks' sum of `x @ w.T`: x `[*shape, K]`, weight `[N, K]`, result `[*local_shape, N]`."""
    return _apply(_Scattered, spec, x, (weight,), (None,), None)


def _apply(step: Any, spec: ProductSpec, x: Tensor, weights: Any, biases: Any, merged: Merged | None) -> Any:
    if not torch._C._is_any_autocast_enabled():
        return step.apply(spec, None, merged, x, *weights, *biases)
    dtype = autocast_dtype(x)
    with disable_autocast(x):
        return step.apply(spec, dtype, merged, x, *weights, *biases)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, spec: ProductSpec, dtype: torch.dtype | None, merged: Merged | None, x: Tensor, *params: Any) -> Any:
        count = len(params) // 2
        weights, biases = params[:count], params[count:]
        cast = [_cast(w, dtype) for w in weights]
        joined = _note_call(ctx, spec, dtype, merged, x, weights, biases)
        local = _cast(x, dtype).reshape(-1, x.shape[-1])
        gather = spec.dealt.gather or spec.dealt.exchange.gather(local)
        ctx.save_for_backward(local if True in ctx.needs_input_grad[4 : 4 + count] else None, *(() if merged else cast))
        if merged is not None:
            y = _multiply_blocks(spec, gather, dtype, joined, _cast(merged.bias, dtype))
            return torch.unsafe_split_with_sizes(_shaped(y, spec.dealt), [w.shape[0] for w in weights], -1)
        products = (_multiply_blocks(spec, gather, dtype, w, _cast(b, dtype)) for w, b in zip(cast, biases, strict=True))
        return tuple(_own(_shaped(y, spec.dealt)) for y in products)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor | None) -> Any:
        rows = {i: g.reshape(-1, g.shape[-1]) for i, g in enumerate(grads) if g is not None}
        if not rows:
            return (None,) * len(ctx.needs_input_grad)
        if torch._C._is_any_autocast_enabled():
            with disable_autocast(ctx.weights[0]):
                return _gathered_backward(ctx, rows)
        return _gathered_backward(ctx, rows)


def _gathered_backward(ctx: Any, rows: dict[int, Tensor]) -> tuple[Tensor | None, ...]:
    _check_main_grads(ctx)
    dealt, wanted = ctx.spec.dealt, ctx.needs_input_grad
    local, *saved = ctx.saved_tensors
    gather = None if local is None else dealt.exchange.gather(local)
    joined, factors, scatter = join_gradients(ctx, rows), [], None
    if wanted[3]:
        factors = _find_factors(ctx, rows, joined, saved)
        scatter = dealt.exchange.scatter(dealt.rows, factors[0][1].shape[1], factors[0][0], ctx.reduce_dtype)
        for rank in scatter.order:
            block = block_of(dealt.rows, rank, dealt.tp_size)
            _add_products(factors, block, scatter.place(rank), begun=False)
            scatter.send(rank)
        if not scatter.order:  # at once, and before the other products: a collective in sequence has nothing to hide behind
            dx = scatter.reduce(_pad(_add_products(factors, slice(None), None), dealt))
    dw = weight_gradients(ctx, rows, joined, None if gather is None else gather.wait_all()[: dealt.rows])
    if scatter is not None and scatter.order:
        own = scatter.receive()
        _add_products(factors, block_of(dealt.rows, dealt.rank, dealt.tp_size), own, begun=True)
        dx = _pad_own(own, dealt)
    dx = dx.view(ctx.shape).to(ctx.dtype) if scatter is not None else None
    return None, None, None, dx, *dw, *bias_gradients(ctx, rows, joined)


def _find_factors(ctx: Any, rows: dict[int, Tensor], joined: Tensor | None, saved: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Pairs `dy [M, N]`, `w [N, K]` whose products add up to the input's gradient."""
    if ctx.merged is not None:
        check_versions(ctx)
    if joined is not None:
        return [(joined, ctx.merged if ctx.merged is not None else as_rows(saved[0], ctx.spec))]
    parts = saved if ctx.merged is None else ctx.merged.split([w.shape[0] for w in ctx.weights])
    return [(dy, as_rows(parts[i], ctx.spec)) for i, dy in rows.items()]


def _add_products(factors: Sequence[tuple[Tensor, Tensor]], block: slice, out: Tensor | None, begun: bool = False) -> Tensor:
    """The sum of the products of a block of rows, in `out`; added to what is there if that is `begun`."""
    for dy, w in factors:
        if begun:
            dgrad(dy[block], w, out)
        elif out is None:
            out, begun = torch.mm(dy[block], w), True
        else:
            torch.mm(dy[block], w, out=out)
            begun = True
    assert out is not None
    return out


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, spec: ProductSpec, dtype: torch.dtype | None, merged: Any, x: Tensor, weight: Tensor, bias: None) -> Tensor:
        dealt = spec.dealt
        _note_call(ctx, spec, dtype, None, x, (weight,), (bias,))
        rows, cast = _cast(x, dtype).reshape(-1, x.shape[-1]), _cast(weight, dtype)
        ctx.save_for_backward(rows if ctx.needs_input_grad[4] else None, cast if ctx.needs_input_grad[3] else None)
        w = as_rows(cast, spec).t()
        scatter = dealt.exchange.scatter(dealt.rows, w.shape[1], rows, ctx.reduce_dtype)
        if not scatter.order:
            return scatter.reduce(_pad(spec.run(rows, cast), dealt)).view(*dealt.local_shape, -1)
        for rank in scatter.order:
            torch.mm(rows[block_of(dealt.rows, rank, dealt.tp_size)], w, out=scatter.place(rank))
            scatter.send(rank)
        own = torch.mm(rows[block_of(dealt.rows, dealt.rank, dealt.tp_size)], w)
        return _pad_own(own.add_(scatter.receive()), dealt).view(*dealt.local_shape, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> Any:
        if torch._C._is_any_autocast_enabled():
            with disable_autocast(grad):
                return _scattered_backward(ctx, grad)
        return _scattered_backward(ctx, grad)


def _scattered_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    _check_main_grads(ctx)
    dealt, (x, weight) = ctx.spec.dealt, ctx.saved_tensors
    gather = dealt.exchange.gather(grad.reshape(-1, grad.shape[-1]))
    dx = None
    if weight is not None:
        w = as_rows(weight, ctx.spec)
        if gather.order:
            dx = grad.new_empty(dealt.rows, w.shape[1])
            for rank in gather.order:
                block = block_of(dealt.rows, rank, dealt.tp_size)
                torch.mm(gather.wait(rank)[: block.stop - block.start], w, out=dx[block])
        else:
            dx = torch.mm(gather.wait_all()[: dealt.rows], w)
        dx = dx.view(ctx.shape).to(ctx.dtype)
    rows = {0: gather.wait_all()[: dealt.rows]}
    return None, None, None, dx, weight_gradients(ctx, rows, rows[0], x)[0], None


# -- parts ----------------------------------------------------------------------------------------------------------------


def _note_call(ctx: Any, spec: ProductSpec, dtype: Any, merged: Merged | None, x: Tensor, weights: Any, biases: Any) -> Any:
    """Set what gradients.py reads of `ctx`; the merged weight as it is multiplied."""
    ctx.set_materialize_grads(False)
    ctx.spec, ctx.weights, ctx.biases, ctx.merged, ctx.versions = spec, weights, biases, None, None
    ctx.shape, ctx.dtype, ctx.reduce_dtype = x.shape, x.dtype, spec.dealt.reduce_dtype
    weight = None if merged is None else _cast(merged.weight, dtype)
    if merged is not None and ctx.needs_input_grad[3]:
        ctx.merged = weight
        ctx.versions = [w._version for w in weights] if weight is merged.weight else None
    return weight


def _multiply_blocks(spec: ProductSpec, gather: Any, dtype: Any, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`[M, N]`: the product of all rows, block by block as they arrive."""
    dealt = spec.dealt
    if not gather.order:
        return spec.run(_cast(gather.wait_all(), dtype)[: dealt.rows], weight, bias)
    w = as_rows(weight, spec).t()
    y = weight.new_empty(dealt.rows, w.shape[1])
    for rank in gather.order:
        block = block_of(dealt.rows, rank, dealt.tp_size)
        rows = _cast(gather.wait(rank), dtype)[: block.stop - block.start]
        if bias is None:
            torch.mm(rows, w, out=y[block])
        else:
            torch.addmm(bias, rows, w, out=y[block])
    gather.wait_all()
    return y


def _check_main_grads(ctx: Any) -> None:
    """Raise before anything moves: a rank that raises later would leave the others waiting."""
    params = (*ctx.weights, *ctx.biases)
    for parameter, name, wants in zip(params, ctx.spec.main_grads, ctx.needs_input_grad[4:], strict=True):
        if name is not None and wants:
            find_main_grad(parameter, name)


def _pad(rows: Tensor, dealt: Dealt) -> Tensor:
    """`[M, N]` with zero rows after it, up to `[T * R, N]`."""
    missing = -rows.shape[0] % dealt.tp_size
    return torch.cat([rows, rows.new_zeros(missing, rows.shape[1])]) if missing else rows


def _pad_own(rows: Tensor, dealt: Dealt) -> Tensor:
    """This rank's rows with zero rows after them, up to `[R, N]`."""
    missing = -(-dealt.rows // dealt.tp_size) - rows.shape[0]
    return torch.cat([rows, rows.new_zeros(missing, rows.shape[1])]) if missing else rows


def _shaped(y: Tensor, dealt: Dealt) -> Tensor:
    return y.view(*dealt.shape, y.shape[-1])


def _own(y: Tensor) -> Tensor:
    return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y


def _cast(tensor: Any, dtype: torch.dtype | None) -> Any:
    return tensor if tensor is None or dtype is None else tensor.to(dtype)
