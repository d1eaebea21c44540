"""Filling a model that is still on meta with this rank's part of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from ..comm import TPGroup
from ..errors import CheckpointError
from ..shard import Shard
from .convert import ConvertedSource
from .fresh import can_draw, draw_tensors
from .gguf_tensors import GGUFSource
from .names import LoadingInfo, match_names, tie_names
from .scatter import ScatteredSource, convert_source, share_source
from .source import WeightSource, take_part

T = TypeVar("T")
DtypeExceptions = Sequence[tuple[re.Pattern, torch.dtype]]


class PlanLike(Protocol):
    """What is needed of a plan: the slices, and the names that are one tensor."""

    @property
    def shards(self) -> dict[str, Shard]: ...

    @property
    def tied(self) -> tuple[tuple[str, ...], ...]: ...


def fill_from_source(
    model: nn.Module,
    plan: PlanLike,
    source: WeightSource | GGUFSource,
    group: TPGroup,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    ignore_mismatched_sizes: bool = False,
    then: Callable[[str], None] | None = None,
) -> LoadingInfo:
    """Give every parameter on meta this rank's part of `source`, and every persistent buffer its value.

    The modules' forwards are left alone: this only turns names into memory. Each tensor is read, cut, converted and moved
    by itself, so the rank's part and one tensor are all that exists at a time. What the checkpoint lacks gets this rank's part
    of what transformers would draw, which takes rank 0 host memory for all of that; transformers' report says so. Names that
    were one Parameter, or that the plan ties, are one Parameter afterwards; `requires_grad` is kept.

    Args:
        model: parameters on meta, in their full shapes; buffers that the checkpoint does not hold must be real.
        plan: `shards` by full parameter name (a name that is absent is whole on every rank) and `tied` groups of names.
        source: the weights; its `digest`, where it has one, must agree on all ranks.
        group: the ranks; what fails on one of them raises on all.
        dtype: of floating-point parameters; None keeps each one's own. What transformers keeps in float32 stays there.
        device: where the parts go; the group's device by default.
        ignore_mismatched_sizes: what has another shape in the checkpoint is drawn too, instead of refused.
        then: is told the names of each tensor when it is in place.

    Returns:
        how the checkpoint differs from the model.

    Raises:
        CheckpointError: the checkpoint does not fit the model (nothing was changed), or ranks see different ones.
    """
    device = device or group.device
    group.arrive("reading a checkpoint")
    shared = share_source(model, source, group)
    with group.together("checking the checkpoint"):
        match = match_names(model, shared, plan.tied, ignore_mismatched_sizes)
        ties = tie_names(model, plan.tied)
        _check_shards(model, plan)
        _check_buffers(model, match.keys)
    digests = group.gather_objects(shared.digest())
    others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if others:
        raise CheckpointError(f"TP rank(s) {others} see another checkpoint than rank 0 does: give all ranks the same directory")
    lacking = [name for name, found in match.keys.items() if not found and ties[name][0] == name]
    with group.together("drawing what the checkpoint lacks"):
        drawn = draw_tensors(model, lacking) if lacking and group.tp_rank == 0 else {}
    _share_drawn(model, plan.shards, lacking, drawn, ties, group, dtype, device)
    drawn.clear()
    reading = shared.reading() if isinstance(shared, ScatteredSource) else nullcontext()
    with group.together("reading the checkpoint"), torch.no_grad(), reading:
        _fill(model, plan.shards, shared, match.keys, ties, group, dtype, device, lacking, then or (lambda name: None))
    if group.tp_rank == 0:
        match.info.say(model, getattr(shared, "directory", type(source).__name__))
    return match.info


def _share_drawn(
    model: nn.Module,
    shards: Mapping[str, Shard],
    names: Sequence[str],
    drawn: Mapping[str, Tensor],
    ties: Mapping[str, tuple[str, ...]],
    group: TPGroup,
    dtype: torch.dtype | None,
    device: torch.device,
) -> None:
    """Put this rank's parts of what rank 0 drew where `names` are; collective."""
    state, keep = model.state_dict(keep_vars=True), _dtype_exceptions(model, dtype)
    parts = {}
    with group.together("making room for what the checkpoint lacks"):
        for name in names:
            shard = next((shards[n] for n in ties[name] if n in shards), None)
            shape = tuple(state[name].shape) if shard is None else shard.local_shape(group.tp_rank)
            parts[name] = shard, torch.empty(shape, dtype=_wanted_dtype(state[name], name, dtype, keep), device=device)
    for name, (shard, own) in parts.items():
        full = drawn[name].to(own.dtype) if group.tp_rank == 0 else None
        _place(model, ties[name], state[name], group.scatter_from_host(full, own, shard))


