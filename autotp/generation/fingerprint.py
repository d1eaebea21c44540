"""What the launches of a captured step depend on beside their inputs: where weights lie, and how the model would run now.

A graph replays addresses and choices. Adapters switched off, hooks, a forward that was put in, another dtype or attention, a
number of the config, weights assigned anew: each must show here, or the graph would go on with what was.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.modules import module as every_module

from ..layers.packed import list_tensors

_TENSORS = {Tensor, nn.Parameter}
_PLAIN = {bool, int, float, str, torch.dtype, torch.device, type(None)}
_CONTAINERS = {list, tuple, dict}
_DEPTH = 3  # of containers in containers
_FREE = object()  # the outline of what may change freely
# Passed over: what every module has, seen otherwise here or of no weight; our maps of Shards, which change with the tensors;
# what a forward notes on the head; and what transformers notes on a model at each call of generate.
_PASSED = {*nn.Module().__dict__, "shards", "copied", "ran", "keep_sharded", "_is_hf_initialized", "_previous_max_cache_length"}


class Fingerprint:
    """What a model is now, as far as a captured step depends on it. It keeps plain values alive, none of the model's parts."""

    def __init__(self, model: nn.Module) -> None:
        modules = _walk(model)
        self._state = _read_state(model, modules)
        self._tables = [_Table(table) for table in _list_tables(model, modules)]

    def holds(self, model: nn.Module) -> bool:
        """Whether what was captured of the model would still do what `model` does; every prompt waits for it."""
        modules = _walk(model)
        if _read_state(model, modules) != self._state:
            return False
        tables = _list_tables(model, modules)
        return len(tables) == len(self._tables) and all(
            seen.holds(table) for seen, table in zip(self._tables, tables, strict=True)
        )


class _Table:
    """What is in one module beside its tensors, modules and hooks, or in a config, by what is compared.

    Attributes:
        size: entries in all. fixed: values that can't change by themselves. contents: outlines of containers. classes: of other
            objects, which may change freely; called: notes of those that are called. outline: of everything, made again
            where one of these differs.
    """

    __slots__ = ("called", "classes", "contents", "fixed", "outline", "size")

    def __init__(self, table: dict[str, Any]) -> None:
        self.size, self.outline = len(table), _outline_all(table)
        self.fixed: list[tuple[str, Any]] = []
        self.called: list[tuple[str, Any]] = []
        self.contents: list[tuple[str, Any]] = []
        self.classes: list[tuple[str, type]] = []
        for name, seen in self.outline.items():
            value = table[name]
            kind = type(value)
            if kind in _PLAIN or (kind is tuple and all(type(each) in _PLAIN for each in value)):
                self.fixed.append((name, value))
            elif kind in _CONTAINERS:
                self.contents.append((name, seen))
            else:
                self.classes.append((name, kind))
                if seen is not _FREE:
                    self.called.append((name, seen))

    def holds(self, table: dict[str, Any]) -> bool:
        return self._glance(table) or _outline_all(table) == self.outline

    def _glance(self, table: dict[str, Any]) -> bool:
        """Whether nothing differs, where a difference may be none: equal values that are other objects, say."""
        if len(table) != self.size:
            return False
        for name, value in self.fixed:
            if table.get(name, _FREE) is not value:
                return False
        for name, seen in self.called:
            value = table.get(name)
            if (seen() is not value) if type(seen) is ref else (seen != id(value)):
                return False
        for name, kind in self.classes:
            if type(table.get(name)) is not kind:
                return False
        return not self.contents or all(_outline(table.get(name)) == seen for name, seen in self.contents)


def _walk(model: nn.Module) -> list[nn.Module]:
    """`model` and all modules below it, once each, always in one order."""
    found, seen = [model], {model}
    for module in found:
        for child in module.__dict__["_modules"].values():
            if child is not None and child not in seen:
                seen.add(child)
                found.append(child)
    return found


def _list_tables(model: nn.Module, modules: list[nn.Module]) -> list[dict[str, Any]]:
    """What the modules hold, and the model's config with those in it, which forwards read too."""
    config = getattr(model, "config", None)
    parts = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))]
    return [module.__dict__ for module in modules] + [each.__dict__ for each in parts if hasattr(each, "__dict__")]


def _read_state(model: nn.Module, modules: list[nn.Module]) -> list[Any]:
    """What the process is set to; of all modules the classes, modes and hooks; where all tensors lie, and their dtypes."""
    cuda, tables = torch.backends.cuda, [module.__dict__ for module in modules]
    held = [each for table in tables for each in (table["_parameters"], table["_buffers"]) if each]
    tensors = [tensor for each in held for tensor in each.values() if tensor is not None]
    hooks = [each for table in tables for each in (table["_forward_hooks"], table["_forward_pre_hooks"])]
    return [
        *(torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in ("cuda", "cpu")),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()),
        getattr(getattr(model, "config", None), "_attn_implementation", None),
        [module.__class__ for module in modules],
        [table["training"] for table in tables],
        (*every_module._global_forward_hooks, *every_module._global_forward_pre_hooks),
        [(place, tuple(each)) for place, each in enumerate(hooks) if each],  # by their numbers, which are never given again
        # Of another shape it would lie elsewhere.
        [tensor.data_ptr() if type(tensor) in _TENSORS else _find_places(tensor) for tensor in tensors],
        [tensor.dtype for tensor in tensors],
    ]


def _find_places(tensor: Any) -> tuple[int, ...]:
    """Where the parts of a tensor of another class lie: torchao's have no address of their own, bitsandbytes' scales beside."""
    return tuple([each.data_ptr() for each in list_tensors(tensor)])


def _outline_all(table: dict[str, Any]) -> dict[str, Any]:
    return {name: _outline(value) for name, value in table.items() if name not in _PASSED}


def _outline(value: Any, depth: int = _DEPTH) -> Any:
    """Plain values as they are, containers of them and of others, callables by identity; other objects may change freely."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list or kind is tuple:
        return tuple([each if type(each) in _PLAIN else _outline(each, depth - 1) for each in value if _is_seen(each, depth)])
    if kind is dict:
        return tuple(
            [
                (key, each if type(each) in _PLAIN else _outline(each, depth - 1))
                for key, each in value.items()
                if _is_seen(each, depth)
            ]
        )
    return _note(value) if callable(value) and not isinstance(value, nn.Module) else _FREE


def _is_seen(value: Any, depth: int) -> bool:
    """Whether the outline of what holds `value`, `depth` containers above the last, has it."""
    return type(value) in _PLAIN or (depth > 1 and type(value) in _CONTAINERS)


def _note(value: Any) -> Any:
    """Something that tells `value` from all others and does not keep it alive; its number alone may be given again after it."""
    try:
        return ref(value)
    except TypeError:
        return id(value)
