"""Layers that no region takes: each rank computes its own columns of such a layer, and the output is gathered.

That is right for any linear map of a whole input. It costs an all-gather forward and, for all that read one input together,
an all-reduce backward, and saves neither between two layers: a region is always better, and this comes after all of them.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..shard import Shard
from .describe import fold_name
from .discover import class_of
from .module_plan import ModulePlan
from .placement import Placement
from .record import SiteKey

LEAST = 1 / 24  # what layers that read one input must hold of all parameters to be worth it, alike layers counted in


def plan_gathered(
    placement: Placement,
    planned: Mapping[str, ModulePlan],
    blocked: set[str],
    sizes: Mapping[str, int],
    reasons: Mapping[str, str],
) -> list[dict[str, ModulePlan]]:
    """Plans of the layers that `planned` leaves whole, one dict for each class of those that are worth it, largest first.

    Args:
        blocked: names of Parameters that follow rules of their own.
        sizes: number of parameters of the whole model by folded name (layer numbers as "*").
        reasons: why no region takes a Parameter, where that is known.
    """
    found: dict[tuple[int, ...], list[SiteKey]] = {}  # the tensors that they read -> the layers
    for key, site in placement.tables.sites.items():
        owner = key[0].rpartition(".")[0]
        if owner not in planned and key[0] not in blocked and site.kind != "embedding" and splits_alone(placement, key):
            found.setdefault(tuple(sorted(id(call.x) for call in placement.calls([key]))), []).append(key)
    classes: dict[tuple, dict[str, ModulePlan]] = {}
    weights: dict[tuple, int] = {}
    for keys in found.values():
        together = sum(sizes.get(name, 0) for name in {fold_name(key[0]) for key in keys})
        if together < LEAST * sum(sizes.values()):
            continue
        siblings = f"{keys[0][0].rpartition('.')[0]}:gathered"
        for key in keys:
            plan = plan_layer(placement, key, siblings, reasons.get(key[0], ""))
            classes.setdefault(class_of(placement.tables, key), {})[plan.name] = plan
            weights[class_of(placement.tables, key)] = sizes[fold_name(key[0])]
    return [classes[name] for name in sorted(classes, key=lambda name: -weights[name])]


def splits_alone(placement: Placement, key: SiteKey) -> bool:
    """Whether a site is a layer that is called itself, with a weight that is used in this one way, and columns for all ranks."""
    site = placement.tables.sites[key]
    alike = [other for other in placement.tables.sites if other[0] == key[0]]
    names = placement.holders(key[0])
    return (
        site.readable
        and len(site.out_dims) == 1
        and site.out_size >= placement.tp_size
        and alike == [key]
        and len(names) == 1
        and placement.is_layer(key)
    )


def plan_layer(placement: Placement, key: SiteKey, siblings: str, reason: str) -> ModulePlan:
    """The plan of one layer, which enters its input together with the other `siblings`."""
    site, owner = placement.tables.sites[key], key[0].rpartition(".")[0]
    shards = {"weight": Shard.even(site.shape, site.out_dims[0], placement.tp_size)}
    if f"{owner}.bias" in site.biases:
        shards["bias"] = Shard.even((site.out_size,), 0, placement.tp_size)
    why = f"no region takes it: {fold_name(reason)}" if reason else "no region takes it"
    return ModulePlan(owner, "colwise_gather_output", shards, siblings=siblings, source="discovered", why=why)
