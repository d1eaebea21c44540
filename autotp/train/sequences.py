"""Endless training sequences of token files, streamed, in an order that a seed fixes and from a position that can be kept.

Sequences come in the files' order, the files in an order of each epoch's own, and are shuffled inside windows of
`WINDOW` tokens: data of less than one window is shuffled as a whole. A position is where the current window begins and how
many of its sequences are taken, so going on from one reads no more than a window again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ..errors import AutoTPError
from .encode import IGNORED, Encoder
from .records import iterate_records

WINDOW = 1 << 21
Sequence = np.ndarray  # tokens and labels, [2, up to seq_length] int32


class SequenceStream:
    """The sequences of files, one pass after another.

    With packing, documents are joined and cut into whole sequences, and what is left over at the end of a pass is dropped.
    Without it each document is cut by itself, and its last sequence is short. Sequences with nothing to learn (no label but
    the first token's) are left out.

    Args:
        files: see `iterate_records`.
        encoder: makes the tokens.
        seq_length: tokens.
        packing: see above.
        seed: of the files' order; None: as given.
        text_field: see `iterate_records`.
    """

    def __init__(
        self,
        files: tuple[str, ...],
        encoder: Encoder,
        seq_length: int,
        packing: bool = True,
        seed: int | None = None,
        text_field: str = "text",
    ) -> None:
        self.files, self.encoder, self.seq_length, self.packing = files, encoder, seq_length, packing
        self.seed, self.text_field = seed, text_field
        self.load_state({"epoch": 0, "file": 0, "offset": 0, "ended": False, "left": torch.empty((2, 0), dtype=torch.int32)})

    def state(self) -> dict[str, Any]:
        """The position after the sequence that came last: plain numbers and one tensor."""
        left = torch.from_numpy(self.left.copy())
        return {"epoch": self.epoch, "file": self.file, "offset": self.offset, "ended": self.ended, "left": left}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a position."""
        self.epoch, self.file, self.offset, self.ended = (state[key] for key in ("epoch", "file", "offset", "ended"))
        self.left: np.ndarray = state["left"].numpy().copy()

    def one_pass(self) -> Iterator[Sequence]:
        """What is left of this epoch; `state()` between two sequences goes on with the second."""
        order = torch.arange(len(self.files))
        if self.seed is not None:
            order = torch.randperm(len(self.files), generator=_generator(self.seed, 2 * self.epoch + 1))
        yield from self._cut()
        while self.file < len(self.files):
            for record in iterate_records(self.files[order[self.file]], self.offset, self.text_field):
                self.left = np.concatenate([self.left, self.encoder.encode(record)], axis=1)
                self.offset, self.ended = record.offset, record.ends
                yield from self._cut()
            self.file, self.offset = self.file + 1, 0
        self.left = self.left[:, :0]
        self.epoch, self.file, self.offset, self.ended = self.epoch + 1, 0, 0, False

    def _cut(self) -> Iterator[Sequence]:
        """The sequences that what was read so far makes."""
        while self.left.shape[1] >= self.seq_length or (self.ended and not self.packing and self.left.shape[1]):
            sequence, self.left = self.left[:, : self.seq_length], self.left[:, self.seq_length :]
            if (sequence[1, 1:] != IGNORED).any():
                yield sequence

    def count(self) -> int:
        """Sequences of one whole pass; reads all of it."""
        fresh = SequenceStream(self.files, self.encoder, self.seq_length, self.packing, None, self.text_field)
        return sum(1 for _ in fresh.one_pass())


class ShuffledSequences:
    """The sequences of a stream without end, shuffled inside windows; see the top of the file."""

    def __init__(self, stream: SequenceStream, seed: int, window: int | None = None) -> None:
        self.stream, self.seed = stream, seed
        self.size = max(64, WINDOW // stream.seq_length) if window is None else window
        self.number, self.taken = 0, 0
        self.start = stream.state()
        self.order: list[Sequence] = []
        self.running: Iterator[Sequence] | None = None

    def state(self) -> dict[str, Any]:
        """The position after the sequence that came last."""
        return {"start": self.start, "window": self.number, "taken": self.taken}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a position."""
        self.stream.load_state(state["start"])
        self.running = None
        self._fill(state["window"])
        self.taken = state["taken"]

    def take(self, count: int) -> list[Sequence]:
        """The next `count` sequences.

        Raises:
            AutoTPError: a whole pass over the data gives none.
        """
        out: list[Sequence] = []
        while len(out) < count:
            if self.taken == len(self.order):
                self._fill(self.number + bool(self.order))
            some = self.order[self.taken : self.taken + count - len(out)]
            self.taken += len(some)
            out += some
        return out

    def _fill(self, number: int) -> None:
        """Read window `number`, which ends with its epoch at the latest, from where the stream is."""
        found: list[Sequence] = []
        passes = 0
        while not found:
            if self.running is None:
                self.running = self.stream.one_pass()
                passes += 1
            if passes > 2:
                raise AutoTPError(nothing_in(self.stream, "--data"))
            self.start = self.stream.state()
            for sequence in self.running:
                found.append(sequence)
                if len(found) == self.size:
                    break
            else:
                self.running = None
        order = torch.randperm(len(found), generator=_generator(self.seed, 2 * number)).tolist()
        self.order, self.number, self.taken = [found[i] for i in order], number, 0


def nothing_in(stream: SequenceStream, flag: str) -> str:
    """What to say of files that make no sequence."""
    whole = f"no whole sequence of {stream.seq_length} tokens" if stream.packing else "no text of two tokens or more"
    out = "give more text, a smaller --seq-length or --no-packing" if stream.packing else "check the files"
    return f"{flag} {', '.join(stream.files)}: there is {whole} to learn from: {out}"


def _generator(seed: int, number: int) -> torch.Generator:
    return torch.Generator().manual_seed((seed * 1_000_003 + number) % (1 << 63))
