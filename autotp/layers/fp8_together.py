"""Weights of many FP8 products quantised at once: one by one, each costs the host two kernels and what leads to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ..kernels.fp8 import quantise_stacks
from ..kernels.fp8_scaled import MULTIPLE, Share, Stack
from .fp8_kept import Kept

LEAST = 3  # stacks, below which they are not worth a table


class Together:
    """What the Scalings of one model keep, in the order in which forward comes to them.

    The first that finds its weights changed has those of all others quantised with its own, as far as they changed too; each
    looks again, when forward comes to it, whether its weights are what they were. Of tensorwise scalings and Parameters alone.
    What forward did not come to since the last time is left out from then on, and is let go of by the next backward. Weights
    that the model has no more stay until then: how long else they live differs between ranks, which quantise the same ones.
    """

    def __init__(self) -> None:
        self._known: dict[Kept, None] = {}
        self._unread: set[Kept] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        return Together, ()

    def note(self, kept: Kept, weights: Sequence[Tensor], turned: bool, bad: Tensor) -> None:
        """Weights are read in a forward, `turned` as well where that is True."""
        self._unread.discard(kept)
        if all(isinstance(weight, nn.Parameter) for weight in weights):
            self._known[kept] = None
            kept.weights, kept.turned, kept.bad = tuple(weights), turned, bad
        else:  # computed anew in each forward
            self.drop(kept)

    def drop(self, kept: Kept) -> None:
        """Quantise these weights with others no more."""
        self._unread.discard(kept)
        self._known.pop(kept, None)
        kept.weights = ()

    def forget_unread(self) -> None:
        """Let go of what no forward has used."""
        for kept in self._unread:
            kept.forget()
        self._leave_out_unread()
        self._unread.clear()

    def _leave_out_unread(self) -> None:
        for kept in self._unread:
            self._known.pop(kept, None)
            kept.weights = ()

    def quantise(self, asking: Kept, share: Share | None) -> bool:
        """Have `asking` and the others hold what their weights are now; False where that would not pay or can't be."""
        if asking not in self._known or not fits(asking.weights, asking.weights[0]):
            return False
        self._leave_out_unread()
        first = asking.weights[0]
        chosen = [kept for kept in self._known if kept is asking or (_is_due(kept, asking) and fits(kept.weights, first))]
        if len(chosen) < LEAST:
            return False
        for kept in chosen:
            kept.forget()
        stacks = [Stack(tuple(kept.weights), kept.turned, _find_count(kept, first)) for kept in chosen]
        for kept, operands in zip(chosen, quantise_stacks(stacks, share), strict=True):
            kept.hold(kept.weights, operands)
            if kept is not asking:
                self._unread.add(kept)
        return True


def _is_due(kept: Kept, asking: Kept) -> bool:
    return kept.kind == asking.kind and kept.is_stale(kept.weights, kept.turned)


def _find_count(kept: Kept, weight: Tensor) -> Tensor | None:
    return kept.bad if kept.bad is not None and kept.bad.device == weight.device else None


def fits(weights: Sequence[Tensor], first: Tensor) -> bool:
    """Whether they can be quantised with `first`: of its dtype and device, there, and of even sizes, as on every rank."""
    if weights[0].shape[-1] % MULTIPLE:
        return False
    alike = all(w.dtype is first.dtype and w.device == first.device and w.is_contiguous() for w in weights)
    return alike and all(not w.shape[0] % MULTIPLE and w.data_ptr() != 0 for w in weights)
