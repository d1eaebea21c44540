"""Kernels that start while the one before still runs, and wait for it where they first read what it wrote.

So a launch costs no gap, and what is constant (weights) is read meanwhile. Every such kernel waits for the whole of the one
before, which waited for its own: nothing that an earlier kernel wrote may be read before the wait, and nothing written.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # pyright: ignore[reportMissingImports]

from .decode import is_decoding

ENABLED = True


@triton.jit
def start_next(EARLY: tl.constexpr):
    """Let the next kernel start as soon as all programs of this one have."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(EARLY: tl.constexpr):
    """Wait until the kernel before is done and all it wrote can be seen."""
    if EARLY:
        gdc_wait()


def early(x: Tensor) -> dict[str, Any]:
    """The launch options of a kernel on the device of `x`: early while decoding, where what runs before is kernels like it."""
    able = ENABLED and x.is_cuda and is_decoding() and _starts_early(x.device)
    return {"EARLY": True, "launch_pdl": True} if able else {"EARLY": False}


@lru_cache
def _starts_early(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
