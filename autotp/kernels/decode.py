"""Whether a decoding step is under way, whose kernels may cost the host much: it is replayed from a CUDA graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_decoding = ContextVar("decoding", default=False)


@contextmanager
def decoding() -> Iterator[None]:
    """Within it few-row products and sums over the ranks take the kernels that read memory fastest, whatever a launch costs.

    For steps that run from a CUDA graph: their warm-up, which compiles the kernels, and their capture. Called one by one, each
    launch would cost tens of microseconds more than it saves. All ranks must be in it for the same calls.
    """
    token = _decoding.set(True)
    try:
        yield
    finally:
        _decoding.reset(token)


def is_decoding() -> bool:
    """Whether `decoding` is on here and nothing needs to see plain operations."""
    return not torch.compiler.is_compiling() and _decoding.get()
