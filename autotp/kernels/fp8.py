"""FP8 operands and their products: values of 8 bits, and the scales that they are multiplied by to be what they were.

R rows, C columns; the product sums over the columns of both operands, so a tensor that is summed over its rows is turned first.

| scaling | one scale for | scale of `[R, C]` |
|---|---|---|
| "tensorwise" | the tensor | `[]` |
| "rowwise" | a row | `[R, 1]` |
| "blockwise" | 128 columns of a row | `[R, C/128]`, its columns contiguous |
| "squares", weights of "blockwise" | 128 x 128 | `[C/128 up to a multiple of 4, R/128]`, its columns contiguous |

`value = round(clamp(x * (limit / amax)))`, `scale = amax / limit`, amax at least 2**-110, in float32. What is not finite makes
the scale so, and so everything that is computed with it: as without FP8, nothing is hidden; see `quantise`'s `bad`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import PlanError
from .dispatch import Problem, select
from .fp8_scaled import BLOCK, FORMATS, MULTIPLE, Operands, Quantised, Share, Stack
from .reference_fp8 import turn_values

SCALINGS = ("tensorwise", "rowwise", "blockwise")


@dataclass(frozen=True)
class Recipe:
    """How the products of a linear are made in FP8; inputs and weights are E4M3.

    Attributes:
        scaling: "tensorwise", "rowwise" or "blockwise", from the tensor at hand, see the module's table.
        gradient: "e5m2" or "e4m3", the format of output gradients; "" is E5M2 for tensorwise, else E4M3.
        agree: scales are those of the whole tensor where a rank has a part of it, so that T ranks round as one does: a small
            all-reduce each. Without it each rank scales its part. Blocks are those of the whole where parts begin at multiples
            of 128.
        fast_gradients: gradients' products, too, sum as the forward's do: faster, with fewer bits, on Hopper.
        weights_only: weights are kept in FP8 alone, one scale a row, for inference: a few rows are multiplied as they are, more
            are rounded, row by row.
        least: inputs or outputs (of a group that reads one input: of all of it) on a rank, below which a linear stays as it is.
    """

    scaling: str = "tensorwise"
    gradient: str = ""
    agree: bool = True
    fast_gradients: bool = False
    least: int = 256
    weights_only: bool = False

    def __post_init__(self) -> None:
        if self.scaling not in SCALINGS:
            raise PlanError(f"FP8 recipe: scaling {self.scaling!r} is none of {', '.join(SCALINGS)}")
        if self.gradient not in ("", *FORMATS):
            raise PlanError(
                f"FP8 recipe: gradient {self.gradient!r} is none of {', '.join(FORMATS)}, or '' for the scaling's own"
            )

    def describe(self) -> str:
        """In short: `FP8, tensorwise, gradients e5m2`."""
        if self.weights_only:
            return "FP8, weights kept in it, rowwise"
        gradient = next(name for name, dtype in FORMATS.items() if dtype is self.gradient_dtype)
        more = [", each rank's own scales"] * (not self.agree) + [", fast gradients"] * self.fast_gradients
        return f"FP8, {self.scaling}, gradients {gradient}{''.join(more)}"

    @property
    def gradient_dtype(self) -> torch.dtype:
        """The dtype of output gradients."""
        return FORMATS[self.gradient or ("e5m2" if self.scaling == "tensorwise" else "e4m3")]

    @property
    def weight_scaling(self) -> str:
        """How weights are scaled."""
        return "squares" if self.scaling == "blockwise" else self.scaling

    @property
    def multiple(self) -> int:
        """What inputs and outputs of a linear have to be multiples of."""
        return BLOCK if self.scaling == "blockwise" else MULTIPLE


def quantise(
    x: Tensor,
    scaling: str,
    dtype: torch.dtype = torch.float8_e4m3fn,
    *,
    rows: bool = True,
    columns: bool = True,
    cut: int | None = None,
    share: Share | None = None,
    bad: Tensor | None = None,
) -> Operands:
    """`x` `[R, C]` to be summed over its columns, and over its rows: turned, `[C, R]`, R padded with zeros to a multiple.

    Args:
        x: float32, bfloat16 or float16, any strides.
        rows, columns: which of the two are wanted; None for the other.
        cut: the dimension of which a rank has a part, or None; `share` then gives the largest over the ranks, called for each
            scale that spans the parts, in the same order on every rank.
        bad: int32 `[]`, to which the number of scales that are not finite is added.
    """
    problem = Problem("quantise", x.device.type, x.dtype, scaling, x.shape[0], x.shape[1])
    return select(problem)(x, scaling, dtype, rows, columns, cut, share, bad)


def quantise_stacks(stacks: Sequence[Stack], share: Share | None = None) -> list[Operands]:
    """`quantise(torch.cat(stack.parts), "tensorwise")` of many stacks at once; all parts of one dtype and device.

    Args:
        share: the largest over the ranks, called once for all stacks, which are alike on all ranks; None where none is shared.
    """
    first = stacks[0].parts[0]
    even = all(stack.is_even for stack in stacks)
    problem = Problem("quantise_stacks", first.device.type, first.dtype, "tensorwise", 1, stacks[0].width, aligned=even)
    return select(problem)(first, stacks, torch.float8_e4m3fn, share)


def turn(operand: Quantised) -> Quantised:
    """`[R, C]` with one scale for all of it, to be summed over its rows: `[C, R]`, R padded with zeros to a multiple."""
    return operand._replace(values=turn_values(operand.values, operand.scaling))


def multiply(a: Quantised, b: Quantised, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """`a @ b.T` `[M, N]` of `dtype`: a `[M, C]`, b `[N, C]`; summed in float32, where `fast` in fewer bits on some GPUs."""
    m, n = a.values.shape[0], b.values.shape[0]
    if 0 in (m, n, a.values.shape[1]):
        return torch.zeros(m, n, dtype=dtype, device=a.values.device)
    problem = Problem("scaled_product", a.values.device.type, dtype, f"{a.scaling} {b.scaling}", m, a.values.shape[1], outputs=n)
    return select(problem)(a, b, dtype, fast)
