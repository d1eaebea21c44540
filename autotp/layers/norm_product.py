"""A norm and the linears behind it in one autograd node: the norm's output is not kept, but computed again in backward.

M rows, K in, N out (this rank's), T ranks. `h` is the normalised input, `H` the rows that are multiplied.

| step | plain | column | column, dealt rows | whole, dealt rows |
|---|---|---|---|---|
| forward | `y = h @ w.T + b` | the same | `H = all_gather(h)`, `y = H @ w.T + b` | `y = h @ w.T + b` |
| dgrad | `dh = dy @ w` | `dh = all_reduce(dy @ w)` | `dh = reduce_scatter(dy @ w)` | `dh = dy @ w` |
| wgrad | `dw = dy.T @ h` | the same | `dw = dy.T @ all_gather(h)` | `dw = all_reduce(dy.T @ h)` |
| norm | of `dh`, complete | the same | summed over the ranks | summed over the ranks |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..collectives import copy_to_group, gather_rows_from_group, sum_copies, sum_over_holders
from ..comm import TPGroup
from ..errors import AutoTPError
from ..kernels.matmul import dgrad, linear, view_side_by_side, wgrad
from ..kernels.norm import norm, norm_backward, norm_forward
from ..shard import Shard
from .product import Merged, autocast_dtype, disable_autocast


@dataclass(frozen=True)
class NormProduct:
    """What is computed, and what travels between the ranks meanwhile.

    Attributes:
        kind: the norm, of kernels/norm.py; None where the input is normalised already.
        eps: added to the mean square.
        less_one: the norm's weight is stored less one, and `kind` does not say so (a zero-centred layernorm).
        group: the ranks.
        gather_rows: the rows are dealt to the ranks, and gathered before they are multiplied.
        own_rows: the rows are dealt to the ranks, and each multiplies its own: weight gradients are summed.
        sum_input: each rank computes a part of dh for all rows.
        copied: of each linear's weight, then each one's bias: its Shard where several ranks hold parts of it.
        reduce_dtype: in which parts of dh are summed; None for their own.
        give: which norm output is returned beside y: "own" rows, "all" rows, or None.
    """

    kind: str | None
    eps: float
    group: TPGroup
    less_one: bool = False
    gather_rows: bool = False
    own_rows: bool = False
    sum_input: bool = False
    copied: tuple[Shard | None, ...] = ()
    reduce_dtype: torch.dtype | None = None
    give: str | None = None

    def normalise(self, rows: Tensor, gamma: Tensor | None, beta: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """h `[M, K]`, 1/rms and mean `[M]`."""
        if self.kind is None:
            return rows, None, None
        return norm_forward(rows, self.scale(gamma), beta, self.eps, self.kind)

    def scale(self, gamma: Tensor | None) -> Tensor | None:
        """What the kernel takes as the norm's weight."""
        if gamma is None or not self.less_one:
            return gamma
        return gamma.to(torch.promote_types(gamma.dtype, torch.float32)) + 1

    def complete(self, grad: Tensor, part: int) -> Tensor:
        """The gradient of tensor `part` (weights, then biases), of which this rank computed `grad`."""
        if self.own_rows:
            return self.group.all_reduce(grad)
        shard = self.copied[part] if self.copied else None
        return grad if shard is None else sum_over_holders(grad, self.group, shard)

    def is_complete(self, part: int) -> bool:
        """Whether `complete` leaves a gradient as it is, so that a product may be added to another in place."""
        return not self.own_rows and (not self.copied or self.copied[part] is None)


@dataclass
class Product:
    """What the weight gradients are computed from, now or later.

    Attributes:
        x `[..., K]`, gamma, beta `[K]`: the norm's inputs; dy: each linear's output gradient `[M, N_i]`, None where no
            weight gradient is wanted; dtype: what is multiplied is cast to.
    """

    x: Tensor
    gamma: Tensor | None
    beta: Tensor | None
    dy: list[Tensor | None]
    dtype: torch.dtype

    @torch.no_grad()
    def weight_gradients(self, how: NormProduct, targets: Sequence[Tensor | None] | None = None) -> list[Tensor | None]:
        """dw `[N_i, K]` of each linear whose dy is there; None for the others, and for those added to their `main_grad`.

        Args:
            targets: the weights whose `main_grad` takes the gradient.
        """
        h = how.normalise(self.x.reshape(-1, self.x.shape[-1]), self.gamma, self.beta)[0]
        rows = (how.group.gather_rows(h) if how.gather_rows else h).to(self.dtype)
        there = [dy for dy in self.dy if dy is not None]
        joined = view_side_by_side(there) if len(there) > 1 and targets is None else None
        if joined is not None:
            whole = wgrad(joined, rows)
            assert whole is not None
            products = iter(whole.split([dy.shape[1] for dy in there]))
            return [None if dy is None else how.complete(next(products), i) for i, dy in enumerate(self.dy)]
        found: list[Tensor | None] = [None] * len(self.dy)
        for i, dy in enumerate(self.dy):
            if dy is not None and targets is not None:
                add_to_main_grad(how, i, dy, rows, targets[i])
            elif dy is not None:
                product = wgrad(dy, rows)
                assert product is not None
                found[i] = how.complete(product, i)
        return found


