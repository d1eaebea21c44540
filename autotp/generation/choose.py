"""The next token, the same on all ranks: the best of sharded logits, or what rank 0 drew."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..comm import TPGroup
from ..kernels.decode import is_decoding
from ..layers.embedding import VocabParallelHead, gather_columns, vocab_range
from ..layers.entry import SHARDED_LOSS


class Head:
    """How a model's logits leave it.

    Attributes:
        range: this rank's columns `(start, stop)`, where the largest of its own tell which is the largest of all: the
            vocabulary is dealt, and what is done after the head does not mix columns; None where logits come whole.
    """

    def __init__(self, model: nn.Module) -> None:
        plan: Any = model.__dict__.get("autotp_plan")
        found = model.get_submodule(plan.head) if plan is not None and plan.head and plan.loss == SHARDED_LOSS else None
        self.module = found if isinstance(found, VocabParallelHead) else None
        self.range: tuple[int, int] | None = None
        if self.module is not None and self.module.tp.tp_size > 1:
            self.range = vocab_range(self.module.shards["weight"], self.module.tp.tp_rank, self.module.full_name)

    def gather(self, logits: Tensor) -> Tensor:
        """Whole logits, of those that `sharded(True)` gave."""
        if self.range is None or self.module is None:
            return logits
        return gather_columns(logits, self.module.shards["weight"], 0, self.module.tp)

    @contextmanager
    def sharded(self, wanted: bool) -> Iterator[None]:
        """Inside, forwards return this rank's columns if `wanted` and possible."""
        if not wanted or self.range is None:
            yield
            return
        assert self.module is not None
        self.module.keep_sharded = True
        try:
            yield
        finally:
            self.module.keep_sharded = False


def best_columns(logits: Tensor, start: int, halt: Tensor, group: TPGroup) -> tuple[Tensor, Tensor]:
    """The largest of all ranks' columns, the lowest where several are equal; one small exchange.

    Args:
        logits: `[R, V_r]`, the columns from `start` on. halt: int64 `[1]`, this rank's bit if it wants to stop.

    Returns:
        tokens int64 `[R]`, and the bits of all ranks that want to stop, `[1]`.
    """
    peers = group.find_peers() if is_decoding() else None
    found = None if peers is None else peers.best_columns(logits, start, halt)
    if found is not None:
        return found
    rows = logits.shape[0]
    value, index = logits.max(-1)
    # float64 holds a value of any narrower dtype, a token's number and 50 bits exactly.
    own = torch.cat([value.double(), (index + start).double(), halt.double()])
    every = group.gather_rows(own[None])
    best = every[:, :rows].argmax(0, keepdim=True)  # of equal ones the lowest rank's, as its columns come first
    tokens = every[:, rows : 2 * rows].gather(0, best)[0].long()
    return tokens, every[:, -1:].sum(0).long()


def agree(tokens: Tensor, halt: Tensor, group: TPGroup) -> tuple[Tensor, Tensor]:
    """Rank 0's `tokens` `[R]`, and the bits of all ranks that want to stop `[1]`, on every rank; one small all-reduce."""
    if group.tp_size == 1:
        return tokens, halt
    own = torch.cat([tokens if group.tp_rank == 0 else torch.zeros_like(tokens), halt])
    summed = group.all_reduce_owned(own)
    return summed[:-1], summed[-1:]
