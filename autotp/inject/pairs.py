"""Pairs columns with rows: which linears form a region, and how many units of it each rank is dealt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from ..errors import PlanError
from ..layers.linear import layer_class
from ..layers.overlap import OPTIONS
from ..shard import Shard, deal_units
from . import styles
from .module_plan import ModulePlan
from .plan import Region


@dataclass
class Pair:
    """A region being put together: everything planned below `scope` that belongs to one column -> row pair."""

    scope: str
    columns: list[str]
    rows: list[str]

    def holds(self, owner: str) -> bool:
        """Whether the module `owner` is the scope or below it."""
        return not self.scope or owner == self.scope or owner.startswith(self.scope + ".")


def pair_regions(
    model: nn.Module, tp_size: int, specs: Mapping[str, dict[str, Any]], reasons: dict[str, str], source: str
) -> tuple[dict[str, ModulePlan], tuple[Region, ...]]:
    """Plans of all linears and of what belongs to their regions; what is left whole gets a line in `reasons`.

    Raises:
        PlanError: half a pair, a style on the wrong kind of module, or too few units for the ranks.
    """
    modules = dict(model.named_modules())
    live = {name: spec for name, spec in specs.items() if name not in reasons}
    linears = {
        name: spec for name, spec in live.items() if name in modules and spec["style"] in styles.COLUMN_STYLES + styles.ROW_STYLES
    }
    for name, spec in linears.items():
        layer_class(modules[name], spec["style"] in styles.ROW_STYLES)
    found: dict[str, ModulePlan] = {}
    for name, spec in linears.items():
        if spec["style"] in styles.GATHERING_STYLES + styles.SPLITTING_STYLES:
            found[name] = _deal_alone(modules[name], name, spec, tp_size)
    regions = []
    for pair in find_pairs([name for name in linears if name not in found], linears):
        dealt = deal_region(modules, pair, live, tp_size)
        for name in pair.columns + pair.rows:
            found[name] = _deal_linear(modules[name], name, linears[name], dealt, pair)
        regions.append(_finish_region(model, modules, pair, dealt, live, found))
    for name, spec in live.items():
        owner = name if name in modules else name.rpartition(".")[0]
        if name not in found and owner not in found and spec["style"] != "local_params":
            reasons[name] = "belongs to no split region"
    return {name: replace(plan, source=source) for name, plan in found.items()}, tuple(regions)


def find_pairs(names: list[str], specs: Mapping[str, dict[str, Any]]) -> list[Pair]:
    """The smallest modules below which columns and rows meet, innermost first.

    Raises:
        PlanError: columns without a row, or a row without columns.
    """
    open_names = dict.fromkeys(names)
    scopes = {".".join(parts[:i]) for parts in (name.split(".") for name in names) for i in range(len(parts))}
    pairs = []
    for scope in sorted(scopes, key=lambda s: -(s.count(".") + bool(s))):
        inside = [name for name in open_names if not scope or name.startswith(scope + ".")]
        rows = [name for name in inside if specs[name]["style"] in styles.ROW_STYLES]
        columns = [name for name in inside if specs[name]["style"] in styles.COLUMN_STYLES]
        if rows and columns:
            pairs.append(Pair(scope, columns, rows))
            for name in inside:
                del open_names[name]
    if open_names:
        first = next(iter(open_names))
        row = specs[first]["style"] in styles.ROW_STYLES
        raise PlanError(
            f"half a pair: {len(open_names)} linear(s) planned {'rowwise' if row else 'colwise'} have no partner that is "
            f"{'colwise' if row else 'rowwise'}, first {first}. Plan both, or use "
            f"{'rowwise_split_input' if row else 'colwise_gather_output'} for one that stands alone."
        )
    return sorted(pairs, key=lambda pair: names.index(pair.columns[0]))


def deal_region(
    modules: Mapping[str, nn.Module], pair: Pair, specs: Mapping[str, dict[str, Any]], tp_size: int
) -> tuple[int, ...]:
    """Units of the region on each rank. A unit is what no rank may share: a kv group of heads, or one neuron.

    Raises:
        PlanError: fewer units than ranks, or a width that is no multiple of its unit.
    """
    head = find_head_size(modules, pair)
    widths = {name: width_of(modules[name], specs[name]) for name in pair.columns + pair.rows}
    parts = [(name, part) for name, width in widths.items() for part in part_sizes(name, specs[name], width)]
    if head and any(part % (specs[name].get("unit") or head) for name, part in parts):
        head = None  # several head sizes (MLA): only an even cut is sure to fall between heads
    known = head is not None or len({part for _, part in parts}) == 1
    counts = []
    for name, part in parts:
        unit = specs[name].get("unit") or head or 1
        if part % unit:
            raise PlanError(f"{name}: {part} columns are no multiple of the unit of {unit}: pass unit= that divides it")
        counts.append(part // unit)
    counts += [_raw_parameter(modules, name).shape[dim] for name, dim in find_raw_parameters(modules, pair, specs)]
    units = gcd(*counts)
    if units < tp_size or (units % tp_size and not known and not all(specs[name].get("unit") for name in widths)):
        listed = ", ".join(f"{name.rpartition('.')[2]} {width}" for name, width in widths.items())
        what = f"heads of {head}" if head else "columns"
        raise PlanError(
            f"{pair.scope}: {units} unit(s) of {listed} ({what}) can't be dealt to {tp_size} ranks. Use a "
            f"number of ranks that fits (at most {units}), or leave it whole: plan its linears 'whole'."
        )
    return deal_units(units, tp_size)


def find_head_size(modules: Mapping[str, nn.Module], pair: Pair) -> int | None:
    """Columns of one attention head, where the module that holds the pair knows it and every width is a multiple."""
    owners = {pair.scope, *(name.rpartition(".")[0] for name in pair.columns)}
    for owner in sorted(owners):
        for key in ("head_dim", "head_size", "attention_head_size", "per_head_dim"):
            size = getattr(modules[owner], key, None)
            if isinstance(size, int) and size > 0:
                return size
    return None


def find_raw_parameters(
    modules: Mapping[str, nn.Module], pair: Pair, specs: Mapping[str, dict[str, Any]]
) -> list[tuple[str, int]]:
    """`(name, dim)` of Parameters in the pair's scope that are planned by themselves (attention sinks): one entry a head."""
    names = [name for name, spec in specs.items() if name not in modules and spec["style"] in styles.COLUMN_STYLES]
    inside = [name for name in names if pair.holds(name.rpartition(".")[0])]
    return [(name, max(_raw_parameter(modules, name).ndim - 2, 0)) for name in inside]


