"""How a split linear multiplies: in its tensors' dtype or in FP8, with or without gradients, of whole or of dealt rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..collectives import copy_to_group, reduce_owned_from_group, sum_copies
from ..exchange import Gather
from ..kernels import few_rows
from ..kernels.dealt import Dealt, multiply_gathered, multiply_scattered
from ..kernels.main_grad import into_main_grad
from ..kernels.moves import BY_SIZE
from ..kernels.product import ProductSpec, multiply, multiply_uncompiled
from ..shard import Shard
from .base import TensorParallel_Layer
from .fp8 import Scaling
from .overlap import OverlapOptions, choose_moves, deal_sums, read_symmetric, refuse_copies
from .pending import pend
from .product import make_spec, sum_owned, watches_operations
from .siblings import SiblingInput
from .tokens import TokenStream


class LinearProduct(OverlapOptions, TensorParallel_Layer):
    """The products of a linear that is split; each layer says which of them its forward is.

    Attributes:
        run: the dispatched product.
        copied: parameter name -> Shard, for each of which several ranks hold parts.
        reduce_dtype: dtype in which partial sums are added up; None for their own.
        accumulate_into_main_grad: add the gradients of weight and bias to their `main_grad` (see kernels/main_grad.py).
        scaling: how its products are FP8; None where they are of the tensors' own dtype.
        packed: whether its weight is quantised, so that all products are the format's (see quantised.py).
    """

    packed = False
    op = "linear"
    out_dim, in_dim = 0, 1  # which dimension of the weight is which
    cut_dim = 0
    run: Callable[..., Tensor]
    copied: dict[str, Shard]
    reduce_dtype: torch.dtype | None = None
    can_accumulate = True
    siblings: SiblingInput | None = None
    scaling: Scaling | None = None
    weight: nn.Parameter
    bias: nn.Parameter | None

    @property
    def accumulate_into_main_grad(self) -> bool:
        """Whether the gradients of weight and bias are added to their `main_grad`."""
        return self.__dict__.get("accumulates", False)

    @accumulate_into_main_grad.setter
    def accumulate_into_main_grad(self, enabled: bool) -> None:
        self.__dict__["accumulates"] = enabled
        if self.siblings is not None:
            self.siblings.forget_options()

    def multiply(self, x: Tensor, enters: bool = False, leaves: bool = False) -> Tensor:
        """`x @ w.T + b`; x's gradient is summed over the ranks where it `enters`, the product where it `leaves`."""
        weight, bias = self.weight, self.bias
        wanted = torch.is_grad_enabled() and (
            x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
        )
        scaling = None if self.scaling is None or few_rows.fits(x, weight, bias) else self.scaling
        if scaling is not None:
            refuse_copies([self])
            stored = self._buffers.get("weight_scale")
            if stored is not None:
                return self._multiply_stored(scaling, x, stored, enters and wanted, leaves)
            if wanted and (self.accumulate_into_main_grad or not scaling.is_traced):
                return scaling.multiply(self._make_spec(enters, leaves), x, (weight,), (bias,))[0]
        elif (leaves or (enters and wanted and x.requires_grad)) and not watches_operations():
            sums = deal_sums([self], self.tp, x, weight.shape[self.out_dim if leaves else self.in_dim], self.reduce_dtype)
            if sums is not None:
                return multiply(self._make_spec(enters, leaves)._replace(sums=sums), x, (weight,), (bias,))
        if wanted and self.accumulate_into_main_grad:
            return self._multiply_accumulating(x, weight, bias, enters, leaves)
        kind = read_symmetric(self) if leaves else None
        if wanted and kind is not None and not watches_operations():
            return multiply(self._make_spec(enters, leaves), x, (weight,), (bias,))
        if wanted:
            return self._multiply_plain(x, weight, bias, enters, leaves)
        run = self.run if scaling is None else scaling.run
        if not leaves:
            return run(x, weight, bias)
        part = run(x, weight)
        pending = pend(part, self.tp, bias, self.reduce_dtype) if kind is None else None
        if pending is not None:
            return pending
        y = sum_owned(part, self.tp, self.reduce_dtype, None if watches_operations() else kind)
        return y if bias is None else y.add_(bias.to(y.dtype))

    def _multiply_stored(self, scaling: Scaling, x: Tensor, scale: Tensor, enters: bool, leaves: bool) -> Tensor:
        """`multiply` of a weight kept in 8 bits."""
        if enters and x.requires_grad:
            x = copy_to_group(x, self.tp, self.reduce_dtype)
        if not leaves:
            return scaling.multiply_stored(x, self.weight, scale, self.bias)
        return self.finish(scaling.multiply_stored(x, self.weight, scale), self.bias)

    def finish(self, part: Tensor, bias: Tensor | None) -> Tensor:
        """The sum over the ranks of `part`, which nobody else reads, and then the bias."""
        if not part.requires_grad:
            pending = pend(part, self.tp, bias, self.reduce_dtype) if read_symmetric(self) is None else None
            if pending is not None:
                return pending
        y = reduce_owned_from_group(part, self.tp, self.reduce_dtype)
        return y if bias is None else y + bias.to(y.dtype)

    def multiply_partial(self, x: Tensor) -> Tensor:
        """`x @ w.T`, this rank's part of a sum that the caller adds up."""
        weight = self.weight
        if self.scaling is not None:
            stored = self._buffers.get("weight_scale")
            if stored is not None:
                return self.scaling.multiply_stored(x, weight, stored)
            if self.accumulate_into_main_grad or not self.scaling.is_traced:
                return self.scaling.multiply(self._make_spec(), x, (weight,), (None,))[0]
        wanted = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
        multiply = self._multiply_accumulating if wanted and self.accumulate_into_main_grad else self._multiply_plain
        return multiply(x, weight, None, False, False)

    def multiply_scattered(self, x: Tensor, tokens: TokenStream) -> Tensor:
        """`x @ w.T` summed over the ranks, plus the bias: of this rank's rows alone."""
        scaling = self.scaling
        if scaling is not None:
            refuse_copies([self])
            if scaling.gathers_values and "weight_scale" not in self._buffers and not watches_operations() and x.ndim > 1:
                layout = tokens.describe(x, self.reduce_dtype, BY_SIZE)
                rows = x.reshape(-1, x.shape[-1])
                y = scaling.multiply_scattered(self._make_spec(), rows, self.weight, self.reduce_dtype)
                tokens.leave_whole_rows()
                return self.add_bias_of_rows(y.view(*layout.local_shape, -1))
        if watches_operations() or x.ndim < 2 or self.scaling is not None:
            return self.add_bias_of_rows(tokens.scatter(self.multiply_partial(x), self.reduce_dtype))
        dealt = tokens.describe(x, self.reduce_dtype, choose_moves([self], self.tp))
        y = multiply_scattered(self._dealt_spec(tokens, dealt), x, self.weight)
        tokens.leave_whole_rows()
        return self.add_bias_of_rows(y)

    def multiply_gathered(self, x: Tensor, local: Tensor, tokens: TokenStream) -> Tensor:
        """`x @ w.T + b`, the gradient summed over the ranks for the rows `local` that `x` was gathered from."""
        dealt = tokens.describe(x, self.reduce_dtype, choose_moves([self], self.tp))
        gather = Gather(x.detach().reshape(-1, x.shape[-1]))
        return multiply_gathered(self._dealt_spec(tokens, dealt), local, (self.weight,), (self.bias,), gather=gather)[0]

    def _dealt_spec(self, tokens: TokenStream, dealt: Dealt) -> ProductSpec:
        """How this layer multiplies rows that are dealt so; kept with the stream, of which copies of the model have their own."""
        key = self.run, self.reduce_dtype, self.accumulate_into_main_grad, dealt
        found = tokens.specs.get(self.full_name)
        if found is None or found[0] != key:
            found = tokens.specs[self.full_name] = key, self._make_spec()._replace(dealt=dealt)
        return found[1]

    def _make_spec(self, enters: bool = False, leaves: bool = False) -> ProductSpec:
        accumulates = self.accumulate_into_main_grad
        names = tuple(f"{self.full_name}.{key}" if accumulates else None for key in ("weight", "bias"))
        copied = (self.copied.get("weight"), self.copied.get("bias"))
        kind, turned = read_symmetric(self) if leaves else None, self.out_dim == 1
        return make_spec(self.run, self.tp, self.reduce_dtype, copied, names, enters, leaves, turned, kind=kind)

    def add_bias_of_rows(self, y: Tensor) -> Tensor:
        """This rank's rows `y` plus the bias, whose gradient is summed over the ranks: each one's is of its rows alone."""
        bias = self.bias
        if bias is None:
            return y
        if bias.requires_grad and torch.is_grad_enabled():
            accumulated = into_main_grad(bias, f"{self.full_name}.bias") if self.accumulate_into_main_grad else bias
            bias = copy_to_group(accumulated, self.tp, torch.promote_types(bias.dtype, torch.float32))
        return y + bias.to(y.dtype)

    def _multiply_plain(self, x: Tensor, weight: Tensor, bias: Tensor | None, enters: bool, leaves: bool) -> Tensor:
        """The same as operations that torch differentiates: on the host they cost less than one of ours."""
        run = self.run if self.scaling is None else self.scaling.run
        if "weight" in self.copied and weight.requires_grad:
            weight = sum_copies(weight, self.tp, self.copied["weight"])
        if bias is not None and "bias" in self.copied and bias.requires_grad:
            bias = sum_copies(bias, self.tp, self.copied["bias"])
        if enters and x.requires_grad:
            x = copy_to_group(x, self.tp, self.reduce_dtype)
        if not leaves:
            return run(x, weight, bias)
        y = reduce_owned_from_group(run(x, weight), self.tp, self.reduce_dtype)
        return y if bias is None else y + bias.to(y.dtype)

    def _multiply_accumulating(self, x: Tensor, weight: Tensor, bias: Tensor | None, enters: bool, leaves: bool) -> Tensor:
        """The same as one step of autograd, which adds to main_grad; a compiler would not see that, and is interrupted."""
        return multiply_uncompiled(self._make_spec(enters, leaves), x, (weight,), (bias,))
