"""What is kept of FP8 weights between products, and what optimizers have done since."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..kernels.fp8_scaled import Operands


class Steps:
    """What optimizers have done: how many steps, and which Parameters those hold that have stepped.

    Attributes:
        count: steps of all optimizers of this process.
    """

    def __init__(self) -> None:
        self.count = 0
        self._held: dict[int, weakref.ref] = {}
        self._replayed: dict[int, weakref.ref] = {}
        self._known: weakref.WeakSet = weakref.WeakSet()
        self._hook: Any = None

    def watch(self) -> None:
        """Begin to count."""
        if self._hook is None:
            self._hook = register_optimizer_step_post_hook(self._note)

    def _note(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.count += 1
        firsts = [p for group in optimizer.param_groups for p in group["params"][:1]]
        captured = not torch.compiler.is_compiling() and any(map(is_captured, firsts))  # a compiled step is counted each time
        if optimizer not in self._known or captured:
            self._known.add(optimizer)
            for group in optimizer.param_groups:
                found = {id(p): weakref.ref(p) for p in group["params"]}
                self._held.update(found)
                if captured:
                    self._replayed.update(found)

    def holds(self, parameter: Tensor) -> bool:
        """Whether an optimizer that has stepped holds this very tensor."""
        return _is_in(self._held, parameter)

    def replays(self, parameter: Tensor) -> bool:
        """Whether a CUDA graph was captured of a step of an optimizer that holds it: replays change it unseen."""
        return bool(self._replayed) and _is_in(self._replayed, parameter)


def is_captured(weight: Tensor) -> bool:
    """Whether a CUDA graph captures what happens to it now."""
    return weight.is_cuda and torch.cuda.is_current_stream_capturing()


def _is_in(found: dict[int, weakref.ref], parameter: Tensor) -> bool:
    known = found.get(id(parameter))
    return known is not None and known() is parameter


steps = Steps()  # the hook is one for all optimizers, so is what it counts


class Kept:
    """Operands of a Scaling's weights, and what those were when they were quantised.

    Args:
        kind: what is alike for weights that can be quantised at once: how, and of which ranks.

    Attributes:
        operands: of all weights, one below the other. used: whether a forward has read them.
        weights, turned, bad: what the last forward read, and where it counts what is not finite; weights live as long as this.
    """

    def __init__(self, kind: tuple[Any, ...]) -> None:
        self.kind = kind
        self.weights: Sequence[Tensor] = ()
        self.turned = False
        self.bad: Tensor | None = None
        self.forget()

    def forget(self) -> None:
        """Let go of the operands."""
        self._key: tuple[Any, ...] = ()
        self._memory: Sequence[StorageWeakRef] = ()
        self.operands: Operands = (None, None)
        self.used = False

    def hold(self, weights: Sequence[Tensor], operands: Operands) -> None:
        """Keep the operands of all weights for as long as those stay what they are."""
        self._key, self.operands, self.used = _describe(weights), operands, False
        self._memory = [StorageWeakRef(weight.untyped_storage()) for weight in weights]  # no other storage takes its number

    def is_stale(self, weights: Sequence[Tensor], turned: bool) -> bool:
        """Whether what is kept is not of these weights, or not `turned` where that is asked for."""
        return self._key != _describe(weights) or (turned and self.operands[1] is None)


def _describe(weights: Sequence[Tensor]) -> tuple[Any, ...]:
    """What differs once weights may have changed, on all ranks alike: addresses would not, which may be taken again."""
    return (steps.count, *((w.untyped_storage()._cdata, w.storage_offset(), w._version, w.shape, w.dtype) for w in weights))
