"""Checkpoints of a part of a dealt layer: within backward they run again as in the forward that made them.

A checkpoint around whole layers needs nothing of this. One inside a layer is run again without the layer around it, which knows
how the rows are dealt, gives its parameters gradients that are summed over the ranks, and says from what rows draw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch.utils.checkpoint

from .integrations import replace
from .token_modules import read_summed
from .tokens import RUNNING


def resume(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` such that it runs, whenever it is called, as it would in the module that runs now."""
    modules = [module for module in RUNNING.get() if module.autotp_tokens.stream.layout is not None]
    moments = [module.autotp_tokens.stream.remember() for module in modules]
    if not modules:
        return function

    def run(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for module, moment in zip(modules, moments, strict=True):
                part = module.autotp_tokens
                stack.enter_context(part.stream.going_on(moment))
                stack.callback(RUNNING.reset, RUNNING.set((*RUNNING.get(), module)))
                if not part.gathers:
                    stack.enter_context(read_summed(module, part))
            return function(*args, **kwargs)

    return run


def resume_later(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same from its second call on: the first one is in the module still."""
    calls = iter((function,))
    resumed = resume(function)
    return function if resumed is function else lambda *args: next(calls, resumed)(*args)


def install_recompute() -> None:
    """Wrap what torch's two kinds of checkpoints keep of the function that they run again."""

    def wrap_reentrant(original: Callable) -> Callable:
        return lambda ctx, function, *args: original(ctx, resume_later(function), *args)

    def wrap_other(original: Callable) -> Callable:
        def run_between(fn: Callable, *args: Any, **kwargs: Any) -> Iterator[None]:
            with ExitStack() as stack:
                for module in RUNNING.get():
                    stack.enter_context(module.autotp_tokens.stream.hiding_rows())
                yield from original(resume(fn), *args, **kwargs)

        return run_between

    forward = torch.utils.checkpoint.CheckpointFunction.forward
    torch.utils.checkpoint.CheckpointFunction.forward = staticmethod(wrap_reentrant(forward))
    replace(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", wrap_other)
