"""Refuses `torch.distributed.checkpoint.save` of plain shards: it takes what several ranks hold under one name for copies."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.tensor import DTensor

from ..comm import ranks_of
from ..errors import CheckpointError
from .base import TensorParallel_Layer, _holder_of


def install_save_guard(replace: Callable) -> None:
    """Wrap `save` and `async_save`, under both names that they have."""
    for name in ("save", "async_save"):
        replace(state_dict_saver, name, _wrap_save)
        setattr(dcp, name, getattr(state_dict_saver, name))


def _wrap_save(original: Callable) -> Callable:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def save(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        if not given.get("no_dist"):
            _refuse_shards(given["state_dict"], given.get("process_group"))
        return original(*args, **kwargs)

    return save


def _refuse_shards(state: Any, process_group: Any) -> None:
    held = {}
    for entry in list(_holder_of.values()):
        layer, name = entry[1](), entry[2]
        shard = layer.shards.get(name) if isinstance(layer, TensorParallel_Layer) else None
        parameter = entry[0]()
        if layer is not None and shard is not None and not shard.is_whole and isinstance(parameter, Tensor):
            held[_address(parameter)] = (layer, shard)
    if not held:
        return
    for key, tensor in _iterate_tensors(state, ""):
        found = held.get(_address(tensor)) if tensor.numel() else None
        both = sorted(set(found[0].tp.ranks) & set(ranks_of(process_group))) if found is not None else []
        if found is not None and len(both) > 1:
            raise CheckpointError(
                f"'{key}' is one rank's shard of {found[1].shape}, and torch.distributed.checkpoint would keep one of those that "
                f"ranks {both} hold under this name: save with autotp.TrainingState, or autotp.save_pretrained"
            )


def _address(tensor: Tensor) -> int:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).data_ptr()


def _iterate_tensors(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _iterate_tensors(each, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from _iterate_tensors(each, f"{path}.{number}")
    elif callable(getattr(value, "state_dict", None)) and not isinstance(value, type):
        yield from _iterate_tensors(value.state_dict(), path)
