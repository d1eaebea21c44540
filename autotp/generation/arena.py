"""Keys and values in memory that stays where it is, as a CUDA graph needs it.

All buckets share one block of memory a layer: two generations never run at once, so each bucket looks at the same block in
its own shape `[rows, heads, length, size]`. A prompt is written as a dynamic cache would be (attention sees its own tokens
alone, without a mask); decoding then sees the whole length, under a mask, at a position that lies on the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, StaticCache
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

from ..kernels.cache import write_cache


class Arena:
    """The memory of one model's caches.

    Attributes:
        tokens: rows x length that every block holds.
        blocks: (layer, "keys" or "values") -> flat tensor.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.blocks: dict[tuple[int, str], Tensor] = {}
        self._begins: dict[int, list[Tensor]] = {}  # of all blocks, by the tokens in them

    def grow(self, tokens: int) -> None:
        """Let go of the memory and take blocks of `tokens` tokens from now on; what looked at the old ones must be gone."""
        self.blocks.clear()
        self._begins.clear()
        self.tokens = tokens

    def view(self, layer: int, kind: str, shape: tuple[int, int, int, int], like: Tensor) -> Tensor:
        """The block of `layer` as `[rows, heads, length, size]`, of `like`'s dtype and device."""
        rows, heads, length, size = shape
        block = self.blocks.get((layer, kind))
        wanted = self.tokens * heads * size
        if block is None or block.numel() != wanted or block.dtype != like.dtype or block.device != like.device:
            block = self.blocks[(layer, kind)] = torch.zeros(wanted, dtype=like.dtype, device=like.device)
            self._begins.clear()
        return block[: rows * heads * length * size].view(shape)

    def clear(self, tokens: int) -> None:
        """Zero what the first `tokens` tokens take: what an earlier generation left must be finite, even where it is masked."""
        if not self.blocks:
            return
        if tokens not in self._begins:
            self._begins[tokens] = [block[: block.numel() // self.tokens * tokens] for block in self.blocks.values()]
        torch._foreach_zero_(self._begins[tokens])

    @property
    def nbytes(self) -> int:
        """What the blocks take."""
        return sum(block.numel() * block.element_size() for block in self.blocks.values())


class ArenaLayer(StaticLayer):
    """One layer's keys and values `[rows, heads, length, size]`.

    Attributes:
        position: int64 `[1]` on the device, where the next token is written; shared by all layers.
        decoding: False while the prompt is written.
        filled: tokens of the prompt that are in; rows: which rows the running forward writes.
    """

    def __init__(self, arena: Arena, index: int, rows: int, length: int, position: Tensor) -> None:
        super().__init__(max_cache_len=length)
        self.arena, self.index, self.all_rows, self.position = arena, index, rows, position
        self.cumulative_length = position[0]
        self.decoding, self.filled, self.rows = False, 0, slice(0, rows)

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]
        """Whether masks must cover the whole length."""
        return self.decoding

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.device, self.dtype = key_states.device, key_states.dtype
        self.batch_size, self.num_heads = self.all_rows, key_states.shape[1]
        self.k_head_dim, self.v_head_dim = key_states.shape[-1], value_states.shape[-1]
        for kind, states in (("keys", key_states), ("values", value_states)):
            shape = (self.all_rows, states.shape[1], self.max_cache_len, states.shape[-1])
            setattr(self, kind, self.arena.view(self.index, kind, shape, states))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write new keys and values; returns those that attention reads."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys: Tensor = self.keys  # type: ignore[assignment]
        values: Tensor = self.values  # type: ignore[assignment]
        if self.decoding:
            write_cache(key_states, value_states, keys, values, self.position)
            return keys, values
        start, stop = self.filled, self.filled + key_states.shape[-2]
        keys, values = keys[self.rows], values[self.rows]
        keys[:, :, start:stop] = key_states
        values[:, :, start:stop] = value_states
        self.filled = stop
        return (key_states, value_states) if start == 0 else (keys[:, :, :stop], values[:, :, :stop])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (self.max_cache_len if self.decoding else self.filled + query_length), 0

    def get_seq_length(self) -> Any:
        return self.cumulative_length if self.decoding else self.filled


class ArenaCache(StaticCache):
    """The cache of `rows` sequences of up to `length` tokens, in `arena`'s memory."""

    def __init__(self, config: Any, arena: Arena, rows: int, length: int, device: torch.device) -> None:
        super().__init__(config=config, max_cache_len=length)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.layers = [ArenaLayer(arena, i, rows, length, self.position) for i in range(len(self.layers))]

    def write_rows(self, first: int, last: int) -> None:
        """The next forwards bring the prompt of rows `first` to `last`."""
        for layer in self.layers:
            layer.decoding, layer.filled, layer.rows = False, 0, slice(first, last)

    def start_decoding(self, length: int) -> None:
        """All prompts, of `length` tokens, are in: the next forwards bring one token a row."""
        self.position.fill_(length)
        for layer in self.layers:
            layer.decoding = True

    def copy_to(self, other: Cache, rows: int, length: int) -> Cache:
        """Put the first `rows` rows and `length` tokens into an empty cache of another kind, which is returned."""
        for index, layer in enumerate(self.layers):
            assert layer.keys is not None and layer.values is not None
            other.update(layer.keys[:rows, :, :length].clone(), layer.values[:rows, :, :length].clone(), index)
        return other


def why_not_static(config: Any) -> str | None:
    """Why a model of `config` (a text config) can't use an `ArenaCache`; None if it can.

    Sliding windows can: the mask cuts them out of keys and values that are all there.
    """
    layers = StaticCache(config=config, max_cache_len=8).layers
    odd = sorted({type(layer).__name__ for layer in layers} - {StaticLayer.__name__, StaticSlidingWindowLayer.__name__})
    if odd:
        return f"its cache has layers of other kinds ({', '.join(odd)})"
    if getattr(config, "attention_chunk_size", None) is not None:
        return "its attention works on chunks"
    return None
