"""Turns found regions into what each module becomes: which slices it holds, where activations enter and where sums leave.

One pass per rank over the cut graph says which part of every other tensor a rank's columns use: Parameters and buffers
inside the region's scope are sliced or their gradient is summed, arguments of the scope's module enter, and are sliced.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..errors import PlanError
from ..layers.base import held_parameters
from ..layers.conv import local_groups
from ..shard import Shard
from .indices import merge_inputs, single_runs
from .module_plan import InputPlan, ModulePlan, NormPlan
from .plan import Region
from .record import Call, SiteKey
from .region_placement import RegionPlacement
from .regions import FoundRegion
from .tables import Tables

LINEARS = (nn.Linear, Conv1D, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass
class Facets:
    """A ModulePlan being put together."""

    style: str = "local_params"
    shards: dict[str, Shard] = field(default_factory=dict)
    siblings: str | None = None
    summed: set[str] = field(default_factory=set)
    copied: set[str] = field(default_factory=set)
    once: set[str] = field(default_factory=set)
    columns: Tensor | None = None
    inputs: dict[str, InputPlan] = field(default_factory=dict)
    outputs: set[int] = field(default_factory=set)
    attrs: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def join(self, other: Facets, name: str) -> None:
        """Add what another region says of the module `name`.

        Raises:
            PlanError: the two need different slices of one tensor.
        """
        self.style = self.style if other.style == "local_params" else other.style
        self.siblings = other.siblings or self.siblings
        for leaf, shard in other.shards.items():
            if self.shards.setdefault(leaf, shard) != shard:
                raise PlanError(f"{name}.{leaf} would be cut in two ways")
        for mine, theirs in (
            (self.summed, other.summed),
            (self.copied, other.copied),
            (self.once, other.once),
            (self.outputs, other.outputs),
        ):
            mine |= theirs  # type: ignore[operator]
        self.once -= set(self.shards)
        if other.columns is not None:
            self.columns = other.columns if self.columns is None else self.columns | other.columns
        for key, values in other.attrs.items():
            if self.attrs.setdefault(key, values) != values:
                raise PlanError(f"{name}.{key} would be edited in two ways")
        for argument, plan in other.inputs.items():
            merged = merge_inputs(self.inputs.get(argument, plan), plan)
            if merged is None:
                raise PlanError(f"{name}: argument {argument} would enter in two ways")
            self.inputs[argument] = merged


class Placement:
    """Module plans of a list of regions over one model's tables."""

    def __init__(self, tables: Tables, tp_size: int, norms: Mapping[str, NormPlan] | None = None) -> None:
        self.tables, self.tp_size, self.norms = tables, tp_size, norms or {}
        self.modules = dict(tables.shadow.model.named_modules())
        self.parameters = tables.shadow.parameters
        self.attention = {name for name, module in self.modules.items() if isinstance(module, nn.MultiheadAttention)}
        self.called = {name for record in tables.records for name in record.module_calls}
        self.site_parameters = {key[0] for key in tables.sites}
        self.names: dict[int, list[str]] = defaultdict(list)  # id of a Parameter -> its names
        for name, parameter in held_parameters(tables.shadow.model):
            self.names[id(parameter)].append(name)
        self.placed: dict[int, tuple[FoundRegion, dict[str, Facets]]] = {}

    def place(self, regions: Sequence[FoundRegion]) -> tuple[dict[str, ModulePlan], tuple[Region, ...]]:
        """Plans by module name, and the regions as a plan lists them.

        Raises:
            PlanError: a region that no plan can express, or two regions that need different slices of one tensor.
        """
        facets: dict[str, Facets] = defaultdict(Facets)
        listed = []
        for region in regions:
            if id(region) not in self.placed:
                own: dict[str, Facets] = defaultdict(Facets)
                RegionPlacement(self, region, own, f"region{len(self.placed)}").place()
                self.placed[id(region)] = region, own
            for name, found in self.placed[id(region)][1].items():
                facets[name].join(found, name)
            listed.append(self._list(region))
        self._lift(facets)
        return {name: self._finish(name, f) for name, f in facets.items()}, tuple(listed)

    def _lift(self, facets: dict[str, Facets]) -> None:
        """Parameters of a module that is never called are read by one around it: what happens there is said of that one."""
        for name in list(facets):
            f = facets[name]
            copies = {leaf for leaf, shard in f.shards.items() if leaf in self.modules[name]._parameters and shard.has_copies}
            if name in self.called or not (copies or f.summed or f.once) or f.style != "local_params":
                continue
            reader = name
            while reader and reader not in self.called:
                reader = reader.rpartition(".")[0]
            below = name[len(reader) + 1 if reader else 0 :]
            facets[reader].copied |= {f"{below}.{leaf}" for leaf in copies}
            facets[reader].summed |= {f"{below}.{leaf}" for leaf in f.summed}
            facets[reader].once |= {f"{below}.{leaf}" for leaf in f.once}
            f.summed, f.once = set(), set()

    def _finish(self, name: str, f: Facets) -> ModulePlan:
        ranges = () if f.columns is None else tuple((s, s + n) for s, n, _, _ in single_runs(f.columns))
        style = f.style
        if style == "local_params" and ranges:
            style = "mla_kv_a_proj"
        elif style == "local_params" and not f.shards and f.summed:
            style = "replicated_with_grad_allreduce"
        return ModulePlan(
            name,
            style,
            f.shards,
            siblings=f.siblings,
            summed=tuple(sorted(f.summed - f.once)),
            once=tuple(sorted(f.once)),
            copied=tuple(sorted(f.copied)),
            columns=ranges,
            inputs=tuple(f.inputs.values()),
            outputs=tuple(sorted(f.outputs)),
            source="discovered",
            norm=self.norms.get(name) if f.shards else None,
            attrs={**local_groups(self.modules[name], f.shards.get("weight")), **f.attrs},
        )

    def _list(self, region: FoundRegion) -> Region:
        def names(keys: Iterable[SiteKey]) -> tuple[str, ...]:
            owners = (owner for key in keys for owner, _ in self.holders(key[0]))
            scope = self.scope(region)
            return tuple(
                dict.fromkeys(scope if owner == f"{scope}.out_proj" and scope in self.attention else owner for owner in owners)
            )

        enters = tuple((owner, 0, int(m.sum())) for k, m in region.enters.items() for owner, _ in self.holders(k[0]))
        cols, rows = names(region.cols), names(region.rows)
        return Region(self.scope(region), cols, rows, tuple((c, "input") for c in cols), rows, region.units, enters)

    def calls(self, keys: Iterable[SiteKey]) -> list[Call]:
        """Every call of the sites, in all records."""
        return [c for record in self.tables.records for key in keys if key in record.sites for c in record.sites[key].calls]

    def is_layer(self, key: SiteKey) -> bool:
        """Whether the site is the weight of a linear, a convolution or an embedding that is called itself, as it is."""
        if self.tables.sites[key].sources:
            return False
        owners = dict(self.holders(key[0]))
        called = all(call.modules[-1] in owners for call in self.calls([key]))
        return called and all(leaf == "weight" and builds_on_plain(self.modules[owner]) for owner, leaf in owners.items())

    def holders(self, name: str) -> list[tuple[str, str]]:
        """`(module, attribute)` of every module that holds a Parameter: several where it is tied. Of a buffer, its own."""
        parameter = self.parameters.get(name)
        names = [name] if parameter is None else self.names[id(parameter)]
        return [(full.rpartition(".")[0], full.rpartition(".")[2]) for full in names]

    def scope(self, region: FoundRegion) -> str:
        """The innermost module inside whose forward all of the region's sites are called."""
        stacks = [self._stack(call) for call in self.calls(region.sites)]
        first = stacks[0]
        depth = 0
        while depth < min(map(len, stacks)) and all(stack[depth] == first[depth] for stack in stacks):
            depth += 1
        return first[depth - 1] if depth else ""

    def _stack(self, call: Call) -> tuple[str, ...]:
        last = self.modules[call.modules[-1]]
        return call.modules[:-1] if isinstance(last, (*LINEARS, nn.Embedding)) and len(call.modules) > 1 else call.modules


def builds_on_plain(module: nn.Module) -> bool:
    """Whether a module is a linear, convolution or embedding whose forward is the plain one or builds on it."""
    plain = next((base for base in type(module).__mro__ if base in (*LINEARS, nn.Embedding)), None)
    if plain is None:
        return False
    forward = type(module).forward
    return forward is plain.forward or "super" in forward.__code__.co_names
