"""Runs of indices along one dimension of a tensor: counted, read, written, and made of a list of indices.

A run `(start, length, stride, count)` is `count` blocks of `length` neighbouring indices whose first indices lie `stride` apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

Run = tuple[int, int, int, int]  # start, length, stride, count


def run_width(runs: Iterable[Run]) -> int:
    """Number of indices in `runs`."""
    return sum(length * count for _, length, _, count in runs)


def view_run(tensor: Tensor, dim: int, run: Run) -> Tensor:
    """The run's indices of `tensor` as a view: `[..., length, ...]` for one block, `[..., count, length, ...]` for more."""
    start, length, stride, count = run
    if count == 1:
        return tensor.narrow(dim, start, length)
    blocks = tensor.narrow(dim, start, (count - 1) * stride + length).unfold(dim, length, stride)
    return blocks.movedim(-1, dim + 1)


def take_runs(tensor: Tensor, dim: int, runs: Sequence[Run]) -> Tensor:
    """The indices of `runs` along `dim`, in order; a view where one unbroken block is taken, a copy otherwise."""
    pieces = [view_run(tensor, dim, run) for run in runs]
    pieces = [p.flatten(dim, dim + 1) if run[3] > 1 else p for p, run in zip(pieces, runs, strict=True)]
    if not pieces:
        return tensor.narrow(dim, 0, 0)
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def put_runs(target: Tensor, dim: int, runs: Sequence[Run], local: Tensor) -> None:
    """Write `local` to the indices of `runs` along `dim` of `target`; the first of a repeated index wins."""
    offset = run_width(runs)
    for run in reversed(runs):
        _, length, _, count = run
        offset -= length * count
        piece = local.narrow(dim, offset, length * count)
        view_run(target, dim, run).copy_(piece.unflatten(dim, (count, length)) if count > 1 else piece)


def compress_indices(indices: Sequence[int]) -> tuple[Run, ...]:
    """The shortest greedy list of runs that enumerates `indices` in their order."""
    blocks: list[list[int]] = []  # [start, length] of neighbouring indices
    for index in indices:
        if blocks and blocks[-1][0] + blocks[-1][1] == index:
            blocks[-1][1] += 1
        else:
            blocks.append([index, 1])
    runs: list[list[int]] = []
    for start, length in blocks:
        if runs and runs[-1][1] == length:
            first, _, stride, count = runs[-1]
            step = start - (first + (count - 1) * stride)
            if step >= length and (count == 1 or step == stride):
                runs[-1][2:] = [step, count + 1]
                continue
        runs.append([start, length, length, 1])
    return tuple((a, b, c, d) for a, b, c, d in runs)


def covers_in_order(runs: Iterable[Run], size: int) -> bool:
    """True when `runs` are the indices 0 to `size`, in order."""
    end = 0
    for start, length, stride, count in runs:
        if start != end or (count > 1 and stride != length):
            return False
        end += length * count
    return end == size
