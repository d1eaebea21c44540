"""Deep models are planned on a few layers: one that is alike in every respect but its weights gets the same plan.

Two layers are alike if their module trees have the same classes, the same plain attributes (numbers, names, flags; a layer's
own number aside) and Parameters and buffers of the same shapes. Of each kind the first two are kept, so that a layer is seen
beside one of its own kind. That says nothing of a region which leaves its layer: it is proved with all layers there.

Like modules of which a forward picks some (experts, adapters by language) are planned on two as well: the others share them, so
that whichever is picked runs one of the two.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import nn

from .describe import fold_name
from .module_plan import ModulePlan
from .plan import Chain, Plan, Region

LEAST = 5  # lists of fewer modules are planned as they are
KEPT = 2  # of each kind


@dataclass(frozen=True)
class Reduction:
    """Which members of which module lists stand for the others.

    Attributes:
        dropped: name of a list -> number of a dropped member -> number of the one that stands for it.
        emptied: dropped members stay in their place and return their first argument, for models that count their layers;
            otherwise they are taken out.
        shared: name of a list or dict of modules -> a member that need not run -> the one that it shares.
    """

    dropped: dict[str, dict[int, int]]
    emptied: bool = True
    shared: dict[str, dict[str, str]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.dropped)

    def apply(self, model: nn.Module) -> None:
        """Take the dropped members, or what is in them, out of (a copy of) the model; the others keep their numbers."""
        for name, stands in self.shared.items():
            modules = model.get_submodule(name)._modules
            modules.update({member: modules[other] for member, other in stands.items()})
        for name, members in self.dropped.items():
            for number in members:
                modules = model.get_submodule(name)._modules
                if self.emptied:
                    empty(modules[str(number)])
                else:
                    del modules[str(number)]

    def holds(self, name: str) -> bool:
        """Whether a module or Parameter of this name is left."""
        if not self._gone:
            return True
        parts = name.split(".")
        return not any(".".join(parts[:depth]) in self._gone for depth in range(1, len(parts) + 1))

    @cached_property
    def _gone(self) -> frozenset[str]:
        return frozenset(old for old, _ in self._stand_ins())

    def hollow(self, model: nn.Module) -> dict[int, nn.Module]:
        """id of each member of the model that is not left -> one of its class that holds no more than its attributes: in a copy
        of the model that is enough in its place."""
        found = {}
        for name in self._gone:
            member = model.get_submodule(name)
            found[id(member)] = twin = object.__new__(type(member))
            twin.__dict__ = {**member.__dict__, "_modules": {}, "_parameters": {}, "_buffers": {}}
        return found

    def _stand_ins(self) -> Iterator[tuple[str, str]]:
        """`(name of a member that is not there, name of the one that stands for it)`, inner lists first."""
        for lists in (self.shared, self.dropped):
            for own, members in lists.items():
                yield from ((f"{own}.{member}", f"{own}.{other}") for member, other in members.items())

    def crosses(self, regions: Iterable[Region]) -> bool:
        """Whether a region leaves a member of a list: beyond it may lie what came later before members were dropped."""
        for region in regions:
            members = {self._member(name) for name in (*region.columns, *region.rows)}
            if len(members) > 1:
                return True
        return False

    def _member(self, name: str) -> str:
        """The member of a reduced list that module `name` lies in; "" outside all."""
        own = next((own for own in self.dropped if name.startswith(f"{own}.")), None)
        return "" if own is None else f"{own}.{name[len(own) + 1 :].partition('.')[0]}"

    def expand(
        self, modules: Mapping[str, ModulePlan], regions: tuple[Region, ...]
    ) -> tuple[dict[str, ModulePlan], tuple[Region, ...]]:
        """The plan of the whole model: every dropped member gets the plan of the one that stands for it."""
        grown, listed = dict(modules), list(regions)
        for new, old in self._stand_ins():
            for name, plan in list(grown.items()):
                if name == old or name.startswith(old + "."):
                    siblings = plan.siblings
                    if siblings is not None:
                        siblings = siblings.replace(old, new) if old in siblings else f"{siblings}@{new}"
                    grown[new + name[len(old) :]] = replace(plan, name=new + name[len(old) :], siblings=siblings)
            listed += [move_region(r, old, new) for r in list(listed) if r.scope == old or r.scope.startswith(old + ".")]
            listed = [widen_region(r, old, new) for r in listed]
        return grown, tuple(listed)

    def spread(self, reasons: Mapping[str, str]) -> dict[str, str]:
        """What is said of a member's Parameters, said of those of the dropped ones that it stands for too."""
        grown = dict(reasons)
        for new, old in self._stand_ins():
            for name, reason in list(grown.items()):
                if name.startswith(old + "."):
                    grown.setdefault(new + name[len(old) :], reason)
        return grown


