"""Column- and row-parallel linears: what `nn.Linear`, transformers' Conv1D and convolutions are rewritten into.

M rows, K in, N out, T ranks.

| layer | weight | forward | backward |
|---|---|---|---|
| `LinearLayer` | `[N/T, K]`, bias `[N/T]` | `y_local = x @ w.T + b` | `dx = all_reduce(dy_local @ w)`, once for all siblings |
| `LinearAllreduce` | `[N, K/T]`, bias `[N]` whole | `y = all_reduce(x_local @ w.T) + b` | no collective |
| `LinearPartial` | the same | `y_partial = x_local @ w.T + (b on rank 0)`, reduced by a module around it | `db` = rank 0's |

The Conv1D twins hold their weights transposed, `[K, N/T]` and `[K/T, N]`. Convolutions are in conv.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..collectives import (
    copy_columns_to_group,
    copy_to_group,
    keep_on_first,
    reduce_owned_from_group,
    split_columns_to_group,
    sum_copies,
)
from ..comm import TPGroup, resolve_group
from ..errors import PlanError
from ..exchange import Gather
from ..kernels import few_rows
from ..kernels.dealt import Dealt, multiply_gathered, multiply_scattered
from ..kernels.dispatch import Problem, select
from ..kernels.main_grad import into_main_grad
from ..kernels.moves import BY_SIZE
from ..kernels.product import ProductSpec, multiply, multiply_uncompiled
from ..shard import Cut, Shard
from .base import TensorParallel_Layer, insert_class
from .embedding import gather_columns
from .fp8 import Scaling
from .overlap import OverlapOptions, choose_moves, deal_sums, read_symmetric, refuse_copies
from .pending import pend
from .product import make_spec, sum_owned, watches_operations
from .siblings import SiblingInput
from .tokens import TokenStream


class ParallelLinear(OverlapOptions, TensorParallel_Layer):
    """What the linears have in common, and what DeepSpeed's users call on them.

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

    def __init__(self, module: Any, mp_group: Any = None, skip_partition: bool = False, name: str | None = None) -> None:
        """Shard `module` (an `nn.Linear`, or a Conv1D for the twins) over `mp_group`; the Parameter objects are taken over.

        Args:
            module: the whole linear; it shares its Parameters with this layer, so it is sharded too.
            mp_group: process group, one-axis mesh or TPGroup; None for a single rank.
            skip_partition: the module's weight is this rank's part already.
            name: for messages.

        Raises:
            PlanError: the module is of another kind, whose layout or forward this layer would silently replace.
        """
        plain = Conv1D if isinstance(self, Conv1D) else nn.Linear
        if not isinstance(module, plain) or type(module).forward is not plain.forward:
            raise PlanError(
                f"{type(self).__name__} stands for {plain.__name__}, and {name or 'the module'} is a {type(module).__name__}: "
                f"nn.Linear has LinearLayer and LinearAllreduce, Conv1D its own twins, and parallelize keeps a subclass' forward"
            )
        nn.Module.__init__(self)
        self.__dict__.update({k: v for k, v in module.__dict__.items() if not k.startswith("_")})
        self._parameters.update(module._parameters)
        group = TPGroup(None, module.weight.device) if mp_group is None else resolve_group(mp_group)
        shape = list(module.weight.shape)
        if skip_partition:
            shape[self.cut_dim] *= group.tp_size
        weight = Shard.even(shape, self.cut_dim, group.tp_size)
        prepare(self, group, self.shards_of(weight, module.bias is not None), name or type(module).__name__)
        if not skip_partition:
            self._tp_partition()

    @property
    def accumulate_into_main_grad(self) -> bool:
        """Whether the gradients of weight and bias are added to their `main_grad`."""
        return self.__dict__.get("accumulates", False)

    @accumulate_into_main_grad.setter
    def accumulate_into_main_grad(self, enabled: bool) -> None:
        self.__dict__["accumulates"] = enabled
        if self.siblings is not None:
            self.siblings.forget_options()

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        if self.siblings is not None:
            self.siblings.follow_copy(self)

    @classmethod
    def shards_of(cls, weight: Shard, bias: bool) -> dict[str, Shard]:
        """Parameter name -> Shard, given the weight's: a column layer's bias is cut as its outputs are."""
        cut = next((c for c in weight.cuts if c.dim == cls.out_dim), None)
        if not bias or cut is None:
            return {"weight": weight}
        return {"weight": weight, "bias": Shard((weight.shape[cls.out_dim],), weight.tp_size, (Cut(0, cut.runs),))}

    @classmethod
    def from_weights(cls, weight: Tensor, bias: Tensor | None = None, mp_group: Any = None, name: str | None = None) -> Self:
        """A layer of the full `weight` and `bias`, of which this rank keeps its part."""
        return cls(_plain_linear(cls, weight, bias), mp_group, name=name)

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
            if wanted:
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
        if "weight" in self.copied and weight.requires_grad:
            weight = sum_copies(weight, self.tp, self.copied["weight"])
        if bias is not None and "bias" in self.copied and bias.requires_grad:
            bias = sum_copies(bias, self.tp, self.copied["bias"])
        if enters and x.requires_grad:
            x = copy_to_group(x, self.tp, self.reduce_dtype)
        if not leaves:
            return self.run(x, weight, bias)
        y = reduce_owned_from_group(self.run(x, weight), self.tp, self.reduce_dtype)
        return y if bias is None else y + bias.to(y.dtype)

    def _multiply_accumulating(self, x: Tensor, weight: Tensor, bias: Tensor | None, enters: bool, leaves: bool) -> Tensor:
        """The same as one step of autograd, which adds to main_grad; a compiler would not see that, and is interrupted."""
        return multiply_uncompiled(self._make_spec(enters, leaves), x, (weight,), (bias,))

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        siblings, weight = self.siblings, self._parameters.get("weight")
        before = None if weight is None or siblings is None else weight.data_ptr()
        super()._apply(fn, recurse)
        if siblings is not None and siblings.members > 1:
            weight = self._parameters.get("weight")
            siblings.follow(weight is not None and weight.data_ptr() != before)
        return self

    def gather_params(self, params: Iterable[nn.Parameter] | None = None) -> None:
        """Give `params` (default: all sharded ones) their full values on every rank; `_tp_partition` splits them again."""
        chosen = None if params is None else {id(p) for p in params}
        for name, shard in self.shards.items():
            parameter = self._parameters[name]
            if parameter is not None and (chosen is None or id(parameter) in chosen):
                parameter.data = self.tp.all_gather(parameter.data, shard)

    @torch.no_grad()
    def _tp_partition(self, params: Iterable[nn.Parameter] | None = None) -> None:
        """Keep this rank's part of `params` (default: all sharded ones), which hold their full values."""
        chosen = None if params is None else {id(p) for p in params}
        for name, shard in self.shards.items():
            parameter = self._parameters[name]
            if parameter is not None and (chosen is None or id(parameter) in chosen):
                parameter.data = shard.split(parameter.data, self.tp.tp_rank).clone()


