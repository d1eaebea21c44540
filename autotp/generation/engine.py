"""What one model decodes with: its memory, its steps and their graphs."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ..comm import TPGroup
from ..errors import AutoTPError
from ..layers.base import find_group
from ..layers.entry import judge_batch
from .arena import Arena, ArenaCache
from .buckets import round_length, round_rows
from .fingerprint import Fingerprint
from .prompt import PromptStep
from .step import Step

log = logging.getLogger(__name__)
MOST_STEPS = 256  # forms kept, each with its graph; the one used longest ago goes first
PLACE = "autotp_decoding"  # the name in `model.__dict__`


class Engine:
    """Owns what decoding keeps between calls of `generate`; a copy of the model gets one of its own.

    Attributes:
        graphs: whether steps are captured, which takes a GPU. runs_ahead: whether the next forward is launched before it is
            known that the last token ended everything. pads: whether batches are rounded up.
        captures: graphs captured so far. broken: why capturing was given up, by the kind of step.
        special: whether captured steps take the kernels made for decoding. busy: whether a generation is under way.
        met: whether the ranks have met in the call of `generate` that runs.
    """

    def __init__(self, group: TPGroup) -> None:
        self.group = group
        self.graphs = self.runs_ahead = self.pads = group.device.type == "cuda"
        self.captures = 0
        self.broken: dict[type, str] = {}
        self.special, self.busy, self.met = True, False, False
        self._said: set[str] = set()
        self.release()

    def __deepcopy__(self, memo: dict) -> Engine:
        return Engine(self.group)

    def release(self) -> None:
        """Let go of all memory; the next call of generate takes it anew."""
        self.arena = Arena()
        self.steps: OrderedDict[Hashable, Any] = OrderedDict()
        self.caches: dict[tuple[int, int], ArenaCache] = {}
        self.print: Fingerprint | None = None

    @contextmanager
    def occupied(self) -> Iterator[None]:
        """For the time of one generation: its memory is the model's only one."""
        self.busy = True
        try:
            yield
        finally:
            self.busy = False

    def refresh(self, model: nn.Module) -> None:
        """Let go of everything if the model is not what steps were made for."""
        if self.print is None or not self.print.holds(model):
            self.release()
            self.print = Fingerprint(model)

    def bucket(self, rows: int, tokens: int) -> tuple[int, int]:
        """Rows and cache length that a batch of `rows` sequences of up to `tokens` cached tokens runs in."""
        return (round_rows(rows) if self.pads else rows), round_length(tokens)

    def take_cache(self, config: Any, rows: int, length: int) -> ArenaCache:
        """The empty cache of a bucket; memory grows where it is too small, and then all graphs are made again."""
        if rows * length > self.arena.tokens:
            self.steps.clear()
            self.caches.clear()
            self.arena.grow(rows * length)
        self.arena.clear(rows * length)
        if (rows, length) not in self.caches:
            self.caches[rows, length] = ArenaCache(config, self.arena, rows, length, self.group.device)
        return self.caches[rows, length]

    def take_step(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The step of a form and whatever else is in `key`, new or used before."""
        if key not in self.steps:
            self.steps[key] = make()
            if len(self.steps) > MOST_STEPS:
                self.steps.popitem(last=False)
        self.steps.move_to_end(key)
        return self.steps[key]

    def launch(self, step: Step | PromptStep, model: nn.Module) -> None:
        """One step: a replay, or launches one by one, and then captured for the next time."""
        if step.graph is not None:
            step.graph.replay()
            return
        if not self.can_capture(type(step)):
            step.run(model)
            return
        with step.context() if self.special else nullcontext():
            if self._runs(step, model):
                self.capture(step, model)
                return
        self.special = False
        step.run(model)
        self.capture(step, model)

    def _runs(self, step: Step | PromptStep, model: nn.Module) -> bool:
        """Run a step; False where kernels made for decoding could not, on all ranks alike, and nothing was changed.

        Raises:
            AutoTPError: other ranks failed and this one did not; what the step raised, where it failed on some ranks alone or
                no such kernels were in it.
        """
        failure: Exception | None = None
        try:
            step.run(model)
        except Exception as error:  # a kernel or a tensor that waits, in a forward that nobody foresaw
            if not self.special:
                raise
            failure = error
        texts = self.group.gather_objects(None if failure is None else describe(failure))
        failures = [text for text in texts if text]
        if not failures:
            return True
        if failure is None:
            failed = [rank for rank, text in enumerate(texts) if text]
            raise AutoTPError(f"{step.said} failed on TP rank(s) {failed}: {failures[0]}")
        if len(failures) < len(texts):  # it would go on alone
            raise failure
        self.say(f"generate decodes without the kernels made for it: {failures[0]}")
        return False

    def can_capture(self, kind: type) -> bool:
        """Whether a step of this kind that has no graph gets one."""
        return self.graphs and kind not in self.broken and not torch.is_autocast_enabled("cuda")

    def capture(self, step: Step | PromptStep, model: nn.Module) -> None:
        """Record the step's launches, which ran once before; where that fails on any rank, none of its kind is captured."""
        judge_batch(model)  # it may wait for the device, which a capture must not
        graph, failure = torch.cuda.CUDAGraph(), None
        try:
            with torch.cuda.graph(graph, pool=self._find_pool(), capture_error_mode="thread_local"):
                step.run(model)
        except Exception as error:  # what a strange forward does in a capture may raise anything
            failure = describe(error)
        failures = [text for text in self.group.gather_objects(failure) if text]
        if failures:
            self.broken[type(step)] = failures[0]
            self.say(f"generate runs {step.said} without CUDA graphs: capturing one failed ({failures[0]})")
        else:
            step.graph = graph
            self.captures += 1

    def _find_pool(self) -> Any:
        """The graphs' memory pool; None, for a new one, where there are none: PyTorch takes no pool whose graphs are gone."""
        return next((step.graph.pool() for step in self.steps.values() if step.graph is not None), None)

    def say(self, text: str) -> None:
        """Log a warning, once for this model and on one rank."""
        if text not in self._said:
            self._said.add(text)
            if self.group.tp_rank == 0:
                log.warning("autotp: %s", text)


def describe(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def find_engine(model: nn.Module) -> Engine | None:
    """The engine of a parallelized model, made at first use; None for any other model."""
    group = model.__dict__.get("autotp_group")
    if group is None:
        return None
    if PLACE not in model.__dict__:
        model.__dict__[PLACE] = Engine(group)
    return model.__dict__[PLACE]


def release(model: nn.Module) -> None:
    """Free the caches and CUDA graphs that `generate` keeps for a parallelized model; the next call makes new ones.

    Raises:
        AutoTPError: the model is not parallelized.
    """
    if find_group(model) is None:
        raise AutoTPError(f"this {type(model).__name__} is not parallelized, so generate keeps nothing for it")
    engine = model.__dict__.get(PLACE)
    if engine is not None:
        engine.release()
