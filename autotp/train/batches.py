"""Sequences as micro-batches, and which of them each data rank gets."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .encode import IGNORED
from .sequences import Sequence, SequenceStream, ShuffledSequences

Batch = dict[str, Tensor]


def collate(sequences: list[Sequence], pad: int, padded: bool) -> Batch:
    """`input_ids` and `labels`, `[sequences, longest]` int64; with `padded` an `attention_mask` too.

    Padding is on the right, its labels are -100.
    """
    longest = max(each.shape[1] for each in sequences)
    ids = np.full((len(sequences), longest), pad, dtype=np.int64)
    labels = np.full_like(ids, IGNORED)
    mask = np.zeros_like(ids)
    for row, (tokens, wanted) in enumerate(sequences):
        ids[row, : len(tokens)], labels[row, : len(tokens)], mask[row, : len(tokens)] = tokens, wanted, 1
    batch = {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}
    return {**batch, "attention_mask": torch.from_numpy(mask)} if padded or not mask.all() else batch


def count_labels(batch: Batch) -> int:
    """Tokens that count in the loss: the first of a sequence is predicted by none."""
    return int((batch["labels"][:, 1:] != IGNORED).sum())


def count_tokens(batch: Batch) -> int:
    """Tokens that are not padding."""
    mask = batch.get("attention_mask")
    return batch["input_ids"].numel() if mask is None else int(mask.sum())


class TrainBatches:
    """The micro-batches of each step, without end.

    Micro-batch m of data rank r is number `m * ranks + r` of the step's, so several data ranks train as one that takes as
    many more micro-batches.

    Args:
        sequences: the same on every rank.
        batch_size, grad_accum: sequences of a micro-batch; micro-batches of a step.
        rank, ranks: of the data axis.
        pad: the token that fills up; padded: always give an attention mask.
    """

    def __init__(
        self, sequences: ShuffledSequences, batch_size: int, grad_accum: int, rank: int, ranks: int, pad: int, padded: bool
    ) -> None:
        self.sequences, self.batch_size, self.grad_accum = sequences, batch_size, grad_accum
        self.rank, self.ranks, self.pad, self.padded = rank, ranks, pad, padded

    @property
    def step_size(self) -> int:
        """Sequences of a step, over all data ranks."""
        return self.batch_size * self.grad_accum * self.ranks

    def next_step(self) -> list[Batch]:
        """This rank's micro-batches of the next step."""
        taken = self.sequences.take(self.step_size)
        size = self.batch_size
        mine = [(micro * self.ranks + self.rank) * size for micro in range(self.grad_accum)]
        return [collate(taken[first : first + size], self.pad, self.padded) for first in mine]

    def state(self) -> dict[str, Any]:
        """The position in the data."""
        return self.sequences.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a position."""
        self.sequences.load_state(state)


def eval_batches(
    stream: SequenceStream, batch_size: int, rank: int, ranks: int, most: int | None, padded: bool
) -> Iterator[Batch]:
    """This data rank's batches of one pass in the files' order, of `most` batches over all ranks; the last may be smaller."""
    sequences = stream.one_pass()
    number = 0
    while number != most and (found := list(itertools.islice(sequences, batch_size))):
        if number % ranks == rank:
            yield collate(found, stream.encoder.pad, padded)
        number += 1
