"""A norm and the linears behind it in one autograd node: the norm's output is not kept, but computed again in backward.

M rows, K in, N out (this rank's), T ranks. `h` is the normalised input, `H` the rows that are multiplied.

| step | plain | column | column, dealt rows | whole, dealt rows |
|---|---|---|---|---|
| forward | `y = h @ w.T + b` | the same | `H = gather(h)`, `y = H @ w.T + b` | `y = h @ w.T + b` |
| dgrad | `dh = dy @ w` | `dh = all_reduce(dy @ w)` | `dh = scatter(dy @ w)` | `dh = dy @ w` |
| wgrad | `dw = dy.T @ h` | the same | `dw = dy.T @ gather(h)` | `dw = all_reduce(dy.T @ h)` |
| norm | of `dh`, complete | the same | summed over the ranks | summed over the ranks |

In a row product `h` is given: `y = all_reduce(h @ w.T)`, or `y = scatter(h @ w.T)`, whose gradient is gathered first.

What is gathered and scattered moves behind the products, see kernels/blocks.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..collectives import copy_to_group, reduce_from_group, sum_copies
from ..kernels.autocast import autocast_dtype, disable_autocast
from ..kernels.blocks import (
    add_products,
    multiply_and_sum,
    multiply_gathered_gradient,
    multiply_gathered_rows,
    multiply_into_scatter,
    sum_scattered,
    sum_whole,
)
from ..kernels.matmul import linear
from ..kernels.norm import norm, norm_backward
from ..kernels.product import Merged
from ..row_collectives import gather_rows_from_group, scatter_rows_to_group
from .norm_wgrad import NormProduct, Product, Sink
from .product import sum_owned, widen


class _NormProduct(torch.autograd.Function):
    """See the module's table; gives `[M, N]` and h `[M, K]`. `tensors`: the linears' weights, then their biases or None."""

    @staticmethod
    def forward(ctx, how: NormProduct, sink: Sink | None, merged: Merged | None, dtype, anchor, x: Tensor, gamma, beta, *tensors):
        weights, biases = tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]
        h, rstd, mean = how.normalise(x.reshape(-1, x.shape[-1]), gamma, beta)
        read = (weights, biases) if merged is None else ([merged.weight], [merged.bias])
        y, rows = multiply_moving(how, h, dtype, *read)
        ctx.wanted = ctx.needs_input_grad[8 : 8 + len(weights)] if anchor is None or sink is None else sink.trained
        save_inputs(ctx, how, x, gamma, beta, rstd, mean, weights)
        ctx.set_materialize_grads(False)
        ctx.how, ctx.sink, ctx.merged, ctx.dtype, ctx.shape = how, sink, merged, dtype, x.shape
        ctx.sizes, ctx.bias_dtypes = [w.shape[0] for w in weights], [None if b is None else b.dtype for b in biases]
        return y, {None: None, "own": h, "all": rows}[how.give]

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor | None, dh: Tensor | None):
        given = dy if dy is not None else dh
        if given is None or not torch._C._is_any_autocast_enabled():
            return find_gradients(ctx, dy, dh)
        with disable_autocast(given):
            return find_gradients(ctx, dy, dh)


def find_gradients(ctx, dy: Tensor | None, dh: Tensor | None) -> tuple[Tensor | None, ...]:
    """What `_NormProduct.backward` returns."""
    if ctx.sink is not None and ctx.sink.pending is None and dy is not None:
        ctx.sink.check(ctx.wanted)  # a rank that raises later would leave the others waiting
    how, (x, gamma, beta, rstd, mean, *weights) = ctx.how, ctx.saved_tensors
    needs, count = ctx.needs_input_grad, len(weights)
    if how.scatter_rows and dy is not None:
        dy, dh = gather_gradient(ctx, dy, weights)
    parts: Sequence[Tensor | None] = [None] * count if dy is None else dy.split(ctx.sizes, 1)
    product = begin_product(ctx, parts, x, gamma, beta)

    def multiply_weights() -> list[Tensor | None]:
        if product is None:
            return [None] * count
        return product.weight_gradients(how) if ctx.sink is None else ctx.sink.take(how, product)

    dx, dgamma, dbeta = None, None, None
    if any(needs[5:8]):
        merged = ctx.merged if dy is not None else None
        factors = zip(parts, weights, strict=True) if merged is None else [(dy, merged.weight)]
        dh, dw = input_gradient(how, [] if how.scatter_rows else factors, dh, ctx.dtype, multiply_weights)
        dx, dgamma, dbeta = norm_gradients(how, dh, x, gamma, rstd, mean, needs[5:8], ctx.shape)
    else:
        dw = multiply_weights()
    db: list[Tensor | None] = [None] * count
    for i, (part, dtype) in enumerate(zip(parts, ctx.bias_dtypes, strict=True)):
        if part is not None and needs[8 + count + i]:
            db[i] = how.complete(part.sum(0, dtype=dtype), count + i)
    return None, None, None, None, None, dx, dgamma, dbeta, *dw, *db


def gather_gradient(ctx, dy: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """The gradient of all rows of y `[M, N]`, of which this rank has `[R, N]`, and dh `[M, K]` where it is wanted."""
    dealt = ctx.how.deal(dy.shape[0] * ctx.how.group.tp_size)
    gather, dh = dealt.exchange.gather(dy, dealt.moves.gather), None
    if any(ctx.needs_input_grad[5:8]):
        read = weights if ctx.merged is None else [ctx.merged.weight]
        dh = multiply_gathered_gradient(dealt, gather, [weight.to(ctx.dtype) for weight in read])
    return gather.wait_all(), dh


def begin_product(ctx, parts: Sequence[Tensor | None], x: Tensor, gamma, beta) -> Product | None:
    """What the weight gradients come from, its rows on their way; None where none is wanted."""
    if not any(ctx.wanted) or parts[0] is None:
        return None
    wanted = [part if need else None for part, need in zip(parts, ctx.wanted, strict=True)]
    product = Product(x.detach(), gamma, beta, wanted, ctx.dtype)
    if ctx.how.gather_rows and (ctx.sink is None or ctx.sink.pending is None):
        product.begin(ctx.how)
    return product


def multiply_moving(
    how: NormProduct, h: Tensor, dtype: torch.dtype, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor]:
    """The products `[M, sum of N_i]` (`[R, sum of N_i]` where they are scattered), and the rows `[M, K]` they were made of."""
    if how.scatter_rows:
        rows, turned = h.to(dtype), [weight.to(dtype).t() for weight in weights]
        return multiply_into_scatter(how.deal(len(h)), rows, turned, lambda: multiply_rows(rows, weights, biases)), h
    if how.sum_output:
        sums = how.deal_sum(len(h), sum(weight.shape[0] for weight in weights), dtype)
        if sums is not None:
            return multiply_and_sum(sums, h.to(dtype), [weight.to(dtype).t() for weight in weights]), h
        return sum_owned(multiply_rows(h.to(dtype), weights, biases), how.group, how.reduce_dtype, how.symmetric), h
    if not how.gather_rows:
        return multiply_rows(h.to(dtype), weights, biases), h
    dealt = how.deal(len(h) * how.group.tp_size)
    gather = dealt.exchange.gather(h, dealt.moves.forward)
    if not gather.order:
        return multiply_rows(gather.wait_all().to(dtype), weights, biases), gather.full
    sizes = [weight.shape[0] for weight in weights]
    y = h.new_empty(dealt.rows, sum(sizes), dtype=dtype)
    added = [None if bias is None else bias.to(dtype) for bias in biases]
    multiply_gathered_rows(dealt, gather, [weight.to(dtype).t() for weight in weights], y.split(sizes, 1), added, dtype)
    return y, gather.full


def multiply_rows(rows: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor:
    """`rows` `[M, K]` times each weight `[N_i, K]` plus its bias, side by side: `[M, sum of N_i]`."""
    products = []
    for weight, bias in zip(weights, biases, strict=True):
        products.append(linear(rows, weight.to(rows.dtype), None if bias is None else bias.to(rows.dtype)))
    return products[0] if len(products) == 1 else torch.cat(products, -1)


def save_inputs(ctx, how: NormProduct, x: Tensor, gamma, beta, rstd, mean, weights: Sequence[Tensor]) -> None:
    """Save what the gradients that are wanted will read, and nothing else."""
    needs = ctx.needs_input_grad
    for_norm, for_weights = any(needs[5:7]), any(ctx.wanted)
    ctx.save_for_backward(
        x if (for_norm and how.kind is not None) or for_weights else None,
        gamma if for_norm or for_weights else None,
        beta if for_weights else None,
        rstd if for_norm else None,
        mean if for_norm else None,
        *(weight if any(needs[5:8]) else None for weight in weights),
    )


def input_gradient(
    how: NormProduct,
    factors: Iterable[tuple[Tensor | None, Tensor]],
    given: Tensor | None,
    dtype: torch.dtype,
    meanwhile: Callable[[], list[Tensor | None]],
) -> tuple[Tensor | None, list[Tensor | None]]:
    """dh `[M, K]`, the gradient of the normalised input: of the products, completed, and `given` of the norm output itself.

    The gradient given for gathered rows is each rank's part of it, as the products' is, and is summed with it; that of
    rows every rank computed for itself is complete already. Also returns what `meanwhile` does, which runs while rows move.
    """
    pairs = [(dy, weight.to(dtype)) for dy, weight in factors if dy is not None]
    whole = how.gather_rows and how.give == "all" and given is not None
    if how.gather_rows and pairs and not whole:
        dh, found = sum_scattered(how.deal(len(pairs[0][0])), pairs, meanwhile)
        return dh if given is None else dh + given, found
    sums = how.deal_sum(len(pairs[0][0]), pairs[0][1].shape[1], dtype) if how.sum_input and pairs else None
    if sums is not None:
        dh, found = sum_whole(sums, pairs, meanwhile)
        return dh if given is None else dh + given, found
    dh = add_products(pairs) if pairs else None
    if whole:
        dh, given = given if dh is None or given is None else dh + given, None
    if dh is not None and how.gather_rows:
        dh = how.group.reduce_scatter_rows(dh, how.reduce_dtype)
    elif dh is not None and how.sum_input:
        dh = sum_owned(dh, how.group, how.reduce_dtype)
    return dh if given is None else given if dh is None else dh + given, meanwhile()


def norm_gradients(how: NormProduct, dh: Tensor | None, x, gamma, rstd, mean, needs: Sequence[bool], shape: torch.Size):
    """dx, dgamma and dbeta, each where it is needed, complete on every rank."""
    if dh is None or how.kind is None:
        return None if dh is None else dh.view(shape), None, None
    summed = how.gather_rows or how.own_rows
    scale = how.scale(gamma)
    if summed and scale is not None:  # the parts are added up before they are rounded
        scale = scale.to(torch.promote_types(scale.dtype, torch.float32))
    if not any(needs[:2]):
        dx, dgamma, dbeta = None, None, dh.sum(0, dtype=torch.promote_types(dh.dtype, torch.float32))
    else:
        rows = x.reshape(-1, x.shape[-1])
        dx, dgamma, dbeta = norm_backward(
            dh.to(x.dtype), rows, scale, rstd, mean, how.kind, wanted=(needs[0], needs[1], needs[2])
        )
    if summed:
        dgamma, dbeta = (None if g is None else how.group.all_reduce(g, dtype=widen(g)) for g in (dgamma, dbeta))
    return None if dx is None else dx.view(shape), dgamma, dbeta


def outside_graphs() -> Callable[..., Any]:
    """The autograd node as compiled graphs leave it out: weight gradients that a Sink takes go where no graph follows.

    Called for layers that have a Sink, since it imports the compiler.
    """
    return torch.compiler.disable(_NormProduct.apply)


def multiply_plain(how: NormProduct, dtype: torch.dtype, x: Tensor, gamma, beta, weights, biases):
    """What `multiply_normalised` returns, of operations that torch differentiates, and so compiles into one graph."""
    group, count = how.group, len(weights)
    if how.gather_rows or how.own_rows:
        gamma, beta = (None if p is None else copy_to_group(p, group, widen(p)) for p in (gamma, beta))
    tensors: list = [*weights, *biases]
    if how.own_rows:
        tensors = [None if p is None else copy_to_group(p, group, widen(p)) for p in tensors]
    elif any(how.copied):
        tensors = [p if p is None or s is None else sum_copies(p, group, s) for p, s in zip(tensors, how.copied, strict=True)]
    h = x if how.kind is None else norm(x, how.scale(gamma), beta, how.eps, how.kind)
    rows = h
    if how.gather_rows:
        rows = gather_rows_from_group(h, group, how.reduce_dtype)
    elif how.sum_input:
        rows = copy_to_group(h, group, how.reduce_dtype)
    y = multiply_rows(rows.to(dtype), tensors[:count], tensors[count:])
    if how.scatter_rows:
        y = scatter_rows_to_group(y, group, how.reduce_dtype)
    elif how.sum_output:
        y = reduce_from_group(y, group, how.reduce_dtype)
    return y, {None: None, "own": h, "all": rows}[how.give]


def multiply_normalised(
    how: NormProduct,
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    sink: Sink | None = None,
    merged: Merged | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The products of normalised `x` with all `weights`, side by side, and the norm output where `how` gives it.

    Args:
        x: `[..., K]`; dim 0 is what is gathered where rows are dealt.
        gamma, beta: `[K]`, the norm's.
        weights, biases: `[N_i, K]` and `[N_i]` of each linear, or None for a bias.
        sink: where weight gradients go; None leaves them to autograd.
        merged: the weights and biases as one tensor each, where they lie side by side.

    Returns:
        `[..., sum of N_i]` (this rank's rows of it where they are scattered) in the autocast dtype, if one is set, or the
        weights'; h `[..., K]` in x's dtype, or None.
    """
    dtype = autocast_dtype(x) or weights[0].dtype
    if torch.compiler.is_compiling() and sink is None:
        return multiply_plain(how, dtype, x, gamma, beta, weights, biases)
    anchor = None
    if sink is not None and sink.pending is not None:  # autograd is not to reach the weights: hooks on them run in time
        weights = [weight.detach() for weight in weights]
        anchor = x.new_empty(0).requires_grad_(any(sink.trained))
    run = _NormProduct.apply if sink is None or sink.run is None else sink.run
    with disable_autocast(x) if torch._C._is_any_autocast_enabled() else nullcontext():
        y, h = run(how, sink, merged, dtype, anchor, x, gamma, beta, *weights, *biases)
    lead = list(x.shape[:-1])
    gathered = [lead[0] * how.group.tp_size, *lead[1:]] if how.gather_rows else lead
    left = [lead[0] // how.group.tp_size, *lead[1:]] if how.scatter_rows else gathered
    y = y.view([*left, y.shape[-1]])
    return y, None if h is None else h.view([*(gathered if how.give == "all" else lead), h.shape[-1]])
