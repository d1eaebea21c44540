"""Gives the modules of a plan's chains what they do with dealt tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..comm import TPGroup
from ..errors import PlanError
from ..layers.token_modules import install_tokens
from ..layers.tokens import TokenPart, TokenStream
from .module_plan import TokenPlan
from .plan import Chain, Plan


def find_stream(plan: Plan, streams: Mapping[str, TokenStream], name: str) -> TokenStream | None:
    """The stream of the chain whose layer holds module `name`; None outside all."""
    return next((streams[c.name] for c in plan.chains if any(name.startswith(f"{layer}.") for layer in c.layers)), None)


def rewrite_chain(model: nn.Module, chain: Chain, plan: Plan, group: TPGroup, stream: TokenStream) -> None:
    """Give the modules of a chain what they do with dealt tokens; their other forwards are in place.

    Raises:
        PlanError: what the plan says of a module does not fit it.
    """
    entries = {m.name: m.tokens for m in plan.modules if m.tokens is not None and m.tokens.chain == chain.name}
    draws = any(tokens.draws for tokens in entries.values())
    for name in dict.fromkeys([*entries, *chain.layers, chain.join]):
        tokens, module = entries.get(name), model.get_submodule(name)
        if tokens is not None and tokens.leaves == "scatter":
            if not hasattr(type(module), "tokens"):
                raise PlanError(f"{name}: the plan reduce-scatters the sums of a {type(module).__name__}, which has none")
            module.__dict__["tokens"] = stream
        is_layer = name in chain.layers
        enters: Any = ((chain.argument, chain.position),) if is_layer else tokens.gathers if tokens is not None else ()
        if name == chain.join and not is_layer:
            enters = (chain.join_argument,)
        if not enters:
            continue
        scatters, inside = find_held(entries, name, is_layer)
        part = TokenPart(
            stream,
            name,
            enters,
            first=name == chain.layers[0],
            gathers=tokens is not None and bool(tokens.gathers),
            slices=tokens is not None and tokens.leaves == "slice",
            joins=name == chain.join,
            summed=() if tokens is None else tokens.summed,
            scatters=scatters,
            inside=inside,
            draws=draws and is_layer,
        )
        install_tokens(module, group, name, part)


def find_held(entries: Mapping[str, TokenPlan], name: str, is_layer: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """`scatters` and `inside` of a module's TokenPart: names below it."""

    def below(other: str) -> list[str]:
        return [each[len(other) + 1 :] for each in entries if each.startswith(f"{other}.")]

    gathers = [each for each in below(name) if entries[f"{name}.{each}"].gathers]
    rows = [each for each in below(name) if entries[f"{name}.{each}"].leaves == "scatter"]
    if not is_layer:
        return tuple(rows), ()
    outside = [row for row in rows if row not in gathers and not any(row.startswith(f"{each}.") for each in gathers)]
    return (), (*gathers, *outside)
