"""The prompt's way through the model: a graph where it is short, one forward where it fits, else rows or pieces at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels.decode import decoding
from ..layers.masks import skipping_masks
from .arena import ArenaCache
from .buckets import GRAPH_TOKENS, round_prompt, split_prompt
from .choose import Head
from .step import Form


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


class PromptStep:
    """The forward of a prompt over static buffers: what a CUDA graph holds.

    The prompt is padded on the right, where causal attention never looks; what the padding left in the cache is written over
    before a mask shows it. R rows, P tokens after padding.

    | buffer | shape | |
    |---|---|---|
    | ids, positions | `[R, P]`, `[..., R, P]` | |
    | last | `[1]` | where the prompt ends |
    | logits | `[R, V]` | after its end, or this rank's columns of them |
    """

    context, said = staticmethod(decoding), "prompts"

    def __init__(self, form: Form, tokens: int, cache: ArenaCache, cache_name: str, head: Head) -> None:
        self.form, self.tokens, self.cache, self.cache_name, self.head = form, tokens, cache, cache_name, head
        self.graph: Any = None
        device = cache.position.device
        self.ids = torch.zeros(form.rows, tokens, dtype=torch.int64, device=device)
        self.last = torch.zeros(1, dtype=torch.int64, device=device)
        shape = None if form.positions is None else (*form.positions, form.rows, tokens)
        self.positions = None if shape is None else torch.arange(tokens, device=device).expand(shape).contiguous()
        self.logits: Tensor | None = None

    def fill(self, ids: Tensor) -> None:
        """Take a prompt `[B, S]` that is not padded on the left."""
        self.ids.zero_()
        self.ids[: ids.shape[0], : ids.shape[1]] = ids
        self.last.fill_(ids.shape[1] - 1)

    def run(self, model: Any) -> None:
        """The launches that a graph captures."""
        self.cache.write_rows(0, self.form.rows)
        inputs = dict(self.form.extra) | {self.cache_name: self.cache, "use_cache": True, "logits_to_keep": self.last}
        if self.positions is not None:
            inputs["position_ids"] = self.positions
        made = model.prepare_inputs_for_generation(self.ids, is_first_iteration=True, **inputs)
        with self.head.sharded(True), skipping_masks():
            logits = model(**made, return_dict=True).logits[:, -1]
        if self.logits is None:
            self.logits = logits.clone()
        else:
            self.logits.copy_(logits)


def fit_graph(form: Form, ids: Tensor, config: Any, mask: Tensor | None) -> int | None:
    """Tokens that a prompt `[B, S]` under `mask`, on the CPU, would be padded to in a graph; None where it takes another way."""
    tokens = round_prompt(ids.shape[1])
    if form.rows * tokens > GRAPH_TOKENS or tokens > form.length or form.token_types:
        return None
    if config.prefill_chunk_size is not None or "logits_to_keep" not in dict(form.extra):
        return None
    return tokens if mask is None or bool(mask.all()) else None  # padded on the left, it needs a mask in every layer
