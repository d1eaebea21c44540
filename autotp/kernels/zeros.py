"""Single zeros that kernels add to or look for the largest in: one fill makes many, where each would be a kernel of its own."""

from __future__ import annotations

import torch
from torch import Tensor

COUNT, STEP = 256, 4  # at multiples of 16 bytes, so that kernels are compiled for one alignment


class Zeros:
    """Zeros of int32, each given once.

    Attributes:
        left: device and stream -> those that were filled there, and not given yet.
    """

    def __init__(self) -> None:
        self.left: dict[tuple[torch.device, int], list[Tensor]] = {}

    def take(self, device: torch.device) -> Tensor:
        """Zero `[]` of int32 on `device`, which nobody else has; in a CUDA graph one that each replay fills anew."""
        stream = 0
        if device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                return torch.zeros((), dtype=torch.int32, device=device)
            stream = torch._C._cuda_getCurrentRawStream(device.index)
        left = self.left.setdefault((device, stream), [])
        try:
            return left.pop()
        except IndexError:  # not asked before: another thread may take the last
            first, *rest = _fill(device)
            left.extend(rest)
            return first


def _fill(device: torch.device) -> tuple[Tensor, ...]:
    with torch.inference_mode(False):  # they are taken outside of it, too
        return torch.zeros(COUNT, STEP, dtype=torch.int32, device=device)[:, 0].unbind()


zeros = Zeros()
