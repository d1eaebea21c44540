"""One optimizer step, which every training here takes."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import AutoTPError
from ..layers.clip import grad_norm
from ..places import Places
from .batches import Batch, count_labels, count_tokens
from .optimizer import MasterOptimizer
from .stop import NonFiniteLossError


@dataclass(frozen=True)
class Step:
    """What a step was: `loss`, the mean over its label tokens before the update; `grad_norm` before clipping; `tokens` of all
    data ranks, padding left out; `stop`, whether any rank was asked to stop."""

    loss: float
    grad_norm: float
    tokens: int
    stop: bool


class Stepper:
    """Takes steps on micro-batches of unequal numbers of label tokens, over several data ranks.

    Args:
        model: its forward takes `input_ids`, `labels` and perhaps `attention_mask`, and returns a loss that is the mean over
            the labels that are not -100, the first of each sequence left out.
        optimizer: of the model.
        places: this rank's groups.
        max_norm: the gradients' global norm is clipped to it; 0 switches clipping off.
        autocast: what the forward runs in.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: MasterOptimizer,
        places: Places,
        max_norm: float,
        autocast: Callable[..., AbstractContextManager] = nullcontext,
    ) -> None:
        self.model, self.optimizer, self.places, self.max_norm, self.autocast = model, optimizer, places, max_norm, autocast
        self.device = optimizer.params[0].device

    def take(self, batches: list[Batch], number: int, stop: bool = False) -> Step:
        """Train on this data rank's micro-batches of step `number`, from 1; collective over all ranks.

        Raises:
            NonFiniteLossError: on all ranks, before the weights are changed.
        """
        counts = [count_labels(batch) for batch in batches]
        sums = self.places.dp.gather_objects((sum(counts), sum(map(count_tokens, batches))))
        labels, tokens = (sum(each) for each in zip(*sums, strict=True))
        if not labels:
            raise AutoTPError(f"no token of the batches of step {number} has a label: there is nothing to learn from")
        losses = [
            self._accumulate(batch, count / labels) if count else torch.zeros((), device=self.device)
            for batch, count in zip(batches, counts, strict=True)
        ]
        every = self.places.gather((torch.stack(losses).tolist(), stop))
        self._check_losses([each for each, _ in every], number)
        loss = sum(sum(every[first][0]) for first in range(0, len(every), self.places.tp.tp_size))
        norm = self._update(number, len(batches))
        return Step(loss, norm, tokens, any(wanted for _, wanted in every))

    def _accumulate(self, batch: Batch, share: float) -> Tensor:
        """Add the gradient of one micro-batch; its part of the step's loss."""
        moved = {key: value.to(self.device, non_blocking=True) for key, value in batch.items()}
        with self.autocast():
            loss = self.model(**moved).loss
        loss = loss * share
        (loss * self.optimizer.scale if self.optimizer.scale != 1 else loss).backward()
        return loss.detach().float()

    def _check_losses(self, every: list[list[float]], number: int) -> None:
        for micro in range(len(every[0])):
            for rank, losses in enumerate(every):
                if not math.isfinite(losses[micro]):
                    dp = rank // self.places.tp.tp_size
                    batch = ((number - 1) * len(losses) + micro) * self.places.dp.tp_size + dp
                    raise self._stop(f"the loss is {losses[micro]}", number, batch, f"batch {batch} (data rank {dp}) of")

    def _stop(self, what: str, number: int, batch: int, where: str) -> NonFiniteLossError:
        lr = self.optimizer.adamw.param_groups[0]["lr"]
        return NonFiniteLossError(
            f"{what} in {where} step {number}; the step was not taken. Lower the learning rate ({lr:g}) or look there.",
            number, batch,
        )  # fmt: skip

    def _update(self, number: int, micros: int) -> float:
        """Clip and step; the gradient's norm."""
        optimizer = self.optimizer
        optimizer.reduce_gradients(self.places.dp)
        norm = float(grad_norm(optimizer.targets))
        if not math.isfinite(norm):
            if optimizer.skip():
                return norm
            first = (number - 1) * micros * self.places.dp.tp_size
            last = first + micros * self.places.dp.tp_size - 1
            raise self._stop(f"the gradients' norm is {norm}", number, first, f"batches {first} to {last} of")
        optimizer.clip(self.max_norm, norm)
        optimizer.step()
        return norm
