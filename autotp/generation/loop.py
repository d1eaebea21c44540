"""The decoding loop: launches steps, hands tokens on, and ends on all ranks at the same step.

The host is never waited for. A step reads its token on the device; what the host must know (which tokens, whether all rows have
ended, whether a rank wants to stop) comes back through pinned memory one step late, while the next forward runs. Where that
forward turns out to be one too many it is dropped: nothing was drawn for it, no processor was called.

A rank that fails, in a streamer, processor or criterion or by Ctrl-C, goes on launching until its wish to stop, which travels
with the tokens, has come back to all ranks; then all leave after the same step.
"""

from __future__ import annotations

import signal
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria

from ..errors import AutoTPError
from .choose import agree
from .engine import Engine, describe
from .step import MOST_EOS, Step

SURE = (MaxLengthCriteria, EosTokenCriteria, StopStringCriteria)  # equal tokens give equal answers on all ranks


class Request:
    """What one call of generate asks for, once its prompt is prepared.

    Attributes:
        processors, criteria: transformers' lists; config: the GenerationConfig; streamer: or None.
        limit: tokens of the longest allowed sequence, prompt included.
        eos: ids that end a row; pad: what it goes on with. Both are read from the device here, where nothing runs on it yet.
        greedy: the step can choose by itself, without anything that these objects do.
    """

    def __init__(self, processors: Any, criteria: Any, config: Any, streamer: Any) -> None:
        self.processors, self.criteria, self.config, self.streamer = processors, criteria, config, streamer
        self.limit = min([c.max_length for c in criteria if isinstance(c, MaxLengthCriteria)], default=config.max_length)
        self.has_eos = any(hasattr(each, "eos_token_id") for each in criteria)
        self.eos = [int(t) for each in criteria if type(each) is EosTokenCriteria for t in each.eos_token_id.flatten().tolist()]
        pad = config._pad_token_tensor
        self.pad = 0 if pad is None else int(pad)
        self.keeps_scores = bool(config.return_dict_in_generate and config.output_scores)
        self.keeps_logits = bool(config.return_dict_in_generate and config.output_logits)
        self.greedy = (
            not (config.do_sample or len(processors) or self.keeps_scores or self.keeps_logits)
            and all(type(each) in (MaxLengthCriteria, EosTokenCriteria) for each in criteria)
            and len(self.eos) <= MOST_EOS
        )

    def describe(self, ids: Tensor, mask: Tensor | None) -> str:
        """What all ranks must have asked alike: what they launch depends on it."""
        content = zlib.crc32(b"".join(each.long().cpu().numpy().tobytes() for each in (ids, mask) if each is not None))
        kinds = [type(each).__name__ for each in (*self.processors, *self.criteria)]
        return (
            f"prompt {list(ids.shape)} of content {content:08x}, length {self.limit}, "
            f"{'sampling' if self.config.do_sample else 'greedy'}, "
            f"{'scores, ' if self.keeps_scores or self.keeps_logits else ''}eos {self.eos}, {', '.join(kinds) or 'no processors'}"
        )


def refuse_failures(failures: list[str], what: str) -> None:
    """Raise if a rank left word of a failure; one rank's own is what it raises itself.

    Raises:
        AutoTPError: naming the ranks that failed.
    """
    failed = [rank for rank, text in enumerate(failures) if text]
    if failed:
        raise AutoTPError(f"{what} on TP rank(s) {failed}: {failures[failed[0]]}")


