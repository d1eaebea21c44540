"""Places one region: what its ranks hold, where activations enter it, and where its sums leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..errors import PlanError
from ..index_runs import compress_indices
from .entering import find_shared_arguments
from .indices import choose_dim, merge_inputs, no_support, project, smallest_period
from .module_plan import InputPlan
from .record import ModuleCall, SiteKey, bind_position, columns
from .region_cuts import RegionCuts
from .regions import FoundRegion

if TYPE_CHECKING:
    from .placement import Facets, Placement


class RegionPlacement(RegionCuts):
    """Places one region."""

    def __init__(self, placement: Placement, region: FoundRegion, facets: dict[str, Facets], name: str) -> None:
        super().__init__(placement, region, facets, name)
        self.entered: set[int] = set()  # ids of tensors whose gradient is summed where they come in as arguments

    def place(self) -> None:
        raw_rows = [key for key in self.region.rows if not self.placement.is_layer(key)]
        raw_cols = [key for key in self.region.cols if not self.placement.is_layer(key)]
        if isinstance(self.placement.modules[self.scope], nn.MultiheadAttention):
            self._deal_attention()
            return
        self.supports = self._pull_supports()
        self._cut_sites()
        self._cut_parameters()
        self._enter_arguments()
        owner = self._reduce_late(raw_rows) if raw_rows else None
        open_cols = [key for key in raw_cols if self.tables.sites[key].kind != "embedding"]  # that reads indices: nothing enters
        if owner is not None:
            open_cols = [key for key in open_cols if not all(owner in call.modules for call in self.placement.calls([key]))]
        shared = self._enter_shared([key for key in open_cols if self.tables.sites[key].sources])
        for key in open_cols:
            if key not in shared:
                self._enter_raw(key)
        self._group_siblings(raw_cols)
        self._enter_whole_sites()

    def _group_siblings(self, raw: Sequence[SiteKey]) -> None:
        """Column layers that read one tensor enter it together; one whose input has entered already does not."""
        groups: dict[tuple[int, ...], str] = {}
        for key in self.region.cols:
            if key in raw or self.tables.sites[key].kind == "embedding":
                continue
            for owner, _ in self.placement.holders(key[0]):
                inputs = tuple(sorted(id(call.x) for call in self.placement.calls([key]) if call.modules[-1] == owner))
                if not all(i in self.entered for i in inputs):
                    name = groups.setdefault(inputs, f"{self.scope or 'model'}:{self.name}.{len(groups)}")
                    self.facets[owner].siblings = name

    # -- arguments ------------------------------------------------------------------------------------------------------

    def _enter_arguments(self) -> None:
        """Arguments of the scope's module that reach the rows past no site: their gradient is summed, their part taken."""
        for record in self.tables.records:
            for call in record.module_calls.get(self.scope, []):
                for name, tensor in call.arguments.items():
                    self._enter_argument(record, call, name, tensor)

    def _enter_argument(self, record, call: ModuleCall, name: str, tensor: Tensor) -> None:
        leaf = call.constants.get(name, tensor)
        if not leaf.requires_grad or self.tables.shadow.find(tensor) in self.placement.site_parameters:
            return
        grads = [self._pull(record, rank, [leaf])[0] for rank in range(self.tp_size)]
        if not any(g is not None and bool(g.ne(0).any()) for g in grads) or self._is_local(record, tensor):
            return
        per_rank = [no_support(leaf) if g is None else project(g) for g in grads]
        sums = self._carries(record, tensor)
        dim = choose_dim(per_rank)
        plan = InputPlan(name, bind_position(self.placement.modules[self.scope], name), sums)
        if dim is not None:
            period = smallest_period([per_rank[rank][dim] for rank in range(self.tp_size)])
            runs = tuple(compress_indices(m[dim][:period].nonzero().flatten().tolist()) for m in per_rank)
            plan = replace(plan, dim=dim - tensor.ndim if dim else 0, period=period, indices=runs)
        if not sums and dim is None:
            return
        inputs = self.facets[self.scope].inputs
        if name in inputs and inputs[name] != plan:
            merged = merge_inputs(inputs[name], plan)
            if merged is None:
                raise PlanError(f"{self.scope}: argument {name} would enter in two ways")
            plan = merged
        inputs[name] = plan
        if sums:
            self.entered.add(id(tensor))

    def _carries(self, record, tensor: Tensor) -> bool:
        """Whether a tensor depends on a site's output, a Parameter or an input of the model: a gradient may go through it."""
        shadow = self.tables.shadow
        if not tensor.requires_grad or shadow.find(tensor) in self.placement.site_parameters:
            return False  # a site's weight that is passed as an argument is cut itself
        leaves = [call.y for site in record.sites.values() for call in site.calls]
        leaves += [leaf for leaf in map(shadow.leaf, shadow.parameters) if leaf.requires_grad and not leaf.is_meta]
        leaves += [leaf for call in record.module_calls.get("", []) for leaf in call.constants.values()]
        grads = self.tables.pull(record, [tensor], [self.tables.random_like(tensor)], leaves)
        return any(g is not None for g in grads)

    def _is_local(self, record, tensor: Tensor) -> bool:
        """Whether a tensor depends on a column site of the region: it holds a rank's columns already."""
        leaves = [call.y for key in self.region.cols if key in record.sites for call in record.sites[key].calls]
        if not tensor.requires_grad:
            return False
        grads = self.tables.pull(record, [tensor], [self.tables.random_like(tensor)], leaves)
        return any(g is not None and bool(g.ne(0).any()) for g in grads)

    # -- sites that are no layers: their module is the border -------------------------------------------------------------

    def _common_module(self, keys: Sequence[SiteKey]) -> str:
        stacks = [call.modules for call in self.placement.calls(keys)]
        depth = 0
        while depth < min(map(len, stacks)) and all(stack[depth] == stacks[0][depth] for stack in stacks):
            depth += 1
        if depth == 0:
            raise PlanError(f"no module holds all of {', '.join(k[0] for k in keys)}")
        return stacks[0][depth - 1]

    def _enter_module(self, owner: str) -> None:
        """Sum the gradients of every argument of `owner` that carries one and is whole."""
        module = self.placement.modules[owner]
        for record in self.tables.records:
            for call in record.module_calls.get(owner, []):
                for name, tensor in call.arguments.items():
                    if not self._carries(record, tensor) or self._is_local(record, tensor):
                        continue
                    plan = InputPlan(name, bind_position(module, name), True)
                    inputs = self.facets[owner].inputs
                    inputs[name] = replace(inputs[name], sums=True) if name in inputs else plan
                    self.entered.add(id(tensor))

    def _enter_shared(self, keys: Sequence[SiteKey]) -> set[SiteKey]:
        """Sum the gradients of the scope's arguments that several layers of the region read, once; what has entered by that."""
        shared = find_shared_arguments(self.tables, self.region, self.scope, keys)
        for name in shared:
            plan = InputPlan(name, bind_position(self.placement.modules[self.scope], name), True)
            inputs = self.facets[self.scope].inputs
            inputs[name] = replace(inputs[name], sums=True) if name in inputs else plan
            for record in self.tables.records:
                calls = record.module_calls.get(self.scope, [])
                self.entered |= {id(call.arguments[name]) for call in calls if name in call.arguments}
        return {key for keys in shared.values() for key in keys}

    def _enter_raw(self, key: SiteKey) -> None:
        """Sum the gradient of what a raw column site reads: arguments of its module, outputs of whole sites in it."""
        for record in self.tables.records:
            for call in record.sites[key].calls if key in record.sites else []:
                owner = call.modules[-1]
                module = self.placement.modules[owner]
                for module_call in record.module_calls[owner]:
                    given = {n: t for n, t in module_call.arguments.items() if self._carries(record, t)}
                    reached = self._reached(record, call.x, list(given.values()))
                    for name, tensor in [item for item, hit in zip(given.items(), reached, strict=True) if hit is not None]:
                        if not self._is_local(record, tensor):
                            plan = InputPlan(name, bind_position(module, name), True)
                            inputs = self.facets[owner].inputs
                            inputs[name] = replace(inputs[name], sums=True) if name in inputs else plan
                            self.entered.add(id(tensor))
                self._sum_between(record, call.x, owner)
                for other, site in record.sites.items():
                    inside = [c for c in site.calls if owner in c.modules]
                    if not inside or other in self.region.cols:
                        continue
                    for source, grad in zip(inside, self._reached(record, call.x, [c.y for c in inside]), strict=True):
                        if grad is not None:
                            mask = self.region.enters.setdefault(other, torch.zeros(site.out_size, dtype=torch.bool))
                            mask |= columns(grad, source.y_axes).ne(0).any(0)

    def _sum_between(self, record, target: Tensor, owner: str) -> None:
        """Parameters inside `owner` that `target` depends on lie between where it enters and where it is split."""
        shadow, prefix = self.tables.shadow, f"{owner}." if owner else ""
        names = [
            n for n in shadow.parameters if n.startswith(prefix) and not shadow.leaf(n).is_meta and shadow.leaf(n).requires_grad
        ]
        for name, grad in zip(names, self._reached(record, target, [shadow.leaf(n) for n in names]), strict=True):
            if grad is not None:
                self._sum(name)

    def _reached(self, record, target: Tensor, at: list[Tensor]) -> list[Tensor | None]:
        """Gradients of `target` at the tensors `at`, None where there is nothing but zeros."""
        grads = self.tables.pull(record, [target], [self.tables.random_like(target)], at)
        return [g if g is not None and bool(g.ne(0).any()) else None for g in grads]

    def _reduce_late(self, raw: Sequence[SiteKey]) -> str:
        """Add up the ranks' parts where the module that owns the raw row sites returns; that module's name."""
        owner = self._common_module(raw)
        self._enter_module(owner)
        outputs: set[int] = set()
        for record in self.tables.records:
            rows = [call.y for key in raw if key in record.sites for call in record.sites[key].calls]
            for call in record.module_calls.get(owner, []):
                for index, value in enumerate(call.outputs):
                    if not value.requires_grad:
                        continue
                    grads = self.tables.pull(record, [value], [self.tables.random_like(value)], rows)
                    if any(g is not None and bool(g.ne(0).any()) for g in grads):
                        outputs.add(index)
                        self._add_once(record, owner, value)
        self.facets[owner].outputs |= outputs
        for key in self.region.rows:
            if key not in raw and all(owner in call.modules for call in self.placement.calls([key])):
                raise PlanError(f"{key[0]} reduces inside {owner}, which reduces too")
        return owner

    def _add_once(self, record, owner: str, value: Tensor) -> None:
        """What reaches the owner's output past the rows: Parameters are added on one rank, outputs of whole sites enter."""
        shadow, prefix = self.tables.shadow, f"{owner}."
        names = [
            n for n in shadow.parameters if n.startswith(prefix) and shadow.leaf(n).requires_grad and not shadow.leaf(n).is_meta
        ]
        grads = self.tables.pull(record, [value], [self.tables.random_like(value)], [shadow.leaf(n) for n in names])
        weights = {name for key in self.region.rows for name in self.tables.sites[key].sources}  # used before the sum
        for name, grad in zip(names, grads, strict=True):
            if grad is not None and name not in weights and bool(grad.ne(0).any()):
                for holder, leaf in self.placement.holders(name):
                    if leaf not in self.facets[holder].shards:
                        self.facets[holder].once.add(leaf)
        for key, site in record.sites.items():
            inside = [c for c in site.calls if owner in c.modules]
            if not inside or key in self.region.sites:
                continue
            for call, grad in zip(
                inside, self.tables.pull(record, [value], [self.tables.random_like(value)], [c.y for c in inside]), strict=True
            ):
                if grad is not None and bool(grad.ne(0).any()):
                    mask = self.region.enters.setdefault(key, torch.zeros(site.out_size, dtype=torch.bool))
                    mask |= columns(grad, call.y_axes).ne(0).any(0)

    def _enter_whole_sites(self) -> None:
        """Columns of whole sites inside the scope that reach the rows: their gradient is summed at the site's output."""
        for key, mask in self.region.enters.items():
            calls = self.placement.calls([key])
            if not all(self.scope in call.modules or not self.scope for call in calls):
                continue  # it comes in as an argument, which enters
            if not self.placement.is_layer(key) or any(call.y_axes != (-1,) for call in calls):
                raise PlanError(f"the output of {key[0]} enters {self.scope or 'the model'}, but it is no layer of its own")
            for owner, _ in self.placement.holders(key[0]):
                facets = self.facets[owner]
                facets.columns = mask.clone() if facets.columns is None else facets.columns | mask
