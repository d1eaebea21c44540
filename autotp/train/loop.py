"""The training loop that the CLI and the demo run: a plain one, since a parallelized model trains like any other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import AutoTPError
from ..layers.clip import clip_grad_norm_


@dataclass(frozen=True)
class TrainOptions:
    """How to train.

    Attributes:
        steps: optimizer steps.
        lr, weight_decay: AdamW's.
        grad_accum: batches (micro-batches of equal size) per step.
        max_norm: the gradients' global norm is clipped to it; 0 switches clipping off.
    """

    steps: int = 100
    lr: float = 1e-5
    weight_decay: float = 0.0
    grad_accum: int = 1
    max_norm: float = 1.0

    def __post_init__(self) -> None:
        for name in ("steps", "grad_accum"):
            if getattr(self, name) < 1:
                raise AutoTPError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("lr", "weight_decay", "max_norm"):
            if getattr(self, name) < 0:
                raise AutoTPError(f"{name} must not be negative, as {getattr(self, name)} is")


def train_model(
    model: nn.Module, batches: Iterator[Tensor], options: TrainOptions, on_step: Callable[[int, float], None] | None = None
) -> list[float]:
    """Train a causal language model, parallelized or not, with AdamW on `batches`.

    Args:
        model: its forward takes `input_ids` and `labels` and returns a loss that is a mean over tokens.
        batches: token ids `[batch, sequence]`, the same on every rank of a TP group.
        options: see `TrainOptions`.
        on_step: called after each step with its number, from 1, and its loss.

    Returns:
        each step's loss, the mean over its micro-batches, before the step.

    Raises:
        AutoTPError: the loss is not finite.
    """
    params = [param for param in model.parameters() if param.requires_grad]
    if not params:
        raise AutoTPError("no parameter of the model requires a gradient, so there is nothing to train")
    optimizer = torch.optim.AdamW(params, lr=options.lr, weight_decay=options.weight_decay)
    device = params[0].device
    model.train()
    losses: list[float] = []
    for step in range(1, options.steps + 1):
        total = torch.zeros((), dtype=torch.float32, device=device)
        for _ in range(options.grad_accum):
            ids = next(batches).to(device)
            loss = model(input_ids=ids, labels=ids).loss / options.grad_accum
            loss.backward()
            total += loss.detach().float()
        if options.max_norm:
            clip_grad_norm_(params, options.max_norm)
        losses.append(total.item())
        if not torch.isfinite(total):
            raise AutoTPError(f"the loss is {losses[-1]} at step {step}: lower the learning rate ({options.lr:g} now)")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if on_step is not None:
            on_step(step, losses[-1])
    return losses
