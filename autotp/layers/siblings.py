"""Linears that read one input: its gradient is summed over the ranks once for all of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..collectives import copy_to_group
from ..comm import TPGroup


class SiblingInput:
    """Gives every sibling the same entered input, so that autograd adds up their gradients before the one all-reduce.

    What the first sibling entered is kept for the others while the input is the same tensor, at the same version, under
    the same autocast dtype. It is dropped when the last sibling has taken it, or when their region's row linear ends it, so
    nothing lives into the next step. Nothing is kept under `no_grad`: callers ask only where a gradient is wanted.
    """

    def __init__(self, group: TPGroup, members: int, reduce_dtype: torch.dtype | None = None) -> None:
        self.group, self.members, self.reduce_dtype = group, members, reduce_dtype
        self.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> SiblingInput:
        return SiblingInput(self.group, self.members, self.reduce_dtype)

    def clear(self) -> None:
        """Forget what was entered."""
        self._source: Tensor | None = None
        self._entered: Tensor | None = None
        self._state: tuple[Any, ...] = ()
        self._left = 0

    def enter(self, x: Tensor) -> Tensor:
        """`x` as sharded computation reads it; its gradient is the sum over all ranks and siblings."""
        if self.members == 1:
            return copy_to_group(x, self.group, self.reduce_dtype)
        kind = x.device.type
        state = (x._version, torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind))
        if self._source is not x or self._state != state:
            self._source, self._state, self._left = x, state, self.members
            self._entered = copy_to_group(x, self.group, self.reduce_dtype)
        entered = self._entered
        assert entered is not None
        self._left -= 1
        if self._left == 0:
            self.clear()
        return entered
