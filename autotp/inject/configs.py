"""What a model says of its inputs: fields of its config and of the configs inside it, and sizes of its layers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import nn

_CROSS = re.compile(r"(cross_?att|encoder_attn|EncDecAttention)[^.]*\.(.*\.)?(k(ey|v)?(_proj)?|c_attn)$", re.IGNORECASE)


def _configs(config: Any) -> Iterator[Any]:
    """`config` and every config inside it, outermost first."""
    yield config
    for value in vars(config).values():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield from _configs(value)


def _read(config: Any, name: str) -> Any:
    """The field `name` of this config alone, its alias allowed; None if it is not set."""
    held = vars(config)
    return held.get(name, held.get(config.attribute_map.get(name, name)))


def first_of(config: Any, *names: str, default: Any = None) -> Any:
    """The first field of `names` that `config` or a config inside it sets."""
    found = (_read(part, name) for name in names for part in _configs(config))
    return next((value for value in found if value is not None), default)


def config_part(config: Any, *names: str) -> Any:
    """The config inside `config` under the first of `names` that holds one."""
    return next((v for n in names if hasattr(v := getattr(config, n, None), "to_dict")), None)


def as_pair(value: Any) -> tuple[int, int]:
    """Height and width of a config's size: an int, a pair or a dict."""
    if isinstance(value, dict | list | tuple):
        sizes: list[Any] = list(value.values() if isinstance(value, dict) else value)
        return (int(sizes[-2]), int(sizes[-1])) if len(sizes) > 1 else (int(sizes[0]), int(sizes[0]))
    return int(value), int(value)


def special_ids(config: Any) -> set[int]:
    """Token ids that mean something to the model, so that random text must not hold them."""
    ids: set[int] = set()
    for part in _configs(config):
        for name, value in vars(part).items():
            if re.search(r"token(_id|_index|_ids)?$", name) and "num" not in name:
                ids.update(v for v in (value if isinstance(value, list | tuple) else [value]) if type(v) is int)
    return ids


def text_rows(model: Any) -> int | None:
    """Rows of the model's own table of tokens."""
    try:
        table = model.get_input_embeddings()
    except (NotImplementedError, AttributeError):
        return None
    return getattr(table, "num_embeddings", None)


def cross_width(model: nn.Module) -> int | None:
    """Width of what the cross-attention reads; None without cross-attention."""
    for name, module in model.named_modules():
        if _CROSS.search(name):
            width = getattr(module, "in_features", None)
            if isinstance(width, int):
                return width
    return None
