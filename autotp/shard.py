"""Which slice of a tensor each rank holds.

A `Shard` is an invertible value: `split` takes a full tensor to one rank's part, `join` takes all parts back, and both
are exact. Everything that moves weights (rewriting, gathering, loading slices, saving, optimizer state, gradient norms)
goes through it, so a layout is described once. Pure torch: no process group, no module.

One form covers every layout. Along a cut dimension a rank holds an ordered tuple of *runs* `(start, length, stride,
count)`: `count` blocks of `length` neighbouring indices whose first indices lie `stride` apart. Even, uneven, packed
(`[q | k | v]`), interleaved (per head `q k v`), strided and permuted layouts, indices held by several ranks, and an
index repeated inside one rank are all such tuples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from .errors import PlanError
from .index_runs import Run, compress_indices, covers_in_order, put_runs, run_width, take_runs, view_run


@dataclass(frozen=True)
class Cut:
    """One cut dimension: `runs[rank]` are the indices along `dim` that the rank holds, in its local order."""

    dim: int
    runs: tuple[tuple[Run, ...], ...]

    def indices(self, rank: int) -> Tensor:
        """The indices held by `rank`, int64 `[width]`, in local order."""
        blocks = [
            (torch.arange(count) * stride + start).unsqueeze(1) + torch.arange(length)
            for start, length, stride, count in self.runs[rank]
        ]
        return torch.cat([b.flatten() for b in blocks]) if blocks else torch.empty(0, dtype=torch.int64)

    def mask(self, rank: int, size: int) -> Tensor:
        """Which of the dimension's `size` indices `rank` holds, bool `[size]`."""
        held = torch.zeros(size, dtype=torch.bool)
        for run in self.runs[rank]:
            view_run(held, 0, run).fill_(True)
        return held