def empty(module: Any) -> None:
    """Leave nothing of a module but its class and its plain attributes; it returns its first argument."""
    for held in (module._modules, module._parameters, module._buffers):
        held.clear()
    module.forward = _pass_on


def _pass_on(*args: Any, **kwargs: Any) -> Any:
    return args[0] if args else next(iter(kwargs.values()))


def reads_emptied(error: Exception) -> bool:
    """Whether an error tells that something read what an emptied module held."""
    owner = error.obj if isinstance(error, AttributeError) else None
    return isinstance(owner, nn.Module) and owner.__dict__.get("forward") is _pass_on


def move_region(region: Region, old: str, new: str) -> Region:
    """A region inside `old`, moved to `new`."""

    def move(name: str) -> str:
        return new + name[len(old) :] if name == old or name.startswith(old + ".") else name

    return Region(
        move(region.scope),
        tuple(map(move, region.columns)),
        tuple(map(move, region.rows)),
        tuple((move(name), argument) for name, argument in region.entry),
        tuple(map(move, region.exit)),
        region.units,
        tuple((move(name), start, stop) for name, start, stop in region.enters),
    )


def widen_region(region: Region, old: str, new: str) -> Region:
    """A region around several layers, with what it has in `old` listed for `new` too."""
    if region.scope == old or region.scope.startswith(old + ".") or region.scope.startswith(new + ".") or region.scope == new:
        return region
    if not any(name.startswith(old + ".") for name in region.columns + region.rows):
        return region
    moved = move_region(region, old, new)
    return replace(
        region,
        columns=tuple(dict.fromkeys(region.columns + moved.columns)),
        rows=tuple(dict.fromkeys(region.rows + moved.rows)),
        entry=tuple(dict.fromkeys(region.entry + moved.entry)),
        exit=tuple(dict.fromkeys(region.exit + moved.exit)),
        enters=tuple(dict.fromkeys(region.enters + moved.enters)),
    )


def find_reduction(model: nn.Module) -> Reduction:
    """Which layers can stand for others; nothing for a model without long lists of like layers."""
    dropped: dict[str, dict[int, int]] = {}
    taken: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{other}.") for other in taken)
        if inside or not isinstance(module, nn.ModuleList) or len(module) < LEAST:
            continue
        kinds: dict[Any, list[int]] = {}
        own = find_numbers(module)
        for number, member in enumerate(module):
            if member is not None:
                kinds.setdefault(describe(member, own), []).append(number)
        found = {number: numbers[0] for numbers in kinds.values() for number in numbers[KEPT:]}
        if found and not _shares(model, name, found):
            dropped[name] = found
            taken.append(name)
    return Reduction(dropped)


def share_unrun(
    model: nn.Module, reduction: Reduction, ran: Collection[str], tell: Callable[[str], Any] | None = None
) -> Reduction:
    """`reduction`, with like modules shared in lists and dicts of which a forward ran some members and others not.

    Args:
        model: the whole model, nothing taken out.
        ran: names of the modules that ran in the reduced model.
        tell: of a member's name, what else members must have in common.
    """

    def used(name: str) -> list[str]:
        return [key for key in model.get_submodule(name)._modules if f"{name}.{key}" in ran]

    def is_picked(name: str) -> bool:
        there = [key for key in model.get_submodule(name)._modules if reduction.holds(f"{name}.{key}")]
        return bool(used(name)) and not set(there) <= set(used(name))

    lists = [n for n, m in model.named_modules() if isinstance(m, (nn.ModuleList, nn.ModuleDict)) and reduction.holds(n)]
    alike = {fold_name(name) for name in lists if is_picked(name)}  # what one layer picks from, others pick from too
    shared: dict[str, dict[str, str]] = {}
    for name in lists:
        if fold_name(name) in alike and not any(name.startswith(f"{other}.") for other in shared):
            most = 1 if name in reduction.shared and is_picked(name) else KEPT
            stands = _share_members(model, name, used(name), most, tell)
            if not _shares(model, name, stands):
                shared[name] = stands
    shared = {**reduction.shared, **shared}
    return replace(reduction, dropped={k: v for k, v in reduction.dropped.items() if k not in shared}, shared=shared)