class LinearLayer(ParallelLinear, nn.Linear):
    """A linear split over its outputs.

    Attributes:
        siblings: the SiblingInput shared with the linears that read the same input; None where it was entered elsewhere.
        place: which of them this is; -1 where it is computed alone.
        gather_output: all-gather the outputs, for computation that is replicated.
    """

    place = -1
    gather_output = False

    def forward(self, input: Tensor) -> Tensor:
        siblings = self.siblings
        if siblings is not None and siblings.members > 1:
            y = siblings.multiply(self, input)
        else:
            enters = siblings is not None and self.tp.tp_size > 1
            tokens = None if siblings is None else siblings.tokens
            local = None if tokens is None else tokens.find_local(input)
            if local is None or tokens is None:
                y = self.multiply(input, enters=enters)
            elif watches_operations() or self.scaling is not None:
                y = self.multiply(siblings.enter(input))  # type: ignore[union-attr]
            else:
                y = self.multiply_gathered(input, local, tokens)
        return gather_columns(y, self.shards["weight"], self.out_dim, self.tp) if self.gather_output else y


class LinearAllreduce(ParallelLinear, nn.Linear):
    """A linear split over its inputs; the ranks' partial outputs are summed, then the bias is added once.

    Attributes:
        ends: SiblingInputs of the region that this layer closes.
        split_input: the input is whole: take this rank's part of it first.
        tokens: the stream whose forward, where it deals tokens, takes this rank's rows of the sum.
    """

    cut_dim = 1
    ends: tuple[SiblingInput, ...] = ()
    split_input = False
    tokens: TokenStream | None = None

    def forward(self, input: Tensor) -> Tensor:
        for entered in self.ends:
            entered.clear()
        if self.tp.tp_size == 1:
            return self.multiply(input)
        if self.split_input:
            input = split_columns(input, self.shards["weight"], self.in_dim, self.tp)
        tokens = self.tokens
        if tokens is not None and tokens.scatters:
            return self.multiply_scattered(input, tokens)
        return self.multiply(input, leaves=True)


class LinearPartial(ParallelLinear, nn.Linear):
    """`LinearAllreduce` whose sum is left to the module around it, which adds up more than this layer's output."""

    cut_dim = 1
    ends: tuple[SiblingInput, ...] = ()

    def forward(self, input: Tensor) -> Tensor:
        for entered in self.ends:
            entered.clear()
        weight, bias = self.weight, self.bias
        if self.scaling is None and not self.packed and not (self.accumulate_into_main_grad and torch.is_grad_enabled()):
            return self.run(input, weight, None if bias is None else keep_on_first(bias, self.tp))
        y = self.multiply_partial(input)
        if bias is None:
            return y
        if bias.requires_grad and torch.is_grad_enabled() and self.accumulate_into_main_grad:
            bias = into_main_grad(bias, f"{self.full_name}.bias")
        return y + keep_on_first(bias, self.tp).to(y.dtype)


