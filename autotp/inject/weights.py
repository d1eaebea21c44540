"""A model's weights cut to this rank's parts, and made whole again; the modules' forwards are swapped elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.load import place_buffers
from ..checkpoint.source import ModuleSource, take_part
from ..comm import TPGroup
from ..layers.attention import restore_fast_paths
from ..layers.base import sharded_modules
from .plan import Plan
from .swap import make_plain


@torch.no_grad()
def cut_weights(model: nn.Module, plan: Plan, group: TPGroup) -> None:
    """Replace data and gradient of every Parameter by this rank's part, on the group's device; one tensor at a time."""
    source, shards = ModuleSource(model), plan.shards
    of: dict[int, Any] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in shards:
            of[id(parameter)] = shards[name]
    for name, parameter in model.named_parameters():
        shard = of.get(id(parameter))
        if shard is not None or parameter.device != group.device:
            grad, parameter.grad = parameter.grad, None
            set_data(parameter, source.read(name, shard, group.tp_rank, parameter.dtype, group.device))
            if grad is not None:
                parameter.grad = take_part(grad, shard, group.tp_rank, grad.dtype, group.device)
    place_buffers(model, shards, group.tp_rank, group.device)


@torch.no_grad()
def join_weights(model: nn.Module) -> None:
    """Give every sharded Parameter its whole data on every rank, and its module its own class."""
    join_modules([module for _, module in sharded_modules(model)])
    restore_fast_paths(model)


def join_modules(modules: Iterable[Any]) -> None:
    """The same for some rewritten modules, which hold all that is tied to theirs."""
    done: dict[int, tuple[Tensor, Any]] = {}  # a part -> itself, kept alive for its id, and what it became
    for module in modules:
        for name, shard in module.shards.items():
            parameter, buffer = module._parameters.get(name), module._buffers.get(name)
            if parameter is not None and id(parameter) not in done:
                parameter.grad = None
                set_data(parameter, module.tp.all_gather(parameter.data, shard))
                done[id(parameter)] = (parameter, parameter)
            elif buffer is not None:
                if id(buffer) not in done:
                    done[id(buffer)] = (buffer, module.tp.all_gather(buffer, shard))
                module._buffers[name] = done[id(buffer)][1]
        make_plain(module)


def set_data(parameter: nn.Parameter, data: Tensor) -> None:
    """Give a Parameter data of another shape, where a graph of an earlier forward may still be alive (old weight norm keeps one).

    Such a graph keeps the node that takes the Parameter's gradients, of the shape that it was made for, and later forwards
    would take it over; a change of dtype makes autograd drop it.
    """
    if data.shape != parameter.shape:
        parameter.data = data.new_empty(0, dtype=torch.float64 if parameter.dtype == torch.float32 else torch.float32)
    parameter.data = data
