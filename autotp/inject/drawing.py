"""Which modules draw random numbers on values that are split: told by the proof, where every rank meets the whole model's draws.

A tensor that is dropped on a rank is split where its shape is not the whole model's. What has the whole shape is replicated, or
a partial sum, whose mask has to be the same on all ranks as well. Ranks that hold the same part (a head whose values are dealt to
several) draw alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from .module_plan import DrawPlan, ModulePlan
from .reduce import Reduction

Parts = tuple[int, ...]  # rank -> a number that ranks of one part share; empty for what is drawn alike


class Rate(float):
    """A number that a forward reads, which knows the module and the name it was read from."""

    source: tuple[str, str]


@dataclass(frozen=True)
class Drop:
    """One draw of the whole model's run.

    Attributes:
        modules: which run, outermost first; behind: the one that returned last in the innermost of them.
        place: how many sites had been called; shape: of what is dropped, or drawn.
        source: the module and the attribute that the rate is; None where it is computed.
        drops: whether it is dropout, which discovery leaves out.
    """

    modules: tuple[str, ...]
    behind: str | None
    place: int
    shape: torch.Size
    source: tuple[str, str] | None
    drops: bool


@contextmanager
def naming_rates(model: nn.Module) -> Iterator[None]:
    """Every float on a module, or on its config, is a `Rate` inside."""
    kept: list[tuple[dict[str, Any], str, float]] = []
    for name, module in model.named_modules():
        configs = ((f"{key}.", value) for key, value in module.__dict__.items() if hasattr(value, "to_dict"))
        for prefix, owner in (("", module), *configs):
            for key, value in list(owner.__dict__.items()):
                if type(value) is float:
                    kept.append((owner.__dict__, key, value))
                    rate = owner.__dict__[key] = Rate(value)
                    rate.source = (name, prefix + key)
    try:
        yield
    finally:
        for owner, key, value in kept:
            if type(owner.get(key)) is Rate:
                owner[key] = value


def find_parts(whole: Sequence[Drop], ranks: Sequence[Sequence[Tensor]]) -> list[Parts]:
    """What each draw's tensor is on the ranks, which drew in the same order."""
    if any(len(drawn) != len(whole) for drawn in ranks):
        return []
    found: list[Parts] = []
    for drop, *tensors in zip(whole, *ranks, strict=True):
        parts: Parts = ()
        if any(tensor.shape != drop.shape for tensor in tensors):
            parts = tuple(next(s for s, other in enumerate(tensors) if _are_same(other, t)) for t in tensors)
        found.append(parts if len(set(parts)) > 1 else ())
    return found


def _are_same(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.shape == b.shape and torch.allclose(a, b))


@dataclass
class Drawing:
    """Puts draws, and what they are on the ranks, together into what each module is to do.

    Attributes:
        opens: modules that open a frame; after: module -> whether what comes behind it in a frame is apart.
        mixed: modules whose draws can't be told apart by what returned before: all draw alike.
    """

    draws: list[tuple[Drop, Parts]]
    opens: dict[str, DrawPlan] = field(default_factory=dict)
    after: dict[str, bool] = field(default_factory=dict)
    mixed: list[str] = field(default_factory=list)

    def plan(self) -> list[DrawPlan]:
        own: dict[str, list[tuple[Drop, Parts]]] = {}
        for drop, parts in self.draws:
            own.setdefault(drop.modules[-1] if drop.modules else "", []).append((drop, parts))
        for name, draws in own.items():
            if any(parts for _, parts in draws):
                self._open(name, draws)
        found = dict(self.opens)
        for drop, parts in self.draws:
            *around, name = drop.modules or ("",)
            if not parts and name not in found and any(module in self.opens for module in around):
                found[name] = DrawPlan(name, inside="alike")
        for name, apart in self.after.items():
            found[name] = replace(found.get(name, DrawPlan(name)), after="apart" if apart else "alike")
        return list(found.values())

    def _open(self, name: str, draws: list[tuple[Drop, Parts]]) -> None:
        after, inside = dict(self.after), "apart"
        if not all(parts for _, parts in draws):
            inside = "either"
            for drop, parts in draws:
                apart = bool(parts)
                if apart if drop.behind is None else after.setdefault(drop.behind, apart) is not apart:
                    self.mixed.append(name)
                    return
        split = [(drop, parts) for drop, parts in draws if parts]
        parts = {parts for _, parts in split}
        each = parts.pop() if len(parts) == 1 else tuple(range(len(split[0][1])))
        rates = {_below(drop.source, name) for drop, _ in split}
        known = tuple(sorted(rate for rate in rates if rate is not None)) if None not in rates else ()
        self.after = after
        self.opens[name] = DrawPlan(name, inside, parts=each, rates=known)


def _below(source: tuple[str, str] | None, name: str) -> str | None:
    """A rate's attribute as the module `name` reads it; None if it can't be."""
    if source is None or not (source[0] == name or source[0].startswith(f"{name}.") or not name):
        return None
    return ".".join(filter(None, (source[0][len(name) :].lstrip("."), source[1])))


def spread_draws(plans: Sequence[DrawPlan], reduction: Reduction, modules: Mapping[str, nn.Module]) -> tuple[DrawPlan, ...]:
    """The same of the whole model, in the order of its modules: members that are not there do as those that stand for them."""
    by_name = {each.name: each for each in plans}
    grown, _ = reduction.expand({name: ModulePlan(name, "local_params", why=name) for name in by_name}, ())
    named = {name: replace(by_name[entry.why], name=name) for name, entry in grown.items()}
    return tuple(named[name] for name in modules if name in named)
