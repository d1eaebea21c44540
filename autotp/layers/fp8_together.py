"""Weights of many FP8 products quantised at once: one by one, each costs the host two kernels and what leads to them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..kernels.fp8 import quantise_stacks
from ..kernels.fp8_scaled import MULTIPLE, Share, Stack

if TYPE_CHECKING:
    from .fp8 import Scaling

LEAST = 3  # stacks, below which they are not worth a table


class Together:
    """The Scalings of one model, in the order in which forward comes to them.

    The first that finds its weights changed has those of all others quantised with its own, as far as they changed too; each
    looks again, when forward comes to it, whether its weights are what they were. Of tensorwise scalings alone. What forward did
    not come to since the last time is left out from then on, and is let go of by the next backward.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Scaling], tuple[weakref.ref[Tensor], ...], bool]] = {}
        self._unread: dict[int, weakref.ref[Scaling]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Together, ()

    def note(self, scaling: Scaling, weights: Sequence[Tensor], turned: bool) -> None:
        """`scaling`'s weights are read in a forward, `turned` as well where that is True."""
        self._unread.pop(id(scaling), None)
        self._known[id(scaling)] = weakref.ref(scaling), tuple(map(weakref.ref, weights)), turned

    def forget_unread(self) -> None:
        """Let go of operands that no forward has used."""
        for reference in self._unread.values():
            scaling = reference()
            if scaling is not None:
                scaling.forget()
        self._unread.clear()

    def quantise(self, asking: Scaling, weights: Sequence[Tensor], turned: bool, share: Share | None) -> bool:
        """Have `asking` and the others hold what their weights are now; False where that would not pay or can't be."""
        first = weights[0]
        if not asking.goes_with(asking) or not fits(weights, first):
            return False
        chosen: dict[int, tuple[Scaling, Sequence[Tensor], bool]] = {}
        for number, (reference, parts, columns) in list(self._known.items()):
            scaling, alive = reference(), [part() for part in parts]
            found = [part for part in alive if part is not None]
            if scaling is None or len(found) < len(alive) or number in self._unread:
                del self._known[number]
            elif scaling is asking:
                chosen[number] = asking, weights, turned
            elif scaling.goes_with(asking) and scaling.is_stale(found, columns) and fits(found, first):
                chosen[number] = scaling, found, columns
        if len(chosen) < LEAST:
            return False
        for scaling, _, _ in chosen.values():
            scaling.forget()
        stacks = [
            Stack(tuple(parts), columns, scaling.count_weights(first.device)) for scaling, parts, columns in chosen.values()
        ]
        for (scaling, parts, _), operands in zip(chosen.values(), quantise_stacks(stacks, share), strict=True):
            scaling.keep(parts, operands)
            if scaling is not asking:
                self._unread[id(scaling)] = weakref.ref(scaling)
        return True


def fits(weights: Sequence[Tensor], first: Tensor) -> bool:
    """Whether they can be quantised with `first`: of its dtype and device, there, and of even sizes, as on every rank."""
    if weights[0].shape[-1] % MULTIPLE:
        return False
    alike = all(w.dtype is first.dtype and w.device == first.device and w.is_contiguous() for w in weights)
    return alike and all(not w.shape[0] % MULTIPLE and w.data_ptr() != 0 for w in weights)
