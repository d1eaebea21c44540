"""Parameters that lie side by side in one allocation, each with a storage of its own.

One GEMM reads them as one weight, while savers, optimizers and `state_dict` see separate tensors. Whoever swaps a Parameter or
its data takes it out of the allocation; so whether they still lie there is looked at before each use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.product import Merged

ALIGNMENT_BYTES = 16  # what GEMMs and fused optimizers read at a time: a weight that begins elsewhere would slow them down


@dataclass(frozen=True)
class Laid:
    """An allocation that holds all members' weights (and biases, where all have one), the Parameters in it, and their places."""

    weight: Tensor
    bias: Tensor | None
    weights: Sequence[nn.Parameter]
    biases: Sequence[nn.Parameter | None]
    sizes: list[int]
    places: list[tuple[Any, ...]]

    def holds(self, weights: Sequence[Any], biases: Sequence[Any]) -> bool:
        """Whether these are the Parameters that were laid here, and still lie here."""
        if len(weights) != len(self.weights):
            return False
        zipped = zip(weights, biases, self.weights, self.biases, self.places, strict=True)
        return all(w is own and b is beside and place == find_place(w, b) for w, b, own, beside, place in zipped)

    @cached_property
    def _whole(self) -> Merged | None:
        """What is one without a copy."""
        return Merged(self.weight, self.bias) if self.bias is not None or not any(b is not None for b in self.biases) else None

    def merge(self) -> Merged:
        """All weights and all biases as one; biases of some members only are copied beside zeros."""
        if self._whole is not None:
            return self._whole
        with torch.no_grad():
            parts = [self.weight.new_zeros(n) if b is None else b for n, b in zip(self.sizes, self.biases, strict=True)]
            return Merged(self.weight, torch.cat(parts))


def find_place(weight: Tensor, bias: Tensor | None) -> tuple[Any, ...]:
    """Addresses, sizes and dtype: what changes when someone gives a Parameter other data."""
    if bias is None:
        return weight.data_ptr(), weight.numel(), weight.dtype
    return weight.data_ptr(), weight.numel(), weight.dtype, bias.data_ptr(), bias.numel()


def can_lie(tensors: Sequence[Any]) -> bool:
    """Whether the tensors are separate, alike but for their number of rows, and memory that is ours to move."""
    first = tensors[0]
    return all(
        t is not None
        and not (t.is_meta or t.is_inference() or (t.device.type == "cpu" and t.is_shared()))
        and (t.is_contiguous(), t.shape[1:], t.dtype, t.device) == (True, first.shape[1:], first.dtype, first.device)
        for t in tensors
    ) and len({id(t) for t in tensors}) == len(tensors)


def is_foreign(tensor: Tensor) -> bool:
    """Whether a tensor lies in memory on the CPU that torch did not allocate."""
    return tensor.device.type == "cpu" and tensor.layout == torch.strided and not tensor.untyped_storage().resizable()


@torch.no_grad()
def lay_together(weights: Sequence[Any], biases: Sequence[Any]) -> Laid:
    """Give each Parameter data that is its part of one allocation, with a storage of its own, and the same values."""
    weight, bias = _lay_tensors(weights), None
    if all(b is not None for b in biases) and can_lie(biases) and biases[0].dtype == weight.dtype:
        bias = _lay_tensors(biases)
    sizes = [w.shape[0] for w in weights]
    return Laid(weight, bias, weights, biases, sizes, [find_place(w, b) for w, b in zip(weights, biases, strict=True)])


def _lay_tensors(tensors: Sequence[Any]) -> Tensor:
    dtype = tensors[0].dtype
    bytewise = torch.uint8 if dtype.itemsize == 1 else dtype  # not every DLPack knows floats of 8 bits
    whole = torch.cat([t.detach().view(bytewise) for t in tensors])
    stop = 0
    for tensor in tensors:
        start, stop = stop, stop + tensor.shape[0]
        # shares the memory under a storage that begins and ends with it
        tensor.data = torch.from_dlpack(whole[start:stop]).view(dtype)
    return whole.view(dtype)