@dataclass(frozen=True)
class Shard:
    """The slice of a tensor of shape `shape` that each of `tp_size` ranks holds; without cuts all ranks hold all of it.

    Raises:
        PlanError: a run leaves the tensor, a block overlaps the next of its run, or some index is held by no rank.
    """

    shape: tuple[int, ...]
    tp_size: int
    cuts: tuple[Cut, ...] = ()

    def __post_init__(self) -> None:
        for cut in self.cuts:
            if not 0 <= cut.dim < len(self.shape) or len(cut.runs) != self.tp_size:
                raise PlanError(
                    f"a cut of dim {cut.dim} over {len(cut.runs)} ranks does not fit a tensor of shape {self.shape} "
                    f"over {self.tp_size} ranks"
                )
            size, held = self.shape[cut.dim], torch.zeros(self.shape[cut.dim], dtype=torch.bool)
            for rank, runs in enumerate(cut.runs):
                for run in runs:
                    start, length, stride, count = run
                    if min(start, length - 1, count - 1) < 0 or (count > 1 and stride < length):
                        raise PlanError(f"rank {rank}: {run} is not a run (start, length, stride, count)")
                    if start + (count - 1) * stride + length > size:
                        raise PlanError(f"rank {rank}: run {run} leaves dim {cut.dim} of shape {self.shape}")
                    view_run(held, 0, run).fill_(True)
            if not held.all():
                missing = (~held).nonzero().flatten()
                raise PlanError(
                    f"{len(missing)} indices of dim {cut.dim} of shape {self.shape} are held by no rank, first {int(missing[0])}"
                )
        if len(self.cuts) > 1:
            self._check_several_cuts()

    def _check_several_cuts(self) -> None:
        """With several cuts, covering each dimension is not enough: every *element* must be held, and owned once."""
        dims = [cut.dim for cut in self.cuts]
        if dims != sorted(set(dims)):
            raise PlanError(f"the cuts of shape {self.shape} must name different dimensions in order, got {dims}")
        owned = 0
        for rank in range(self.tp_size):
            masks = dict(self.owned(rank))
            owned += prod(int(masks[c.dim].sum()) if c.dim in masks else run_width(c.runs[rank]) for c in self.cuts)
        if owned != prod(self.shape[dim] for dim in dims):
            raise PlanError(f"the cuts of dims {dims} of shape {self.shape} leave some elements with no rank that holds them")

    # -- making one ---------------------------------------------------------------------------------------------------

    @classmethod
    def whole(cls, shape: Sequence[int], tp_size: int) -> Shard:
        """Every rank holds all of it."""
        return cls(tuple(shape), tp_size)

    @classmethod
    def dealt(cls, shape: Sequence[int], dim: int, dealt: Sequence[int], parts: Sequence[int] | None = None) -> Shard:
        """Rank r holds `dealt[r]` neighbouring units of each of the `parts` that lie one after the other along `dim`.

        Every part has `sum(dealt)` units, so `Shard.dealt((3 * H, K), 0, (4, 3, 3), parts=(H, H, H))` is a packed
        `[q | k | v]` of ten heads over three ranks. Without `parts` the dimension is one part.

        Raises:
            PlanError: the parts do not add up to the dimension, or one of them is no multiple of the units.
        """
        shape, units, size = tuple(shape), sum(dealt), shape[dim]
        parts = (size,) if parts is None else tuple(parts)
        if sum(parts) != size or any(part % units for part in parts):
            raise PlanError(f"dim {dim} of shape {shape} is not made of parts {parts} of {units} units each")
        runs: list[tuple[Run, ...]] = []
        before = 0
        for count in dealt:
            starts = [sum(parts[:i]) + part // units * before for i, part in enumerate(parts)]
            runs.append(tuple((s, p // units * count, p, 1) for s, p in zip(starts, parts, strict=True) if count))
            before += count
        return cls(shape, len(dealt), (Cut(dim, tuple(runs)),))

    @classmethod
    def even(cls, shape: Sequence[int], dim: int, tp_size: int) -> Shard:
        """One block a rank, as equal as can be; what is left over goes to the low ranks."""
        return cls.dealt(shape, dim, deal_units(shape[dim], tp_size))

    @classmethod
    def from_indices(cls, shape: Sequence[int], dim: int, indices: Sequence[Sequence[int]]) -> Shard:
        """Rank r holds `indices[r]` of `dim`, in that order."""
        return cls(tuple(shape), len(indices), (Cut(dim, tuple(compress_indices(list(i)) for i in indices)),))

    def and_cut(self, other: Shard) -> Shard:
        """This shard's cuts and `other`'s, of another dimension of the same tensor."""
        return Shard(self.shape, self.tp_size, tuple(sorted(self.cuts + other.cuts, key=lambda cut: cut.dim)))

    def deal_further(self, dim: int, parts: int) -> Shard:
        """What remains when each rank's part is cut along `dim` into `parts` chunks, as `torch.chunk` cuts (FSDP2 does).

        Chunk d of rank r is rank `d * tp_size + r` of the new shard; the last chunks may be empty.
        """
        cut = next((cut for cut in self.cuts if cut.dim == dim), None)
        held = [cut.indices(rank) if cut else torch.arange(self.shape[dim]) for rank in range(self.tp_size)]
        runs = []
        for chunk in range(parts):
            for indices in held:
                step = -(-len(indices) // parts)
                runs.append(compress_indices(indices[chunk * step : (chunk + 1) * step].tolist()))
        others = tuple(Cut(cut.dim, cut.runs * parts) for cut in self.cuts if cut.dim != dim)
        cuts = sorted((*others, Cut(dim, tuple(runs))), key=lambda cut: cut.dim)
        return Shard(self.shape, self.tp_size * parts, tuple(cuts))

    # -- shapes -------------------------------------------------------------------------------------------------------

    @property
    def is_whole(self) -> bool:
        """True when every rank holds the full tensor in its own order."""
        return all(covers_in_order(runs, self.shape[cut.dim]) for cut in self.cuts for runs in cut.runs)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of what `rank` holds."""
        shape = list(self.shape)
        for cut in self.cuts:
            shape[cut.dim] = run_width(cut.runs[rank])
        return tuple(shape)

    def local_numel(self, rank: int) -> int:
        """Number of elements that `rank` holds."""
        return prod(self.local_shape(rank))

    # -- moving tensors -----------------------------------------------------------------------------------------------

    def split(self, full: Tensor, rank: int) -> Tensor:
        """What `rank` holds of `full` (shape `shape`, any dtype and device); a view of `full` where that is possible."""
        if tuple(full.shape) != self.shape:
            raise PlanError(f"cannot split a tensor of shape {tuple(full.shape)}: this shard describes shape {self.shape}")
        for cut in self.cuts:
            full = take_runs(full, cut.dim, cut.runs[rank])
        return full

    def paste(self, full: Tensor, local: Tensor, rank: int) -> None:
        """Write `rank`'s part `local` to its place in `full`."""
        if tuple(local.shape) != self.local_shape(rank):
            raise PlanError(
                f"rank {rank} holds shape {self.local_shape(rank)} of {self.shape}, but was given {tuple(local.shape)}"
            )
        if len(self.cuts) > 1:  # inner dimensions first, into what this rank holds of the outer ones
            outer = Shard(self.shape, self.tp_size, self.cuts[:1])
            middle = outer.split(full, rank).clone()
            inner = Shard(tuple(middle.shape), self.tp_size, self.cuts[1:])
            inner.paste(middle, local, rank)
            local = middle
        if self.cuts:
            put_runs(full, self.cuts[0].dim, self.cuts[0].runs[rank], local)
        else:
            full.copy_(local)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The full tensor of all ranks' `parts`; where several ranks hold an index, the lowest rank's value."""
        if len(parts) != self.tp_size:
            raise PlanError(f"a shard over {self.tp_size} ranks cannot join {len(parts)} parts")
        full = torch.empty(self.shape, dtype=parts[0].dtype, device=parts[0].device)
        for rank in reversed(range(self.tp_size)):
            self.paste(full, parts[rank], rank)
        return full

    # -- who holds what -----------------------------------------------------------------------------------------------

    @cached_property
    def has_copies(self) -> bool:
        """True when some element is held by several ranks, or twice by one."""
        return sum(self.local_numel(rank) for rank in range(self.tp_size)) > prod(self.shape)

    @cached_property
    def holders(self) -> tuple[tuple[int, tuple[int, ...], tuple[Run, ...]], ...]:
        """Indices that several ranks hold: `(dim, ranks, runs)` for each distinct set of at least two ranks.

        Raises:
            PlanError: several cuts with copies, which can't be named by one dimension.
        """
        if not self.cuts or self.tp_size == 1:
            return ()
        if len(self.cuts) > 1:
            if sum(self.local_numel(rank) for rank in range(self.tp_size)) == prod(self.shape):
                return ()
            raise PlanError(f"a shard of shape {self.shape} with several cuts has copies: give it one cut, or no copies")
        cut = next(iter(self.cuts))
        held = torch.stack([cut.mask(rank, self.shape[cut.dim]) for rank in range(self.tp_size)])
        several = (held.sum(0) > 1).nonzero().flatten()
        if not len(several):
            return ()
        sets, which = held[:, several].unique(dim=1, return_inverse=True)
        found = []
        for column in range(sets.shape[1]):
            ranks = tuple(sets[:, column].nonzero().flatten().tolist())
            found.append((cut.dim, ranks, compress_indices(several[which == column].tolist())))
        return tuple(sorted(found))

    @cached_property
    def copied(self) -> tuple[int, int, tuple[tuple[tuple[Run, ...], tuple[Run, ...]], ...]] | None:
        """Where the copies lie in each rank's part: `(dim, count, ((places, slots) of each rank))`; None without copies.

        The `count` indices of `dim` that several ranks hold are numbered in their order. `slots` are the numbers of those that
        a rank holds, `places` where they lie in its part, in the same order.

        Raises:
            PlanError: several cuts with copies, or an index that repeats inside one rank.
        """
        if not self.has_copies:
            return None
        self._check_no_repeats()
        if not self.holders:
            return None
        cut = self.cuts[0]
        several = torch.cat([Cut(cut.dim, (runs,)).indices(0) for _, _, runs in self.holders]).sort().values
        number = torch.full((self.shape[cut.dim],), -1)
        number[several] = torch.arange(len(several))
        by_rank = []
        for rank in range(self.tp_size):
            numbers = number[cut.indices(rank)]
            places = (numbers >= 0).nonzero().flatten()
            by_rank.append((compress_indices(places.tolist()), compress_indices(numbers[places].tolist())))
        return cut.dim, len(several), tuple(by_rank)

    def _check_no_repeats(self) -> None:
        for cut in self.cuts:
            for rank in range(self.tp_size):
                indices = cut.indices(rank)
                if len(indices.unique()) < len(indices):
                    raise PlanError(
                        f"rank {rank} holds an index of dim {cut.dim} of shape {self.shape} twice: the gradients of such copies "
                        f"can't be summed. Deal whole units, or leave the tensor whole."
                    )

    def owned(self, rank: int) -> tuple[tuple[int, Tensor], ...]:
        """What of `rank`'s part it owns: `(dim, mask)` for each dim where some indices are another rank's or repeats.

        An index is owned by its lowest holder, at its first place there; so every element of the full tensor is
        owned exactly once, by the rank whose masks (all dims left out being all true) are true for it. A tensor without
        cuts is owned by rank 0: there `owned` is empty, and the caller must ask `is_whole`.

        Raises:
            PlanError: two ranks share a part of several cuts that is no slice along one dimension of either's.
        """
        sizes = [self.shape[cut.dim] for cut in self.cuts]
        taken = [torch.zeros(size, dtype=torch.bool) for size in sizes]  # per cut: indices that lower ranks own
        mine = [cut.mask(rank, size) for cut, size in zip(self.cuts, sizes, strict=True)]
        for lower in range(rank):
            theirs = [cut.mask(lower, size) for cut, size in zip(self.cuts, sizes, strict=True)]
            if not all(bool((m & t).any()) for m, t in zip(mine, theirs, strict=True)):
                continue
            beyond = [i for i, (m, t) in enumerate(zip(mine, theirs, strict=True)) if bool((m & ~t).any())]
            if len(beyond) > 1:
                raise PlanError(
                    f"ranks {lower} and {rank} hold overlapping blocks of shape {self.shape}: with several cuts, what two ranks "
                    f"share must be whole along all but one of them"
                )
            if self.cuts:
                taken[beyond[0] if beyond else 0] |= theirs[beyond[0] if beyond else 0]
        masks = []
        for cut, size, gone in zip(self.cuts, sizes, taken, strict=True):
            indices = cut.indices(rank)
            place = torch.arange(len(indices))
            first = torch.full((size,), len(indices)).scatter_reduce_(0, indices, place, "amin")
            mask = (first[indices] == place) & ~gone[indices]
            if not bool(mask.all()):
                masks.append((cut.dim, mask))
        return tuple(masks)

    # -- JSON ---------------------------------------------------------------------------------------------------------

    def to_json(self) -> dict:
        """Plain lists and numbers; `from_json` gives an equal shard."""
        cuts = [{"dim": cut.dim, "runs": [[list(run) for run in runs] for runs in cut.runs]} for cut in self.cuts]
        return {"shape": list(self.shape), "tp_size": self.tp_size, "cuts": cuts}

    @classmethod
    def from_json(cls, data: dict) -> Shard:
        """The inverse of `to_json`."""
        cuts = tuple(
            Cut(cut["dim"], tuple(tuple((r[0], r[1], r[2], r[3]) for r in runs) for runs in cut["runs"])) for cut in data["cuts"]
        )
        return cls(tuple(data["shape"]), data["tp_size"], cuts)


def deal_units(units: int, tp_size: int) -> tuple[int, ...]:
    """How many of `units` each rank gets: as equal as can be, what is left over to the low ranks."""
    return tuple(units // tp_size + (rank < units % tp_size) for rank in range(tp_size))
