"""Sums over the ranks that wait for what follows them: a residual is added and a norm computed in the same launch.

While decoding a row linear returns a PendingSum. Adding a tensor to it keeps it pending, one of our norms finishes it together
with its own output, and any other operation finishes it first: it is a tensor like another to whoever reads it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..comm import TPGroup
from ..kernels.decode import is_decoding

aten: Any = torch.ops.aten


def pend(part: Tensor, tp: TPGroup, bias: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    """The sum over the ranks of `part` `[..., N]` plus `bias`, pending; None where it must be computed now.

    Args:
        part: nobody else reads it. dtype: in which the parts are to be added up, None for any.
    """
    if not is_decoding() or torch.is_grad_enabled() or type(part) is not Tensor or not part.is_contiguous():
        return None
    if dtype not in (None, part.dtype, torch.float32):
        return None
    peers = tp.find_peers()
    if peers is None or peers.find_place(part) is None or (bias is not None and bias.dtype is not part.dtype):
        return None
    return PendingSum(part, tp, None if bias is None else bias.detach())


def settle(x: Any) -> Any:
    """`x`, or the plain tensor that a PendingSum stands for: for code that reads memory."""
    return x.finish() if isinstance(x, PendingSum) else x


class PendingSum(Tensor):
    """`all_reduce(part) + bias + residual`, computed when it is read.

    | tensor | shape, of one dtype |
    |---|---|
    | part | `[..., N]`, this rank's part of the sum, contiguous |
    | bias, residual | `[N]`, `[..., N]`, or None |
    """

    part: Tensor
    tp: TPGroup
    bias: Tensor | None
    residual: Tensor | None
    value: Tensor | None
    version: int
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @staticmethod
    def __new__(cls, part: Tensor, tp: TPGroup, bias: Tensor | None = None, residual: Tensor | None = None) -> PendingSum:
        self = torch.Tensor._make_wrapper_subclass(
            cls, part.shape, strides=part.stride(), dtype=part.dtype, device=part.device, requires_grad=False
        )
        self.part, self.tp, self.bias, self.residual, self.value = part, tp, bias, residual, None
        self.version = 0 if residual is None else residual._version
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"PendingSum({list(self.shape)}, {self.dtype}, {'pending' if self.value is None else 'finished'})"

    def finish(self) -> Tensor:
        """The sum, as a plain tensor."""
        if self.value is None:
            found = self._reduce()
            self._keep(self._add_up() if found is None else found[0])
        assert self.value is not None
        return self.value

    def finish_with_norm(self, weight: Tensor | None, shift: Tensor | None, eps: float, kind: str) -> Tensor | None:
        """The norm of the sum, computed with it; None where the sum was finished before or can't be done so."""
        alike = all(p is None or (p.dtype is self.dtype and p.is_contiguous()) for p in (weight, shift))
        found = self._reduce(weight=weight, shift=shift, eps=eps, kind=kind) if self.value is None and alike else None
        if found is None:
            return None
        self._keep(found[0])
        return found[1]

    def _reduce(self, **norm: Any) -> tuple[Tensor, Tensor | None] | None:
        if self.residual is not None and self.residual._version != self.version:
            raise RuntimeError(
                f"a tensor of shape {list(self.shape)} was changed in place after it was added to a row linear's output, which "
                f"is summed later while decoding. Add out of place, or decode without a CUDA graph."
            )
        peers = self.tp.find_peers()
        return None if peers is None else peers.reduce_rows(self.part, bias=self.bias, residual=self.residual, **norm)

    def _add_up(self) -> Tensor:
        total = self.tp.all_reduce(self.part)
        for more in (self.bias, self.residual):
            total = total if more is None else total.add_(more)
        return total

    def _keep(self, value: Tensor) -> None:
        self.value = value
        del self.part, self.bias, self.residual

    def take_residual(self, other: Any) -> PendingSum | None:
        """The sum with `other` added, pending too; None where that is not one tensor like it, whose changes are counted."""
        if self.value is not None or self.residual is not None or type(other) is not Tensor or other.is_inference():
            return None
        if other.shape != self.shape or other.dtype is not self.dtype or not other.is_contiguous() or other.requires_grad:
            return None
        return PendingSum(self.part, self.tp, self.bias, other)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # pyright: ignore
        if func is aten.add.Tensor and not kwargs:
            a, b = (each.value if isinstance(each, PendingSum) and each.value is not None else each for each in args)
            for one, other in ((a, b), (b, a)):
                if isinstance(one, PendingSum):
                    taken = one.take_residual(other.finish() if isinstance(other, PendingSum) else other)
                    if taken is not None:
                        return taken
        args, kwargs = tree_map_only(PendingSum, PendingSum.finish, (args, kwargs or {}))
        return func(*args, **kwargs)
