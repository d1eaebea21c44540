"""Arguments that several layers of a region read, and nothing else: they enter sharded computation once, where they come in."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .record import Call, ModuleCall, Record, SiteKey
from .regions import FoundRegion
from .tables import Tables


def find_shared_arguments(tables: Tables, region: FoundRegion, scope: str, keys: Sequence[SiteKey]) -> dict[str, set[SiteKey]]:
    """Argument of module `scope` -> those of the column sites `keys`, at least two, that read it as it is in every call.

    An argument is left out where something reads it that is no column of the region, or reads it in another form.
    """
    given: dict[str, list[Tensor]] = {}
    unfit: set[str] = set()
    for record in tables.records:
        for module_call in record.module_calls.get(scope, []):
            for name, tensor in module_call.arguments.items():
                given.setdefault(name, []).append(tensor)
                if not tensor.requires_grad or _goes_on(tables, region, scope, record, module_call, tensor):
                    unfit.add(name)
    found = {}
    for name, tensors in given.items():
        ids = {id(tensor) for tensor in tensors}
        readers = {key for key in keys if all(id(c.x) in ids for record in tables.records for c in _calls(record, key, scope))}
        if len(readers) > 1 and name not in unfit:
            found[name] = readers
    return found


def _calls(record: Record, key: SiteKey, scope: str) -> list[Call]:
    calls = record.sites[key].calls if key in record.sites else []
    return [call for call in calls if not scope or scope in call.modules]


def _goes_on(tables: Tables, region: FoundRegion, scope: str, record: Record, call: ModuleCall, tensor: Tensor) -> bool:
    """Whether the module's outputs, a site that is no column of the region or one that reads another form depend on `tensor`."""
    targets = [value for value in call.outputs if value.is_floating_point()]
    for key in record.sites:
        own = key in region.cols
        targets += [c.x for c in _calls(record, key, scope) if c.x.is_floating_point() and not (own and c.x is tensor)]
    (grad,) = tables.pull(record, targets, [tables.random_like(t) for t in targets], [tensor])
    return grad is not None and bool(grad.ne(0).any())
