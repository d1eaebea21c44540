"""What the launches of a captured step depend on beside their inputs: where weights lie, and how the model would run now.

A graph replays addresses and choices. Adapters switched off, hooks, a forward that was put in, another dtype or attention,
weights assigned anew: each must show here, or the graph would go on with what was.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..layers.packed import list_tensors

_TENSORS = {Tensor, nn.Parameter}
_PLAIN = {bool, int, float, str, torch.dtype, torch.device, type(None)}
# What every module has, seen otherwise here or of no weight; and what transformers notes on a model at each call of generate.
_PASSED = {*nn.Module().__dict__, "_is_hf_initialized", "_previous_max_cache_length"}


def fingerprint(model: nn.Module) -> int:
    """A number that differs when a captured step of `model` would no longer do what the model does."""
    cuda = torch.backends.cuda
    parts: list[Any] = [
        *(torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in ("cuda", "cpu")),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()),
        getattr(getattr(model, "config", None), "_attn_implementation", None),
    ]
    add = parts.append
    for module in model.modules():
        table = module.__dict__
        add(id(module.__class__))
        for tensors in (table["_parameters"], table["_buffers"]):
            for tensor in tensors.values():
                if tensor is not None:  # of another shape it would lie elsewhere
                    add(tensor.data_ptr() if type(tensor) in _TENSORS else _find_places(tensor))
                    add(tensor.dtype)
        add(table["training"])
        for hooks in (table["_forward_hooks"], table["_forward_pre_hooks"]):
            if hooks:
                add(tuple(hooks))  # by their numbers, which are never given again
        for name in table:
            if name not in _PASSED:
                add(_outline(name, table[name]))
    return hash(tuple(parts))


def _find_places(tensor: Any) -> tuple[int, ...]:
    """Where the parts of a tensor of another class lie: torchao's have no address of their own, bitsandbytes' scales beside."""
    return tuple([each.data_ptr() for each in list_tensors(tensor)])


def _outline(name: str, value: Any) -> Any:
    """Plain values as they are, containers of them one level deep, callables by identity; other objects may change freely."""
    kind = type(value)
    if kind in _PLAIN:
        return name, value
    if kind is list or kind is tuple:
        return name, tuple([each for each in value if type(each) in _PLAIN])
    if kind is dict:
        return name, tuple([(key, each) for key, each in value.items() if type(each) in _PLAIN])
    return (name, id(value)) if callable(value) and not isinstance(value, nn.Module) else name
