"""A caller's hints for odd forward code: attributes with a value for each rank, and replacement forwards. All are proved."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from ..errors import PlanError, ProofError
from .describe import fold_name
from .forwards import Forward, name_forward
from .module_plan import ModulePlan
from .plan import Plan
from .reduce import Reduction
from .specs import Spec, match_names


@dataclass
class Hints:
    """What a caller says of modules, by full name.

    Attributes:
        edits: module -> attribute -> its value on each rank; forwards: module -> what stands for its own forward.
    """

    edits: dict[str, dict[str, tuple[Any, ...]]] = field(default_factory=dict)
    forwards: dict[str, Forward] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.edits or self.forwards)

    @property
    def names(self) -> list[str]:
        """The modules that something is said of."""
        return list(dict.fromkeys([*self.edits, *self.forwards]))

    def fit(self, reduction: Reduction) -> bool:
        """Whether dropped layers have the hints of the ones that stand for them."""
        pairs = [(own, n, stands) for own, members in reduction.dropped.items() for n, stands in members.items()]
        return all(self.below(f"{own}.{number}") == self.below(f"{own}.{stands}") for own, number, stands in pairs)

    def below(self, prefix: str) -> dict[str, tuple[Any, Any]]:
        """What is said of module `prefix` and those in it, by their names in there."""
        inside = [name for name in self.names if is_inside(name, prefix)]
        return {name[len(prefix) :]: (self.edits.get(name), self.forwards.get(name)) for name in inside}

    def add_to(
        self, modules: dict[str, ModulePlan], scopes: Iterable[str] | None = None, holds: Callable[[str], bool] = lambda _: True
    ) -> None:
        """Say it in module plans: every forward, but edits only where one of the `scopes`, which are split, lies around or below.

        `holds`: whether a module is there at all.
        """
        scopes = None if scopes is None else set(scopes)
        for name in filter(holds, self.names):
            base = modules.get(name, ModulePlan(name, "local_params", source="caller"))
            if name in self.forwards:
                base = replace(base, forward=name_forward(self.forwards[name]))
            if name in self.edits and (scopes is None or any(is_related(name, scope) for scope in scopes)):
                base = replace(base, attrs={**base.attrs, **self.edits[name]})
            if base.forward or base.attrs or name in modules:
                modules[name] = base

    def describe(self, name: str) -> str:
        """What is said of one module, in short."""
        said = [f"{key}={values}" for key, values in self.edits.get(name, {}).items()]
        return ", ".join(said + ([f"forward={name_forward(self.forwards[name])}"] if name in self.forwards else []))


def is_inside(name: str, prefix: str) -> bool:
    """Whether module or Parameter `name` is `prefix` or below it; everything is below the root, ""."""
    return prefix in ("", name) or name.startswith(f"{prefix}.")


def is_related(name: str, other: str) -> bool:
    """Whether one of two modules holds the other."""
    return is_inside(name, other) or is_inside(other, name)


# -- reading ------------------------------------------------------------------------------------------------------------


def read_hints(model: nn.Module, tp_size: int, attrs: Any, specs: Mapping[str, Spec] | None = None) -> Hints:
    """The hints of `attrs=`, and those in the values of a caller's dict by full name.

    Raises:
        PlanError: a key matches no module, a module has no such attribute, or a value is not one for each rank.
    """
    hints, modules = Hints(), dict(model.named_modules())
    for name, spec in (specs or {}).items():
        own = dict(spec.get("attrs") or {}) | ({"forward": spec["forward"]} if "forward" in spec else {})
        if own and name not in modules:
            raise PlanError(f"plan[{name!r}] is a Parameter: attributes and forwards are edited on the module that holds it")
        for key, value in own.items():
            _add(hints, f"plan[{name!r}]", name, modules[name], key, value, tp_size)
    if attrs is not None and not isinstance(attrs, Mapping):
        raise PlanError(f"attrs={attrs!r}: expected {{module name, pattern or class: {{attribute: one value for each rank}}}}")
    for pattern, own in (attrs or {}).items():
        where = f"attrs[{pattern.__name__ if isinstance(pattern, type) else repr(pattern)}]"
        if not isinstance(own, Mapping) or not own:
            raise PlanError(f"{where} is {own!r}: expected {{attribute: one value for each rank}} or {{'forward': function}}")
        for name in _match(model, modules, pattern, where):
            for key, value in own.items():
                _add(hints, where, name, modules[name], key, value, tp_size)
    return hints


def _match(model: nn.Module, modules: Mapping[str, nn.Module], pattern: Any, where: str) -> list[str]:
    if isinstance(pattern, type):
        found, known = [name for name, module in modules.items() if isinstance(module, pattern)], []
        known = [type(module).__name__ for module in modules.values()]
    elif isinstance(pattern, str):
        found, known = match_names(pattern, modules), [fold_name(name) for name in modules if name]
    else:
        raise PlanError(f"{where}: a key is a module's name, a pattern of names, or a class")
    if not found:
        word = pattern.__name__ if isinstance(pattern, type) else pattern
        near = difflib.get_close_matches(word, sorted(set(known)), 3, cutoff=0.4)
        raise PlanError(f"{where} matches no module of {type(model).__name__}; nearest: {', '.join(near) or 'none'}")
    return found


def _add(hints: Hints, where: str, name: str, module: nn.Module, key: Any, value: Any, tp_size: int) -> None:
    """Add one hint, checked."""
    if key == "forward":
        if not inspect.isfunction(value):
            raise PlanError(f"{where}: 'forward' is {value!r}: expected a function (module, ...) with forward's own arguments")
        if hints.forwards.setdefault(name, value) is not value:
            raise PlanError(f"{where} gives {name} a second replacement forward beside {name_forward(hints.forwards[name])}")
        return
    holder, _, own = str(key).rpartition(".")
    target = getattr(module, holder, None) if holder else module
    if target is None or not hasattr(target, own):
        held = [k for k, v in vars(target or module).items() if k[:1] != "_" and isinstance(v, int | list | tuple)]
        near = difflib.get_close_matches(own, held, 3, cutoff=0.4) or held[:3]
        raise PlanError(
            f"{where} edits attribute {key!r}, which {name} ({type(module).__name__}) does not have; it has {', '.join(near)}"
        )
    if not isinstance(value, list | tuple) or len(value) != tp_size:
        raise PlanError(f"{where}: {key!r} must list one value for each of {tp_size} ranks, got {value!r}")
    edits = hints.edits.setdefault(name, {})
    if edits.setdefault(key, tuple(value)) != tuple(value):
        raise PlanError(f"{where} gives {key!r} of {name} other values, {value!r}, than {list(edits[key])} given before")


def spell(value: Any) -> Any:
    """`value` with functions and classes by name, so that all ranks write the same."""
    if inspect.isfunction(value) or isinstance(value, type):
        return name_forward(value)
    if isinstance(value, Mapping):
        return {spell(key): spell(item) for key, item in value.items()}
    return value


# -- checks -------------------------------------------------------------------------------------------------------------


def check_given(plan: Plan, hints: Hints) -> None:
    """Refuse hints that do not belong to a plan made before, which says its edits itself; what it lacks, the rewrite refuses.

    Raises:
        PlanError: edits, or a forward of which the plan says nothing.
    """
    if hints.edits:
        name = next(iter(hints.edits))
        raise PlanError(
            f"attrs= edits {hints.describe(name)} of {name or 'the model'}, but a Plan says its edits itself: edit the plan, or "
            f"make it again with attrs="
        )
    for name, function in hints.forwards.items():
        if name not in plan.by_name or plan[name].forward is None:
            raise PlanError(f"{name}: the plan was made without {name_forward(function)}: make it again with attrs=")


def check_used(plan: Plan, hints: Hints) -> None:
    """Refuse hints of modules in which nothing could be split.

    Raises:
        ProofError: naming the module, what was said of it, and why it stayed whole.
    """
    for name in hints.names:
        if not any(is_related(name, region.scope) for region in plan.regions):
            said = [m.why for m in plan.modules if m.why and is_inside(m.name, name)]
            why = dict.fromkeys(said + [e.reason for e in plan.whole if is_inside(e.name, name) and e.reason != "small"])
            raise ProofError(
                f"attrs= gives {name or 'the model'} {hints.describe(name)}, but no split of what is in it proves with that: "
                f"{'; '.join(list(why)[:2]) or 'nothing in it is a linear map of a Parameter'}. Mend the hint, or leave it out."
            )
