"""Activations without flat pieces, put in place of those that have some: a closed ReLU would hide what its column depends on.

Each is elementwise, as what it stands for, and has its range; so the same columns depend on the same columns, and a plan that
is proved for the one is right for the other. A negative channel behind two ReLUs never opens, however many draws are made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _hardtanh(x: Tensor, min_val: float = -1.0, max_val: float = 1.0) -> Tensor:
    middle, half = (max_val + min_val) / 2, (max_val - min_val) / 2
    return middle + half * torch.tanh((x - middle) / half)


def _relu6(x: Tensor) -> Tensor:
    return _hardtanh(x, 0.0, 6.0)


def _into(smooth: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`smooth`, written into its argument."""

    def write(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x.copy_(smooth(x.clone(), *args, **kwargs))

    return write


def _either(smooth: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`smooth` with torch's `inplace` as its last argument."""

    def run(input: Tensor, *args: Any, inplace: bool = False, **kwargs: Any) -> Tensor:
        if args and isinstance(args[-1], bool):
            args, inplace = args[:-1], args[-1]
        return (_into(smooth) if inplace else smooth)(input, *args, **kwargs)

    return run


SMOOTH: dict[Any, Callable[..., Tensor]] = {
    F.relu: _either(F.softplus),
    F.relu6: _either(_relu6),
    F.hardtanh: _either(_hardtanh),
    F.hardswish: _either(F.silu),
    F.hardsigmoid: _either(torch.sigmoid),
    torch.relu: F.softplus,
    torch.relu_: _into(F.softplus),
    Tensor.relu: F.softplus,
    Tensor.relu_: _into(F.softplus),
    F.relu_: _into(F.softplus),
    F.hardtanh_: _into(_hardtanh),
}
