"""What a norm and its linears compute, described, and their weight gradients: now or later, for autograd or for `main_grad`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..collectives import sum_over_holders
from ..comm import TPGroup
from ..exchange import Gather, find_exchange
from ..kernels.blocks import Dealt
from ..kernels.main_grad import add_gradient, add_product, find_main_grad
from ..kernels.matmul import view_side_by_side, wgrad
from ..kernels.moves import BY_SIZE, Moves
from ..kernels.norm import norm_forward
from ..shard import Shard
from .overlap import deal_sum
from .product import widen


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
        sum_output: each rank computes a part of y for all rows; scatter_rows: which are dealt to the ranks then.
        copied: of each linear's weight, then each one's bias: its Shard where several ranks hold parts of it.
        reduce_dtype: in which parts of dh are summed; None for their own.
        give: which norm output is returned beside y: "own" rows, "all" rows, or None.
        moves: which way rows move; symmetric: how a small y is summed, see `sum_owned`; name: for messages.
    """

    kind: str | None
    eps: float
    group: TPGroup
    less_one: bool = False
    gather_rows: bool = False
    own_rows: bool = False
    sum_input: bool = False
    sum_output: bool = False
    scatter_rows: bool = False
    copied: tuple[Shard | None, ...] = ()
    reduce_dtype: torch.dtype | None = None
    give: str | None = None
    moves: Moves = BY_SIZE
    symmetric: str | None = None
    name: str = "LayerNormLinear"

    def deal(self, rows: int) -> Dealt:
        """How `rows`, of all ranks together, are dealt: equally many to each.

        Raises:
            KernelUnsupported: copies are asked for between ranks that can't copy.
        """
        group, own = self.group, rows // self.group.tp_size
        exchange = find_exchange(group)
        exchange.check(self.moves, self.name)
        return Dealt(exchange, group.tp_rank, group.tp_size, (rows,), (own,), self.reduce_dtype, moves=self.moves)

    def deal_sum(self, rows: int, width: int, dtype: torch.dtype) -> Dealt | None:
        """How rows that all ranks have are dealt while they are summed; None: the sum is one collective.

        Raises:
            KernelUnsupported: copies are asked for between ranks that can't copy.
        """
        find_exchange(self.group).check(self.moves, self.name)
        return deal_sum(self.group, self.moves, rows, rows * width * dtype.itemsize, self.reduce_dtype)

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
            return self.group.all_reduce(grad, dtype=widen(grad))
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
            weight gradient is wanted; dtype: what is multiplied is cast to; gather: of the normalised rows, once it has begun.
    """

    x: Tensor
    gamma: Tensor | None
    beta: Tensor | None
    dy: list[Tensor | None]
    dtype: torch.dtype
    gather: Gather | None = None

    @torch.no_grad()
    def begin(self, how: NormProduct) -> None:
        """Normalise the input again; where its rows are dealt, begin to gather them."""
        h = how.normalise(self.x.reshape(-1, self.x.shape[-1]), self.gamma, self.beta)[0]
        dealt = how.deal(h.shape[0] * how.group.tp_size) if how.gather_rows else None
        self.gather = Gather(h) if dealt is None else dealt.exchange.gather(h, how.moves.gather, lent=True)

    @torch.no_grad()
    def weight_gradients(self, how: NormProduct, sink: Sink | None = None) -> list[Tensor | None]:
        """dw `[N_i, K]` of each linear whose dy is there, None for the others.

        Args:
            sink: whose weights' `main_grad` takes the gradients; zeros are returned for those.
        """
        if self.gather is None:
            self.begin(how)
        assert self.gather is not None
        rows = self.gather.wait_all().to(self.dtype)
        there = [dy for dy in self.dy if dy is not None]
        joined = view_side_by_side(there) if len(there) > 1 and sink is None else None
        if joined is not None:
            products = iter(multiply_gradient(joined, rows).split([dy.shape[1] for dy in there]))
            return [None if dy is None else how.complete(next(products), i) for i, dy in enumerate(self.dy)]
        found: list[Tensor | None] = []
        for i, dy in enumerate(self.dy):
            if dy is None:
                found.append(None)
            elif sink is None:
                found.append(how.complete(multiply_gradient(dy, rows), i))
            elif how.is_complete(i):
                found.append(add_product(sink.parameters[i], sink.names[i], dy, rows))
            else:  # in main_grad's dtype already while it is summed
                dtype = find_main_grad(sink.parameters[i], sink.names[i]).dtype
                dw = how.complete(multiply_gradient(dy, rows, dtype), i)
                found.append(add_gradient(sink.parameters[i], sink.names[i], dw))
        return found


def multiply_gradient(dy: Tensor, rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`dy.T @ rows`: `[M, N]`, `[M, K]` -> `[N, K]`, in their dtype or the one named."""
    product = None
    if dtype is None:
        product = wgrad(dy, rows)
    if product is None:
        product = rows.new_empty(dy.shape[1], rows.shape[1], dtype=dtype)
        wgrad(dy, rows, product, overwrite=True)
    return product


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
        """Compute the gradients, and return what autograd is given: zeros for what was added to a `main_grad`.

        Raises:
            AutoTPError: a weight has no `main_grad`.
        """
        self.check([dy is not None for dy in product.dy])
        return product.weight_gradients(how, self if self.main else None)

    def check(self, wanted: Sequence[bool]) -> None:
        """Look for each `main_grad` that is to take a gradient, before anything is added and before any collective.

        Raises:
            AutoTPError: a weight has none.
        """
        for weight, name, want in zip(self.parameters, self.names, wanted, strict=True):
            if want and self.main:
                find_main_grad(weight, name)
