"""What autocast asks of a product that casts for itself."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast runs linears in where `x` lives; None where it is off or leaves `x` alone."""
    if not torch._C._is_any_autocast_enabled() or x.dtype is torch.float64:
        return None
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def disable_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Within it products run in the dtypes they are given: autocast's cache must not see casts that autograd does not know."""
    return torch.autocast(x.device.type, enabled=False)
