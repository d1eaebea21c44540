"""Frozen weights in 4 or 8 bits: each rank's part is quantised by itself, in the formats of bitsandbytes and torchao.

A quantised linear keeps its name, its bias and its kind (column, row, whole); its class becomes three things together:

| part | what it does |
|---|---|
| `QuantisedShard`, before a sharded linear | all its products go through the format's; the sums over the ranks stay |
| `Packed`, a format of packed.py | multiplies the quantised weight, and gives its values back |
| the library's own linear, last | what peft looks for: it adds adapters, merges and counts as on the unsharded model |
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor, nn

from ..collectives import copy_to_group, reduce_from_group, sum_copies
from .linear import LinearAllreduce, LinearLayer, LinearPartial, ParallelLinear
from .packed import FORMATS, ONLY_ADAPTERS, Packed
from .tokens import TokenStream

SHARDED = (LinearLayer, LinearAllreduce, LinearPartial)


class QuantisedShard(ParallelLinear):
    """A sharded linear of a quantised weight: products of its part, and the sums around them."""

    packed = True

    def multiply(self, x: Tensor, enters: bool = False, leaves: bool = False) -> Tensor:
        if enters and x.requires_grad and torch.is_grad_enabled():
            x = copy_to_group(x, self.tp, self.reduce_dtype)
        bias = self.bias
        if bias is not None and "bias" in self.copied and bias.requires_grad:
            bias = sum_copies(bias, self.tp, self.copied["bias"])
        if not leaves:
            return self.multiply_packed(x, bias)
        part = self.multiply_packed(x)
        if not part.requires_grad:
            return self.finish(part, bias)
        y = reduce_from_group(part, self.tp, self.reduce_dtype)  # in memory of its own: the part may be a view
        return y if bias is None else y + bias.to(y.dtype)

    def multiply_partial(self, x: Tensor) -> Tensor:
        return self.multiply_packed(x)

    def multiply_scattered(self, x: Tensor, tokens: TokenStream) -> Tensor:
        return self.add_bias_of_rows(tokens.scatter(self.multiply_packed(x), self.reduce_dtype))

    def multiply_gathered(self, x: Tensor, local: Tensor, tokens: TokenStream) -> Tensor:
        assert self.siblings is not None
        return self.multiply(self.siblings.enter(x))

    multiply_packed: Any  # the format's


def find_plain(module: nn.Module) -> type[nn.Module]:
    """The class of a linear without what was inserted before it: one of SHARDED, or that of the unsharded model."""
    cls = type(module)
    while "plain_class" in cls.__dict__:
        cls = cls.__dict__["plain_class"]
    return cls


@torch.no_grad()
def pack_weight(weight: Tensor, kind: str, options: dict[str, Any]) -> tuple[nn.Parameter, dict[str, Any]]:
    """A weight `[N, K]` in a format of FORMATS, and the attributes of a module that holds it."""
    packed, state = FORMATS[kind].packed.pack(weight.detach(), **options)
    return packed, {**state, "plain": (weight.dtype, weight.requires_grad)}


def hold_packed(module: Any, kind: str, weight: nn.Parameter, state: dict[str, Any]) -> None:
    """Make a linear, rewritten or whole, one of a quantised weight; what was inserted before it stays there."""
    module._parameters["weight"] = weight
    module.__dict__.update(state, only_runs=ONLY_ADAPTERS)
    module.__class__ = _combine(type(module), kind)


@torch.no_grad()
def restore_weight(module: Any) -> None:
    """Give a quantised linear a plain weight of the quantised values, in the dtype that it had."""
    dtype, trained = module.plain
    weight = module.unpack().to(dtype).contiguous()
    for name in ("plain", "only_runs", *module.state_names):
        module.__dict__.pop(name, None)
    module._parameters["weight"] = nn.Parameter(weight, requires_grad=trained)
    module.__class__ = type(module).__dict__["plain_class"]


@functools.lru_cache(maxsize=256)
def _combine(cls: type, kind: str) -> type:
    found = FORMATS[kind]
    library, _, name = found.linear.rpartition(".")
    foreign = getattr(importlib.import_module(library), name)
    first = (QuantisedShard, cls) if issubclass(cls, ParallelLinear) else () if cls is nn.Linear else (cls,)
    last = () if foreign is nn.Linear else (foreign,)
    return type(cls.__name__, (*first, found.packed, *last), {"__module__": cls.__module__, "plain_class": cls})


def is_packed(module: nn.Module) -> bool:
    """Whether the linear's weight is kept in a format of FORMATS."""
    return isinstance(module, Packed)


def list_packed(model: nn.Module) -> set[str]:
    """The full names of the quantised weights below `model`."""
    return {f"{name}.weight" for name, module in model.named_modules() if is_packed(module)}
