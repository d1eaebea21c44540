"""What the launches of a captured step depend on beside their inputs: where weights lie, and how the model would run now.

A graph replays addresses and choices. Adapters switched off, hooks, a forward that was put in, another dtype or attention,
weights assigned anew: each must show here, or the graph would go on with what was.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_PLAIN = (bool, int, float, str, torch.dtype, torch.device, type(None))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def fingerprint(model: nn.Module) -> int:
    """A number that differs when a captured step of `model` would no longer do what the model does."""
    parts: list[Any] = [
        torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None,
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
        getattr(getattr(model, "config", None), "_attn_implementation", None),
    ]
    for module in model.modules():
        table = module.__dict__
        parts.append(id(type(module)))
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            parts.append(None if tensor is None else (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()))
        for name in _HOOKS:
            parts.append(tuple(map(id, table[name].values())))
        for name, value in table.items():
            if name[0] != "_" or name.startswith(("_disable", "_active", "_tp")):
                parts.append(_outline(name, value))
    return hash(tuple(parts))


def _outline(name: str, value: Any) -> Any:
    """Plain values as they are, containers of them one level deep, callables by identity; other objects may change freely."""
    if isinstance(value, _PLAIN):
        return name, value
    if isinstance(value, list | tuple):
        return name, tuple(each for each in value if isinstance(each, _PLAIN))
    if isinstance(value, dict):
        return name, tuple((key, each) for key, each in value.items() if isinstance(each, _PLAIN))
    return (name, id(value)) if callable(value) and not isinstance(value, nn.Module) else name
