"""Chooses, among all regions that a model's dependence tables allow, the ones worth splitting, each site in one role."""

from __future__ import annotations

from collections.abc import Sequence

from .describe import fold_name
from .record import Record, SiteKey
from .regions import FoundRegion, Refusal, find_region
from .shadow import Shadow
from .tables import Tables

MOST_FILLED = 2**23  # of weights up to this size numbers are made, so that they can be seen as plain Parameters
WORTH = 0.25  # parameters of a region, at least, for each pair of the numbers that its all-reduces move a token


class Discovery:
    """Regions of one model over `tp_size` ranks.

    Attributes:
        regions: the chosen ones; refused: seed -> why it has none; skipped: regions that are not worth an all-reduce.
    """

    def __init__(
        self, shadow: Shadow, records: Sequence[Record], tp_size: int, blocked: set[str], base: int | None = None
    ) -> None:
        self.tables = Tables(shadow, records, base=base)
        self.tp_size = tp_size
        self.blocked = {key for key in self.tables.sites if key[0] in blocked}
        self.regions: list[FoundRegion] = []
        self.refused: dict[SiteKey, Refusal] = {}
        self.skipped: list[FoundRegion] = []

    def choose(self) -> list[FoundRegion]:
        """Take regions greedily, largest first; each choice may shrink the others. What is not worth it holds no site back."""
        tables = self.tables
        seeds = [k for k, s in tables.sites.items() if s.in_dims and k not in self.blocked and tables.is_structured(k)]
        taken: set[SiteKey] = set()
        for region in self.regions:
            taken |= region.sites
        pending = [s for s in seeds if s not in taken]
        found: dict[SiteKey, FoundRegion] = {}
        while pending:
            for seed in pending:
                if seed not in found or found[seed].sites & taken:
                    found.pop(seed, None)
                    self._try_seed(seed, taken, found)
            pending = [s for s in pending if s in found]
            worthy = [s for s in pending if self.is_worth(found[s])]
            if not worthy:
                self.skipped += [found[s] for s in pending]
                break
            region = found[max(worthy, key=lambda s: self.weigh(found[s]))]
            taken |= region.sites
            self.regions.append(region)
            pending = [s for s in pending if s not in taken]
        return self.regions

    def _try_seed(self, seed: SiteKey, taken: set[SiteKey], found: dict[SiteKey, FoundRegion]) -> None:
        alike = next((f for f in found if class_of(self.tables, f) == class_of(self.tables, seed)), None)
        if alike is not None:
            moved = translate(self.tables, found[alike], alike, seed)
            if moved is not None and not moved.sites & taken:
                found[seed] = moved
                return
        try:
            found[seed] = find_region(self.tables, seed, self.tp_size, taken, self.blocked)
            self.refused.pop(seed, None)
        except Refusal as refusal:
            self.refused[seed] = refusal

    @property
    def split(self) -> int:
        """Number of parameters that the chosen regions split."""
        return sum(map(self.weigh, self.regions))

    def weigh(self, region: FoundRegion) -> int:
        """Number of parameters that the region splits."""
        total = 0
        for key in region.sites:
            size = 1
            for n in self.tables.sites[key].shape:
                size *= n
            total += size
        return total

    def is_worth(self, region: FoundRegion) -> bool:
        """False for a low-rank pair or a gate: too few parameters for the all-reduce that it would cost."""
        moved = sum(self.tables.sites[row].out_size for row in region.rows)
        return self.weigh(region) >= WORTH * moved * moved


def class_of(tables: Tables, key: SiteKey) -> tuple:
    """Sites of one class differ in their layer numbers alone."""
    site = tables.sites[key]
    return fold_name(key[0]), key[1], site.shape


def move_name(name: str, seed: str, other: str) -> str:
    """`name`, which stands to `seed` as the result stands to `other`, a name that differs from `seed` in layer numbers."""
    old, new, parts = seed.split("."), other.split("."), name.split(".")
    for i, (a, b) in enumerate(zip(old, new, strict=True)):
        if a != b and parts[: i + 1] == old[: i + 1]:
            return ".".join([*new[: i + 1], *move_rest(parts[i + 1 :], old[i + 1 :], new[i + 1 :])])
    return name


def move_rest(parts: list[str], old: list[str], new: list[str]) -> list[str]:
    """The same below the first part that differs."""
    for i, (a, b) in enumerate(zip(old, new, strict=True)):
        if parts[i : i + 1] != [a]:
            return parts
        parts = [*parts[:i], b, *parts[i + 1 :]]
    return parts


def translate(tables: Tables, region: FoundRegion, seed: SiteKey, other: SiteKey) -> FoundRegion | None:
    """`region`, found around `seed`, moved to `other`, a site of the same class; None if the sites there connect otherwise."""

    def move(key: SiteKey) -> SiteKey:
        return move_name(key[0], seed[0], other[0]), key[1]

    moved = FoundRegion(
        {move(k): v for k, v in region.rows.items()}, {move(k): v for k, v in region.cols.items()}, {}, region.units, region.notes
    )
    if len(moved.sites) != len(region.sites):
        return None
    for before, after in [(region.rows, moved.rows), (region.cols, moved.cols)]:
        for a, b in zip(before, after, strict=True):
            if b not in tables.sites or tables.sites[b].shape != tables.sites[a].shape:
                return None
    for row in moved.rows:
        if not tables.is_structured(row):
            return None
    for before, after in zip(region.cols, moved.cols, strict=True):
        if {move(c) for c in tables.consumers[before]} != set(tables.consumers[after]) or after in tables.outputs:
            return None
        if any(tables.reach(r).get(after) is None for r in tables.consumers[after]):
            return None
    for row in moved.rows:
        for key, mask in tables.reach(row).items():
            if key not in moved.cols:
                moved.enters[key] = moved.enters[key] | mask if key in moved.enters else mask.clone()
    return moved


def find_shared_maps(tables: Tables) -> set[str]:
    """Weights applied to tensors with an axis more than the residual stream has: one map for all heads, say."""
    sizes: dict[int, int] = {}
    ranks: dict[SiteKey, int] = {}
    for record in tables.records:
        for key, site in record.sites.items():
            for call in site.calls:
                if site.in_dims and call.x_axes == (-1,):
                    ranks[key] = max(ranks.get(key, 0), sum(n > 1 for n in call.x.shape))
    for key, rank in ranks.items():
        sizes[rank] = sizes.get(rank, 0) + tables.sites[key].in_size * tables.sites[key].out_size
    if not sizes:
        return set()
    residual = max(sizes, key=lambda rank: sizes[rank])
    return {key[0] for key, rank in ranks.items() if rank > residual and is_fillable(tables, key)}


def find_grouped_maps(tables: Tables) -> set[str]:
    """Weights that are many maps, each of a part of the input: one a head, or one an expert."""
    return {key[0] for key, site in tables.sites.items() if site.grouped and is_fillable(tables, key)}


def is_fillable(tables: Tables, key: SiteKey) -> bool:
    """Whether numbers can be made for a site's Parameter, which then is seen as any other."""
    return tables.shadow.parameters[key[0]].numel() <= MOST_FILLED
