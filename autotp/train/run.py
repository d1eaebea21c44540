"""`train`: one rank's part of a training run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from transformers import get_scheduler

from ..checkpoint.claim import DirectoryClaim
from ..checkpoint.gguf import convert_beside, find_gguf
from ..checkpoint.save import save_pretrained
from ..errors import AutoTPError
from ..places import Places
from .batches import TrainBatches, count_labels, eval_batches
from .encode import Encoder
from .events import EventLog, SpeedMeter, memory_gib
from .loop import Stepper
from .optimizer import MasterOptimizer
from .options import TrainOptions
from .paths import check_out
from .records import check_files
from .resume import RunState, find_checkpoint
from .sequences import SequenceStream, ShuffledSequences, nothing_in
from .setup import check_model, load_model, load_tokenizer, make_accelerator
from .stop import NonFiniteLossError, StopSignals, TrainInterrupted

__all__ = ["NonFiniteLossError", "TrainInterrupted", "TrainResult", "check_data", "train"]

_CLAIM_WAIT_S = 30  # at most, for another run that saves to the same directory

OnEvent = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class TrainResult:
    """What a run leaves.

    Attributes:
        steps: steps that are done, those before a resumed checkpoint included.
        losses: each step's loss, mean over its label tokens, before the step; of this call's steps.
        eval_loss: the last evaluation's, or None.
        out: the directory of the trained checkpoint.
    """

    steps: int
    losses: tuple[float, ...]
    eval_loss: float | None
    out: str


def check_data(options: TrainOptions) -> None:
    """What can be known of a run's files before the ranks start.

    Raises:
        AutoTPError: a file that is missing or can't be training data, `out` that can't be made, nothing to resume from.
    """
    check_files(options.data, "--data")
    check_files(options.eval_data or (), "--eval-data")
    check_out(options.out)
    find_checkpoint(options)


def train(options: TrainOptions, on_event: OnEvent | None = None, group_or_mesh: Any = None) -> TrainResult:
    """Train as `options` say and save; collective over all `tp * dp` ranks.

    The process group is started from a launcher's variables if need be, and ended again; one rank needs none.

    Args:
        options: see `TrainOptions`.
        on_event: on the main process called with each step's `step`, `steps`, `loss`, `lr`, `grad_norm`, `tokens` (of the
            step, over all ranks), `tokens_per_s`, `mfu` (None where the GPU is not known), `memory_gib` and, when
            evaluated, `eval_loss`.
        group_or_mesh: the ranks, if not all: a process group of `tp` ranks, or a DeviceMesh with a data and a TP axis.

    Raises:
        TrainInterrupted: Ctrl-C or SIGTERM on any rank, after the step in progress; a checkpoint is saved.
        NonFiniteLossError: on all ranks; the weights are as before the step.
        AutoTPError: options, data or checkpoint that can't be used.
    """
    started = not dist.is_initialized()
    places = Places.find(options.tp, options.dp, group_or_mesh)
    run, claim = None, DirectoryClaim()
    try:
        run = _Run(options, places, claim)
        result = run.train(on_event)
    except TrainInterrupted:
        _end_group(started)
        raise
    finally:
        if run is not None:
            run.log.close()
        claim.release()
    _end_group(started)
    return result


def _end_group(started: bool) -> None:
    if started and dist.is_initialized():
        dist.destroy_process_group()


class _Run:
    """The parts of a run, made in an order that finds mistakes before weights are read."""

    def __init__(self, options: TrainOptions, places: Places, claim: DirectoryClaim) -> None:
        gguf = find_gguf(options.model)
        if gguf is not None:
            with places.together(f"converting {gguf}"):
                made = str(convert_beside(gguf, options.out)) if places.is_main else ""
            options = replace(options, model=places.gather(made)[0])
        self.options, self.places = options, places
        with places.together("checking the options"):
            check_data(options)
            check_model(options.model)
            self.checkpoint = find_checkpoint(options, warn=places.is_main)
            self.accelerator: Accelerator = make_accelerator(options, places)
            self.encoder = Encoder(load_tokenizer(options.model), options.completions_only)
            self.batches = self._make_batches()
            if places.is_main and options.save_every:  # at the first save, the steps until then would be lost
                Path(options.out).mkdir(parents=True, exist_ok=True)
                claim.hold(Path(options.out), min(_CLAIM_WAIT_S, places.tp.timeout_s / 2))
            log = options if places.is_main else replace(options, log=None, tensorboard=None)
            self.log = EventLog(log.log, log.tensorboard, self.checkpoint is not None)
        self.steps = self._count_steps()
        self.model = load_model(options, places)
        o = options
        self.optimizer = MasterOptimizer(self.model, o.lr, o.weight_decay, o.betas, o.eps, o.master_weights)
        self.schedule = self._make_schedule()
        torch.manual_seed(o.seed + places.dp.tp_rank)  # the ranks of a model draw alike, those of different data do not
        self.state = RunState(self.model, self.optimizer, self.schedule, self.batches, options, places)
        self.done = self.state.load(self.checkpoint) if self.checkpoint is not None else 0
        self.stepper = Stepper(self.model, self.optimizer, places, o.clip, self.accelerator.autocast)
        self.meter = SpeedMeter(self.model, o.seq_length, places.tp.device, places.size)
        self.eval_loss: float | None = None

    def _stream(self, files: tuple[str, ...], seed: int | None) -> SequenceStream:
        return SequenceStream(files, self.encoder, self.options.seq_length, self.options.packing, seed, self.options.text_field)

    def _make_batches(self) -> TrainBatches:
        o, dp = self.options, self.places.dp
        sequences = ShuffledSequences(self._stream(o.data, o.seed), o.seed)
        return TrainBatches(sequences, o.batch_size, o.grad_accum, dp.tp_rank, dp.tp_size, self.encoder.pad, not o.packing)

    def _count_steps(self) -> int:
        """Steps of the run; if epochs were asked for, the main rank reads the data once to count them."""
        if self.options.steps is not None:
            return self.options.steps
        count = 0
        with self.places.together("counting the data"):
            if self.places.is_main:
                stream = self._stream(self.options.data, None)
                count = stream.count()
                if not count:
                    raise AutoTPError(nothing_in(stream, "--data"))
        return math.ceil(self.places.gather(count)[0] * (self.options.epochs or 1) / self.batches.step_size)

    def _make_schedule(self) -> Any:
        o = self.options
        warmup = math.ceil(o.warmup * self.steps) if o.warmup < 1 else int(o.warmup)
        name = "constant_with_warmup" if o.lr_schedule == "constant" else o.lr_schedule
        return get_scheduler(name, self.optimizer.adamw, warmup, self.steps)

    # -- the steps ----------------------------------------------------------------------------------------------------

    def train(self, on_event: OnEvent | None) -> TrainResult:
        """All steps that are left, and the trained checkpoint."""
        losses = []
        with StopSignals() as signals, _no_cache(self.model):
            while self.done < self.steps:
                event, stop = self._step(signals)
                losses.append(event["loss"])
                if self.places.is_main:
                    self.log.write(event)
                    if on_event is not None:
                        on_event(event)
                if stop and self.done < self.steps:
                    path = self.state.save(self.done)
                    self.state.wait()
                    raise TrainInterrupted(self.done, str(path))
                if self.options.save_every and self.done % self.options.save_every == 0:
                    self.state.save(self.done)
        out = self.options.out
        save_pretrained(self.model, out, is_main_process=self.places.dp.tp_rank == 0)
        with self.places.together(f"saving the tokenizer to {out}"):
            if self.places.is_main:
                self.encoder.tokenizer.save_pretrained(out)
        self.state.wait()
        return TrainResult(self.done, tuple(losses), self.eval_loss, out)

    def _step(self, signals: StopSignals) -> tuple[dict[str, Any], bool]:
        """One step, and an evaluation where it is due; its event, and whether to stop."""
        start, lr = time.perf_counter(), self.schedule.get_last_lr()[0]
        step = self.stepper.take(self.batches.next_step(), self.done + 1, signals.seen)
        self.schedule.step()
        self.done += 1
        speed = step.tokens / (time.perf_counter() - start)
        event: dict[str, Any] = {"step": self.done, "steps": self.steps, "loss": step.loss, "lr": lr, "grad_norm": step.grad_norm}
        event |= {"tokens": step.tokens, "tokens_per_s": speed, "mfu": self.meter.mfu(speed)}
        event |= {"memory_gib": memory_gib(self.places.tp.device)}
        every, last = self.options.eval_every, self.done == self.steps
        if self.options.eval_data and (last or (every and self.done % every == 0)):
            self.eval_loss = event["eval_loss"] = self._evaluate()
        return event, step.stop

    @torch.no_grad()
    def _evaluate(self) -> float:
        """The mean loss over the label tokens of the evaluation data."""
        o, dp = self.options, self.places.dp
        stream = self._stream(o.eval_data or (), None)
        total, labels = 0.0, 0
        self.model.eval()
        for batch in eval_batches(stream, o.batch_size, dp.tp_rank, dp.tp_size, o.eval_batches, not o.packing):
            count = count_labels(batch)
            with self.accelerator.autocast():
                total += float(self.model(**{key: value.to(dp.device) for key, value in batch.items()}).loss) * count
            labels += count
        self.model.train()
        sums = dp.gather_objects((total, labels))
        total, labels = (sum(each) for each in zip(*sums, strict=True))
        if not labels:
            raise AutoTPError(nothing_in(stream, "--eval-data"))
        return total / labels


@contextmanager
def _no_cache(model: nn.Module) -> Iterator[None]:
    """Training needs no key-value cache, which models make by default; the config is saved as it was."""
    config: Any = model.config
    before = getattr(config, "use_cache", None)
    if before is not None:
        config.use_cache = False
    try:
        yield
    finally:
        if before is not None:
            config.use_cache = before
