"""Which optimizers may step a shard: those whose update of a part of a matrix is that part of the matrix's update.

Decided by trying: the optimizer's class, with its own hyperparameters, steps a small matrix whole and in halves. A list of
names serves only for classes that can't be tried.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import AutoTPError
from ..shard import Shard
from .base import TensorParallel_Layer, holder_of

WHOLE_MATRIX = {
    "adafactor",
    "muon",
    "shampoo",
    "distributedshampoo",
    "lamb",
    "lars",
    "soap",
    "lbfgs",
    "galoreadamw",
    "kron",
    "came",
}
_SIZES = {1: (24,), 2: (8, 12), 3: (4, 6, 4), 4: (4, 4, 3, 3)}
_IGNORED = {"params", "param_names", "fused", "foreach", "capturable", "differentiable", "initial_lr", "lr"}
_verdicts: dict[tuple, bool | None] = {}  # class, hyperparameters, dims cut -> elementwise; None: could not be tried


def check_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Refuse an optimizer that would update the shards it holds otherwise than the whole matrices; True if it holds any.

    Raises:
        AutoTPError: naming the optimizer's class.
    """
    found = False
    for group in optimizer.param_groups:
        cuts: dict[int, set[int]] = {}  # number of dims -> dims that are cut
        for param in group["params"]:
            shard = _shard_of(param)
            if shard is not None and not shard.is_whole:
                found = True
                _check_state(optimizer, param, shard)
                cuts.setdefault(len(shard.shape), set()).update(cut.dim for cut in shard.cuts)
        for dims, cut in sorted(cuts.items()):
            _check_elementwise(optimizer, group, dims, tuple(sorted(cut)))
    return found


def _shard_of(param: Tensor) -> Shard | None:
    held = holder_of(param)
    if held is None or not isinstance(held[0], TensorParallel_Layer):
        return None
    return held[0].shards.get(held[1])


def _check_state(optimizer: torch.optim.Optimizer, param: Tensor, shard: Shard) -> None:
    """State made before the parameter was sharded has the full tensor's size."""
    for key, value in optimizer.state.get(param, {}).items():
        if isinstance(value, Tensor) and value.numel() == math.prod(shard.shape) != param.numel() and value.dim() > 0:
            raise AutoTPError(
                f"{type(optimizer).__name__} has state '{key}' of shape {tuple(value.shape)} for a parameter that is now a "
                f"shard of shape {tuple(param.shape)}: it took steps before the model was parallelized. Make a new optimizer "
                f"after parallelize."
            )


def _check_elementwise(optimizer: torch.optim.Optimizer, group: dict[str, Any], dims: int, cut: tuple[int, ...]) -> None:
    cls = type(optimizer)
    options = {key: _plain(value) for key, value in group.items() if key not in _IGNORED}
    key = (cls, dims, cut, repr(sorted(options.items(), key=lambda item: item[0])))
    if key not in _verdicts:
        _verdicts[key] = _try_elementwise(cls, {**options, "lr": 0.01} if "lr" in group else options, dims, cut)
        if _verdicts[key] is None and cls.__name__.lower() not in WHOLE_MATRIX:
            warnings.warn(
                f"autotp could not try whether {cls.__name__} updates each element by itself; if it does not (it takes a norm "
                f"or a factorisation of whole matrices), training shards with it is wrong. AdamW and SGD are safe.",
                stacklevel=4,
            )
    if _verdicts[key] is False or (_verdicts[key] is None and cls.__name__.lower() in WHOLE_MATRIX):
        raise AutoTPError(
            f"{cls.__name__} does not update each element by itself: its step on a shard differs from its step on the whole "
            f"matrix, so the parallelized model would train differently from the unsharded one. Use an elementwise optimizer "
            f"such as AdamW, SGD or Lion, or give it only parameters that are not sharded."
        )


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _try_elementwise(cls: type, options: dict[str, Any], dims: int, cut: Sequence[int]) -> bool | None:
    """Whether three steps on halves give the halves of three steps on the whole; None if it can't be tried."""
    size = _SIZES.get(dims)
    if size is None:
        return None
    generator = torch.Generator().manual_seed(0)
    # Rows and columns of very different scale: a norm of a half is far from the norm of the whole.
    scale = torch.ones(size)
    for dim in range(dims):
        scale = scale * torch.logspace(-2, 2, size[dim]).view([-1 if i == dim else 1 for i in range(dims)])
    start = torch.randn(size, generator=generator)
    grads = [torch.randn(size, generator=generator) * scale for _ in range(3)]
    try:
        with torch.random.fork_rng(devices=[]):
            whole = _run_steps(cls, options, start, grads)
            for dim in cut:
                parts = [
                    _run_steps(cls, options, start.chunk(2, dim)[half], [grad.chunk(2, dim)[half] for grad in grads])
                    for half in (0, 1)
                ]
                if not torch.allclose(torch.cat(parts, dim), whole, rtol=1e-4, atol=1e-6):
                    return False
    except Exception:  # an unknown class may fail in any way: then it can't be tried
        return None
    return True


def _run_steps(cls: type, options: dict[str, Any], start: Tensor, grads: Sequence[Tensor]) -> Tensor:
    """The parameter after the class, made with `options`, took one step for each gradient."""
    param = torch.nn.Parameter(start.clone().contiguous())
    accepted = inspect.signature(cls.__init__).parameters
    keywords = {key: value for key, value in options.items() if key in accepted}
    optimizer = cls([{"params": [param], **options}], **keywords)
    with torch.enable_grad():
        for grad in grads:
            param.grad = grad.clone().contiguous()
            optimizer.step()
    return param.detach()
