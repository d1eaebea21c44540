"""What happens where a module is entered, where it reads its parameters, and where its output leaves.

A module that itself is left as it is may stand at the border of sharded computation: an argument enters it, its output is a
partial sum (stacked experts), or it reads a parameter of which each rank sees only part of the work. All of that is part of
autograd, at the module's own forward: no hook on a Parameter or a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..collectives import copy_to_group, keep_on_first, reduce_from_group, sum_copies
from ..comm import TPGroup
from ..errors import PlanError
from ..index_runs import Run, take_runs
from ..shard import Shard
from .base import TensorParallel_Layer, insert_class
from .fully import refuse_inner
from .tokens import TokenStream


@dataclass(frozen=True)
class Entry:
    """What is done to one argument of a forward, on this rank.

    Attributes:
        argument: parameter name; position: its place when passed positionally, None if it never is.
        sums: sum its gradient over the ranks.
        dim: dimension of which this rank takes the indices `runs` of each `period`; None to take all.
    """

    argument: str
    position: int | None
    sums: bool
    dim: int | None = None
    period: int = 0
    runs: tuple[Run, ...] = ()


@dataclass(frozen=True)
class Border:
    """What a RegionModule does around its own forward.

    Attributes:
        summed, once, copied: parameter names; entries: arguments that enter; outputs: indices of outputs that are partial.
        reduce_dtype: dtype in which activations are summed; None for their own.
        tokens: the stream whose dealt rows an argument may have been gathered from.
    """

    summed: tuple[str, ...] = ()
    once: tuple[str, ...] = ()
    copied: tuple[str, ...] = ()
    entries: tuple[Entry, ...] = ()
    outputs: tuple[int, ...] = ()
    reduce_dtype: torch.dtype | None = None
    tokens: TokenStream | None = None

    @cached_property
    def slices(self) -> tuple[Entry, ...]:
        """The entries that do something where no gradient is wanted."""
        return tuple(entry for entry in self.entries if entry.dim is not None)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters that are read in another way than they lie there."""
        return (*self.summed, *self.once, *self.copied)

    def __bool__(self) -> bool:
        return bool(self.names or self.entries or self.outputs)


class RegionModule(TensorParallel_Layer):
    """A module with sharded computation inside, mixed in front of its own class.

    | what | forward | backward |
    |---|---|---|
    | `summed` parameter | identity | all-reduce: each rank saw part of the work |
    | `once` parameter | zeros but on rank 0 | rank 0's, on every rank |
    | `copied` parameter | identity | sum over the holders of each index |
    | `entries`: argument | identity, then this rank's part | all-reduce of the part, put in its place |
    | `outputs` | all-reduce | identity |

    `_parameters` is swapped for the length of the forward, so whatever reads a parameter by name finds what autograd must see.

    Attributes:
        autotp_border: all of that; one attribute, whose name no module has of its own.
    """

    autotp_border: Border

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        border, training = self.autotp_border, torch.is_grad_enabled()
        for entry in border.entries if training else border.slices:
            args = enter_argument(self, entry, args, kwargs)
        if border.once or (training and (border.summed or border.copied)):
            swapped = swap_parameters(self, border)
            try:
                output = super().forward(*args, **kwargs)
            finally:
                for owner, own in swapped:
                    owner.__dict__["_parameters"] = own
        else:
            output = super().forward(*args, **kwargs)
        return reduce_outputs(self, border, output) if border.outputs else output


def swap_parameters(module: RegionModule, border: Border) -> list[tuple[Any, dict[str, Any]]]:
    """Put the parameters as the forward reads them in the place of the module's own; `(module, what was there)` of each."""
    tp, swapped = module.tp, {}

    def put(name: str, read: Callable[[Any, Any, str], Tensor]) -> None:
        holder, _, leaf = name.rpartition(".")
        owner: Any = module.get_submodule(holder) if holder else module
        if id(owner) not in swapped:
            swapped[id(owner)] = (owner, owner._parameters)
            owner.__dict__["_parameters"] = dict(owner._parameters)
        parameter = owner._parameters[leaf]
        if parameter is not None:
            refuse_inner(parameter, module.full_name, name)
            owner._parameters[leaf] = read(parameter, owner, leaf)

    for name in border.once:
        put(name, lambda parameter, owner, leaf: keep_on_first(parameter, tp))
    if torch.is_grad_enabled():
        for name in border.summed:
            put(name, lambda p, owner, leaf: copy_to_group(p, tp, _wide(p)) if p.requires_grad else p)
        for name in border.copied:
            put(name, lambda p, owner, leaf: sum_copies(p, tp, owner.shards[leaf]) if p.requires_grad else p)
    return list(swapped.values())


