"""Refuses savers that would keep one rank's plain shards for all.

`torch.distributed.checkpoint.save` takes what several ranks hold under one name for copies; `Accelerator.save` writes what the
main process holds.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.tensor import DTensor

from ..errors import CheckpointError
from ..groups import ranks_of
from ..shard import Shard
from .base import TensorParallel_Layer, _holder_of


def install_save_guard(replace: Callable) -> None:
    """Wrap torch's `save` and `async_save`, under both names that they have, and accelerate's `save`."""
    from accelerate import Accelerator

    for name in ("save", "async_save"):
        replace(state_dict_saver, name, _wrap_save)
        setattr(dcp, name, getattr(state_dict_saver, name))
    replace(Accelerator, "save", _wrap_accelerate_save)


def _wrap_save(original: Callable) -> Callable:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def save(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        if not given.get("no_dist"):
            _refuse_shards(given["state_dict"], given.get("process_group"))
        return original(*args, **kwargs)

    return save


def _wrap_accelerate_save(original: Callable) -> Callable:
    def save(self, obj, f, *args: Any, **kwargs: Any) -> Any:
        found = next(_find_shards(obj), None)
        if found is not None:
            key, _, shard = found
            raise CheckpointError(
                f"'{key}' is one rank's shard of {shard.shape}, and accelerator.save writes what the main process holds: save "
                f"accelerator.get_state_dict(model), or with accelerator.save_model or autotp.save_pretrained"
            )
        return original(self, obj, f, *args, **kwargs)

    return save


def _refuse_shards(state: Any, process_group: Any) -> None:
    for key, layer, shard in _find_shards(state):
        both = sorted(set(layer.tp.ranks) & set(ranks_of(process_group)))
        if len(both) > 1:
            raise CheckpointError(
                f"'{key}' is one rank's shard of {shard.shape}, and torch.distributed.checkpoint would keep one of those that "
                f"ranks {both} hold under this name: save with autotp.TrainingState, or autotp.save_pretrained"
            )


def _find_shards(state: Any) -> Iterator[tuple[str, TensorParallel_Layer, Shard]]:
    """`(key, layer, shard)` of each tensor in `state` that lies where a model's shard does."""
    held = {}
    for entry in list(_holder_of.values()):
        layer, name = entry[1](), entry[2]
        shard = layer.shards.get(name) if isinstance(layer, TensorParallel_Layer) else None
        parameter = entry[0]()
        if layer is not None and shard is not None and not shard.is_whole and isinstance(parameter, Tensor):
            held[_address(parameter)] = (layer, shard)
    for key, tensor in _iterate_tensors(state, "") if held else ():
        found = held.get(_address(tensor)) if tensor.numel() else None
        if found is not None:
            yield key, *found


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
