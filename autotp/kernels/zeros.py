"""Single numbers on a device, many made at once: a kernel for each zero, or an allocation for each number, would take longer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

COUNT, STEP = 256, 4  # at multiples of 16 bytes, so that kernels are compiled for one alignment


class Numbers:
    """Numbers `[]`, each given once: zeros that kernels add to or look for the largest in, or room for what they write.

    Args:
        make: torch.zeros or torch.empty; dtype: of 4 bytes.

    Attributes:
        left: device and stream -> those that were made there, and not given yet.
    """

    def __init__(self, make: Callable[..., Tensor], dtype: torch.dtype) -> None:
        self.make, self.dtype = make, dtype
        self.left: dict[tuple[torch.device, int], list[Tensor]] = {}

    def take(self, device: torch.device) -> Tensor:
        """One on `device`, which nobody else has; in a CUDA graph one that each replay makes anew."""
        stream = 0
        if device.type == "cuda":
            if torch._C._cuda_isCurrentStreamCapturing():
                return self.make((), dtype=self.dtype, device=device)
            stream = torch._C._cuda_getCurrentRawStream(device.index)
        try:
            return self.left[device, stream].pop()
        except (KeyError, IndexError):  # not asked before: another thread may take the last
            first, *rest = self._make_many(device)
            self.left.setdefault((device, stream), []).extend(rest)
            return first

    def _make_many(self, device: torch.device) -> tuple[Tensor, ...]:
        with torch.inference_mode(False):  # they are taken outside of it, too
            return self.make(COUNT, STEP, dtype=self.dtype, device=device)[:, 0].unbind()


zeros = Numbers(torch.zeros, torch.int32)
scales = Numbers(torch.empty, torch.float32)
