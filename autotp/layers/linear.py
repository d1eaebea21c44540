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

from collections.abc import Iterable
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..collectives import (
    copy_columns_to_group,
    keep_on_first,
    split_columns_to_group,
)
from ..comm import TPGroup
from ..errors import PlanError
from ..groups import resolve_group
from ..kernels.dispatch import Problem, select
from ..kernels.main_grad import into_main_grad
from ..shard import Cut, Shard
from .base import TensorParallel_Layer, insert_class
from .embedding import gather_columns
from .linear_product import LinearProduct
from .product import watches_operations
from .siblings import SiblingInput
from .tokens import TokenStream


class ParallelLinear(LinearProduct):
    """What the linears have in common, and what DeepSpeed's users call on them."""

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