def find_main_grad(weight: Tensor, name: str) -> Tensor:
    """The tensor that `weight`'s gradients are added to.

    Raises:
        AutoTPError: there is none.
    """
    found = getattr(weight, "main_grad", None)
    if found is None:
        raise AutoTPError(
            f"{name} has no main_grad to add its gradient to: set weight.main_grad to a tensor of shape {list(weight.shape)}, "
            f"float32 as a rule, before backward, or build the layer without fuse_wgrad_accumulation"
        )
    return found


def add_to_main_grad(how: NormProduct, part: int, dy: Tensor, rows: Tensor, weight: Any) -> None:
    """Add `dy.T @ rows` to the weight's `main_grad` in the GEMM itself, or once it is complete; and note that it is there."""
    overwrite = getattr(weight, "overwrite_main_grad", False)
    if how.is_complete(part):
        wgrad(dy, rows, weight.main_grad, overwrite)
    else:
        product = wgrad(dy, rows)
        assert product is not None
        dw = how.complete(product, part)
        weight.main_grad.copy_(dw) if overwrite else weight.main_grad.add_(dw)
    weight.grad_added_to_main_grad = True


@dataclass
class Sink:
    """Where weight gradients go that autograd is not to accumulate.

    Attributes:
        names, parameters: of each linear's weight.
        main: they are added to each weight's `main_grad`.
        pending: they are computed later, from what is appended here; None for now.
        run: `outside_graphs()`.
    """

    names: Sequence[str]
    parameters: Sequence[Tensor]
    main: bool
    pending: list[tuple[NormProduct, Product]] | None = None
    run: Callable[..., Any] | None = None

    @property
    def trained(self) -> tuple[bool, ...]:
        """Of which weights a gradient is wanted."""
        return tuple(parameter.requires_grad for parameter in self.parameters)

    def take(self, how: NormProduct, product: Product) -> list[Tensor | None]:
        """The gradients that are autograd's, one for each linear, once the others are where they belong or noted for later."""
        if self.pending is not None:
            self.pending.append((how, product))
            return [None] * len(self.parameters)
        return self.add(how, product)

    def add(self, how: NormProduct, product: Product) -> list[Tensor | None]:
        """Compute the gradients; those not added to a `main_grad` are returned.

        Raises:
            AutoTPError: a weight has no `main_grad`.
        """
        if not self.main:
            return product.weight_gradients(how)
        for dy, weight, name in zip(product.dy, self.parameters, self.names, strict=True):
            if dy is not None:
                find_main_grad(weight, name)
        return product.weight_gradients(how, self.parameters)


