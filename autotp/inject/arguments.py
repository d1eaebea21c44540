"""Copies of what a module is called with: a cache that its forward fills must be as empty again when it runs a second time."""

from __future__ import annotations

import types
from collections.abc import Callable
from enum import Enum
from typing import Any

from torch import Tensor, nn

_KEPT = (nn.Module, Enum, type, types.FunctionType, types.MethodType, types.ModuleType)


def copy_arguments(value: Any, leaf: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Any:
    """A nest of tuples, lists, dicts and objects, each copied once, with `leaf` of each tensor; modules and configs stay."""
    copies: dict[int, Any] = {}  # one tensor passed twice stays one

    def copied(value: Any) -> Any:
        if id(value) in copies:
            return copies[id(value)]
        if isinstance(value, Tensor):
            return copies.setdefault(id(value), leaf(value))
        if type(value) is tuple:
            return tuple(map(copied, value))
        if type(value) in (list, dict):
            made = copies[id(value)] = type(value)()
            made.update({k: copied(v) for k, v in value.items()}) if type(value) is dict else made.extend(map(copied, value))
            return made
        if not hasattr(value, "__dict__") or isinstance(value, _KEPT) or hasattr(value, "to_dict"):
            return value
        try:
            made = object.__new__(type(value))
        except TypeError:  # an object that is not made of attributes alone
            return value
        copies[id(value)] = made
        vars(made).update({key: copied(v) for key, v in vars(value).items()})
        return made

    return copied(value)
