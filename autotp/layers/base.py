"""What every rewritten module has in common: where its shards are recorded, and how full weights reach them.

A module is rewritten in place: its class gains a sharded forward, its name, hooks, Parameter objects and state-dict keys
stay. What is sharded is recorded on the *module* (`tp`, `shards`), because attributes on tensors and maps keyed by
Parameter die under deepcopy, `load_state_dict(assign=True)` and FSDP2.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ..comm import TPGroup
from ..errors import AutoTPError, PlanError
from ..shard import Shard

# The one global: Parameter -> the module that holds it, for callers that hand over bare parameter lists. Keyed by id,
# since Parameters compare elementwise; refilled from the modules by `index_parameters`.
_holder_of: dict[int, tuple[Callable[[], Any], weakref.ref, str]] = {}


class TensorParallel_Layer(nn.Module):
    """Base of the rewritten modules; mixed in front of the plain class it stands for.

    Attributes:
        tp: the TPGroup its parameters are dealt over.
        shards: parameter (or buffer) name -> Shard, for each that is not whole on every rank.
        full_name: the module's name in the model, for messages.
        can_accumulate: whether it can add its weights' gradients to their `main_grad`.
        accumulate_into_main_grad: whether it does.
    """

    tp: TPGroup
    shards: dict[str, Shard]
    full_name: str
    can_accumulate = False
    accumulate_into_main_grad: Any = False

    def extra_repr(self) -> str:
        rank = self.tp.tp_rank
        parts = [f"{name} {list(shard.local_shape(rank))} of {list(shard.shape)}" for name, shard in self.shards.items()]
        own = super().extra_repr()
        return ", ".join([*([own] if own else []), f"tp={rank}/{self.tp.tp_size}", *(parts or ["nothing split"])])

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        """Takes full tensors as well as this rank's own; a full one is split first."""
        for name, shard in self.shards.items():
            value = state_dict.get(prefix + name)
            own = getattr(self, name, None)
            if isinstance(own, DTensor) and isinstance(value, Tensor) and not isinstance(value, DTensor):
                raise AutoTPError(
                    f"'{prefix}{name}' is sharded further by FSDP2, whose load_state_dict takes DTensors: give whole weights to "
                    f"autotp.load_full_state_dict(model, state_dict)"
                )
            if value is not None and own is not None and tuple(value.shape) == shard.shape != tuple(own.shape):
                state_dict[prefix + name] = shard.split(value, self.tp.tp_rank).clone()
            elif value is not None and own is not None and own.shape != value.shape:
                args[-1].append(f"{prefix}{name}: give the whole tensor {shard.shape}, or this rank's part {tuple(own.shape)}.")
        super()._load_from_state_dict(state_dict, prefix, *args)


def insert_class(module: nn.Module, layer: type[nn.Module]) -> None:
    """Give `module` the forward of `layer`, keeping its own class' where that calls `super().forward`.

    A plain `nn.Linear` becomes the layer itself. A subclass that builds on the plain forward (a scaled embedding, say)
    gets the layer between itself and the plain class.

    Raises:
        PlanError: the module's class replaces the plain forward instead of building on it.
    """
    cls = type(module)
    plain = next((base for base in layer.__mro__ if base in (nn.Linear, nn.Embedding) or base.__name__ == "Conv1D"), None)
    if plain is None:  # a mixin for any module: it stands in front
        module.__class__ = _combine(layer, cls, cls)
        return
    if cls is plain:
        module.__class__ = layer
        return
    forward = cls.forward
    if forward is not plain.forward and "super" not in forward.__code__.co_names:
        raise PlanError(
            f"{cls.__name__} has a forward of its own that does not build on {plain.__name__}.forward, so it can't be sharded. "
            f"Leave it out of the plan."
        )
    module.__class__ = _combine(cls, layer, cls)


