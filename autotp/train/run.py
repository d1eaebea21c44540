"""`train`: one rank's part of a training run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import AutoTPError
from .options import TrainOptions


class TrainInterrupted(AutoTPError):
    """The run was stopped (Ctrl-C, SIGTERM): it is saved, and the message says how to resume.

    Attributes:
        step: steps that are done.
        checkpoint: the directory to resume from.
    """

    def __init__(self, step: int, checkpoint: str) -> None:
        super().__init__(step, checkpoint)
        self.step, self.checkpoint = step, checkpoint

    def __str__(self) -> str:
        return f"interrupted after step {self.step} and saved: go on with --resume {self.checkpoint}"


class NonFiniteLossError(AutoTPError):
    """The loss, or the norm of the gradients, is not a finite number.

    Attributes:
        step: the step, from 1.
        batch: the micro-batch in the run, from 0.
    """

    def __init__(self, message: str, step: int, batch: int) -> None:
        super().__init__(message, step, batch)
        self.step, self.batch = step, batch

    def __str__(self) -> str:
        return str(self.args[0])


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


def train(options: TrainOptions, on_event: Callable[[dict[str, Any]], None] | None = None) -> TrainResult:
    """Train as `options` say and save; collective over all `tp * dp` ranks.

    Args:
        options: see `TrainOptions`.
        on_event: on the main process called with each step's `step`, `steps`, `loss`, `lr`, `grad_norm`, `tokens` (of the
            step, over all ranks), `tokens_per_s`, `mfu` (None where the GPU is not known), `memory_gib` and, when
            evaluated, `eval_loss`.

    Raises:
        TrainInterrupted: Ctrl-C or SIGTERM on any rank, after the step in progress; a checkpoint is saved.
        NonFiniteLossError: on all ranks.
        AutoTPError: options, data or checkpoint that can't be used.
    """
    raise NotImplementedError
