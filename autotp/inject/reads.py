"""Notes the sizes that a forward reads from its modules and their configs: integers, and short nests of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

MOST = 8  # numbers and names in a nest
_EVERY = frozenset(vars(nn.Module()))  # what every module has


@contextmanager
def log_reads(scope: nn.Module, prefix: str, seen: dict[tuple[str, str], Any]) -> Iterator[None]:
    """Note in `seen` every integer that is read from the modules below `scope` and from their configs."""
    changed: list[tuple[Any, type]] = []
    configs: set[int] = set()

    def watch(target: Any, note: Mapping[str, Any] | None, name: str, holder: str) -> None:
        cls = type(target)

        def read(self: Any, key: str, get=cls.__getattribute__) -> Any:
            value = get(self, key)
            own = key[:1] != "_" if note is None else key in note and key not in _EVERY
            if own and is_size(value):
                seen[name, holder + key] = with_sizes(value, iter(sizes_in(value)))
            return value

        changed.append((target, cls))
        object.__setattr__(target, "__class__", type(cls.__name__, (cls,), {"__getattribute__": read}))

    for own, module in scope.named_modules():
        name = f"{prefix}.{own}" if prefix and own else prefix or own
        config = module.__dict__.get("config")
        watch(module, module.__dict__, name, "")
        if config is not None and id(config) not in configs:
            configs.add(id(config))
            watch(config, None, name, "config.")
    try:
        yield
    finally:
        for target, cls in changed:
            object.__setattr__(target, "__class__", cls)


def is_size(value: Any) -> bool:
    """An integer above 1, or a nest of lists and tuples of positive integers, one of them above 1, and names beside them."""
    if isinstance(value, (list, tuple)):
        parts = list(_leaves(value))
        fits = len(parts) <= MOST and all(type(v) is str or (type(v) is int and v > 0) for v in parts)
        return fits and any(is_size(v) for v in parts)
    return type(value) is int and value > 1


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from _leaves(part)
    else:
        yield value


def sizes_in(value: Any) -> list[int]:
    """The integers of a nest, in order."""
    return [leaf for leaf in _leaves(value) if type(leaf) is int]


def with_sizes(value: Any, sizes: Iterator[int]) -> Any:
    """The nest `value`, as tuples, with its integers replaced in order."""
    if isinstance(value, (list, tuple)):
        return tuple(with_sizes(part, sizes) for part in value)
    return next(sizes) if type(value) is int else value
