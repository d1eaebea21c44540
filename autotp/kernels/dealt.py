"""Products whose input rows, or output rows, are dealt to the ranks: what moves does so while the product runs.

M rows of all ranks, R = ceil(M / T) of one, K in, N out. The last rank's rows are padded with rows that count for nothing.

| product | forward | dgrad | wgrad |
|---|---|---|---|
| `multiply_gathered` (column) | `y = gather(x) @ w.T + b` | `dx = scatter(dy @ w)` | `dw = dy.T @ gather(x)` |
| `multiply_scattered` (row) | `y = scatter(x @ w.T)` | `dx = gather(dy) @ w` | `dw = gather(dy).T @ x` |

| step | what hides behind it |
|---|---|
| column forward | the gather, behind this rank's own block |
| column backward | the gather of x behind dgrad, the scatter of dx behind wgrad; the own block of dgrad comes last, adding up |
| row forward | the scatter, behind this rank's own block, which comes last |
| row dgrad | the gather of dy, behind this rank's own block; wgrad reads it once more |

Only x's own rows are kept for a column's backward, which gathers them again. blocks.py has the steps without autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..errors import AutoTPError
from .autocast import autocast_dtype, disable_autocast
from .blocks import (
    Dealt,
    block_of,
    multiply_gathered_gradient,
    multiply_gathered_rows,
    multiply_into_scatter,
    sum_scattered,
)
from .gradients import as_rows, bias_gradients, check_versions, find_factors, join_gradients, weight_gradients
from .main_grad import find_main_grad
from .matmul import wgrad
from .product import Merged, ProductSpec

__all__ = ["Dealt", "backward_linear", "block_of", "multiply_gathered", "multiply_scattered"]


def multiply_gathered(
    spec: ProductSpec,
    x_local: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    merged: Merged | None = None,
    gather: Any = None,
) -> tuple[Tensor, ...]:
    """`gather(x) @ w.T + b` for each weight `[N, K]`: x_local `[*local_shape, K]`, results `[*shape, N]`; see the module's table.

    The gradient of x_local is the ranks' sum for its rows.

    Args:
        gather: begun already, of its rows.
    """
    if not torch._C._is_any_autocast_enabled():
        return _gathered(spec, None, x_local, weights, biases, merged, gather)
    dtype = autocast_dtype(x_local)
    with disable_autocast(x_local):
        return _gathered(spec, dtype, x_local, weights, biases, merged, gather)


def multiply_scattered(spec: ProductSpec, x: Tensor, weight: Tensor) -> Tensor:
    """This rank's rows of the ranks' sum of `x @ w.T`: x `[*shape, K]`, weight `[N, K]`, result `[*local_shape, N]`."""
    if not torch._C._is_any_autocast_enabled():
        return _scattered(spec, None, x, weight)
    dtype = autocast_dtype(x)
    with disable_autocast(x):
        return _scattered(spec, dtype, x, weight)


def _gathered(spec: ProductSpec, dtype: Any, x: Tensor, weights: Any, biases: Any, merged: Merged | None, gather: Any) -> Any:
    """`multiply_gathered` in `dtype`: where nothing is differentiated, without the autograd step, which costs the host more."""
    if torch.is_grad_enabled():
        return _Gathered.apply(spec, dtype, (merged, gather), x, *weights, *biases)
    gather = gather or spec.dealt.exchange.gather(_as_matrix(x, dtype), spec.dealt.moves.forward)
    if merged is None:
        return _run_gathered(spec, dtype, gather, [_cast(w, dtype) for w in weights], biases)
    return _split(_run_gathered(spec, dtype, gather, (_cast(merged.weight, dtype),), (merged.bias,))[0], weights)


def _scattered(spec: ProductSpec, dtype: torch.dtype | None, x: Tensor, weight: Tensor) -> Tensor:
    """`multiply_scattered` in `dtype`, the same way."""
    if torch.is_grad_enabled():
        return _Scattered.apply(spec, dtype, None, x, weight, None)
    return _run_scattered(spec, _as_matrix(x, dtype), _cast(weight, dtype))


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, spec: ProductSpec, dtype: torch.dtype | None, given: tuple[Any, Any], x: Tensor, *params: Any) -> Any:
        (merged, gather), count = given, len(params) // 2
        weights, biases = params[:count], params[count:]
        joined = _note_call(ctx, spec, dtype, merged, x, weights, biases)
        local, cast = _as_matrix(x, dtype), [] if merged is not None else [_cast(w, dtype) for w in weights]
        gather = gather or spec.dealt.exchange.gather(local, spec.dealt.moves.forward)  # holds all rows: goes with the forward
        ctx.save_for_backward(local if True in ctx.needs_input_grad[4 : 4 + count] else None, *cast)
        if merged is not None:
            return _split(_run_gathered(spec, dtype, gather, (joined,), (merged.bias,))[0], weights)
        return tuple([_own(y) for y in _run_gathered(spec, dtype, gather, cast, biases)])

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
    if wanted[3] and ctx.merged is not None:
        check_versions(ctx)
    local, *saved = ctx.saved_tensors
    gather = None if local is None else dealt.exchange.gather(local, dealt.moves.gather, lent=True)
    joined = join_gradients(ctx, rows)

    def multiply_weights() -> list[Tensor | None]:
        return weight_gradients(ctx, rows, joined, None if gather is None else dealt.trim(gather.wait_all()))

    if wanted[3]:
        dx, dw = sum_scattered(dealt, find_factors(ctx, rows, joined, saved), multiply_weights)
        dx = dx.view(ctx.shape).to(ctx.dtype)
    else:
        dx, dw = None, multiply_weights()
    return None, None, None, dx, *dw, *bias_gradients(ctx, rows, joined)


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, spec: ProductSpec, dtype: Any, given: Any, x: Tensor, weight: Tensor, bias: None) -> Tensor:
        _note_call(ctx, spec, dtype, None, x, (weight,), (bias,))
        rows, cast = _as_matrix(x, dtype), _cast(weight, dtype)
        ctx.save_for_backward(rows if ctx.needs_input_grad[4] else None, cast if ctx.needs_input_grad[3] else None)
        return _run_scattered(spec, rows, cast)

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
    gather = dealt.exchange.gather(grad.reshape(-1, grad.shape[-1]), dealt.moves.gather, lent=True)
    dx = None
    if weight is not None:
        dx = multiply_gathered_gradient(dealt, gather, [as_rows(weight, ctx.spec)]).view(ctx.shape).to(ctx.dtype)
    rows = {0: dealt.trim(gather.wait_all())}
    return None, None, None, dx, weight_gradients(ctx, rows, rows[0], x)[0], None


# -- the gradients of one product, its pieces given -----------------------------------------------------------------------


def backward_linear(
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    *,
    mode: str,
    dealt: Dealt,
    wants_dx: bool = True,
    wants_dw: bool = True,
    wants_db: bool = False,
    main_grad: Tensor | None = None,
    overwrite: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of `y = gather(x) @ weight.T + b` ("column") or `y = scatter(x @ weight.T) + b` ("row"), without autograd.

    | mode | dy | x | dx | dw | db |
    |---|---|---|---|---|---|
    | "column" | `[M, N]` | `[R, K]` | `[R, K]`, summed over the ranks | `[N, K]` | `[N]` |
    | "row" | `[R, N]` | `[M, K]` | `[M, K]` | `[N, K]` | `[N]`, of all rows: the same on every rank |

    Args:
        dy, x, weight: of one dtype; x is read for dw alone, weight for dx alone, each may be None where that is not wanted.
        wants_dx, wants_dw, wants_db: what is computed, each for its own sake and the same on every rank; None for the others.
        main_grad: `[N, K]`, which dw is added to, and which is returned in its place.
        overwrite: write `main_grad` instead.

    Raises:
        AutoTPError: shapes that do not fit together, or a piece that is missing; before anything moves.
    """
    _check_pieces(dy, x, weight, mode, dealt, wants_dx, wants_dw, main_grad)
    exchange, way = dealt.exchange, dealt.moves.gather
    if mode == "column":
        gather = exchange.gather(x, way, lent=True) if wants_dw else None

        def multiply_weight() -> Tensor | None:
            return None if gather is None else _multiply_into(dy, dealt.trim(gather.wait_all()), main_grad, overwrite)

        dx, dw = sum_scattered(dealt, [(dy, weight)], multiply_weight) if wants_dx else (None, multiply_weight())  # type: ignore
        return dx, dw, dy.sum(0) if wants_db else None
    if not (wants_dx or wants_dw or wants_db):
        return None, None, None
    gather = exchange.gather(dy, way, lent=True)
    dx = multiply_gathered_gradient(dealt, gather, [weight]) if wants_dx else None  # type: ignore[arg-type]
    rows = dealt.trim(gather.wait_all())
    dw = _multiply_into(rows, x, main_grad, overwrite) if wants_dw else None  # type: ignore[arg-type]
    return dx, dw, rows.sum(0) if wants_db else None


