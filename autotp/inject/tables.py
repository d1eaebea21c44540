"""Which columns of which site reach which columns of another, directly: booleans read off the Jacobian of a cut graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from .describe import fold_name
from .record import Call, Record, Site, SiteKey, columns
from .shadow import Shadow

FINE_WIDTH = 512  # inputs up to this wide are looked at column by column
FEW_ROWS = 16  # tables up to this high are made row by row
FIRST_BLOCKS = 4  # blocks for each rank in a first look at a wide one
BLOCK = 64  # wider ones in blocks of the largest power of two up to this that divides their width


class Tables:
    """Direct dependences between the sites of one or several records of one model, made when they are asked for.

    Attributes:
        sites: every site, by key; a site stands for its calls in all records.
    """

    def __init__(self, shadow: Shadow, records: Sequence[Record], seed: int = 0, base: int | None = None) -> None:
        """`base`: so many of the records are always looked at; the others where they show columns that are dead in those."""
        self.shadow, self.records, self.base = shadow, records, len(records) if base is None else base
        self.generator = torch.Generator().manual_seed(seed)
        self.sites: dict[SiteKey, Site] = {}
        for record in records:
            for key, site in record.sites.items():
                self.sites.setdefault(key, site)
        self._reach: dict[SiteKey, dict[SiteKey, Tensor]] = {}
        self._tables: dict[tuple[SiteKey, int], dict[SiteKey, Tensor]] = {}
        self._structured: dict[tuple, bool] = {}
        self._outputs: dict[SiteKey, Tensor] | None = None
        self._consumers: dict[SiteKey, list[SiteKey]] | None = None

    # -- one backward pass --------------------------------------------------------------------------------------------

    def pull(
        self, record: Record, targets: Sequence[Tensor], grads: Sequence[Tensor], at: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Gradients of `targets` at the tensors `at`; None where there is no path."""
        pairs = [(t, g) for t, g in zip(targets, grads, strict=True) if t.requires_grad]
        if not pairs or not at:
            return [None] * len(at)
        tensors, cotangents = zip(*pairs, strict=True)
        return list(torch.autograd.grad(tensors, at, cotangents, retain_graph=True, allow_unused=True))

    def random_like(self, tensor: Tensor) -> Tensor:
        """Random cotangents."""
        return torch.randn(tensor.shape, generator=self.generator, dtype=tensor.dtype)

    def _support(
        self,
        record: Record,
        targets: Sequence[Tensor],
        grads: Sequence[Tensor],
        found: dict[SiteKey, Tensor],
        among: Iterable[SiteKey] | None = None,
    ) -> None:
        """Mark in `found` the output columns of every site (`among` these) whose values reach `targets`."""
        keys = record.sites if among is None else [key for key in among if key in record.sites]
        leaves = [(key, call) for key in keys for call in record.sites[key].calls]
        for (key, call), grad in zip(leaves, self.pull(record, targets, grads, [c.y for _, c in leaves]), strict=True):
            if grad is None:
                continue
            hit = columns(grad, call.y_axes).ne(0).any(0)
            site = self.sites[key]
            width = site.out_size if site.readable else hit.numel()
            mask = found.setdefault(key, torch.zeros(width, dtype=torch.bool))
            start = call.y_start if site.readable else 0
            mask[start : start + hit.numel()] |= hit

    # -- what is asked ------------------------------------------------------------------------------------------------

    def reach(self, key: SiteKey) -> dict[SiteKey, Tensor]:
        """Site -> which of its output columns (bool) reach the input of site `key`."""
        if key not in self._reach:
            found: dict[SiteKey, Tensor] = {}
            for record in self.records:
                inputs = [call.x for call in record.sites[key].calls] if key in record.sites else []
                inputs = [x for x in inputs if x.is_floating_point()]
                self._support(record, inputs, [self.random_like(x) for x in inputs], found)
            self._reach[key] = {k: mask for k, mask in found.items() if mask.any()}
        return self._reach[key]

    @property
    def outputs(self) -> dict[SiteKey, Tensor]:
        """Site -> which of its output columns reach the model's outputs."""
        if self._outputs is None:
            self._outputs = {}
            for record in self.records:
                self._support(record, record.outputs, [self.random_like(t) for t in record.outputs], self._outputs)
            self._outputs = {k: mask for k, mask in self._outputs.items() if mask.any()}
        return self._outputs

    @property
    def consumers(self) -> dict[SiteKey, list[SiteKey]]:
        """Site -> the sites whose input its output reaches."""
        if self._consumers is None:
            self._consumers = {key: [] for key in self.sites}
            for key in self.sites:
                for source in self.reach(key):
                    self._consumers[source].append(key)
        return self._consumers

    def block_size(self, key: SiteKey) -> int:
        """How many neighbouring input columns of a site are looked at together, at the closest look that is affordable."""
        width = self.sites[key].in_size
        return 1 if width <= FINE_WIDTH else min(BLOCK, width & -width)

    def first_block(self, key: SiteKey, tp_size: int) -> int:
        """The same for a first look, which is enough where its parts can be dealt evenly."""
        width = self.sites[key].in_size
        wanted = max(1, width // (FIRST_BLOCKS * tp_size))
        return 1 if width <= FINE_WIDTH else next(b for b in range(wanted, 0, -1) if width % b == 0)

    def table(self, key: SiteKey, block: int) -> dict[SiteKey, Tensor]:
        """Site -> bool `[blocks, out_size]`: which of its output columns reach which block of `key`'s input columns."""
        if (key, block) not in self._tables:
            width = self.sites[key].in_size
            rows = -(-width // block)
            made = {k: torch.zeros(rows, mask.numel(), dtype=torch.bool) for k, mask in self.reach(key).items()}
            for number, record in enumerate(self.records):
                if number < self.base or self._adds(record, key, made):
                    self._fill(record, key, block, made)
            self._tables[key, block] = made
        return self._tables[key, block]

    def _adds(self, record: Record, key: SiteKey, made: dict[SiteKey, Tensor]) -> bool:
        """Whether in `record` some output column reaches `key` which reaches it in none that was looked at."""
        found: dict[SiteKey, Tensor] = {}
        inputs = [c.x for c in record.sites[key].calls] if key in record.sites else []
        self._support(record, inputs, [self.random_like(x) for x in inputs], found, made)
        return any(bool((mask & ~made[k].any(0)).any()) for k, mask in found.items())

    def _fill(self, record: Record, key: SiteKey, block: int, made: dict[SiteKey, Tensor]) -> None:
        """Mark one record's dependences in the table `made` of `key`, whose rows are blocks of `block` columns.

        Half of the rows are looked at in one pass, once for each bit of their numbers. That tells, of an output column, in which
        bits the rows that it reaches agree. Rows that differ in none of the other bits can then be told apart by it.
        """
        calls = [c for c in record.sites[key].calls if c.x.requires_grad] if key in record.sites else []
        weights = [self.random_like(c.x) for c in calls]
        rows = torch.arange(next(iter(made.values())).shape[0] if made else 0)
        width = self.sites[key].in_size

        def look(chosen: Tensor) -> dict[SiteKey, Tensor]:
            at = (chosen[:, None] * block + torch.arange(block)).flatten()
            grads = [select_columns(g, c, at[at < width]) for g, c in zip(weights, calls, strict=True)]
            found = {k: torch.zeros(table.shape[1], dtype=torch.bool) for k, table in made.items()}
            self._support(record, [c.x for c in calls], grads, found, made)
            return found

        common, free = _read_bits(rows, look) if len(rows) > FEW_ROWS else ({}, 0)
        if not common:
            for row in rows:
                for k, mask in look(row[None]).items():
                    made[k][row] |= mask
            return
        fixed = [bit for bit in range(free.bit_length()) if free >> bit & 1]
        for part in range(2 ** len(fixed)):
            offset = sum(1 << bit for i, bit in enumerate(fixed) if part >> i & 1)
            for k, mask in look(rows[(rows & free) == offset]).items():
                hit = mask.nonzero().flatten()
                made[k][common[k][hit] + offset, hit] = True

    def is_structured(self, key: SiteKey) -> bool:
        """Whether some site reaches only a part of `key`'s input columns, so that `key` might be split along them.

        Sites that differ in their layer numbers alone, and so do the sites that reach them, are looked at once.
        """
        site, width = self.sites[key], self.sites[key].in_size
        if width < 2 or not site.readable:
            return False
        sources = frozenset((fold_name(name), dims) for name, dims in self.reach(key))
        kind = (fold_name(site.parameter), site.out_dims, site.shape, sources)
        if kind not in self._structured:
            coarse = self.table(key, -(-width // min(4, width)))
            self._structured[kind] = any(bool((table != table[:1]).any()) for table in coarse.values())
        return self._structured[kind]


def _read_bits(rows: Tensor, look: Callable[[Tensor], dict[SiteKey, Tensor]]) -> tuple[dict[SiteKey, Tensor], int]:
    """Site -> of each output column, the bits that the rows it reaches have in common; and the bits in which some differ.

    No sites, if so many bits differ that looking at row after row is no dearer.
    """
    common: dict[SiteKey, Tensor] = {}
    free, count = 0, (len(rows) - 1).bit_length()
    for bit in range(count):
        on, off = (look(rows[(rows >> bit & 1) == value]) for value in (1, 0))
        for key, mask in on.items():
            common[key] = common.get(key, torch.zeros(len(mask), dtype=torch.int64)) + (mask.long() << bit)
            free |= bool((mask & off[key]).any()) << bit
        if 2 * count + 2 ** free.bit_count() >= len(rows):
            return {}, 0
    return {key: numbers & ~free for key, numbers in common.items()}, free


def select_columns(grad: Tensor, call: Call, indices: Tensor) -> Tensor:
    """`grad` with zeros outside the Parameter's input columns `indices` (int64)."""
    mask = torch.zeros(axes_shape(grad, call.x_axes), dtype=grad.dtype)
    inside = indices - call.x_start
    mask.view(-1)[inside[(inside >= 0) & (inside < mask.numel())]] = 1
    return grad * spread(mask, grad, call.x_axes)


def select_weights(grad: Tensor, call: Call, indices: Tensor) -> Tensor:
    """`grad`, of a computed weight's shape, with zeros outside the Parameter's input columns `indices` (int64)."""
    assert call.op is not None
    (dim,) = call.op.w_in
    mask = torch.zeros(grad.shape[dim], dtype=grad.dtype)
    inside = indices - call.x_start
    mask[inside[(inside >= 0) & (inside < len(mask))]] = 1
    return grad * spread(mask, grad, (dim - grad.ndim,))


def axes_shape(tensor: Tensor, axes: Iterable[int]) -> list[int]:
    """Sizes of `tensor` along `axes`."""
    return [tensor.shape[axis] for axis in axes]


def spread(mask: Tensor, tensor: Tensor, axes: Sequence[int]) -> Tensor:
    """`mask`, whose dims are `axes` of `tensor`, in a shape that broadcasts with it."""
    order = sorted(range(len(axes)), key=lambda i: axes[i])
    shape = [1] * tensor.ndim
    for axis in axes:
        shape[axis] = tensor.shape[axis]
    return mask.permute(*order).reshape(shape)