class _NormProduct(torch.autograd.Function):
    """See the module's table; gives `[M, N]` and h `[M, K]`. `tensors`: the linears' weights, then their biases or None."""

    @staticmethod
    def forward(ctx, how: NormProduct, sink: Sink | None, merged: Merged | None, dtype, anchor, x: Tensor, gamma, beta, *tensors):
        weights, biases = tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]
        h, rstd, mean = how.normalise(x.reshape(-1, x.shape[-1]), gamma, beta)
        rows = how.group.gather_rows(h) if how.gather_rows else h
        if merged is None:
            y = multiply_rows(rows.to(dtype), weights, biases)
        else:
            y = multiply_rows(rows.to(dtype), [merged.weight], [merged.bias])
        ctx.wanted = ctx.needs_input_grad[8 : 8 + len(weights)] if anchor is None or sink is None else sink.trained
        save_inputs(ctx, how, x, gamma, beta, rstd, mean, weights)
        ctx.set_materialize_grads(False)
        ctx.how, ctx.sink, ctx.merged, ctx.dtype, ctx.shape = how, sink, merged, dtype, x.shape
        ctx.sizes, ctx.bias_dtypes = [w.shape[0] for w in weights], [None if b is None else b.dtype for b in biases]
        return y, {None: None, "own": h, "all": rows}[how.give]

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor | None, dh: Tensor | None):
        how, (x, gamma, beta, rstd, mean, *weights) = ctx.how, ctx.saved_tensors
        parts: Sequence[Tensor | None] = [None] * len(weights)
        if dy is not None:
            parts = dy.split(ctx.sizes, 1)
        needs, count = ctx.needs_input_grad, len(weights)
        dx, dgamma, dbeta = None, None, None
        if any(needs[5:8]):
            merged = ctx.merged if dy is not None else None
            factors = zip(parts, weights, strict=True) if merged is None else [(dy, merged.weight)]
            dh = input_gradient(how, factors, dh, ctx.dtype)
            dx, dgamma, dbeta = norm_gradients(how, dh, x, gamma, rstd, mean, needs[5:8], ctx.shape)
        dw: list[Tensor | None] = [None] * count
        if any(ctx.wanted) and dy is not None:
            wanted = [part if need else None for part, need in zip(parts, ctx.wanted, strict=True)]
            product = Product(x.detach(), gamma, beta, wanted, ctx.dtype)
            dw = product.weight_gradients(how) if ctx.sink is None else ctx.sink.take(how, product)
        db: list[Tensor | None] = [None] * count
        for i, (part, dtype) in enumerate(zip(parts, ctx.bias_dtypes, strict=True)):
            if part is not None and needs[8 + count + i]:
                db[i] = how.complete(part.sum(0, dtype=dtype), count + i)
        return None, None, None, None, None, dx, dgamma, dbeta, *dw, *db


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
    how: NormProduct, factors: Iterable[tuple[Tensor | None, Tensor]], given: Tensor | None, dtype: torch.dtype
) -> Tensor | None:
    """dh `[M, K]`, the gradient of the normalised input: of the products, completed, and `given` of the norm output itself.

    The gradient given for gathered rows is each rank's part of it, as the products' is, and is summed with it; that of
    rows every rank computed for itself is complete already.
    """
    dh = None
    for dy, weight in factors:
        if dy is not None:
            dh = dgrad(dy, weight.to(dtype), dh)
    if how.gather_rows and how.give == "all" and given is not None:
        dh, given = given if dh is None else dh + given, None
    if dh is not None and how.gather_rows:
        dh = how.group.reduce_scatter_rows(dh, how.reduce_dtype)
    elif dh is not None and how.sum_input:
        dh = how.group.all_reduce(dh, dtype=how.reduce_dtype) if how.reduce_dtype else how.group.all_reduce_owned(dh)
    return dh if given is None else given if dh is None else dh + given


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
        dgamma, dbeta = (None if g is None else how.group.all_reduce(g) for g in (dgamma, dbeta))
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
        gamma, beta = (None if p is None else copy_to_group(p, group) for p in (gamma, beta))
    tensors: list = [*weights, *biases]
    if how.own_rows:
        tensors = [None if p is None else copy_to_group(p, group) for p in tensors]
    elif any(how.copied):
        tensors = [p if p is None or s is None else sum_copies(p, group, s) for p, s in zip(tensors, how.copied, strict=True)]
    h = x if how.kind is None else norm(x, how.scale(gamma), beta, how.eps, how.kind)
    rows = h
    if how.gather_rows:
        rows = gather_rows_from_group(h, group, how.reduce_dtype)
    elif how.sum_input:
        rows = copy_to_group(h, group, how.reduce_dtype)
    y = multiply_rows(rows.to(dtype), tensors[:count], tensors[count:])
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
        `[..., sum of N_i]` in the autocast dtype, if one is set, or the weights'; h `[..., K]` in x's dtype, or None.
    """
    dtype = autocast_dtype(x) or weights[0].dtype
    if torch.compiler.is_compiling() and sink is None:
        return multiply_plain(how, dtype, x, gamma, beta, weights, biases)
    anchor = None
    if sink is not None and sink.pending is not None:  # autograd is not to reach the weights: hooks on them run in time
        weights = [weight.detach() for weight in weights]
        anchor = x.new_empty(0).requires_grad_(any(sink.trained))
    run = _NormProduct.apply if sink is None or sink.run is None else sink.run
    with disable_autocast(x):
        y, h = run(how, sink, merged, dtype, anchor, x, gamma, beta, *weights, *biases)
    lead = list(x.shape[:-1])
    gathered = [lead[0] * how.group.tp_size, *lead[1:]] if how.gather_rows else lead
    y = y.view([*gathered, y.shape[-1]])
    return y, None if h is None else h.view([*(gathered if how.give == "all" else lead), h.shape[-1]])
