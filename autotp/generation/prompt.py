"""The prompt's way through the model: all of it in one forward where that fits, else rows or pieces at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .arena import ArenaCache
from .buckets import split_prompt
from .choose import Head


def take_inputs(input_ids: Tensor, model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """What goes into forwards beside ids and cache, with one row for each of `input_ids` `[B, S]`."""
    taken = dict(model_kwargs)
    positions = taken.get("position_ids")
    if positions is not None:
        taken["position_ids"] = positions.expand(*positions.shape[:-2], input_ids.shape[0], positions.shape[-1])
    return taken


def read_prompt(
    model: Any, cache: ArenaCache, cache_name: str, input_ids: Tensor, config: Any, inputs: dict[str, Any], head: Head | None
) -> Tensor:
    """Fill the cache with a prompt `[B, S]`; returns the logits after it, `[B, V]`, or this rank's columns of them.

    Args:
        config: the GenerationConfig of this call, whose `prefill_chunk_size` (tokens) is heeded where it is set.
        inputs: see `take_inputs`. head: keeps logits sharded; None for whole ones.
    """
    batch, tokens = input_ids.shape
    rows, piece = split_prompt(batch, tokens)
    if config.prefill_chunk_size is None:
        config.prefill_chunk_size = piece
    logits = []
    for first in range(0, batch, rows):
        last = min(first + rows, batch)
        cache.write_rows(first, last)
        given = {name: _take_rows(value, first, last) for name, value in inputs.items()} | {cache_name: cache}
        if head is None:
            output = model._prefill(input_ids[first:last], config, given)
        else:
            with head.sharded(True):
                output = model._prefill(input_ids[first:last], config, given)
        logits.append(output.logits[:, -1].clone())  # not a view, which would hold what came before it too
        del output
    return logits[0] if len(logits) == 1 else torch.cat(logits)


def _take_rows(value: Any, first: int, last: int) -> Any:
    return value[..., first:last, :] if isinstance(value, Tensor) and value.dim() > 1 else value
