"""The modules of a chain whose tokens are dealt: what enters and leaves each, what it reads and draws; when to deal at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from ..comm import TPGroup
from ..errors import PlanError
from ..row_collectives import sum_together
from .base import TensorParallel_Layer, insert_class
from .entry import asks_for
from .fully import refuse_inner
from .overlap import OverlapOptions
from .tokens import TokenPart, TokenStream, map_first


class TokenModule(TensorParallel_Layer):
    """A module of a chain whose tokens are dealt, mixed in front of its own class.

    Attributes:
        autotp_tokens: what it does; one attribute, whose name no module has of its own.
    """

    autotp_tokens: TokenPart

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        part, forward = self.autotp_tokens, super().forward  # here: torch.compile can't read `super()` inside a block
        stream = part.stream
        x = find_argument(part.enters[0], args, kwargs)
        if not isinstance(x, Tensor):
            raise PlanError(
                f"{part.name}: argument '{part.enters[0][0]}', by which the plan deals tokens, is a {type(x).__name__}: pass a "
                f"tensor, or sequence_parallel=False"
            )
        running = stream.begin(self, part, x)
        try:
            if stream.layout is None:
                output = forward(*args, **kwargs)
            else:
                args, kwargs = enter_module(part, args, kwargs)
                stream.keeps_whole = whole = bool(part.scatters and find_wrapped(self, part, part.scatters))
                output = run_dealt(self, forward, args, kwargs)
                if part.slices or whole or part.joins:
                    output = leave_module(part, output, part.slices or whole)
            if not part.gathers:
                stream.note_output(output)
        finally:
            stream.end(running)
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


def run_dealt(module: Any, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The module's own forward: what it reads and draws as dealt rows, or whole ones, need it."""
    part: TokenPart = module.autotp_tokens
    stream = part.stream
    if part.gathers:
        try:
            if stream.draws_apart:
                with stream.drawing_together():
                    output = forward(*args, **kwargs)
            else:
                output = forward(*args, **kwargs)
        finally:
            stream.local = stream.full = None
    elif part.draws and module.training:
        with read_summed(module, part), stream.drawing_apart():
            output = forward(*args, **kwargs)
    elif (part.inside or part.summed) and torch.is_grad_enabled():
        with read_summed(module, part):
            output = forward(*args, **kwargs)
    else:
        list_around(module, part)  # raises where a wrap would give wrong numbers
        output = forward(*args, **kwargs)
    return output


def find_wrapped(module: Any, part: TokenPart, names: Sequence[str]) -> dict[str, Any]:
    """What stands at the places of modules below `module` that have a part in its stream, where it is not they themselves."""
    found = {}
    for name in names:
        there = find_below(module, split_name(name))
        if there is None:  # taken out
            continue
        if not isinstance(there, TokenModule) and getattr(there, "tokens", None) is not part.stream:
            found[name] = there
    return found


def leave_module(part: TokenPart, output: Any, slices: bool) -> Any:
    """The output as it is passed on: whole, and dealt here, if the module `slices`; else dealt, and joined here."""
    return map_first(output, part.stream.split if slices else part.stream.join, part.name)


@contextmanager
def read_summed(module: Any, part: TokenPart) -> Iterator[None]:
    """The parameters that dealt rows read stand there such that their gradients are summed over the ranks."""
    places = list_summed(module, part) if torch.is_grad_enabled() else list_around(module, part)[:0]
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
    found = {(id(each), key): (each, key, p) for each, key, p in list_around(module, part) if p.requires_grad}
    for name in part.summed:
        *holders, leaf = split_name(name)
        owner = find_below(module, holders)
        if owner is None:
            raise PlanError(
                f"{part.name}.{name} is read by dealt tokens and not there any more, so that gradients would lack their sum over "
                f"the ranks: change modules before parallelize, or pass sequence_parallel=False"
            )
        for each in [owner] if leaf in owner._parameters or not holders else owner.modules():
            for key in [leaf] if each is owner and leaf in owner._parameters else each._parameters:
                parameter = each._parameters[key]
                if parameter is not None and parameter.requires_grad:
                    refuse_inner(parameter, part.name, name)
                    found[id(each), key] = (each, key, parameter)
    return list(found.values())


@lru_cache(maxsize=4096)
def split_name(name: str) -> tuple[str, ...]:
    """The parts of a dotted name."""
    return tuple(name.split("."))


def find_below(module: Any, path: Sequence[str]) -> Any:
    """`module.get_submodule`, which in every layer of every forward takes longer; None where there is none."""
    for name in path:
        module = module._modules.get(name)
        if module is None:
            return None
    return module


def list_around(module: Any, part: TokenPart) -> list[tuple[Any, str, Tensor]]:
    """The parameters in wraps around what gathers a layer's rows, and in what took its place: they read dealt rows.

    Raises:
        PlanError: a wrap is around a linear, which gathers or scatters where the wrap would need both.
    """
    found = []
    for name, wrap in find_wrapped(module, part, part.inside).items():
        held = [each for each in wrap.modules() if isinstance(each, TokenModule) or getattr(each, "tokens", None) is part.stream]
        inner = {id(below) for each in held for below in each.modules()}
        own = [
            (each, *item)
            for each in wrap.modules()
            if id(each) not in inner
            for item in each._parameters.items()
            if item[1] is not None
        ]
        if own and held and isinstance(held[0], OverlapOptions):
            raise PlanError(
                f"{part.name}.{name} is a {type(wrap).__name__} with parameters around a linear that deals its rows over "
                f"{part.stream.group.tp_size} ranks by itself: add it before parallelize, or pass sequence_parallel=False"
            )
        found += own
    return found


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
    collects, outermost = asks_for("output_hidden_states", module, args, kwargs), "autotp_entry" in module.__dict__
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