def _fill(
    model: nn.Module,
    shards: Mapping[str, Shard],
    source: WeightSource,
    keys: Mapping[str, tuple[str, ...]],
    ties: Mapping[str, tuple[str, ...]],
    group: TPGroup,
    dtype: torch.dtype | None,
    device: torch.device,
    ready: Sequence[str],
    then: Callable[[str], None],
) -> None:
    """Read tensor by tensor, in the same order on all ranks; each rank checks the bytes of some while they are at hand."""
    keep = _dtype_exceptions(model, dtype)
    state = model.state_dict(keep_vars=True)
    own = {name: keys[name] for name in keys if keys[name] and ties[name][0] == name}  # others have a value, or another name
    checked = _deal_checks(source, own, group)
    done = {same for name in ready for same in ties[name]}
    for name in done:
        then(name)
    for name, found in show_bar(own.items(), len(own), group.tp_rank == 0):
        names = ties[name]
        done.update(names)
        for key in found if name in checked else ():
            source.check(key)
        wanted = _wanted_dtype(state[name], name, dtype, keep)
        shard = next((shards[n] for n in names if n in shards), None)
        local = _read_tied(source, found, shard, group.tp_rank, wanted, device)
        _place(model, names, state[name], local)
        for each in names:
            then(each)
    place_buffers(model, shards, group.tp_rank, device, done)


def _deal_checks(source: WeightSource, own: Mapping[str, Sequence[str]], group: TPGroup) -> set[str]:
    """The names of whose bytes this rank checks all, so that every rank reads about as many."""
    load, mine = [0] * group.tp_size, set()
    for name, found in own.items():
        rank = load.index(min(load))
        load[rank] += sum(source.nbytes(key) for key in found)
        if rank == group.tp_rank:
            mine.add(name)
    return mine


def show_bar(items: Iterable[T], count: int, shown: bool) -> Iterable[T]:
    """`items`, with transformers' bar of what is loaded on one rank, unless its progress bars are disabled."""
    from transformers.utils import logging

    return logging.tqdm(items, total=count, desc="Loading weights") if shown and logging.is_progress_bar_enabled() else items


def _read_tied(source: WeightSource, keys: Sequence[str], shard: Shard | None, rank: int, dtype: torch.dtype, device) -> Tensor:
    """The part of a tensor that the checkpoint holds under one name or several, which must then be equal.

    Raises:
        CheckpointError: the model ties them, the checkpoint does not.
    """
    local = source.read(keys[0], shard, rank, dtype, device)
    for other in keys[1:]:
        if not torch.equal(local, source.read(other, shard, rank, dtype, device)):
            raise CheckpointError(
                f"the model ties '{keys[0]}' and '{other}', but the checkpoint holds different values for them. "
                f"Set tie_word_embeddings=false in config.json, or load it with transformers and call autotp.parallelize."
            )
    return local