def _wide(parameter: Tensor) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)


def enter_argument(module: RegionModule, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """`args` with one argument entered; one passed by keyword is replaced in `kwargs`, one not given is left alone."""
    if entry.argument in kwargs:
        kwargs[entry.argument] = enter_value(module, entry, kwargs[entry.argument])
    elif entry.position is not None and entry.position < len(args):
        value = enter_value(module, entry, args[entry.position])
        return (*args[: entry.position], value, *args[entry.position + 1 :])
    return args


def enter_value(module: RegionModule, entry: Entry, value: Any) -> Any:
    """`value`, its gradient summed and this rank's part taken, as `entry` says; each tensor of a tuple or list alike.

    Raises:
        PlanError: there is no part to take of it.
    """
    if isinstance(value, Tensor):
        if entry.sums and value.requires_grad and torch.is_grad_enabled():
            border = module.autotp_border
            gathered = None if border.tokens is None else border.tokens.enter(value, border.reduce_dtype)
            value = copy_to_group(value, module.tp, border.reduce_dtype) if gathered is None else gathered
        return value if entry.dim is None else take_part_of(value, entry, module)
    if type(value) in (tuple, list):
        return type(value)(enter_value(module, entry, each) for each in value)
    if value is not None and entry.dim is not None:
        raise PlanError(
            f"{module.full_name}: the plan takes each rank's part of argument '{entry.argument}', which is a "
            f"{type(value).__name__} and no tensor: leave that module whole"
        )
    return value


def take_part_of(x: Tensor, entry: Entry, module: RegionModule) -> Tensor:
    """This rank's indices of each period of `x` along `entry.dim`; a dimension of 1 broadcasts and is left alone.

    Raises:
        PlanError: the dimension is no multiple of the period.
    """
    dim, period = (entry.dim or 0) % max(1, x.ndim), entry.period
    size = x.shape[dim] if x.ndim else 0
    if size == period:
        return take_runs(x, dim, entry.runs)
    if size == 1:
        return x
    if size == 0 or size % period:
        raise PlanError(
            f"{module.full_name}: argument '{entry.argument}' has shape {tuple(x.shape)}, but the plan deals dim {entry.dim} in "
            f"periods of {period}: make the plan again with inputs= like these, or leave that module whole"
        )
    return take_runs(x.unflatten(dim, (-1, period)), dim + 1, entry.runs).flatten(dim, dim + 1)


def reduce_outputs(module: RegionModule, border: Border, output: Any) -> Any:
    """`output` with its partial sums added up over the ranks; an output that is None is left alone.

    Raises:
        PlanError: there is no such output.
    """
    tp, dtype = module.tp, border.reduce_dtype
    if isinstance(output, Tensor) and border.outputs == (0,):
        return reduce_from_group(output, tp, dtype)
    is_dict = isinstance(output, dict)
    keys: Sequence[Any] = list(output) if is_dict else range(len(output)) if isinstance(output, tuple | list) else ()
    if not keys or max(border.outputs) >= len(keys):
        raise PlanError(
            f"{module.full_name}: the plan reduces output(s) {list(border.outputs)}, but forward returned a "
            f"{type(output).__name__} of {len(keys)}: make the plan again with inputs= like these"
        )
    values: Any = output if is_dict else list(output)
    for index in border.outputs:
        value = values[keys[index]]
        if value is not None:
            values[keys[index]] = reduce_from_group(value, tp, dtype)
    if isinstance(output, tuple):
        return type(output)(*values) if hasattr(output, "_fields") else tuple(values)
    return values


def install_region(module: Any, group: TPGroup, shards: dict[str, Shard], name: str, border: Border) -> None:
    """Make `module` a RegionModule in place; it may be a layer of another kind already.

    Raises:
        PlanError: it has no such parameter.
    """
    for key in border.names:
        holder, _, leaf = key.rpartition(".")
        if leaf not in (module.get_submodule(holder) if holder else module)._parameters:
            raise PlanError(f"{name} ({type(module).__name__}) has no parameter '{key}' of its own: {list(module._parameters)}")
    insert_class(module, RegionModule)
    module.tp, module.shards, module.full_name, module.autotp_border = group, shards, name, border