def _multiply_into(dy: Tensor, x: Tensor, main_grad: Tensor | None, overwrite: bool) -> Tensor | None:
    product = wgrad(dy, x, main_grad, overwrite)
    return main_grad if product is None else product


def _check_pieces(
    dy: Tensor, x: Any, weight: Any, mode: str, dealt: Dealt, wants_dx: bool, wants_dw: bool, main_grad: Any
) -> None:
    """Raise before anything moves: a rank that raises later would leave the others waiting."""
    if mode not in ("column", "row"):
        raise AutoTPError(f"backward_linear: mode is 'column' or 'row', got {mode!r}")
    own = -(-dealt.rows // dealt.tp_size)
    counts = (dealt.rows, own) if mode == "column" else (own, dealt.rows)
    pieces = {"dy": (dy, counts[0], None), "x": (x if wants_dw else None, counts[1], None)}
    pieces["weight"] = (weight if wants_dx else None, dy.shape[-1], None if not wants_dw or x is None else x.shape[-1])
    pieces["main_grad"] = (main_grad, dy.shape[-1], None if x is None else x.shape[-1])
    for name, wanted in (("x", wants_dw), ("weight", wants_dx)):
        if wanted and pieces[name][0] is None:
            raise AutoTPError(f"backward_linear: {name} is needed for {'dw' if name == 'x' else 'dx'}, which is wanted: give it")
    for name, (tensor, first, second) in pieces.items():
        if tensor is not None and (tensor.dim() != 2 or tensor.shape[0] != first or second not in (None, tensor.shape[1])):
            raise AutoTPError(
                f"backward_linear: {name} is {list(tensor.shape)} where a {mode} product of {dealt.rows} rows, dealt to "
                f"{dealt.tp_size} ranks, takes [{first}, {'K' if second is None else second}]"
            )


# -- parts ----------------------------------------------------------------------------------------------------------------


def _note_call(ctx: Any, spec: ProductSpec, dtype: Any, merged: Merged | None, x: Tensor, weights: Any, biases: Any) -> Any:
    """Set what gradients.py reads of `ctx`; the merged weight as it is multiplied."""
    ctx.set_materialize_grads(False)
    ctx.spec = spec
    ctx.weights, ctx.biases, ctx.merged, ctx.versions = weights, biases, None, None
    ctx.shape, ctx.dtype = x.shape, x.dtype
    weight = None if merged is None else _cast(merged.weight, dtype)
    if merged is not None and ctx.needs_input_grad[3]:
        ctx.merged = weight
        ctx.versions = [w._version for w in weights] if weight is merged.weight else None
    return weight


def _run_gathered(spec: ProductSpec, dtype: torch.dtype | None, gather: Any, weights: Any, biases: Any) -> list[Tensor]:
    """`[*shape, N]` of each weight, which is of `dtype` already."""
    dealt = spec.dealt
    if dtype is not None:
        biases = [_cast(b, dtype) for b in biases]
    if gather.order:
        turned = [as_rows(w, spec).t() for w in weights]
        found = [w.new_empty(dealt.rows, w.shape[1]) for w in turned]
        multiply_gathered_rows(dealt, gather, turned, found, biases, dtype)
    else:
        rows = _cast(dealt.trim(gather.wait_all()), dtype)
        found = [spec.run(rows, w, b) for w, b in zip(weights, biases, strict=True)]
    return [y.view(*dealt.shape, y.shape[1]) for y in found]


def _run_scattered(spec: ProductSpec, rows: Tensor, weight: Tensor) -> Tensor:
    """`[*local_shape, N]` of rows `[M, K]`."""
    dealt = spec.dealt
    y = multiply_into_scatter(dealt, rows, (as_rows(weight, spec).t(),), lambda: spec.run(rows, weight))
    return y.view(*dealt.local_shape, y.shape[1])


def _split(y: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return torch.unsafe_split_with_sizes(y, [w.shape[0] for w in weights], -1)


def _check_main_grads(ctx: Any) -> None:
    """Raise before anything moves: a rank that raises later would leave the others waiting."""
    params = (*ctx.weights, *ctx.biases)
    for parameter, name, wants in zip(params, ctx.spec.main_grads, ctx.needs_input_grad[4:], strict=True):
        if name is not None and wants:
            find_main_grad(parameter, name)


def _own(y: Tensor) -> Tensor:
    return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y


def _as_matrix(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return (x if dtype is None else x.to(dtype)).reshape(-1, x.shape[-1])


def _cast(tensor: Any, dtype: torch.dtype | None) -> Any:
    return tensor if tensor is None or dtype is None else tensor.to(dtype)
