"""A text file as training batches: tokens in blocks of one length, in an order that every rank draws alike."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import AutoTPError


def read_blocks(path: str | os.PathLike, tokenizer: Any, seq_length: int) -> Tensor:
    """The tokens of the text file `path`, `[blocks, seq_length]`; what is left over at the end is dropped.

    Raises:
        AutoTPError: the file can't be read as UTF-8 text, or is shorter than one block.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise AutoTPError(f"can't read the training text {path}: {error}") from error
    return cut_blocks(text, tokenizer, seq_length, str(path))


def cut_blocks(text: str, tokenizer: Any, seq_length: int, where: str = "the text") -> Tensor:
    """The tokens of `text`, `[blocks, seq_length]`; see `read_blocks`."""
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.long)
    blocks = ids.numel() // seq_length
    if blocks == 0:
        raise AutoTPError(
            f"{where} has {ids.numel()} tokens, fewer than one block of {seq_length}: give more text or a smaller --seq-length"
        )
    return ids[: blocks * seq_length].view(blocks, seq_length)


def iterate_batches(blocks: Tensor, batch_size: int, seed: int) -> Iterator[Tensor]:
    """Batches `[batch_size, seq_length]` without end; each pass over `blocks` in a new order, drawn from `seed` alone.

    A block may come twice in a batch where one pass ends and the next begins.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.empty(0, dtype=torch.long)
    while True:
        while order.numel() < batch_size:
            order = torch.cat([order, torch.randperm(blocks.shape[0], generator=generator)])
        yield blocks[order[:batch_size]]
        order = order[batch_size:]
