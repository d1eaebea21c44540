"""What a fused norm or gate hands to the FP8 linear that reads its output: that output, and what quantising it takes.

Who reads whom is seen in each forward, and is what the next one of the same grad mode begins with:

| a forward in which | computes |
|---|---|
| an FP8 linear read the last output as it was returned | the next output, and begins to quantise it for that linear |
| it was changed or gathered first, read by something else, or not yet at all | the output |

A linear takes what was begun for a tensor and version alone, and quantises any other itself, to the same bits; so a hook or
an adapter between the two is seen, as it would be without.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.begun import Begun, Wish
from ..kernels.decode import is_decoding
from ..kernels.few_rows import MOST_ROWS

SOURCE = "autotp_source"  # the attribute, which no module has of its own


class Handover:
    """What all Sources of a model share: whose output was computed last.

    Attributes:
        last: a weak reference to it, where its numbers were, its Source, and what was begun with for whom.
    """

    def __init__(self) -> None:
        self.last: tuple[Any, tuple[Any, ...], Source, Wish | None, Any] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Handover:
        twin = memo[id(self)] = Handover()
        return twin

    def __getstate__(self) -> dict[str, Any]:
        return {"last": None}

    def take(self, reader: Any, x: Tensor, wish: Wish) -> Begun | None:
        """What was begun for `reader`, which reads `x` `[..., C]`; None where it has all to do.

        Args:
            wish: what is to be begun the next time.
        """
        last = self.last
        if last is None or not _is_same(last[0](), last[1], x):
            return None
        self.last = None
        last[2].wishes[torch.is_grad_enabled()] = reader, wish
        made = last[3]
        return made.begun if made is not None and last[4] is reader else None


class Source:
    """One module whose output may be read by an FP8 linear.

    Attributes:
        wishes: grad mode -> (the reader of the last output, what it wants of the next).
    """

    def __init__(self, handover: Handover) -> None:
        self.handover = handover
        self.wishes: dict[bool, tuple[Any, Wish]] = {}
        self._reader: Any = None

    def __getstate__(self) -> dict[str, Any]:  # copies, too, see their readers for themselves
        return {"handover": self.handover, "wishes": {}, "_reader": None}

    def begin(self, x: Tensor) -> Wish | None:
        """What is to be begun with the output of `x` `[..., C]`; None for nothing."""
        if is_decoding() or x.numel() <= MOST_ROWS * x.shape[-1]:  # weights are what few rows read
            return None
        self._reader, wish = self.wishes.pop(torch.is_grad_enabled(), (None, None))
        if wish is None or (wish.bad is not None and wish.bad.device != x.device):  # the model was moved
            return None
        return replace(wish, begun=None)

    def offer(self, y: Tensor, wish: Wish | None) -> None:
        """`y` was computed, and `wish` begun."""
        if y.is_inference():  # which has no version
            return
        reader, self._reader = self._reader, None
        self.handover.last = weakref.ref(y), _place(y), self, wish, reader


def add_source(module: nn.Module, handover: Handover) -> None:
    """Let FP8 linears know `module`, whose fused forward offers its output."""
    module.__dict__[SOURCE] = Source(handover)


def find_source(module: nn.Module) -> Source | None:
    """How `module` offers its output, if it does."""
    return module.__dict__.get(SOURCE)


def remove_source(module: nn.Module) -> None:
    """Undo `add_source`."""
    module.__dict__.pop(SOURCE, None)


def _is_same(y: Tensor | None, place: tuple[Any, ...], x: Tensor) -> bool:
    """Whether `x` is `y`, or a view of all its rows, unchanged since it had its `place`."""
    if y is None or not (x is y or x._base is y):
        return False
    return x.numel() == y.numel() and x.shape[-1:] == y.shape[-1:] and x.is_contiguous() and _place(x) == place


def _place(x: Tensor) -> tuple[Any, ...]:
    return x.untyped_storage()._cdata, x.storage_offset(), x._version
