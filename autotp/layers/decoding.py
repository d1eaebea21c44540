"""What a decoding step for a CUDA graph runs in: the kernels for few rows, and attention that reads the cache in place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..kernels.cache import attend_cache, fits
from ..kernels.decode import decoding, is_decoding

REPLACED = "sdpa"  # the implementation that ours stands for while a step is warmed up and captured
# Arguments that change nothing in it, or not for one token: a window is in the mask.
PLAIN = {"dropout", "scaling", "is_causal", "sliding_window", "position_ids", "cache_position", "use_cache", "return_dict"}
PLAIN |= {"output_hidden_states", "output_router_logits", "logits_to_keep", "num_items_in_batch"}


@contextmanager
def decoding_step() -> Iterator[None]:
    """Within it a forward of one new token a row takes the kernels made for that; every rank must be in it alike.

    For the warm-up and the capture of a CUDA graph: the warm-up compiles kernels and allocates what the ranks write to each
    other, neither of which a capture may. Calls that the kernels can't serve run as they do elsewhere.
    """
    own, local = ALL_ATTENTION_FUNCTIONS[REPLACED], ALL_ATTENTION_FUNCTIONS._local_mapping
    before = local.get(REPLACED)
    ALL_ATTENTION_FUNCTIONS[REPLACED] = _attention(own)
    try:
        with decoding():
            yield
    finally:
        del local[REPLACED]
        if before is not None:
            local[REPLACED] = before


@functools.lru_cache(maxsize=8)
def _attention(own: Callable[..., Any]) -> Callable[..., Any]:
    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **rest: Any
    ) -> tuple[Tensor, None]:
        if not is_decoding() or not fits(query, key, value, attention_mask) or not _is_plain(module, query, key, rest):
            return own(module, query, key, value, attention_mask, **rest)
        scaling = rest.get("scaling")
        return attend_cache(query, key, value, attention_mask, query.shape[-1] ** -0.5 if scaling is None else scaling), None

    return attention


def _is_plain(module: Any, query: Tensor, key: Tensor, rest: dict[str, Any]) -> bool:
    """Whether a call is softmax attention and nothing more: no cap on the scores, no sinks, no bias, nothing returned but it."""
    more = {name for name, value in rest.items() if value is not None and value is not False and name not in PLAIN}
    if more or rest.get("dropout"):
        return False
    return getattr(module, "num_key_value_groups", query.shape[1] // key.shape[1]) == query.shape[1] // key.shape[1]