class Loop:
    """One generation.

    Attributes:
        length: tokens of every row so far. scores, logits: a tensor `[B, V]` a step, where they are asked for.
    """

    def __init__(self, engine: Engine, model: Any, step: Step, request: Request, ids: Tensor) -> None:
        self.engine, self.model, self.step, self.request = engine, model, step, request
        self.batch, self.length = ids.shape
        self.scores: tuple[Tensor, ...] | None = () if request.keeps_scores else None
        self.logits: tuple[Tensor, ...] | None = () if request.keeps_logits else None
        self.failure: BaseException | None = None
        self.halted, self.interrupts = 0, 0
        self.mailbox = _Mailbox(step.report)
        self.votes_on_stop = any(type(each) not in SURE for each in request.criteria)

    def run(self, read_prompt: Callable[[], Tensor], stepping: AbstractContextManager[Any]) -> Tensor:
        """Decode from the logits that `read_prompt` returns, of the prompt's end; returns all tokens, `[B, length]`.

        Args:
            stepping: what the steps after the prompt run in.

        Raises:
            AutoTPError: another rank stopped; what this rank's own streamer, processor or criterion raised.
        """
        request = self.request
        with self._interruptible():
            self._begin(self._read_together(read_prompt))
            with stepping:
                self._go_on()
        self._raise()
        if request.streamer is not None:
            request.streamer.end()
        return self.step.ids[: self.batch, : self.length].clone()

    def _go_on(self) -> None:
        while self.length < self.request.limit:
            if not self.engine.runs_ahead and self._settle():
                return
            self.engine.launch(self.step, self.model)
            if self.engine.runs_ahead and self._settle():
                return
            self._finish()
        self._settle()

    def _read_together(self, read_prompt: Callable[[], Tensor]) -> Tensor:
        """What `read_prompt` returns, once it has on all ranks.

        Raises:
            AutoTPError: it failed on another rank.
        """
        group = self.step.group
        try:
            logits = read_prompt()
        except BaseException as error:
            group.arrive("the prompt", describe(error), wait=False)
            raise
        refuse_failures(group.arrive("the prompt"), "reading the prompt failed")
        return logits

    def _begin(self, logits: Tensor) -> None:
        """The first token, of the prompt's logits, in buffers of the step's size."""
        rows = self.step.form.rows
        logits = F.pad(logits, (0, 0, 0, rows - self.batch))
        if self.request.greedy:
            self.step.choose_best(logits)
        else:
            self.step.keep_logits(logits)
        self._finish()

    def _finish(self) -> None:
        """Complete the step that was launched: a token for each row, and word of it on its way to the host."""
        self.length += 1
        if not self.request.greedy:
            self._choose()
        self.mailbox.post()

    def _choose(self) -> None:
        """A token for each row by processors and draws, and whether criteria end it."""
        step, request, rows = self.step, self.request, self.step.form.rows
        tokens = self._attempt(self._draw)
        if tokens is None:
            tokens = step.report.new_zeros(self.batch)
        tokens, halted = agree(F.pad(tokens, (0, rows - self.batch)), step.halt, step.group)
        step.append(tokens, halted, request.has_eos)
        stopped = self._attempt(lambda: request.criteria(self._read_ids(), self.scores))
        if stopped is None:
            stopped = torch.zeros(self.batch, dtype=torch.bool, device=tokens.device)
        if self.votes_on_stop:
            stopped = agree(stopped.long(), step.halt, step.group)[0].bool()
        step.end_rows(F.pad(stopped, (0, rows - self.batch)))

    def _read_ids(self, last: int = 0) -> Tensor:
        """All tokens so far `[B, length]`, without the `last` newest."""
        return self.step.ids[: self.batch, : self.length - last].contiguous()

    def _draw(self) -> Tensor:
        """What transformers does between logits and token, operation by operation, so that equal seeds draw equal tokens."""
        assert self.step.logits is not None
        logits = self.step.logits[: self.batch].to(torch.float32, copy=True)
        scores = self.request.processors(self._read_ids(last=1), logits)
        if self.scores is not None:
            self.scores += (scores,)
        if self.logits is not None:
            self.logits += (logits,)
        if not self.request.config.do_sample:
            return scores.argmax(-1)
        return torch.multinomial(F.softmax(scores, dim=-1), num_samples=1).squeeze(1)

    def _settle(self) -> bool:
        """Read the newest report, hand its tokens on, and say whether all ranks stop here."""
        tokens, done, self.halted = self.mailbox.read(self.batch)
        peers = self.step.group.find_peers()
        if peers is not None:
            peers.check()
        if not self.halted:
            self._attempt(lambda: self._deliver(tokens))
        return done or self.halted != 0

    def _deliver(self, tokens: Tensor) -> None:
        if self.interrupts:
            raise KeyboardInterrupt
        if self.request.streamer is not None:
            self.request.streamer.put(tokens)

    # -- stopping early ---------------------------------------------------------------------------------------------------

    def _attempt(self, call: Callable[[], Any]) -> Any:
        """What `call` returns. If it fails that is kept, and makes all ranks stop soon; from then on nothing is called."""
        if self.failure is not None:
            return None
        try:
            return call()
        except (Exception, KeyboardInterrupt) as error:
            self.failure = error
            self.step.halt.fill_(1 << self.step.group.tp_rank)
            return None

    def _raise(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self.halted:
            ranks = [rank for rank in range(self.step.group.tp_size) if self.halted >> rank & 1]
            raise AutoTPError(
                f"generate stopped after {self.length} tokens, because TP rank(s) {ranks} wanted to: see what was raised there"
            )

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Ctrl-C waits for the end of a step; a second one does not."""
        if (
            threading.current_thread() is not threading.main_thread()
            or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        ):
            yield
            return

        def note(number: int, frame: Any) -> None:
            self.interrupts += 1
            if self.interrupts > 1:
                raise KeyboardInterrupt

        signal.signal(signal.SIGINT, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)


class _Mailbox:
    """Reports on their way from the device: two at most."""

    def __init__(self, report: Tensor) -> None:
        self.report, self.turn = report, 0
        self.cuda = report.device.type == "cuda"
        self.slots = [torch.empty_like(report, device="cpu", pin_memory=self.cuda) for _ in range(2)]
        self.events = [torch.cuda.Event() if self.cuda else nullcontext() for _ in range(2)]

    def post(self) -> None:
        """Send the report as it will be when all that is launched so far has run."""
        self.turn = 1 - self.turn
        self.slots[self.turn].copy_(self.report, non_blocking=True)
        if self.cuda:
            self.events[self.turn].record()  # type: ignore[union-attr]

    def read(self, batch: int) -> tuple[Tensor, bool, int]:
        """The report posted last: tokens `[batch]` on the CPU, whether all rows have ended, and the bits of ranks that stop."""
        if self.cuda:
            self.events[self.turn].synchronize()  # type: ignore[union-attr]
        slot = self.slots[self.turn]
        return slot[:batch].clone(), bool(slot[-2]), int(slot[-1])
