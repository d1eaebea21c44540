"""Another vocabulary for a parallelized model: its embeddings are made whole, resized by transformers, and cut again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import nn

from ..comm import TPGroup
from ..errors import PlanError
from ..generation.engine import release
from ..layers.base import TensorParallel_Layer, check_usable, index_parameters, mark_broken
from ..layers.fully import refuse_dealt
from ..shard import Cut, Shard, deal_units
from .module_plan import ModulePlan
from .plan import Plan
from .swap import rewrite_module
from .weights import join_modules, set_data


def resize_embeddings(original: Callable, model: Any, *args: Any, **kwargs: Any) -> nn.Module:
    """`model.resize_token_embeddings(...)`, whose code is `original`, of a parallelized model; collective over its group.

    What rank 0 draws for new rows is taken on all ranks. As without autotp, an optimizer made before holds the old parameters.

    Raises:
        PlanError: the ranks ask for different sizes, or the vocabulary would have fewer rows than there are ranks.
        AutoTPError: FSDP2 shards the model, or it is broken.
    """
    group: TPGroup = model.__dict__["autotp_group"]
    plan: Plan = model.__dict__["autotp_plan"]
    entries = _find_entries(model, plan)
    check_usable(model, [f"{name}.weight" for name in entries])  # those of other modules may be quantised
    refuse_dealt(model.named_parameters(), "resize_token_embeddings", "resize the model before fully_shard")
    notes = group.arrive("resize_token_embeddings", repr((args, sorted(kwargs.items()))))
    if any(note != notes[0] for note in notes):
        raise PlanError(f"resize_token_embeddings was called in different ways: {notes}. Every rank must ask for the same size.")
    _check_rows(args[0] if args else kwargs.get("new_num_tokens"), entries, group)
    release(model)
    try:
        with torch.no_grad():
            join_modules(list({id(module): module for module in map(model.get_submodule, entries)}.values()))
            original(model, *args, **kwargs)
            _cut_again(model, plan, entries, group)
    except BaseException as error:
        mark_broken(model, f"resizing its embeddings failed half way ({type(error).__name__}: {error})")
        raise
    index_parameters(model)
    return model.get_input_embeddings()


def _find_entries(model: Any, plan: Plan) -> dict[str, ModulePlan]:
    """Name and plan of each split module that holds a parameter of the input or output embeddings."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    resized = {id(p) for module in ends if module is not None for p in module._parameters.values() if p is not None}
    return {
        entry.name: entry
        for entry in plan.modules
        if isinstance(module := model.get_submodule(entry.name), TensorParallel_Layer)
        and any(id(parameter) in resized for parameter in module._parameters.values())
    }


def _check_rows(rows: int | None, entries: dict[str, ModulePlan], group: TPGroup) -> None:
    for entry in entries.values():
        if rows is not None and rows < group.tp_size and any(cut.dim == 0 for cut in entry.shards["weight"].cuts):
            raise PlanError(
                f"{entry.name}: {rows} rows can't be dealt to {group.tp_size} ranks: ask for at least {group.tp_size}, or resize "
                f"the model before parallelize"
            )


def _cut_again(model: Any, plan: Plan, entries: dict[str, ModulePlan], group: TPGroup) -> None:
    """Give each module its part of the new weights, and its sharded forward."""
    modules = {name: model.get_submodule(name) for name in entries}  # some are other modules now, some the same under two names
    sizes = {id(p): tuple(p.shape) for module in modules.values() for p in module._parameters.values() if p is not None}
    new: dict[str, ModulePlan] = {}
    done: set[int] = set()
    for path, entry in entries.items():
        shards = {}
        for name, shard in entry.shards.items():
            parameter: Any = modules[path]._parameters[name]
            shards[name] = cut_like(shard, sizes[id(parameter)])
            if id(parameter) not in done:
                done.add(id(parameter))
                full = group.broadcast(parameter.detach().to(group.device).contiguous())
                set_data(parameter, shards[name].split(full, group.tp_rank).clone())
        new[path] = replace(entry, shards=shards)
    shards = {f"{name}.{key}": shard for name, entry in new.items() for key, shard in entry.shards.items()}
    held = {name: prod(shard.shape) * model.get_parameter(name).element_size() for name, shard in shards.items()}
    entries_now = tuple(new.get(entry.name, entry) for entry in plan.modules)
    plan = replace(plan, modules=entries_now, param_bytes={**plan.param_bytes, **held})
    for path, module in modules.items():
        if not isinstance(module, TensorParallel_Layer):
            rewrite_module(module, new[path], plan, group, {})
    model.__dict__["autotp_plan"] = plan


def cut_like(shard: Shard, shape: tuple[int, ...]) -> Shard:
    """The shard of a tensor of another size of dim 0, cut along the same dims: dim 0 evenly, the others as they were."""
    cuts = tuple(
        Shard.dealt(shape, 0, deal_units(shape[0], shard.tp_size)).cuts[0] if cut.dim == 0 else Cut(cut.dim, cut.runs)
        for cut in shard.cuts
    )
    return Shard(shape, shard.tp_size, cuts)
