"""FP8 operands as PyTorch multiplies them on a GPU, and which GPU can; see fp8.py for what the scales are."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from .dispatch import Problem

BLOCK = 128
LEAST_AMAX = 2.0**-110  # below which x * (limit / amax) would leave float32
MULTIPLE = 16  # of both sizes of a product's second operand, and of what is summed over
FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
LIMITS = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
Share = Callable[[Tensor], Tensor]  # the largest over the ranks of each entry: int32, the bits of sizes, which compare alike


class Quantised(NamedTuple):
    """One operand, summed over its columns: values `[R, C]` of 8 bits, contiguous, and its scale, see the module's table."""

    values: Tensor
    scale: Tensor
    scaling: str


Operands = tuple[Quantised | None, Quantised | None]


class Stack(NamedTuple):
    """Weights `[Ni, K]`, one below the other, that have one scale.

    Attributes:
        columns: whether they are wanted turned, too. bad: see fp8.quantise.
    """

    parts: tuple[Tensor, ...]
    columns: bool
    bad: Tensor | None

    @property
    def width(self) -> int:
        """K."""
        return self.parts[0].shape[1]

    @property
    def height(self) -> int:
        """The sum of all Ni."""
        return sum(part.shape[0] for part in self.parts)

    @property
    def is_even(self) -> bool:
        """Whether sizes and addresses are multiples of 16, and columns side by side: what kernels for many stacks read."""
        even = not self.width % MULTIPLE and not self.height % MULTIPLE
        return even and all(
            p.stride(1) == 1 and not p.stride(0) % MULTIPLE and not p.data_ptr() % MULTIPLE and not p.shape[0] % MULTIPLE
            for p in self.parts
        )


def padded(size: int, scaling: str) -> int:
    """`size` of a dimension that is summed over, up to a multiple."""
    multiple = BLOCK if scaling in ("blockwise", "squares") else MULTIPLE
    return -(-size // multiple) * multiple


def why_not_fp8(device: torch.device, scaling: str = "tensorwise") -> str:
    """Why a device can't multiply FP8 operands; empty if it can, or if its products are emulated, as on a CPU."""
    return "" if device.type != "cuda" else _why_not_cuda(device.index or 0, scaling)


@lru_cache
def _why_not_cuda(index: int, scaling: str) -> str:
    name, found = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
    if torch.version.cuda is None or found < (8, 9):
        return f"{name} (compute capability {found[0]}.{found[1]}) has no FP8 products: they need 8.9 or newer"
    version = tuple(int(part) for part in torch.version.cuda.split(".")[:2])
    if scaling in ("blockwise", "squares") and (found[0] != 9 or version < (12, 9)):
        return (
            f"blockwise FP8 products run on compute capability 9.x with CUDA 12.9 or newer, this is {name} "
            f"({found[0]}.{found[1]}) with CUDA {torch.version.cuda}: use tensorwise or rowwise"
        )
    return ""


def why_not_scaled(problem: Problem) -> list[str]:
    """Reasons against PyTorch's scaled products."""
    if problem.device != "cuda":
        return [f"multiplies on CUDA, not on {problem.device}"]
    reason = why_not_fp8(torch.device("cuda", torch.cuda.current_device()), problem.kind.split()[0])
    uneven = problem.width % MULTIPLE or problem.outputs % MULTIPLE
    return [reason] * bool(reason) + [f"{problem.outputs} x {problem.width} are not multiples of {MULTIPLE}"] * bool(uneven)


KINDS = {  # as PyTorch's operator takes them
    "tensorwise": [F.ScalingType.TensorWise.value],
    "rowwise": [F.ScalingType.RowWise.value],
    "blockwise": [F.ScalingType.BlockWise1x128.value],
    "squares": [F.ScalingType.BlockWise128x128.value],
}


def multiply_scaled(a: Quantised, b: Quantised, dtype: torch.dtype, fast: bool) -> Tensor:
    """`multiply` by the operator below `F.scaled_mm`, which takes the host twice as long: it makes these lists at each call."""
    scaling, scale = a.scaling, b.scale.t() if b.scaling == "rowwise" else b.scale
    out = torch.bfloat16 if scaling == "rowwise" and dtype is torch.float32 else dtype  # all that rowwise kernels write
    y = torch._scaled_mm_v2(
        a.values, b.values.t(), [a.scale], KINDS[scaling], [], [scale], KINDS[b.scaling], [], None, out, (),
        fast and scaling != "blockwise",
    )  # fmt: skip
    return y if out is dtype else y.to(dtype)