@functools.lru_cache(maxsize=256)
def _combine(first: type, second: type, plain: type) -> type:
    """One class for all modules of a kind: a compiler compiles each class by itself."""
    return type(plain.__name__, (first, second), {"__module__": plain.__module__, "plain_class": plain})


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The class that `insert_class` found."""
    cls = type(module)
    if "plain_class" in cls.__dict__:
        return cls.__dict__["plain_class"]
    return next(base for base in cls.__mro__ if base in (nn.Linear, nn.Embedding) or base.__name__ == "Conv1D")


def sharded_modules(model: nn.Module) -> Iterator[tuple[str, TensorParallel_Layer]]:
    """`(name, module)` of every rewritten module below `model`."""
    for name, module in model.named_modules():
        if isinstance(module, TensorParallel_Layer):
            yield name, module


def held_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """`(name, Parameter)` once for each module that holds it: a tied one under several names, but no module under two."""
    for name, module in model.named_modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                yield (f"{name}.{leaf}" if name else leaf), parameter


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel and torch.compile's wrap."""
    while isinstance(model, DistributedDataParallel) or hasattr(model, "_orig_mod"):
        model = model.module if isinstance(model, DistributedDataParallel) else model._orig_mod  # type: ignore[assignment]
    return model


def find_group(model: nn.Module) -> TPGroup | None:
    """The TPGroup of a parallelized `model`, or of the first rewritten module below a part of one; None if there is neither."""
    own = model.__dict__.get("autotp_group")  # the only note where the plan left every module whole
    return own or next((module.tp for _, module in sharded_modules(model)), None)


def index_parameters(model: nn.Module) -> None:
    """Note for every parameter of a parallelized `model` which module holds it, sharded or not."""
    if find_group(model) is None:
        return
    root = weakref.ref(model)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                holder = weakref.ref(module)
                ours = holder if isinstance(module, TensorParallel_Layer) else root
                _holder_of[id(parameter)] = (_refer_to(parameter, holder, name), ours, name)


def _refer_to(parameter: Tensor, holder: weakref.ref, name: str) -> Callable[[], Any]:
    """A reference that keeps nothing alive; by its place for a tensor of another class, a DTensor or torchao's.

    torch moves and converts those only while nothing refers to them.
    """
    swapped = isinstance(parameter, DTensor) or hasattr(parameter, "__tensor_flatten__")
    return functools.partial(_read_parameter, holder, name) if swapped else weakref.ref(parameter)


def _read_parameter(holder: weakref.ref, name: str) -> Any:
    module = holder()
    return None if module is None else module._parameters.get(name)


def holder_of(parameter: Tensor) -> tuple[nn.Module, str] | None:
    """The module that holds `parameter` and its name there: the rewritten module, or the model's root for a whole one.

    None for a parameter of no parallelized model.
    """
    entry = _holder_of.get(id(parameter))
    if entry is None:
        return None
    alive, module, name = entry[0](), entry[1](), entry[2]
    if alive is not parameter or module is None:
        if not isinstance(alive, nn.Parameter):  # while FSDP2 gathers a parameter, another stands in its place
            del _holder_of[id(parameter)]
        return None
    return module, name


def stand_in(copy: Tensor, parameter: Tensor) -> None:
    """Count `copy`, a master of the same shape that an optimizer updates, as `parameter` in norms and checks."""
    entry = _holder_of.get(id(parameter))
    if entry is not None:
        _holder_of[id(copy)] = (weakref.ref(copy), *entry[1:])


def mark_broken(model: nn.Module, reason: str) -> None:
    """Make every later use of `model` raise with `reason`."""
    model.__dict__["broken"] = reason
    model.__dict__["forward"] = partial(_raise_broken, reason)


def _raise_broken(reason: str, *args: Any, **kwargs: Any) -> None:
    raise AutoTPError(f"this model can't be used any more: {reason}. Load it again.")


def check_usable(module: nn.Module, names: Iterable[str] | None = None) -> None:
    """Raise if a fault left `module` half rewritten, or its weights are there to be multiplied only.

    Args:
        names: of the tensors that are read, where that is not all of them.

    Raises:
        AutoTPError: with the reason that was noted.
    """
    read = None if names is None else {name.rpartition(".")[0] for name in names}
    for name, child in module.named_modules():
        if "broken" in child.__dict__:
            raise AutoTPError(f"this model can't be used any more: {child.__dict__['broken']}. Load it again.")
        if "only_runs" in child.__dict__ and (read is None or name in read):
            raise AutoTPError(child.__dict__["only_runs"])
