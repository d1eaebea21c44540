"""Numbers that tell whether tensors hold the same bits, on whatever device."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def digest_tensors(tensors: list[Tensor]) -> list[int]:
    """A number for each tensor's bits; writes through `.data` and numpy are seen too, as version counters would not."""
    sums = [_weigh(tensor.detach()) for tensor in tensors]
    by_device: dict[torch.device, list[int]] = {}
    for i, value in enumerate(sums):
        by_device.setdefault(value.device, []).append(i)
    out = [0] * len(tensors)
    for indices in by_device.values():
        for i, number in zip(indices, torch.stack([sums[i] for i in indices]).tolist(), strict=True):
            out[i] = number & (2**64 - 1)
    return out


def _weigh(tensor: Tensor) -> Tensor:
    """Row sums and column sums of the bits, each weighted by its place: int64 scalar, equal on all ranks."""
    if not tensor.numel():
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    tensor = tensor.contiguous()
    bits = tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    bits = bits.reshape(-1, bits.shape[-1]) if bits.dim() > 1 else bits.reshape(1, -1)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for dim, salt in ((0, 0x9E3779B97F4A7C1), (1, 0x2545F4914F6CDD1)):
        sums = bits.sum(dim, dtype=torch.int64)
        places = torch.arange(1, sums.numel() + 1, device=tensor.device)
        mixed = (sums ^ (sums >> 29)) * (places * salt | 1)
        total = total + (mixed ^ (mixed >> 31)).sum()
    return total
