"""Edits the attributes that a module's forward reads: on the module itself, or through a view of its live config."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cache
from typing import Any

from torch import nn

from ..errors import PlanError

_KEPT = "autotp_attrs"  # in the module's __dict__: what was there before
_OWN = frozenset(("__class__", "__deepcopy__", "__copy__", "__reduce_ex__", "__reduce__"))


def set_attributes(module: nn.Module, name: str, attrs: Mapping[str, tuple[Any, ...]], rank: int) -> None:
    """Give `module` the rank's value of each attribute; "config.key" becomes a view of its config. All are found first.

    Raises:
        PlanError: the module has no such attribute.
    """
    values: dict[str, Any] = {}
    views: dict[str, dict[str, Any]] = {}
    for key, each in attrs.items():
        holder, _, own = key.rpartition(".")
        target = getattr(module, holder, None) if holder else module
        if target is None or "." in holder or not hasattr(target, own):
            raise PlanError(f"the plan edits {key} of {name}, which this {type(module).__name__} does not have")
        value = nest_like(each[rank], getattr(target, own))
        if holder:
            views.setdefault(holder, {})[own] = value
        else:
            values[own] = value
    for holder, overrides in views.items():
        values[holder] = view_config(getattr(module, holder), overrides)
    if values:
        module.__dict__[_KEPT] = {key: getattr(module, key) for key in values}
    for key, value in values.items():
        setattr(module, key, value)


def nest_like(value: Any, old: Any) -> Any:
    """`value`, whose nests are tuples, with lists where `old` has lists."""
    if not isinstance(value, (list, tuple)) or not isinstance(old, (list, tuple)):
        return value
    if len(value) == len(old):
        value = tuple(nest_like(v, o) for v, o in zip(value, old, strict=True))
    return list(value) if isinstance(old, list) else value


def restore_attributes(module: nn.Module) -> None:
    """The inverse of `set_attributes`."""
    for key, value in module.__dict__.pop(_KEPT, {}).items():
        setattr(module, key, value)


def view_config(live: Any, overrides: Mapping[str, Any]) -> Any:
    """An object of a subclass of `live`'s class that answers `overrides` itself and asks and changes `live` for all else.

    So what is set on the live config later (`model.set_attn_implementation`) is seen, and saving writes the live values. A
    deep copy beside its model views the copy's config.
    """
    names = getattr(live, "attribute_map", None) or {}
    view = object.__new__(_view_class(type(live)))
    object.__setattr__(view, "autotp_view", (live, {names.get(key, key): value for key, value in overrides.items()}, names))
    return view


@cache
def _view_class(cls: type) -> type:
    view = type(cls.__name__, (cls,), {"__module__": cls.__module__})
    for method in (_get, _set, _delete, _equal, _deep_copy, _reduce, _dir):  # afterwards: a dataclass writes some of its own
        setattr(view, _METHODS[method], method)
    view.__hash__ = None  # type: ignore[assignment]
    return view


def _get(self: Any, name: str) -> Any:
    if name in _OWN:
        return object.__getattribute__(self, name)
    live, overrides, names = object.__getattribute__(self, "autotp_view")
    key = names.get(name, name)
    return overrides[key] if key in overrides else getattr(live, name)


def _set(self: Any, name: str, value: Any) -> None:
    live, overrides, names = object.__getattribute__(self, "autotp_view")
    key = names.get(name, name)
    if key in overrides:
        overrides[key] = value
    else:
        setattr(live, name, value)


def _delete(self: Any, name: str) -> None:
    delattr(object.__getattribute__(self, "autotp_view")[0], name)


def _equal(self: Any, other: Any) -> bool:
    return object.__getattribute__(self, "autotp_view")[0] == other


def _deep_copy(self: Any, memo: dict[int, Any]) -> Any:
    live, overrides, _ = object.__getattribute__(self, "autotp_view")
    return view_config(copy.deepcopy(live, memo), copy.deepcopy(overrides, memo))


def _reduce(self: Any, protocol: Any = None) -> Any:
    live, overrides, _ = object.__getattribute__(self, "autotp_view")
    return view_config, (live, overrides)


def _dir(self: Any) -> list[str]:
    return dir(object.__getattribute__(self, "autotp_view")[0])


_METHODS = {
    _get: "__getattribute__",
    _set: "__setattr__",
    _delete: "__delattr__",
    _equal: "__eq__",
    _deep_copy: "__deepcopy__",
    _reduce: "__reduce_ex__",
    _dir: "__dir__",
}
