"""The modules of a chain whose tokens are dealt: what enters and leaves each, what it reads and draws; when to deal at all."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from ..collectives import sum_together
from ..comm import TPGroup
from ..errors import PlanError
from .base import TensorParallel_Layer, insert_class
from .fully import refuse_inner
from .product import watches_operations
from .tokens import TokenPart, TokenStream, map_first


class TokenModule(TensorParallel_Layer):
    """A module of a chain whose tokens are dealt, mixed in front of its own class.

    Attributes:
        autotp_tokens: what it does; one attribute, whose name no module has of its own.
    """

    autotp_tokens: TokenPart

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        part = self.autotp_tokens
        stream = part.stream
        x = find_argument(part.enters[0], args, kwargs)
        if not isinstance(x, Tensor):
            raise PlanError(
                f"{part.name}: argument '{part.enters[0][0]}', by which the plan deals tokens, is a {type(x).__name__}: pass a "
                f"tensor, or sequence_parallel=False"
            )
        with stream.running(part, x):
            if stream.layout is None:
                output = super().forward(*args, **kwargs)
            else:
                args, kwargs = enter_module(part, args, kwargs)
                output = leave_module(part, run_dealt(self, x, super().forward, args, kwargs))
            if not part.gathers:
                stream.note_output(output)
        if part.joins and stream.layout is not None:
            stream.layout, stream.joined = None, stream.layout
        return output


def enter_module(part: TokenPart, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments as the module's own forward reads them."""
    if not (part.first or part.gathers):
        return args, kwargs
    part.stream.gathering = part.name
    change = part.stream.split if part.first else part.stream.gather
    for name, position in part.enters:
        value = find_argument((name, position), args, kwargs)
        if not isinstance(value, Tensor):
            continue
        if name in kwargs:
            kwargs = {**kwargs, name: change(value)}
        elif position is not None:
            args = (*args[:position], change(value), *args[position + 1 :])
    return args, kwargs


