"""Which indices of a tensor each rank uses, as masks, shards and runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import PlanError
from ..index_runs import compress_indices
from ..shard import Shard
from .module_plan import InputPlan

NEAR = 1e-9  # of the largest number: the values of one tensor on a rank and in the whole run differ by rounding alone


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


# -- which indices a rank's tensor holds, told from its values ------------------------------------------------------------


def shrunk_axis(local: Tensor, whole: Tensor) -> int | None:
    """The one axis along which `local` is smaller than `whole`."""
    if local.dim() != whole.dim():
        return None
    axes = [axis for axis, (a, b) in enumerate(zip(local.shape, whole.shape, strict=True)) if a != b]
    return axes[0] if len(axes) == 1 and local.shape[axes[0]] < whole.shape[axes[0]] else None


def find_held(local: Tensor, whole: Tensor) -> tuple[int, tuple[int, ...]] | tuple[()] | None:
    """`(axis, indices of whole along it that local holds)`; () where the shapes are equal; None where no match is found."""
    if local.shape == whole.shape:
        return ()
    axis = shrunk_axis(local, whole)
    if axis is None:
        return None
    short, long = _signatures(local, axis), _signatures(whole, axis)
    near = NEAR * max(float(long.abs().max()), 1e-300)
    if bool((long - long[0]).abs().max() <= near):  # alike everywhere: they do not say which
        return None
    width = len(short)
    for start in ((long - short[0]).abs() <= near).nonzero().flatten().tolist():
        if start + width <= len(long) and bool(((long[start : start + width] - short).abs() <= near).all()):
            return axis, tuple(range(start, start + width))
    indices, before = [], -1
    for value in short:
        matches = ((long - value).abs() <= near).nonzero().flatten().tolist()
        if not matches:
            return None
        before = next((i for i in matches if i > before), matches[0])
        indices.append(before)
    return axis, tuple(indices)


def _signatures(tensor: Tensor, axis: int) -> Tensor:
    """A number for each slice along `axis`, the same for slices of the same values; what is masked out counts as 0."""
    values = tensor.detach().movedim(axis, 0)
    values = values.reshape(len(values), -1).to(torch.float64)
    values = torch.where(values.abs() < 1e30, values, 0.0)
    return values @ torch.cos(torch.arange(values.shape[1], dtype=torch.float64) * 1.7 + 0.3)


def axis_mask(indices: Sequence[int], size: int) -> Tensor:
    """bool `[size]`, True at `indices`."""
    mask = torch.zeros(size, dtype=torch.bool)
    mask[list(indices)] = True
    return mask


def target_shape(local: Tensor, whole: Tensor, made: torch.Size) -> tuple[int, ...] | None:
    """The shape of `local` where `whole` is given the shape `made`; None where that is no product of a set for each axis."""
    held = find_held(local, whole)
    if held is None:
        return None
    if not held:
        return tuple(made)
    axis, indices = held
    if len(set(indices)) < len(indices):
        return None
    line = axis_mask(indices, whole.shape[axis])
    mask = line.reshape([-1 if d == axis else 1 for d in range(whole.dim())]).expand(whole.shape)
    mask = mask.reshape(made) if whole.numel() == made.numel() else mask.expand(made)
    sides = [mask.movedim(d, 0).flatten(1).any(1) if mask.dim() > 1 else mask for d in range(mask.dim())]
    product = torch.ones(made, dtype=torch.bool)
    for d, side in enumerate(sides):
        product &= side.reshape([-1 if e == d else 1 for e in range(mask.dim())])
    return tuple(int(side.sum()) for side in sides) if bool((product == mask).all()) else None
