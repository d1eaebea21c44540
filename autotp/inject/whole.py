"""Why a Parameter that no refusal names is left whole."""

from __future__ import annotations

from collections.abc import Sequence

from .gathered import splits_alone
from .placement import Placement
from .reference import Reference

UNRUN = "no example call runs it"
LOOKUP = "a lookup table, whose columns no region takes"
SMALL = "no region takes it, and it is too small to gather its output for"
NO_LAYER = "no region takes it, and it is no layer of its own whose output could be gathered"
NO_MAP = "not the weight of a linear map"


def explain_whole(placement: Placement, references: Sequence[Reference]) -> dict[str, str]:
    """Parameter name -> why it is whole, if it is: for all of two dims or more."""
    tables, shadow = placement.tables, placement.tables.shadow
    kinds = {key[0]: key for key in tables.sites}
    found = {}
    for name, parameter in shadow.parameters.items():
        if parameter.ndim < 2:
            continue
        if name in kinds:
            key = kinds[name]
            alone = splits_alone(placement, key)
            found[name] = LOOKUP if tables.sites[key].kind == "embedding" else SMALL if alone else NO_LAYER
        else:
            leaf = shadow.leaf(name)
            run = any(reference.parameter_grads.get(name) is not None for reference in references)
            found[name] = NO_MAP if run or not (leaf.is_meta or leaf.requires_grad) else UNRUN
    return found
