"""One decoding step over static buffers: what a CUDA graph holds.

R rows (the batch, rounded up), L tokens of cache, T ranks. The step reads the token that the step before wrote, so nothing
passes through the host:

| buffer | shape | |
|---|---|---|
| token | `[R, 1]` | the newest token of each row |
| positions | `[..., R, 1]` | its position, for models that take it |
| mask | `[R, L]` | 0 where a row is padded on the left |
| ids | `[R, L + 1]` | prompt and what was generated; column | `[1]` where the next token goes |
| unfinished | `[R]` | 1 for rows that go on |
| halt | `[1]` | this rank's bit once it wants to stop, else 0 |
| report | `[R + 2]` | the newest tokens; 1 if no row goes on; the bits of the ranks that want to stop |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..comm import TPGroup
from ..layers.decoding import decoding_step
from .arena import ArenaCache
from .choose import Head, agree, best_columns

MOST_EOS = 16  # token ids that end a sequence which a graph can watch for


class Form(NamedTuple):
    """What a step is made for: everything that its launches depend on.

    Attributes:
        rows, length: of the bucket. greedy: it chooses the token itself; otherwise it ends with whole logits.
        positions: the leading dimensions of position_ids, None for a model that takes none; masked: it takes attention_mask.
        token_types: it takes token_type_ids. extra: further arguments of its forward, which are constants.
    """

    rows: int
    length: int
    greedy: bool
    positions: tuple[int, ...] | None
    masked: bool
    token_types: bool
    extra: tuple[tuple[str, Any], ...]


class Step:
    """The buffers of one form, and what is done with them.

    Attributes:
        graph: the captured launches, or None where they are made one by one.
        context: what launches for a graph are made in: kernels that would cost the host too much elsewhere. said: its kind.
    """

    context, said = staticmethod(decoding_step), "decoding"

    def __init__(self, form: Form, cache: ArenaCache, cache_name: str, group: TPGroup, head: Head) -> None:
        self.form, self.cache, self.cache_name, self.group, self.head = form, cache, cache_name, group, head
        self.graph: Any = None
        device, rows = cache.position.device, form.rows

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self.token, self.ids, self.column = zeros(rows, 1), zeros(rows, form.length + 1), zeros(1)
        self.positions = None if form.positions is None else zeros(*form.positions, rows, 1)
        self.token_types = zeros(rows, 1) if form.token_types else None
        self.mask = zeros(rows, form.length) if form.masked else None
        self.unfinished, self.halt, self.report = zeros(rows), zeros(1), zeros(rows + 2)
        self.eos, self.pad = zeros(MOST_EOS), zeros(1)
        self.logits: Tensor | None = None  # whole, where the step does not choose

    def begin(self, ids: Tensor, inputs: dict[str, Tensor | None], eos: Sequence[int], pad: int) -> None:
        """Take over a prompt `ids` `[B, S]` that lies in the cache already, or will: nothing here waits for the device.

        Args:
            inputs: what went into the forward with it: attention_mask, position_ids, token_type_ids.
            eos: token ids that end a row; pad: what a row goes on with then.
        """
        batch, tokens = ids.shape
        self.ids.fill_(pad)
        self.ids[:batch, :tokens] = ids
        self.column.fill_(tokens)
        self.cache.start_decoding(tokens)
        self.unfinished.zero_()
        self.unfinished[:batch].fill_(1)  # numbers go with the launches; a copy from the host would wait for the prompt
        self.halt.zero_()
        self.eos.fill_(-1)
        for place, token in enumerate(eos):
            self.eos[place].fill_(token)
        self.pad.fill_(pad)
        if self.positions is not None:
            self.positions.zero_()
            self.positions[..., :batch, :] = inputs["position_ids"][..., -1:] + 1  # type: ignore[index,operator]
        if self.token_types is not None:
            self.token_types[:batch] = inputs["token_type_ids"][:, -1:]  # type: ignore[index]
        if self.mask is not None:
            self.mask.fill_(1)
            given = inputs.get("attention_mask")
            if given is not None:
                self.mask[:batch, :tokens] = given

    def forward(self, model: Any) -> Tensor:
        """The logits `[R, V]` that follow the newest token, or this rank's columns of them; moves on the positions at its end."""
        inputs: dict[str, Any] = dict(self.form.extra)
        inputs |= {self.cache_name: self.cache, "use_cache": True, "attention_mask": self.mask}
        if self.positions is not None:
            inputs["position_ids"] = self.positions
        if self.token_types is not None:
            inputs["token_type_ids"] = self.token_types
        made = model.prepare_inputs_for_generation(self.token, next_sequence_length=1, **inputs)
        logits = model(**made, return_dict=True).logits[:, -1]
        self.cache.position.add_(1)
        if self.positions is not None:
            self.positions.add_(1)
        return logits

    def run(self, model: nn.Module) -> None:
        """The launches that a graph captures: the forward, and the choice where it needs no one else."""
        with self.head.sharded(self.form.greedy):
            logits = self.forward(model)
        if self.form.greedy:
            self.choose_best(logits)
        else:
            self.keep_logits(logits)

    def keep_logits(self, logits: Tensor) -> None:
        """Leave whole logits `[R, V]` where the choice is made without a graph."""
        if self.logits is None:
            self.logits = logits.clone()
        else:
            self.logits.copy_(logits)

    def choose_best(self, logits: Tensor) -> None:
        """Greedy decoding from logits `[R, V]`, or from this rank's columns of them: choose, agree, and end rows."""
        if self.head.range is not None:
            tokens, halted = best_columns(logits, self.head.range[0], self.halt, self.group)
        else:
            tokens, halted = agree(logits.argmax(-1), self.halt, self.group)
        tokens = self.append(tokens, halted, pads=True)
        self.end_rows((tokens[:, None] == self.eos).any(-1))

    def append(self, tokens: Tensor, halted: Tensor, pads: bool) -> Tensor:
        """Write agreed tokens `[R]` down; returns them with those of finished rows padded."""
        if pads:
            tokens = tokens * self.unfinished + self.pad * (1 - self.unfinished)
        self.token.copy_(tokens[:, None])
        self.ids.index_copy_(1, self.column, tokens[:, None])
        self.column.add_(1)
        self.report[:-2] = tokens
        self.report[-1:] = halted
        return tokens

    def end_rows(self, stopped: Tensor) -> None:
        """Rows where `stopped` `[R]`, bool, do not go on."""
        self.unfinished.mul_(~stopped)
        self.report[-2:-1] = self.unfinished.max() == 0
