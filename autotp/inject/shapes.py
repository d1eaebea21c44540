"""Runs every rank's shapes through the model's forward before a weight is touched: on meta, in one process, with no group.

This is no proof of the numbers. It catches the plan that no forward can run: a sibling that was forgotten, a width that the
code writes into a shape.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..comm import TPGroup
from ..errors import PlanError
from ..shard import Shard
from .plan import Plan

META = torch.device("meta")


class ShapeGroup(TPGroup):
    """A TPGroup of which only the shapes are real: collectives return tensors of the right shape on meta."""

    def __init__(self, tp_rank: int, tp_size: int) -> None:
        super().__init__(None, META)
        self.tp_rank, self.tp_size, self.ranks = tp_rank, tp_size, tuple(range(tp_size))

    def all_reduce(self, tensor: Tensor, op: str = "sum", dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty_like(tensor)

    def all_reduce_owned(self, tensor: Tensor, op: str = "sum") -> Tensor:
        return tensor

    def all_gather(self, local: Tensor, shard: Shard) -> Tensor:
        return torch.empty(shard.shape, dtype=local.dtype, device=META)


def check_shapes(model: nn.Module, plan: Plan, rewrite: Callable[[nn.Module, Plan, TPGroup], None]) -> None:
    """Rewrite a copy of the first and the last rank's shapes, and run them if the unsharded model runs on meta at all.

    Args:
        rewrite: swaps the modules' forwards, given model, plan and group.

    Raises:
        PlanError: a module is not what its plan needs, or the sharded forward fails where the unsharded one runs, or gives
            logits of another shape.
    """
    if not plan.modules:
        return
    expected = _try_run(model) if plan.tp_size > 1 and hasattr(model, "config") else None
    for rank in sorted({0, plan.tp_size - 1}):
        try:
            shadow = _shadow(model, plan.shards, rank)
        except Exception:  # a module that can't be copied can't be tried
            return
        rewrite(shadow, plan, ShapeGroup(rank, plan.tp_size))
        if expected is None:
            continue
        try:
            shape = _run(shadow)
        except PlanError:
            raise
        except Exception as error:
            raise PlanError(
                f"the plan does not run: {_where(error)} on rank {rank} of {plan.tp_size}: {error}. Every linear that meets the "
                f"split ones must be in the plan (a sibling is missing?), or the attributes of that module edited."
            ) from error
        if shape != expected:
            raise PlanError(f"the plan changes the output's shape from {expected} to {shape} on rank {rank} of {plan.tp_size}")


def _try_run(model: nn.Module) -> tuple[int, ...] | None:
    """The shape that the unsharded model gives, or None: a forward that can't run on meta can't be checked this way."""
    try:
        return _run(_shadow(model, {}, 0))
    except Exception:
        return None


@torch.no_grad()
def _shadow(model: nn.Module, shards: dict[str, Shard], rank: int) -> nn.Module:
    """A copy of the module tree whose parameters and buffers are on meta, those of `shards` in `rank`'s shapes."""
    memo: dict[int, Any] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shape = shards[name].local_shape(rank) if name in shards else parameter.shape
        memo.setdefault(id(parameter), nn.Parameter(torch.empty(shape, dtype=parameter.dtype, device=META), requires_grad=False))
    for name, buffer in model.named_buffers(remove_duplicate=False):
        shape = shards[name].local_shape(rank) if name in shards else buffer.shape
        memo.setdefault(id(buffer), torch.empty(shape, dtype=buffer.dtype, device=META))
    return copy.deepcopy(model, memo).eval()


@torch.no_grad()
def _run(model: Any) -> tuple[int, ...]:
    ids = torch.zeros(1, 4, dtype=torch.int64, device=META)
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool, device=META)  # whole, since making one asks for values
    output = model(input_ids=ids, attention_mask=mask, use_cache=False)
    return tuple(next(value for value in output.values() if isinstance(value, Tensor)).shape)


def _where(error: BaseException) -> str:
    """The innermost module whose forward was running, from the traceback."""
    found, trace = "the model", error.__traceback__
    while trace is not None:
        module = trace.tb_frame.f_locals.get("self")
        if isinstance(module, nn.Module) and trace.tb_frame.f_code.co_name == "forward":
            found = module.__dict__.get("full_name") or type(module).__name__
        trace = trace.tb_next
    return found
