"""Random numbers on split values: each rank's own there, alike on all ranks elsewhere, and the default generators end alike.

What is dropped on replicated values (hidden states, residuals) is drawn alike by all ranks, which share their generators' state.
Attention's probabilities and a split MLP's activations are other ones on each rank: alike masks there would tie heads and neurons
together that have nothing to do with each other.

| | numbers come from |
|---|---|
| outside frames, and in a frame that is not apart | the default generator |
| in a frame that is apart | the default generator too, which then stands in this rank's own state |
| the same under a compiler, or while a CUDA graph is captured | the default generator, and the rank's number mixed in |

A frame's own state follows from one number of the CPU's default generator, and from the part: nothing has to be saved beside
the default generators, and what a checkpoint runs again draws the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext

from ..comm import TPGroup
from ..kernels.dropout import attend_apart, drop_apart
from .base import TensorParallel_Layer, insert_class


class Frame(TorchFunctionMode):
    """One module's stretch of random numbers: apart from the other ranks', or alike.

    Attributes:
        part: whose numbers they are: ranks of one part draw alike.
        apart: what is drawn now.
    """

    def __init__(self, frames: list[Frame], part: int, apart: bool) -> None:
        super().__init__()
        self.frames, self.part, self.apart = frames, part, apart
        self.generator: torch.Generator | None = None  # None: the generator is left alone, and calls are replaced
        self.other: Tensor | int = 0  # the state, or the seed, that the generator goes on from after the next switch

    def seed(self, generator: torch.Generator, seed: int) -> None:
        """Have `generator` draw from `seed` where this frame is apart."""
        self.generator, self.other = generator, seed
        if self.apart:
            self._exchange(generator)

    def switch(self, apart: bool) -> None:
        """Go on apart, or alike; frames inside this one keep what they draw."""
        if apart is self.apart:
            return
        self.apart = apart
        if self.generator is None:
            return
        inside = self.frames[self.frames.index(self) + 1 :]
        above = next((f for f in inside if f.apart and f.generator is self.generator), None)
        if above is None:
            self._exchange(self.generator)
        else:  # which took over the generator, and keeps the state it found
            self.other, above.other = above.other, self.other

    def _exchange(self, generator: torch.Generator) -> None:
        now, other = generator.get_state(), self.other
        generator.manual_seed(other) if isinstance(other, int) else generator.set_state(other)
        self.other = now

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if self.apart and (func is F.dropout or func is torch.dropout):
            return drop_apart(self.part, *args, **kwargs)
        if self.apart and func is F.scaled_dot_product_attention:
            return attend_apart(self.part, *args, **kwargs)
        return func(*args, **kwargs)


class FrameState(NamedTuple):
    """Where a frame is; see there."""

    part: int
    apart: bool
    generator: torch.Generator | None
    other: Tensor | int


class Draws:
    """The frames that are open in one model, the innermost last."""

    def __init__(self, group: TPGroup) -> None:
        self.group = group
        self.frames: list[Frame] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Draws:
        twin = memo[id(self)] = Draws(self.group)
        return twin

    @contextmanager
    def open(self, part: int, apart: bool = True) -> Iterator[Frame]:
        """A frame inside of which this model's modules draw as it says; the generators go on alike behind it."""
        frame = Frame(self.frames, part, apart)
        self.frames.append(frame)
        try:
            if torch.compiler.is_compiling() or is_capturing(self.group.device):
                with frame:
                    yield frame
            else:
                if not watches_functions():  # ranks that are threads have one generator
                    frame.seed(find_generator(self.group.device), int(torch.randint(2**62, (), device="cpu")) + part)
                yield frame
        finally:
            frame.switch(apart=False)
            self.frames.pop()

    @contextmanager
    def alike(self) -> Iterator[None]:
        """Inside it the innermost frame draws alike."""
        frame = self.frames[-1] if self.frames else None
        before = frame is not None and frame.apart
        if frame is not None:
            frame.switch(apart=False)
        try:
            yield
        finally:
            if frame is not None:
                frame.switch(apart=before)

    def remember(self) -> list[FrameState]:
        """Where the open frames are."""
        return [FrameState(frame.part, frame.apart, frame.generator, frame.other) for frame in self.frames]

    @contextmanager
    def going_on(self, states: list[FrameState]) -> Iterator[list[Frame]]:
        """Inside it the frames that were open then are; the generators are in the state of then already."""
        before, self.frames = self.frames, []
        for state in states:
            frame = Frame(self.frames, state.part, state.apart)
            frame.generator, frame.other = state.generator, state.other
            self.frames.append(frame)
        try:
            yield self.frames
        finally:
            self.frames = before

    def switch(self, apart: bool) -> None:
        """The innermost frame goes on so; nothing where none is open."""
        if self.frames:
            self.frames[-1].switch(apart)


def find_generator(device: torch.device) -> torch.Generator:
    """The default generator of a device."""
    if device.type == "cpu":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured, which no generator can be seeded in."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def watches_functions() -> bool:
    """Whether a torch function mode of somebody else's is at work."""
    modes = torch._C._len_torch_function_stack()
    return modes > 0 and any(type(torch._C._get_function_stack_at(i)) not in (DeviceContext, Frame) for i in range(modes))


# -- modules ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DrawPart:
    """What a module does about random numbers while it trains.

    Attributes:
        draws: shared by the model's modules.
        part: whose numbers this rank draws in it.
        inside: "apart" or "either" (alike, until a module in it says otherwise) in a frame of its own; "alike" in the frame
            that is open; "" as that frame stands.
        after: how the frame that is open goes on behind it: "apart", "alike" or "" as before.
        rates: names of the attributes by which it drops; where all are 0 it opens no frame. Empty: not known.
    """

    draws: Draws
    part: int
    inside: str
    after: str
    rates: tuple[str, ...]

    def drops(self, module: Any) -> bool:
        """Whether some rate is not 0."""
        return not self.rates or any(read_rate(module, name) != 0 for name in self.rates)


def read_rate(module: Any, name: str) -> Any:
    """An attribute of a module, of one below it, or of its config."""
    for key in name.split("."):
        module = getattr(module, key)
    return module


class DrawModule(TensorParallel_Layer):
    """A module that draws random numbers, or behind which others are drawn, mixed in front of its own class.

    Attributes:
        autotp_draws: what it does; one attribute, whose name no module has of its own.
    """

    autotp_draws: DrawPart

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        part = self.autotp_draws
        if not self.training:
            return super().forward(*args, **kwargs)
        draws = part.draws
        if part.inside in ("apart", "either") and part.drops(self):
            with draws.open(part.part, part.inside == "apart"):
                output = super().forward(*args, **kwargs)
        elif part.inside == "alike" and draws.frames:
            with draws.alike():
                output = super().forward(*args, **kwargs)
        else:
            output = super().forward(*args, **kwargs)
        if part.after:
            draws.switch(part.after == "apart")
        return output


def install_draws(module: Any, name: str, part: DrawPart) -> None:
    """Make `module` a DrawModule in place; it may be a layer of another kind already."""
    shards = module.__dict__.get("shards", {})
    insert_class(module, DrawModule)
    module.tp, module.shards, module.full_name, module.autotp_draws = part.draws.group, shards, name, part
