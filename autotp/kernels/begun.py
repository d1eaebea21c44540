"""Quantising begun where a tensor is made: the pass of a norm or a gate over y `[R, C]` leaves what it finds of it.

| scaling | a norm leaves | a gate leaves | what is left of it: one pass, for |
|---|---|---|---|
| "tensorwise" | the largest size | the largest size | both operands |
| "rowwise" | the rows' operand, the largest size of each column | the largest size of each row and column | what is not there |
| "blockwise" | the rows' operand | both operands | what is not there |

Values and scales are those that fp8.quantise makes of y, bit for bit. Where ranks have parts of rows that share a scale, a row's
largest size is left, in place of its operand: nothing is communicated here. See `begun` of fp8.quantise for the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from .fp8_scaled import Quantised


class Begun(NamedTuple):
    """What is known of a tensor `[R, C]`, each None or known.

    Attributes:
        rows, turned: its operands, summed over columns and over rows, see fp8.quantise.
        row_bits: int32, the bits of the largest size in all of it `[]` ("tensorwise"), or in each row `[R]`.
        column_bits: of each column `[C]`.
    """

    rows: Quantised | None = None
    turned: Quantised | None = None
    row_bits: Tensor | None = None
    column_bits: Tensor | None = None


@dataclass
class Wish:
    """What the reader of a tensor wants of it, for the kernel that makes the tensor; and what that kernel has begun.

    Attributes:
        scaling: "tensorwise", "rowwise" or "blockwise"; values are E4M3.
        turned: the operand that is summed over rows is wanted, too.
        cut_rows: ranks have parts of rows whose scale they share.
        bad: int32 `[]`, to which the number of scales that are not finite is added, of operands that are made here.
        begun: written by the kernel.
    """

    scaling: str
    turned: bool = True
    cut_rows: bool = False
    bad: Tensor | None = None
    begun: Begun | None = None
