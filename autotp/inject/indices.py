"""Which indices of a tensor each rank uses, as masks, shards and runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import PlanError
from ..shard import Shard, compress_indices
from .plan import InputPlan


def product_cut(shape: tuple[int, ...], dims: tuple[int, ...], held: Sequence[Tensor], name: str) -> Shard:
    """The shard that holds, on each rank, `held` of the flattened `dims`, which must be a cut of one of them.

    Raises:
        PlanError: the indices are no product of one dim's with all of the others'.
    """
    if len(dims) == 1:
        return Shard.from_indices(shape, dims[0], [h.tolist() for h in held])
    sizes = [shape[d] for d in dims]
    for place, dim in enumerate(dims):
        chosen = []
        for indices in held:
            mask = torch.zeros(sizes, dtype=torch.bool)
            mask.view(-1)[indices] = True
            along = mask.movedim(place, 0).flatten(1)
            if not bool((along.all(1) == along.any(1)).all()):
                break
            chosen.append(along.any(1).nonzero().flatten().tolist())
        else:
            return Shard.from_indices(shape, dim, chosen)
    raise PlanError(f"{name}: the ranks' columns are no cut of one of its dims {dims}")


def project(grad: Tensor) -> list[Tensor]:
    """For each dim, which indices have a number that is not zero."""
    hit = grad.ne(0)
    if hit.ndim == 0:
        return []
    return [hit.movedim(d, 0).flatten(1).any(1) if hit.ndim > 1 else hit for d in range(hit.ndim)]


def no_support(tensor: Tensor) -> list[Tensor]:
    return [torch.zeros(n, dtype=torch.bool) for n in tensor.shape]


def choose_dim(per_rank: Sequence[Sequence[Tensor]]) -> int | None:
    """The dim of which the ranks use different indices that together are all of them, with the fewest held; or None."""
    best = None
    for dim in range(len(per_rank[0])):
        masks = torch.stack([masks[dim] for masks in per_rank])
        if masks.any(0).all() and not masks.all() and masks.any(1).all():
            total = int(masks.sum())
            if best is None or total < best[0]:
                best = (total, dim)
    return None if best is None else best[1]


def smallest_period(masks: Sequence[Tensor]) -> int:
    """The smallest period of all `masks` that divides their length."""
    size = len(masks[0])
    for period in range(1, size + 1):
        if size % period == 0 and all(bool((m.view(-1, period) == m[:period]).all()) for m in masks):
            return period
    return size


def merge_inputs(a: InputPlan, b: InputPlan) -> InputPlan | None:
    """One plan for an argument that two calls or two regions enter: a part is taken if either takes it, and they agree."""
    if a.dim is not None and b.dim is not None and (a.dim, a.period, a.indices) != (b.dim, b.period, b.indices):
        return None
    base = a if a.dim is not None else b
    return replace(base, sums=a.sums or b.sums)


def single_runs(mask: Tensor) -> list[tuple[int, int, int, int]]:
    """Neighbouring indices of a bool mask as runs without repeats."""
    found = []
    for start, length, stride, count in compress_indices(mask.nonzero().flatten().tolist()):
        found += [(start + i * stride, length, length, 1) for i in range(count)]
    return found
