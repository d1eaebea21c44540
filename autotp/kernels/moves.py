"""Which way rows move between the ranks: by copy engines beside the products, or by collectives before and after them.

This is the one place where the automatic choice is made. The sizes were measured on two H200s; scripts/bench_overlap.py does it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

SMALLEST_BLOCK_BYTES = 8 << 20  # of one rank's: below, the host's part of copying a block costs more than it hides
LARGEST_BYTES = 1 << 30  # of a symmetric buffer: above, collectives in sequence unless they are asked for


class Moves(NamedTuple):
    """How each move of a product is made: True by copy engines beside it, False in sequence, None as the size says.

    Attributes:
        forward: the gather of a column product's input, or the scatter of a row product's output.
        gather: in backward, of a column product's input or a row product's output gradient.
        scatter: in backward, of a column product's input gradient.
        sums: all ranks get the sums of all rows: a column product's input gradient, a row product's output. None is False: at
            which sizes copies win there is not measured.
        early: a column product's input gradient is complete before its weight gradient begins, in place of after it.
    """

    forward: bool | None = None
    gather: bool | None = None
    scatter: bool | None = None
    sums: bool | None = None
    early: bool = False


BY_SIZE = Moves()


class Decision(NamedTuple):
    """Whether copy engines move the rows, and why."""

    copies: bool
    reason: str


@lru_cache(maxsize=4096)
def decide(n_bytes: int, way: bool | None, why_not: str, smallest_bytes: int) -> Decision:
    """How `n_bytes` move, of all blocks together.

    Args:
        way: one of a Moves; why_not: what speaks against copy engines between these ranks, empty if nothing does.
        smallest_bytes: from which on copies are taken unasked.
    """
    if why_not or n_bytes == 0:
        return Decision(False, why_not or "there are no rows")
    if way is not None:
        return Decision(way, f"asked for: {way}")
    size = f"{n_bytes / 2**20:.4g} MiB"
    if n_bytes < smallest_bytes:
        return Decision(False, f"{size}, fewer than {smallest_bytes >> 20} MiB: launching copies costs more than they hide")
    if n_bytes > LARGEST_BYTES:
        return Decision(False, f"{size}, more than the {LARGEST_BYTES >> 20} MiB that a buffer may take unasked")
    return Decision(True, f"{size}, at least {smallest_bytes >> 20} MiB")
