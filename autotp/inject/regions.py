"""Regions: sets of sites that can be split together with no communication inside, found from the dependence tables.

The columns of the row sites of a region and of the column sites that feed them form a bipartite graph. Its connected
components are the units that can be dealt to ranks: a neuron, a head, a group of heads over one kv head. Rank r needs
exactly the columns of a column site that feed its columns of the row sites, in their original order: one formula for
packed and interleaved layouts, grouped queries, copied kv heads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations

import numpy as np
import torch
from torch import Tensor

from ..shard import deal_units
from .describe import fold_name
from .record import SiteKey
from .tables import Tables

MAX_CLASSES = 10
TOO_FEW = "too few units"
ALIGNED = (8, 4)  # columns: 16 bytes of bfloat16, or of float32
UNEVEN = 1.125  # times an even share that a rank may get for it


@dataclass
class FoundRegion:
    """Sites that are split together.

    Attributes:
        rows, cols: site -> the input (output) columns of its Parameter that each rank holds, int64, ascending.
        enters: whole sites whose output reaches the rows directly -> which of its columns (bool).
        units: how many units each rank is dealt.
    """

    rows: dict[SiteKey, list[Tensor]]
    cols: dict[SiteKey, list[Tensor]]
    enters: dict[SiteKey, Tensor]
    units: tuple[int, ...]
    notes: list[str] = field(default_factory=list)

    @property
    def sites(self) -> set[SiteKey]:
        return set(self.rows) | set(self.cols)


class Refusal(Exception):
    """Why no region could be made around a row site: `reason`, one line of evidence, and the `sites` that it would have had."""

    def __init__(self, seed: SiteKey, reason: str, evidence: str, sites: Sequence[SiteKey] = ()) -> None:
        super().__init__(f"{reason}: {evidence}")
        self.seed, self.reason, self.evidence, self.sites = seed, reason, evidence, (seed, *sites)


def find_region(tables: Tables, seed: SiteKey, tp_size: int, taken: set[SiteKey], blocked: set[SiteKey]) -> FoundRegion:
    """The region around row site `seed` over `tp_size` ranks.

    Args:
        taken: sites that have a role already; blocked: sites that may be no row (the output embedding).

    Raises:
        Refusal: there is none.
    """
    rows, whole = [seed], set(taken)
    cols = _close(tables, rows, whole, taken | blocked, tp_size)
    if not cols:
        culprits = sorted(tables.reach(seed), key=lambda k: -int(tables.reach(seed)[k].sum()))[:3]
        raise Refusal(seed, "dense", f"every column depends on all of {', '.join(k[0] for k in culprits) or 'nothing'}")
    found = _look(tables, seed, rows, cols, tp_size)
    for key in dict.fromkeys(k for row in rows for k in tables.reach(row) if k not in cols):
        masks = [tables.reach(row)[key] for row in rows if key in tables.reach(row)]
        found.enters[key] = torch.stack(masks).any(0)
    return found


def _look(tables: Tables, seed: SiteKey, rows: list[SiteKey], cols: list[SiteKey], tp_size: int) -> FoundRegion:
    """The region dealt at the coarsest look at its columns that deals evenly; copies only where no look does without.

    Raises:
        Refusal: it can't be dealt.
    """
    first = {row: tables.first_block(row, tp_size) for row in rows}
    close = {row: tables.block_size(row) for row in rows}
    closer, closest = ({row: max(1, size // by) for row, size in close.items()} for by in (4, 64))
    best: FoundRegion | None = None
    for copies, looks in ((False, (first, close, closer)), (True, (close, closer, closest))):
        for block in looks:
            found = _deal(tables, seed, rows, cols, tp_size, block, copies)
            if isinstance(found, FoundRegion):
                best = found
                if len(set(found.units)) == 1:
                    return found
            elif found.reason == "dead columns":
                raise found
            if all(size == 1 for size in block.values()):
                break
        if best is not None:
            return best
    assert isinstance(found, Refusal)
    raise found


def _close(tables: Tables, rows: list[SiteKey], whole: set[SiteKey], no_row: set[SiteKey], tp_size: int) -> list[SiteKey]:
    """The column sites of the region of `rows`, to which rows that must join are added; `whole` gains what must not be split."""
    while True:
        before = (len(rows), len(whole))
        cols = list(dict.fromkeys(k for row in rows for k in tables.reach(row) if k not in whole))
        for col in cols:
            site = tables.sites[col]
            if col in rows or col in tables.outputs or not site.readable or col[0] in {row[0] for row in rows}:
                whole.add(col)
                continue
            for consumer in tables.consumers[col]:
                if consumer in no_row or not _splits(tables, consumer, col, tp_size):
                    whole.add(col)
                    break
            else:
                rows += [c for c in tables.consumers[col] if c not in rows]
        if before == (len(rows), len(whole)):
            return [col for col in cols if col not in whole]


def _splits(tables: Tables, row: SiteKey, col: SiteKey, tp_size: int) -> bool:
    """Whether the columns of `col` that reach `row` fall into parts that feed different columns of it."""
    if not tables.is_structured(row):
        return False
    return any(_falls_apart(tables, row, col, block) for block in (tables.first_block(row, tp_size), tables.block_size(row)))


def _falls_apart(tables: Tables, row: SiteKey, col: SiteKey, block: int) -> bool:
    patterns = _patterns(tables.table(row, block)[col])
    if len(_components(patterns)) > 1:
        return True
    return any(len(_components(group)) > 1 for group in _classes(patterns).values())


# -- units --------------------------------------------------------------------------------------------------------------


def _patterns(table: Tensor) -> dict[int, int]:
    """Distinct supports of the columns of a bool `[blocks, columns]` table as bit sets -> number of columns with each."""
    packed = np.packbits(table.numpy(), axis=0, bitorder="little")
    unique, counts = np.unique(packed, axis=1, return_counts=True)
    found = {int.from_bytes(unique[:, i].tobytes(), "little"): int(counts[i]) for i in range(unique.shape[1])}
    found.pop(0, None)
    return found


def _classes(patterns: dict[int, int]) -> dict[int, list[int]]:
    """Patterns grouped so that within a group they are disjoint and of one size: q, k and v of a packed projection."""
    classes: list[tuple[int, int, list[int]]] = []  # size, union, members
    for pattern in sorted(patterns, key=lambda p: (p.bit_count(), p & -p)):
        for i, (size, union, members) in enumerate(classes):
            if size == pattern.bit_count() and not union & pattern:
                classes[i] = (size, union | pattern, [*members, pattern])
                break
        else:
            classes.append((pattern.bit_count(), pattern, [pattern]))
    return {i: members for i, (_, _, members) in enumerate(classes)}


def _components(patterns: dict[int, int] | list[int], nodes: int = 0) -> list[int]:
    """Connected components of bits linked by sharing a pattern, as bit sets in order of first bit; `nodes` are bits to cover."""
    parent: dict[int, int] = {}

    def find(bit: int) -> int:
        while parent[bit] != bit:
            parent[bit] = parent[parent[bit]]
            bit = parent[bit]
        return bit

    for pattern in [*patterns, *(1 << b for b in _bits(nodes))]:
        bits = _bits(pattern)
        for bit in bits:
            parent.setdefault(bit, bit)
        for bit in bits[1:]:
            parent[find(bit)] = find(bits[0])
    groups: dict[int, int] = defaultdict(int)
    for bit in parent:
        groups[find(bit)] |= 1 << bit
    return sorted(groups.values(), key=lambda mask: mask & -mask)


def _bits(mask: int) -> list[int]:
    return np.flatnonzero(
        np.unpackbits(np.frombuffer(mask.to_bytes((mask.bit_length() + 7) // 8, "little"), np.uint8), bitorder="little")
    ).tolist()


def _deal(
    tables: Tables, seed: SiteKey, rows: list[SiteKey], cols: list[SiteKey], tp_size: int, block: dict[SiteKey, int], copies: bool
) -> FoundRegion | Refusal:
    """The region with its units dealt to the ranks, or why that can't be done at this block size (with `copies` or without)."""
    counts = [-(-tables.sites[row].in_size // block[row]) for row in rows]
    starts = np.concatenate([[0], np.cumsum(counts)]).tolist()
    joined = {col: _join(tables, rows, col, counts, block) for col in cols}
    patterns = {col: _patterns(table) for col, table in joined.items()}
    for col, table in joined.items():
        dead = int((~table.any(0)).sum())
        if dead:
            return Refusal(seed, "dead columns", f"{dead} of {table.shape[1]} output columns of {col[0]} reach nothing")
    every = (1 << starts[-1]) - 1
    groups = _components([p for found in patterns.values() for p in found], every)
    units, left_out = groups, ()
    few = partial(Refusal, seed, TOO_FEW, sites=[*rows, *cols])
    if len(groups) < tp_size and copies:
        units, left_out = _split_groups(patterns, every, tp_size)
    if len(units) < tp_size:
        names = ", ".join(dict.fromkeys(fold_name(row[0]) for row in rows))  # one line for layers alike
        return few(f"{max(len(units), len(groups))} unit(s) of {names} < {tp_size} ranks")
    dealt = deal_components(units, groups, tp_size, _call_blocks(tables, rows, starts, block))
    held = [_mask(sum_bits(units, mine), starts[-1]) for mine in dealt]
    found = FoundRegion({}, {}, {}, tuple(len(mine) for mine in dealt))
    for i, row in enumerate(rows):
        width = tables.sites[row].in_size
        spread = [mask[starts[i] : starts[i + 1]].repeat_interleave(block[row])[:width] for mask in held]
        if not all(bool(mask.any()) for mask in spread):
            return few(f"{len(units)} dealt to {tp_size} ranks leave some rank without a column of {fold_name(row[0])}")
        found.rows[row] = [mask.nonzero().flatten() for mask in spread]
    for col, table in joined.items():
        found.cols[col] = [table[mask].any(0).nonzero().flatten() for mask in held]
        if not all(len(own) for own in found.cols[col]):  # an empty layer would take no part in the ranks' collectives
            return few(f"{len(units)} dealt to {tp_size} ranks leave some rank without a column of {fold_name(col[0])}")
    if left_out:
        found.notes.append(f"{len(left_out)} class(es) of columns are held by several ranks")
    return found


def _join(tables: Tables, rows: list[SiteKey], col: SiteKey, counts: list[int], block: dict[SiteKey, int]) -> Tensor:
    """The tables of `col` in all `rows`, one below the other."""
    width = tables.sites[col].out_size
    parts = []
    for row, count in zip(rows, counts, strict=True):
        own = tables.table(row, block[row]) if col in tables.reach(row) else {}
        parts.append(own.get(col, torch.zeros(count, width, dtype=torch.bool)))
    return torch.cat(parts)


def _split_groups(patterns: dict[SiteKey, dict[int, int]], every: int, tp_size: int) -> tuple[list[int], tuple[int, ...]]:
    """Units after leaving out of the graph the fewest columns that give enough of them: several ranks then hold those."""
    classes = [(sum(found[p] for p in members), members) for found in patterns.values() for members in _classes(found).values()]
    if len(classes) > MAX_CLASSES:
        return [], ()
    options = [combo for size in range(1, len(classes)) for combo in combinations(range(len(classes)), size)]
    for combo in sorted(options, key=lambda c: sum(classes[i][0] for i in c)):
        units = _components([p for i, (_, members) in enumerate(classes) if i not in combo for p in members], every)
        if len(units) >= tp_size:
            return units, combo
    return [], ()


def _call_blocks(tables: Tables, rows: list[SiteKey], starts: list[int], block: dict[SiteKey, int]) -> list[int]:
    """Bit sets of the columns that single calls of a row site use, where no call uses all: experts kept in one Parameter."""
    found: dict[int, None] = {}
    for i, row in enumerate(rows):
        for record in tables.records:
            for call in record.sites[row].calls if row in record.sites else []:
                width = 1
                for axis in call.x_axes:
                    width *= call.x.shape[axis]
                if width < tables.sites[row].in_size:
                    first = starts[i] + call.x_start // block[row]
                    last = starts[i] + -(-(call.x_start + width) // block[row])
                    found[(1 << last) - (1 << first)] = None
    return list(found)


def deal_components(units: list[int], groups: list[int], tp_size: int, blocks: list[int] | None = None) -> list[list[int]]:
    """Which units (by number) each rank gets.

    Units with the same number of bits are dealt out in contiguous runs. Where units share columns (query heads of one kv
    head), whole groups are dealt if there are enough; otherwise ranks are dealt to the groups, and units within them, so
    that no rank spans two. What lies in one of `blocks` is dealt by itself.
    """
    ranks: list[list[int]] = [[] for _ in range(tp_size)]
    of_group = {}
    for g, group in enumerate(groups):
        for u, unit in enumerate(units):
            if unit & group == unit:
                of_group.setdefault(g, []).append(u)
    if len(groups) >= tp_size:
        kinds: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for g, group in enumerate(groups):
            home = next((i for i, b in enumerate(blocks or []) if group & b == group), -1)
            kinds[group.bit_count(), len(of_group[g]), home].append(g)
        for members in kinds.values():
            start = 0
            single = all(groups[g].bit_count() == 1 for g in members)
            for rank, count in enumerate(deal_aligned(len(members), tp_size) if single else deal_units(len(members), tp_size)):
                ranks[rank] += [u for g in members[start : start + count] for u in of_group[g]]
                start += count
        return [sorted(mine) for mine in ranks]
    shares = deal_units(tp_size, len(groups))
    rank = 0
    for g, share in enumerate(shares):
        start = 0
        for count in deal_units(len(of_group[g]), share):
            ranks[rank] = of_group[g][start : start + count]
            start += count
            rank += 1
    return ranks


def deal_aligned(units: int, tp_size: int) -> tuple[int, ...]:
    """As `deal_units`, in multiples of a number that the whole is one of, where no rank gets much more by that: kernels want
    rows of so many bytes."""
    for step in ALIGNED:
        dealt = tuple(step * count for count in deal_units(units // step, tp_size))
        if units % step == 0 and dealt[-1] and dealt[0] * tp_size <= units * UNEVEN:
            return dealt
    return deal_units(units, tp_size)


def sum_bits(units: list[int], chosen: list[int]) -> int:
    """The union of the chosen units."""
    mask = 0
    for u in chosen:
        mask |= units[u]
    return mask


def _mask(bits: int, size: int) -> Tensor:
    mask = torch.zeros(size, dtype=torch.bool)
    mask[_bits(bits)] = True
    return mask
