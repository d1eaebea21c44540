"""Equality to rounding, in float64, of what a rank computes and what the whole model does."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ProofError

TOLERANCE = 1e-7  # of the largest number of a tensor, in float64; a wrong column is off by about 1
NOISE = 1e-9  # what is left of a gradient that is zero but for rounding


def compare(value: Tensor, expected: Tensor, what: str, rank: int | None = None) -> None:
    """Raise unless `value` has the shape of `expected` and equals it to rounding.

    Raises:
        ProofError: naming `what`, the rank and the numbers.
    """
    where = f"{what} on rank {rank}" if rank is not None else what
    if value.shape != expected.shape:
        raise ProofError(f"{where} has shape {list(value.shape)}, not {list(expected.shape)}")
    if value.numel() == 0 or value is expected:
        return
    if not value.is_floating_point():
        if not torch.equal(value, expected):
            raise ProofError(f"{where} differs")
        return
    value, expected = value.detach(), expected.detach()
    scale = float(expected.abs().nan_to_num(0, 0, 0).max()) or 1.0
    difference = (value - expected).abs()
    same = (value == expected) | (value.isnan() & expected.isnan())
    error = float(difference.masked_fill(same, 0).max())
    if not error <= TOLERANCE * scale:
        raise ProofError(f"{where} is off by {error / scale:.2g} of its scale")


def compare_gradient(value: Tensor, expected: Tensor, what: str, rank: int | None) -> None:
    """As `compare`, with a gradient that is zero but for rounding taken as zero."""
    if all(float(tensor.abs().max() if tensor.numel() else 0) < NOISE for tensor in (expected, value)):
        return
    compare(value, expected, what, rank)