class Conv1DLayer(ParallelLinear, Conv1D):
    """`LinearLayer` for transformers' Conv1D: weight `[K, N/T]`."""

    op, out_dim, in_dim, cut_dim = "linear_transposed", 1, 0, 1
    place = -1
    gather_output = False
    forward = LinearLayer.forward  # type: ignore[assignment]
    __repr__ = nn.Module.__repr__  # Conv1D's own knows nothing of shards


class Conv1DAllreduce(ParallelLinear, Conv1D):
    """`LinearAllreduce` for transformers' Conv1D: weight `[K/T, N]`."""

    op, out_dim, in_dim, cut_dim = "linear_transposed", 1, 0, 0
    ends: tuple[SiblingInput, ...] = ()
    split_input = False
    tokens: TokenStream | None = None
    forward = LinearAllreduce.forward  # type: ignore[assignment]
    __repr__ = nn.Module.__repr__


class Conv1DPartial(ParallelLinear, Conv1D):
    """`LinearPartial` for transformers' Conv1D: weight `[K/T, N]`."""

    op, out_dim, in_dim, cut_dim = "linear_transposed", 1, 0, 0
    ends: tuple[SiblingInput, ...] = ()
    forward = LinearPartial.forward  # type: ignore[assignment]
    __repr__ = nn.Module.__repr__


class EnteringLinear(TensorParallel_Layer):
    """Any linear kept whole of whose output only some columns enter sharded computation (MLA's rotary columns).

    The gradient of columns `start:stop` of each pair in `columns` is summed over the ranks; the others' is complete already.
    """

    columns: tuple[tuple[int, int], ...]
    reduce_dtype: torch.dtype | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return copy_columns_to_group(super().forward(*args, **kwargs), self.tp, self.columns, self.reduce_dtype)


def split_columns(x: Tensor, weight: Shard, dim: int, group: TPGroup) -> Tensor:
    """This rank's part of `x` `[..., K]`, whose columns are dealt as `weight` deals its dimension `dim`."""
    cut = next(cut for cut in weight.cuts if cut.dim == dim)
    flat = x.reshape(-1, x.shape[-1])
    local = split_columns_to_group(flat, group, cut)
    return local.view(*x.shape[:-1], local.shape[-1])


def prepare(module: Any, group: TPGroup, shards: dict[str, Shard], name: str, reduce_dtype: torch.dtype | None = None) -> None:
    """Set what a linear's sharded forward reads; its class must be a layer's already, its data may come later.

    Raises:
        PlanError: the weight is cut along the wrong dimension, or ranks hold copies of inputs, which would be counted twice.
    """
    module.tp, module.shards, module.full_name = group, shards, name
    if issubclass(type(module), ParallelLinear):
        dims = [cut.dim for cut in shards["weight"].cuts]
        if dims not in ([], [module.cut_dim]):
            raise PlanError(
                f"{name}: the weight of a {type(module).__name__} is cut on dim {module.cut_dim}, the plan cuts {dims}"
            )
        module.run = select(Problem(module.op, group.device.type, module.weight.dtype))
        module.copied = {key: shard for key, shard in shards.items() if shard.copied is not None}
        if module.copied and module.cut_dim == module.in_dim:
            raise PlanError(f"{name}: several ranks hold the same inputs of this linear, so their products would be added twice")
        module.reduce_dtype = reduce_dtype
        if hasattr(module, "gather_output"):
            module.siblings = SiblingInput(group, 1, reduce_dtype)
        set_linear_sizes(module, shards["weight"].local_shape(group.tp_rank))


def set_linear_sizes(module: Any, shape: tuple[int, ...]) -> None:
    """Make `in_features` and `out_features` (`nx`, `nf` of a Conv1D) those of a weight of `shape`."""
    if isinstance(module, Conv1D):
        module.nx, module.nf = shape
    elif isinstance(module, nn.Linear):
        module.out_features, module.in_features = shape


def layer_class(module: nn.Module, row: bool) -> type[ParallelLinear]:
    """The layer that a linear becomes.

    Raises:
        PlanError: it is no linear.
    """
    if isinstance(module, Conv1D):
        return Conv1DAllreduce if row else Conv1DLayer
    if isinstance(module, nn.Linear):
        return LinearAllreduce if row else LinearLayer
    raise PlanError(f"{type(module).__name__} is neither nn.Linear nor Conv1D, so it has no {'row' if row else 'column'} form")


def rewrite_linear(
    module: nn.Module, layer: type[ParallelLinear], group: TPGroup, shards: dict[str, Shard], name: str, dtype: torch.dtype | None
) -> None:
    """Turn `module` into `layer` in place; the data of its Parameters is cut elsewhere."""
    insert_class(module, layer)
    prepare(module, group, shards, name, dtype)


def _plain_linear(cls: type[ParallelLinear], weight: Tensor, bias: Tensor | None) -> nn.Module:
    out_features, in_features = weight.shape[cls.out_dim], weight.shape[cls.in_dim]
    if issubclass(cls, Conv1D):
        module: Any = Conv1D(out_features, in_features)
    else:
        module = nn.Linear(in_features, out_features, bias is not None, device="meta")
    module.weight = nn.Parameter(weight)
    module.bias = None if bias is None else nn.Parameter(bias)
    return module
