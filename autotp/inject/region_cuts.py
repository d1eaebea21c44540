"""Cuts what one region holds: which slices of its sites, of their biases and of every other tensor each rank has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from ..errors import PlanError
from ..layers.attention import attention_shards
from ..shard import Shard
from .indices import choose_dim, no_support, product_cut, project
from .record import SiteKey
from .regions import FoundRegion
from .tables import select_columns, select_weights

if TYPE_CHECKING:
    from .placement import Facets, Placement

SIZES = (("in_features", "in_channels", "nx"), ("out_features", "out_channels", "nf"))  # what a layer calls its widths

Supports = dict[str, list[list[Tensor]]]  # name -> rank -> dim -> bool


class RegionCuts:
    """The slices of one region, noted in the facets of the modules that hold them."""

    supports: Supports  # what `_pull_supports` found

    def __init__(self, placement: Placement, region: FoundRegion, facets: dict[str, Facets], name: str) -> None:
        self.placement, self.tables, self.region, self.facets, self.name = placement, placement.tables, region, facets, name
        self.tp_size = placement.tp_size
        self.scope = placement.scope(region)

    def _deal_attention(self) -> None:
        """torch's own attention, by the rule that it has: heads are dealt.

        Raises:
            PlanError: no rank may have a part of a head.
        """
        module = self.placement.modules[self.scope]
        assert isinstance(module, nn.MultiheadAttention)
        (held,) = self.region.rows.values() if len(self.region.rows) == 1 else (None,)
        if held is None or any(len(h) % module.head_dim for h in held):
            raise PlanError(f"{self.scope}: {len(self.region.rows)} row(s) of {module.num_heads} heads can't be dealt by heads")
        facets = self.facets[self.scope]
        facets.style = "multihead_attention"
        facets.shards = attention_shards(module, [len(h) // module.head_dim for h in held], self.scope)

    def _cut_sites(self) -> None:
        for key, held in self.region.rows.items():
            site = self.tables.sites[key]
            self._cut(key[0], product_cut(site.shape, site.in_dims, held, key[0]))
            self._cut_derived(key, held, 0)
            if self.placement.is_layer(key):
                self._set_style(key, "rowwise")
        for key, held in self.region.cols.items():
            site = self.tables.sites[key]
            self._cut(key[0], product_cut(site.shape, site.out_dims, held, key[0]))
            self._cut_derived(key, held, 1)
            for bias in site.biases:  # as its columns, also where softmax hides it (a bias of keys)
                self._cut(bias, Shard.from_indices((site.out_size,), 0, [h.tolist() for h in held]))
            if self.placement.is_layer(key):
                self._set_style(key, "embedding_colwise_local" if site.kind == "embedding" else "colwise")

    def _cut_derived(self, key: SiteKey, held: Sequence[Tensor], side: int) -> None:
        """With a Parameter whose weight is computed: masks of its shape, and the inputs (0) or outputs (1) its layer says."""
        site, shadow = self.tables.sites[key], self.tables.shadow
        for name, buffer in shadow.model.named_buffers():
            if name in site.sources and not buffer.requires_grad and tuple(buffer.shape) == site.shape:
                self._cut(name, product_cut(site.shape, site.out_dims if side else site.in_dims, held, name))
        for owner in {call.modules[-1] for call in self.placement.calls([key])} if site.sources else ():
            module, size = self.placement.modules[owner], site.out_size if side else site.in_size
            for name in SIZES[side] if any(name.startswith(f"{owner}.") for name in site.sources) else ():
                if module.__dict__.get(name) == size:
                    self.facets[owner].attrs[name] = tuple(map(len, held))

    def _cut(self, name: str, shard: Shard) -> None:
        for owner, leaf in self.placement.holders(name):
            held = self.facets[owner].shards.setdefault(leaf, shard)
            if held != shard:
                raise PlanError(f"{name} would be cut in two ways")

    def _set_style(self, key: SiteKey, style: str) -> None:
        for owner, _ in self.placement.holders(key[0]):
            self.facets[owner].style = style

    def _pull_supports(self) -> Supports:
        """For every Parameter and buffer under the scope that is no site: per rank and dim, which indices its columns use."""
        shadow, prefix = self.tables.shadow, f"{self.scope}." if self.scope else ""
        known = set(self.placement.site_parameters)  # and biases, which follow the columns or enter with them
        for key in (*self.region.cols, *self.region.enters):
            known |= self.tables.sites[key].biases
        names = [n for n in shadow.parameters if n.startswith(prefix) and n not in known]
        tensors = {n: shadow.leaf(n) for n in names if not shadow.leaf(n).is_meta and shadow.leaf(n).is_floating_point()}
        tensors |= {n: b for n, b in shadow.model.named_buffers() if n.startswith(prefix) and b.requires_grad}
        tensors = {n: t for n, t in tensors.items() if t.requires_grad}
        found: Supports = {}
        for rank in range(self.tp_size):
            for record in self.tables.records:
                for name, grad in zip(tensors, self._pull(record, rank, list(tensors.values())), strict=True):
                    if grad is not None and bool(grad.ne(0).any()):
                        per_rank = found.setdefault(name, [no_support(grad) for _ in range(self.tp_size)])
                        per_rank[rank] = [a | b for a, b in zip(per_rank[rank], project(grad), strict=True)]
        return found

    def _pull(self, record, rank: int, at: list[Tensor]) -> list[Tensor | None]:
        targets, grads = [], []
        for key, held in self.region.rows.items():
            for call in record.sites[key].calls if key in record.sites else []:
                targets.append(call.x)
                grads.append(select_columns(self.tables.random_like(call.x), call, held[rank]))
                if call.op is not None:  # which of what its weight is computed from its own columns use
                    targets.append(call.op.weight)
                    grads.append(select_weights(self.tables.random_like(call.op.weight), call, held[rank]))
        return self.tables.pull(record, targets, grads, at)

    def _cut_parameters(self) -> None:
        """Slice what the ranks use different parts of; sum the gradient of what they all use."""
        for name, per_rank in self.supports.items():
            shape = tuple(len(mask) for mask in per_rank[0])
            dim = choose_dim(per_rank)
            if dim is not None:
                held = [per_rank[rank][dim].nonzero().flatten().tolist() for rank in range(self.tp_size)]
                self._cut(name, Shard.from_indices(shape, dim, held))
            elif name in self.placement.parameters:
                self._sum(name)

    def _sum(self, name: str) -> None:
        for owner, leaf in self.placement.holders(name):
            self.facets[owner].summed.add(leaf)
