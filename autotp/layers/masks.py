"""Causal masks that transformers need not make, where it could find that out only by stopping the host, or not at all.

A model that is given no positions numbers its tokens itself, alike in all rows: no sequences lie packed in a row. transformers
looks for them all the same, in each forward, which waits for everything that the GPU was given before; and while a CUDA graph is
captured, where it can't look, makes a mask, and attention with a mask takes three times as long.

| in a forward | transformers is told |
|---|---|
| of a model that was given no `position_ids`, and numbers all rows alike | that no sequences are packed, without looking |
| of the same, or within `skipping_masks` | in a capture, that nothing is traced, where there is no padding mask to look at |

Only transformers' own forwards are known to number tokens so. In others, in forwards that something else replaced or may give
positions to after the hook here, and in those of any other model, transformers looks.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, masking_utils
from transformers.utils.import_utils import is_cuda_stream_capturing

_skipping = ContextVar("skipping masks", default=False)
_numbering: ContextVar[weakref.ref[nn.Module] | None] = ContextVar("the model that numbers its tokens itself", default=None)
_find_packed = masking_utils.find_packed_sequence_indices
_is_tracing = masking_utils.is_tracing


@contextmanager
def skipping_masks() -> Iterator[None]:
    """Within it causal masks are left to the attention's kernel in captures as they are elsewhere."""
    token = _skipping.set(True)
    try:
        yield
    finally:
        _skipping.reset(token)


def watch_positions(model: nn.Module) -> list[Any]:
    """Hooks on all models in `model` that may number their tokens; their handles."""
    handles = []
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and _place_of_positions(type(module)) is not None:
            handles.append(module.register_forward_pre_hook(_begin, with_kwargs=True))
            handles.append(module.register_forward_hook(_end, always_call=True))
    return handles


@lru_cache(maxsize=256)
def _place_of_positions(kind: type[nn.Module]) -> int | None:
    """Where `position_ids` is among the positional arguments of a forward; None for a model that takes none."""
    names = list(inspect.signature(kind.forward).parameters)[1:]
    return names.index("position_ids") if "position_ids" in names else None


def _begin(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if torch.compiler.is_compiling():
        return
    place = _place_of_positions(type(model))
    given = kwargs.get("position_ids")
    if given is None and place is not None and place < len(args):
        given = args[place]
    last = next(reversed(model._forward_pre_hooks.values())) is _begin  # no other one gives positions after it
    _numbering.set(weakref.ref(model) if given is None and last else None)


def _end(model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    if not torch.compiler.is_compiling():
        _numbering.set(None)


def _is_numbering() -> bool:
    """Whether a mask is made by transformers' code alone, called as the model that numbers its tokens.

    What stands between may give positions: a patch, a subclass. In a hook, or after Ctrl-C, which ends a forward and runs none,
    another model may run, or a forward by itself.
    """
    known = _numbering.get()
    model = None if known is None else known()
    frame = None if model is None else sys._getframe(1)
    while frame is not None and not _name(frame).startswith(("transformers.", nn.Module.__module__)):
        frame = frame.f_back  # what asks for transformers, as here
    while frame is not None and _name(frame).startswith("transformers."):
        frame = frame.f_back
    return frame is not None and _name(frame) == nn.Module.__module__ and frame.f_locals.get("self") is model


def _name(frame: FrameType) -> str:
    """Of the module whose code runs there."""
    return frame.f_globals.get("__name__", "")


def _find_packed_unless_known(position_ids: Tensor) -> Tensor | None:
    """masking_utils.find_packed_sequence_indices of positions `[B, S]`."""
    if not torch.compiler.is_compiling() and _is_numbering():
        row = position_ids._base  # what was made of the batch is no view of one row
        if row is not None and row.ndim == 1:
            return None
    return _find_packed(position_ids)


def _is_tracing_mask(tensor: Any = None) -> bool:
    """masking_utils.is_tracing: whether `tensor`, a padding mask, if there is one, must not be looked at."""
    if tensor is None and not torch.compiler.is_compiling() and (_skipping.get() or _is_numbering()):
        return not is_cuda_stream_capturing() and _is_tracing()
    return _is_tracing(tensor)


masking_utils.find_packed_sequence_indices = _find_packed_unless_known
masking_utils.is_tracing = _is_tracing_mask