def run_dealt(module: Any, x: Tensor, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The module's own forward: what it reads and draws as dealt rows, or whole ones, need it."""
    part: TokenPart = module.autotp_tokens
    stream = part.stream
    if part.gathers:
        try:
            if not stream.draws_apart:
                return forward(*args, **kwargs)
            with stream.drawing_together():
                return forward(*args, **kwargs)
        finally:
            stream.local = stream.full = None
    draws = part.draws and module.training and not watches_operations()  # ranks that are threads have one generator
    if not draws and not (part.summed and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    with read_summed(module, part), stream.drawing_apart(x.device) if draws else nullcontext():
        return forward(*args, **kwargs)


def leave_module(part: TokenPart, output: Any) -> Any:
    """The output as it is passed on."""
    change = part.stream.split if part.slices else part.stream.join if part.joins else None
    return output if change is None else map_first(output, change, part.name)


@contextmanager
def read_summed(module: Any, part: TokenPart) -> Iterator[None]:
    """The parameters that dealt rows read stand there such that their gradients are summed over the ranks."""
    places = list_summed(module, part) if torch.is_grad_enabled() else []
    before = [(owner, owner._parameters) for owner in {id(owner): owner for owner, _, _ in places}.values()]
    for owner, parameters in before:
        owner.__dict__["_parameters"] = dict(parameters)
    if places:
        summed = sum_together([parameter for _, _, parameter in places], part.stream.group)
        for (owner, key, _), parameter in zip(places, summed, strict=True):
            owner._parameters[key] = parameter
    try:
        yield
    finally:
        for owner, parameters in before:
            owner.__dict__["_parameters"] = parameters


def list_summed(module: Any, part: TokenPart) -> list[tuple[Any, str, Tensor]]:
    """`(module, name there, parameter)` of what dealt rows read and is trained; of all that is in a wrap made later.

    Raises:
        PlanError: the module that held it is gone.
    """
    found: dict[tuple[int, str], tuple[Any, str, Tensor]] = {}
    for name in part.summed:
        holders, leaf = split_name(name)
        owner = module
        try:
            for holder in holders:
                owner = owner._modules[holder]
            if owner is None:
                raise KeyError
        except (KeyError, AttributeError):
            raise PlanError(
                f"{part.name}.{name} is read by dealt tokens and not there any more, so that gradients would lack their sum over "
                f"the ranks: change modules before parallelize, or pass sequence_parallel=False"
            ) from None
        for each in [owner] if leaf in owner._parameters or not holders else owner.modules():
            for key in [leaf] if each is owner and leaf in owner._parameters else each._parameters:
                parameter = each._parameters[key]
                if parameter is not None and parameter.requires_grad:
                    refuse_inner(parameter, part.name, name)
                    found[id(each), key] = (each, key, parameter)
    return list(found.values())


@lru_cache(maxsize=4096)
def split_name(name: str) -> tuple[tuple[str, ...], str]:
    """The modules on the way to a parameter, and its own name."""
    *holders, leaf = name.split(".")
    return tuple(holders), leaf


def find_argument(argument: tuple[str, int | None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The value of an argument of forward, None where it was not given."""
    name, position = argument
    if name in kwargs:
        return kwargs[name]
    return args[position] if position is not None and position < len(args) else None


def install_tokens(module: Any, group: TPGroup, name: str, part: TokenPart) -> None:
    """Make `module` a TokenModule in place; it may be a layer of another kind already."""
    shards = module.__dict__.get("shards", {})
    insert_class(module, TokenModule)
    module.tp, module.shards, module.full_name, module.autotp_tokens = group, shards, name, part


# -- the edge -----------------------------------------------------------------------------------------------------------


def watch_owners(model: nn.Module) -> list[Any]:
    """Hooks on the modules around each chain, which say when its tokens may be dealt.

    Returns:
        handles by which the hooks are removed.
    """
    around: dict[str, list[tuple[TokenStream, bool]]] = {}
    parts = [(name, m.autotp_tokens) for name, m in model.named_modules() if isinstance(m, TokenModule)]
    joins = {id(part.stream): name for name, part in parts if part.joins}
    for name, part in parts:
        if part.first:
            part.stream.owners = 0
            for owner in list_owners(name):
                whole = owner in list_owners(joins[id(part.stream)])
                around.setdefault(owner, []).append((part.stream, whole))
    handles = []
    for name, streams in around.items():
        module = model.get_submodule(name)
        if not isinstance(module, nn.ModuleList | nn.ModuleDict):
            module.__dict__["autotp_streams"] = streams
            handles.append(module.register_forward_pre_hook(begin_owner, prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(end_owner, always_call=True))
    return handles


def list_owners(name: str) -> list[str]:
    """Names of the modules that hold the module `name`, the root's first."""
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(len(parts))]


def begin_owner(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook: tokens may be dealt from here on, unless hidden states are asked for."""
    collects, outermost = collects_states(module, args, kwargs), "autotp_entry" in module.__dict__
    for stream, whole in module.__dict__["autotp_streams"]:
        if outermost:  # Ctrl-C ends a forward without its hooks
            stream.owners = 0
            stream.reset()
        stream.joined = None
        if whole:
            stream.owners += 1
        stream.suspended |= collects and stream.owners > 0


def end_owner(module: Any, args: tuple[Any, ...], output: Any) -> None:
    """Forward hook, run after an exception too: behind the last owner nothing is left of its forward.

    Raises:
        PlanError: the rows were not joined again.
    """
    for stream, whole in module.__dict__["autotp_streams"]:
        if whole:
            stream.owners, dealt = max(0, stream.owners - 1), stream.layout is not None
            if stream.owners == 0 or dealt:
                stream.reset()
            if dealt and output is not None:  # it is where the forward raised
                raise PlanError(
                    f"{type(module).__name__} dealt its tokens, but the module that joins them again did not run (layerdrop, or "
                    f"layers taken out?): let all layers run, or pass sequence_parallel=False"
                )


def collects_states(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a forward is asked for its hidden states, by an argument or by the config."""
    asked = kwargs.get("output_hidden_states")
    if asked is None:
        names = list(inspect.signature(type(module).forward).parameters)[1:] if args else []
        place = names.index("output_hidden_states") if "output_hidden_states" in names else len(args)
        asked = args[place] if place < len(args) else None
    if asked is None:
        asked = getattr(getattr(module, "config", None), "output_hidden_states", False)
    return asked is not None and asked is not False