def _share_members(model: nn.Module, name: str, used: Collection[str], most: int, tell: Any) -> dict[str, str]:
    """Member -> the one that it shares, one of the first `most` of its kind; each of these is shared by one that runs."""
    kinds: dict[Any, list[str]] = {}
    numbers = find_numbers(model.get_submodule(name).children())
    for key, member in model.get_submodule(name).named_children():
        kinds.setdefault((describe(member, numbers), tell and tell(f"{name}.{key}")), []).append(key)
    stands: dict[str, str] = {}
    for keys in kinds.values():
        running = [key for key in keys if key in used]
        kept = keys[: max(1, min(most, len(running)))]
        idle = [key for key in kept if key not in running]
        others = sorted((key for key in keys if key not in kept), key=lambda key: key not in running)
        stands |= dict(zip(others, itertools.chain(idle, itertools.cycle(kept)), strict=False))
    return stands


def find_numbers(members: Iterable[nn.Module]) -> set[tuple[str, str]]:
    """`(module, attribute)` inside a list's members that hold the member's own number, in all that have it."""
    found: dict[tuple[str, str], bool] = {}
    for number, member in enumerate(members):
        for name, module in member.named_modules() if member is not None else ():
            for key, value in vars(module).items():
                if type(value) is int:
                    found[name, key] = found.get((name, key), True) and value == number
    return {place for place, fits in found.items() if fits}


def describe(member: nn.Module, numbers: set[tuple[str, str]]) -> tuple:
    """Everything about a layer but its weights and its own number, which the attributes `numbers` hold."""
    parts: list[Any] = []
    for name, module in member.named_modules():
        plain = [(k, _plain(v)) for k, v in vars(module).items() if k[:1] != "_" and (name, k) not in numbers]
        tensors = [(k, tuple(p.shape), str(p.dtype), p.requires_grad) for k, p in module._parameters.items() if p is not None]
        tensors += [(k, tuple(b.shape), str(b.dtype), False) for k, b in module._buffers.items() if b is not None]
        parts.append((name, type(module), tuple(sorted(plain)), tuple(tensors)))
    return tuple(parts)


def _plain(value: Any) -> str:
    if isinstance(value, (int, float, str, bool, type(None))):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return repr([_plain(v) for v in value])
    if isinstance(value, dict):
        return repr([(_plain(k), _plain(v)) for k, v in value.items()])
    return type(value).__qualname__ if not callable(value) else getattr(value, "__qualname__", type(value).__qualname__)


def _shares(model: nn.Module, name: str, found: Iterable[int] | Iterable[str]) -> bool:
    """Whether the Parameter of a member that is not to be there is used elsewhere too: then it is not like the others."""
    names: dict[int, set[str]] = {}
    for full, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(full)
    for member in found:
        prefix = f"{name}.{member}."
        for parameter in model.get_submodule(prefix[:-1]).parameters():
            if any(not full.startswith(prefix) for full in names[id(parameter)]):
                return True
    return False


def member_plans(plan: Plan, name: str) -> list[ModulePlan]:
    """What a plan says of module `name` and those in it, by their names in there."""
    inside = [m for m in plan.modules if m.name == name or m.name.startswith(f"{name}.")]
    return [_compared(replace(m, name=m.name[len(name) :])) for m in inside]


def _compared(module: ModulePlan) -> ModulePlan:
    return replace(module, siblings=None if module.siblings is None else "", source="", why="")


def hold_chain(chain: Chain, reduction: Reduction) -> Chain:
    """A chain of the layers that are left; behind the last one the others hand on what they are given."""
    layers = tuple(filter(reduction.holds, chain.layers))
    return replace(chain, layers=layers, join=layers[-1] if chain.join in chain.layers else chain.join)


def keep_modules(plan: Plan, reduction: Reduction) -> Plan | None:
    """The part of a plan that is about kept layers; None if it says something else about layers that they stand for."""
    kept = {m.name: m for m in plan.modules if reduction.holds(m.name)}
    regions = tuple(r for r in plan.regions if all(map(reduction.holds, (r.scope, *r.columns, *r.rows))))
    chains = tuple(hold_chain(chain, reduction) for chain in plan.chains)
    grown, _ = reduction.expand(kept, ())
    if {n: _compared(m) for n, m in grown.items()} != {m.name: _compared(m) for m in plan.modules}:
        return None
    return replace(plan, modules=tuple(kept.values()), regions=regions, chains=chains)
