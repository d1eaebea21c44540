"""Fresh random weights for shards: `torch.nn.init` draws the whole tensor, and each rank keeps its part.

Ranks whose generators stand alike get the parts of what the unsharded model would get, without communication.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..shard import Shard
from .base import TensorParallel_Layer, holder_of

DRAWS = (
    *("uniform_", "normal_", "trunc_normal_", "xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_"),
    *("orthogonal_", "sparse_", "eye_", "dirac_"),
)


def install_initialize(replace: Callable) -> None:
    """Wrap `torch.nn.init`'s functions, and transformers' table of them; pass-through for what is no shard."""
    from transformers import initialization

    for name in DRAWS:
        replace(nn.init, name, _draw_whole)
        if name in getattr(initialization, "TORCH_INIT_FUNCTIONS", ()):
            initialization.TORCH_INIT_FUNCTIONS[name] = getattr(nn.init, name)
    for name in ("zeros_", "constant_"):
        replace(nn.init, name, _fill_row)
        if name in getattr(initialization, "TORCH_INIT_FUNCTIONS", ()):
            initialization.TORCH_INIT_FUNCTIONS[name] = getattr(nn.init, name)
    replace(nn.init, "_calculate_fan_in_and_fan_out", _measure_whole)


def _find_shard(tensor: Any) -> tuple[Shard, int] | None:
    """How a parameter is dealt, and this rank; None if it is whole here."""
    held = holder_of(tensor)
    if held is None or isinstance(tensor, DTensor) or not isinstance(held[0], TensorParallel_Layer):
        return None
    shard = held[0].shards.get(held[1])
    if shard is None or shard.is_whole or tuple(tensor.shape) == shard.shape:
        return None
    return shard, held[0].tp.tp_rank


def _draw_whole(original: Callable) -> Callable:
    @functools.wraps(original)
    def draw(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found = _find_shard(tensor)
        if found is None:
            return original(tensor, *args, **kwargs)
        shard, rank = found
        with torch.no_grad():
            whole = original(torch.empty(shard.shape, dtype=tensor.dtype, device=tensor.device), *args, **kwargs)
            tensor.copy_(shard.split(whole, rank))
        return tensor

    return draw


def _fill_row(original: Callable) -> Callable:
    """`zeros_(embedding.weight[padding_idx])` means a row of the whole table: filled where it is held."""

    @functools.wraps(original)
    def fill(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        base = tensor._base
        found = None if base is None or tensor.ndim != base.ndim - 1 else _find_shard(base)
        if base is None or found is None:
            return original(tensor, *args, **kwargs)
        shard, rank = found
        cut = next((cut for cut in shard.cuts if cut.dim == 0), None)
        row = torch.tensor((tensor.storage_offset() - base.storage_offset()) // base.stride(0))
        places = row.reshape(1) if cut is None else (cut.indices(rank) == row).nonzero().flatten()
        for place in places.tolist():
            original(base[place], *args, **kwargs)
        return tensor

    return fill


def _measure_whole(original: Callable) -> Callable:
    def measure(tensor: Tensor) -> Any:
        found = _find_shard(tensor)
        return original(tensor if found is None else torch.empty(found[0].shape, device="meta"))

    return measure
