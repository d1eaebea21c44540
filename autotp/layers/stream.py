"""Every tensor of a sharded model, whole and one at a time: to rank 0, and from it.

Collective. Arrival is agreed through the group's store before any collective, so a rank that stays away, rank 0
included, is named within the group's timeout instead of leaving the others waiting.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterable, Mapping
from contextlib import closing
from typing import Any

import torch
from torch import Tensor, nn

from ..comm import TPGroup
from ..errors import GatherError
from .base import TensorParallel_Layer, check_usable, find_group, sharded_modules, unwrap
from .fully import find_part, make_whole


def iterate_full_tensors(
    model: nn.Module, owners: Mapping[str, int] | None = None
) -> Generator[tuple[str, Tensor | None], None, None]:
    """`(name, whole tensor)` of the state dict's tensors: whole on the rank that owns it, None on the other ranks.

    The streaming primitive under `full_state_dict` and saving: one whole tensor exists at a time, in host memory. Persistent
    buffers and frozen parameters are included; a tied tensor comes once, under its first name (`find_tied_names` tells the
    others). Tensors that were never sharded come as they are, not copied. Collective: every rank must consume it to the end;
    close it (`contextlib.closing`) where the loop may raise, and the other ranks are told at once. Where FSDP2 shards the model
    further, all its data ranks take part, and each model's owners get the tensor.

    Args:
        model: a parallelized model, or a plain one, whose tensors come as they are.
        owners: which tensors come, in which order, and the TP rank that each goes to, alike on all ranks; None for all of them
            in the state dict's order, to rank 0.

    Raises:
        GatherError: a rank did not come, stopped early, or has other names.
    """
    check_usable(model, owners)
    group = find_group(model)
    sharded = map_sharded(model)
    state, tied = _state_tensors(model), find_tied_names(model)
    owners = {name: 0 for name in state if name not in tied} if owners is None else owners
    what = f"gathering the state of {type(model).__name__}"
    if group is None:
        yield from ((name, make_whole(state[name].detach())) for name in owners)
        return
    check_same_names(group.arrive(what, hash_names([*state, *(f"{name} {rank}" for name, rank in owners.items())])), group, what)
    try:
        for name, owner in owners.items():
            tensor = state[name]
            held = make_whole(tensor.detach())
            full: Tensor | None = held if group.tp_rank == owner else None
            if id(tensor) in sharded and not is_gathered(tensor, sharded):
                layer, own, _ = sharded[id(tensor)]
                full = group.gather_to_host(held, layer.shards[own], owner, lambda: _check_not_stopped(group, what))
            yield name, full
            full = held = None
        _check_not_stopped(group, what)  # who stopped after the last gather is heard too, and the ranks' counts stay equal
    except StoppedError:
        raise
    except BaseException:
        group.arrive(what, "stopped", wait=False)
        raise


def _check_not_stopped(group: TPGroup, what: str) -> None:
    stopped = [rank for rank, note in enumerate(group.arrive(what)) if note]
    if stopped:
        raise StoppedError(f"TP rank(s) {stopped} stopped {what}: see their own error")


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """The unsharded model's state dict, on rank 0 in CPU memory; empty on the other ranks.

    All keys of the model are there; tied ones share storage, as in the unsharded model. Names are the model's own: what wraps it
    for data parallelism is left off. Collective over the TP group, and over the data axis too where FSDP2 shards the model
    further.

    Raises:
        GatherError: a rank did not come.
    """
    return gather_state(unwrap(model))


def gather_state(model: nn.Module) -> dict[str, Any]:
    """`full_state_dict` under the names that `model`, which may be a wrap, has for its tensors."""
    whole: dict[str, Tensor] = {}
    sharded = map_sharded(model)
    state = model.state_dict(keep_vars=True)
    with closing(iterate_full_tensors(model)) as stream:
        for name, tensor in stream:
            if tensor is not None:  # what was gathered is ours already; what was not is the model's own memory
                whole[name] = tensor.to("cpu", copy=id(state[name]) not in sharded or is_gathered(state[name], sharded))
    group = find_group(model)
    if group is not None and group.tp_rank != 0:
        return {}
    tied = find_tied_names(model)
    return {name: whole[tied.get(name, name)] if isinstance(value, Tensor) else value for name, value in state.items()}


def load_full_state_dict(model: nn.Module, state_dict: Mapping[str, Any] | None, strict: bool = True) -> Any:
    """Split rank 0's whole tensors into every rank's shards, in place, one tensor at a time.

    Args:
        model: a parallelized model, in DistributedDataParallel or not; any other just loads `state_dict`.
        state_dict: on rank 0, whole tensors by name; the other ranks may pass None or {}.
        strict: refuse missing and unexpected keys. One name of a tied tensor is enough.

    Returns:
        the `missing_keys` and `unexpected_keys`, as `nn.Module.load_state_dict` does.

    Raises:
        GatherError: keys or shapes do not fit (nothing was changed); a rank did not come.
    """
    model = unwrap(model)
    check_usable(model)
    group = find_group(model)
    if group is None:
        return model.load_state_dict(state_dict or {}, strict=strict)
    group.arrive("load_full_state_dict")
    given = {name: tuple(value.shape) for name, value in (state_dict or {}).items() if isinstance(value, Tensor)}
    empty = [name for name in given if (state_dict or {})[name].is_meta]
    given, empty = group.broadcast_object((given, empty))
    sharded, state, tied = map_sharded(model), _state_tensors(model), find_tied_names(model)
    shards = {
        name: sharded[id(tensor)][0].shards[sharded[id(tensor)][1]] for name, tensor in state.items() if id(tensor) in sharded
    }
    source = {tied.get(name, name): name for name in state if name in given}  # one name is read for each tensor
    missing = [name for name in state if tied.get(name, name) not in source]
    unexpected = [name for name in given if name not in state]
    wrong = []
    for target, name in source.items():
        shape = shards[target].shape if target in shards else tuple(state[target].shape)
        if given[name] != shape:
            wrong.append(f"'{name}' has shape {given[name]}, the model needs {shape}")
    loose = [f"missing keys {missing}", f"unexpected keys {unexpected}"] if strict and (missing or unexpected) else []
    # Found before the first broadcast: rank 0 failing between two of them would leave the others waiting.
    problems = wrong + loose + ([f"{empty} are on meta, which holds no values"] if empty else [])
    if problems:
        raise GatherError(f"this state dict does not fit {type(model).__name__}: {'; '.join(problems)}. Nothing was loaded.")
    for target, name in source.items():
        tensor = state[target]
        full = torch.empty(given[name], dtype=tensor.dtype, device=tensor.device)
        if group.tp_rank == 0:
            full.copy_((state_dict or {})[name])
        full = group.broadcast(full)
        with torch.no_grad():
            already_whole = target not in shards or is_gathered(tensor, sharded)
            part = find_part(tensor, None if already_whole else shards[target], group)
            part.local.copy_(full if part.shard is None else part.shard.split(full, part.rank))
    return torch.nn.modules.module._IncompatibleKeys(missing, unexpected)


def find_tied_names(model: nn.Module) -> dict[str, str]:
    """State-dict name -> the first name of the same tensor, for every later name of a tied one."""
    first: dict[int, str] = {}
    tied = {}
    for name, tensor in _state_tensors(model).items():
        if first.setdefault(id(tensor), name) != name:
            tied[name] = first[id(tensor)]
    return tied


# -- what is sharded, and agreement -------------------------------------------------------------------------------------


class StoppedError(GatherError):
    """Another rank stopped iterating: it knows already, so it is not told again."""


def _state_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}


def map_sharded(module: nn.Module) -> dict[int, tuple[TensorParallel_Layer, str, str]]:
    """id of each sharded tensor below `module` -> its layer, its name there, its full name."""
    found = {}
    for path, layer in sharded_modules(module):
        for name in layer.shards:
            tensor = getattr(layer, name, None)
            if isinstance(tensor, Tensor):
                prefix = layer.__dict__.get("full_name") or path
                found.setdefault(id(tensor), (layer, name, f"{prefix}.{name}" if prefix else name))
    return found


def is_gathered(tensor: Tensor, sharded: Mapping[int, tuple[TensorParallel_Layer, str, str]]) -> bool:
    layer, name, _ = sharded[id(tensor)]
    return name in layer.__dict__.get("gathered", ())


def hash_names(names: Iterable[str]) -> str:
    return hashlib.sha1("\n".join(names).encode()).hexdigest()[:16]


def check_same_names(notes: list[str], group: TPGroup, what: str) -> None:
    other = [rank for rank, note in enumerate(notes) if note != notes[0]]
    if other:
        raise GatherError(f"{what}: TP rank(s) {other} gave other tensors than rank 0 does: give the same ones on every rank")