def _place(model: nn.Module, names: Sequence[str], old: Tensor, local: Tensor) -> None:
    """Put `local` where `old` was, under all its names: one new Parameter, or the buffer's own memory where it has any."""
    if not isinstance(old, nn.Parameter) and not old.is_meta and old.shape == local.shape:
        local = old.copy_(local)
    new = nn.Parameter(local, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else local
    for name in names:
        path, _, own = name.rpartition(".")
        module = model.get_submodule(path)
        table: dict[str, Any] = module._parameters if own in module._parameters else module._buffers
        table[own] = new


def place_buffers(
    model: nn.Module, shards: Mapping[str, Shard], rank: int, device: torch.device, ready: Collection[str] = ()
) -> None:
    """Move every buffer to `device`, those of `shards` as `rank`'s part (but those `ready`); a shared one stays shared."""
    done: dict[int, tuple[Tensor, Tensor]] = {}  # the old tensor is kept alive, so that its id stays its own
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            full_name = f"{path}.{name}" if path else name
            shard = None if full_name in ready else shards.get(full_name)
            if shard is not None:
                if id(buffer) not in done:
                    done[id(buffer)] = (buffer, take_part(buffer, shard, rank, buffer.dtype, device))
                module._buffers[name] = done[id(buffer)][1]
            elif buffer.device != device:
                module._buffers[name] = buffer.to(device)


def order_names(model: nn.Module, source: WeightSource | GGUFSource) -> tuple[ConvertedSource, dict[str, str]]:
    """`source` by the names of `model`, and what each tensor of its state dict is called there, in order, a tied one once.

    What it lacks is left out, and said in transformers' report.

    Raises:
        CheckpointError: it does not fit the model, or holds different values for what the model ties.
    """
    whole = convert_source(model, source)
    match, ties = match_names(model, whole), tie_names(model)
    match.info.say(model, whole.directory)
    keys = match.keys
    names = {name: keys[name][0] for name in keys if keys[name] and ties[name][0] == name}
    for name in names:
        if len(keys[name]) > 1:
            _read_tied(whole, keys[name], None, 0, whole.dtype(keys[name][0]), torch.device("cpu"))
    return whole, names


def find_shards(model: nn.Module, names: Iterable[str], shards: Mapping[str, Shard]) -> dict[str, Shard]:
    """The Shard of each of `names` that is split, under whichever of a tied tensor's names `shards` has it."""
    ties = tie_names(model)
    found = {name: next((shards[same] for same in ties[name] if same in shards), None) for name in names}
    return {name: shard for name, shard in found.items() if shard is not None}


def _check_shards(model: nn.Module, plan: PlanLike) -> None:
    state = {**model.state_dict(keep_vars=True), **dict(model.named_buffers(remove_duplicate=False))}
    for name, shard in plan.shards.items():
        if name not in state or tuple(state[name].shape) != shard.shape:
            held = list(state[name].shape) if name in state else "not there"
            raise CheckpointError(
                f"the plan cuts '{name}' of shape {list(shard.shape)}, which is {held} in {type(model).__name__}. "
                f"Make the plan from this model's config."
            )


def _check_buffers(model: nn.Module, keys: dict[str, tuple[str, ...]]) -> None:
    """Raise if something would stay on meta: a buffer that no checkpoint holds has no value to take."""
    read = {name for name, found in keys.items() if found}
    parameters = [] if can_draw(model) else model.named_parameters(remove_duplicate=False)
    everything = [*parameters, *model.named_buffers(remove_duplicate=False)]
    empty = [name for name, tensor in everything if tensor.is_meta and name not in read]
    if empty:
        raise CheckpointError(
            f"{', '.join(empty[:8])} of {type(model).__name__} would be left without values: the checkpoint does not hold "
            f"them and they were not computed. "
            f"Load the model with transformers' from_pretrained, then call autotp.parallelize on it."
        )


def widen_exceptions(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Give the parameters of a model on meta in `dtype` that transformers keeps in a wider one that."""
    keep = _dtype_exceptions(model, dtype)
    for name, parameter in model.named_parameters(remove_duplicate=False) if keep else ():
        wanted = next((wide for pattern, wide in keep if pattern.search(name)), None)
        if wanted is not None and parameter.is_floating_point():
            parameter.data = parameter.data.to(wanted)


def _dtype_exceptions(model: nn.Module, dtype: torch.dtype | None) -> DtypeExceptions:
    """Name patterns of what transformers keeps in a wider dtype than the one asked for."""
    names = set()
    if dtype == torch.float16:
        names |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    if dtype in (torch.float16, torch.bfloat16):
        names |= set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    patterns = [re.escape(name).replace(r"\*", ".*") for name in sorted(names)]
    return [(re.compile(rf"(^|\.){pattern}(\.|$)"), torch.float32) for pattern in patterns]


def _wanted_dtype(tensor: Tensor, name: str, dtype: torch.dtype | None, keep: DtypeExceptions) -> torch.dtype:
    """Floating-point parameters take `dtype`; buffers and integers keep their own."""
    if dtype is None or not tensor.is_floating_point() or not isinstance(tensor, nn.Parameter):
        return tensor.dtype
    return next((wide for pattern, wide in keep if pattern.search(name)), dtype)