def _raw_parameter(modules: Mapping[str, nn.Module], name: str) -> nn.Parameter:
    owner, _, leaf = name.rpartition(".")
    return modules[owner].get_parameter(leaf)


def width_of(module: Any, spec: Mapping[str, Any]) -> int:
    """Outputs of a column linear, inputs of a row linear."""
    shape = module.weight.shape
    row = spec["style"] in styles.ROW_STYLES
    return shape[1] if row != isinstance(module, Conv1D) else shape[0]


def part_sizes(name: str, spec: Mapping[str, Any], width: int) -> tuple[int, ...]:
    """Sizes of the packed parts, in order.

    Raises:
        PlanError: they do not add up to the width.
    """
    parts = spec.get("parts") or (2 if spec["style"].startswith("packed") else 1)
    sizes = (width // parts,) * parts if isinstance(parts, int) else tuple(parts)
    if sum(sizes) != width:
        raise PlanError(f"{name}: parts {parts} do not add up to its {width} columns: pass the parts' sizes in order")
    return sizes


def _deal_linear(module: Any, name: str, spec: Mapping[str, Any], dealt: tuple[int, ...], pair: Pair) -> ModulePlan:
    row = spec["style"] in styles.ROW_STYLES
    layer = layer_class(module, row)
    width = width_of(module, spec)
    parts = part_sizes(name, spec, width)
    weight = Shard.dealt(module.weight.shape, layer.cut_dim, dealt, parts)
    shards = {"weight": weight} if row else layer.shards_of(weight, module.bias is not None)
    siblings = None if row else pair.scope or ":root"  # an empty name would read as no group
    return ModulePlan(
        name,
        spec["style"],
        shards,
        unit=parts[0] // sum(dealt),
        parts=parts if len(parts) > 1 else None,
        siblings=siblings,
        reduce_dtype=spec.get("reduce_dtype"),
        overlap=read_options(spec),
    )


def _deal_alone(module: Any, name: str, spec: Mapping[str, Any], tp_size: int) -> ModulePlan:
    """A linear whose output is gathered, or whose input is whole: any cut will do."""
    width = width_of(module, spec)
    if width < tp_size:
        raise PlanError(f"{name}: {width} columns can't be dealt to {tp_size} ranks: plan it 'whole'")
    row = spec["style"] in styles.ROW_STYLES
    layer = layer_class(module, row)
    weight = Shard.even(module.weight.shape, layer.cut_dim, tp_size)
    shards = {"weight": weight} if row else layer.shards_of(weight, module.bias is not None)
    siblings = None if row else name.rpartition(".")[0] + ":gathered"
    dtype, overlap = spec.get("reduce_dtype"), read_options(spec)
    return ModulePlan(name, spec["style"], shards, siblings=siblings, reduce_dtype=dtype, overlap=overlap)


def read_options(spec: Mapping[str, Any]) -> dict[str, Any]:
    """What a caller's entry says of overlap, see layers/overlap.py."""
    return {key: spec[key] for key in OPTIONS if key in spec}


def _finish_region(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    pair: Pair,
    dealt: tuple[int, ...],
    specs: Mapping[str, dict[str, Any]],
    found: dict[str, ModulePlan],
) -> Region:
    """The region, and the plans of what else lives in its scope: summed parameters, entering columns, raw parameters."""
    enters = []
    for name, spec in specs.items():
        if name not in modules or name in found or not pair.holds(name):
            continue
        if spec["style"] in styles.SUM_STYLES:
            summed = tuple(key for key, _ in modules[name].named_parameters(recurse=False))
            found[name] = ModulePlan(name, spec["style"], summed=summed)
        elif spec["style"] == "mla_kv_a_proj":
            columns = _entering_columns(model, modules[name], name)
            found[name] = ModulePlan(name, spec["style"], columns=(columns,))
            enters.append((name, *columns))
    for name, dim in find_raw_parameters(modules, pair, specs):
        owner, _, leaf = name.rpartition(".")
        if owner not in found:
            found[owner] = ModulePlan(owner, "local_params")
        found[owner].shards[leaf] = Shard.dealt(_raw_parameter(modules, name).shape, dim, dealt)
    entry = tuple((name, "input") for name in pair.columns)
    return Region(pair.scope, tuple(pair.columns), tuple(pair.rows), entry, tuple(pair.rows), dealt, tuple(enters))


def _entering_columns(model: nn.Module, module: Any, name: str) -> tuple[int, int]:
    config = getattr(model, "config", None)
    rope = getattr(config.get_text_config() if config is not None else None, "qk_rope_head_dim", None)
    if not isinstance(rope, int) or type(module) is not nn.Linear:
        raise PlanError(
            f"{name}: style mla_kv_a_proj needs an nn.Linear and a config with qk_rope_head_dim: plan the attention 'whole'"
        )
    return module.out_features - rope, module.out_features
