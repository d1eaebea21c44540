"""Whether a gradient that arrives in a backward is nobody else's, so that it may be written to.

Autograd hands tensors on without copying: `y1 + y2` gives one gradient to both, a hook or the caller may keep one. Who else
refers to a tensor is only in reference counts, and what they are for a tensor that is nobody else's depends on torch and on
the Function. So they are measured once: in a backward of that Function where the gradient is its own, and in one where it is
shared, which must look different.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .autocast import disable_autocast

Counts = tuple[int, int, int]


def count_references(tensor: Tensor) -> Counts:
    """How many Python objects refer to `tensor`, how many C++ ones, and how many tensors to its memory."""
    return sys.getrefcount(tensor), tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def _save_plainly() -> AbstractContextManager[Any]:
    """Within it nothing is saved through hooks: an activation checkpoint counts what is."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved)


class Ownership:
    """Tells gradients of one Function that may be written to, by reference counts that it measures."""

    def __init__(self) -> None:
        self._alone: dict[str, Counts | None] = {}  # by device type
        self._seen: list[Counts] | None = None

    def owns(self, grad: Tensor, counts: Counts) -> bool:
        """Whether nobody else has `grad`, and each of its elements is memory of its own."""
        if self._seen is not None:
            self._seen.append(counts)
            return False
        return counts == self._alone.get(grad.device.type) and grad.is_contiguous() and not grad.requires_grad

    def measure(self, device: torch.device, apply: Callable[[Tensor], Any]) -> None:
        """Once for each device type: find what counts a gradient has that arrives at the last output of `apply(x)`.

        Args:
            apply: of a `[1, 1]` tensor, the Function's `(y, x)`.
        """
        if device.type in self._alone:
            return
        self._alone[device.type] = None
        self._seen = []
        try:
            with torch.enable_grad(), disable_autocast(torch.empty(0, device=device)), _save_plainly():
                for shared in (False, True):
                    x = torch.ones(1, 1, device=device, requires_grad=True)
                    other = x * 1
                    y, last = apply(x * 1)
                    total = (last + other) * 2 if shared else last * 2
                    torch.autograd.grad(y.sum() + total.sum(), x)
            alone, shared_counts = self._seen
        finally:
            self._seen = None
        self._alone[device.type] = None if alone == shared_counts else alone
