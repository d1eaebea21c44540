"""Sequence parallelism: between regions the activations of a chain of layers are dealt to the ranks by tokens.

`[B, S, H]`, M = B * S rows over T ranks, is dealt as `[1, R, H]`, R = ceil(M / T): rank r holds rows r * R to (r + 1) * R of the
flattened rows, zeros behind the last. So any batch and length can be dealt, and gathering is one contiguous copy.

| where | forward | backward |
|---|---|---|
| split: what enters the first layer | slice | all-gather |
| gather: what enters a region's module | all-gather | reduce-scatter where each rank adds a part, else slice |
| scatter: a row linear's partial sums | reduce-scatter | all-gather |
| slice: a module's output that is whole | slice | all-gather |
| join: what the last layer, or the norm behind it, returns | all-gather | slice |
| parameters that dealt rows read | identity | one all-reduce for each layer |

Whether a forward deals its tokens is decided where they are split, for each forward anew; where it does not, every module
does what it does without.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..comm import TPGroup
from ..errors import AutoTPError, PlanError
from .draws import Draws, Frame, FrameState
from .layouts import Layout, LayoutMemory
from .token_rows import TokenRows

# The modules that run with a part in streams, one inside another: what a checkpoint that is made there needs to know.
RUNNING: ContextVar[tuple[Any, ...]] = ContextVar("autotp_running", default=())
# Of a rank's rows of one activation, below which "auto" does not deal them: in training, and where no gradient is wanted. There
# a layer's products are done sooner than the host has queued its moves, up to 16 MiB as measured on two H200s.
LEAST_BYTES, LEAST_BYTES_WITHOUT_GRADIENT = 1 << 20, 32 << 20


Running = tuple[Any, int, bool, Layout | None, bool]  # what a stream is again behind a module: see TokenStream.begin


class Moment(NamedTuple):
    """Where a forward is in a stream, whose attributes these are; `place`: of its own frame among those that are open."""

    layout: Layout | None
    joined: Layout | None
    keeps_whole: bool
    inside: int
    frames: list[FrameState]
    place: int | None


@dataclass(frozen=True)
class TokenPart:
    """What one module does in a stream.

    Attributes:
        stream: shared by the chain's modules; name: the module's, for messages.
        enters: the arguments by which dealt rows enter it, `(parameter name, position or None)`; the first one says the layout.
        first: it splits what enters; gathers: it gathers it.
        slices, joins: its output is whole, and dealt on return; or dealt, and gathered.
        summed: names, dotted below it, of parameters that dealt rows read.
        scatters: of one that gathers: the row linears below it whose sums are scattered.
        inside: of a layer: the modules below it that gather, and the row linears outside these whose sums are scattered.
        draws: dealt rows draw random numbers in the chain's layers.
    """

    stream: TokenStream
    name: str
    enters: tuple[tuple[str, int | None], ...]
    first: bool = False
    gathers: bool = False
    slices: bool = False
    joins: bool = False
    summed: tuple[str, ...] = ()
    scatters: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()
    draws: bool = False


class TokenStream(TokenRows):
    """What the modules of one chain of layers share.

    Attributes:
        mode: True, "auto" or False, as a plan says.
        joined: the layout of rows that were joined in this forward: whoever reads them before (a hook), it goes on from there.
        owners: how many modules run that hold both the layers and what joins the rows again; nothing is dealt outside all of
            them. None where nobody counts.
        suspended: deal nothing: somebody collects what passes between the layers.
        keeps_whole: row linears leave their sums whole, as the module around them deals what it returns; of the one that runs.
    """

    def __init__(self, group: TPGroup, mode: bool | str, draws: Draws | None = None) -> None:
        super().__init__(group)
        self.mode, self.draws = mode, draws or Draws(group)
        self.joined: Layout | None = None
        self.owners: int | None = None
        self.suspended = self.keeps_whole = False
        self._inside = 0  # how many of its modules are running, one in another
        self._known = LayoutMemory()  # of what entered modules
        self._frame: Frame | None = None  # of what dealt rows draw

    def __deepcopy__(self, memo: dict[int, Any]) -> TokenStream:
        twin = memo[id(self)] = TokenStream(self.group, self.mode, copy.deepcopy(self.draws, memo))
        twin.owners = None if self.owners is None else 0
        return twin

    # -- which layout ---------------------------------------------------------------------------------------------------

    def choose(self, x: Tensor) -> Layout | None:
        """How the rows of `x` `[..., H]` are dealt; None where they are not: few, or a decoding step."""
        size, rows, grad = self.group.tp_size, prod(x.shape[:-1]), torch.is_grad_enabled()
        if not self.mode or self.suspended or self.owners == 0 or x.ndim < 2 or rows < size:
            return None
        if x.ndim > 2 and x.shape[-2] == 1 and not grad:
            return None
        least = LEAST_BYTES if grad or x.requires_grad else LEAST_BYTES_WITHOUT_GRADIENT  # a checkpoint's forward has no graph
        if self.mode == "auto" and x.numel() * x.element_size() < size * least:
            return None
        return Layout(tuple(x.shape[:-1]), rows, -(-rows // size))

    def begin(self, module: Any, part: TokenPart, x: Tensor) -> Running:
        """Before the forward of `module`: which layout `x`, that enters it, has. `end` is to be told what this returns.

        A checkpoint runs a module again within backward, perhaps after other forwards: there the layout is that of the forward
        in which `x`'s memory entered.

        Raises:
            AutoTPError: that is not known.
            PlanError: the chain begins a second time while its rows are dealt.
        """
        compiling = torch.compiler.is_compiling()
        again = not compiling and torch._C._current_graph_task_id() != -1
        before, outer = self.layout, self._inside
        if outer == 0 and again:
            self.layout = self._recall(part, x)
        elif part.first:
            self._check_begins(part, x)
            self.layout = self.choose(x)
            self.joined = None
        elif self.joined is not None and self.layout is None and tuple(x.shape[:-1]) == self.joined.dealt:
            self.layout = self.joined
        if not compiling and not again and (x.requires_grad or torch.is_grad_enabled()):
            self._known.note(x, self.layout)
        self._inside = outer + 1
        token = None if compiling else RUNNING.set((*RUNNING.get(), module))
        return token, outer, outer == 0 and again, before, self.keeps_whole

    def end(self, running: Running) -> None:
        """After that forward, whatever became of it."""
        token, self._inside, alone, before, self.keeps_whole = running
        if token is not None:
            RUNNING.reset(token)
        if alone:
            self.layout = before

    def _check_begins(self, part: TokenPart, x: Tensor) -> None:
        if self.layout is not None or (self.joined is not None and tuple(x.shape[:-1]) == self.joined.dealt):
            self.reset()
            raise PlanError(
                f"{part.name} runs while a forward's tokens are dealt by it already: if it runs twice in one forward, pass "
                f"sequence_parallel=False, or make the plan again with the layers as they are now; if the last forward was "
                f"interrupted, call it again"
            )

    def _recall(self, part: TokenPart, x: Tensor) -> Layout | None:
        known, layout = self._known.find(x)
        if known:
            return layout
        if part.first:
            return self.choose(x)
        raise AutoTPError(
            f"{part.name} runs again within backward, on an input of shape {list(x.shape)} that no forward gave it, so it is "
            f"not known which rows these are: checkpoint whole layers without moving what they save (save_on_cpu), or pass "
            f"sequence_parallel=False"
        )

    def note_output(self, output: Any) -> None:
        """After a module that ran again within backward: another one may go on from there."""
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
            map_first(output, self._note_tensor, "it")

    def _note_tensor(self, x: Tensor) -> Tensor:
        self._known.note(x, self.layout)
        return x

    def remember(self) -> Moment:
        """Where the running forward is."""
        frames = self.draws.remember()
        place = None if self._frame is None else self._frame.frames.index(self._frame)
        return Moment(self.layout, self.joined, self.keeps_whole, self._inside, frames, place)

    @contextmanager
    def going_on(self, moment: Moment) -> Iterator[None]:
        """Within it the stream is where a forward was; generators are in the state of then already."""
        before = self.layout, self.joined, self.keeps_whole, self._inside, self._frame
        self.layout, self.joined, self.keeps_whole, self._inside = moment[:4]
        try:
            with self.draws.going_on(moment.frames) as frames, self.hiding_rows():
                self._frame = None if moment.place is None else frames[moment.place]
                yield
        finally:
            self.layout, self.joined, self.keeps_whole, self._inside, self._frame = before

    def reset(self) -> None:
        """Forget the forward that ran: it has ended, or died half way."""
        self.layout = self.joined = self.local = self.full = self._frame = None
        self.suspended, self.keeps_whole, self._inside = False, False, 0

    @property
    def scatters(self) -> bool:
        """Whether a row linear's sum is dealt to the ranks now."""
        return self.layout is not None and not self.keeps_whole

    def scatter(self, y: Tensor, dtype: torch.dtype | None) -> Tensor:
        """This rank's rows of the sum over the ranks of `y`; what follows in this module reads dealt rows."""
        self.leave_whole_rows()
        return super().scatter(y, dtype)

    # -- random numbers -------------------------------------------------------------------------------------------------

    @contextmanager
    def drawing_apart(self) -> Iterator[None]:
        """Random numbers drawn inside are each rank's own; the default generators end alike on all ranks."""
        with self.draws.open(self.group.tp_rank) as frame:
            self._frame = frame
            try:
                yield
            finally:
                self._frame = None

    @property
    def draws_apart(self) -> bool:
        """Whether dealt rows draw each rank's own random numbers now."""
        return self._frame is not None

    @contextmanager
    def drawing_together(self) -> Iterator[None]:
        """Inside it, what is drawn is drawn alike on all ranks again, until rows are scattered."""
        frame = self._frame
        if frame is not None:
            frame.switch(apart=False)
        try:
            yield
        finally:
            if frame is not None:
                frame.switch(apart=True)

    def leave_whole_rows(self) -> None:
        """Partial sums were scattered: what follows in this module reads dealt rows, and draws for those."""
        frame = self._frame
        if frame is not None:
            for inside in frame.frames[frame.frames.index(frame) + 1 :]:
                inside.switch(apart=False)
            frame.switch(apart=True)


def map_first(output: Any, change: Callable[[Tensor], Tensor], name: str) -> Any:
    """`output`, a tensor or what has one first, with that one changed.

    Raises:
        PlanError: there is none.
    """
    if isinstance(output, Tensor):
        return change(output)
    if isinstance(output, dict) and output:
        key = next(iter(output))
        output[key] = map_first(output[key], change, name)
        return output
    if isinstance(output, tuple | list) and output:
        values = (map_first(output[0], change, name), *output[1:])
        return type(output)(*values) if hasattr(output, "_fields") else type(output)(values)
    raise PlanError(f"{name} returned a {type(output).__name__} with no tensor first, whose tokens the plan deals")
